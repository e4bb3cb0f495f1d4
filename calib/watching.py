"""``calib watch``: a decision log and a policy file in, reports out, once or as the log grows.

Leaves to others: reading the log (`calib.logread`), the tests (`calib.watch`), the prediction (`calib.shadow`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calib.envelope import read_envelope
from calib.errors import CalibError
from calib.logread import LogReader, check_logs
from calib.policy import Policy
from calib.policyfile import read_policy
from calib.promises import Finding
from calib.shadow import Prediction, predict
from calib.watch import Report, Watch

__all__ = ["Promised", "Watched", "changes", "follow", "read_promised", "shadow", "watch"]

BESIDE = "policy.json"
"""Name of the policy in a folder, of that of the log when none is named."""

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Promised:
    """A policy file as ``calib watch`` needs it: the policy, its version, what it promised."""

    file: str
    policy: Policy
    version: str
    envelope: Mapping[str, Any]


@dataclass(frozen=True)
class Watched:
    """A report and what it was read from."""

    report: Report
    policy_file: str
    version: str
    logs: tuple[str, ...]
    broken_lines: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        source = {"policy_file": self.policy_file, "policy_version": self.version, "logs": list(self.logs)}
        return source | {"broken_lines": self.broken_lines} | self.report.to_dict()


def read_promised(policy_file: AnyPath | None, logs: Sequence[AnyPath], version: str | None = None) -> Promised:
    """The policy of a file with its envelope.

    Parameters
    ----------
    policy_file : path or None
        Or the folder that holds it. None: ``policy.json`` beside the log.
    logs : sequence of path
    version : str, optional
        Version in the log to hold against it, instead of the file's own.

    Raises
    ------
    CalibError
        No such log or file, no valid policy, or one without an envelope.
    """
    from calib.gateway import policy_version

    path = Path(policy_file) if policy_file is not None else check_logs(logs)[-1].parent
    if path.is_dir():
        path = path / BESIDE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CalibError(
            f"{path}: {error.strerror}; name the policy that is served: --policy serve/policy.json (calib export "
            "writes it)"
        ) from None
    policy, document = read_policy(content, path)
    record = document.get("envelope")
    if record is None:
        raise CalibError(
            f"{path}: no envelope of what was promised at tuning; tune and export again: calib optimize, then "
            f"calib export {document.get('name') or 'best'} --out {path.parent}"
        )
    try:
        return Promised(str(path), policy, version or policy_version(policy), read_envelope(record))
    except CalibError as error:
        raise CalibError(f"{path}: {error}") from None


def watch(logs: Sequence[AnyPath], promised: Promised, *, level: float = 0.95) -> Watched:
    """Hold whole logs, the oldest first, against what was promised.

    Raises
    ------
    CalibError
        No decision under the policy's version.
    """
    reader, watcher = LogReader(logs), Watch(promised.envelope, promised.policy, level=level)
    for rows in reader.batches():
        _take(watcher, rows, promised.version)
    if not watcher.n:
        raise CalibError(_nothing(reader, promised))
    return _watched(watcher.report(), reader, logs, promised)


def follow(
    logs: Sequence[AnyPath],
    promised: Promised,
    *,
    level: float = 0.95,
    every: float = 10.0,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Watched]:
    """Reports on a log as it grows, for ever: one at first, then one after so many seconds where a state has changed.

    Parameters
    ----------
    logs, promised, level
        As for `watch`.
    every : float, default 10
        Seconds between two looks.
    wait, clock : callable
        Wait so many seconds; tell the time in seconds.
    """
    reader, watcher = LogReader(logs), Watch(promised.envelope, promised.policy, level=level)
    told: list[str] | None = None
    looked = clock()
    for rows in reader.batches(follow=True, wait=wait):
        _take(watcher, rows, promised.version)
        due = not rows if told is None else clock() - looked >= every  # at first once all that is there has been read
        if not due:
            continue
        looked = clock()
        report = watcher.report()
        states: list[str] = [finding.state for finding in report.findings]
        if states != told:
            told = states
            yield _watched(report, reader, logs, promised)


def changes(before: Report | None, now: Report) -> list[Finding]:
    """The findings whose state is another one than before; at first those that are not ok."""
    known = {} if before is None else {finding.promise: finding.state for finding in before.findings}
    return [finding for finding in now.findings if finding.state != known.get(finding.promise, "ok")]


def shadow(
    logs: Sequence[AnyPath],
    promised: Promised,
    *,
    policy: Policy | None = None,
    think_budget: int | None = None,
    rate: float | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> Prediction:
    """Predict a policy on the traffic of whole logs, whatever policy answered it.

    Parameters
    ----------
    logs, promised
    policy : Policy, optional
        Instead of the file's own: the same with another threshold.
    think_budget, rate, level
        As for `calib.shadow.predict`.
    seed : int
        Of the bootstrap.
    """
    reader = LogReader(logs)
    rows = [row for batch in reader.batches() for row in batch]
    return predict(
        promised.envelope,
        policy or promised.policy,
        rows,
        rng=np.random.default_rng(seed),
        think_budget=think_budget,
        rate=rate,
        level=level,
    )


def _take(watcher: Watch, rows: Sequence[Mapping[str, Any]], version: str) -> None:
    mine = [row for row in rows if row.get("policy_version") == version and "think" in row]
    for row in rows:
        if row.get("policy_version") != version:
            watcher.left_out[f"policy version {row.get('policy_version') or 'none'}"] += 1
        elif "think" not in row:
            watcher.left_out["p1 alone"] += 1
    watcher.update(mine)


def _watched(report: Report, reader: LogReader, logs: Sequence[AnyPath], promised: Promised) -> Watched:
    return Watched(report, promised.file, promised.version, tuple(map(str, logs)), reader.broken)


def _nothing(reader: LogReader, promised: Promised) -> str:
    there = ", ".join(f"{name} ({count:,})" for name, count in reader.versions.most_common(5))
    if not there:
        return f"no decision in the log ({reader.broken} broken lines); calib serve --log writes one line for each"
    return (
        f"no decision that {promised.file} (version {promised.version}) chose is in the log; it holds the versions "
        f"{there}. Name another with --version, or predict this policy on the traffic with --shadow"
    )
