"""Every figure names its units, shows exact values on hover, keeps colours, and takes no text from data as markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

from calib import figures
from calib.curves import Curves
from calib.errors import CalibError
from calib.figures.palette import COLOURS, THEMES
from calib.intervals import Comparison, compare
from calib.outcomes import Outcomes
from calib.policy import Policy, baselines, decide
from calib.target import parse_targets
from calib.why import why
from tests.worlds import ladder

HOSTILE = ("<script>alert(1)</script>", 'a "b" & <b>c</b> %{x}', "plain")


def world(n: int = 240, names: tuple[str, ...] = HOSTILE, **changes: object) -> Outcomes:
    """Two arms, two budgets, spread seconds, datasets with names that would like to be markup."""
    rng = np.random.default_rng(7)
    o = ladder(8, 2, late1=(0.0, 0.0), late2=0.2, rng=rng).draw(rng, n)
    t2 = o.t2 * np.array([1.0, 0.6])[:, None, None] * rng.uniform(0.5, 2, (2, n, 1))
    return replace(o, t2=t2, dataset=np.array([names[i % len(names)] for i in range(n)], object), **changes)


@pytest.fixture(scope="module")
def curves() -> Curves:
    estimated = np.zeros((2, 3), bool)
    estimated[1, 2] = True
    return Curves(world(simulated=True, estimated=estimated))


POLICY = Policy(0.8, 0.4, 200, "arm1")
TARGETS = parse_targets(["p90<1s", "accuracy>=80%"])


@pytest.fixture(scope="module")
def drawn(curves) -> dict[str, go.Figure]:
    """Every figure there is, by name."""
    o = curves.outcomes
    rng = np.random.default_rng(0)
    found = figures.policy_figures(curves, POLICY, targets=TARGETS)
    rivals = {name: decide(o, policy) for name, policy in baselines(o).items()}
    found["differences"] = figures.differences(
        [*compare(o, decide(o, POLICY), rivals, rng=rng, resamples=200).values()], marks=("simulated",)
    )
    p1, p2 = o.p1[0], o.p2[0, 0]
    found["flip_bars"] = figures.flip_bars(HOSTILE[:2], p1, p2, 1, names=("tuned", "<i>"), marks=("simulated",))
    values, kept = rng.random(20), rng.random(20) < 0.6
    asked = {"metric": "accuracy", "marks": ("simulated",)}
    found["history"] = figures.study_history(values, kept, maximize=True, exact=0.97, **asked)
    found["importance"] = figures.study_importance({"threshold": 0.7, "<mix>": 0.2}, **asked)
    found["parallel"] = figures.study_parallel({"mix": rng.random(20), "arm": ["a", "<b>"] * 10}, values, **asked)
    return found


def axes(figure: go.Figure) -> list[go.layout.XAxis]:
    return [one for one in (*figure.select_xaxes(), *figure.select_yaxes()) if one.showticklabels is not False]


def test_every_axis_names_its_unit(drawn):
    for name, figure in drawn.items():
        if name == "parallel":
            assert [d.label for d in figure.data[0].dimensions] == ["mix (weight, 0 to 1)", "arm", "Accuracy (%)"]
            continue
        assert len(axes(figure)) >= 2, name
        for one in axes(figure):
            text = one.title.text
            assert re.search(r"\(.+\)|Dataset|Baseline|Option|Parameter|Threshold|Mix", text), (name, text)


def test_every_trace_shows_exact_values_on_hover(drawn):
    for name, figure in drawn.items():
        for trace in figure.data:
            if isinstance(trace, go.Parcoords) or trace.hoverinfo == "skip":
                continue
            assert trace.hovertemplate, (name, trace.name)
            assert "%{" in trace.hovertemplate


def test_marks_are_on_every_figure_that_they_touch(drawn, curves):
    def marked(figure: go.Figure) -> str:
        return " ".join(a.text for a in figure.layout.annotations if a.name == "marks")

    assert all("simulated" in marked(figure) for figure in drawn.values())
    touched = {name for name, figure in drawn.items() if "estimated latency" in marked(figure)}
    assert touched == {"p50_by_threshold", "p90_by_threshold", "latency", "frontier"}
    plain = Curves(replace(curves.outcomes, simulated=False, estimated=np.zeros((2, 3), bool)))
    assert not any(marked(figure) for figure in figures.policy_figures(plain, POLICY).values())


def test_names_from_data_are_text(drawn):
    for name, figure in drawn.items():
        text = figure.to_json()
        assert "<script" not in text, name
        assert "<i>" not in text, name
        assert "<mix>" not in text, name
        assert "& <b>c" not in text, name
        assert "%{x}'" not in text, name
    accuracy = drawn["accuracy_by_threshold"]
    hover = [t.hovertemplate for t in accuracy.data if t.hovertemplate and "a &quot;" not in t.hovertemplate]
    assert any("%&#123;x}" in h for h in hover)  # a placeholder in a name is shown and not filled in


def test_a_dataset_has_one_style_in_every_figure(drawn):
    styles = figures.dataset_colours(HOSTILE)
    seen: dict[str, set[tuple[str, str]]] = {}
    for name in ("accuracy_by_threshold", "p90_by_threshold", "accuracy_by_budget", "accuracy_by_mix", "risk_coverage"):
        for trace in drawn[name].data:
            if trace.mode in ("lines", "lines+markers") and trace.hovertemplate and trace.showlegend is not False:
                seen.setdefault(trace.legendgroup, set()).add((trace.line.color, trace.line.dash))
    assert len(seen) == 4
    assert all(len(look) == 1 for look in seen.values())
    assert {look.pop()[0] for look in seen.values()} == {s.colour for s in styles.values()} | {THEMES["light"]["ink"]}


def test_styles_tell_many_datasets_apart_and_a_filter_changes_none():
    names = [f"d{i:03}" for i in range(200)]
    styles = figures.dataset_colours(names)
    assert len(set(styles.values())) == 200
    assert [styles[name].colour for name in names[:8]] == list(COLOURS)
    assert {styles[name].dash for name in names[:8]} == {"solid"}
    assert styles[names[8]].dash != "solid"
    assert figures.dataset_colours(reversed(names)) == styles


def test_colours_are_legible_in_both_themes():
    def luminance(colour: str) -> float:
        channel = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    def contrast(one: str, other: str) -> float:
        dim, bright = sorted([luminance(one), luminance(other)])
        return (bright + 0.05) / (dim + 0.05)

    for theme in THEMES.values():
        assert all(contrast(colour, theme["page"]) > 2 for colour in COLOURS)
        assert contrast(theme["ink"], theme["page"]) > 12
        assert min(contrast(theme["muted"], theme["page"]), contrast(theme["mark"], theme["page"])) > 4.5
    everything = [*THEMES["light"].values(), *THEMES["dark"].values(), *COLOURS]
    assert len({colour.lower() for colour in everything}) == len(everything)  # a page replaces them one by one


def test_a_theme_changes_colours_and_nothing_else(curves):
    light, dark = (figures.policy_figures(curves, POLICY, targets=TARGETS, theme=t) for t in ("light", "dark"))
    for name in light:
        swapped = light[name].to_json()
        for role, colour in THEMES["light"].items():
            swapped = swapped.replace(colour, THEMES["dark"][role])
        assert json.loads(swapped) == json.loads(dark[name].to_json()), name
    with pytest.raises(CalibError, match="theme must be light or dark"):
        figures.threshold_curves(curves.risk_coverage(), theme="sepia")


def test_curves_are_drawn_as_they_are_with_p99_beside_p90(drawn, curves):
    at = {"mix": POLICY.mix, "think_budget": POLICY.think_budget, "arm": POLICY.arm}
    lines = [t for t in drawn["p90_by_threshold"].data if t.mode == "lines" and t.hovertemplate]
    solid = [t for t in lines if t.line.dash != "dot"]
    dotted = [t for t in lines if t.line.dash == "dot"]
    for traces, metric in ((solid, "p90"), (dotted, "p99")):
        for trace, curve in zip(traces, curves.against_threshold(metric, **at), strict=True):
            row = np.searchsorted(curve.x, trace.customdata)
            assert np.array_equal(curve.x[row], trace.customdata)  # the hover names a threshold with this very value
            assert np.array_equal(curve.y[row], trace.y)
            assert (trace.x >= curve.starts[row]).all()
            assert (trace.x <= curve.ends[row]).all()
            assert set(row.tolist()) == set(range(len(curve.x)))
    assert not any(t.showlegend for t in dotted)
    marked = [t for t in drawn["p90_by_threshold"].data if t.mode == "markers"]
    assert [t.name for t in marked] == ["this policy", "published default"]
    assert marked[0].y[0] == curves.marked("", POLICY).values[None]["p90"]
    assert drawn["p90_by_threshold"].layout.yaxis.type == "log"


def test_limits_are_shaded_on_the_side_that_breaks_them(drawn):
    def shaded(name: str, side: str) -> list[tuple[float, float]]:
        found = drawn[name].layout.shapes
        return [(s[f"{side}0"], s[f"{side}1"]) for s in found if s.type == "rect" and s[f"{side}ref"] in (None, side)]

    (low, high), *_ = shaded("accuracy_by_threshold", "y")
    assert low == 0.8
    assert high < 0.8
    assert all(start == 1.0 and end >= 1.0 for start, end in shaded("p90_by_threshold", "y"))
    assert any(start == 1.0 for start, _ in shaded("latency", "x"))
    front = {*shaded("frontier", "x"), *shaded("frontier", "y")}
    assert {start for start, _ in front} >= {1.0, 0.8}


def test_a_click_on_the_front_leads_to_its_policy(drawn, curves):
    lines = [t for t in drawn["frontier"].data if t.name.startswith("front of")]
    assert [t.name for t in lines] == ["front of arm0", "front of arm1"]
    for f, trace in enumerate(lines):
        found = curves.frontier(arms=[f"arm{f}"])
        assert [c[0] for c in trace.customdata] == [f"{f}:{p}" for p in range(len(found.front))]
        assert np.array_equal(trace.y, found.front.y)
        assert "p99 %{customdata[2]}" in trace.hovertemplate
    (star,) = [t for t in drawn["frontier"].data if t.marker.symbol == "star"]
    assert star.name == "this policy"
    halo = next(t for t in drawn["frontier"].data if t.name.startswith("cannot be told apart"))
    alike = sum(int(curves.alike(curves.frontier(arms=[a]), POLICY).sum()) for a in curves.outcomes.arms)
    assert len(halo.x) == alike
    assert any(s.name == "alike" for s in drawn["frontier"].layout.shapes)


def test_trials_are_faint_points(curves):
    fronts = [curves.frontier("tokens")]
    figure = figures.frontier(fronts, trials=([1.0, 2.0], [0.5, np.nan]))
    (trials,) = [t for t in figure.data if t.name == "Optuna trials"]
    assert trials.marker.color.startswith("rgba")
    assert trials.marker.size < 6
    assert figure.layout.xaxis.title.text == "Thinking tokens (tokens per question)"
    with pytest.raises(CalibError, match="same two metrics"):
        figures.frontier([*fronts, curves.frontier("p90")])


def test_thinking_helps_counts_both_directions(curves):
    rows = why(curves.outcomes, 200, "arm0", 0.4)
    gained, lost, net = figures.thinking_helps(rows).data
    whole = next(r for r in rows if r.dataset is None)
    assert gained.x[-1] == whole.gained / whole.n  # the last bar is drawn on top
    assert lost.x[-1] == -whole.lost / whole.n
    assert np.allclose(np.asarray(gained.x) + lost.x, net.x)


def test_of_many_options_the_probable_and_the_right_one_are_shown():
    p = np.full(150, 0.5 / 149)
    p[3] = 0.5
    figure = figures.flip_bars([f"option {i}" for i in range(150)], p, np.full(150, np.nan), 149)
    ticks = figure.layout.yaxis.ticktext
    assert len(ticks) == 12
    assert ticks[0] == "<b>✓ option 149</b>"
    assert "option 3" in ticks
    assert "138 improbable ones left out" in figure.layout.title.text


def test_an_interval_that_holds_zero_is_drawn_open():
    def one(difference: float, low: float, high: float) -> Comparison:
        return Comparison("x", 100, difference, low, high, 9, 5, None, 0.95)

    sure, unsure = figures.differences([one(0.04, 0.01, 0.07), one(0.04, -0.02, 0.1)]).data[::-1]
    assert (sure.marker.symbol, unsure.marker.symbol) == ("circle", "circle-open")
    assert sure.x[0] == pytest.approx(4)
    assert sure.error_x.array[0] == pytest.approx(3)


def test_history_runs_over_feasible_trials_only():
    figure = figures.study_history([0.5, 0.9, 0.6, np.nan], [True, False, True, True], metric="accuracy", maximize=True)
    best = next(t for t in figure.data if t.name == "best so far")
    assert list(best.y) == [0.5, 0.5, 0.6, 0.6]
    down = figures.study_history([3.0, 2.0], [False, True], metric="p90", maximize=False)
    assert list(next(t for t in down.data if t.name == "best so far").x) == [1]


def test_without_seconds_the_other_figures_are_drawn():
    o = world()
    unknown = Curves(replace(o, t1=np.full_like(o.t1, np.nan), t2=np.full_like(o.t2, np.nan)))
    names = set(figures.policy_figures(unknown, POLICY))
    assert "accuracy_by_threshold" in names
    assert not names & {"p50_by_threshold", "p90_by_threshold", "latency", "frontier"}
    lines = figures.latency_distribution(unknown.latency(POLICY)).data
    assert [t.name for t in lines] == ["arm0: latency unknown", "arm1: latency unknown"]


@pytest.mark.parametrize(("n", "names"), [(1, ("one",)), (40, tuple(f"d{i}" for i in range(40)))])
def test_one_question_and_forty_datasets_can_be_drawn(n, names):
    found = figures.policy_figures(Curves(world(n, names)), POLICY, targets=TARGETS)
    assert all(len(figure.to_json()) < 600_000 for figure in found.values())
    lines = [t for t in found["accuracy_by_threshold"].data if t.mode == "lines" and t.hovertemplate]
    assert len(lines) == (1 if n == 1 else 41)


def test_a_figure_without_a_curve_is_refused():
    with pytest.raises(CalibError, match="curves of one metric, got none"):
        figures.threshold_curves([])


def test_curves_as_files(curves, tmp_path):
    written = figures.write_curves(curves, POLICY, tmp_path / "new" / "folder", targets=TARGETS)
    assert sorted(p.name for p in written) == sorted(p.name for p in (tmp_path / "new" / "folder").glob("*.html"))
    assert (tmp_path / "new" / "folder" / "plotly.min.js").stat().st_size > 1e6
    for path in written:
        text = path.read_text()
        assert re.findall(r'(?:src|href)="([^"]+)"', text) == ["plotly.min.js"]
    as_json = figures.write_curves(curves.outcomes, POLICY, tmp_path, format="json", theme="dark")
    found = json.loads(next(p for p in as_json if p.stem == "latency").read_text())
    assert found["layout"]["paper_bgcolor"] == THEMES["dark"]["page"]


def test_what_cannot_be_written_says_what_to_do(curves, tmp_path, monkeypatch):
    with pytest.raises(CalibError, match="--format must be one of html, json, png"):
        figures.write_curves(curves, POLICY, tmp_path, format="gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibError, match="cannot be made"):
        figures.write_curves(curves, POLICY, tmp_path / "file")

    def no_kaleido(*args: object, **kwargs: object) -> bytes:
        raise RuntimeError("\nImage export requires the Kaleido package")

    monkeypatch.setattr(go.Figure, "to_image", no_kaleido)
    with pytest.raises(CalibError, match=r"needs kaleido.*--format html") as error:
        figures.write_curves(curves, POLICY, tmp_path, format="png")
    assert error.value.exit_code == 1
    monkeypatch.setattr(go.Figure, "to_image", lambda *a, **k: b"PNG")
    assert {p.read_bytes() for p in figures.write_curves(curves, POLICY, tmp_path, format="png")} == {b"PNG"}
