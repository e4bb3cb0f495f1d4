"""Labels that are one token each where the answer is read, found with the server's own tokeniser.

A tokeniser may merge: two newlines at the end of a prompt into one token but not in front of a letter, or an opening
bracket with the letter after it. A model that is read across such a seam sees what it never saw in training. So the
tokens in front of the label are taken from the text *with* the label, and every label must add one token to them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from calib.engine.prompts import Layout, label_pool
from calib.errors import CalibError
from calib.questions import Question

__all__ = ["LabelFinder", "Labels", "Seam"]

_AT_A_TIME = 16
_FIRST, _BLOCK = 26, 64
"""Candidates to look at before more: the first ones also show which tokens stand in front of a label."""

Tokenize = Callable[[str], Awaitable[tuple[int, ...]]]


@dataclass(frozen=True)
class Seam:
    """Where a label meets the text in front of it.

    Attributes
    ----------
    context : tuple of int
        Tokens of the text in front of the label, as they stand in front of a label.
    labels : tuple of int
        The token of each label, shape (C,).
    """

    context: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Labels:
    """One label for each option.

    Attributes
    ----------
    texts : tuple of str
        What the options are called in the prompt.
    direct, thought : Seam
        Where the answer is read without thinking, and after a thought.
    """

    texts: tuple[str, ...]
    direct: Seam
    thought: Seam


class LabelFinder:
    """Finds labels for questions, and remembers them.

    Parameters
    ----------
    tokenize : callable
        Token ids of a text, nothing added.
    direct, thought : str
        Text in front of the answer without thinking (the tail of the rendered chat), and after a thought (from the end
        mark on); what a layout begins the answer with comes behind.
    """

    def __init__(self, tokenize: Tokenize, *, direct: str, thought: str) -> None:
        self._tokenize_now = tokenize
        self._direct = direct
        self._thought = thought
        self._slots = asyncio.Semaphore(_AT_A_TIME)
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._found: dict[tuple[Layout, tuple[str, ...] | int], Labels] = {}

    async def find(self, layout: Layout, question: Question) -> Labels:
        """Labels for the options of ``question``.

        Raises
        ------
        CalibError
            The model has no such labels.
        AskFailed
            The server could not be asked.
        """
        tried = []
        for candidates in layout.candidates(question):
            n = len(question.options)
            key = (layout, n if candidates is None else candidates)
            if key not in self._found:
                labels = await self._search(layout.answer, label_pool() if candidates is None else candidates, n)
                if isinstance(labels, str):
                    tried.append(labels)
                    continue
                self._found[key] = labels
            return self._found[key]
        raise CalibError(
            f"the model has no labels for a {question.kind} question of {len(question.options)} options: each must "
            f"be one token after {layout.answer!r}, and {'; '.join(tried)}. Give labels, or another beginning of the "
            "answer, in a --prompt-template file"
        )

    async def _search(self, answer: str, candidates: Iterable[str], n: int) -> Labels | str:
        """``n`` labels from ``candidates`` in their order, or why there are not so many."""
        remaining = iter(candidates)
        texts: list[str] = []
        tokens: list[tuple[int, int]] = []
        contexts: tuple[tuple[int, ...], ...] = ()
        refused: list[str] = []
        while len(texts) < n and (block := list(islice(remaining, _BLOCK if contexts else min(n, _FIRST)))):
            fronts = (self._direct + answer, self._thought + answer)
            rows = [await asyncio.gather(*(self._tokens_of(front + text) for text in block)) for front in fronts]
            if not contexts:
                plain = [await self._tokens_of(front) for front in fronts]
                contexts = tuple(map(_context, rows, plain))
            for text, *pair in zip(block, *rows, strict=True):
                fits = all(ids[:-1] == context for ids, context in zip(pair, contexts, strict=True))
                token = (pair[0][-1], pair[1][-1])
                if fits and not any(token[0] == known[0] or token[1] == known[1] for known in tokens):
                    texts.append(text)
                    tokens.append(token)
                else:
                    refused.append(text)
        if len(texts) < n:
            shown = ", ".join(map(repr, refused[:4])) + (", ..." if len(refused) > 4 else "")
            return f"of {len(texts) + len(refused)} tried only {len(texts)} are (not {shown})"
        direct, thought = (tuple(column[:n]) for column in zip(*tokens, strict=True))
        return Labels(tuple(texts[:n]), Seam(contexts[0], direct), Seam(contexts[1], thought))

    async def _tokens_of(self, text: str) -> tuple[int, ...]:
        async with self._slots:
            if text not in self._tokens:
                self._tokens[text] = await self._tokenize_now(text)
        return self._tokens[text]


def _context(row: Sequence[tuple[int, ...]], plain: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens in front of the label that most labels share; where they are as many, those of the text alone."""
    counts = Counter(ids[:-1] for ids in row if ids)
    return max(counts, key=lambda context: (counts[context], context == plain), default=plain)
