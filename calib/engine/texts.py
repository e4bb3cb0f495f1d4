"""Generated question texts for simulated models, whose answer key is a function of the text.

No benchmark text is used: a question is a made-up note from a made-up ledger. The server holds no secret, since
`answer_key` gives the right option to anyone who has the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from calib.questions import Question

__all__ = ["answer_key", "generate", "simulated_name"]

_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
_WORDS = [first + second for first in _SYLLABLES for second in _SYLLABLES]
_STRIDE = 1201
"""Coprime to the number of words: the options of a question, one stride apart, differ."""


def simulated_name(dataset: str) -> str:
    """Name of a dataset with the mark that no real question is in it."""
    return f"{dataset} (simulated)"


def answer_key(question: str, n_options: int) -> int:
    """Index of the right option: a hash of the question's text modulo the number of options.

    The same in every process and on every machine, unlike Python's own `hash`.
    """
    return int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "big") % n_options


def generate(dataset: str, kind: str, n_options: Sequence[int] | np.ndarray) -> list[Question]:
    """One question for each number of options, with distinct texts, ids and options.

    Parameters
    ----------
    dataset : str
        Name without the mark.
    kind : {"choice", "noul"}
    n_options : sequence of int, shape (N,)
        2 for noul.
    """
    slug = dataset.lower().replace(" ", "-")
    marked = simulated_name(dataset)
    start = int.from_bytes(blake2b(dataset.encode(), digest_size=4).digest(), "big")
    questions = []
    for i, n in enumerate(np.asarray(n_options).tolist()):
        at = start + 17 * i
        words = [_WORDS[(at + j * _STRIDE) % len(_WORDS)] for j in range(n)]
        place = _WORDS[(at * 7 + 3) % len(_WORDS)].capitalize()
        state = f"{marked}, note {i + 1}: the ledger of {place} has {n} open entries."
        if kind == "noul":
            text = f"{marked}, question {i + 1}: was the entry {words[0]} of {place} settled?"
            options: tuple[str, ...] = ("false", "true")
        else:
            text = f"{marked}, question {i + 1}: which entry of {place} was settled first?"
            options = tuple(words)
        questions.append(Question(f"{slug}-{i + 1:05d}", marked, kind, state, text, options, answer_key(text, n)))
    return questions
