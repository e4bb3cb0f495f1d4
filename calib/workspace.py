"""What the dashboard looks at: one load for each content of a store, and what is derived from it, kept.

Without Streamlit, so that the server can load while it starts, and a test can ask without a browser. What is kept goes
by the content of the store and by what was selected, never by time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from calib.confidences import ConfidenceRow, compare_confidences
from calib.curves import Curves, Frontier, Marked
from calib.errors import CalibError
from calib.optimise import Table, optimum, tabulate
from calib.outcomes import Outcomes
from calib.policy import Policy, baselines
from calib.slices import thin
from calib.store import ModelRow, SavedPolicy, Store, load_outcomes
from calib.store.contents import Counts, content_key, counts, loads
from calib.target import Target
from calib.view import View, traffic_of
from calib.why import WhyRow, why

__all__ = [
    "COMPARED",
    "FRONT_POINTS",
    "TEST_SHARE",
    "Kept",
    "Snapshot",
    "Workspace",
    "fitting",
    "load",
    "point_of",
    "select",
    "snapshot",
    "start_view",
    "thinned",
]

TEST_SHARE = 0.3
"""Share of the questions that no figure shows before the test, as `calib optimize` holds out by default."""

FRONT_POINTS = 300
"""Points of a front that are drawn, each an exact policy."""
COMPARED = 100
"""Points of a front that are compared with the chosen policy."""

_PLAIN = ("max", "linear", None)
"""Confidence, pool and temperatures of a plain policy."""

T = TypeVar("T")


class Kept:
    """The newest results of a call by its key; one thread computes while others wait for the same.

    Parameters
    ----------
    size : int
        How many are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, _Slot] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The kept result of this key, computed when there is none; an exception is not kept."""
        with self._lock:
            slot = self._found.setdefault(key, _Slot())
            self._found.move_to_end(key)
            while len(self._found) > self._size:
                self._found.popitem(last=False)
        with slot.lock:
            if not slot.full:
                slot.value = compute()
                slot.full = True
            return slot.value  # type: ignore[return-value]  # what `compute` gave for this key


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.full = False
        self.value: object = None


@dataclass(frozen=True)
class Snapshot:
    """What a store holds at one moment.

    Attributes
    ----------
    location : str
        As it is opened.
    content : str
        Identity of what outcomes are made of.
    models : tuple of ModelRow
        Those with answers.
    saved : tuple of SavedPolicy
    counts : Counts
    loads : mapping of str to mapping
        By fingerprint: concurrencies at which each arm was timed.
    """

    location: str
    content: str
    models: tuple[ModelRow, ...]
    saved: tuple[SavedPolicy, ...]
    counts: Counts
    loads: dict[str, dict[str, tuple[int, ...]]]


def snapshot(location: str, *, read_only: bool = False) -> Snapshot:
    """Look at a store.

    Parameters
    ----------
    location : str
    read_only : bool, default False
        Whether a store of an older version is left as it is.

    Raises
    ------
    CalibError
        No store there, no database, a newer version, an older one that cannot be read without writing.
    """
    with Store.open(location, must_exist=True, read_only=read_only) as store:
        found = counts(store)
        answered = {arm.model for arm in found.arms if arm.answers}
        models = tuple(model for model in store.models() if model.name in answered)
        return Snapshot(
            location,
            content_key(store),
            models,
            tuple(store.policies()),
            found,
            {model.fingerprint: loads(store, model.fingerprint) for model in models},
        )


class Workspace:
    """Selected questions, split, with everything that pages ask about them; each answer is computed once.

    Parameters
    ----------
    outcomes : Outcomes
        Selected and weighted.
    names : tuple of str
        All datasets of the store: a filter changes no colour.
    """

    def __init__(self, outcomes: Outcomes, names: tuple[str, ...]) -> None:
        self.outcomes = outcomes
        self.names = names
        self._kept = Kept(64)
        try:
            self.tune, self.test = outcomes.split(TEST_SHARE)
        except CalibError:  # too few to hold some out: all are shown, and nothing can be certified
            self.tune, self.test = outcomes, None

    @cached_property
    def table(self) -> Table:
        """All plain policies on the tune questions."""
        return tabulate(self.tune)

    @cached_property
    def curves(self) -> Curves:
        """Curves of plain policies on the tune questions."""
        return Curves(self.table)

    def curves_of(self, like: Policy) -> Curves:
        """Curves of policies with the confidence, pool and temperatures of another, whatever its knobs are."""
        rule = (like.confidence, like.pool, like.temperatures)
        if rule == _PLAIN:
            return self.curves
        base = Policy(confidence=like.confidence, pool=like.pool, temperatures=like.temperatures)
        return self._kept.get(("curves", rule), lambda: Curves(self.tune, like=base))

    @cached_property
    def baselines(self) -> dict[str, Policy]:
        """What one would serve without tuning, by name."""
        return baselines(self.outcomes)

    @property
    def test_share(self) -> float:
        """Share held out; 0 when there were too few."""
        return 0.0 if self.test is None else TEST_SHARE

    def kept(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What a page works out about these questions, once for each key."""
        return self._kept.get(("page", key), compute)

    def best(self, targets: Sequence[Target], like: Policy | None = None) -> Policy | None:
        """The best policy inside the limits on the tune questions, without a margin; None when none keeps them.

        Parameters
        ----------
        targets : sequence of Target
        like : Policy, optional
            Whose rule it shall have, as `curves_of`; a plain one when left out.
        """
        curves = self.curves_of(like or Policy())

        def search() -> Policy | None:
            found = optimum(curves.table, targets).policy
            return None if found is None else replace(found, temperatures=curves.like.temperatures)

        return self._kept.get(("best", tuple(targets), curves.like), search)

    def confidences(self, targets: Sequence[Target]) -> list[ConfidenceRow]:
        """The definitions of the confidence beside each other, as the systems answered."""
        key = ("confidences", tuple(targets))
        return self._kept.get(key, lambda: compare_confidences(self.tune, targets, table=self.table))

    def marked(self, label: str, policy: Policy) -> Marked:
        """A policy with its values in every dataset."""
        return self._kept.get(("marked", label, policy), lambda: self.curves_of(policy).marked(label, policy))

    def front(self, metric: str, arm: str, like: Policy | None = None) -> Frontier:
        """The exact front of accuracy in one arm, at most about `FRONT_POINTS` of its points; ``like`` as in `best`."""
        curves = self.curves_of(like or Policy())
        key = ("front", metric, arm, curves.like)
        return self._kept.get(key, lambda: thinned(curves.frontier(metric, arms=[arm])))

    def alike(self, front: Frontier, chosen: Policy) -> NDArray[np.bool_]:
        """Which points of a front cannot be told apart from the chosen policy by accuracy.

        Asked of about `COMPARED` of them; between these a point is as the nearest.
        """

        def compare() -> NDArray[np.bool_]:
            size = len(front.front)
            at = np.unique(np.linspace(0, size - 1, min(size, COMPARED)).astype(int))
            same = self.curves_of(front.like).alike([front.policy(int(i)) for i in at], chosen)
            return np.asarray(same[np.abs(np.subtract.outer(np.arange(size), at)).argmin(axis=1)])

        return self._kept.get(("alike", front.arms, front.front.metrics, front.like, chosen), compare)

    def why(self, policy: Policy) -> list[WhyRow]:
        """What thinking does in each dataset, at the policy's budget, arm and mix."""
        key = ("why", policy.think_budget, policy.arm, policy.mix)
        return self._kept.get(key, lambda: why(self.tune, policy.think_budget, policy.arm, policy.mix))

    def has_latency(self, policy: Policy) -> bool:
        """Whether the seconds of the policy are known for every question."""
        a, b = self.tune.arm_index(policy.arm), self.tune.budget_index(policy.think_budget)
        thinking = self.tune.t2[a][self.tune.can_think, b]
        return not (np.isnan(self.tune.t1[a]).any() or np.isnan(thinking).any())


def thinned(found: Frontier) -> Frontier:
    """A front with fewer points, each still exact: more than this do not fit beside each other on a screen."""
    f = found.front
    if len(f) <= FRONT_POINTS:
        return found
    at = thin(f.x, f.y, points=FRONT_POINTS)
    columns = ("x", "y", "threshold", "mix", "think_budget", "arm")
    front = replace(f, **{name: getattr(f, name)[at] for name in columns})
    return replace(found, front=front, p90=found.p90[at], p99=found.p99[at])


def point_of(fronts: Sequence[Frontier], clicked: Sequence[Mapping[str, Any]]) -> Policy | None:
    """Policy of the first point of a front among clicked points of its figure; None for anything else.

    Parameters
    ----------
    fronts : sequence of Frontier
        As they were drawn.
    clicked : sequence of mapping
        Points as Plotly tells them; ``customdata[0]`` of a front's is ``"FRONT:POINT"``.
    """
    for point in clicked:
        named = point.get("customdata") or ("",)
        front, colon, at = str(named[0] if isinstance(named, (list, tuple)) else named).partition(":")
        if colon and front.isdigit() and at.isdigit() and int(front) < len(fronts):
            of = fronts[int(front)]
            if int(at) < len(of.front):
                return of.policy(int(at))
    return None


_LOADED, _SELECTED = Kept(2), Kept(6)


def load(found: Snapshot, model: str | None = None, concurrency: int | None = None) -> Outcomes:
    """All outcomes of one model of a snapshot; the store is read once for each content.

    A store that is being filled may be a few answers further than the snapshot when it is read.
    """
    key = (found.location, found.content, model, concurrency)

    def read() -> Outcomes:
        with Store.open(found.location, read_only=True) as store:
            return load_outcomes(store, model=model, concurrency=concurrency)

    return _LOADED.get(key, read)


def select(found: Snapshot, view: View, model: str | None = None, concurrency: int | None = None) -> Workspace:
    """The workspace of a view's datasets and traffic."""
    outcomes = load(found, model, concurrency)
    key = (found.location, found.content, model, concurrency, view.datasets, view.traffic)

    def make() -> Workspace:
        chosen = outcomes.select(view.datasets) if view.datasets else outcomes
        if view.traffic.strip():
            shares = traffic_of(view.traffic, outcomes)
            shares = {name: share for name, share in shares.items() if name in chosen.dataset_names}
            if not any(shares.values()):
                raise CalibError("the traffic gives none of the chosen datasets a share; choose more, or clear it")
            chosen = chosen.reweighted(shares)
        return Workspace(chosen, outcomes.dataset_names)

    return _SELECTED.get(key, make)


def start_view(found: Snapshot, outcomes: Outcomes) -> View:
    """What is shown first: the saved policy ``best``, else the newest, else what the server does by itself.

    Raises
    ------
    CalibError
        When no thought was collected: there is no policy to choose.
    """
    default = baselines(outcomes)["default"]
    fitting = [saved for saved in found.saved if _fits(saved, outcomes)]
    first = [saved for saved in fitting if saved.name == "best"] or sorted(fitting, key=lambda one: one.created)
    plain = View(default.threshold, default.mix, default.think_budget, default.arm, name="default")
    if not first:
        return plain
    document = first[-1].document
    limits = ", ".join(str(target["target"]) for target in document.get("targets") or ())
    return replace(plain.with_policy(Policy.from_dict(document["policy"]), *[first[-1].name] * 2), limits=limits)


def _fits(saved: SavedPolicy, outcomes: Outcomes) -> bool:
    """Whether a saved document holds a policy of this model whose arm and budget were collected."""
    policy, prints = saved.document.get("policy"), saved.document.get("fingerprints") or {}
    if not policy or prints.get("model", outcomes.fingerprint) != outcomes.fingerprint:
        return False
    return policy["arm"] in outcomes.arms and policy["think_budget"] in outcomes.budgets.tolist()


def fitting(found: Snapshot, outcomes: Outcomes) -> dict[str, SavedPolicy]:
    """Saved policies that can be shown on these outcomes, by name."""
    return {saved.name: saved for saved in found.saved if _fits(saved, outcomes)}
