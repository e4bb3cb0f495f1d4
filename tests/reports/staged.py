"""Makes ``reports/staged.md``: what a staged collection without targets costs and loses, on recorded data.

Run as ``python -m tests.reports.staged --shared ../shared --out reports/staged.md``; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import calib
from calib import staged
from calib.collect import collect
from calib.optimise import optimum
from calib.policy import evaluate
from calib.store import Store, load_outcomes
from tests.replay import BUDGETS, ReplayEngine, asked, recorded

COMMAND = "python -m tests.reports.staged --shared ../shared --out reports/staged.md"
RECORDINGS = ("h200_base_c128", "h200_draft_c128")
SPLITS, DRAWS, MOST = 24, 4, 1500
ONE_BUDGET = (100_000,)
TEST_SHARE = 0.3
POINT = 100

TEXT = """
Written {when} by `{command}`, calib {version}, Python {python}, {cores} cores, in {minutes:.0f} minutes.

Each row is one whole staged collection of recorded questions without targets. The first takes the questions as they
are; another salt in the texts gives another split into tune and test side, and other samples. The policy is the exact
optimum of the tune side, by the thoughts that the stages asked for and by all of them. Both are scored on all questions
with all thoughts. Tokens are thinking tokens of both sides.

The stages end when more thoughts would win at most {enough} of a point with {sure} certainty, in the mean of two looks
(`calib.regret`). That rule was chosen on the data of the last table: answers of quick and slow ways to the same
multiple-choice questions, 1,500 of them drawn anew for each collection. There is less order in them, so that more of
the thoughts are asked for. The recordings of vLLM 0.25 on one H200, replayed here, had no part in that but for one
thing: that the mean of two looks counts, and not two looks in a row, was settled after the tokens of the first table
were seen.
"""


def development(shared: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Recorded questions on which the stopping rule was chosen, by name; a thought is a slow answer."""
    folder = shared / "realdata"
    mmlu = recorded(folder / "unlicensed" / "mmlu_direct_cot" / "llama3.1-8B.jsonl.gz")
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        subjects = sorted({row["id"].split(":")[0] for row in mmlu})
        some = set(rng.choice(subjects, 8, replace=False).tolist())
        rows = [row | {"dataset": row["id"].split(":")[0]} for row in mmlu if row["id"].split(":")[0] in some]
        yield "MMLU, Llama 3.1 8B", _drawn([r for r in rows if r["think_words"]], rng, "think_words")
    several = recorded(folder / "mmlu_llama13b_prompts.jsonl.gz")
    for draw in range(DRAWS):
        yield "MMLU, LLaMA 13B, ten prompts", _drawn(several, np.random.default_rng(draw), None)
    pairs = recorded(folder / "stated_probs_pairs.jsonl.gz")
    for name in ("gpt-4o", "deepseek-v3", "Meta-Llama-3.1-8B-Instruct", "claude-3-haiku-20240307"):
        for draw in range(DRAWS):
            rows = [row for row in pairs if row["s1"] == name]
            yield f"stated probabilities, {name}", _drawn(rows, np.random.default_rng(draw), None)


def _drawn(rows: Sequence[dict[str, Any]], rng: np.random.Generator, length: str | None) -> list[dict[str, Any]]:
    """At most `MOST` of the rows that hold both systems; lengths that are not known are drawn."""
    whole = [row for row in rows if row["p1"] and row["p2"]]
    chosen = [whole[i] for i in rng.permutation(len(whole))[:MOST].tolist()]
    found = []
    for row in chosen:
        tokens = int(row[length]) if length else max(1, int(rng.lognormal(5, 0.8)))
        found.append(
            {
                "dataset": row["dataset"],
                "id": f"{row['dataset']} {row['id']}",
                "answer": row["answer"],
                "p1": row["p1"],
                "p2_by_budget": {str(ONE_BUDGET[0]): row["p2"]},
                "think_tokens": tokens,
                "finished": True,
                "latency_s1": 0.05,
                "latency_s2": 0.05 + tokens / 100,
            }
        )
    return found


@dataclass(frozen=True)
class Split:
    """One collection: points of accuracy that the staged policy lacks, share of the tokens, thoughts of both sides."""

    lost: float
    tokens: float
    tune: int
    test: int
    ended: str


def progress(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


async def one(rows: Sequence[dict[str, Any]], salt: str, folder: str, budgets: Sequence[int] = BUDGETS) -> Split:
    """Collect all, collect in stages, and compare."""
    with Store.open(f"{folder}/all{salt}.db") as whole, Store.open(f"{folder}/part{salt}.db") as part:
        questions = asked(rows, salt)
        await collect(questions, {"base": ReplayEngine(rows)}, whole, budgets=budgets, concurrency=128)
        engine = ReplayEngine(rows)
        summary = await staged.collect(questions, "base", engine, part, budgets=budgets, concurrency=128)
        everything, thought = load_outcomes(whole), load_outcomes(part)
    policies = [optimum(o.split(TEST_SHARE)[0]).policy for o in (everything, thought)]
    accuracy = [evaluate(everything, policy).accuracy for policy in policies if policy is not None]
    rounds = summary.rounds
    return Split(
        lost=POINT * (accuracy[0] - accuracy[1]),
        tokens=summary.tokens / float(everything.tokens[:, -1].sum()),
        tune=sum(row.tune for row in rounds),
        test=sum(row.test for row in rounds),
        ended=summary.ended,
    )


def table(name: str, found: Sequence[Split], names: Sequence[str]) -> str:
    """Summary and each split, as Markdown."""
    lost, tokens = np.array([split.lost for split in found]), np.array([split.tokens for split in found])
    lines = [
        f"## {name}",
        "",
        f"Lost in the median {np.median(lost):.2f} points, at most {lost.max():.2f}; "
        f"{int((lost > 0.5 + 1e-9).sum())} of {len(found)} collections lose more than 0.5. "
        f"Tokens: {np.median(tokens):.1%} in the median, at most {tokens.max():.1%}.",
        "",
        "| | points lost | share of tokens | thoughts, tune | thoughts, test |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {name} | {s.lost:+.2f} | {s.tokens:.1%} | {s.tune} | {s.test} |"
            for name, s in zip(names, found, strict=True)
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=SPLITS)
    arguments = parser.parse_args()
    started = time.monotonic()
    parts = []
    for name in RECORDINGS:
        rows = recorded(arguments.shared / "reference" / f"{name}.jsonl.gz")
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for salt in ("", *map(str, range(1, arguments.splits))):
                found.append(asyncio.run(one(rows, salt, folder)))
                progress(f"{name} {salt or 'as recorded'}: {found[-1]}")
        parts.append(table(name, found, ["as recorded", *map(str, range(1, arguments.splits))]))
    names, found = [], []
    for name, rows in development(arguments.shared):
        with tempfile.TemporaryDirectory() as folder:
            found.append(asyncio.run(one(rows, "", folder, ONE_BUDGET)))
        names.append(name)
        progress(f"{name}: {found[-1]}")
    parts.append(table("Data on which the rule was chosen", found, names))
    head = TEXT.format(
        when=f"{datetime.now(UTC):%Y-%m-%d}",
        command=COMMAND,
        version=calib.__version__,
        python=platform.python_version(),
        cores=os.cpu_count(),
        minutes=(time.monotonic() - started) / 60,
        enough=staged.ENOUGH * POINT,
        sure=f"{staged.SURE:.0%}",
    )
    text = "\n\n".join(["# Staged collection: what is saved and what is lost", head.strip(), *parts]) + "\n"
    temporary = arguments.out.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(arguments.out)


if __name__ == "__main__":
    main()
