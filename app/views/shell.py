"""What every page stands in: who may come in, the state in the URL, the chosen policy in the sidebar.

The state is one frozen `View` in the session. Widgets show it, their callbacks replace it, and every run writes it to
the URL. Leaves to the pages what they draw, to `calib.view` how a URL is read.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import streamlit as st

from calib import trials, workspace
from calib.dashboard import Settings
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import Policy
from calib.store import SavedPolicy
from calib.target import Target
from calib.trials import StudyName, Trials
from calib.view import KEYS, View, read_view
from calib.workspace import Snapshot, Workspace

__all__ = [
    "BASELINES",
    "Bench",
    "admitted",
    "bench",
    "change",
    "changed",
    "choose",
    "enter",
    "nothing_to_show",
    "plain",
    "refresh",
    "show",
    "studies",
    "style",
    "trials_of",
]

BASELINES = {
    "default": "published default",
    "system1": "never think",
    "always_think": "always think",
    "system2": "System 2 alone",
}
"""What the baselines are called on a page."""

BY_HAND = ""


@dataclass(frozen=True, eq=False)
class Bench:
    """What a page works with in one run.

    Attributes
    ----------
    settings : Settings
    found : Snapshot
        The store as this session sees it, until it is asked to look again.
    outcomes : Outcomes
        All questions of the chosen model.
    space : Workspace
        The selected ones.
    view : View
    policy : Policy
        The chosen policy: of a saved one with its routes, else of the knobs.
    saved : dict of str to SavedPolicy
    targets : tuple of Target
        Limits that can be read; none while they cannot.
    theme : {"light", "dark"}
    """

    settings: Settings
    found: Snapshot
    outcomes: Outcomes
    space: Workspace
    view: View
    policy: Policy
    saved: dict[str, SavedPolicy]
    targets: tuple[Target, ...]
    theme: Literal["light", "dark"]

    @property
    def document(self) -> dict[str, Any] | None:
        """Saved evidence for the chosen policy; None when it was set by hand or is a baseline."""
        saved = self.saved.get(self.view.name)
        return None if saved is None else saved.document

    @property
    def policies(self) -> dict[str, Policy]:
        """Every policy that has a name: saved ones, then baselines."""
        named = {name: Policy.from_dict(one.document["policy"]) for name, one in self.saved.items()}
        return named | {name: p for name, p in self.space.baselines.items() if name not in named}

    def label(self, name: str) -> str:
        """A named policy in words."""
        if name in self.saved:
            return f"saved: {name}"
        return BASELINES.get(name, name) if name else "set by hand"


def bench() -> Bench:
    """What `enter` prepared for this run."""
    found: Bench = st.session_state["bench"]
    return found


def plain(text: str) -> str:
    """Text from data as Markdown shows it literally."""
    return re.sub(r"([\\`*_\[\]<>$~|]|^[#+\-](?=\s)|:(?=\w))", r"\\\1", text, flags=re.MULTILINE)


def style() -> None:
    """The little that the theme cannot say."""
    st.html(
        "<style>"
        ".block-container {padding-top: 3.2rem; padding-bottom: 3rem}"
        "[data-testid='stMetricValue'] {font-variant-numeric: tabular-nums}"
        "[data-testid='stSidebarUserContent'] {padding-top: .5rem}"
        # a figure stays as it is until the new one is there: fading it out and in takes longer than drawing it
        "[data-stale] {opacity: 1 !important; transition: none !important}"
        # columns go below each other where they would get too narrow to read
        "[class*='st-key-wide-'] [data-testid='stColumn'] {min-width: min(100%, 24rem)}"
        "[class*='st-key-tiles-'] [data-testid='stColumn'] {min-width: 7.5rem}"
        "[class*='st-key-cards-'] [data-testid='stColumn'] {min-width: min(100%, 16rem)}"
        "</style>"
    )


# --- who may come in --------------------------------------------------------------------------------------------------


def admitted(settings: Settings) -> bool:
    """Whether the visitor gave the token, where one is asked for; else the form for it."""
    if settings.token_env is None or st.session_state.get("admitted"):
        return True
    token = os.environ.get(settings.token_env, "")

    def check() -> None:
        given = st.session_state.get("token", "")
        st.session_state["admitted"] = bool(token) and hmac.compare_digest(given.encode(), token.encode())
        st.session_state["refused"] = not st.session_state["admitted"]

    st.title("calib")
    st.text_input("Token", type="password", key="token", on_change=check, help="Whoever started calib app has it.")
    if st.session_state.get("refused"):
        st.error("That is not the token. Ask whoever started this page.")
    return False


def nothing_to_show(settings: Settings, error: CalibError) -> None:
    """A page that helps, where there is nothing to draw."""
    st.title("Nothing to show yet")
    st.info(plain(str(error)))
    st.caption("This page follows the store; when it holds something, look again.")
    st.button("Look again", on_click=refresh, type="primary")
    with st.expander("How a store is filled"):
        st.code(
            f"calib collect questions.jsonl --arm base=http://127.0.0.1:8000 --store {settings.store}\n"
            f"calib import runs.jsonl.gz --store {settings.store}\n"
            f"calib optimize --store {settings.store} --target 'p90<10s'",
            language="bash",
        )


# --- state ------------------------------------------------------------------------------------------------------------


def refresh() -> None:
    """Look at the store again in this session."""
    for name in ("snapshot", "studies"):
        st.session_state.pop(name, None)


def change(**fields: Any) -> None:
    """Replace parts of the view; for callbacks, which run before the page is drawn again."""
    st.session_state["view"] = replace(st.session_state["view"], **fields)


def choose(policy: Policy, name: str = BY_HAND) -> None:
    """Choose a policy everywhere: one that has a name, or one found under the rule that holds now."""
    view: View = st.session_state["view"]
    rule = view.rule if name == BY_HAND else "" if name in BASELINES else name
    st.session_state["view"] = view.with_policy(policy, name, rule)


def enter(settings: Settings) -> None:
    """Load what the page needs, draw the sidebar, write the URL.

    Raises
    ------
    CalibError
        When there is nothing to show: no store, an empty one, a newer schema, no thought.
    """
    if "snapshot" not in st.session_state:
        st.session_state["snapshot"] = workspace.snapshot(settings.store, read_only=settings.read_only)
    found: Snapshot = st.session_state["snapshot"]
    model = _model(found)
    load = _load(found, model)
    with st.spinner("Reading the store ...", show_time=True):
        outcomes = workspace.load(found, model, load)
    saved = workspace.fitting(found, outcomes)
    if "view" not in st.session_state:
        query = {name: st.query_params.get_all(name) for name in KEYS}
        read = read_view(query, workspace.start_view(found, outcomes), outcomes)
        st.session_state["view"] = read.view
        st.session_state["notices"] = read.notices
    view = st.session_state["view"] = _possible(st.session_state["view"], found, outcomes)
    space, trouble = _selected(found, view, model, load)
    targets, doubt = _targets(view, space)
    rule = saved.get(view.rule)
    policy = view.policy(None if rule is None else Policy.from_dict(rule.document["policy"]))
    theme: Literal["light", "dark"] = "dark" if st.context.theme.type == "dark" else "light"
    now = Bench(settings, found, outcomes, space, view, policy, saved, targets, theme)
    st.session_state["bench"] = now
    with st.sidebar:
        _policy_widgets(now)
        _limits_widget(doubt)
        _selection_widgets(now, trouble)
    for notice in st.session_state.pop("notices", ()):
        st.warning(plain(f"{notice[:1].upper()}{notice[1:].rstrip('.')}."))
    _write_url(view, model, load)


def _write_url(view: View, model: str | None, load: int | None) -> None:
    query = view.to_query()
    if model is not None:
        query[KEYS.model] = model
    if load is not None:
        query[KEYS.load] = str(load)
    there = {name: st.query_params.get_all(name) for name in st.query_params}
    if there != {name: value if isinstance(value, list) else [value] for name, value in query.items()}:
        st.query_params.from_dict(query)


def _possible(view: View, found: Snapshot, outcomes: Outcomes) -> View:
    """The view without what another model, or a store that was filled meanwhile, does not have."""
    start = workspace.start_view(found, outcomes)
    there = outcomes.budgets.tolist()
    budget = view.think_budget if view.think_budget in there else start.think_budget
    arm = view.arm if view.arm in outcomes.arms else start.arm
    datasets = tuple(name for name in view.datasets if name in outcomes.dataset_names)
    saved = workspace.fitting(found, outcomes).get(view.name)
    name = view.name
    if saved is not None:
        policy = Policy.from_dict(saved.document["policy"])
        same = (view.threshold, view.mix, budget, arm) == (
            policy.threshold,
            policy.mix,
            policy.think_budget,
            policy.arm,
        )
        name = name if same else BY_HAND
    elif name not in BASELINES:
        name = BY_HAND
    there_too = view.rule in workspace.fitting(found, outcomes)
    rule, whole = (view.rule, view.whole) if there_too else ("", False)
    return replace(view, think_budget=budget, arm=arm, datasets=datasets, name=name, rule=rule, whole=whole)


def _selected(found: Snapshot, view: View, model: str | None, load: int | None) -> tuple[Workspace, str]:
    """The workspace of the selection, of everything where the selection cannot be had, and what is wrong with it."""
    try:
        return workspace.select(found, view, model, load), ""
    except CalibError as error:
        return workspace.select(found, replace(view, datasets=(), traffic=""), model, load), str(error)


def _targets(view: View, space: Workspace) -> tuple[tuple[Target, ...], str]:
    try:
        targets = view.targets
        for target in targets:
            if target.dataset is not None and target.dataset not in space.outcomes.dataset_names:
                there = ", ".join(space.outcomes.dataset_names)
                raise CalibError(f"target {target}: no dataset {target.dataset!r} here; there are: {there}")
    except CalibError as error:
        return (), str(error)
    return targets, ""


# --- studies ----------------------------------------------------------------------------------------------------------


def studies(now: Bench) -> tuple[StudyName, ...]:
    """Studies of the storage, as this session saw them last; none where it cannot be read."""
    if "studies" not in st.session_state:
        try:
            st.session_state["studies"] = trials.names(now.settings.store)
        except CalibError as error:
            st.warning(plain(str(error)))
            return ()
    found: tuple[StudyName, ...] = st.session_state["studies"]
    return found


def trials_of(now: Bench, name: str) -> Trials:
    """Trials of a study, read again when it has more of them."""
    count = next((study.trials for study in studies(now) if study.name == name), 0)
    return _trials(now.settings.store, name, count)


@st.cache_resource(max_entries=8, show_spinner="Reading the study ...")
def _trials(store: str, name: str, count: int) -> Trials:  # noqa: ARG001 - more trials, another call
    return trials.read_trials(store, name)


# --- the sidebar ------------------------------------------------------------------------------------------------------


def show(key: str, value: Any) -> str:
    """Make a widget show what the view says."""
    if key not in st.session_state or st.session_state[key] != value:
        st.session_state[key] = value
    return key


def changed(key: str, field: str, read: Callable[[Any], Any] = lambda value: value, **more: Any) -> Callable[[], None]:
    """Callback that takes a widget's value into the view."""

    def callback() -> None:
        if (value := st.session_state[key]) is not None:
            change(**{field: read(value)}, **more)

    return callback


def _model(found: Snapshot) -> str | None:
    """Fingerprint of the chosen model; None when there is only one, which then needs no choice."""
    if len(found.models) < 2:
        return None
    names = {model.fingerprint: f"{model.name} ({model.fingerprint[:8]})" for model in found.models}
    asked = st.query_params.get(KEYS.model, "")
    first = next((name for name in names if asked and name.startswith(asked)), next(iter(names)))
    show("w_model", st.session_state.get("w_model") or first)
    return str(st.sidebar.selectbox("Model", list(names), format_func=names.__getitem__, key="w_model"))


def _load(found: Snapshot, model: str | None) -> int | None:
    """Requests in flight at which seconds count; None when there is no choice."""
    fingerprint = model or (found.models[0].fingerprint if found.models else "")
    several = found.loads.get(fingerprint, {})
    if all(len(loads) < 2 for loads in several.values()):
        return None
    there = sorted({load for loads in several.values() for load in loads})
    asked = st.query_params.get(KEYS.load, "")
    first = int(asked) if asked.isdigit() and int(asked) in there else there[-1]
    current = st.session_state.get("w_load")
    show("w_load", current if current in there else first)
    return int(
        st.sidebar.selectbox(
            "Load (requests in flight)",
            there,
            format_func=lambda load: str(load) if load else "unknown",
            key="w_load",
            help="Seconds were taken at several loads; latency holds at one only.",
        )
    )


def _policy_widgets(now: Bench) -> None:
    view, outcomes = now.view, now.outcomes
    named = now.policies
    options = [*named, *([BY_HAND] if view.name == BY_HAND else [])]

    def take() -> None:
        name = st.session_state["w_name"]
        if name in named:
            choose(named[name], name)

    st.selectbox(
        "Policy",
        options,
        format_func=now.label,
        key=show("w_name", view.name if view.name in options else BY_HAND),
        on_change=take,
        help="Take the knobs of a saved policy or a baseline, then move them.",
    )
    st.slider(
        "Threshold",
        0.0,
        1.1,
        step=0.001,
        format="%.3f",
        key=show("w_t", round(view.threshold, 3)),
        on_change=changed("w_t", "threshold", float, name=BY_HAND),
        help="Think when System 1's confidence is below: 0 never thinks, 1.1 always does.",
    )
    st.slider(
        "Mix",
        0.0,
        1.0,
        step=0.005,
        format="%.3f",
        key=show("w_m", round(view.mix, 3)),
        on_change=changed("w_m", "mix", float, name=BY_HAND),
        help="Weight of System 2 in the answer after thinking.",
    )
    budgets = [int(budget) for budget in outcomes.budgets]
    if len(budgets) > 1:
        st.select_slider(
            "Think budget",
            budgets,
            format_func=lambda budget: f"{budget:,} tokens",
            key=show("w_b", view.think_budget),
            on_change=changed("w_b", "think_budget", int, name=BY_HAND),
            help="Most thinking tokens. Only what was collected can be shown.",
        )
    if len(outcomes.arms) > 1:
        st.segmented_control(
            "Arm",
            list(outcomes.arms),
            key=show("w_arm", view.arm),
            required=True,
            on_change=changed("w_arm", "arm", str, name=BY_HAND),
            help="A way of serving the same model. Answers are shared, latency is not.",
        )
    special = _special(now.policy)
    if special and view.name == BY_HAND:
        st.caption(plain(f"As in {view.rule}: {', '.join(special)}."))
        st.button(
            "Leave that out",
            on_click=change,
            kwargs={"rule": "", "whole": False},
            key="drop-rule",
            help="The knobs alone: raw probabilities, linear mix, the same for every request.",
        )


def _special(policy: Policy) -> list[str]:
    """What a policy has beside its four knobs, in words."""
    found = ["calibrated probabilities"] * (policy.temperatures is not None)
    found += [f"confidence {policy.confidence}"] * (policy.confidence != "max")
    found += [f"pool {policy.pool}"] * (policy.pool != "linear")
    found += [f"{len(policy.routes)} routes"] * bool(policy.routes)
    return found + ([] if policy.deadline is None else [f"deadline {policy.deadline:g} s"])


def _limits_widget(doubt: str) -> None:
    view: View = st.session_state["view"]
    st.text_input(
        "Limits",
        placeholder="p90<10s, accuracy>=80%",
        key=show("w_limits", view.limits),
        on_change=changed("w_limits", "limits", str),
        help="What a policy must keep: METRIC[DATASET] OP NUMBER UNIT, joined by commas.",
    )
    if doubt:
        st.error(plain(doubt))


def _selection_widgets(now: Bench, trouble: str) -> None:
    view, names = now.view, now.outcomes.dataset_names
    if len(names) > 1:
        with st.expander("Datasets and traffic", expanded=bool(view.datasets or view.traffic or trouble)):
            st.multiselect(
                "Datasets",
                names,
                placeholder=f"all {len(names)}",
                key=show("w_sets", list(view.datasets)),
                on_change=changed("w_sets", "datasets", tuple),
            )
            st.text_input(
                "Traffic",
                placeholder=f"{names[0]}=3, {names[1]}=1",
                key=show("w_traffic", view.traffic),
                on_change=changed("w_traffic", "traffic", str),
                help="Relative share of each dataset in your traffic; datasets that are not named are left out. "
                "Empty: every question counts the same.",
            )
            if trouble:
                st.error(plain(trouble))
    st.caption(f"{now.space.tune.n:,} tune questions of {now.outcomes.n:,} shown, the others held out for the test.")
