"""The one exception for mistakes that the user can fix; the command line prints it without a traceback."""

__all__ = ["CalibError"]


class CalibError(Exception):
    """A mistake that the user can fix.

    The message says what is wrong (naming file and line, or the field), what was expected, and what to type next.
    The command line prints it and exits with ``exit_code``.

    Parameters
    ----------
    message : str
        The whole text for the user.
    exit_code : int, default 2
        2 for wrong usage or bad input, 1 for a failure of something outside (a server, a disk).
    """

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
