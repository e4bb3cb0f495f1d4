"""Compiled loops of the exact optimum: arrays in, one row for every threshold out.

Owns the mix axis (where does each question's right option win), the tree over it, and the walk of the latency
percentiles. Leaves to `calib.table` what the rows mean.

All loops take weights as whole numbers (``units``), so that sums are exact and do not depend on their order. A
threshold is a row: row 0 thinks about nothing, row r about ``order[: stops[r - 1]]``, least confident first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from calib.metrics import ECE_BINS, NLL_CLIP

__all__ = ["axis", "best_mixes", "intervals", "label_scores", "latency_rows", "right_units", "score_rows"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

NEVER, ALWAYS, PARTLY = 0, 1, 2
"""At which mixes the right option wins: at none, at all, at some."""

_ROUNDING = 4e-15
"""Twice and more the relative error of ``(1 - w) * p1 + w * p2`` and of a crossing computed from it."""
_CLEAR = 1.1 * _ROUNDING
"""More than the error of any two probabilities."""
_NOWHERE = -(2**62)
_WIDTH = 2.0**60


def compiled(function: Function) -> Function:
    """Compile on first use and keep the machine code on disk, where any cache folder can be written."""
    fast: Any
    try:
        fast = numba.njit(cache=True)(function)
    except RuntimeError:  # numba finds no folder that it may write, NUMBA_CACHE_DIR included
        fast = numba.njit(function)
    return cast(Function, fast)


@compiled
def intervals(
    p1: Floats, thought: Floats, b: int, answer: Ints, n_options: Ints, can_think: NDArray[np.bool_]
) -> tuple[NDArray[np.int8], Floats, Floats, Floats, float]:
    """Mixes at which the right option wins, for each question.

    The right option beats another one where a straight line in the mix is positive, so it wins on one interval.
    Near an end, rounding and the rule for ties decide: there the caller asks the rule itself.

    Parameters
    ----------
    p1, thought : ndarray of shape (N, C), (N, B, C)
        Probabilities of System 1 and of System 2; a row of NaN in ``thought`` wins nowhere.
    b : int
        Which budget.
    answer, n_options : ndarray of int, shape (N,)
    can_think : ndarray of bool, shape (N,)

    Returns
    -------
    kind : ndarray of int8, shape (N,)
        `NEVER`, `ALWAYS` or `PARTLY`.
    bounds : ndarray of shape (N, 4)
        Outer low, inner low, inner high, outer high: right for sure between the inner ones, wrong for sure
        beyond the outer ones.
    lows, highs : ndarray
        The ends inside (0, 1), unsorted.
    doubt : float
        Widest distance between an outer and an inner bound.
    """
    p2 = thought[:, b]
    n = len(p1)
    kind = np.zeros(n, np.int8)
    bounds = np.empty((n, 4))
    lows, highs = np.empty(n), np.empty(n)
    n_low = n_high = 0
    doubt = 0.0
    for i in range(n):
        if not can_think[i] or np.isnan(p2[i, 0]):
            continue
        y = answer[i]
        a, b = p1[i, y], p2[i, y]
        low, high = 0.0, 1.0
        outer_low, inner_low, inner_high, outer_high = 0.0, -1.0, 2.0, 2.0
        lost = False
        for j in range(n_options[i]):
            if j == y:
                continue
            c, d = p1[i, j], p2[i, j]
            lead1, lead2 = a - c, b - d
            if lead1 > _CLEAR and lead2 > _CLEAR:
                continue
            error = _ROUNDING * max(max(a, b), max(c, d))
            if lead1 > error and lead2 > error:
                continue
            if lead1 < -error and lead2 < -error:
                lost = True
                break
            if lead1 == 0.0 and lead2 == 0.0:  # the same floats: a tie at every mix
                if j < y:
                    lost = True
                    break
                continue
            fall = lead1 - lead2
            if abs(fall) < 1e-290:  # parallel within rounding
                inner_low = 2.0
                continue
            cross, reach = lead1 / fall, error / abs(fall)
            if fall > 0:
                high = min(high, cross)
                inner_high, outer_high = min(inner_high, cross - reach), min(outer_high, cross + reach)
            else:
                low = max(low, cross)
                inner_low, outer_low = max(inner_low, cross + reach), max(outer_low, cross - reach)
        if lost or outer_low > outer_high or outer_low > 1.0 or outer_high < 0.0:
            continue
        if inner_low < 0.0 and inner_high > 1.0:
            kind[i] = ALWAYS
            continue
        kind[i] = PARTLY
        bounds[i, 0], bounds[i, 1], bounds[i, 2], bounds[i, 3] = outer_low, inner_low, inner_high, outer_high
        doubt = max(doubt, max(inner_low - outer_low, min(outer_high, 1.0) - inner_high))
        if 0.0 < low < 1.0:
            lows[n_low] = low
            n_low += 1
        if 0.0 < high < 1.0:
            highs[n_high] = high
            n_high += 1
    return kind, bounds, lows[:n_low], highs[:n_high], doubt


@compiled
def _distance(points: Floats, others: Floats) -> Floats:
    """Distance of each point to the nearest of the others; both sorted."""
    gap = np.full(len(points), np.inf)
    k = 0
    for i in range(len(points)):
        while k < len(others) and others[k] < points[i]:
            k += 1
        if k < len(others):
            gap[i] = others[k] - points[i]
        if k > 0:
            gap[i] = min(gap[i], points[i] - others[k - 1])
    return gap


def axis(lows: Floats, highs: Floats, doubt: float, *, ends_too: bool = False) -> tuple[Floats, Floats]:
    """Mixes to look at: the middle of every piece between ends, and the points that may beat both pieces beside them.

    A point beats its two pieces only where one question's interval ends and another's begins, both included: at 0, at
    1, and where a low and a high end are so near that rounding may join them.

    Parameters
    ----------
    lows, highs : ndarray
        Ends of the intervals inside (0, 1).
    doubt : float
        As from `intervals`.
    ends_too : bool, default False
        Whether every end is a point of its own.

    Returns
    -------
    mixes, width : ndarray of shape (M,)
        Ascending; width of the piece that a mix is the middle of, 0 for a point.
    """
    lows, highs = np.sort(lows), np.sort(highs)
    to_high, to_low = _distance(lows, highs), _distance(highs, lows)
    points = [np.array([0.0, 1.0]), lows[to_high <= 2 * doubt], highs[to_low <= 2 * doubt]]
    ends = np.unique(np.concatenate([*points, lows, highs]))
    gap = np.diff(ends)
    middles = ends[:-1] + gap / 2
    proper = (ends[:-1] < middles) & (middles < ends[1:])  # no float lies between neighbouring ones
    middles, gap = middles[proper], gap[proper]
    wanted = ends if ends_too else np.unique(np.concatenate(points))
    at = np.searchsorted(middles, wanted)
    return np.insert(middles, at, wanted), np.insert(gap, at, 0.0)


@compiled
def _buckets(mixes: Floats) -> NDArray[np.int32]:
    """First position of each of M equal buckets of [0, 1], so that a search looks at a handful of mixes."""
    m = len(mixes)
    first = np.empty(m + 2, np.int32)
    at = 0
    for k in range(m + 1):
        while at < m and int(mixes[at] * m) < k:
            at += 1
        first[k] = at
    first[m + 1] = m
    return first


@compiled
def _position(mixes: Floats, buckets: NDArray[np.int32], value: float) -> int:
    """First position whose mix is at least the value."""
    m = len(mixes)
    if value <= 0.0:
        return 0
    if value > 1.0:
        return m
    k = int(value * m)
    low, high = buckets[k], buckets[k + 1]
    while low < high:
        middle = (low + high) // 2
        if mixes[middle] < value:
            low = middle + 1
        else:
            high = middle
    return int(low)


@compiled
def _wins(p1: Floats, p2: Floats, i: int, y: int, n_options: int, mix: float) -> bool:
    """Whether the right option is the first largest at this mix: the floating-point rule of `calib.policy`."""
    stay = 1 - mix
    own = stay * p1[i, y] + mix * p2[i, y]
    for j in range(n_options):
        value = stay * p1[i, j] + mix * p2[i, j]
        if value > own or (value == own and j < y):
            return False
    return True


@compiled
def _turns(
    p1: Floats,
    p2: Floats,
    i: int,
    y: int,
    n_options: int,
    bounds: Floats,
    mixes: Floats,
    buckets: NDArray[np.int32],
    turns: NDArray[np.int32],
) -> int:
    """Positions at which the question becomes right, wrong, right, ... along the axis; how many."""
    m = len(mixes)
    outer_low, inner_low, inner_high, outer_high = bounds[i, 0], bounds[i, 1], bounds[i, 2], bounds[i, 3]
    count = 0
    right = False
    at = _position(mixes, buckets, outer_low)
    while at < m and mixes[at] <= inner_low and mixes[at] <= outer_high:
        if _wins(p1, p2, i, y, n_options, mixes[at]) != right:
            right = not right
            turns[count] = at
            count += 1
        at += 1
    if at < m and inner_low < mixes[at] < inner_high:
        if not right:
            right = True
            turns[count] = at
            count += 1
        at = _position(mixes, buckets, inner_high)
    while at < m and mixes[at] <= outer_high:
        if _wins(p1, p2, i, y, n_options, mixes[at]) != right:
            right = not right
            turns[count] = at
            count += 1
        at += 1
    if right and at < m:
        turns[count] = at
        count += 1
    return count


@compiled
def best_mixes(
    p1: Floats,
    thought: Floats,
    b: int,
    answer: Ints,
    n_options: Ints,
    units: Ints,
    right1: NDArray[np.bool_],
    order: Ints,
    stops: Ints,
    kind: NDArray[np.int8],
    bounds: Floats,
    mixes: Floats,
    width: Floats,
) -> tuple[Ints, Ints]:
    """Largest weight of right answers over all mixes, for every threshold.

    A tree over the axis holds for each node the sum of the steps below it and the largest sum of steps from its
    left end: the root is the largest weight over the whole axis. A question that begins to think adds a step up
    where its interval begins and a step down where it ends.

    Parameters
    ----------
    p1, thought, b, answer, n_options, kind, bounds
        As for `intervals`.
    units : ndarray of int, shape (N,)
        Weights.
    right1 : ndarray of bool, shape (N,)
        Whether System 1 is right.
    order, stops : ndarray of int
        Questions that can think, least confident first; how many of them think in the rows 1, 2, ...
    mixes, width : ndarray of shape (M,)
        As from `axis`.

    Returns
    -------
    best : ndarray of int, shape (K,)
        Weight of right answers, all questions together.
    at : ndarray of int, shape (K,)
        Position of a mix that attains it: of the widest piece, the lowest of equally wide ones.
    """
    p2 = thought[:, b]
    m = len(mixes)
    buckets = _buckets(mixes)
    turns = np.empty(m + 2, np.int32)
    size = 1
    while size < m:
        size *= 2
    # of each node: sum of its steps, largest sum from its left end, where, width there; both children in a cache line
    tree = np.zeros((2 * size, 4), np.int64)
    tree[:, 1] = _NOWHERE
    for k in range(m):
        tree[size + k, 1], tree[size + k, 2], tree[size + k, 3] = 0, k, int(width[k] * _WIDTH)
    for node in range(size - 1, 0, -1):
        _join(tree, node)
    base = 0
    for i in range(len(units)):
        if right1[i]:
            base += units[i]
    best = np.empty(len(stops) + 1, np.int64)
    at = np.empty(len(stops) + 1, np.int64)
    best[0], at[0] = base, tree[1, 2]
    start = 0
    for row in range(len(stops)):
        for k in range(start, stops[row]):
            i = order[k]
            if right1[i]:
                base -= units[i]
            if kind[i] == ALWAYS:
                base += units[i]
            elif kind[i] == PARTLY:
                step = units[i]
                for t in range(_turns(p1, p2, i, answer[i], n_options[i], bounds, mixes, buckets, turns)):
                    node = size + turns[t]
                    tree[node, 0] += step
                    tree[node, 1] += step
                    step = -step
                    node //= 2
                    while node:
                        _join(tree, node)
                        node //= 2
        start = stops[row]
        best[row + 1], at[row + 1] = base + tree[1, 1], tree[1, 2]
    return best, at


@compiled
def _join(tree: Ints, node: int) -> None:
    left, right = 2 * node, 2 * node + 1
    beyond = tree[left, 0] + tree[right, 1]
    ahead = beyond > tree[left, 1] or (beyond == tree[left, 1] and tree[right, 3] > tree[left, 3])
    tree[node, 0] = tree[left, 0] + tree[right, 0]
    tree[node, 1] = beyond if ahead else tree[left, 1]
    tree[node, 2] = tree[right, 2] if ahead else tree[left, 2]
    tree[node, 3] = tree[right, 3] if ahead else tree[left, 3]


@compiled
def right_units(
    p1: Floats,
    thought: Floats,
    b: int,
    answer: Ints,
    n_options: Ints,
    units: Ints,
    which: Ints,
    kind: NDArray[np.int8],
    bounds: Floats,
    mixes: Floats,
) -> Ints:
    """Weight of right answers at each mix of the axis, shape (M,), among the questions of `which` that are `PARTLY`."""
    p2 = thought[:, b]
    m = len(mixes)
    buckets = _buckets(mixes)
    turns = np.empty(m + 2, np.int32)
    steps = np.zeros(m, np.int64)
    for i in which:
        if kind[i] == PARTLY:
            step = units[i]
            for t in range(_turns(p1, p2, i, answer[i], n_options[i], bounds, mixes, buckets, turns)):
                steps[turns[t]] += step
                step = -step
    return np.cumsum(steps)


@compiled
def latency_rows(
    alone: Floats,
    thought: Floats,
    by_alone: Ints,
    by_thought: Ints,
    order: Ints,
    stops: Ints,
    units: Ints,
    weight: Floats,
    need: Ints,
) -> Floats:
    """Mean and percentiles of the latency for every threshold.

    A question that begins to think moves to a later place, so each percentile only moves up: one walk over the
    merged values serves all rows.

    Parameters
    ----------
    alone, thought : ndarray of shape (N,)
        Seconds without and with thinking, ``alone <= thought``, no NaN.
    by_alone, by_thought : ndarray of int
        All questions by ``alone``; those that can think by ``thought``.
    order, stops, units : ndarray of int
        As for `best_mixes`.
    weight : ndarray of shape (N,)
        Weights for the mean.
    need : ndarray of int, shape (Q,)
        Cumulative weight that each percentile must reach.

    Returns
    -------
    ndarray of shape (1 + Q, K)
        The mean, then the percentiles.
    """
    n, n_think = len(by_alone), len(by_thought)
    value = np.empty(n + n_think)
    place_alone, place_thought = np.empty(n, np.int32), np.full(n, -1, np.int32)
    present = np.zeros(n + n_think, np.int64)
    a = b = 0
    for k in range(n + n_think):
        if b == n_think or (a < n and alone[by_alone[a]] <= thought[by_thought[b]]):
            i = by_alone[a]
            value[k], place_alone[i], present[k] = alone[i], k, units[i]
            a += 1
        else:
            i = by_thought[b]
            value[k], place_thought[i] = thought[i], k
            b += 1
    # the mean is a sum from either end and no difference: an infinite latency must not turn into NaN
    staying = np.zeros(n_think + 1)
    total = 0.0
    for i in range(n):
        total += weight[i]
        if place_thought[i] < 0:
            staying[n_think] += weight[i] * alone[i]
    for k in range(n_think - 1, -1, -1):
        staying[k] = staying[k + 1] + weight[order[k]] * alone[order[k]]
    rows = np.empty((1 + len(need), len(stops) + 1))
    place = np.zeros(len(need), np.int64)
    reached = np.full(len(need), present[0])
    thinking = 0.0
    start = 0
    for row in range(len(stops) + 1):
        stop = stops[row - 1] if row else 0
        for k in range(start, stop):
            i = order[k]
            thinking += weight[i] * thought[i]
            present[place_alone[i]] = 0
            present[place_thought[i]] = units[i]
            for q in range(len(need)):
                if place_alone[i] <= place[q]:
                    reached[q] -= units[i]
                if place_thought[i] <= place[q]:
                    reached[q] += units[i]
        start = stop
        rows[0, row] = (thinking + staying[stop]) / total
        for q in range(len(need)):
            while reached[q] < need[q]:
                place[q] += 1
                reached[q] += present[place[q]]
            rows[1 + q, row] = value[place[q]]
    return rows


@compiled
def _bin(top: float, edges: Floats) -> int:
    """Bin ``(lo, hi]`` of a probability."""
    k = min(max(int(top * ECE_BINS), 0), ECE_BINS - 1)
    while k > 0 and top <= edges[k]:
        k -= 1
    while k < ECE_BINS - 1 and top > edges[k + 1]:
        k += 1
    return k


@compiled
def score_rows(
    p1: Floats,
    thought: Floats,
    b: int,
    answer: Ints,
    n_options: Ints,
    units: Ints,
    weight: Floats,
    order: Ints,
    stops: Ints,
    mixes: Floats,
    edges: Floats,
) -> tuple[Ints, Floats, Floats, Floats]:
    """Weight of right answers, ECE, Brier and NLL for every given mix and threshold.

    Parameters
    ----------
    p1, thought, b, answer, n_options, units, order, stops
        As for `best_mixes`.
    weight : ndarray of shape (N,)
        Weights for the means.
    mixes : ndarray of shape (G,)
    edges : ndarray of shape (16,)
        Edges of the bins of the ECE.

    Returns
    -------
    right, ece, brier, nll : ndarray of shape (G, K)
        The scores of probabilities are NaN where no question has a usable answer.
    """
    p2 = thought[:, b]
    n, rows = len(p1), len(stops) + 1
    right, ece = np.empty((len(mixes), rows), np.int64), np.empty((len(mixes), rows))
    brier, nll = np.empty((len(mixes), rows)), np.empty((len(mixes), rows))
    bin1, gap1, right1 = np.empty(n, np.int64), np.empty(n), np.empty(n, np.int64)
    square1, log1 = np.empty(n), np.empty(n)
    gaps1 = np.zeros(ECE_BINS)
    base = np.zeros(3)
    base_right, base_left = 0, 0
    for i in range(n):
        y = answer[i]
        pick = 0
        square = 1 - 2 * p1[i, y]
        for j in range(n_options[i]):
            square += p1[i, j] * p1[i, j]
            if p1[i, j] > p1[i, pick]:
                pick = j
        hit = pick == y
        bin1[i], gap1[i] = _bin(p1[i, pick], edges), weight[i] * (p1[i, pick] - hit)
        right1[i], square1[i] = hit * units[i], weight[i] * square
        log1[i] = -weight[i] * np.log(max(p1[i, y], NLL_CLIP))
        base_right += right1[i]
        base_left += units[i]
        gaps1[bin1[i]] += gap1[i]
        base[0] += weight[i]
        base[1] += square1[i]
        base[2] += log1[i]
    first, second = p1[order], p2[order]  # in the order in which they are read, once for each mix
    for g in range(len(mixes)):
        mix = mixes[g]
        stay = 1 - mix
        gaps, count = gaps1.copy(), base_right
        answered, squares, logs = base[0], base[1], base[2]
        left = base_left
        start = 0
        for row in range(rows):
            stop = stops[row - 1] if row else 0
            for k in range(start, stop):
                i = order[k]
                count -= right1[i]
                gaps[bin1[i]] -= gap1[i]
                squares -= square1[i]
                logs -= log1[i]
                if np.isnan(second[k, 0]):
                    answered -= weight[i]
                    left -= units[i]
                    continue
                y = answer[i]
                pick, most, own = 0, -1.0, stay * first[k, y] + mix * second[k, y]
                square = 1 - 2 * own
                for j in range(n_options[i]):
                    value = stay * first[k, j] + mix * second[k, j]
                    square += value * value
                    if value > most:
                        pick, most = j, value
                hit = pick == y
                count += hit * units[i]
                gaps[_bin(most, edges)] += weight[i] * (most - hit)
                squares += weight[i] * square
                logs -= weight[i] * np.log(max(own, NLL_CLIP))
            start = stop
            right[g, row] = count
            if left > 0:
                gap = 0.0
                for level in range(ECE_BINS):
                    gap += abs(gaps[level])
                ece[g, row], brier[g, row], nll[g, row] = gap / answered, squares / answered, logs / answered
            else:
                ece[g, row] = brier[g, row] = nll[g, row] = np.nan
    return right, ece, brier, nll


@compiled
def _f1(support: int, given: int, hit: int) -> float:
    return 2.0 * hit / (support + given) if support + given > 0 else 0.0


@compiled
def label_scores(
    p1: Floats,
    thought: Floats,
    b: int,
    answer: Ints,
    n_options: Ints,
    units: Ints,
    first_label: Ints,
    n_labels: int,
    order: Ints,
    stops: Ints,
    mixes: Floats,
) -> Floats:
    """Macro F1 for every given mix and threshold, shape (G, K).

    Parameters
    ----------
    p1, thought, b, answer, n_options, units, order, stops, mixes
        As for `score_rows`.
    first_label : ndarray of int, shape (N,)
        Number of the label that option 0 means; the others follow it.
    n_labels : int
    """
    p2 = thought[:, b]
    n, rows = len(p1), len(stops) + 1
    scores = np.empty((len(mixes), rows))
    support, given1, hit1 = np.zeros(n_labels, np.int64), np.zeros(n_labels, np.int64), np.zeros(n_labels, np.int64)
    pick1 = np.zeros(n, np.int64)
    for i in range(n):
        for j in range(n_options[i]):
            if p1[i, j] > p1[i, pick1[i]]:
                pick1[i] = j
        support[first_label[i] + answer[i]] += units[i]
        given1[first_label[i] + pick1[i]] += units[i]
        if pick1[i] == answer[i]:
            hit1[first_label[i] + answer[i]] += units[i]
    first, second = p1[order], p2[order]  # in the order in which they are read, once for each mix
    for g in range(len(mixes)):
        mix = mixes[g]
        stay = 1 - mix
        given, hit = given1.copy(), hit1.copy()
        total, seen = 0.0, 0
        for label in range(n_labels):
            total += _f1(support[label], given[label], hit[label])
            seen += support[label] + given[label] > 0
        start = 0
        for row in range(rows):
            stop = stops[row - 1] if row else 0
            for k in range(start, stop):
                i = order[k]
                y = first_label[i] + answer[i]
                old, new = first_label[i] + pick1[i], -1
                if not np.isnan(second[k, 0]):
                    pick, most = 0, -1.0
                    for j in range(n_options[i]):
                        value = stay * first[k, j] + mix * second[k, j]
                        if value > most:
                            pick, most = j, value
                    new = first_label[i] + pick
                if new == old:
                    continue
                for label, sign in ((old, -1), (new, 1)):
                    if label < 0:
                        continue
                    total -= _f1(support[label], given[label], hit[label])
                    seen -= support[label] + given[label] > 0
                    given[label] += sign * units[i]
                    if label == y:
                        hit[label] += sign * units[i]
                    total += _f1(support[label], given[label], hit[label])
                    seen += support[label] + given[label] > 0
            start = stop
            scores[g, row] = total / seen
    return scores
