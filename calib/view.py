"""What the dashboard shows, as it stands in the URL: a link reopens the same view.

Pure: text in, `View` out, and back. Leaves to the pages what they draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, NEVER, Policy
from calib.target import Target, parse_targets

__all__ = ["FRONT_METRICS", "GROUPS", "KEYS", "Read", "View", "read_view", "traffic_of"]

FRONT_METRICS = ("p90", "mean", "tokens")
"""What a front can be drawn against."""

GROUPS = ("threshold", "latency", "spread", "budget", "trust")
"""Groups of figures on the page Explore: a group is drawn anew with each move of a slider, so it has few."""


class _Key(NamedTuple):
    threshold: str = "t"
    mix: str = "m"
    think_budget: str = "b"
    arm: str = "arm"
    name: str = "policy"
    rule: str = "rule"
    whole: str = "whole"
    datasets: str = "set"
    traffic: str = "traffic"
    limits: str = "limits"
    metric: str = "against"
    group: str = "show"
    rival: str = "vs"
    study: str = "study"
    model: str = "model"
    load: str = "load"


KEYS = _Key()
"""Names in the query of the URL."""


@dataclass(frozen=True)
class View:
    """What is chosen.

    Attributes
    ----------
    threshold, mix : float
    think_budget : int
    arm : str
        The knobs of the chosen policy.
    name : str
        Saved policy or baseline that they were taken from; empty when they were set by hand.
    rule : str
        Saved policy whose confidence, pool and temperatures hold, also when its knobs were moved; empty for none.
    whole : bool
        Whether its routes and its deadline hold too: not for a point of a front, which has neither.
    datasets : tuple of str
        Empty for all.
    traffic : str
        As the option ``--traffic``; empty for as collected.
    limits : str
        As the option ``--target``; empty for none.
    metric : str
        Of `FRONT_METRICS`.
    group : str
        Of `GROUPS`.
    rival : str
        Policy to compare questions with: a baseline or a saved one.
    study : str
        Study of the storage; empty for none.
    """

    threshold: float
    mix: float
    think_budget: int
    arm: str
    name: str = ""
    rule: str = ""
    whole: bool = False
    datasets: tuple[str, ...] = ()
    traffic: str = ""
    limits: str = ""
    metric: str = "p90"
    group: str = "threshold"
    rival: str = "default"
    study: str = ""

    def policy(self, rule: Policy | None = None) -> Policy:
        """The policy of the knobs.

        Parameters
        ----------
        rule : Policy, optional
            What `rule` names; a plain policy's rule holds when left out.
        """
        base = Policy() if rule is None else rule
        if not self.whole:
            base = replace(base, routes={}, deadline=None)
        return replace(base, threshold=self.threshold, mix=self.mix, think_budget=self.think_budget, arm=self.arm)

    def with_policy(self, policy: Policy, name: str = "", rule: str = "") -> View:
        """The same view with the knobs of another policy, taken whole or from a front; arguments as the attributes."""
        return replace(
            self,
            threshold=policy.threshold,
            mix=policy.mix,
            think_budget=policy.think_budget,
            arm=policy.arm,
            name=name,
            rule=rule,
            whole=bool(policy.routes) or policy.deadline is not None,
        )

    @property
    def targets(self) -> tuple[Target, ...]:
        """The limits; a `CalibError` says what cannot be read."""
        return parse_targets(self.limits) if self.limits.strip() else ()

    def to_query(self) -> dict[str, str | list[str]]:
        """What stands in the URL; what is left out has its first value."""
        query: dict[str, str | list[str]] = {
            KEYS.threshold: repr(float(self.threshold)),
            KEYS.mix: repr(float(self.mix)),
            KEYS.think_budget: str(int(self.think_budget)),
            KEYS.arm: self.arm,
        }
        plain = View(self.threshold, self.mix, self.think_budget, self.arm)
        for field in ("name", "rule", "traffic", "limits", "metric", "group", "rival", "study"):
            if getattr(self, field) != getattr(plain, field):
                query[getattr(KEYS, field)] = getattr(self, field)
        if self.whole:
            query[KEYS.whole] = "1"
        if self.datasets:
            query[KEYS.datasets] = list(self.datasets)
        return query


class Read(NamedTuple):
    """A view from a URL, and what of it could not be had."""

    view: View
    notices: tuple[str, ...]


def read_view(query: Mapping[str, Sequence[str]], start: View, outcomes: Outcomes) -> Read:
    """The view that a URL asks for.

    Parameters
    ----------
    query : mapping of str to sequence of str
        Every value of each name.
    start : View
        What is shown without a query.
    outcomes : Outcomes
        All of the store: what there is to choose from.

    Returns
    -------
    Read
        What cannot be had is as in ``start``, and a notice says so.
    """
    notices: list[str] = []
    view = start

    def last(name: str) -> str | None:
        values = query.get(name) or ()
        return values[-1] if values else None

    def number(name: str, low: float, high: float) -> float | None:
        text = last(name)
        if text is None:
            return None
        try:
            found = float(text)
        except ValueError:
            found = low - 1
        if not low <= found <= high:  # a NaN is not either
            notices.append(f"the link says {name}={text}, which is no number from {low:g} to {high:g}")
            return None
        return found

    def one_of(name: str, there: Iterable[str]) -> str | None:
        text = last(name)
        known = list(there)
        if text is not None and text not in known:
            notices.append(f"the link says {name}={text}; there are: {', '.join(known)}")
            return None
        return text

    threshold, mix = number(KEYS.threshold, NEVER, ALWAYS), number(KEYS.mix, 0, 1)
    budget = one_of(KEYS.think_budget, map(str, outcomes.budgets.tolist()))
    arm = one_of(KEYS.arm, outcomes.arms)
    by_hand = any(last(name) is not None for name in (KEYS.threshold, KEYS.mix, KEYS.think_budget, KEYS.arm))
    view = replace(
        view,
        threshold=view.threshold if threshold is None else threshold,
        mix=view.mix if mix is None else mix,
        think_budget=view.think_budget if budget is None else int(budget),
        arm=view.arm if arm is None else arm,
        name=last(KEYS.name) or ("" if by_hand else view.name),
        rule=last(KEYS.rule) or ("" if by_hand else view.rule),
        whole=last(KEYS.whole) == "1" or (view.whole and not by_hand),
    )
    wanted = list(dict.fromkeys(query.get(KEYS.datasets) or ()))
    unknown = [name for name in wanted if name not in outcomes.dataset_names]
    if unknown:
        notices.append(f"the link names datasets that are not there: {', '.join(unknown)}")
    known = tuple(name for name in wanted if name in outcomes.dataset_names)
    view = replace(view, datasets=known or view.datasets)
    metric, group = one_of(KEYS.metric, FRONT_METRICS), one_of(KEYS.group, GROUPS)
    limits, traffic = last(KEYS.limits), last(KEYS.traffic)
    for text, read in ((limits, parse_targets), (traffic, lambda text: traffic_of(text, outcomes))):
        if text and text.strip():
            try:
                read(text)
            except CalibError as error:
                notices.append(f"the link: {error}")
    view = replace(
        view,
        metric=metric or view.metric,
        group=group or view.group,
        rival=last(KEYS.rival) or view.rival,
        study=last(KEYS.study) or view.study,
        limits=view.limits if limits is None else limits,
        traffic=view.traffic if traffic is None else traffic,
    )
    return Read(view, tuple(notices))


def traffic_of(text: str, outcomes: Outcomes) -> dict[str, float]:
    """Relative traffic by dataset from ``gsm8k=3, bbh=1``; a name may hold ``=``, not a comma.

    Raises
    ------
    CalibError
        What is not NAME=NUMBER, or names a dataset that is not there.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, share = part.rpartition("=")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not name.strip() or not 0 <= value < float("inf"):
            raise CalibError(f"traffic {part!r} is not NAME=NUMBER; write for instance: {outcomes.dataset_names[0]}=3")
        if name.strip() not in outcomes.dataset_names:
            raise CalibError(
                f"traffic names the unknown dataset {name.strip()!r}; there are: {', '.join(outcomes.dataset_names)}"
            )
        found[name.strip()] = value
    return found
