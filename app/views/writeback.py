"""Page 6: what writing would change, how far to trust it, what must be ticked; then write, and the way back."""

from __future__ import annotations

from typing import Any

import streamlit as st

from calib.appraise import allowance, appraise
from calib.diff import Difference, difference
from calib.errors import CalibError
from calib.export import export, other_model
from calib.history import ConfigFolder, Entry
from calib.knobs import knobs, uncarried
from calib.outcomes import ESTIMATED, SIMULATED
from calib.provenance import Provenance
from calib.saved import provenance
from calib.show import percent
from calib.store import Store
from calib.tuning import Demand, split_identity
from views import parts, shell

LEVEL = 0.95
HOLDERS = {
    "": "nobody yet",
    "gateway": "the gateway (calib serve)",
    "client": "every client",
}


def page() -> None:
    """Draw the page."""
    now = shell.bench()
    parts.header(
        "Write back", now, "The chosen policy into the config of the server, with its evidence, and the way back."
    )
    st.write(shell.plain(f"{now.label(now.view.name)}: {parts.knobs(now.policy)}"))
    if message := st.session_state.pop("written", None):
        st.toast(shell.plain(message), icon=":material/check:")  # and not a line that moves the page
    try:
        document = _document(now)
    except CalibError as error:
        st.info(shell.plain(str(error)))
        return
    st.subheader("1. How far to trust it", anchor=False)
    parts.verdict(document)
    _certify(now, document)
    st.subheader("2. What would change", anchor=False)
    folder = _folder(now)
    if folder is None:
        return
    try:
        document, origin = _complete(now, document)
        _diff(folder, document)
        if now.settings.read_only:
            st.info("This page was started with --read-only: nothing can be written.")
        else:
            st.subheader("3. Write it", anchor=False)
            _write(now, folder, document, origin)
        _history(now, folder)
    except CalibError as error:
        st.error(shell.plain(str(error)))


# --- evidence ---------------------------------------------------------------------------------------------------------


def _key(now: shell.Bench) -> tuple[Any, ...]:
    return ("evidence", now.policy, now.targets)


def _document(now: shell.Bench) -> dict[str, Any]:
    """The evidence for the chosen policy: certified here, saved by `calib optimize`, else of the tune questions."""
    certified: dict[str, Any] | None = _certified().get(_identity(now))
    if certified is not None:
        return certified
    saved = now.document
    if saved is not None and _limits_of(saved) == [str(target) for target in now.targets] and _whole(now):
        return saved
    return now.space.kept(
        _key(now),
        lambda: appraise(now.space.outcomes, _demand(now), now.policy, table=now.space.table).to_dict(_name(now)),
    )


def _certified() -> dict[Any, dict[str, Any]]:
    """Documents that were certified in this session."""
    found: dict[Any, dict[str, Any]] = st.session_state.setdefault("certified", {})
    return found


def _identity(now: shell.Bench) -> tuple[Any, ...]:
    return (now.found.content, now.view.datasets, now.view.traffic, *_key(now))


def _limits_of(document: dict[str, Any]) -> list[str]:
    return [str(test["target"]) for test in document.get("targets") or ()]


def _whole(now: shell.Bench) -> bool:
    """Whether all questions are shown, as they were collected."""
    return not now.view.datasets and not now.view.traffic.strip()


def _demand(now: shell.Bench) -> Demand:
    return Demand(targets=now.targets, test_share=now.space.test_share, level=LEVEL)


def _name(now: shell.Bench) -> str:
    return now.view.name or "chosen"


def _certify(now: shell.Bench, document: dict[str, Any]) -> None:
    """The button that looks at the test split, and what looking costs."""
    if document.get("test") is not None:
        return
    if now.space.test is None:
        st.caption("Too few questions to hold some out: nothing can be certified.")
        return
    if not now.targets:
        st.caption("Without a limit there is nothing to certify; write one at the left, for instance p90<10s.")
        return
    with Store.open(now.settings.store, read_only=True) as store:
        left = allowance(store.looks(split_identity(now.space.outcomes)), LEVEL)
    st.caption(
        f"The {now.space.test.n:,} held-out questions were looked at {left.looks} times. Each look spends of the "
        f"{percent(left.total, 0)} chance of a false certificate: {percent(left.left, 0)} of it is left, and the next "
        f"look may take {percent(left.next_alpha, 2)}. Choose first, then look."
    )
    if now.settings.read_only:
        return
    st.button(
        "Certify on the held-out questions",
        on_click=_look,
        args=(now,),
        type="primary",
        key="certify",
        help="Enters one look in the ledger of the store. The same policy and limits again cost nothing.",
    )


def _look(now: shell.Bench) -> None:
    try:
        with Store.open(now.settings.store, must_exist=True) as store:
            found = appraise(
                now.space.outcomes, _demand(now), now.policy, table=now.space.table, ledger=store.record_look
            )
        _certified()[_identity(now)] = found.to_dict(_name(now))
    except CalibError as error:
        st.session_state["notices"] = (str(error),)


# --- the folder -------------------------------------------------------------------------------------------------------


def _folder(now: shell.Bench) -> ConfigFolder | None:
    root = now.settings.config_dir
    if root is None:
        st.info(
            "No config folder was named, so there is nothing to compare with and nowhere to write. Start it again with:"
        )
        st.code(f"calib app --store {now.settings.store} --config-dir serve/", language="bash")
        return None
    below = st.text_input(
        "Folder",
        placeholder=f"{root} itself",
        key="w_folder",
        help=f"A folder below {root}, for instance one for each server.",
    )
    try:
        return ConfigFolder(root, below.strip())
    except CalibError as error:
        st.error(shell.plain(str(error)))
        return None


def _complete(now: shell.Bench, document: dict[str, Any]) -> tuple[dict[str, Any], Provenance]:
    """The document with the content of the store that it rests on, and what the store knows of its model."""
    known = {"store": now.found.content} | document["fingerprints"]
    with Store.open(now.settings.store, read_only=True) as store:
        return document | {"fingerprints": known}, provenance(store, document)


def _diff(folder: ConfigFolder, document: dict[str, Any]) -> None:
    current = folder.current()
    if current is None:
        st.caption(shell.plain(f"{folder.folder} holds no policy yet."))
    found = difference(current or {}, document)
    st.dataframe(
        [
            {"": "→" if row.differs else "", "what": row.what, "now": row.now or "-", "chosen": row.chosen or "-"}
            for row in found.changes
        ],
        hide_index=True,
        column_config={"": st.column_config.TextColumn(width=24)},
    )
    if current is not None:
        _meaning(found)


def _meaning(found: Difference) -> None:
    """What the difference to the policy that is there means, in sentences."""
    if not any(row.differs for row in found.changes):
        st.caption("Nothing would change.")
        return
    st.markdown("\n".join(f"- {shell.plain(text)}" for text in found.meaning))
    for text in found.notes:
        st.caption(shell.plain(text))


def _doubts(
    document: dict[str, Any], origin: Provenance, holder: str, now: shell.Bench, folder: ConfigFolder
) -> dict[str, str]:
    """What must be ticked before writing, by a key."""
    found = {}
    marks = document.get("marks") or ()
    if document.get("verdict") != "certified":
        found["uncertified"] = "It is not certified: on new questions the limits may be broken."
    if ESTIMATED in marks:
        found["estimated"] = "Its latency is estimated, not measured."
    if SIMULATED in marks:
        found["simulated"] = "Its numbers come from a simulated model and say nothing about a real server."
    if reason := other_model(document, folder.current()):
        found["other-model"] = f"It is for another model: {reason}."
    for knob in knobs(now.policy, holder or None, server=origin.server):
        if knob.holder == "nobody":
            found[f"unheld-{knob.knob}"] = f"Nobody holds the {knob.knob.replace('_', ' ')}: {knob.how}."
    for key in uncarried(now.policy, ()):
        found[f"route-{key}"] = f"Each client sends the field {key} with its requests; else its routes are never taken."
    return found


def _write(now: shell.Bench, folder: ConfigFolder, document: dict[str, Any], origin: Provenance) -> None:
    holder = st.radio(
        "Who adds the think budget to each request?",
        list(HOLDERS),
        format_func=HOLDERS.__getitem__,
        horizontal=True,
        key="w_holder",
        help="No variable of the reference server sets it; without a holder thinking is not limited.",
    )
    doubts = _doubts(document, origin, holder, now, folder)
    ticks = [st.checkbox(shell.plain(text), key=f"tick-{name}") for name, text in doubts.items()]
    note = st.text_input(
        "Why?", key="w_note", placeholder="kept for the history, for instance: p90 agreed in the meeting"
    )
    ready = all(ticks) and bool(note.strip())
    st.button(
        f"Write to {shell.plain(str(folder.folder))}",
        type="primary",
        disabled=not ready,
        on_click=_written,
        args=(folder, document, origin, note, holder or None, tuple(doubts)),
        key="write",
    )
    if not ready:
        st.caption("Tick every line and say why; then it can be written.")


def _written(
    folder: ConfigFolder,
    document: dict[str, Any],
    origin: Provenance,
    note: str,
    holder: str | None,
    ticked: tuple[str, ...],
) -> None:
    """Write what was ticked: each tick allows what `calib export` allows by an option."""
    try:
        done = export(
            document,
            folder,
            note=note,
            held_by=holder,
            origin=origin,
            route_keys=[name.removeprefix("route-") for name in ticked if name.startswith("route-")],
            allow_simulated="simulated" in ticked,
            allow_other_model="other-model" in ticked,
        )
    except CalibError as error:
        st.session_state["notices"] = (str(error),)
        return
    if done.unchanged:
        st.session_state["written"] = f"{done.folder} says this already; nothing was written."
    else:
        st.session_state["written"] = f"Wrote {', '.join(done.files)} to {done.folder}."
    st.session_state["w_note"] = ""
    for name in ticked:
        st.session_state[f"tick-{name}"] = False


def _history(now: shell.Bench, folder: ConfigFolder) -> None:
    entries = folder.entries()
    st.subheader("History", anchor=False)
    if not entries:
        st.caption("Nothing was written from here yet.")
        return
    current = folder.files()
    for entry in entries:
        _line(now, folder, entry, dict(entry.files) == current)


def _line(now: shell.Bench, folder: ConfigFolder, entry: Entry, current: bool) -> None:
    words, button = st.columns([5, 1], vertical_alignment="center")
    policy = entry.policy
    with words:
        st.markdown(
            f"**{entry.number}** · {entry.at[:16].replace('T', ' ')} UTC · {entry.action}"
            + (" · :green-badge[now]" if current else "")
        )
        st.text(entry.note)
        st.caption(shell.plain(parts.knobs(policy)) if policy is not None else "no policy that can be read")
    if not now.settings.read_only and not current and entry.files:
        button.button("Roll back", key=f"back-{entry.number}", on_click=_rolled_back, args=(folder, entry.number))


def _rolled_back(folder: ConfigFolder, number: int) -> None:
    note = st.session_state.get("w_note", "").strip() or "from the page"
    try:
        done = folder.roll_back(number, note)
    except CalibError as error:
        st.session_state["notices"] = (str(error),)
        return
    st.session_state["written"] = f"{folder.folder} is as it was in entry {number} (entered as {done.number})."


page()
