"""The reference model's tasks and question writer, which lie in ``data/reference`` and are no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "reference"


def load(name: str) -> Any:
    """A module of that folder; they import each other by their plain names."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
