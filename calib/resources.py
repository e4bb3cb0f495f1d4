"""Where ``studies/``, ``app/`` and ``data/`` are: inside the installed package, or beside it in a source tree."""

from __future__ import annotations

from pathlib import Path

from calib.errors import CalibError

__all__ = ["find"]

PACKAGE = Path(__file__).resolve().parent


def find(name: str) -> Path:
    """Path of a file or folder that ships with calib.

    Parameters
    ----------
    name : str
        Relative path, such as ``"data/example/questions.jsonl"``.

    Returns
    -------
    Path
        In the package (a wheel carries the folders inside ``calib/``), else in the package's parent (a source tree).

    Raises
    ------
    CalibError
        When it is in neither place: the installation is broken.
    """
    for base in (PACKAGE, PACKAGE.parent):
        path = base / name
        if path.exists():
            return path
    raise CalibError(
        f"{name} is neither in {PACKAGE} nor in {PACKAGE.parent}: the installation is incomplete. "
        "Install again: pip install --force-reinstall calib-decide",
        exit_code=1,
    )
