"""Makes ``reports/reference.md``, its figures, and the figures of the model card, from ``data/recorded``.

Run as ``python -m tests.reports.reference``; progress goes to stderr. Figures are drawn by `calib.figures` and
photographed by a Chromium, where there is one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from calib import intervals, metrics
from calib.curves import Curves
from calib.engine.base import Answer
from calib.figures import frontier
from calib.figures.palette import COLOURS, Style, axis, canvas, settle
from calib.optimise import optimum
from calib.outcomes import Outcomes
from calib.policy import ALWAYS, Policy, Route, baselines, candidate_thresholds, decide, evaluate
from calib.recorded import Recording, Row, fill, open_recording
from calib.store import Store, load_outcomes
from calib.target import parse_targets
from calib.tuning import Demand, tune
from tests.reports.optimum import progress, table

COMMAND = "python -m tests.reports.reference"
CARD = Path("data/reference/README.md")
BEGIN, END = "<!-- figures, written by tests.reports.reference -->", "<!-- end of figures -->"
LOAD, TEST_SHARE, LEVEL, RESAMPLES = 128, 0.3, 0.95, 2000
LIMIT = "p90<1500ms"

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Data:
    """What was recorded, and outcomes of it by model, arm and load."""

    recording: Recording
    rows: Mapping[str, Sequence[Row]]
    outcomes: Mapping[tuple[str, str, int], Outcomes]
    verified: Mapping[str, Any]

    @property
    def main(self) -> Outcomes:
        """The run that answers of both systems are taken from."""
        return self.outcomes["main", "base", LOAD]

    def of(self, model: str, arm: str, load: int) -> dict[str, Row]:
        """Rows of one run by question."""
        return {row.question.id: row for row in self.rows[model] if (row.arm, row.concurrency) == (arm, load)}


def read() -> Data:
    """The recording that ships with calib."""
    recording = open_recording()
    found: dict[tuple[str, str, int], Outcomes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in recording.engines:
            path = Path(folder) / f"{model}.db"
            with Store.open(path) as store:
                fill(store, model, recording)
                for run in (run for run in recording.runs if run["model"] == model):
                    key = (model, run["arm"], run["concurrency"])
                    found[key] = load_outcomes(store, arms=[run["arm"]], concurrency=run["concurrency"])
    verified = json.loads((recording.folder / "verify.json").read_text())
    return Data(recording, {model: recording.rows(model) for model in recording.engines}, found, verified)


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %"


def points(value: float, low: float, high: float) -> str:
    """A difference of shares with its interval."""
    return f"{100 * value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


# --- answers ----------------------------------------------------------------------------------------------------------


def by_task(o: Outcomes) -> str:
    """Both systems on each task: what the model card says."""
    rows = []
    for name in sorted(set(o.dataset.tolist())):
        one = o.select([name])
        tokens, last = one.tokens[:, -1], one.p2[:, -1]
        sure = one.p2.max(axis=2).mean(axis=0)
        right = [metrics.accuracy(one.p2[:, b], one.answer) for b in range(len(one.budgets))]
        options = sorted(set(one.n_options.tolist()))
        rows.append(
            [
                name,
                one.kind[0],
                f"{options[0]} to {options[-1]}" if len(options) > 1 else options[0],
                f"{metrics.accuracy(one.p1, one.answer):.2f}",
                f"{metrics.ece(one.p1, one.answer):.3f}",
                f"{right[-1]:.2f}",
                f"{metrics.ece(last, one.answer):.3f}",
                f"{np.median(tokens):.0f}, {np.quantile(tokens, 0.9):.0f}",
                percent(float(one.finished[:, -1].mean())),
                *(f"{share:.2f} ({conf:.2f})" for share, conf in zip(right, sure, strict=True)),
            ]
        )
    head = ["task", "kind", "options", "System 1", "ECE", "System 2", "ECE", "tokens, median and p90", "finished"]
    return table([*head, *(f"at {budget}" for budget in o.budgets.tolist())], rows, left=3)


def routed(tuned_on: Outcomes, policy: Policy) -> Policy:
    """The policy with a threshold and a budget of its own for each task, the best ones on the tune questions."""
    routes = {}
    for name in sorted(set(tuned_on.dataset.tolist())):
        one = tuned_on.select([name])
        confidence = one.p1.max(axis=1)
        order = np.argsort(confidence)
        alone = one.p1.argmax(axis=1) == one.answer
        first = alone[order]
        best = (-1.0, 0.0, 0.0, int(one.budgets[0]))
        for b, budget in enumerate(one.budgets.tolist()):
            mixed = policy.combine(one.p1, one.p2[:, b]).argmax(axis=1) == one.answer
            mixed = np.where(one.can_think, mixed, alone)
            for threshold in candidate_thresholds(confidence):
                k = int((confidence < threshold).sum())
                score = mixed[order][:k].sum() + first[k:].sum()
                best = max(best, (float(score), -float(one.tokens[order][:k, b].sum()), float(threshold), budget))
        routes[f"dataset={name}"] = Route(best[2], best[3])
    return replace(policy, routes=routes)


def policies(o: Outcomes) -> dict[str, Policy]:
    """What is compared: baselines, and what was tuned on the tune questions."""
    tuned_on, _ = o.split(TEST_SHARE)
    free = optimum(tuned_on).policy
    inside = tune(o, Demand(parse_targets(LIMIT))).policy
    assert free is not None
    base = baselines(o)
    found = {"System 1": base["system1"], "default": base["default"], "always think": base["always_think"]}
    found |= {"tuned": free, "tuned, per task": routed(tuned_on, free)}
    return found if inside is None else found | {f"tuned, {LIMIT}": inside}


def worth(o: Outcomes) -> Iterator[str]:
    """What tuning is worth on held-out questions, over all and by task."""
    _, held_out = o.split(TEST_SHARE)
    assert held_out is not None
    known = policies(o)
    decided = {name: decide(held_out, policy) for name, policy in known.items()}
    scores = {name: evaluate(held_out, policy) for name, policy in known.items()}
    rivals = {name: decided[name] for name in ("System 1", "always think")}
    better = max(rivals, key=lambda name: scores[name].accuracy)
    yield "## What tuning is worth\n"
    yield (
        f"{held_out.n} held-out questions, arm base at {LOAD} requests in flight; thresholds, mixes and budgets are "
        f"those that are best on the other {o.n - held_out.n}. Differences are paired, in points, with 95 % intervals, "
        f"to the better of System 1 and always think on the same held-out questions ({better}), and to the server's "
        "default.\n"
    )
    rows = []
    for name, policy in known.items():
        score = scores[name]
        others = {"better": rivals[better], "default": decided["default"]}
        found = intervals.compare(held_out, decided[name], others, rng=np.random.default_rng(0), level=LEVEL)
        cells = [points(one.difference, one.low, one.high) for one in found.values()]
        if policy.routes:
            knobs = f"by task, mix {policy.mix:.2f}"
        elif policy.threshold > 0:
            threshold = "always" if policy.threshold == ALWAYS else f"{policy.threshold:.3f}"
            knobs = f"{threshold}, {policy.mix:.2f}, {policy.think_budget}"
        else:
            knobs = "never"
        latency = [f"{value:.2f} s" for value in (score.p50, score.p90, score.p99)]
        rows.append([name, knobs, percent(score.accuracy), percent(score.think_rate), *latency, *cells])
    head = [
        "policy",
        "threshold, mix, budget",
        "accuracy",
        "thinks",
        "p50",
        "p90",
        "p99",
        "to the better",
        "to default",
    ]
    yield table(head, rows, left=2) + "\n"
    yield "By task:\n"
    rows = []
    for name in sorted(set(held_out.dataset.tolist())):
        one = held_out.select([name])
        mine = {which: decide(one, known[which]) for which in known}
        score = {which: evaluate(one, known[which]) for which in known}
        best = max(rivals, key=lambda which: score[which].accuracy)
        cells = []
        for which in ("tuned", "tuned, per task"):
            found = intervals.compare(one, mine[which], {best: mine[best]}, rng=np.random.default_rng(0), level=LEVEL)
            difference = found[best]
            cells += [percent(score[which].accuracy), points(difference.difference, difference.low, difference.high)]
        shown = [percent(score[which].accuracy) for which in rivals]
        rows.append([name, one.n, *shown, best, *cells])
    head = ["task", "n", "System 1", "always think", "better", "tuned", "difference", "per task", "difference"]
    yield table(head, rows) + "\n"


def in_short(data: Data) -> str:
    """What the tables below come to."""
    o = data.main
    _, held_out = o.split(TEST_SHARE)
    assert held_out is not None
    known = {name: decide(held_out, policy) for name, policy in policies(o).items()}
    others = {name: known[name] for name in ("System 1", "always think", "default")}
    found = intervals.compare(held_out, known["tuned"], others, rng=np.random.default_rng(0), level=LEVEL)
    limit = intervals.compare(
        held_out, known[f"tuned, {LIMIT}"], {"default": known["default"]}, rng=np.random.default_rng(0), level=LEVEL
    )["default"]
    finished = o.finished[:, -1]
    cut = [metrics.accuracy(p[~finished], o.answer[~finished]) for p in (o.p1, o.p2[:, -1])]
    said = [found[name].sentence for name in ("System 1", "always think", "default")]
    lines = [
        f"- Held out, without a limit, the tuned policy: {'; '.join(said)}.",
        f"- Inside {LIMIT}, which the default misses: {limit.sentence}. That is what the limit costs.",
        f"- Thoughts that the largest budget cuts are right in {percent(cut[1])}, where System 1 is in "
        f"{percent(cut[0])}. Thinking ruins `intent` and helps neither `cups`, `hop`, `rating` nor `reach`.",
        "- Speculation pays for the large model at one request in flight, and nowhere else.",
        "- One arm, large and base, gave wrong answers: a fault of how it was served, found by comparing runs. Its "
        "seconds are used with caution.",
        "- The gateway's answers are the predicted ones at three rates; its p50 and p90 are within 5 % only at the "
        "lowest.",
    ]
    return "## In short\n\n" + "\n".join(lines) + "\n"


def cuts(o: Outcomes) -> Iterator[str]:
    """What a cut thought is worth."""
    yield "## Cut thoughts\n"
    yield (
        "A thought that its budget cuts is closed and the answer read. Over all tasks but `intent`, whose thoughts "
        "mean nothing; `System 1` is its accuracy on the same questions.\n"
    )
    o = o.select([name for name in sorted(set(o.dataset.tolist())) if name != "intent"])
    rows = []
    for b, budget in enumerate(o.budgets.tolist()):
        row: list[object] = [budget]
        for which in (~o.finished[:, b], o.finished[:, b]):
            p, answer = o.p2[which, b], o.answer[which]
            row += [int(which.sum()), percent(metrics.accuracy(p, answer)), f"{p.max(axis=1).mean():.2f}"]
            row += [percent(metrics.accuracy(o.p1[which], answer))]
        rows.append(row)
    part = ["right", "confidence", "System 1"]
    yield table(["budget", "cut", *part, "finished", *part], rows) + "\n"


def agreement(data: Data) -> Iterator[str]:
    """Whether all runs are of the model that they should be."""
    yield "## Do the runs agree\n"
    yield (
        f"Every run beside main, base at {LOAD} in flight, on the same questions: the largest difference of a p1 for "
        "99 % of the questions, shares of equal answers, and the accuracy of System 2 (that of the other run). "
        "Thoughts are sampled; under speculation, or in another batch, they are other ones, and where System 2 is at "
        "chance another thought is another answer. Large should answer as main does.\n"
    )
    reference, rows = data.of("main", "base", LOAD), []
    for run in data.recording.runs:
        key = (run["model"], run["arm"], run["concurrency"])
        if key == ("main", "base", LOAD):
            continue
        mine = data.of(*key)
        both = [(mine[name].answer, reference[name].answer, mine[name].question.answer) for name in mine]
        off = np.array([np.abs(_p1(one) - _p1(other)).max() for one, other, _ in both])
        same1 = [_p1(one).argmax() == _p1(other).argmax() for one, other, _ in both]
        same2 = [one.p2[-1].argmax() == other.p2[-1].argmax() for one, other, _ in both]
        right = [[answer.p2[-1].argmax() == key for answer in pair] for *pair, key in both]
        ours, theirs = np.mean(right, axis=0)
        far = float(np.quantile(off, 0.99))
        accuracy = f"{percent(ours)} ({percent(theirs)})"
        rows.append([*key, len(both), f"{far:.3f}", percent(np.mean(same1)), percent(np.mean(same2)), accuracy])
    head = ["model", "arm", "in flight", "n", "p1 within", "same System 1", "same System 2", "System 2 right"]
    yield table(head, rows, left=2) + "\n"
    yield (
        "**One arm fails: large, base.** Its p1 differs by up to 0.97 at 128 in flight and 0.17 at 1, where its own "
        "draft arm, the same weights, is as main. It was served with `mode 0, cudagraph_mode FULL`; without a draft "
        "model vLLM 0.25.0 takes another model runner for that. The cause was not established. No answer of this arm "
        "is used here, its seconds are, with caution: this is what `calib`'s audits of arms are for.\n"
    )


def _p1(answer: Answer) -> Floats:
    assert answer.p1 is not None
    return answer.p1


# --- seconds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """What a run takes, on given questions.

    Attributes
    ----------
    token : float
        Seconds of System 2 for each thinking token.
    rate : float
        Questions/s when all think: requests in flight over the mean seconds of a question.
    """

    token: float
    rate: float


def pace(rows: Sequence[Row], load: int) -> Pace:
    """Pace over some rows of a run."""
    seconds = np.array([row.answer.t2[-1] for row in rows])
    tokens = np.array([row.answer.tokens[-1] for row in rows])
    whole = seconds + np.array([row.answer.t1 for row in rows])
    return Pace(float(seconds.sum() / tokens.sum()), load / float(whole.mean()))


def speculation(data: Data) -> Iterator[str]:
    """Where drafting pays."""
    yield "## Where speculation pays\n"
    yield (
        "Arms of one model at one load, on the questions that both were asked. `ms a token`: seconds of System 2 over "
        "thinking tokens; `ms a step`: that times the acceptance length. `thought tokens/s`: requests in flight over "
        "the mean seconds of a question, times its tokens (Little's law, so that the length of a run does not matter). "
        "`System 1/s`: measured, System 1 alone at that load. `speed`: ms a token of base over those of draft, above 1 "
        "where drafting pays, with a 95 % bootstrap interval over questions. `pays from`: share of thinking questions "
        "from which the draft arm answers more questions a second than base.\n"
    )
    rows = []
    for model, load, base, draft in pairs(data):
        one, other = pace(base, load), pace(draft, load)
        ratio, low, high = speedup(base, draft)
        known = [rates(data, model, arm, load, found.rate) for arm, found in (("base", one), ("draft", other))]
        share = break_even(*known)
        for arm, found, chosen in (("base", one, base), ("draft", other, draft)):
            run = run_of(data, model, arm, load)
            tokens = float(np.mean([row.answer.tokens[-1] for row in chosen]))
            length = run["acceptance_length"]
            rows.append(
                [
                    model,
                    load,
                    arm,
                    len(chosen),
                    f"{1e3 * found.token:.2f}",
                    f"{1e3 * found.token * (length or 1):.1f}",
                    f"{found.rate * tokens:,.0f}",
                    f"{run['system1_per_s']:.0f}",
                    "" if length is None else f"{length:.2f}",
                    "" if arm == "base" else f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
                    "" if arm == "base" else share,
                ]
            )
    head = [
        "model",
        "in flight",
        "arm",
        "n",
        "ms a token",
        "ms a step",
        "thought tokens/s",
        "System 1/s",
        "acceptance length",
    ]
    yield table([*head, "speed", "pays from"], rows, left=3) + "\n"
    yield (
        "Acceptance length is of at most 5 (four drafted tokens). Runs at one request in flight hold few questions, "
        "and their intervals say so. Nine of ten drafted tokens are accepted, and yet drafting pays in one case of "
        "four: for the large model, one request at a time. `ms a step` says why: with a draft model a step takes many "
        "times as long, also where the model is so small that the GPU cannot be what takes the time. The large draft "
        "arm's higher rate of System 1 alone was measured for 1.5 s and may be chance.\n"
    )


def pairs(data: Data) -> Iterator[tuple[str, int, list[Row], list[Row]]]:
    """Model, load, and rows of both arms on the questions that both were asked."""
    for model in data.recording.engines:
        for load in sorted({run["concurrency"] for run in data.recording.runs}):
            base, draft = data.of(model, "base", load), data.of(model, "draft", load)
            if shared := sorted(base.keys() & draft.keys()):
                yield model, load, [base[name] for name in shared], [draft[name] for name in shared]


def speedup(base: Sequence[Row], draft: Sequence[Row]) -> tuple[float, float, float]:
    """Ratio of the seconds a token, with its bootstrap interval over questions."""
    columns = [
        np.array([[row.answer.t2[-1], row.answer.tokens[-1]] for row in rows], dtype=np.float64)
        for rows in (base, draft)
    ]
    rng, n = np.random.default_rng(0), len(base)

    def ratio(which: NDArray[np.int64]) -> float:
        (a, b), (c, d) = (column[which].sum(axis=0) for column in columns)
        return float((a / b) / (c / d))

    drawn = [ratio(rng.integers(0, n, n)) for _ in range(RESAMPLES)]
    return ratio(np.arange(n)), *(float(np.quantile(drawn, q)) for q in (0.025, 0.975))


def run_of(data: Data, model: str, arm: str, load: int) -> Mapping[str, Any]:
    """What a run took."""
    wanted = (model, arm, load)
    return next(run for run in data.recording.runs if (run["model"], run["arm"], run["concurrency"]) == wanted)


def rates(data: Data, model: str, arm: str, load: int, thinking: float) -> tuple[float, float]:
    """Questions/s when none thinks and when all do."""
    return float(run_of(data, model, arm, load)["system1_per_s"]), thinking


def answered(rate: tuple[float, float], share: Floats) -> Floats:
    """Questions/s when a share thinks: the server's time is spent on both kinds."""
    alone, thinking = rate
    return 1 / ((1 - share) / alone + share / thinking)


def break_even(base: tuple[float, float], draft: tuple[float, float]) -> str:
    """Share of thinking questions from which the draft arm answers more."""
    share = np.linspace(0, 1, 1001)
    ahead = answered(draft, share) > answered(base, share)
    if not ahead.any():
        return "never"
    return "always" if ahead.all() else f"{share[ahead][0]:.0%}" if ahead[-1] else f"up to {share[ahead][-1]:.0%}"


def promise(data: Data) -> Iterator[str]:
    """Predicted beside measured."""
    found = data.verified
    policy = Policy.from_dict(found["policy"])
    yield "## Predicted beside measured\n"
    yield (
        f"The policy that `calib optimize --target '{found['target']}'` found on the run at {found['tuned_at']} in "
        f"flight (threshold {policy.threshold:.4f}, mix {policy.mix:.3f}, budget {policy.think_budget}), exported, "
        "served by `calib serve` in front of vLLM, and asked by `calib verify` with held-out questions that arrive at "
        "random. Each rate is the one at which, by the prediction, as many requests are in flight as in the run that "
        "predicts.\n"
    )
    rows = []
    for one in found["verified"]:
        verify = one["verify"]
        for line in verify["lines"]:
            before, now = line["predicted"]["value"], line["measured"]["value"]
            share = line["metric"] in ("accuracy", "think_rate")
            tokens = line["metric"] == "tokens"
            cells = [percent(v) if share else f"{v:.1f}" if tokens else f"{1e3 * v:.0f} ms" for v in (before, now)]
            change = f"{100 * (now - before):+.1f} points" if share else f"{100 * (now / before - 1):+.1f} %"
            first = line is verify["lines"][0]
            where = [f"{one['rate']:.1f}/s", one["load"], f"{verify['load']['in_flight']:.1f}", verify["n"]]
            rows.append([*(where if first else [""] * 4), line["metric"], *cells, change])
    head = ["rate", "predicted from", "in flight", "n", "metric", "predicted", "measured", "difference"]
    yield table(head, rows) + "\n"
    yield from _beyond(data, policy)


def _beyond(data: Data, policy: Policy) -> Iterator[str]:
    """What the third rate shows: more in flight than predicted for."""
    last = data.verified["verified"][-1]
    _, held_out = data.main.split(TEST_SHARE)
    assert held_out is not None
    score = evaluate(held_out, policy)
    measured = {line["metric"]: line["measured"]["value"] for line in last["verify"]["lines"]}
    changes = [f"{100 * (measured[q] / getattr(score, q) - 1):+.0f} %" for q in ("p50", "p90", "p99")]
    yield (
        "Accuracy, think rate and tokens are as predicted at every rate: the gateway gives the answers that were "
        "recorded. The aim for p50 and p90 is 5 %. The first rate keeps it; at the second p50 is just beyond and p90 "
        "is not within it. Two reasons are likely: random arrivals come in bursts, and the gateway is one more process "
        "before a server whose steps grow with the load. At the third rate the server is beyond what it can do: "
        f"{last['verify']['load']['in_flight']:.0f} requests are in flight instead of {last['load']}, and a prediction "
        f"at {last['load']} does not hold (`calib verify` warns of it). Against the run at {LOAD} in flight, which is "
        f"nearer, the measured p50, p90 and p99 differ by {', '.join(changes)}.\n"
    )


def runs(data: Data) -> Iterator[str]:
    """What was run, and whether the client was in the way."""
    about = data.recording.about
    yield "## What was run\n"
    yield (
        f"{about['hardware']}; vLLM {about['versions']['vllm']}, PyTorch {about['versions']['torch']}, "
        f"Python {about['versions']['python']}; {about['date']}. Flags: `{' '.join(about['flags'])}`; temperature "
        f"{about['sampling']['temperature']}. Model `large`: {about['large']}. Prompts and thoughts of a run are not "
        "cached from an earlier one (a cache salt each), and compilation and warm-up are no part of it. Chats are "
        "rendered and tokenised by the server, within the seconds, as for the gateway. `CPU`: processor seconds over "
        "wall seconds of the busiest client process; `lag`: of its event loop, p99. The client is not what was "
        "measured.\n"
    )
    rows = []
    for run in data.recording.runs:
        rows.append(
            [
                run["model"],
                run["arm"],
                run["concurrency"],
                run["asked"],
                f"{run['seconds']:.0f} s",
                f"{run['questions_per_s']:.1f}",
                run["clients"],
                percent(run["client_cpu_share"]),
                f"{run['client_cpu_ms_per_question']:.1f} ms",
                f"{run['client_lag_ms']['p99']:.1f} ms",
            ]
        )
    head = ["model", "arm", "in flight", "questions", "wall", "questions/s", "clients", "CPU", "CPU a question", "lag"]
    yield table(head, rows, left=2) + "\n"


STEPS = """## Steps

| step | command | wall |
|---|---|---:|
| train both models, one H200 | `python data/reference/train.py --out DIR` | 6.6 min, of which 250 s main, 25 s draft |
| grow the large one | `python data/reference/grow.py data/reference/main DIR/large` | 19 s |
| serve, four arms | `vllm serve DIR/main --served-model-name calib-reference FLAGS` and so on | 2 min |
| record | `python data/reference/record.py PLAN.json --out DIR` | 4 min |
| tune, serve, verify | `python data/reference/promise.py DIR --upstream URL --out DIR` | 1 min |
| tune on the recording, anywhere | `calib demo --recorded` | half a minute |
| this report | `python -m tests.reports.reference` | half a minute |

## What is not shown

- The runs are short. 3,080 questions at 128 in flight and 2,478 at 64 (base); 1,362 at 128 (draft); at 8 and 1, and for
  the large model, a sample. The draft arm was not run at 64 and 8 in flight, the large model not at 64 and 8, and no
  arm with n-gram drafts.
- The large model is the small one made wider and deeper, and was not trained further: it has the cost of a larger model
  and the small one's answers. What is said of it is about seconds.
- All of it is one small synthetic model. That its System 2 is at chance in `cups` and `hop` is a flaw of its training:
  its thoughts reach the right value and then name the wrong letter.
"""


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(data: Data) -> dict[str, go.Figure]:
    """All figures by name."""
    return {
        "reference-front": fronts(data),
        "reference-cuts": cut_figure(data.main),
        "reference-speculation": share_figure(data),
    }


def fronts(data: Data) -> go.Figure:
    """The exact front of each arm and load of the main model."""
    drawn, styles = [], {}
    dashes = {"base": "solid", "draft": "dash"}
    for i, ((model, arm, load), o) in enumerate(data.outcomes.items()):
        if model != "main" or len(data.of(model, arm, load)) < 100:
            continue
        name = f"{arm} at {load}"
        drawn.append(Curves(replace(o, arms=(name,))).frontier())
        styles[name] = Style(COLOURS[i % len(COLOURS)], dash=dashes[arm])
    return frontier(drawn, styles=styles)


def cut_figure(o: Outcomes) -> go.Figure:
    """Accuracy and confidence by budget, a line for each task."""
    figure = canvas("Thoughts cut at a budget: right, by task", theme="light")
    budgets = [str(budget) for budget in o.budgets.tolist()]
    for i, name in enumerate(sorted(set(o.dataset.tolist()))):
        one = o.select([name])
        right = [metrics.accuracy(one.p1, one.answer)]
        right += [metrics.accuracy(one.p2[:, b], one.answer) for b in range(len(budgets))]
        colour, dash = COLOURS[i % len(COLOURS)], ("solid", "dash")[i // len(COLOURS) % 2]
        figure.add_scatter(x=["System 1", *budgets], y=right, name=name, mode="lines+markers",
                           line={"color": colour, "dash": dash})  # fmt: skip
    figure.update_layout(
        xaxis=axis("Think budget (tokens)", theme="light", type="category"),
        yaxis=axis("Accuracy (%)", theme="light", range=[0, 1.02], tickformat=".0%"),
    )
    return settle(figure, plot=340)


def share_figure(data: Data) -> go.Figure:
    """Questions a second against the share that thinks."""
    figure = canvas("What speculation does to throughput", theme="light")
    share = np.linspace(0, 1, 101)
    for i, (model, load, base, draft) in enumerate(pairs(data)):
        for arm, rows in (("base", base), ("draft", draft)):
            y = answered(rates(data, model, arm, load, pace(rows, load).rate), share)
            line = {"color": COLOURS[i % len(COLOURS)], "dash": {"base": "solid", "draft": "dash"}[arm]}
            name = f"{model}, {arm}, {load} in flight"
            figure.add_scatter(x=share, y=y, mode="lines", name=name, line=line)
    figure.update_layout(
        xaxis=axis("Share of the questions that think (%)", theme="light", tickformat=".0%"),
        yaxis=axis("Questions answered per second (log scale)", theme="light", type="log"),
    )
    return settle(figure, plot=340)


def photograph(drawn: Mapping[str, go.Figure], folder: Path) -> list[Path]:
    """PNG of each figure; none where there is no Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        progress("no Chromium: the figures stay as they are")
        return []
    from playwright.sync_api import sync_playwright

    written = []
    with sync_playwright() as play, tempfile.TemporaryDirectory() as temporary:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, figure in drawn.items():
            height = int(figure.layout.height)
            figure.update_layout(width=900, paper_bgcolor="white")
            page = browser.new_page(viewport={"width": 920, "height": height + 20}, device_scale_factor=1.5)
            file = Path(temporary) / f"{name}.html"
            figure.write_html(file, include_plotlyjs=True, config={"staticPlot": True})
            page.goto(file.as_uri())
            page.wait_for_selector(".main-svg")
            staged = folder / f".{name}.png"
            page.locator(".plotly-graph-div").screenshot(path=staged)
            staged.replace(folder / f"{name}.png")
            written.append(folder / f"{name}.png")
        browser.close()
    return written


# --- the report -------------------------------------------------------------------------------------------------------


def render(data: Data) -> str:
    """The report as Markdown."""
    o = data.main
    parts = [
        "# A small dual-system model, measured\n",
        f"Made by `{COMMAND}` from [data/recorded](../data/recorded); not edited by hand. The model, its tasks and how "
        "to make it again: [data/reference](../data/reference/README.md). Nothing here is simulated.\n",
        in_short(data),
        *runs(data),
        *agreement(data),
        "## Both systems by task\n",
        f"{o.n} questions, base at {LOAD} in flight. In the last columns accuracy (mean top probability) of System 2 "
        "at each think budget.\n",
        by_task(o) + "\n",
        *cuts(o),
        "![Accuracy by budget and task](figures/reference-cuts.png)\n",
        *worth(o),
        "## Accuracy against p90\n",
        "The exact front of each arm and load with 100 questions or more: every point is a policy that no other one "
        "beats. Seconds that a run did not measure come from a line fitted to those that it did.\n",
        "![Fronts](figures/reference-front.png)\n",
        *speculation(data),
        "![Questions per second by the share that thinks](figures/reference-speculation.png)\n",
        *promise(data),
        STEPS,
    ]
    return "\n".join(parts)


def write_card(o: Outcomes, card: Path) -> None:
    """Put the figures by task into the model card."""
    text = card.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    staged = card.with_name(f".{card.name}")
    staged.write_text(f"{head}{BEGIN}\n\n{by_task(o)}\n\n{END}{tail}")
    staged.replace(card)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/reference.md"))
    given = parser.parse_args()
    progress("reading data/recorded")
    data = read()
    progress("tables")
    text = render(data)
    staged = given.out.with_name(f".{given.out.name}")
    staged.write_text(text)
    staged.replace(given.out)
    write_card(data.main, CARD)
    progress("figures")
    for path in photograph(figures(data), given.out.parent / "figures"):
        progress(f"wrote {path}")


if __name__ == "__main__":
    main()
