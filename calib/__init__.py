"""Find, trust and serve the operating point of a dual-system decision model.

The flow, one module per stage::

    questions -> collect -> store -> Outcomes -> policy -> optimise, studies -> export -> serve -> verify

Nothing is imported here: ``calib --help`` and the pure modules stay light.
"""

__version__ = "0.1.0"
