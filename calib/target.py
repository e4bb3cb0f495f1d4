"""The target grammar: text to `Target`, its margin on an `Evaluation`, and text again.

``METRIC[SELECTOR] OP NUMBER UNIT``, joined by ``,`` or ``;``: ``accuracy>=83%, p90<10s, p90[GPQA Diamond]<20s``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from calib.errors import CalibError
from calib.policy import LATENCY_METRICS, Evaluation

__all__ = ["METRICS", "WORST", "Target", "margins", "parse_target", "parse_targets"]

ALIASES = {"acc": "accuracy", "median": "p50"}
RATES = ("accuracy", "skill", "think_rate", "ece", "macro_f1")
HIGHER_IS_BETTER = ("accuracy", "skill", "macro_f1")
METRICS = (*LATENCY_METRICS, *RATES, "tokens", "brier", "nll", "cost")
"""Every metric that a target can name."""

WORST = "worst"
"""Selector: the target must hold in every dataset."""

_SECONDS = {"s": Decimal(1), "ms": Decimal(1) / 1000}
_ITEM = re.compile(
    r"""\s*(?P<metric>[A-Za-z_][\w]*)\s*
        (?:\[\s*(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<plain>[^\]"',;][^\],;]*?))\s*\])?\s*
        (?P<op><=|>=|<|>|:)\s*
        (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*
        (?P<unit>%|[A-Za-z]+)?\s*\Z""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Target:
    """A limit that a policy must keep.

    Attributes
    ----------
    metric : str
        One of `METRICS`.
    op : {"<", "<=", ">", ">="}
    value : float
        The limit in seconds, as a share of 1, or plain.
    unit : {"s", "ms", "%", ""}
        As it was written; only for printing.
    dataset : str or None
        The dataset in which it must hold; None for all questions together.
    worst : bool
        Whether it must hold in every dataset.
    """

    metric: str
    op: str
    value: float
    unit: str = ""
    dataset: str | None = None
    worst: bool = False

    @property
    def upper(self) -> bool:
        """Whether the limit is from above."""
        return self.op in ("<", "<=")

    @property
    def is_latency(self) -> bool:
        """Whether it limits seconds."""
        return self.metric in LATENCY_METRICS

    @property
    def selector(self) -> str:
        """What stands in brackets, or nothing."""
        if self.worst:
            return f"[{WORST}]"
        if self.dataset is None:
            return ""
        name = self.dataset
        if name == WORST or name != name.strip() or re.search(r"""[\],;"']""", name) or not name:
            quote = "'" if '"' in name else '"'
            return f"[{quote}{name}{quote}]"
        return f"[{name}]"

    def __str__(self) -> str:
        factor = {"ms": Decimal(1000), "%": Decimal(100)}.get(self.unit, Decimal(1))
        number = f"{(Decimal(repr(self.value)) * factor).normalize():f}"
        return f"{self.metric}{self.selector}{self.op}{number}{self.unit}"

    def value_of(self, evaluation: Evaluation) -> float:
        """The metric that the target looks at; with ``worst``, the value of the dataset with the least slack."""
        if self.worst:
            values = [getattr(e, self.metric) for e in self._breakdown(evaluation).values()]
            known = [v for v in values if not math.isnan(v)]
            if len(known) < len(values) and (self.is_latency or not known):
                return math.nan
            return float(max(known) if self.upper else min(known))
        if self.dataset is not None:
            each = self._breakdown(evaluation)
            if self.dataset not in each:
                near = difflib.get_close_matches(self.dataset, each, 1)
                hint = f" Did you mean [{near[0]}]?" if near else ""
                raise CalibError(f"target {self}: no dataset {self.dataset!r}; there are: {', '.join(each)}.{hint}")
            evaluation = each[self.dataset]
        return float(getattr(evaluation, self.metric))

    def _breakdown(self, evaluation: Evaluation) -> dict[str, Evaluation]:
        if not evaluation.by_dataset:
            raise ValueError(f"target {self} needs evaluate(..., by_dataset=True)")
        return dict(evaluation.by_dataset)

    def slack(self, value: float) -> float:
        """Distance of a metric's value to the limit, in the metric's unit: 0 or more when the target is met.

        A strict target at equality is missed by the smallest step; an unknown value is missed by infinity.
        """
        if math.isnan(value):
            return -math.inf
        distance = self.value - value if self.upper else value - self.value
        if distance == 0 and self.op in ("<", ">"):
            return math.nextafter(0, -1)
        return distance

    def margin(self, evaluation: Evaluation) -> float:
        """`slack` of the evaluation: 0 or more when the target is met."""
        return self.slack(self.value_of(evaluation))

    def met(self, evaluation: Evaluation) -> bool:
        """Whether the target is met."""
        return self.margin(evaluation) >= 0


def margins(targets: Iterable[Target], evaluation: Evaluation) -> dict[str, float]:
    """Margin of each target, by its text."""
    return {str(target): target.margin(evaluation) for target in targets}


def parse_targets(texts: str | Iterable[str]) -> tuple[Target, ...]:
    """Targets of one or several texts, each with items joined by ``,`` or ``;``; the same twice counts once."""
    found: dict[Target, None] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        items = _items(text)
        if not items:
            raise CalibError(f"empty target {text!r}; write for instance: --target 'accuracy>=83%, p90<10s'")
        found.update((parse_target(item), None) for item in items)
    return tuple(found)


def _items(text: str) -> list[str]:
    """Split at ``,`` and ``;``, but not inside the quotes of a selector."""
    items, start, quote, inside = [], 0, "", False
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char == "[":
            inside = True
        elif char == "]":
            inside = False
        elif inside and char in "\"'" and text[:i].rstrip().endswith("["):
            quote = char
        elif char in ",;" and not inside:
            items.append(text[start:i])
            start = i + 1
    items.append(text[start:])
    return [item.strip() for item in items if item.strip()]


def parse_target(text: str) -> Target:
    """One target.

    Raises
    ------
    CalibError
        Saying what cannot be read, what was expected and what to type.
    """
    text = text.strip()
    match = _ITEM.match(text)
    if match is None:
        raise CalibError(_why_not(text))
    metric = match["metric"].lower()
    metric = ALIASES.get(metric, metric)
    if metric not in METRICS:
        raise CalibError(_unknown_metric(match["metric"]))
    op = match["op"]
    if op == ":":
        op = ">=" if metric in HIGHER_IS_BETTER else "<"
    selector = f"[{match['plain']}]" if match["plain"] else ""
    head = f"{match['metric']}{selector}{match['op']}{match['number']}"
    try:
        value = _value(metric, head, Decimal(match["number"]), match["unit"] or "")
    except ArithmeticError:
        value = math.inf
    if not math.isfinite(value) or (value == 0 and re.search("[1-9]", re.split("[eE]", match["number"])[0])):
        raise CalibError(f"target {text}: the number {match['number']} is out of range; write for instance p90<10s")
    plain = match["plain"]
    return Target(
        metric,
        op,
        value,
        match["unit"] or "",
        dataset=match["quoted"] if match["quote"] else (None if plain == WORST else plain),
        worst=plain == WORST,
    )


def _value(metric: str, head: str, number: Decimal, unit: str) -> float:
    if metric in LATENCY_METRICS:
        if unit not in _SECONDS:
            wrong = f"has the unit {unit!r}" if unit else "has no unit"
            raise CalibError(f"target {head}{unit}: a latency {wrong}; write {head}s or {head}ms")
        if number <= 0:
            raise CalibError(f"target {head}{unit}: a latency limit must be above 0")
        return float(number * _SECONDS[unit])
    if metric in RATES:
        if unit not in ("%", ""):
            raise CalibError(f"target {head}{unit}: {metric} has the unit {unit!r}; write {head}% or a share of 1")
        if not unit and abs(number) > 1:
            share = head.replace(_digits(head), f"{(number / 100).normalize():f}")
            raise CalibError(f"target {head}: is this a percentage? write {head}% or {share}")
        value = float(number / 100) if unit else float(number)
        if value > 1 or (value < 0 and metric != "skill"):
            raise CalibError(f"target {head}{unit}: {metric} lies between 0 and 100%")
        return value
    if unit:
        raise CalibError(f"target {head}{unit}: {metric} has no unit; write {head}")
    if number < 0:
        raise CalibError(f"target {head}: {metric} cannot be negative")
    return float(number)


def _digits(head: str) -> str:
    return re.split(r"[<>:]=?", head)[-1]


def _unknown_metric(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [*METRICS, *ALIASES], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"unknown metric {name!r} in a target; known: {', '.join(METRICS)}.{hint}"


def _why_not(text: str) -> str:
    bare = re.fullmatch(r"(\w+)\s*(\[[^\]]*\])?", text)
    name = ALIASES.get(bare[1].lower(), bare[1].lower()) if bare else ""
    if bare and name in METRICS:
        if name in LATENCY_METRICS:
            sample = (f"{text}<10s", f"{text}:10s")
        elif name in HIGHER_IS_BETTER:
            sample = (f"{text}>=80%", f"{text}:80%")
        else:
            sample = (f"{text}<0.5", f"{text}:0.5")
        return (
            f"target {text!r} has no limit. A shell reads < and > as redirections: quote the target, "
            f"--target '{sample[0]}', or write --target {sample[1]}, which needs no quotes"
        )
    if bare:
        return _unknown_metric(bare[1])
    inside = re.match(r"\s*\w+\s*\[(?!\s*[\"'])([^\]]*[,;\"'][^\]]*)\]", text)
    if inside:
        return f'target {text!r}: quote a dataset that holds a comma or a quote: ["{inside[1].strip()}"]'
    return (
        f"target {text!r} cannot be read; expected METRIC[DATASET] OP NUMBER UNIT with OP one of < <= > >= and "
        "the units s, ms, %, for instance: 'accuracy>=83%, p90<10s, p90[GPQA Diamond]<20s, accuracy[worst]>=60%'"
    )
