"""Rows of the store to `Outcomes`: which budgets to keep, whose answers to take, which seconds to estimate.

Works on whole columns: one packed array a row is joined with the others and read as one array.
Leaves to others: connections and the choice of the model (`calib.store.store`), the lines and rates (`calib.latency`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from calib.errors import CalibError
from calib.fitness import BUDGET, REPLACED
from calib.latency import RateModel, fit_line, picks, resample
from calib.outcomes import Outcomes
from calib.sampling import Sampling, presented
from calib.store import schema, staging
from calib.store.schema import ModelRow

__all__ = ["read_outcomes"]

KEPT_COVERAGE = 0.9
"""A budget is kept by default when at least this share of the best covered budget's questions have it: a few lost
questions must not cost a whole budget, and a budget that few have must not cost the other questions."""

BROKE_BUDGET = frozenset({"budget_exceeded", "ignored_thinking"})
"""Reasons of failures that say that a server did not keep a think budget."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def read_outcomes(
    conn: sa.Connection,
    model: ModelRow,
    *,
    where: str,
    datasets: Sequence[str] | None,
    budgets: Sequence[int] | None,
    arms: Sequence[str] | None,
    concurrency: int | None,
    void_passes: bool = False,
) -> Outcomes:
    """See `calib.store.load_outcomes`; ``where`` names the store in messages."""
    q = _read_questions(conn, model, where, datasets)
    grid = _read_grid(conn, model, q)
    if not grid.asked.any() and not grid.has_p1.any():
        raise CalibError(f"{where}: no answers of {model.name!r} to these questions; run: calib collect QUESTIONS")
    kept_budgets, dropped = _kept_budgets(grid, budgets, where)
    columns = np.searchsorted(grid.budgets, kept_budgets)
    shown_arms = _shown_arms(grid, arms, where)

    answers = _read_answers(conn, model, q, grid, columns)
    complete = ~np.isnan(answers.p1[:, 0]) & (answers.complete | ~grid.can_think)
    there = q.in_answered_dataset(grid)
    stands_for, planned = _stands_for(conn, model, q, complete & (answers.complete | ~grid.can_think))
    use = np.flatnonzero(complete[q.text] & there & (stands_for > 0))
    if not use.size:
        raise CalibError(
            f"{where}: no question of {model.name!r} has System 1 and all of the budgets {kept_budgets.tolist()}; "
            "name fewer budgets, or finish the collection: calib collect QUESTIONS"
        )
    text = q.text[use]
    void = (
        set()
        if void_passes
        else {(one.arm, one.concurrency, one.number) for one in staging.passes(conn, model.n) if one.state == "void"}
    )
    seconds = [
        _arm_seconds(conn, model, q, grid, answers, arm, columns, concurrency, where, void) for arm in shown_arms
    ]

    tokens = answers.tokens[text]
    unknown_tokens = int(np.isnan(tokens).any(axis=1).sum())
    p2 = answers.p2[text]
    failed = np.isnan(p2).all(axis=2) & grid.can_think[text][:, None]
    sampled_out = int((there & planned).sum()) - int(planned[use].sum())
    left_out = int(there.sum()) - use.size - sampled_out
    return Outcomes(
        p1=answers.p1[text],
        p2=p2,
        tokens=np.nan_to_num(tokens),
        finished=answers.finished[text],
        t1=np.array([s.t1[text] for s in seconds]),
        t2=np.array([s.t2[text] for s in seconds]),
        answer=q.answer[use],
        budgets=kept_budgets,
        arms=tuple(shown_arms),
        n_options=q.n_options[use],
        dataset=q.dataset[use],
        kind=q.kind[use],
        ids=q.ids[use],
        group=q.group[use],
        can_think=grid.can_think[text],
        weight=q.weight[use] * stands_for[use],
        label_mass=answers.label_mass[text],
        flaw=_flaws(conn, model, q, grid, answers, shown_arms, columns)[text],
        label_set=_label_sets(q.dataset[use], q.label_key[use]),
        split_position=q.split_position[use],
        concurrency=np.array([s.concurrency for s in seconds]),
        estimated=np.array([s.estimated[text].any(axis=0) for s in seconds]),
        simulated=model.simulated,
        model=model.name,
        fingerprint=model.fingerprint,
        default_threshold=model.threshold,
        default_mix=model.mix,
        warnings=_warnings(
            kept=kept_budgets,
            dropped=dropped,
            left_out=left_out,
            sampled_out=sampled_out,
            failed=int(failed.any(axis=1).sum()),
            unknown_tokens=unknown_tokens,
            unmeasured=[a for a, s in zip(shown_arms, seconds, strict=True) if s.elsewhere],
            asked_concurrency=concurrency,
        ),
    )


# --- questions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Questions:
    """Columns of N questions, by dataset and then as they were added, and the U texts that they are made of."""

    dataset: NDArray[np.object_]
    ids: NDArray[np.object_]
    kind: NDArray[np.object_]
    group: NDArray[np.object_]
    label_key: NDArray[np.object_]
    n_options: Ints
    answer: Ints
    weight: Floats
    split_position: Floats
    text: Ints
    """Number of each question's text, (N,)."""
    first: Ints
    """A question of each text, (U,)."""
    number: dict[bytes, int]
    """Text number by answer key."""
    picks: NDArray[np.uint64]
    """A random number of each text, the same for ever, (U,)."""

    def in_answered_dataset(self, grid: _Grid) -> Bools:
        """Questions of the datasets that this model was asked at all: the others belong to another model."""
        named = set(self.dataset[grid.touched[self.text]].tolist())
        return np.array([name in named for name in self.dataset.tolist()], dtype=bool)


def _read_questions(conn: sa.Connection, model: ModelRow, where: str, datasets: Sequence[str] | None) -> _Questions:
    q = schema.questions
    columns = (q.c.dataset, q.c.ext_id, q.c.text_key, q.c.kind, q.c.n_options, q.c.answer, q.c.weight, q.c.grp)
    statement = sa.select(*columns, q.c.split_position, q.c.label_key).order_by(q.c.n)
    if datasets is not None:
        there = set(conn.execute(sa.select(q.c.dataset).distinct()).scalars())
        unknown = sorted(set(datasets) - there)
        if unknown:
            raise CalibError(f"{where}: unknown dataset {unknown[0]!r}; there are: {', '.join(sorted(there))}")
        statement = statement.where(q.c.dataset.in_(datasets))
    rows = conn.execute(statement).all()
    if not rows:
        raise CalibError(f"{where}: holds no questions; run: calib collect QUESTIONS, or calib import FILE")
    rows = sorted(rows, key=lambda row: row[0])  # stable; by code point, whatever the database sorts by
    dataset, ids, text_key, kind, n_options, answer, weight, group, position, label_key = zip(*rows, strict=True)

    number: dict[str, int] = {}
    text = np.array([number.setdefault(key, len(number)) for key in text_key], dtype=np.int64)
    first = np.unique(text, return_index=True)[1]
    shared = np.bincount(text)[text] > 1
    own = [
        g if g is not None else (key if several else f"{d}\0{i}")
        for g, key, several, d, i in zip(group, text_key, shared.tolist(), dataset, ids, strict=True)
    ]
    return _Questions(
        dataset=np.array(dataset, dtype=object),
        ids=np.array(ids, dtype=object),
        kind=np.array(kind, dtype=object),
        group=np.array(own, dtype=object),
        label_key=np.array(label_key, dtype=object),
        n_options=np.array(n_options, dtype=np.int64),
        answer=np.array(answer, dtype=np.int64),
        weight=np.array(weight, dtype=np.float64),
        split_position=np.array(position, dtype=np.float64),
        text=text,
        first=first,
        number={schema.answer_key(key, model.fingerprint): i for key, i in number.items()},
        picks=np.array([int(key[:16], 16) for key in number], dtype=np.uint64),
    )


def _label_sets(dataset: NDArray[np.object_], label_key: NDArray[np.object_]) -> Ints:
    """Number of the fixed list of options of each question's dataset; -1 where lists differ or are unknown."""
    lists: dict[str, set[str | None]] = {}
    for name, key in zip(dataset.tolist(), label_key.tolist(), strict=True):
        lists.setdefault(name, set()).add(key)
    sizes = Counter(dataset.tolist())
    fixed = {name: next(iter(keys)) for name, keys in lists.items() if len(keys) == 1 and sizes[name] > 1}
    numbers: dict[str, int] = {}
    code = {name: numbers.setdefault(key, len(numbers)) for name, key in fixed.items() if key is not None}
    return np.array([code.get(name, -1) for name in dataset.tolist()], dtype=np.int64)


def _stands_for(conn: sa.Connection, model: ModelRow, q: _Questions, complete: Bools) -> tuple[Floats, Bools]:
    """How many questions each one stands for, (N,); whether a staged collection planned it, (N,)."""
    name = {pair: i for i, pair in enumerate(zip(q.dataset.tolist(), q.ids.tolist(), strict=True))}
    rows = [(name[row.dataset, row.id], row) for row in staging.planned(conn, model.n) if (row.dataset, row.id) in name]
    stands_for, planned = np.ones(len(q.text)), np.zeros(len(q.text), dtype=bool)
    if not rows:
        return stands_for, planned
    at = np.array([i for i, _ in rows])
    strata: dict[tuple[str, str], int] = {}
    sampling = Sampling(
        test=np.array([row.test for _, row in rows], dtype=bool),
        stratum=np.array([strata.setdefault((row.part, row.dataset), len(strata)) for _, row in rows]),
        band=np.array([row.band for _, row in rows]),
        wrong=np.array([row.wrong for _, row in rows], dtype=bool),
        round=np.array([row.round for _, row in rows]),
    )
    planned[at] = True
    stands_for[at] = presented(sampling, complete[q.text[at]])
    return stands_for, planned


# --- who answered what ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Grid:
    """What was asked: A arms, U texts, K budgets (all that occur anywhere, ascending).

    ``arms`` is in the order in which answers are taken: base first. ``failure_s`` holds (text, column, arm,
    concurrency, seconds) of each failure.
    """

    budgets: Ints
    arms: list[str]
    has_p1: Bools  # (A, U)
    answered: Bools  # (A, U, K)
    asked: Bools  # (A, U, K), answered or failed
    can_think: Bools  # (U,)
    touched: Bools  # (U,), anything is known
    failures: list[tuple[int, int, str, int, float | None]]
    broke_budget: Bools  # (U, K), some arm failed for it
    rates: dict[str, RateModel]


def _read_grid(conn: sa.Connection, model: ModelRow, q: _Questions) -> _Grid:
    a, t, f, r = schema.answers, schema.timings, schema.failures, schema.rates
    meta = conn.execute(sa.select(a.c.key, a.c.arm, a.c.budgets, a.c.system1).where(a.c.model == model.n)).all()
    failed = conn.execute(
        sa.select(f.c.key, f.c.arm, f.c.budget, f.c.concurrency, f.c.seconds, f.c.reason).where(f.c.model == model.n)
    ).all()
    rates = {
        row.arm: RateModel(row.system1_s, row.tokens_per_second, row.read_s)
        for row in conn.execute(sa.select(r).where(r.c.model == model.n))
    }
    timed = conn.execute(sa.select(t.c.arm, t.c.budgets).where(t.c.model == model.n).distinct()).all()

    blobs = {blob: schema.unpack_budgets(blob) for blob in {row[2] for row in meta} | {row[1] for row in timed}}
    values = {b for budgets in blobs.values() for b in budgets} | {row[2] for row in failed} - {schema.SYSTEM1}
    budgets = np.array(sorted(values), dtype=np.int64)
    names = {row[1] for row in meta} | {row[1] for row in failed} | {row[0] for row in timed} | set(rates)
    arms = sorted(names, key=lambda name: (name != "base", name))
    texts = len(q.first)
    has_p1 = np.zeros((len(arms), texts), dtype=bool)
    answered = np.zeros((len(arms), texts, len(budgets)), dtype=bool)

    groups: dict[tuple[str, bytes, bool], list[int]] = {}
    for key, arm, blob, system1 in meta:
        text = q.number.get(key)
        if text is not None:
            groups.setdefault((arm, blob, system1), []).append(text)
    for (arm, blob, system1), members in groups.items():
        has_p1[arms.index(arm), members] |= system1
        answered[arms.index(arm)][np.ix_(np.array(members), np.searchsorted(budgets, blobs[blob]))] = True

    asked = answered.copy()
    failures: list[tuple[int, int, str, int, float | None]] = []
    broke_budget = np.zeros((texts, len(budgets)), dtype=bool)
    # score questions only where the server can think about them: it says so, or an import holds some p2
    scores = np.array([kind == "score" for kind in q.kind[q.first].tolist()])
    can_think = ~scores | model.thinks_about_scores | answered.any(axis=(0, 2))
    for key, arm, budget, load, seconds, reason in failed:
        text = q.number.get(key)
        if text is None or budget == schema.SYSTEM1:
            continue
        column = int(np.searchsorted(budgets, budget))
        asked[arms.index(arm), text, column] = True
        broke_budget[text, column] |= reason in BROKE_BUDGET
        failures.append((text, column, arm, load, seconds))
        can_think[text] |= reason != "refused"  # one that was cut off or came back broken counts as wrong
    touched = np.asarray(has_p1.any(axis=0) | asked.any(axis=(0, 2)))
    return _Grid(budgets, arms, has_p1, answered, asked, can_think, touched, failures, broke_budget, rates)


def _kept_budgets(grid: _Grid, wanted: Sequence[int] | None, where: str) -> tuple[Ints, dict[int, int]]:
    """Budgets to load, and how many texts have each of the others."""
    counts = (grid.asked.any(axis=0) & grid.can_think[:, None]).sum(axis=0)
    there = counts > 0
    collected = grid.budgets[there].tolist()
    if wanted is not None:
        unknown = sorted(set(wanted) - set(collected))
        if unknown:
            raise CalibError(
                f"{where}: think budget {unknown[0]} was not collected; there are {collected}. "
                f"Choose one of these, or run: calib collect QUESTIONS --budgets {unknown[0]}"
            )
        return np.array(sorted(set(wanted)), dtype=np.int64), {}
    kept = there & (counts >= KEPT_COVERAGE * counts.max(initial=0))
    others = np.flatnonzero(there & ~kept)
    return grid.budgets[kept], {int(grid.budgets[k]): int(counts[k]) for k in others}


def _shown_arms(grid: _Grid, wanted: Sequence[str] | None, where: str) -> list[str]:
    if wanted is None:
        return grid.arms
    unknown = [arm for arm in wanted if arm not in grid.arms]
    if unknown or not wanted:
        raise CalibError(
            f"{where}: arm {unknown[0] if unknown else ''!r} was not collected; there are {', '.join(grid.arms)}. "
            f"Choose one of these, or run: calib collect QUESTIONS --arm {unknown[0] if unknown else 'NAME'}=URL"
        )
    return list(dict.fromkeys(wanted))


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Answers:
    """Shared answers to U texts at the B kept budgets; NaN where there is none (tokens: where unknown)."""

    p1: Floats  # (U, C)
    p2: Floats  # (U, B, C)
    tokens: Floats  # (U, B)
    finished: Bools  # (U, B)
    label_mass: Floats  # (U, 1 + B)
    complete: Bools  # (U,), one arm was asked for all kept budgets
    arm1: Ints  # (U,), number of the arm whose p1 it is; that of no arm where there is none
    arm2: Ints  # (U,), the same of the thought


def _read_answers(conn: sa.Connection, model: ModelRow, q: _Questions, grid: _Grid, columns: Ints) -> _Answers:
    """Take p1, and the thought, of each text from the first arm that has it."""
    texts, b = len(q.first), len(columns)
    n_options = q.n_options[q.first]
    c_max = int(n_options.max())
    padded = np.arange(c_max) >= n_options[:, None]
    kept = grid.budgets[columns]
    p1, p2 = np.full((texts, c_max), np.nan), np.full((texts, b, c_max), np.nan)
    mass = np.full((texts, 1 + b), np.nan)
    # a failed budget is censored at its limit; a question that cannot think uses no token
    tokens = np.where(grid.can_think[:, None], kept.astype(np.float64), 0.0)
    finished = np.zeros((texts, b), dtype=bool)
    asked = grid.asked[:, :, columns].all(axis=2)
    nobody = len(grid.arms)
    p1_arm = np.where(grid.has_p1.any(axis=0), grid.has_p1.argmax(axis=0), nobody)
    p2_arm = np.where(asked.any(axis=0), asked.argmax(axis=0), nobody)

    a = schema.answers
    for number, arm in enumerate(grid.arms):
        if not ((p1_arm == number).any() or (p2_arm == number).any()):
            continue
        names = ("key", "budgets", "p1", "label_mass1", "p2", "tokens", "finished", "label_mass2")
        statement = sa.select(*(a.c[name] for name in names)).where(a.c.model == model.n, a.c.arm == arm)
        rows = _Rows.of(conn, statement.order_by(a.c.n), q)
        for batch in rows.batches(n_options):
            with_p1 = batch.where([blob is not None for blob in batch["p1"]])
            with_p1 = with_p1.where((p1_arm[with_p1.text] == number) & np.isnan(p1[with_p1.text, 0]))
            if with_p1.size:
                p1[with_p1.text, : batch.options] = with_p1.array("p1", batch.options)
                mass[with_p1.text, 0] = np.array(with_p1["label_mass1"], dtype=np.float64)
            thought = batch.where(p2_arm[batch.text] == number)
            if not (thought.size and batch.budgets):
                continue
            width = len(batch.budgets)
            values = thought.array("p2", width, batch.options)
            used, mass2 = thought.array("tokens", width), thought.array("label_mass2", width)
            ended = thought.array("finished", width, dtype=schema.FLAG)
            for j, budget in enumerate(batch.budgets):
                for k in np.flatnonzero(kept == budget):
                    new = np.isnan(p2[thought.text, k, 0])  # the earlier row wins
                    into = thought.text[new]
                    p2[into, k, : batch.options] = values[new, j]
                    tokens[into, k], mass[into, 1 + k] = used[new, j], mass2[new, j]
                    finished[into, k] = ended[new, j]
    p1[padded & ~np.isnan(p1[:, :1])] = 0
    p2[padded[:, None] & ~np.isnan(p2[:, :, :1])] = 0
    return _Answers(p1, p2, tokens, finished, mass, p2_arm < nobody, p1_arm, p2_arm)


def _flaws(
    conn: sa.Connection,
    model: ModelRow,
    q: _Questions,
    grid: _Grid,
    answers: _Answers,
    shown_arms: Sequence[str],
    columns: Ints,
) -> NDArray[np.object_]:
    """Why each text's row is not to be trusted, (U,): its thought broke its budget, or its server was replaced."""
    flaw = np.full(len(q.first), "", dtype=object)
    lost = np.isnan(answers.p2[:, :, 0]) & grid.broke_budget[:, columns]
    flaw[(lost | (answers.tokens > grid.budgets[columns])).any(axis=1)] = BUDGET
    for key, arm in staging.replaced(conn, model.n):
        text = q.number.get(key)
        if text is None or arm not in grid.arms:
            continue
        if arm in shown_arms or grid.arms.index(arm) in (answers.arm1[text], answers.arm2[text]):
            flaw[text] = REPLACED
    return flaw


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of answers or timings, matched to texts.

    ``text`` (R,) is the text of each row; ``columns`` holds R values a name. ``budgets`` and ``options`` are those of
    a batch, whose rows are alike.
    """

    text: Ints
    columns: Mapping[str, Sequence[Any]]
    budgets: tuple[int, ...] = ()
    options: int = 0

    @classmethod
    def of(cls, conn: sa.Connection, statement: sa.Select[Any], q: _Questions) -> _Rows:
        """Rows of a statement that selects the key first and the budgets second; unknown keys are left out."""
        result = conn.execute(statement)
        names = list(result.keys())
        columns = dict(zip(names, zip(*result.all(), strict=True), strict=False)) or dict.fromkeys(names, ())
        text = np.array([q.number.get(key, -1) for key in columns["key"]], dtype=np.int64)
        rows = cls(text, columns)
        return rows if (text >= 0).all() else rows.where(text >= 0)

    @property
    def size(self) -> int:
        return len(self.text)

    def __getitem__(self, name: str) -> Sequence[Any]:
        return self.columns[name]

    def where(self, which: Sequence[bool] | Bools) -> _Rows:
        mask = np.asarray(which, dtype=bool)
        return self if mask.all() else self.take(np.flatnonzero(mask))

    def take(self, rows: Ints) -> _Rows:
        chosen = rows.tolist()
        columns = {name: [values[i] for i in chosen] for name, values in self.columns.items()}
        return _Rows(self.text[rows], columns, self.budgets, self.options)

    def array(self, name: str, *shape: int, dtype: str = schema.FLOAT) -> NDArray[Any]:
        return schema.unpack(self.columns[name], dtype, *shape)

    def batches(self, n_options: Ints) -> Iterator[_Rows]:
        """Rows with the same budgets and number of options, no text twice in a batch, earlier rows first."""
        if not self.size:
            return
        order = np.argsort(self.text, kind="stable")
        start = np.r_[True, np.diff(self.text[order]) != 0]
        rank = np.empty(self.size, dtype=np.int64)  # 0 for the first row of a text, 1 for the second, ...
        rank[order] = np.arange(self.size) - np.maximum.accumulate(np.where(start, np.arange(self.size), 0))
        blobs: dict[bytes, int] = {}
        kind = np.array([blobs.setdefault(blob, len(blobs)) for blob in self.columns["budgets"]], dtype=np.int64)
        options = n_options[self.text]
        alike = np.stack([rank, kind, options])
        known = list(blobs)
        labels, which = np.unique(alike, axis=1, return_inverse=True)
        for i, (_, k, c) in enumerate(labels.T.tolist()):
            batch = self.take(np.flatnonzero(which == i))
            yield _Rows(batch.text, batch.columns, schema.unpack_budgets(known[k]), c)


# --- seconds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Seconds:
    """Seconds of one arm for U texts at the B kept budgets."""

    t1: Floats  # (U,)
    t2: Floats  # (U, B)
    estimated: Bools  # (U, 1 + B)
    concurrency: int
    elsewhere: bool
    """Whether the arm was timed, but not at the load that was asked for."""


def _arm_seconds(
    conn: sa.Connection,
    model: ModelRow,
    q: _Questions,
    grid: _Grid,
    answers: _Answers,
    arm: str,
    columns: Ints,
    concurrency: int | None,
    where: str,
    void: set[tuple[str, int, int]],
) -> _Seconds:
    """Measured seconds of an arm, and what can be said where they are missing (see `load_outcomes`)."""
    load, elsewhere = _load_of(conn, model, arm, concurrency, where, void)
    own = _read_own(conn, model, q, grid, arm, load, [number for name, at, number in void if (name, at) == (arm, load)])
    line = fit_line(*_pairs(own.tokens, own.t2))
    rates = grid.rates.get(arm)

    t2 = own.t2.copy()
    for text, column, failed_arm, at, seconds in grid.failures:  # censored: it took at least as long
        if failed_arm == arm and at == load and seconds is not None and np.isnan(t2[text, column]):
            t2[text, column] = seconds
    # a thought that ended by itself takes the same seconds under any budget that it fits in
    ended = np.logical_or.accumulate(own.finished, axis=1)
    same = np.full(len(t2), np.nan)
    for k in reversed(range(len(grid.budgets))):  # the smallest such budget decides
        same = np.where(ended[:, k] & np.isfinite(own.t2[:, k]), own.t2[:, k], same)
    t2 = np.where(np.isnan(t2) & ended, same[:, None], t2)[:, columns]

    missing = np.isnan(t2) & grid.can_think[:, None]
    tokens = _own_tokens(own.tokens, ended, grid.budgets)[:, columns]
    tokens = np.where(np.isnan(tokens), answers.tokens, tokens)[missing]
    if rates is not None:
        t2[missing] = rates.t2(tokens)
    elif line is not None:
        t2[missing] = line.predict(tokens, picks(np.broadcast_to(q.picks[:, None], missing.shape)[missing], tokens))

    t1, missing1 = own.t1.copy(), np.isnan(own.t1)
    filler = resample(own.t1, picks(q.picks, 0.0))
    if rates is not None:
        t1[missing1] = rates.t1
    elif filler is not None:
        t1[missing1] = filler[missing1]
    estimated = np.column_stack([missing1 & ~np.isnan(t1), missing & ~np.isnan(t2)])
    return _Seconds(t1, t2, estimated, load, elsewhere)


def _load_of(
    conn: sa.Connection, model: ModelRow, arm: str, wanted: int | None, where: str, void: set[tuple[str, int, int]]
) -> tuple[int, bool]:
    """Concurrency whose seconds enter, and whether there are some at another one only."""
    t = schema.timings
    columns = (t.c.concurrency, t.c["pass"])
    statement = sa.select(*columns).where(t.c.model == model.n, t.c.arm == arm, t.c.timed).distinct()
    loads = sorted({load for load, number in conn.execute(statement) if (arm, load, number) not in void})
    if wanted is not None:
        return wanted, bool(loads) and wanted not in loads
    if len(loads) > 1:
        raise CalibError(
            f"{where}: arm {arm!r} was timed at the concurrencies {', '.join(map(str, loads))} (0 = unknown), "
            f"and latency holds at one load only; choose: --concurrency {loads[-1]}"
        )
    return (loads[0] if loads else 0), False


@dataclass(frozen=True, eq=False)
class _Own:
    """An arm's own thoughts at all K budgets of the grid, NaN where not timed or not known."""

    t1: Floats  # (U,)
    t2: Floats  # (U, K)
    tokens: Floats  # (U, K)
    finished: Bools  # (U, K)


def _read_own(
    conn: sa.Connection, model: ModelRow, q: _Questions, grid: _Grid, arm: str, load: int, void: Sequence[int]
) -> _Own:
    t = schema.timings
    names = ("key", "budgets", "t1", "t2", "tokens", "finished")
    # rows without any second tell the tokens of the arm's own thought; measured ones and newer passes come first
    statement = (
        sa.select(*(t.c[name] for name in names))
        .where(t.c.model == model.n, t.c.arm == arm, (t.c.concurrency == load) | ~t.c.timed)
        .where(t.c["pass"].not_in(void))
        .order_by(t.c.timed.desc(), t.c["pass"].desc(), t.c.n)
    )
    shape = (len(q.first), len(grid.budgets))
    t1, t2, tokens = np.full(shape[0], np.nan), np.full(shape, np.nan), np.full(shape, np.nan)
    finished, seen = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    for batch in _Rows.of(conn, statement, q).batches(q.n_options[q.first]):
        new1 = np.isnan(t1[batch.text])
        t1[batch.text[new1]] = np.array(batch["t1"], dtype=np.float64)[new1]
        width = len(batch.budgets)
        seconds, used = batch.array("t2", width), batch.array("tokens", width)
        ended = batch.array("finished", width, dtype=schema.FLAG)
        for j, k in enumerate(np.searchsorted(grid.budgets, batch.budgets)):
            new = ~seen[batch.text, k] | (np.isnan(t2[batch.text, k]) & np.isfinite(seconds[:, j]))
            into = batch.text[new]
            t2[into, k], tokens[into, k] = seconds[new, j], used[new, j]
            finished[into, k], seen[into, k] = ended[new, j], True
    return _Own(t1, t2, tokens, finished)


def _pairs(tokens: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Measured (tokens, seconds), each thought's length once: budgets that a thought fits in tell nothing new."""
    use = np.isfinite(tokens) & np.isfinite(seconds)
    last = np.full(len(tokens), np.nan)
    for k in range(tokens.shape[1]):
        use[:, k] &= tokens[:, k] != last
        last = np.where(use[:, k], tokens[:, k], last)
    return tokens[use], seconds[use]


def _own_tokens(tokens: Floats, ended: Bools, budgets: Ints) -> Floats:
    """Tokens of the arm's own thought, also at budgets where they follow from those at another one."""
    tokens = tokens.copy()
    for k in range(1, len(budgets)):
        follows = np.isnan(tokens[:, k]) & ended[:, k - 1]
        tokens[follows, k] = tokens[follows, k - 1]
    for k in range(len(budgets) - 2, -1, -1):
        follows = np.isnan(tokens[:, k])
        tokens[follows, k] = np.minimum(tokens[follows, k + 1], budgets[k])
    return tokens


# --- what the user should know ----------------------------------------------------------------------------------------


def _warnings(
    *,
    kept: Ints,
    dropped: dict[int, int],
    left_out: int,
    sampled_out: int,
    failed: int,
    unknown_tokens: int,
    unmeasured: list[str],
    asked_concurrency: int | None,
) -> tuple[str, ...]:
    found = []
    if left_out:
        lacking = f"System 1 or one of the budgets {', '.join(map(str, kept.tolist()))}" if kept.size else "System 1"
        found.append(
            f"left out {left_out} {_questions(left_out)} without an answer of {lacking}; "
            "to complete a collection: calib collect QUESTIONS"
        )
    if sampled_out:
        found.append(
            f"staged collection: {sampled_out} {_questions(sampled_out)} without a thought left out; on the tune side "
            "those that are there weigh as many as they stand for. To think about all: calib collect QUESTIONS --all"
        )
    if dropped:
        listed = ", ".join(f"{budget} ({count} {_questions(count)})" for budget, count in dropped.items())
        found.append(f"left out budgets that too few questions have: {listed}; to use one, name all: --budgets")
    if failed:
        found.append(
            f"{failed} {_questions(failed)} without a usable answer of System 2 at some budget: wrong when they think"
        )
    if unknown_tokens:
        found.append(
            f"think tokens unknown for {unknown_tokens} {_questions(unknown_tokens)}: "
            "tokens (shown as 0) and seconds from rates are not available"
        )
    if unmeasured:
        found.append(f"not timed at concurrency {asked_concurrency}: {', '.join(unmeasured)}")
    return tuple(found)


def _questions(count: int) -> str:
    return "question" if count == 1 else "questions"
