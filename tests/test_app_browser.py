"""The dashboard in a real browser: sliders, a click on the front, writing, going back; nothing leaves the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from calib.history import ConfigFolder
from calib.policyfile import load_policy_file
from tests.appserver import app_server
from tests.appstore import simulated_store

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")

pytestmark = pytest.mark.slow

PROBES = ("/_stcore/health", "/_stcore/host-config")
"""What Streamlit asks below a page's path first, when a link opens a page directly; these two give 404."""


@dataclass
class Window:
    """One page of the browser and what it did."""

    page: Any
    url: str
    root: Path
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def go(self, name: str) -> None:
        self.page.get_by_role("link", name=name, exact=True).click()
        self.page.get_by_role("heading", name=name, exact=True).first.wait_for()
        self.settled()

    def settled(self) -> None:
        """Wait until the server has answered: nothing runs, and nothing began to a moment later."""
        self.page.wait_for_timeout(250)
        self.page.wait_for_function(
            "() => !document.querySelector('[data-testid=stStatusWidget]')"
            " && document.querySelector('[data-testid=stApp]').dataset.testScriptState === 'notRunning'"
        )

    def tick_all(self, why: str) -> None:
        boxes = self.page.get_by_test_id("stCheckbox")
        for i in range(boxes.count()):
            for _ in range(3):  # a click that falls into a rerun of the page is on a box that is then replaced
                boxes.nth(i).locator("label").click()
                self.settled()
                if boxes.nth(i).locator("input").is_checked():
                    break
            sync_api.expect(boxes.nth(i).locator("input")).to_be_checked()
        note = self.page.get_by_label("Why?")
        note.fill(why)
        note.press("Enter")
        self.settled()

    def knob(self, name: str) -> str:
        return self.query()[name]

    def query(self) -> dict[str, str]:
        return dict(self.page.evaluate("() => Object.fromEntries(new URLSearchParams(location.search))"))


@pytest.fixture(scope="module")
def server(chromium, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("browser")
    store = simulated_store(folder / "demo.db", trials=8)
    root = folder / "serve"
    with app_server(store, root, folder) as url:
        yield url, root


@pytest.fixture
def window(server, browser) -> Iterator[Window]:  # in this order: the browser runs an event loop of its own
    """A fresh page; afterwards: no request left the machine, and no error is in the console."""
    url, root = server
    page = browser.new_page()
    opened = Window(page, url, root)
    page.on("request", lambda request: opened.requests.append(request.url))
    page.on("websocket", lambda socket: opened.requests.append(socket.url))
    page.on("pageerror", lambda error: opened.errors.append(f"page: {error}"))
    page.on("console", lambda message: opened.errors.append(_told(message)) if message.type == "error" else None)
    yield opened
    page.close()
    local = (url, url.replace("http://", "ws://"), "data:", "blob:")
    assert [asked for asked in opened.requests if not asked.startswith(local)] == []
    assert opened.errors == []


def _told(message: Any) -> str:
    return f"{message.text} at {message.location.get('url', '')}"


def open_first_page(window: Window) -> None:
    window.page.goto(window.url)
    window.page.locator(".js-plotly-plot .main-svg").first.wait_for()
    window.settled()


def test_from_the_first_page_to_the_written_config_and_back(window):
    page, root = window.page, window.root
    open_first_page(window)
    assert page.get_by_text("What does it gain?").is_visible()
    assert page.get_by_text("simulated", exact=True).first.is_visible()

    # a slider: the URL, the number beside it and the mark in the figure follow
    window.go("Explore")
    page.locator(".js-plotly-plot").nth(1).wait_for()
    before = window.knob("t")
    slider = page.get_by_role("slider", name="Threshold")
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function("t => new URLSearchParams(location.search).get('t') != t", arg=before)
    window.settled()
    moved = float(window.knob("t"))
    assert moved == pytest.approx(float(before) - 0.005, abs=6e-4)
    page.wait_for_function(
        "t => [...document.querySelectorAll('.js-plotly-plot')].every(d =>"
        " d.data.some(trace => trace.name === 'current' && Math.abs(trace.x[0] - t) < 1e-9))",
        arg=moved,
    )

    # a click on the front chooses its policy everywhere
    window.go("Frontier")
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    spot = page.evaluate(
        """() => {
            const d = document.querySelector('.js-plotly-plot');
            const i = d._fullData.findIndex(t => (t.name || '').startsWith('front of mtp'));
            const front = d._fullData[i], k = Math.floor(front.x.length / 2);
            const box = d.querySelector('.nsewdrag').getBoundingClientRect();
            const x = d._fullLayout.xaxis, y = d._fullLayout.yaxis;
            return {x: box.x + x.d2p(front.x[k]), y: box.y + y.d2p(front.y[k])};
        }"""
    )
    page.mouse.move(spot["x"], spot["y"])
    page.mouse.click(spot["x"], spot["y"])
    page.wait_for_function("t => new URLSearchParams(location.search).get('t') != t", arg=repr(moved))
    window.settled()
    chosen = window.query()
    assert chosen["arm"] == "mtp"
    page.wait_for_function("() => document.querySelector('.js-plotly-plot').data.some(t => t.name === 'chosen')")

    # write it: every doubt ticked, and why
    window.go("Write back")
    write = page.get_by_role("button", name=re.compile("^Write to"))
    assert write.is_disabled()
    window.tick_all("agreed in the browser")
    assert not root.exists()
    write.click()
    page.get_by_text("Wrote policy.json").wait_for()
    written = load_policy_file(root / "policy.json")
    assert (repr(written.threshold), written.arm) == (chosen["t"], chosen["arm"])
    assert str(written.think_budget) == chosen["b"]
    assert json.loads((root / "policy.json").read_text())["marks"] == ["simulated"]

    # another one, and back
    page.get_by_role("slider", name="Mix").focus()
    page.keyboard.press("Home")
    page.wait_for_function("() => new URLSearchParams(location.search).get('m') === '0.0'")
    window.settled()
    window.tick_all("never mind System 2")
    write.click()
    page.get_by_text("never mind System 2").wait_for()
    window.settled()
    assert load_policy_file(root / "policy.json").mix == 0
    page.get_by_role("button", name="Roll back").last.click()
    page.get_by_text("is as it was in entry 1").wait_for()
    assert load_policy_file(root / "policy.json") == written
    assert [entry.action for entry in ConfigFolder(root).entries()] == ["roll back", "write", "write"]


def test_a_link_reopens_the_view_and_every_page_draws_in_light_and_dark(window):
    page = window.page
    page.emulate_media(color_scheme="dark")
    page.goto(f"{window.url}/explore?t=0.42&m=0.3&arm=base&show=spread")
    page.locator(".js-plotly-plot").nth(2).wait_for()
    window.settled()
    assert (window.knob("t"), window.knob("m"), window.knob("arm")) == ("0.42", "0.3", "base")
    assert page.get_by_role("slider", name="Threshold").input_value() == "0.42"
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        for name in ("Overview", "Explore", "Frontier", "Studies", "Questions", "Write back"):
            window.go(name)
            assert window.knob("t") == "0.42"
            assert page.locator("[data-testid=stException]").count() == 0
    window.errors[:] = [error for error in window.errors if not error.endswith(PROBES)]


def test_a_row_of_the_questions_opens_its_question(window):
    page = window.page
    open_first_page(window)
    window.go("Questions")
    table = page.get_by_test_id("stDataFrame").first
    table.wait_for()
    box = table.bounding_box()
    page.mouse.click(box["x"] + 16, box["y"] + 52)  # the box that selects the first row; the table is a canvas
    page.get_by_text("Right answer").wait_for()
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    with page.expect_download() as download:
        page.get_by_test_id("stDownloadButton").get_by_role("button").click()
    header = Path(download.value.path()).read_text().splitlines()[0]
    assert header.startswith("change,dataset,id,question")
