"""Published figures beside those of the simulated profiles, row by row, as a report.

The simulated side is measured with the same `evaluate` as any collection. Where published figures exclude each other,
the row names the contradiction. Leaves to others: the figures (``data/published``), the profiles (`calib.engine`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calib import metrics
from calib.engine.profiles import PROFILES, Profile, load_profile
from calib.engine.texts import simulated_name
from calib.errors import CalibError
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, NEVER, Evaluation, Policy, decide, evaluate

__all__ = ["ALL", "Comparison", "compare", "contradictions", "render", "write_report"]

ALL = "all"
"""Name of the rows over all sets."""
COMMAND = "python -m calib.published --out reports/published.md"
_LABELS = {
    "chance": "chance, %",
    "system1": "System 1 accuracy, %",
    "adaptive": "adaptive accuracy, %",
    "think": "think share, %",
    "always_think": "always-think accuracy, %",
    "cut": "thoughts cut at the budget, %",
    "kept_accuracy": "accuracy without thinking, %",
    "thought_median": "median thought, tokens",
    "thought_p90": "p90 thought, tokens",
    "finished": "thoughts finished within the budget, %",
    "ece_system1": "ECE of System 1",
    "ece_adaptive": "ECE of adaptive",
    "think_requests": "requests that think at least once, %",
    "think_decisions": "decisions that think, %",
    "p50_base": "median latency, s",
    "p50_mtp": "median latency with MTP, s",
    "p90_base": "p90 latency, s",
    "p90_mtp": "p90 latency with MTP, s",
    "cut_system1": "System 1 accuracy where the thought was cut, %",
    "cut_adaptive": "adaptive accuracy where the thought was cut, %",
    "finished_system1": "System 1 accuracy where the thought finished, %",
    "finished_adaptive": "adaptive accuracy where the thought finished, %",
}
_ECE_MARGIN = 0.005
_THOUGHT_MARGIN = 0.01
"""Relative; thought lengths are whole tokens at whole ranks."""
_CUT_SET = "ChessBench"
"""The benchmark whose figures fit those published of cut thoughts (see contradiction G)."""
_UNPLACED = "G"
"""Letter of figures of which the source does not say what they were taken over."""
_EXCLUDED = {
    ("SATA-Bench", "p50_base"): "A",
    ("SATA-Bench", "p50_mtp"): "A",
    (ALL, "think_requests"): "B",
    (ALL, "think_decisions"): "B",
    ("CRUXEval", "p50_base"): "E",
    ("GSM8K", "p50_base"): "E",
    (_CUT_SET, "finished_adaptive"): _UNPLACED,
    (_CUT_SET, "finished_system1"): _UNPLACED,
    (_CUT_SET, "cut_system1"): _UNPLACED,
    (_CUT_SET, "cut_adaptive"): _UNPLACED,
}


@dataclass(frozen=True)
class Comparison:
    """One published figure beside the simulated one, both in the published unit.

    Attributes
    ----------
    dataset, figure : str
        Name of the set without the mark, or `ALL`; key of the figure in ``data/published``.
    published, simulated, tolerance : float
        Percent, seconds or tokens; ECE as a number from 0 to 1.
    contradiction : str
        Letter of the contradiction that excludes the figure, else empty.
    """

    dataset: str
    figure: str
    published: float
    simulated: float
    tolerance: float
    contradiction: str = ""

    @property
    def difference(self) -> float:
        """Simulated minus published."""
        return self.simulated - self.published

    @property
    def verdict(self) -> str:
        """``met`` within the tolerance, ``excluded`` by other published figures, ``unplaced``, or ``missed``."""
        if abs(self.difference) <= self.tolerance + 1e-9:
            return "met"
        if self.contradiction == _UNPLACED:
            return f"unplaced: {_UNPLACED}"
        return f"excluded: {self.contradiction}" if self.contradiction else "missed"


def compare(profile: Profile | str, *, seed: int = 0) -> list[Comparison]:
    """Every published figure of a profile beside the simulated one.

    Parameters
    ----------
    profile : Profile or str
        A profile or its name.
    seed : int, default 0
        Which simulated model.
    """
    profile = load_profile(profile) if isinstance(profile, str) else profile
    budget = profile.reference.think_budget
    outcomes = profile.outcomes([budget], seed=seed)
    figures = profile.figures
    rows = []
    for row in figures["sets"]:
        part = outcomes.select([simulated_name(row["name"])])
        rows += list(_compare(row["name"], row, _measure(part, profile)))
    rows += list(_compare(ALL, figures["all"], _measure(outcomes, profile)))
    if "cut_thoughts" in figures:
        part = outcomes.select([simulated_name(_CUT_SET)])
        rows += list(_compare(_CUT_SET, figures["cut_thoughts"], _by_ending(part, profile)))
    return rows


def _compare(name: str, published: Mapping[str, Any], simulated: Mapping[str, float]) -> Iterator[Comparison]:
    n = published.get("requests")
    for figure, value in published.items():
        if figure in _LABELS:
            margin = _tolerance(figure, value, n)
            yield Comparison(name, figure, float(value), simulated[figure], margin, _EXCLUDED.get((name, figure), ""))


def _tolerance(figure: str, value: float, n: int | None) -> float:
    """Half a unit of the last printed digit; one question more for shares of a set."""
    if figure.startswith("ece"):
        return _ECE_MARGIN
    if figure.startswith("thought"):
        return _THOUGHT_MARGIN * value
    printed = 0.5 * 10.0 ** -len(str(value).partition(".")[2])
    return printed + (50.0 / n if n and not figure.startswith("p") else 0.0)


def _measure(outcomes: Outcomes, profile: Profile) -> dict[str, float]:
    """Every figure that may be published of these questions, in its unit."""
    reference = profile.reference

    def score(threshold: float, arm: str) -> Evaluation:
        return evaluate(outcomes, Policy(threshold, reference.mix, reference.think_budget, arm))

    system1, always = score(NEVER, "base"), score(ALWAYS, "base")
    adaptive, mtp = score(reference.threshold, "base"), score(reference.threshold, "mtp")
    thinks = decide(outcomes, Policy(reference.threshold, reference.mix, reference.think_budget)).thinks
    # thought lengths are published over all questions of a validation, else over those that think
    thoughts = slice(None) if "thought_p90" in profile.figures["all"] else thinks
    tokens, finished = outcomes.tokens[thoughts, 0], outcomes.finished[thoughts, 0]
    right = outcomes.p1.argmax(1) == outcomes.answer
    median, p90 = metrics.percentiles(tokens, [50, 90]).tolist()
    return {
        "chance": 100 * metrics.mean(1 / outcomes.n_options),
        "system1": 100 * system1.accuracy,
        "adaptive": 100 * adaptive.accuracy,
        "think": 100 * adaptive.think_rate,
        "think_requests": 100 * adaptive.think_rate,
        "think_decisions": 100 * adaptive.think_rate,
        "always_think": 100 * always.accuracy,
        "cut": 100 * metrics.mean(~finished),
        "finished": 100 * metrics.mean(finished),
        "kept_accuracy": 100 * metrics.mean(right[~thinks]),
        "thought_median": median,
        "thought_p90": p90,
        "ece_system1": system1.ece,
        "ece_adaptive": adaptive.ece,
        "p50_base": adaptive.p50,
        "p50_mtp": mtp.p50,
        "p90_base": adaptive.p90,
        "p90_mtp": mtp.p90,
    }


def _by_ending(outcomes: Outcomes, profile: Profile) -> dict[str, float]:
    """Accuracy, percent, before and after cut and finished thoughts of the questions that think."""
    reference = profile.reference
    decisions = decide(outcomes, Policy(reference.threshold, reference.mix, reference.think_budget))
    before, after = outcomes.p1.argmax(1) == outcomes.answer, decisions.choice == outcomes.answer
    cut, ended = decisions.thinks & ~outcomes.finished[:, 0], decisions.thinks & outcomes.finished[:, 0]
    return {
        "cut_system1": 100 * metrics.mean(before[cut]),
        "cut_adaptive": 100 * metrics.mean(after[cut]),
        "finished_system1": 100 * metrics.mean(before[ended]),
        "finished_adaptive": 100 * metrics.mean(after[ended]),
    }


def contradictions(profile: Profile) -> dict[str, str]:
    """What the published figures of ``gev-knowledge`` exclude, computed from them, by letter."""
    sets = {row["name"]: row for row in profile.figures["sets"]}
    overall = profile.figures["all"]
    total = sum(row["requests"] for row in sets.values())
    thinking = sum(row["requests"] * row["think"] / 100 for row in sets.values())
    sata, gpqa, hle, chess = (sets[name] for name in ("SATA-Bench", "GPQA Diamond", "HLE", "ChessBench"))

    others = thinking - sata["requests"] * sata["think"] / 100
    sata_requests = overall["think_requests"] / 100 * total - others
    share = overall["think_decisions"] / 100
    decisions = (others - share * (total - sata["requests"])) / (share - sata["think"] / 100)

    thoughts = round(gpqa["requests"] * gpqa["think"] / 100)
    ended = thoughts - round(thoughts * gpqa["cut"] / 100)
    gain = round(gpqa["requests"] * gpqa["adaptive"] / 100) - round(gpqa["requests"] * gpqa["system1"] / 100)

    kept = sata["requests"] * (1 - sata["think"] / 100)
    most_kept = sata["requests"] * sata["system1"] / 100 / kept

    cut = profile.figures["cut_thoughts"]
    cut_share = chess["cut"] / 100
    change = (1 - cut_share) * (cut["finished_adaptive"] - cut["finished_system1"]) + cut_share * (
        cut["cut_adaptive"] - cut["cut_system1"]
    )
    return {
        "A": (
            f"SATA-Bench: {sata['think']:g} % think, so with one decision a request the median request does not "
            f"think and takes {profile.figures['latency']['system1_ms']} ms; a median of {sata['p50_base']} s needs "
            "more than half of the requests to think. The think share wins."
        ),
        "B": (
            f"All ten: the ten think shares, weighted by requests, give {100 * thinking / total:.1f} %, not "
            f"{overall['think_requests']} %. SATA-Bench explains it: {overall['think_requests']} % of all requests "
            f"comes out if {sata_requests:.0f} of its {sata['requests']} requests "
            f"({100 * sata_requests / sata['requests']:.0f} %) think at least once while {sata['think']:g} % of its "
            f"decisions do, and {overall['think_decisions']:.1f} % of all decisions if such a request makes "
            f"{decisions / sata['requests']:.1f} of them. So {overall['think_requests']} % counts requests that think "
            f"at least once, and {overall['think_decisions']:.1f} % fits decisions. Here every request is one decision."
        ),
        "C": (
            f"GPQA Diamond: {ended} of {thoughts} thoughts finish, and adaptive has {gain} right answers more than "
            f"System 1. Even if every finished thought repaired a wrong answer, {gain - ended} cut ones would have "
            "to be right where System 1 is wrong, although cut thoughts are published as no better than System 1. "
            "Accuracy wins: here some cut thoughts of GPQA Diamond are right."
        ),
        "D": (
            f"GPQA Diamond and HLE: no count of {gpqa['requests']} requests gives {gpqa['think']} % "
            f"({_neighbours(gpqa['think'], gpqa['requests'])}; 172 of 198, the whole set, would, and 113 of "
            f"those 172 give the cut share), and none of {hle['requests']} gives {hle['think']} % "
            f"({_neighbours(hle['think'], hle['requests'])}). "
            "The nearest count is used; the row counts as met within one question."
        ),
        "E": (
            "CRUXEval and GSM8K: a median latency of 0.04 s without thinking beside a System 1 of 45 ms: "
            "one is truncated, or the other is rounded up. 45 ms wins."
        ),
        "F": (
            f"SATA-Bench: {100 - sata['think']:g} % of the requests keep System 1's answer at a confidence of at least "
            f"{profile.reference.threshold:g}, yet at most {100 * most_kept:.0f} % of those can be right when "
            f"{sata['system1']} % are right in all. With one decision a request System 1 has to be badly "
            "over-confident there; the published threshold may have been applied to single decisions."
        ),
        "G": (
            f"Cut thoughts are published as {cut['cut_adaptive']} % right against System 1's {cut['cut_system1']} %, "
            f"finished ones as {cut['finished_adaptive']} against {cut['finished_system1']} %, without the questions "
            "they were taken over. No other benchmark with a published cut share has accuracies near these, so the "
            f"rows are shown for {_CUT_SET}; there they would change adaptive accuracy by "
            f"{change * chess['think'] / 100:+.2f} points, but it is published to change by "
            f"{chess['adaptive'] - chess['system1']:+.1f}. Accuracy wins."
        ),
    }


def _neighbours(percent: float, n: int) -> str:
    low = int(percent * n / 100)
    return f"{low} gives {100 * low / n:.2f}, {low + 1} gives {100 * (low + 1) / n:.2f}"


def render(*, seed: int = 0) -> str:
    """The report as Markdown."""
    lines = [
        "# Published beside simulated",
        "",
        "**All figures in the column `simulated` are simulated: no model was run.** They come from the profiles of "
        "calib's simulated engine, which are fitted to the published figures. They show that the profiles are what "
        "they claim to be, and say nothing about the model.",
        "",
        f"Made by `{COMMAND}` (seed {seed}); not edited by hand.",
        "",
        "`met`: equal to the published figure as printed, or within one question of the set; ECE within "
        f"{_ECE_MARGIN}, lengths of thoughts within {_THOUGHT_MARGIN:.0%}. `excluded`: other published figures do not "
        "allow it (the letters are explained below). `unplaced`: the source does not say which questions. "
        "Accuracy, think share, cut share and median thought win, in that order. "
        "Latencies: the publisher's are estimates, tokens over an idle rate.",
    ]
    for name in PROFILES:
        profile = load_profile(name)
        rows, policy = compare(profile, seed=seed), profile.reference
        count = {verdict: sum(row.verdict.startswith(verdict) for row in rows) for verdict in _VERDICTS}
        lines += [
            "",
            f"## {name} (simulated)",
            "",
            f"{profile.figures['title']}. Threshold {policy.threshold:g}, mix {policy.mix:g}, think budget "
            f"{policy.think_budget} tokens; {len(profile.questions())} questions. "
            f"Published figures: {profile.figures['source']}; {profile.figures['units']}.",
            "",
            ", ".join(f"{number} {verdict}" for verdict, number in count.items()) + ".",
            "",
            "| set | figure | published | simulated | difference | verdict |",
            "|---|---|---:|---:|---:|---|",
            *(_row(row) for row in rows),
        ]
        if "cut_thoughts" in profile.figures:
            lines += ["", "### Where published figures exclude each other", ""]
            lines += [f"- **{letter}** {text}" for letter, text in contradictions(profile).items()]
    lines += ["", "## What is assumed beside the figures", "", *_ASSUMPTIONS]
    return "\n".join(lines) + "\n"


_ASSUMPTIONS = (
    "- Numbers of options, System 1's accuracy where it does not think (but for HLE), how often thinking spoils a "
    "right answer, and the thought lengths of benchmarks without published ones: `calib/engine/profiles.py`.",
    "- Where thoughts are long, what a cut thought reads, how sure System 2 is: `calib/engine/quotas.py`.",
    "- Outcomes are assigned by quota from a seed, not drawn: another seed is another model with the same figures. "
    "What is not in the tables above (other budgets, other mixes, other thresholds) is plausible, not measured.",
)


_VERDICTS = ("met", "excluded", "unplaced", "missed")


def _row(row: Comparison) -> str:
    digits = 0 if row.figure.startswith("thought") else 2 if row.published >= 0.1 else 3
    return (
        f"| {row.dataset} | {_LABELS[row.figure]} | {row.published:g} | {row.simulated:.{digits}f} | "
        f"{row.difference:+.{digits}f} | {row.verdict} |"
    )


def write_report(path: Path, *, seed: int = 0) -> None:
    """Write the report; the file appears whole or not at all.

    Raises
    ------
    CalibError
        When the folder cannot be written.
    """
    text = render(seed=seed)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CalibError(f"cannot write {path}: {error.strerror}. Give another place with --out", exit_code=1) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: ``python -m calib.published --out FILE``."""
    parser = argparse.ArgumentParser(prog="python -m calib.published", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/published.md"), help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="which simulated model")
    given = parser.parse_args(arguments)
    try:
        write_report(given.out, seed=given.seed)
    except CalibError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
