"""The reference model that ships in ``data/reference``: its prompts and questions. That folder is no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from calib.questions import Question

FOLDER = Path(__file__).parent.parent / "data" / "reference"
PROMPT = FOLDER / "prompt.toml"
"""As the model was trained."""


def load(name: str) -> Any:
    """A module of that folder; they import each other by their plain names."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def questions(per_task: int, *, seed: int = 0, only: tuple[str, ...] = ()) -> list[Question]:
    """``per_task`` questions of each task in turn, held out from the model's training."""
    found: list[Question] = load("write_questions").questions(per_task, seed=seed, only=only)
    return found
