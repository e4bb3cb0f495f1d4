"""Page 4: the questions whose answer or thinking flips between two policies."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from calib import figures
from calib.curves import Flips, flips
from calib.show import seconds
from calib.store import Store
from calib.store.contents import Text, text_of, texts
from views import parts, shell

KINDS = ("won", "lost", "other answer", "thinking only")


def page() -> None:
    """Draw the page."""
    now = shell.bench()
    parts.header(
        "Questions", now, "Which questions change when the chosen policy replaces another one. Tune questions only."
    )
    named = now.policies
    options = list(named)
    rival = now.view.rival if now.view.rival in named else "default"
    st.selectbox(
        "Compare the chosen policy with",
        options,
        format_func=now.label,
        key=shell.show("w_rival", rival),
        on_change=shell.changed("w_rival", "rival", str),
    )
    other = named[rival]
    found = now.space.kept(("flips", now.policy, other), lambda: flips(now.space.tune, now.policy, other))
    st.caption(f"Chosen: {parts.knobs(now.policy)}. Other: {parts.knobs(other)}.")
    if not len(found.index):
        st.info(
            "Both policies treat every tune question alike. Choose another one at the left, or compare with another."
        )
        return
    rows = now.space.kept(("flip rows", now.policy, other), lambda: _rows(now, found))
    shown = _filtered(rows)
    st.caption(f"{len(shown):,} of {len(rows):,} questions that change, of {now.space.tune.n:,}.")
    picked = st.dataframe(
        shown.drop(columns="row"),
        hide_index=True,
        key="flips",
        on_select="rerun",
        selection_mode="single-row",
        height=320,
        column_config={
            "seconds, chosen": st.column_config.NumberColumn(format="%.2f s"),
            "seconds, other": st.column_config.NumberColumn(format="%.2f s"),
            "tokens, chosen": st.column_config.NumberColumn(format="localized"),
            "tokens, other": st.column_config.NumberColumn(format="localized"),
        },
    )
    st.download_button(
        "Download as CSV",
        lambda: shown.drop(columns="row").to_csv(index=False),
        file_name="flips.csv",
        mime="text/csv",
        on_click="ignore",
    )
    at = picked["selection"]["rows"]
    if at and at[0] < len(shown):
        _detail(now, found, int(shown["row"].iloc[at[0]]))
    elif len(shown):
        st.caption("Select a row to see the question, both distributions and the thought.")


@st.cache_resource(max_entries=2, show_spinner=False)
def _texts(location: str, content: str) -> dict[tuple[str, str], str]:  # noqa: ARG001 - another content, another call
    with Store.open(location, read_only=True) as store:
        return texts(store)


def _kind(found: Flips) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    won, lost = found.right_ours & ~found.right_other, found.right_other & ~found.right_ours
    kinds = np.full(len(found.index), KINDS[3], dtype=object)
    kinds[found.ours != found.other] = KINDS[2]
    kinds[won], kinds[lost] = KINDS[0], KINDS[1]
    return kinds


def _rows(now: shell.Bench, found: Flips) -> pd.DataFrame:
    tune = now.space.tune
    names = list(zip(tune.dataset[found.index].tolist(), tune.ids[found.index].tolist(), strict=True))
    known = _texts(now.found.location, now.found.content)
    columns = {
        "change": _kind(found),
        "dataset": [dataset for dataset, _ in names],
        "id": [name for _, name in names],
        "question": [known.get(name, "") for name in names],
        "thinks, chosen": found.thinks_ours,
        "thinks, other": found.thinks_other,
        "tokens, chosen": found.tokens_ours,
        "tokens, other": found.tokens_other,
        "seconds, chosen": found.seconds_ours,
        "seconds, other": found.seconds_other,
        "row": np.arange(len(names)),
    }
    frame = pd.DataFrame(columns)
    return frame if any(known.get(name) for name in names) else frame.drop(columns="question")


def _filtered(rows: pd.DataFrame) -> pd.DataFrame:
    left, right = parts.pair("filter", (3, 2))
    counts = rows["change"].value_counts()
    with left:
        kinds = st.pills(
            "Change",
            [kind for kind in KINDS if kind in counts],
            selection_mode="multi",
            format_func=lambda kind: f"{kind} ({counts[kind]:,})",
            key="flip-kinds",
        )
    with right:
        wanted = st.text_input("Search", placeholder="dataset, id or text", key="flip-search").strip()
    shown = rows[rows["change"].isin(kinds)] if kinds else rows
    if wanted:
        text = shown["dataset"].str.cat(shown["id"].astype(str), sep=" ")
        if "question" in shown:
            text = text.str.cat(shown["question"], sep=" ")
        shown = shown[text.str.contains(wanted, case=False, regex=False)]
    return shown


def _detail(now: shell.Bench, found: Flips, row: int) -> None:
    tune, at = now.space.tune, int(found.index[row])
    dataset, name, width = str(tune.dataset[at]), str(tune.ids[at]), int(tune.n_options[at])
    with Store.open(now.found.location, read_only=True) as store:
        text = text_of(store, now.outcomes.fingerprint, dataset, name)
    options = text.options or tuple(f"option {i + 1}" for i in range(width))
    right = int(tune.answer[at])
    st.subheader(shell.plain(f"{dataset}, {name}"), anchor=False)
    left, side = parts.pair("question", (2, 3))
    with left:
        _question(text, options[right])
        st.dataframe(_sides(found, row, options), hide_index=True)
    with side:
        figure = figures.flip_bars(
            options,
            found.p_ours[row, :width],
            found.p_other[row, :width],
            right,
            names=("chosen", "other"),
            marks=now.space.marked("", now.policy).marks,
            theme=now.theme,
        )
        parts.chart(figure, "flip")
    for arm, thought in text.thoughts.items():
        with st.expander(f"The stored thought, arm {arm}"):
            st.text(thought)


def _question(text: Text, answer: str) -> None:
    if text.question is None:
        st.caption("Its text was not kept (--no-text, or an import without texts).")
    else:
        if text.state:
            st.text(text.state)
        st.text(text.question)
    st.markdown("**Right answer**")
    st.text(answer)


def _sides(found: Flips, row: int, options: tuple[str, ...]) -> list[dict[str, str]]:
    """What each policy did with a question."""
    columns = {
        "chosen": (found.ours, found.thinks_ours, found.tokens_ours, found.seconds_ours, found.finished_ours),
        "other": (found.other, found.thinks_other, found.tokens_other, found.seconds_other, found.finished_other),
    }
    rows = []
    for who, column in columns.items():
        choice, thinks, tokens, took, finished = (values[row] for values in column)
        rows.append(
            {
                "policy": who,
                "answer": options[int(choice)] if choice >= 0 else "none usable",
                "thinks": ("finished" if finished else "cut") if thinks else "no",
                "tokens": f"{tokens:,.0f}",
                "time": seconds(float(took)),
            }
        )
    return rows


page()
