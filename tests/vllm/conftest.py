"""Real vLLM servers on the CPU, each started once; everything here skips where vLLM is not installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference import FOLDER as REFERENCE
from tests.vllm.servers import HERE, Server, serving


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
def server(
    request: pytest.FixtureRequest, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of what the test's parameter names: ``tiny`` or ``main`` (the reference model), and flags.

    A test names it by ``parametrize("server", ["tiny --raw"], indirect=True)``, with no other argument in that call:
    then it is a parameter of the session, and pytest runs all tests of one server together, whatever their files, and
    stops it before it starts the next. Two cores hold one.
    """
    name, *flags = request.param.split()
    folder = request.getfixturevalue("tiny_model") if name == "tiny" else REFERENCE / name
    with serving(vllm_python, folder, tuple(flags), tmp_path_factory.mktemp("log") / "vllm.log") as running:
        yield running
