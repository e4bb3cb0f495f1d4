"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "calib", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("calib")

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        # A shell starts its background jobs so, nohup its command, and children inherit it: what a test sends to its
        # child would not reach it.
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real recorded data, from ``CALIB_SHARED`` or beside the checkout; the test skips without it."""
    named = os.environ.get("CALIB_SHARED")
    path = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"no recorded data at {path}; set CALIB_SHARED to the folder that holds realdata/")
    return path


CHROMIUM = os.environ.get("CALIB_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
_PATIENCE_MS = 60_000


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a real browser; the test skips without one."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
    if not Path(CHROMIUM).is_file():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium, or set CALIB_CHROMIUM")
    return CHROMIUM


@pytest.fixture(scope="module")
def browser(chromium, tmp_path_factory) -> Iterator[Any]:
    """A headless browser with a profile of its own; waits a minute for what a test expects, never a fixed time."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")),
            executable_path=chromium,
            args=_FLAGS,
            viewport={"width": 1440, "height": 1000},
        )
        context.set_default_timeout(_PATIENCE_MS)
        yield context
        context.close()
