"""The dashboard's router: who may come in, what the store holds, which page.

Run by ``calib app``. One load for each content of the store (`calib.workspace`); one page per module of ``views``.
"""

from __future__ import annotations

import os
from pathlib import Path

import streamlit as st
from views import shell

from calib.dashboard import Settings
from calib.errors import CalibError

ICON = str(Path(__file__).with_name("icon.svg"))  # without one, a page's symbol would be fetched from the internet
PAGES = (
    ("overview", "Overview", ":material/home:"),
    ("explore", "Explore", ":material/tune:"),
    ("frontier", "Frontier", ":material/show_chart:"),
    ("questions", "Questions", ":material/quiz:"),
    ("studies", "Studies", ":material/science:"),
    ("writeback", "Write back", ":material/save:"),
)


def main() -> None:
    """Draw one run of one page."""
    st.set_page_config(page_title="calib", page_icon=ICON, layout="wide")
    shell.style()
    settings = Settings.from_environment(os.environ)
    page = st.navigation(
        [
            st.Page(f"views/{name}.py", title=title, icon=icon, url_path=name, default=name == "overview")
            for name, title, icon in PAGES
        ]
    )
    if not shell.admitted(settings):
        return
    try:
        shell.enter(settings)
    except CalibError as error:
        shell.nothing_to_show(settings, error)
        return
    page.run()


main()
