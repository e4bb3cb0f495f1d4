"""Recorded runs of a real model: written as Parquet, read into a store, and the demo that tunes on them.

A recording is a folder with three files. ``questions.parquet`` holds each question once, ``recorded.parquet`` what each
run got for each of its questions (a run is one arm of one model at one number of requests in flight), and ``runs.json``
who was asked, the budgets, and what each run took. `fill` puts one model of it into a store, which then holds what
``calib collect`` would have left there; everything else works on that.

Leaves to others: how ``data/recorded`` was made (``data/reference/record.py``), tuning (`calib.tuning`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calib import show
from calib.demo import Narrator
from calib.engine.base import Answer, EngineInfo
from calib.errors import CalibError
from calib.policy import Policy
from calib.questions import Question
from calib.resources import find
from calib.store import Answered, Store
from calib.target import parse_targets

__all__ = ["Recording", "Row", "fill", "open_recording", "run", "write_recorded"]

FOLDER = "data/recorded"
MODEL = "main"
"""The model whose answers all others share."""

DEMO_MODEL, CONCURRENCY, ARMS = "large", 8, ("base", "draft")
"""What the demo tunes on: where speculation pays."""

TARGET = "p90<2s"
"""What it tunes for."""

_QUESTIONS, _OUTCOMES, _RUNS = "questions.parquet", "recorded.parquet", "runs.json"


# --- the files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Row:
    """What one question got in one run.

    Attributes
    ----------
    model, arm : str
    concurrency : int
        Requests in flight.
    question : Question
    answer : Answer
        Of both systems, at all budgets of the recording.
    """

    model: str
    arm: str
    concurrency: int
    question: Question
    answer: Answer


@dataclass(frozen=True, eq=False)
class Recording:
    """What is in a folder.

    Attributes
    ----------
    folder : Path
    budgets : tuple of int
        Think budgets, tokens.
    engines : mapping of str to EngineInfo
        Who answered, by model.
    runs : sequence of mapping
        What each run took: ``model``, ``arm``, ``concurrency``, ``asked``, ``seconds``, ``thought_tokens_per_s``,
        ``system1_per_s``, ``acceptance_length`` and others.
    about : mapping
        Hardware, versions, flags and date.
    """

    folder: Path
    budgets: tuple[int, ...]
    engines: Mapping[str, EngineInfo]
    runs: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any]

    def rows(self, model: str) -> list[Row]:
        """All rows of one model, in the order in which they were made.

        Raises
        ------
        CalibError
            A model that is not in it.
        """
        if model not in self.engines:
            raise CalibError(f"{self.folder} holds no model {model!r}; there are: {', '.join(self.engines)}")
        told = pq.read_table(self.folder / _QUESTIONS).to_pylist()
        questions = {row["id"]: Question(**{**row, "options": tuple(row["options"])}) for row in told}
        table = pq.read_table(self.folder / _OUTCOMES, filters=[("model", "=", model)])
        return [_row(row, questions[row["id"]], self.budgets) for row in table.to_pylist()]


def _row(row: Mapping[str, Any], question: Question, budgets: tuple[int, ...]) -> Row:
    answer = Answer(
        p1=_distribution(row["p1"]),
        t1=row["t1"],
        budgets=budgets,
        p2=_distribution(np.reshape(row["p2"], (len(budgets), len(question.options)))),
        tokens=np.array(row["tokens"], dtype=np.int64),
        finished=np.array(row["finished"], dtype=bool),
        t2=np.array(row["t2"], dtype=np.float64),
        label_mass2=np.full(len(budgets), np.nan),
    )
    return Row(row["model"], row["arm"], row["concurrency"], question, answer)


def _distribution(values: Any) -> np.ndarray:
    """Rows that sum to 1 again after float32."""
    p = np.array(values, dtype=np.float64)
    normalised: np.ndarray = p / p.sum(axis=-1, keepdims=True)
    return normalised


def open_recording(folder: str | os.PathLike[str] | None = None) -> Recording:
    """Open the recording that ships with calib, or another one.

    Raises
    ------
    CalibError
        Files that are missing.
    """
    path = find(FOLDER) if folder is None else Path(folder)
    for name in (_QUESTIONS, _OUTCOMES, _RUNS):
        if not (path / name).is_file():
            raise CalibError(f"{path} is no recording: {name} is missing; data/reference/record.py writes one")
    told = json.loads((path / _RUNS).read_text())
    engines = {name: EngineInfo(**info) for name, info in told["models"].items()}
    return Recording(path, tuple(told["budgets"]), engines, told["runs"], told["about"])


def write_recorded(
    folder: Path,
    questions: Sequence[Question],
    rows: Sequence[Row],
    runs: Sequence[Mapping[str, Any]],
    engines: Mapping[str, EngineInfo],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a recording; each file appears whole or not at all.

    Parameters
    ----------
    folder : Path
        Made when missing.
    questions : sequence of Question
    rows : sequence of Row
        All at the same budgets.
    runs : sequence of mapping
        What each run took.
    engines : mapping of str to EngineInfo
        Who answered, by model.
    about : mapping, optional
        Hardware, versions, flags and date.
    """
    folder.mkdir(parents=True, exist_ok=True)
    budgets = next(iter(rows)).answer.budgets
    asked = {row.question.id for row in rows}
    texts = [_texts(question) for question in questions if question.id in asked]
    outcomes = pa.table(
        {
            "model": pa.array([row.model for row in rows]).dictionary_encode(),
            "arm": pa.array([row.arm for row in rows]).dictionary_encode(),
            "concurrency": pa.array([row.concurrency for row in rows], pa.int16()),
            "id": pa.array([row.question.id for row in rows]).dictionary_encode(),
            "p1": _lists(rows, lambda answer: answer.p1, pa.float32()),
            "t1": pa.array([row.answer.t1 for row in rows], pa.float32()),
            "p2": _lists(rows, lambda answer: answer.p2.ravel(), pa.float32()),
            "tokens": _lists(rows, lambda answer: answer.tokens, pa.int16()),
            "finished": _lists(rows, lambda answer: answer.finished, pa.bool_()),
            "t2": _lists(rows, lambda answer: answer.t2, pa.float32()),
        }
    )
    models = {
        name: {
            "model": info.model,
            "identity": dict(info.identity),
            "threshold": info.threshold,
            "mix": info.mix,
            "thinks_about_scores": info.thinks_about_scores,
        }
        for name, info in engines.items()
    }
    told = {"budgets": list(budgets), "models": models, "runs": list(runs), "about": dict(about or {})}
    _replace(folder / _QUESTIONS, lambda path: pq.write_table(pa.Table.from_pylist(texts), path, compression="zstd"))
    _replace(folder / _OUTCOMES, lambda path: pq.write_table(outcomes, path, compression="zstd", compression_level=12))
    _replace(folder / _RUNS, lambda path: path.write_text(json.dumps(told, indent=1) + "\n"))


def _texts(question: Question) -> dict[str, Any]:
    wanted = ("id", "dataset", "kind", "state", "question", "options", "answer")
    row = asdict(question)
    return {name: list(row[name]) if name == "options" else row[name] for name in wanted}


def _lists(rows: Sequence[Row], part: Callable[[Answer], Any], kind: pa.DataType) -> pa.Array:
    return pa.array([np.asarray(part(row.answer)).tolist() for row in rows], pa.list_(kind))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# --- into a store -----------------------------------------------------------------------------------------------------


def fill(store: Store, model: str = MODEL, recording: Recording | None = None, *, timed_at: int | None = None) -> str:
    """Put one recorded model into a store; its fingerprint.

    Parameters
    ----------
    store : Store
    model : str
    recording : Recording, optional
        The one that ships with calib when left out.
    timed_at : int, optional
        Only the questions that every arm was timed on at this many requests in flight.

    Raises
    ------
    CalibError
        No recording, or a model that is not in it.
    """
    recording = open_recording() if recording is None else recording
    rows = recording.rows(model)
    if timed_at is not None:
        timed: dict[str, set[str]] = {row.arm: set() for row in rows}
        for row in rows:
            if row.concurrency == timed_at:
                timed[row.arm].add(row.question.id)
        everywhere = set.intersection(*timed.values())
        rows = [row for row in rows if row.question.id in everywhere]
    with store.transaction():
        store.add_questions(list({row.question.id: row.question for row in rows}.values()))
        fingerprint = store.register_model(recording.engines[model])
        store.write(fingerprint, [Answered(row.question, row.arm, row.answer, row.concurrency) for row in rows])
    return fingerprint


# --- the demo ---------------------------------------------------------------------------------------------------------


def run(folder: str, target: str = TARGET, *, as_json: bool = False) -> None:
    """Tune on the recorded runs, without any server; prints one table and what to type next.

    Parameters
    ----------
    folder : str
        For the store; made when missing.
    target : str
        What to tune for.
    as_json : bool, default False
        Print one JSON document instead of the table.

    Raises
    ------
    CalibError
        No recording, a folder that cannot be made, or a target that no policy meets (exit code 3).
    """
    started = time.monotonic()
    parse_targets(target)
    recording, out = open_recording(), Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibError(f"--folder {out}: {error.strerror or error}; name a folder that can be made") from None
    path = out / "recorded.db"
    for old in out.glob("recorded.db*"):
        old.unlink()
    say = Narrator()
    say(
        f"what was recorded with {recording.about['hardware'].partition(' (')[0]}: model {DEMO_MODEL}, arms "
        f"{' and '.join(ARMS)} at {CONCURRENCY} requests in flight, on the questions that both were timed on"
    )
    with Store.open(path) as store:
        fill(store, DEMO_MODEL, recording, timed_at=CONCURRENCY)
    where = ("--concurrency", str(CONCURRENCY), "--trials", "0", "--store", str(path))
    say(f"the best policy inside {target}, and how far to trust it")
    tuned = say.calib_json("optimize", "--target", target, *where)
    if tuned["policy"] is None:
        if as_json:
            show.echo_json({"optimize": tuned})
        raise CalibError(f"no policy meets {target}; relax it, or see: calib why --store {path}", exit_code=3)
    chosen = Policy.from_dict(tuned["policy"]).arm
    each = {
        arm: tuned
        if arm == chosen
        else say.calib_json("optimize", "--target", target, "--arm", arm, "--name", f"best-{arm}", *where)
        for arm in ARMS
    }
    rows = _rows(tuned, each)
    seconds = time.monotonic() - started
    if as_json:
        show.echo_json({"rows": rows, "optimize": tuned, "seconds": seconds})
        return
    table = [[row["name"], show.policy_line(Policy.from_dict(row["policy"])), *_cells(row)] for row in rows]
    columns = ["on held-out questions", "policy", "accuracy", "think rate", "p50", "p90", "p99"]
    click.echo()
    title = f"{tuned['test']['n']} test questions, target {target}  [recorded with a real model]"
    show.table(columns, table, left=2, title=title)
    click.echo()
    click.echo(f"verdict: {tuned['verdict']}   policy: {show.policy_line(Policy.from_dict(tuned['policy']))}")
    click.echo(f"done in {seconds:.0f} s. Type next:")
    click.echo(f"  calib why --store {path} --concurrency {CONCURRENCY}")
    click.echo(f"  calib optimize --store {path} --concurrency {CONCURRENCY} --target 'accuracy>=85%' --minimize p90")
    click.echo("  less reports/reference.md")


_COLUMNS = ("accuracy", "think_rate", "p50", "p90", "p99")


def _rows(tuned: Mapping[str, Any], each: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Baselines and tuned policies on the test questions."""
    base = tuned["baselines"]
    named = [("System 1 alone", base["system1"]), ("default", base["default"]), ("always think", base["always_think"])]
    named += [(f"tuned, {arm}", document) for arm, document in each.items() if document["policy"] is not None]
    return [
        {"name": name, "policy": part["policy"], **{key: part["test"][key]["value"] for key in _COLUMNS}}
        for name, part in named
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    accuracy, think_rate, *latency = (row[key] for key in _COLUMNS)
    return [show.percent(accuracy), show.percent(think_rate), *(show.seconds(value) for value in latency)]
