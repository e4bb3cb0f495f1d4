"""Texts to files: all of them whole, or none at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from calib.errors import CalibError

__all__ = ["write_atomically"]


def write_atomically(files: Mapping[Path, str]) -> None:
    """Write texts beside their places first, then rename all: a full disk or a crash leaves no half file.

    A link in the place of a file is replaced and not followed.

    Raises
    ------
    CalibError
        Naming the file that cannot be written; the old files stay.
    """
    staged: list[tuple[str, Path]] = []
    path = next(iter(files), Path())
    try:
        for path in files:
            if path.is_dir() and not path.is_symlink():
                raise CalibError(f"{path} is a folder, where a file has to be; name a file, or move it away")
        for path, content in files.items():
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            staged.append((name, path))
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o644)  # noqa: PTH101 - mkstemp makes it private; a server of another user reads it
        for name, path in staged:
            os.replace(name, path)  # noqa: PTH105 - the pair of names is what is at hand
    except OSError as error:
        raise CalibError(f"{path}: cannot be written ({error.strerror or error})", exit_code=1) from None
    finally:
        for name, _ in staged:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108
