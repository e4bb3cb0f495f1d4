"""How long it takes to read and check a question set of the size of a published index."""

from __future__ import annotations

import json
import random

import pytest

from calib.questions import read_questions, split_key, split_position

N = 33_846


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    rng = random.Random(0)
    words = ["alpha", "river", "seven", "matrix", "don't", "Zürich", "answer", "because"]

    def text(n):
        return " ".join(rng.choices(words, k=n))

    path = tmp_path_factory.mktemp("benchmark") / "q.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for i in range(N):
            options = [f"{j} {text(5)}" for j in range(rng.randint(4, 18))]
            record = {"id": i, "dataset": f"d{i % 10}", "kind": "choice", "question": text(40), "options": options}
            stream.write(json.dumps(record | {"answer": rng.randrange(len(options))}) + "\n")
    return path


def test_read_questions(benchmark, path):
    questions = benchmark.pedantic(read_questions, args=(path,), rounds=3, warmup_rounds=1)
    assert len(questions) == N


def test_split_positions(benchmark, path):
    questions = read_questions(path)
    positions = benchmark.pedantic(lambda: [split_position(split_key(q)) for q in questions], rounds=3)
    assert sum(position < 0.3 for position in positions) == pytest.approx(0.3 * N, rel=0.03)
