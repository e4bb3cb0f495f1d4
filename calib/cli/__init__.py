"""The command line: options, one call and its output for each command.

Heavy imports stand inside the commands, so that ``calib --help`` is instant. The modules add their commands in the
order of the flow, which is the order in which the help lists them.
"""

from calib.cli import collecting, tuning, showing, serving  # noqa: F401, I001 - in the order of the help
from calib.cli.base import cli, main

__all__ = ["cli", "main"]
