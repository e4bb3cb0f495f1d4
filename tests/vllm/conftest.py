"""Real vLLM servers on the CPU, started one after another; everything here skips where vLLM is not installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
READY_SECONDS, STOP_SECONDS = 180.0, 30.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: starts a real vLLM server on the CPU (tests/vllm/install.sh)")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of the environment that holds vLLM."""
    venv = Path(os.environ.get("CALIB_VLLM_VENV", "/tmp/vllm-venv"))
    python = venv / "bin" / "python"
    if not (venv / "bin" / "vllm").is_file():
        pytest.skip(f"no vLLM at {venv}: install it by tests/vllm/install.sh, or set CALIB_VLLM_VENV")
    return python


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([vllm_python, HERE / "serve_tiny.py", "make", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def reference_model(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small trained model that really thinks."""
    archive = shared / "reference" / "main.tgz"
    if not archive.is_file():
        pytest.skip(f"no reference model at {archive}")
    folder = tmp_path_factory.mktemp("reference")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "main"


@pytest.fixture(scope="session")
def serve(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Serves a model folder and gives its address; a server of another one is stopped, for two cores hold one."""
    running: list[subprocess.Popen[bytes]] = []
    serving: dict[tuple[Path | str, ...], str] = {}

    def stop() -> None:
        serving.clear()
        while running:
            process = running.pop()
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def serve(folder: Path, *flags: str) -> str:
        if (folder, *flags) in serving and running[0].poll() is None:
            return serving[folder, *flags]
        stop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        log = tmp_path_factory.mktemp("log") / "vllm.log"
        command = [vllm_python, HERE / "serve_tiny.py", "serve", folder, "--port", str(port), *flags]
        with log.open("wb") as output:
            running.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True))
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if running[0].poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return serving.setdefault((folder, *flags), f"http://127.0.0.1:{port}")
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        stop()
        pytest.fail(f"vLLM did not start within {READY_SECONDS:g} s; the end of its log:\n{log.read_text()[-3000:]}")

    yield serve
    stop()
