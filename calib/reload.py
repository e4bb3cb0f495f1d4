"""`PolicyWatch`: reads ``policy.json`` again when it changes, and keeps the old policy when the new one is no good.

Leaves to others: the form of the file (`calib.policyfile`), what is answered under it (`calib.gateway`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib.engine.base import EngineInfo
from calib.errors import CalibError
from calib.gateway import policy_version
from calib.policy import Policy
from calib.policyfile import read_policy

__all__ = ["PolicyFile", "PolicyWatch", "check_model"]

POLL_SECONDS = 0.5
_SETTLED_SECONDS = 2.0
"""A file that is younger may change once more without its time of change showing it, so it is read again."""
_MOST_BYTES = 64 * 1024 * 1024

_WRITE_ONE = "write one with: calib export best --out serve/"

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PolicyFile:
    """A ``policy.json`` as it was read.

    Attributes
    ----------
    path : Path
    policy : Policy
    document : mapping
        All that the file says: the evidence for the policy too.
    digest : str
        SHA-256 of the content.
    """

    path: Path
    policy: Policy
    document: Mapping[str, Any]
    digest: str

    @property
    def version(self) -> str:
        """Short hash of all that the policy says."""
        return policy_version(self.policy)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PolicyFile:
        """Read and check it.

        Raises
        ------
        CalibError
            Naming the file, when it is missing or holds no valid policy.
        """
        return cls.of(Path(path), _content(path))

    @classmethod
    def of(cls, path: Path, content: bytes) -> PolicyFile:
        """The policy of a content that was read; raises as `read`."""
        try:
            policy, document = read_policy(content, path)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise CalibError(f"{path}: not a policy ({error}); {_WRITE_ONE}") from None
        return cls(path, policy, document, hashlib.sha256(content).hexdigest())


def _content(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 - so many bytes and no more
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CalibError(f"{path}: {error.strerror or error}; {_WRITE_ONE}") from None
    if len(content) > _MOST_BYTES:
        raise CalibError(f"{path}: more than {_MOST_BYTES} bytes; no policy.json is that long")
    return content


def check_model(file: PolicyFile, info: EngineInfo, *, allow_other: bool = False) -> str | None:
    """Whether the policy was tuned on the model that answers.

    Parameters
    ----------
    file : PolicyFile
    info : EngineInfo
    allow_other : bool, default False
        Whether another model is taken all the same.

    Returns
    -------
    str or None
        What to tell the user: that it cannot be known, or that it is another one.

    Raises
    ------
    CalibError
        It was tuned on another one.
    """
    prints = file.document.get("fingerprints")
    tuned_on = prints.get("model") if isinstance(prints, Mapping) else None
    name = file.document.get("model")
    if tuned_on is None or tuned_on == info.fingerprint:
        return None
    if isinstance(name, str) and tuned_on == EngineInfo(name, {"imported": name}).fingerprint:
        return f"{file.path} was tuned on imported answers of {name}: whether {info.model} gives the same is not known"
    other = f"{file.path} was tuned on {name or 'a model'} ({str(tuned_on)[:12]}), and {info.model} "
    other += f"({info.fingerprint[:12]}) answers here"
    if allow_other:
        return f"{other}: what the file promises is not known to hold"
    hint = (
        "the same name: its prompt template, sampling, seed or temperatures differ. Give those of the collection "
        "(--prompt-template, --sampling, --seed, as calib collect had them)"
        if name == info.model
        else "another model. Name the server of that model"
    )
    raise CalibError(f"{other}: {hint}, tune on this one (calib collect, calib optimize), or --allow-other-model")


class _AbsentError(CalibError):
    """The file is not there."""


class PolicyWatch:
    """Follows a policy file.

    Parameters
    ----------
    file : PolicyFile
        What is in force.
    serve : callable
        Puts a policy in force; a `CalibError` refuses it, and then nothing may have changed.
    say : callable, optional
        Gets a line about each change; the log's warnings by default.

    Attributes
    ----------
    file : PolicyFile
        What is in force.
    error : str or None
        Why the newest content of the file is not in force.
    loaded_at : float
        Unix seconds when ``file`` was put in force.
    counts : dict of str to int
        Readings of a changed file that were put in force (``ok``) and that were not (``failed``).
    """

    def __init__(
        self, file: PolicyFile, serve: Callable[[PolicyFile], None], *, say: Callable[[str], None] = log.warning
    ) -> None:
        self.file = file
        self.error: str | None = None
        self.loaded_at = time.time()
        self.counts = {"ok": 0, "failed": 0}
        self._serve, self._say = serve, say
        self._stamp: tuple[int, ...] | None = None
        self._seen = file.digest
        self._one_at_a_time = asyncio.Lock()

    async def run(self) -> None:
        """Look twice a second, until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.look()

    async def look(self, *, force: bool = False) -> bool:
        """Read the file if it changed, and put its policy in force.

        Parameters
        ----------
        force : bool, default False
            Read it in any case, and count and report that.

        Returns
        -------
        bool
            Whether a policy was put in force.
        """
        async with self._one_at_a_time:
            try:
                content = await asyncio.to_thread(self._read_if_changed, force)
                if content is None or (hashlib.sha256(content).hexdigest() == self._seen and not force):
                    return False
                self._seen = hashlib.sha256(content).hexdigest()
                file = PolicyFile.of(self.file.path, content)
                self._serve(file)
            except _AbsentError as error:
                if str(error) != self.error or force:  # a file that stays away is one event
                    self._refuse(str(error))
                return False
            except CalibError as error:
                self._refuse(str(error))
                return False
            before, self.file, self.error, self.loaded_at = self.file, file, None, time.time()
            self.counts["ok"] += 1
            if before.version != file.version:
                self._say(f"{file.path}: policy {file.version} is in force now, before it {before.version}")
            elif force or before.digest != file.digest:
                self._say(f"{file.path}: read again, policy {file.version} stays in force")
            return True

    def _refuse(self, error: str) -> None:
        self.error = error
        self.counts["failed"] += 1
        self._say(f"{error}; policy {self.file.version} stays in force")

    def _read_if_changed(self, force: bool) -> bytes | None:
        try:
            status = self.file.path.stat()
        except OSError as error:
            self._stamp, self._seen = None, ""
            raise _AbsentError(f"{self.file.path}: {error.strerror or error}") from None
        # renamed into place: another inode; written in place: another time or size
        stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size)
        settled = time.time() - status.st_mtime > _SETTLED_SECONDS
        if not force and settled and stamp == self._stamp:
            return None
        self._stamp = stamp
        return _content(self.file.path)
