"""The seam to a model: the `Engine` protocol and one module per way to ask.

Only this package knows wire formats. Everything before it sees a `Question`, everything after it an `Answer`.
"""

from calib.engine.base import Answer, AskFailed, Engine, EngineInfo, PartlyFailed, ServerBusy

__all__ = ["Answer", "AskFailed", "Engine", "EngineInfo", "PartlyFailed", "ServerBusy"]
