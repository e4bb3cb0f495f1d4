"""Is what was collected fit to tune on: budgets obeyed, arms agree, answers repeat, thoughts end, labels are meant.

The findings are pure functions of outcomes and stored rows; `collect` asks the few extra answers that some of them
need. Leaves to others: asking and its faults (`calib.engine`), a server that was replaced in the middle
(`calib.collect`), whether a latency pass was disturbed (`calib.passes`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from calib import exact, fitness, metrics
from calib.crew import Progress
from calib.engine.base import AskFailed, Engine, ServerBusy
from calib.errors import CalibError
from calib.fitness import LOW_MASS, Repeats
from calib.optimise import Optimum, optimum
from calib.outcomes import Outcomes
from calib.policy import Policy, candidate_thresholds, confidence
from calib.questions import Question, text_hash
from calib.sampling import place
from calib.store import AuditAnswer, FailureCount, LatencyPass, Store, StoredAnswer, load_outcomes
from calib.store.loading import BROKE_BUDGET
from calib.tuning import Tuned

__all__ = [
    "AuditSummary",
    "Finding",
    "Floor",
    "Look",
    "arms_agree",
    "budgets_obeyed",
    "collect",
    "cut_thoughts",
    "findings",
    "floors",
    "gate_precision",
    "label_mass",
    "look",
    "option_order",
    "passes_valid",
    "repeatability",
    "same_server",
]

Level = Literal["ok", "note", "warning", "refuse"]

ALPHA = 0.01
"""Chance of a false alarm of one audit."""
MUCH_CUT, SOME_CUT = 0.2, 0.05
ARM_FLIPS, ORDER_FLIPS = 0.01, 0.05
"""Shares of answers that may change between arms, and with the order of the options."""
FEW = 20
"""Pairs below which nothing is concluded."""
SAMPLE = 50
_ASK = f"calib collect --audit {SAMPLE}"
_ALL = "to have them all the same: --include-failed-audits"

Floats = NDArray[np.float64]
Name = tuple[str, str]


@dataclass(frozen=True)
class Finding:
    """What one audit says of one arm or dataset.

    Attributes
    ----------
    level : {"ok", "note", "warning", "refuse"}
        ``note``: worth knowing, or not known. ``warning``: numbers may mislead. ``refuse``: do not tune on it.
    audit : str
        Its name.
    arm, dataset : str or None
        What it is about; None for all.
    text : str
        One line for the user.
    value : float
        What was measured; NaN where it is not known.
    """

    level: Level
    audit: str
    arm: str | None
    dataset: str | None
    text: str
    value: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"value": self.value if math.isfinite(self.value) else None}


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Look:
    """What all audits say of the answers of one model.

    Attributes
    ----------
    outcomes : Outcomes
    findings : tuple of Finding
        The worst first.
    floors : mapping of str to Floor
        See `floors`.
    """

    outcomes: Outcomes
    findings: tuple[Finding, ...]
    floors: Mapping[str, Floor]

    @property
    def fit_arms(self) -> list[str] | None:
        """Arms that are tuned together, where some are not: their answers are not those that the arms would share."""
        of_arms = (one for one in self.findings if one.level == "refuse" and one.audit in ("arms p1", "arms p2"))
        unfit = {one.arm for one in of_arms}
        return [arm for arm in self.outcomes.arms if arm not in unfit] if unfit else None

    @property
    def repeats(self) -> Repeats:
        """To what p1 repeats, of the arms where it is known."""
        return _repeats(self.outcomes, self.floors.values())

    def gates(self, policy: Policy) -> list[Finding]:
        """Whether the gates of a policy, one or one for each route, are finer than what p1 repeats to.

        That is measured on the plain confidence: nothing is said of a gate on another one.
        """
        if policy.confidence != "max" or policy.temperatures is not None:
            return []
        largest = max(self.floors.values(), key=lambda floor: floor.value, default=None)
        return [
            gate_precision(self.outcomes.take(mask), part.threshold, self.floors.get(part.arm, largest))
            for part, mask in policy.parts(self.outcomes)
            if mask.any() and 0 < part.threshold <= 1
        ]

    def unrefused(self, tuned: Tuned) -> Optimum:
        """The optimum in the space of the studies, which refuse no gate for what p1 repeats to."""
        demand, repeats = tuned.demand, tuned.demand.repeats
        on = tuned.searched or tuned.tune
        at = candidate_thresholds(np.unique(confidence(on.p1[on.can_think]))) if on.can_think.any() else np.empty(0)
        arms = demand.arms or on.arms
        refused = repeats is not None and any(repeats.noisy(at, arm).any() for arm in arms)
        if demand.rate is not None or not refused:
            return tuned.studied
        asked: dict[str, Any] = {"maximize": demand.maximize, "minimize": demand.minimize, "cost": demand.cost}
        found = optimum(on, demand.targets, arms=arms, budgets=demand.budgets, **asked)
        same = found.policy is None or found.objective == tuned.studied.objective
        return tuned.studied if same else found

    def of(self, tuned: Tuned) -> list[str]:
        """What is to be said of a policy that was tuned on these answers, the worst first."""
        policy = tuned.policy
        told = [*self.findings] if policy is None else _worst_first([*self.gates(policy), *self.findings])
        warnings = [f"audit: {one.text}" for one in told if one.level in ("warning", "refuse")]
        repeats = tuned.demand.repeats
        if policy is None and repeats is not None:
            at = candidate_thresholds(np.unique(repeats.sure)) if repeats.sure.size else np.empty(0)
            fine = {arm: int(repeats.noisy(at, arm).sum()) for arm in tuned.outcomes.arms}
            refused = [f"{count} of {len(at)} gates of arm {arm!r}" for arm, count in fine.items() if count]
            if refused:
                warnings.insert(0, f"refused: {'; '.join(refused)} are finer than what p1 repeats to; {_ALL}")
        return warnings


def _repeats(outcomes: Outcomes, floors: Iterable[Floor]) -> Repeats:
    known = {floor.arm: floor.value for floor in floors if floor.n >= FEW}
    return Repeats(np.sort(confidence(outcomes.p1[outcomes.can_think])), known)


def findings(
    source: Store | Outcomes, *, model: str | None = None, datasets: Sequence[str] | None = None
) -> list[Finding]:
    """Everything that can be said, the worst first.

    Parameters
    ----------
    source : Store or Outcomes
        Of outcomes alone: cut thoughts and label mass.
    model, datasets
        Of a store, see `calib.store.load_outcomes`.

    Raises
    ------
    CalibError
        The store holds no outcomes, or several models.
    """
    if isinstance(source, Outcomes):
        return _worst_first([*cut_thoughts(source), *label_mass(source)])
    # seconds are not looked at, so that no load has to be chosen
    outcomes = load_outcomes(source, model=model, datasets=datasets, concurrency=0)
    return list(look(source, outcomes).findings)


def look(source: Store, outcomes: Outcomes) -> Look:
    """All audits of what was loaded of a store."""
    fingerprint = outcomes.fingerprint
    answers, extra = source.answers(fingerprint), source.audits(fingerprint)
    status = next(one for one in source.status().models if one.fingerprint == fingerprint)
    found = [
        *same_server(extra),
        *budgets_obeyed(source.own_thoughts(fingerprint), status.failures),
        *arms_agree(answers, extra),
        *repeatability(answers, extra),
        *cut_thoughts(outcomes),
        *label_mass(outcomes),
        *option_order(answers, extra),
        *passes_valid(source.passes(fingerprint)),
    ]
    return Look(outcomes, tuple(_worst_first(found)), floors(answers, extra))


def _worst_first(found: Iterable[Finding]) -> list[Finding]:
    order = {"refuse": 0, "warning": 1, "note": 2, "ok": 3}
    return sorted(found, key=lambda finding: order[finding.level])


def same_server(extra: Iterable[AuditAnswer]) -> list[Finding]:
    """Answers that may be another model's, per arm: the server was replaced while they were asked."""
    marked = Counter(row.arm for row in extra if row.audit == fitness.REPLACED)
    return [
        Finding(
            "refuse",
            "same server",
            arm,
            None,
            f"the server was replaced in the middle: {n} answers may be another model's, and are left out of tuning. "
            "Collect into a new --store",
            float(n),
        )
        for arm, n in sorted(marked.items())
    ]


# --- budgets ----------------------------------------------------------------------------------------------------------


def budgets_obeyed(
    thoughts: Iterable[tuple[str, tuple[int, ...], Floats]], failures: Sequence[FailureCount] = ()
) -> list[Finding]:
    """Whether thoughts kept their budgets, per arm and budget.

    Parameters
    ----------
    thoughts : iterable of (arm, budgets, tokens)
        See `calib.store.Store.own_thoughts`.
    failures : sequence of FailureCount
        Among them answers that the engine refused because they broke their budget.
    """
    over: dict[tuple[str, int], int] = defaultdict(int)
    total: dict[tuple[str, int], int] = defaultdict(int)
    for arm, budgets, tokens in thoughts:
        for budget, used in zip(budgets, tokens.tolist(), strict=True):
            if math.isfinite(used):
                total[arm, budget] += 1
                over[arm, budget] += used > budget
    found = []
    for (arm, budget), n in sorted(total.items()):
        broken = over[arm, budget]
        text = f"budget {budget} was kept by all {n} thoughts"
        if broken:
            text = f"{broken} of {n} thoughts are longer than their budget of {budget} tokens: their seconds are too"
        found.append(Finding("refuse" if broken else "ok", "budget", arm, None, text, broken / n))
    for failure in failures:
        if failure.reason in BROKE_BUDGET:
            text = f"{failure.questions} answers broke their think budget and are left out of tuning: {failure.detail}"
            found.append(Finding("warning", "budget", failure.arm, None, text, float(failure.questions)))
    return found


def cut_thoughts(outcomes: Outcomes) -> list[Finding]:
    """How many thoughts did not end by themselves, per budget and dataset.

    At a smaller budget that is the price of it; at the largest one it says that more tokens might help.
    """
    found = []
    for k, name in enumerate(outcomes.dataset_names):
        for b, budget in enumerate(outcomes.budgets.tolist()):
            where = (outcomes.dataset_codes == k) & outcomes.can_think & ~outcomes.failed[:, b]
            if not where.any():
                continue
            cut = ~outcomes.finished[where, b]
            share = metrics.mean(cut, outcomes.weight[where])
            largest = b == len(outcomes.budgets) - 1
            level: Level = "ok"
            text = f"{share:.0%} of the thoughts are cut at {budget} tokens"
            if share > SOME_CUT:
                level = "warning" if largest and share > MUCH_CUT else "note"
                right = metrics.chosen(outcomes.p2[where, b]) == outcomes.answer[where]
                text += f"; right when cut: {metrics.mean(right[cut]):.0%}, when ended: {_share(right[~cut])}"
                text += "; collect a larger --budgets" if level == "warning" else ""
            found.append(Finding(level, "cut", None, name, text, share))
    return found


def _share(flags: NDArray[np.bool_]) -> str:
    return f"{metrics.mean(flags):.0%}" if flags.size else "none ended"


def label_mass(outcomes: Outcomes) -> list[Finding]:
    """Whether the model would answer by a label at all: median share of the probability on the labels, per dataset."""
    found = []
    for k, name in enumerate(outcomes.dataset_names):
        rows = outcomes.label_mass[outcomes.dataset_codes == k]
        for j, what in enumerate(["System 1", *(f"System 2 at {budget}" for budget in outcomes.budgets.tolist())]):
            known = rows[np.isfinite(rows[:, j]), j]
            if not known.size:
                continue
            middle = float(np.median(known))
            low = middle < LOW_MASS
            text = f"{what}: {middle:.2g} of the probability lies on the labels (median)"
            text += (
                "; the answer is forced, and confidence may mean little: try another --prompt-template" if low else ""
            )
            found.append(Finding("warning" if low else "ok", "label mass", None, name, text, middle))
    single = fitness.flaws(outcomes)[fitness.MASS]
    if single.any():
        text = f"{int(single.sum())} questions have less than {LOW_MASS:g} of the probability on the labels where most "
        text += "have more: they are left out of tuning"
        found.append(Finding("note", "label mass", None, None, text, metrics.mean(single)))
    if not found:
        found.append(Finding("note", "label mass", None, None, "not known: the server does not tell it"))
    return found


# --- the same question again ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """How far confidence moves when one arm is asked the same question again, at another load.

    Attributes
    ----------
    arm : str
    n : int
        Pairs of answers.
    value, largest : float
        95th percentile, and largest, of the change of max p1.
    flips : int
        Pairs whose answers differ.
    """

    arm: str
    n: int
    value: float
    largest: float
    flips: int


def floors(answers: Iterable[StoredAnswer], extra: Iterable[AuditAnswer] = ()) -> dict[str, Floor]:
    """The floor under the precision of a threshold, by arm; arms whose p1 was never read twice are left out."""
    first: dict[tuple[str, Name], Floats] = {}
    pairs: dict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
    for answer in answers:
        if answer.p1 is not None:
            one = first.setdefault((answer.arm, (answer.dataset, answer.id)), answer.p1)
            if one is not answer.p1:
                pairs[answer.arm].append((one, answer.p1))
    for row in extra:
        one_known = first.get((row.arm, (row.dataset, row.id)))
        if row.audit == "load" and row.p1 is not None and one_known is not None:
            pairs[row.arm].append((one_known, row.p1))
    found = {}
    for arm, several in pairs.items():
        moved = np.array([abs(float(a.max()) - float(b.max())) for a, b in several])
        flips = sum(int(a.argmax() != b.argmax()) for a, b in several)
        found[arm] = Floor(arm, len(several), metrics.percentile(moved, 95), float(moved.max()), flips)
    return found


def repeatability(answers: Sequence[StoredAnswer], extra: Sequence[AuditAnswer] = ()) -> list[Finding]:
    """How well p1 repeats, per arm."""
    known = floors(answers, extra)
    found = []
    for arm in sorted({answer.arm for answer in answers if answer.p1 is not None}):
        floor = known.get(arm)
        if floor is None or floor.n < FEW:
            n = 0 if floor is None else floor.n
            text = f"p1 was read twice on {n} questions: how well it repeats is not known; {_ASK}"
            found.append(Finding("note", "repeatability", arm, None, text))
            continue
        text = f"asked again, max p1 moves by at most {floor.value:.2g} for 95 % of {floor.n} questions"
        text += f" (most: {floor.largest:.2g}), and {floor.flips} answers change"
        level: Level = "warning" if floor.flips > ARM_FLIPS * floor.n else "note" if floor.flips else "ok"
        found.append(Finding(level, "repeatability", arm, None, text, floor.value))
    return found


def gate_precision(outcomes: Outcomes, threshold: float, floor: Floor | None) -> Finding:
    """Whether a gate is finer than what p1 repeats to.

    A question is undecided when its confidence lies within the floor of the threshold: asked again it may go the other
    way. The gate is refused when it sorts noise (`calib.fitness.Repeats.noisy`); ``calib optimize`` takes no such gate.

    Parameters
    ----------
    outcomes : Outcomes
    threshold : float
    floor : Floor or None
        Of the arm, see `floors`.

    Returns
    -------
    Finding
        Its value is the share of undecided questions.
    """
    if floor is None or floor.n < FEW:
        text = f"whether the threshold {threshold:g} is finer than p1 repeats is not known; {_ASK}"
        return Finding("note", "gate", None, None, text)
    repeats = _repeats(outcomes, [floor])
    share = float(repeats.undecided(threshold, floor.arm))
    text = f"{share:.1%} of the questions lie within {floor.value:.2g} of the threshold {threshold:g}"
    if repeats.noisy(threshold, floor.arm):
        text += ", which is all that p1 repeats to: the gate sorts noise. Use a lower threshold, or always think"
        return Finding("refuse", "gate", floor.arm, None, text, share)
    if share > ARM_FLIPS:
        return Finding("warning", "gate", floor.arm, None, text + ": asked again they may go the other way", share)
    return Finding("ok", "gate", floor.arm, None, text, share)


# --- arms -------------------------------------------------------------------------------------------------------------


def arms_agree(answers: Sequence[StoredAnswer], extra: Sequence[AuditAnswer] = ()) -> list[Finding]:
    """Whether answers may be shared between arms: p1 paired; p2 beside what the same arm does under another seed.

    Sampled thoughts differ between two runs anyway, so p2 flips between arms mean nothing by themselves.
    """
    p1, p2, right = _by_arm(answers)
    arms = sorted(p1.keys() | p2.keys(), key=lambda name: (name != "base", name))
    found: list[Finding] = []
    for arm in arms[1:]:
        found += _compared(arms[0], arm, p1, right, "p1", None)
        within = _reseeded(p2, extra, (arms[0], arm))
        found += _compared(arms[0], arm, p2, right, "p2", within)
    return found


def _by_arm(
    answers: Sequence[StoredAnswer],
) -> tuple[dict[str, dict[Any, Floats]], dict[str, dict[Any, Floats]], dict[Name, int]]:
    """First p1 by arm and question, first p2 by arm and (question, budget), right answer by question."""
    p1: dict[str, dict[Any, Floats]] = defaultdict(dict)
    p2: dict[str, dict[Any, Floats]] = defaultdict(dict)
    right: dict[Name, int] = {}
    for answer in answers:
        name = (answer.dataset, answer.id)
        right[name] = answer.answer
        if answer.p1 is not None:
            p1[answer.arm].setdefault(name, answer.p1)
        for budget, p in zip(answer.budgets, answer.p2, strict=True):
            if not np.isnan(p).any():
                p2[answer.arm].setdefault((name, budget), p)
    return p1, p2, right


def _reseeded(
    p2: Mapping[str, Mapping[Any, Floats]], extra: Sequence[AuditAnswer], arms: tuple[str, str]
) -> tuple[int, int] | None:
    """Flips of p2 within one arm under another seed, and how many pairs; None where nothing was asked."""
    flips = n = 0
    for row in extra:
        before = p2.get(row.arm, {}).get(((row.dataset, row.id), row.budget))
        if row.audit == "seed" and row.arm in arms and row.p2 is not None and before is not None:
            n += 1
            flips += int(before.argmax() != row.p2.argmax())
    return (flips, n) if n else None


def _compared(
    one: str,
    other: str,
    held: Mapping[str, Mapping[Any, Floats]],
    right: Mapping[Name, int],
    what: Literal["p1", "p2"],
    within: tuple[int, int] | None,
) -> list[Finding]:
    mine, theirs = held.get(one, {}), held.get(other, {})
    both = [key for key in theirs if key in mine]
    if what == "p2" and both:
        largest = max(budget for _, budget in both)
        both = [key for key in both if key[1] == largest]
    if not both:
        text = f"{what} of {one!r} and {other!r} were never read on the same questions: sharing answers is not checked"
        return [Finding("note", f"arms {what}", other, None, text)]
    flips = gained = lost = 0
    moved = 0.0
    for key in both:
        a, b = mine[key], theirs[key]
        flips += int(a.argmax() != b.argmax())
        answer = right[key if what == "p1" else key[0]]
        was, now = a.argmax() == answer, b.argmax() == answer
        gained, lost = gained + int(now and not was), lost + int(was and not now)
        moved = max(moved, float(np.abs(a - b).max()))
    n, share = len(both), flips / len(both)
    text = f"{what} answers differently from {one!r} on {flips} of {n} questions (largest change {moved:.2g})"
    if exact.mcnemar(gained, lost) < ALPHA:
        text += f", and the accuracy is another one ({gained} gained, {lost} lost): answers are not shared, and the "
        text += f"arm is left out of tuning. Collect it into a store of its own, or name it: --arm {other}"
        return [Finding("refuse", f"arms {what}", other, None, text, share)]
    if what == "p1":
        much = n >= FEW and exact.clopper_pearson(flips, n)[0] > ARM_FLIPS
        return [Finding("warning" if much else "ok", "arms p1", other, None, text, share)]
    if within is None:
        text += f"; how often one arm differs from itself under another seed is not known: {_ASK}"
        return [Finding("note" if flips else "ok", "arms p2", other, None, text, share)]
    again, of = within
    table = [[flips, n - flips], [again, of - again]]
    p = float(stats.fisher_exact(table, alternative="greater").pvalue)
    text += f"; the same arm under another seed on {again} of {of}"
    return [Finding("warning" if p < ALPHA else "ok", "arms p2", other, None, text, share)]


# --- the order of the options -----------------------------------------------------------------------------------------


def option_order(answers: Sequence[StoredAnswer], extra: Sequence[AuditAnswer] = ()) -> list[Finding]:
    """Whether the answer hangs on the order of the options, per arm: the same questions with rotated options."""
    p1, p2, right = _by_arm(answers)
    counted: dict[tuple[str, str], list[tuple[bool, bool, bool]]] = defaultdict(list)
    for row in extra:
        name = (row.dataset, row.id)
        if row.audit != "rotated" or name not in right:
            continue
        for what, before, after in (
            ("System 1", p1.get(row.arm, {}).get(name), row.p1),
            ("System 2", p2.get(row.arm, {}).get((name, row.budget)), row.p2),
        ):
            if before is not None and after is not None:
                a, b = int(before.argmax()), int(after.argmax())
                counted[row.arm, what].append((a != b, a == right[name], b == right[name]))
    found = []
    for (arm, what), rows in sorted(counted.items()):
        flips, n = sum(flip for flip, _, _ in rows), len(rows)
        was, now = (sum(row[i] for row in rows) / n for i in (1, 2))
        much = n >= FEW and exact.clopper_pearson(flips, n)[0] > ORDER_FLIPS
        text = f"{what} answers differently with rotated options on {flips} of {n} questions"
        text += f" ({was:.0%} right as they stand, {now:.0%} rotated)"
        level: Level = "warning" if much else "note" if flips else "ok"
        found.append(Finding(level, "option order", arm, None, text, flips / n))
    if not found:
        text = f"whether answers hang on the order of the options is not known; {_ASK}"
        found.append(Finding("note", "option order", None, None, text))
    return found


def passes_valid(passes: Sequence[LatencyPass]) -> list[Finding]:
    """Latency passes that were disturbed or could not be checked, and what the prefix cache spared."""
    found = []
    for one in passes:
        level: Level = "warning" if one.state == "void" else "note" if one.note else "ok"
        text = f"latency at {one.concurrency} in flight, pass {one.number}: {one.state}"
        text += f"; {one.note}" if one.note else ""
        if one.hit_rate is not None:
            text += f"; {one.hit_rate:.0%} of the prompt tokens came from the prefix cache"
        value = math.nan if one.hit_rate is None else one.hit_rate
        found.append(Finding(level, "latency pass", one.arm, None, text, value))
    return found


# --- the extra answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditSummary:
    """What an audit collection came to.

    Attributes
    ----------
    arm : str
    asked : dict of str to int
        Answers by kind: ``rotated``, ``seed``, ``load``.
    failed : int
    interrupted : bool
    notes : tuple of str
        What could not be asked.
    """

    arm: str
    asked: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"notes": list(self.notes)}


async def collect(
    questions: Sequence[Question],
    arm: str,
    engine: Engine,
    store: Store,
    *,
    sample: int = SAMPLE,
    budgets: Sequence[int] = (),
    concurrency: int = 32,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> AuditSummary:
    """Ask the extra answers that the audits need, of a sample; those that are there are not asked again.

    Each question of the sample is asked with rotated options, once more by itself (p1 at another load), and, where the
    engine takes a seed, for another thought. None of it becomes part of the outcomes.

    Parameters
    ----------
    questions : sequence of Question
    arm : str
    engine : Engine
    store : Store
    sample : int
        Questions.
    budgets : sequence of int
        The largest is the think budget of the extra thoughts; none are asked without.
    concurrency : int
        Questions in flight, but for those asked by themselves.
    progress, stop
        See `calib.collect.collect`.

    Raises
    ------
    CalibError
        The server cannot be asked; nothing of these questions is stored yet.
    """
    info = await engine.info()
    fingerprint = store.register_model(info)
    covered = {name for name, one in store.coverage(fingerprint, arm).items() if one.system1}
    there = [question for question in questions if (question.dataset, question.id) in covered]
    if not there:
        raise CalibError(
            f"{store.location}: arm {arm!r} has answered none of these questions; collect them first: "
            f"calib collect QUESTIONS --arm {arm}=URL"
        )
    chosen = sorted(there, key=lambda question: place(text_hash(question), "audit"))[:sample]
    asker = _Asker(arm, engine, store, fingerprint, tuple(budgets)[-1:], stop or asyncio.Event(), progress)
    done = {(row.dataset, row.id, row.audit) for row in store.audits(fingerprint) if row.arm == arm}

    def lacking(audit: str, these: Iterable[Question]) -> list[Question]:
        return [question for question in these if (question.dataset, question.id, audit) not in done]

    rotatable = [question for question in chosen if question.kind == "choice"]
    await asker.ask_all("rotated", lacking("rotated", rotatable), concurrency)
    await asker.ask_all("load", lacking("load", chosen), 1)
    seed, notes = getattr(engine, "seed", None), []
    thinkers = [question for question in chosen if info.can_think_about(question)]
    if not asker.budget:
        notes.append("no --budgets: no thought was asked again")
    elif type(seed) is int:
        engine.seed = seed + 1  # type: ignore[attr-defined]  # an engine that has one reads it at each question
        try:
            await asker.ask_all("seed", lacking("seed", thinkers), concurrency)
        finally:
            engine.seed = seed  # type: ignore[attr-defined]
    else:
        notes.append("the server takes no seed: how often one arm differs from itself is not known")
    return AuditSummary(arm, dict(asker.asked), asker.failed, asker.stop.is_set(), tuple(notes))


@dataclass(eq=False)
class _Asker:
    """Asks one kind after the other, and writes what was answered."""

    arm: str
    engine: Engine
    store: Store
    fingerprint: str
    budget: tuple[int, ...]
    stop: asyncio.Event
    progress: Callable[[Progress], None] | None
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: int = 0

    async def ask_all(self, audit: str, questions: Sequence[Question], concurrency: int) -> None:
        """Ask these, so many at a time."""
        jobs = iter(questions)
        started = time.perf_counter()
        done = 0

        async def work() -> None:
            nonlocal done
            for question in jobs:
                if self.stop.is_set():
                    return
                try:
                    row = await self._ask(audit, question, concurrency)
                except (AskFailed, ServerBusy):
                    self.failed += 1
                else:
                    await asyncio.to_thread(self.store.add_audits, self.fingerprint, [(question, row)])
                    self.asked[audit] += 1
                done += 1
                self._report(audit, done, len(questions), time.perf_counter() - started)

        try:
            async with asyncio.TaskGroup() as crew:
                for _ in range(min(concurrency, len(questions))):
                    crew.create_task(work())
        except ExceptionGroup as group:  # the first one ended the others
            raise group.exceptions[0] from None

    async def _ask(self, audit: str, question: Question, concurrency: int) -> AuditAnswer:
        turn = 0
        asked = question
        if audit == "rotated":
            # by different distances, so that the right answer does not always move to the same place
            turn = 1 + int(place(text_hash(question), "turn") * (len(question.options) - 1))
            options = question.options[turn:] + question.options[:turn]
            asked = replace(question, options=options, answer=None)
        budgets = self.budget if audit == "seed" or (audit == "rotated" and question.kind != "score") else ()
        answer = await self.engine.ask(asked, budgets, system1=audit != "seed")
        back = [None if p is None else np.roll(p, turn) for p in (answer.p1, answer.p2[0] if budgets else None)]
        variant = {"rotated": turn, "seed": 1, "load": concurrency}[audit]
        name = (question.dataset, question.id, self.arm)
        return AuditAnswer(*name, audit, variant, back[0], budgets[0] if budgets else None, back[1])

    def _report(self, audit: str, done: int, total: int, elapsed: float) -> None:
        if self.progress is not None:
            rate = done / elapsed if elapsed > 0 else 0.0
            eta = (total - done) / rate if rate > 0 else math.nan
            self.progress(
                Progress(self.arm, done, total, 0, self.failed, 0, rate, elapsed, eta, stage=f"audit {audit}")
            )
