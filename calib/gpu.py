"""Memory of the GPUs as ``nvidia-smi`` tells it, and who uses it; nothing where there is no such program.

Leaves to others: how much a server needs (`calib.launch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Gpu", "read_gpus"]

_PATIENCE = 20.0
_GPUS = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_USERS = ("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv,noheader,nounits")
_MIB_PER_GIB = 1024


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes
    ----------
    index : int
        As nvidia-smi counts.
    uuid : str
    total, free : float
        Memory, GiB.
    users : tuple of str
        Processes that hold memory of it, one text each.
    """

    index: int
    uuid: str
    total: float
    free: float
    users: tuple[str, ...] = ()


async def read_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs that a program started with this environment sees, in its order (``CUDA_VISIBLE_DEVICES``).

    Empty without nvidia-smi, or when it fails. A GPU that does not tell its memory (one that shares the machine's, or
    one split into instances) is left out.
    """
    rows = await _query(_GPUS, environ)
    users = await _query(_USERS, environ) if rows else []
    gpus = []
    for row in rows:
        with contextlib.suppress(ValueError):
            index, uuid, total, free = row
            named = tuple(_user(user) for user in users if len(user) == 4 and user[0] == uuid)
            gpus.append(Gpu(int(index), uuid, float(total) / _MIB_PER_GIB, float(free) / _MIB_PER_GIB, named))
    return _visible(gpus, environ.get("CUDA_VISIBLE_DEVICES"))


def _user(row: list[str]) -> str:
    _, pid, name, used = row
    try:
        return f"{name} (process {pid}, {float(used) / _MIB_PER_GIB:.1f} GiB)"
    except ValueError:
        return f"{name} (process {pid})"


def _visible(gpus: list[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    if wanted is None:
        return tuple(gpus)
    found = []
    for name in (part.strip() for part in wanted.split(",")):
        match = [
            gpu for gpu in gpus if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if len(match) != 1:
            break  # as CUDA does: what follows a name that fits none is not seen
        found += match
    return tuple(found)


async def _query(arguments: tuple[str, ...], environ: Mapping[str, str]) -> list[list[str]]:
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi",
            *arguments,
            env=dict(environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return []
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _PATIENCE)
    except TimeoutError:
        return []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        return []
    return [row for row in csv.reader(output.decode("utf-8", "replace").splitlines(), skipinitialspace=True) if row]
