"""The one-file HTML report of a tuned policy: three answers first, then the evidence, then what to type.

Reads the document that ``calib optimize`` saved and the outcomes it was tuned on. The verdict is about held-out
questions; curves and flipped questions are of the tune questions, since looking at held-out ones has a price. Leaves
the look of the page to `calib.page`.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from calib import __version__
from calib.atomic import write_atomically
from calib.certify import marks_of
from calib.confidences import compare_confidences
from calib.curves import Curves, Marked
from calib.errors import CalibError
from calib.figures import differences, policy_figures
from calib.flips import Flips, flips
from calib.intervals import Comparison
from calib.knobs import knobs
from calib.outcomes import ESTIMATED, SIMULATED, Outcomes
from calib.page import Html, badge, bullets, command, escaped, figure, joined, page, paragraph, section, table
from calib.policy import Policy
from calib.questions import Question
from calib.show import in_unit, number, percent, policy_line, seconds, verification_cells
from calib.store import Verification
from calib.target import RATES, Target, parse_target

__all__ = ["MOST_FLIPS", "report_html", "write_report"]

MOST_FLIPS = 60
"""Flipped questions that a report shows one by one."""
_MOST_CURVES = 12  # datasets drawn one by one; with more, the figures show all questions together
_MOST_OPTIONS = 8  # of one flipped question
_MOST_RUNS = 3  # of calib verify

_MARKS = {
    SIMULATED: "Simulated: no real model answered. The numbers say nothing about a real server.",
    ESTIMATED: "Estimated latency: seconds come from rates or a fitted line, not from a clock. "
    "A limit on them can be met, never certified.",
}
_BASELINES = {
    "system1": "System 1 alone",
    "default": "published default",
    "always_think": "always think",
    "system2": "System 2 alone",
}


def write_report(
    document: Mapping[str, Any],
    outcomes: Outcomes,
    path: str | os.PathLike[str],
    *,
    questions: Iterable[Question] | None = None,
    keep_text: bool = True,
    store: str | None = None,
    verifications: Sequence[Verification] = (),
) -> Path:
    """Write the report, for ``calib report NAME --out FILE``.

    Parameters
    ----------
    document : mapping
        As ``calib optimize`` saved it (`Store.policy`, `Tuned.to_dict`).
    outcomes : Outcomes
        All that the store holds of the model: loaded as for the tuning.
    path : path
        Its folder is made where it is not there.
    questions : iterable of Question, optional
        Texts of the flipped questions (`Store.questions`).
    keep_text : bool
        Whether texts may stand in the report; without them flipped questions have their names and numbers only.
    store : str, optional
        Where the outcomes are, for the commands to type; never with a password.
    verifications : sequence of Verification
        Runs of ``calib verify`` (`Store.verifications`); the last ones of this very policy are shown.

    Returns
    -------
    Path

    Raises
    ------
    CalibError
        When the document is of another model, or the file cannot be written.
    """
    target = Path(path)
    texts = questions if keep_text else None
    text = report_html(document, outcomes, questions=texts, store=store, verifications=verifications)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibError(f"{target.parent}: cannot be made ({error.strerror or error})", exit_code=1) from None
    write_atomically({target: text})
    return target


def report_html(
    document: Mapping[str, Any],
    outcomes: Outcomes,
    *,
    questions: Iterable[Question] | None = None,
    store: str | None = None,
    verifications: Sequence[Verification] = (),
) -> str:
    """The report as text; arguments as for `write_report`."""
    report = _Report(document, outcomes, questions, store, verifications)
    return page(f"calib: {report.name} of {report.model}", *report.parts())


class _Report:
    """One report: what several of its sections read."""

    def __init__(
        self,
        document: Mapping[str, Any],
        outcomes: Outcomes,
        questions: Iterable[Question] | None,
        store: str | None,
        verifications: Sequence[Verification],
    ) -> None:
        tuned_on = (document.get("fingerprints") or {}).get("model")
        if tuned_on and outcomes.fingerprint and tuned_on != outcomes.fingerprint:
            raise CalibError(
                f"the policy {document.get('name')!r} was tuned on another model ({document.get('model')}) than these "
                f"outcomes ({outcomes.model}): choose it with --model, or tune again: calib optimize"
            )
        self.document, self.store = document, store
        self.runs = [run for run in verifications if run.summary.get("policy") == document.get("policy")]
        self.name, self.model = str(document.get("name", "best")), str(document.get("model", outcomes.model))
        share = float((document.get("split") or {}).get("test_share", 0.0))
        self.tune, self.test = outcomes.split(share)
        self.level = float((document.get("certificate") or {}).get("level", 0.95))
        self.held_out = document.get("test") is not None
        self.policy = None if document.get("policy") is None else Policy.from_dict(document["policy"])
        shown = self.policy or self._nearest_policy()
        self.curves = Curves(self.tune, like=shown)
        self.marks = tuple(document.get("marks") or ()) or (marks_of(shown, outcomes) if shown else ())
        self.texts = {(q.dataset, q.id): q for q in questions} if questions is not None else {}
        self.stale = self._stale(outcomes)

    def _nearest_policy(self) -> Policy | None:
        nearest = self.document.get("nearest") or {}
        return None if nearest.get("policy") is None else Policy.from_dict(nearest["policy"])

    def _stale(self, outcomes: Outcomes) -> str | None:
        """What to say when the store no longer holds what was tuned on."""
        split = (self.document.get("split") or {}).get("by_dataset") or {}
        then = sum(one["tune"] + one["test"] for one in split.values())
        if not then or then == outcomes.n:
            return None
        return (
            f"The policy was tuned and tested on {then:,} questions; the curves below are of the {outcomes.n:,} that "
            "the store holds now. Tune again to bring both together."
        )

    # the parts in order

    def parts(self) -> list[Html]:
        """Everything on the page."""
        answers = Html(f'<div class="answers">{joined([self._helped(), self._which(), self._trust()])}</div>')
        parts = [self._head(), answers, self._targets(), self._verified(), self._compared(), self._datasets()]
        shown = self.policy or self._nearest_policy()
        if shown is not None:
            parts += self._figures(shown)
        parts += [self._costs(), self._flipped(), self._serve(), self._foot()]
        return parts

    def _head(self) -> Html:
        marks = joined(badge(mark) for mark in self.marks)
        links = (
            ("targets", "Targets"),
            *[("verified", "Measured")] * bool(self.runs),
            ("compared", "Compared"),
            ("datasets", "Datasets"),
            ("curves", "Curves"),
            ("front", "Front"),
            ("costs", "What a limit costs"),
            ("flipped", "Flipped questions"),
            ("serve", "Serve it"),
        )
        banners = joined(Html(f'<div class="banner">{escaped(_MARKS.get(m, m))}</div>') for m in self.marks)
        stale = "" if self.stale is None else Html(f'<div class="banner">{escaped(self.stale)}</div>')
        menu = joined(Html(f'<a href="#{name}">{escaped(text)}</a>') for name, text in links)
        n_test = 0 if self.test is None else self.test.n
        return Html(
            f"<header><h1>{escaped(self.name)}: the policy for {escaped(self.model)}</h1>"
            f'<p class="muted">{self.tune.n:,} questions to tune, {n_test:,} held out, '
            f"{len(self.tune.dataset_names)} datasets, arms {escaped(', '.join(self.tune.arms))} {marks}</p>"
            f"{banners}{stale}<nav>{menu}</nav></header>"
        )

    def _reported(self, part: Mapping[str, Any]) -> dict[str, float | None]:
        """Metrics of the tuned policy or a baseline, held out where there are such questions."""
        found = part.get("test") if self.held_out else part
        return {
            key: value["value"] if isinstance(value, Mapping) and "value" in value else value
            for key, value in (found or {}).items()
        }

    def _own(self) -> dict[str, Any]:
        return {**(self.document.get("tune") or {}), "test": self.document.get("test")}

    def _helped(self) -> Html:
        if self.policy is None:
            return _answer("Did tuning help?", "No policy meets the targets", [self._needs()])
        default = (self.document.get("baselines") or {}).get("default") or {}
        own, other = self._reported(self._own()), self._reported(default)
        difference = default.get("difference") or {}
        lines: list[object] = [
            f"Accuracy {percent(own.get('accuracy'))}, {percent(other.get('accuracy'))} by the published default"
        ]
        if difference.get("sentence"):
            lines.append(difference["sentence"])
        faster = _ratio(other.get("p90"), own.get("p90"))
        if faster is not None:
            lines.append(
                f"p90 {seconds(own['p90'])}, p99 {seconds(own['p99'])}; by the default p90 {seconds(other['p90'])}, "
                f"p99 {seconds(other['p99'])}"
            )
        lines.append(
            f"Thinks about {percent(own.get('think_rate'))} of the questions ({percent(other.get('think_rate'))})"
        )
        lines.append("on held-out questions" if self.held_out else "on the questions that it was tuned on: optimistic")
        return _answer("Did tuning help?", _helped(difference, faster), lines)

    def _needs(self) -> Html:
        needed = [_relaxation(one) for one in (self.document.get("nearest") or {}).get("relaxations") or []]
        return joined(["What would have to give way:", bullets(needed)])

    def _which(self) -> Html:
        shown = self.policy or self._nearest_policy()
        if shown is None:
            return _answer("Which policy?", "None", [])
        rows = [
            ("think below", "never" if shown.threshold == 0 else f"confidence {shown.threshold:.4g}"),
            ("mix", f"{shown.mix:.3g} of System 2"),
            ("think budget", f"{shown.think_budget:,} tokens"),
            ("arm", shown.arm),
        ]
        rows += [("confidence", shown.confidence)] * (shown.confidence != "max")
        rows += [("pool", shown.pool)] * (shown.pool != "linear")
        rows += [("temperatures", "fitted, part of the policy")] * (shown.temperatures is not None)
        rows += [
            (key, ", ".join(f"{k} {v:g}" for k, v in route.items())) for key, route in shown.to_dict()["routes"].items()
        ]
        listed = joined(Html(f"<dt>{escaped(k)}</dt><dd>{escaped(v)}</dd>") for k, v in rows)
        title = policy_line(shown) if self.policy is not None else f"nearest: {policy_line(shown)}"
        short = f"Think below {shown.threshold:.3g}, up to {shown.think_budget:,} tokens, on {shown.arm}"
        if not 0 < shown.threshold <= 1:
            short = f"Never think, on {shown.arm}" if shown.threshold == 0 else f"Always think, on {shown.arm}"
        if self.policy is None:
            short = f"None. The nearest: {short[0].lower()}{short[1:]}"
        return _answer("Which policy?", short, [Html(f'<dl title="{escaped(title)}">{listed}</dl>')])

    def _trust(self) -> Html:
        verdict = str(self.document.get("verdict", "not_met"))
        kind = {"certified": "good", "met": "plain", "not_met": "bad"}.get(verdict, "plain")
        certificate = self.document.get("certificate") or {}
        lines: list[object] = [badge(verdict.replace("_", " "), kind)]
        if certificate.get("statement"):
            lines.append(certificate["statement"])
        elif self.policy is None:
            lines.append("Nothing was tested: no policy meets the targets on the tune questions.")
        if certificate.get("look", 1) > 1:
            lines.append(f"This was look {certificate['look']} at the test split; each later one may spend less.")
        lines += [_MARKS[mark] for mark in self.marks if mark == ESTIMATED]
        lines.append(bullets(self.document.get("warnings") or []))
        short = {
            "certified": "As far as the certificate says",
            "met": "Met here, not certified",
            "not_met": "Do not count on it",
        }
        return _answer("How far to trust it?", short.get(verdict, verdict), lines)

    def _targets(self) -> Html:
        rows = []
        for one in self.document.get("targets") or []:
            target, ends = parse_target(one["target"]), one.get("interval") or [None, None]
            more = one.get("needs_more")
            rows.append(
                [
                    one["target"],
                    _in_unit(target, one.get("value")),
                    _whole(f"{_in_unit(target, ends[0])} to {_in_unit(target, ends[1])}"),
                    badge("met", "good") if one.get("met") else badge("not met", "bad"),
                    badge("certified", "good") if one.get("certified") else badge("no", "plain"),
                    "-" if more is None else more if isinstance(more, str) else f"{more:,}",
                    Html(f'<span class="reason">{escaped(one.get("reason", ""))}</span>'),
                ]
            )
        if not rows:
            return section(
                "Targets",
                escaped("No target was asked for." if self.policy else "None can be met at once."),
                name="targets",
            )
        where = "on held-out questions" if self.held_out else "on the tune questions"
        columns = ["target", where, "interval", "met", "certified", "more questions needed", "because"]
        return section("Targets", table(columns, rows, left=7), name="targets")

    def _verified(self) -> Html:
        """Predicted beside measured, of the last runs of `calib verify`."""
        if not self.runs:
            return Html("")
        parts: list[object] = []
        for run in reversed(self.runs[-_MOST_RUNS:]):
            found = run.summary
            kind = {"kept": "good", "missed": "bad"}.get(found["verdict"], "plain")
            load = f"{run.rate:g} requests/s" if run.rate is not None else f"{run.concurrency} in flight"
            head = f" {run.at[:16].replace('T', ' ')} UTC, {found['n']:,} held-out questions at {run.url}, {load} "
            badges = joined(badge(mark) for mark in found["marks"])
            parts.append(paragraph(joined([badge(found["verdict"].replace("_", " "), kind), head, badges])))
            rows = [[escaped(cell) for cell in verification_cells(line)] for line in found["lines"]]
            parts.append(table(["", "predicted", "measured", "verdict"], rows, left=4))
            said = [found["certificate"]["statement"]] if found["certificate"] else []
            parts.append(bullets([*said, *found["warnings"]]))
        return section("Predicted beside measured", *parts, name="verified")

    def _compared(self) -> Html:
        if self.policy is None:
            return Html("")
        rows, comparisons = [], []
        for name, part in {"tuned": self._own(), **(self.document.get("baselines") or {})}.items():
            shown = self._reported(part)
            difference = part.get("difference")
            accuracy = (part.get("test") or {}).get("accuracy") if self.held_out else None
            ends = (accuracy or {}).get("interval") or [None, None]
            rows.append(
                [
                    Html("<strong>tuned</strong>") if name == "tuned" else _BASELINES.get(name, name),
                    percent(shown.get("accuracy")) + ("" if None in ends else _ends(*ends)),
                    percent(shown.get("think_rate")),
                    number(shown.get("tokens"), 1),
                    *(seconds(shown.get(metric)) for metric in ("mean", "p50", "p90", "p99")),
                    "" if difference is None else _points(difference),
                ]
            )
            if difference is not None:
                comparisons.append(_comparison(name, difference, self.level))
        columns = [
            "",
            "accuracy",
            "think rate",
            "tokens",
            "mean",
            "p50",
            "p90",
            "p99",
            "tuned is better by",
        ]
        where = "on held-out questions" if self.held_out else "on the tune questions (optimistic)"
        marks = [mark for mark in self.marks if mark == SIMULATED]
        drawn = [figure(differences(comparisons, marks=marks), wide=True)] if comparisons else []
        return section(
            f"Compared with what one would serve without tuning, {where}", table(columns, rows), *drawn, name="compared"
        )

    def _datasets(self) -> Html:
        shown = self.policy or self._nearest_policy()
        if shown is None:
            return Html("")
        ours, default = self._marked(shown)
        split = (self.document.get("split") or {}).get("by_dataset") or {}
        rows = []
        for name in [None, *self.curves.datasets]:
            mine, theirs = ours.values[name], default.values[name]
            counts = split.get(name) if name is not None else None
            n = int((self.tune.dataset == name).sum()) if name is not None else self.tune.n
            rows.append(
                [
                    "all questions" if name is None else name,
                    f"{n:,}",
                    (f"{self.test.n:,}" if self.test else "0")
                    if name is None
                    else f"{counts['test']:,}"
                    if counts
                    else "-",
                    percent(theirs["accuracy"]),
                    percent(mine["accuracy"]),
                    percent(theirs["think_rate"]),
                    percent(mine["think_rate"]),
                    *(seconds(one[q]) for q in ("p90", "p99") for one in (theirs, mine)),
                ]
            )
        columns = ["dataset", "tune", "held out"]
        columns += [
            f"{what}, {who}" for what in ("accuracy", "think rate", "p90", "p99") for who in ("default", "tuned")
        ]
        note = paragraph("On the tune questions: optimistic for the tuned policy.", muted=True)
        return section("Datasets", note, table(columns, rows), name="datasets")

    def _marked(self, policy: Policy) -> tuple[Marked, Marked]:
        default = (self.document.get("baselines") or {}).get("default") or {}
        if "policy" in default:
            other = Policy.from_dict(default["policy"])
        else:
            o = self.tune
            other = Policy(o.default_threshold, o.default_mix, int(o.budgets[-1]), policy.arm)
        label = "tuned optimum" if self.policy is not None else "nearest"
        return self.curves.marked(label, policy), self.curves.marked("published default", other)

    def _figures(self, policy: Policy) -> list[Html]:
        targets = [parse_target(one["target"]) for one in self.document.get("targets") or []]
        names: list[str | None] = [None, *self.curves.datasets]
        drawn = policy_figures(
            self.curves,
            policy,
            marked=self._marked(policy),
            targets=targets,
            datasets=[None] if len(names) > _MOST_CURVES + 1 else names[1:] if len(names) == 2 else names,
        )
        front = drawn.pop("frontier", None)
        note = (
            f"On the {self.tune.n:,} tune questions, with the other knobs at the policy's values. Bands hold for one "
            "threshold at a time; a click on a name in the legend hides it."
        )
        grid = Html(f'<div class="figures">{joined(figure(one) for one in drawn.values())}</div>')
        parts = [section("Curves", paragraph(note, muted=True), grid, self._confidences(targets), name="curves")]
        if front is None:
            text = "Without seconds there is no front of accuracy against latency: import with rates, or measure."
            parts.append(section("Front", paragraph(text), name="front"))
        else:
            text = "Each point is the most accurate policy at its latency, for each arm; hover for its knobs."
            parts.append(section("Front", paragraph(text, muted=True), figure(front, wide=True), name="front"))
        return parts

    def _confidences(self, targets: Sequence[Target]) -> Html:
        """What the exact optimum reaches with each definition of the confidence."""
        known = any(self.tune.has_latency(arm) for arm in self.tune.arms)
        kept = [t for t in targets if known or not t.is_latency]
        rows = [
            [
                row.definition,
                f"{row.aurc:.4f}",
                "-" if row.score is None else percent(row.score.accuracy),
                "-" if row.score is None else percent(row.score.think_rate),
                "-" if row.score is None else seconds(row.score.p90),
                "-" if row.score is None else seconds(row.score.p99),
            ]
            for row in compare_confidences(self.tune, kept, table=self.curves.table)
        ]
        head = ["confidence", "area under risk-coverage", "best accuracy", "think rate", "p90", "p99"]
        text = (
            "The exact optimum inside the limits with each definition of the confidence, on the tune questions and as "
            "the systems answered."
        )
        return Html(f"{paragraph(text, muted=True)}{table(head, rows)}")

    def _costs(self) -> Html:
        metric = (self.document.get("exact") or {}).get("metric", "accuracy")
        unit = Target(metric, "<", 0.0)
        parts: list[object] = []
        rows = [
            [one["target"], _in_unit(unit, one.get("without_it")), _gap(unit, one.get("gain"))]
            for one in self.document.get("prices") or []
        ]
        if rows:
            parts.append(table(["limit", f"best {metric} without it", "it costs"], rows))
        margin = (self.document.get("margin") or {}).get("costs")
        if margin is not None:
            costs = _gap(unit, margin)
            parts.append(paragraph(f"The margin below the limits, so that they hold on new questions, costs {costs}."))
        objective = (self.document.get("exact") or {}).get("objective")
        if objective is not None:
            best = _in_unit(unit, objective)
            parts.append(paragraph(f"Best of the data inside the limits: {metric} {best} on the tune questions."))
        study = self.document.get("study") or {}
        if study:
            gap = "" if study.get("gap") is None else f", {_gap(unit, study['gap'])} short of it"
            best = "nothing feasible" if study.get("objective") is None else _in_unit(unit, study["objective"])
            parts.append(
                paragraph(f"Optuna study {study.get('name')}, {study.get('trials', 0):,} trials: {best}{gap}.")
            )
        if self.policy is None:
            parts.append(self._needs())
        return section("What each limit costs", *(parts or [escaped("No limit was asked for.")]), name="costs")

    def _flipped(self) -> Html:
        shown = self.policy or self._nearest_policy()
        if shown is None:
            return Html("")
        _, default = self._marked(shown)
        found = flips(self.tune, shown, default.policy)
        won = int((found.right_ours & ~found.right_other).sum())
        lost = int((found.right_other & ~found.right_ours).sum())
        summary = (
            f"Of {self.tune.n:,} tune questions {len(found):,} are answered or thought about differently than by the "
            f"published default: {won:,} won, {lost:,} lost, {len(found) - won - lost:,} as right as before."
        )
        # a thought alone changes seconds and not what the user gets; neither side may crowd the other out
        changed = np.flatnonzero(found.ours != found.other)
        sides = [
            changed[mask[changed]]
            for mask in (found.right_ours & ~found.right_other, found.right_other & ~found.right_ours)
        ]
        first = np.concatenate([side[: MOST_FLIPS // 2] for side in sides])
        picked = np.sort(np.concatenate([first, np.setdiff1d(changed, first)[: MOST_FLIPS - len(first)]]))
        more = f" {len(picked):,} of the {len(changed):,} with another answer are below." * (len(changed) > len(picked))
        rows = [self._flip(found, int(i)) for i in picked]
        note = paragraph(summary + more)
        return section("Flipped questions", note, *rows, name="flipped")

    def _flip(self, found: Flips, i: int) -> Html:
        o, at = self.tune, int(found.index[i])
        name = (str(o.dataset[at]), str(o.ids[at]))
        asked = self.texts.get(name)
        n = int(o.n_options[at])
        options = (
            list(asked.options) if asked is not None and len(asked.options) == n else [f"option {k}" for k in range(n)]
        )
        kind = ("won", "good") if found.right_ours[i] and not found.right_other[i] else ("lost", "bad")
        if found.right_ours[i] == found.right_other[i]:
            kind = ("other answer, both wrong", "plain")
        title = asked.question if asked is not None else ""
        head = joined(
            [badge(*kind), Html(f'<span class="muted">{escaped(name[0])} / {escaped(name[1])}</span> '), _short(title)]
        )
        text = Html("")
        if asked is not None:
            state, question = escaped(asked.state), escaped(asked.question)
            text = Html(f'<div class="text">{state}</div><div class="text"><strong>{question}</strong></div>')
        answer = int(o.answer[at])
        ours, other = found.p_ours[i][:n], found.p_other[i][:n]
        top = np.fmax(np.nan_to_num(ours), np.nan_to_num(other))
        top[answer] = np.inf
        rows: list[list[object]] = [
            [
                Html(f'<span class="option">{"✓ " if k == answer else ""}{escaped(options[k])}</span>'),
                _bar(float(ours[k]), "#0072B2", chosen=k == found.ours[i]),
                _bar(float(other[k]), "#E69F00", chosen=k == found.other[i]),
            ]
            for k in np.sort(np.argsort(-top, kind="stable")[:_MOST_OPTIONS]).tolist()
        ]
        left = n - len(rows)
        rows += [[f"{left} improbable options", "", ""]] * (left > 0)
        how: list[list[object]] = [
            [
                "",
                _how(found.thinks_ours[i], found.tokens_ours[i], found.finished_ours[i], found.seconds_ours[i]),
                _how(found.thinks_other[i], found.tokens_other[i], found.finished_other[i], found.seconds_other[i]),
            ]
        ]
        body = table(["option (✓ right)", "tuned", "published default"], rows + how, left=3)
        return Html(f"<details><summary>{head}</summary>{text}{body}</details>")

    def _serve(self) -> Html:
        if self.policy is None:
            lines = (
                ["calib optimize " + " ".join(f"--target {shlex.quote(one)}" for one in self._loosened())]
                if self._loosened()
                else []
            )
            text = (
                "There is nothing to serve. Loosen one limit and tune again:" if lines else "There is nothing to serve."
            )
            return section("What to type", paragraph(text), *([command(*lines)] if lines else []), name="serve")
        at = f" --store {shlex.quote(self.store)}" if self.store else ""
        at += " --allow-simulated" * (SIMULATED in self.marks)
        lines = [
            f"calib export {shlex.quote(self.name)} --out serve/ --held-by gateway{at}",
            f"# a server of arm {_short(self.policy.arm)} listens at port 8000",
            "calib serve --policy serve/policy.json --upstream http://127.0.0.1:8000 --port 8080",
        ]
        rows = [[knob.knob, knob.value, knob.holder, knob.how] for knob in knobs(self.policy, "gateway")]
        note = "A gateway in front of the server holds every knob; the server itself stays as it is."
        return section(
            "What to type to serve it",
            paragraph(note),
            command(*lines),
            table(["knob", "value", "held by", "how"], rows, left=4),
            name="serve",
        )

    def _loosened(self) -> list[str]:
        """Targets with the first limit that can give way at what it needs."""
        relaxations = (self.document.get("nearest") or {}).get("relaxations") or []
        for i, one in enumerate(relaxations):
            if one.get("needs") is not None:
                target = parse_target(one["target"])
                factor = {"ms": 1000.0, "%": 100.0}.get(target.unit, 1.0)
                step = math.ceil if target.upper else math.floor
                limit = step(one["needs"] * factor * 100 + (1e-9 if target.upper else -1e-9)) / 100
                kept = [other["target"] for j, other in enumerate(relaxations) if j != i]
                return [f"{target.metric}{target.selector}{target.op}{limit:g}{target.unit}", *kept]
        return []

    def _foot(self) -> Html:
        prints = self.document.get("fingerprints") or {}
        parts = [
            f"calib {__version__}",
            datetime.now(UTC).strftime("written %Y-%m-%d %H:%M UTC"),
            *(f"{what} {str(value)[:12]}" for what, value in prints.items() if value),
        ]
        return Html(f"<footer>{escaped(' · '.join(parts))}</footer>")


def _answer(question: str, short: str, lines: Sequence[object]) -> Html:
    body = joined(
        line if isinstance(line, Html) and line.startswith(("<dl", "<ul")) else paragraph(line)
        for line in lines
        if line
    )
    return Html(
        f'<div class="answer"><h2>{escaped(question)}</h2><div class="short">{escaped(short)}</div>{body}</div>'
    )


def _helped(difference: Mapping[str, Any], faster: float | None) -> str:
    """One line: accuracy first, then latency; a difference that may be chance is none."""
    apart = bool(difference.get("distinguishable"))
    gain = 100 * float(difference.get("difference") or 0.0)
    speed = (
        ""
        if faster is None or 0.95 < faster < 1.05
        else f"p90 {faster:.1f} times shorter"
        if faster > 1
        else f"p90 {1 / faster:.1f} times longer"
    )
    if apart and gain > 0:
        return f"Yes: {gain:+.1f} points of accuracy" + (f", {speed}" if speed else "")
    if apart:
        return (
            f"It trades: {speed}, {gain:+.1f} points of accuracy"
            if speed and faster and faster > 1
            else f"No: {gain:+.1f} points of accuracy"
        )
    if speed and faster is not None and faster > 1:
        high = (difference.get("interval") or (None, None))[1]
        if gain < 0 and high is not None and high < 0:  # the exact test alone is undecided
            return f"It is faster: {speed}; accuracy may be worse, {gain:+.1f} points on too few questions to tell"
        return f"Yes: {speed}, accuracy cannot be told apart"
    return f"No gain in accuracy can be shown{', ' + speed if speed else ''}"


def _ratio(before: float | None, after: float | None) -> float | None:
    return before / after if before and after and math.isfinite(before) and math.isfinite(after) else None


def _relaxation(one: Mapping[str, Any]) -> str:
    if one.get("needs") is None:
        return f"{one['target']}: relaxing this one alone does not help"
    return f"{one['target']} would have to be {_in_unit(parse_target(one['target']), one['needs'])}"


def _in_unit(target: Target, value: float | None) -> str:
    return "-" if value is None else in_unit(target, value)


def _whole(text: str) -> Html:
    """Text that is not broken over lines."""
    return Html(f'<span class="whole">{escaped(text)}</span>')


def _ends(low: float, high: float) -> str:
    """The interval of a share, in percent."""
    return f" [{100 * low:.1f}, {100 * high:.1f}]"


def _gap(unit: Target, value: float | None) -> str:
    """A difference of two values of a metric."""
    return f"{100 * value:.1f} points" if value is not None and unit.metric in RATES else _in_unit(unit, value)


def _points(difference: Mapping[str, Any]) -> str:
    low, high = difference["interval"]
    text = f"{100 * difference['difference']:+.1f} points"
    text += "" if low is None or high is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return text if difference["distinguishable"] else f"{text}, cannot be told apart"


def _comparison(name: str, given: Mapping[str, Any], level: float) -> Comparison:
    """The comparison that a document holds."""
    low, high = (math.nan if end is None else end for end in given["interval"])
    label = _BASELINES.get(name, name)
    p = given.get("p_value")
    return Comparison(label, given["n"], given["difference"], low, high, given["gained"], given["lost"], p, level)


def _short(text: str, longest: int = 110) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _bar(p: float, colour: str, *, chosen: bool) -> Html:
    if math.isnan(p):
        return Html("no answer")
    value = f"<strong>{p:.3f}</strong>" if chosen else f"{p:.3f}"
    return Html(f'<span class="bar" style="width:{140 * p:.0f}px;background:{colour}"></span>{value}')


def _how(thinks: bool, tokens: float, finished: bool, took: float) -> str:
    if not thinks:
        return f"without thinking, {seconds(took)}"
    return f"{tokens:,.0f} tokens, {'finished' if finished else 'cut'}, {seconds(took)}"
