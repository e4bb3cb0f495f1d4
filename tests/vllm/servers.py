"""Real vLLM servers on the CPU: started, waited for, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HERE", "Server", "serving"]

HERE = Path(__file__).parent
READY_SECONDS, STOP_SECONDS = 180.0, 30.0


@dataclass(frozen=True)
class Server:
    """A running server: its address, and the flags of ``serve_tiny.py serve`` that it was started with."""

    url: str
    flags: tuple[str, ...]


@contextmanager
def serving(python: Path, folder: Path, flags: tuple[str, ...], log: Path) -> Iterator[Server]:
    """Serve a model's folder until the block ends.

    Parameters
    ----------
    python : Path
        Of the environment that holds vLLM.
    folder : Path
    flags : tuple of str
        Of ``serve_tiny.py serve``.
    log : Path
        Gets what the server says.

    Raises
    ------
    RuntimeError
        The server ended or was not ready in time; with the end of its log.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command: list[str | Path] = [python, HERE / "serve_tiny.py", "serve", folder, "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        if not _ready(process, port):
            raise RuntimeError(f"no vLLM within {READY_SECONDS:g} s; the end of its log:\n{log.read_text()[-3000:]}")
        yield Server(f"http://127.0.0.1:{port}", flags)
    finally:
        _stop(process)


def _ready(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
