"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "calib", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("calib")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real recorded data, from ``CALIB_SHARED`` or beside the checkout; the test skips without it."""
    named = os.environ.get("CALIB_SHARED")
    path = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip(f"no recorded data at {path}; set CALIB_SHARED to the folder that holds realdata/")
    return path
