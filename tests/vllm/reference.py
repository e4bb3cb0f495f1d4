"""Questions of the small trained model, made by the tasks that lie beside it."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

from calib.questions import NOUL_OPTIONS, Question

PROMPT = Path(__file__).with_name("reference_prompt.toml")
"""As the model was trained."""


def reference_questions(shared: Path, n: int, *, seed: int = 9000, without: tuple[str, ...] = ()) -> list[Question]:
    """Questions of the reference model's ten tasks in turn, all told apart by ``seed``.

    Parameters
    ----------
    shared : Path
        Folder that holds ``reference/tasks.py``.
    n : int
    seed : int
        The questions of two seeds that are at least ``n`` apart are other ones.
    without : tuple of str
        Tasks to leave out.
    """
    spec = importlib.util.spec_from_file_location("reference_tasks", shared / "reference" / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    tasks: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tasks)
    families = [make for make in tasks.FAMS if make.__name__ not in without]
    questions = []
    for i in range(n):
        task = families[i % len(families)](random.Random(seed + i))
        noul = task["kind"] == "noul"  # there yes stands first, here false
        options = NOUL_OPTIONS if noul else tuple(task["options"])
        answer = 1 - task["answer"] if noul else task["answer"]
        dataset, kind, state, asked = (task[name] for name in ("dataset", "kind", "state", "question"))
        questions.append(Question(str(seed + i), dataset, kind, state, asked, options, answer))
    return questions
