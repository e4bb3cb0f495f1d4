"""Seconds that nobody measured: from rates, or from a line fitted to measured seconds with residuals resampled.

Pure: arrays in, arrays out; randomness comes in as ``pick`` numbers, so that the same question gets the same seconds
on every load. Leaves to others: which seconds are missing, and the mark ``estimated`` (`calib.store`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib.errors import CalibError

__all__ = ["MIN_ROWS", "Line", "RateModel", "fit_line", "parse_rates", "picks", "resample"]

MIN_ROWS = 10
"""Fewest measured rows that a line or a resample may stand on."""

_BINS = 256  # Theil-Sen looks at all pairs: 256 points are 32,640 pairs, some milliseconds
_WINDOW = 50  # rows whose residuals stand in for each other: enough for a tail of about 1 in 50
_WINDOW_SHARE = 10  # but a tenth of the rows when there are many, so that a rarer tail survives too

Floats = NDArray[np.float64]
Picks = NDArray[np.uint64]


@dataclass(frozen=True)
class RateModel:
    """Latency of one arm from rates that somebody stated.

    Parameters
    ----------
    system1_s : float
        Seconds of System 1, 0 or more.
    tokens_per_second : float
        Thinking speed, above 0.
    read_s : float, default 0
        Seconds to read the answer after the thought, 0 or more.

    Raises
    ------
    CalibError
        When a rate is out of range.
    """

    system1_s: float
    tokens_per_second: float
    read_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("system1_s", "read_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise CalibError(f"{name} must be 0 seconds or more, got {value}")
        if not (math.isfinite(self.tokens_per_second) and self.tokens_per_second > 0):
            raise CalibError(f"tokens_per_second must be above 0, got {self.tokens_per_second}")

    @property
    def t1(self) -> float:
        """Seconds of System 1."""
        return self.system1_s

    def t2(self, tokens: ArrayLike) -> Floats:
        """Seconds of thought and answer read, in the shape of ``tokens``; NaN where the tokens are."""
        return np.asarray(tokens, dtype=np.float64) / self.tokens_per_second + self.read_s


@dataclass(frozen=True, eq=False)
class Line:
    """Seconds against thinking tokens: a robust line and what the measured rows add to it.

    Attributes
    ----------
    intercept : float
        Seconds at 0 tokens.
    slope : float
        Seconds a token, 0 or more.
    tokens : ndarray of shape (R,)
        Tokens of the measured rows, ascending.
    residuals : ndarray of shape (R,)
        Seconds that each row took above the line, in the order of ``tokens``.
    """

    intercept: float
    slope: float
    tokens: Floats
    residuals: Floats

    def predict(self, tokens: ArrayLike, pick: Picks) -> Floats:
        """Seconds at these tokens: the line plus the residual of one measured row with a similar token count.

        A plain line would give a p99 near the p90: the stragglers are in the residuals. They grow with the length of
        the thought, so only rows near in tokens lend theirs.

        Parameters
        ----------
        tokens : array_like of shape (N,)
            NaN gives NaN.
        pick : ndarray of uint64, shape (N,)
            Chooses the row; see `picks`.

        Returns
        -------
        ndarray of shape (N,)
            Seconds, never below 0.
        """
        tokens = np.asarray(tokens, dtype=np.float64)
        rows = len(self.residuals)
        window = min(rows, max(_WINDOW, rows // _WINDOW_SHARE))
        # the middle of equal counts, so that a large tie lends all of its rows and not only its first
        middle = (np.searchsorted(self.tokens, tokens, "left") + np.searchsorted(self.tokens, tokens, "right")) // 2
        first = np.clip(middle - window // 2, 0, rows - window)
        row = first + (pick % np.uint64(window)).astype(np.int64)
        return np.asarray(np.maximum(self.intercept + self.slope * tokens + self.residuals[row], 0.0))


def fit_line(tokens: ArrayLike, seconds: ArrayLike) -> Line | None:
    """Fit seconds against thinking tokens by Theil-Sen; None below `MIN_ROWS` rows of finite values.

    Theil-Sen (the median of the slopes between all pairs) because latency has stragglers of ten times the usual
    seconds: least squares lets a few of them tilt the line, here more than a quarter of the rows must be odd. Above
    256 rows the pairs are taken between medians of equally large groups of rows with neighbouring token counts. The
    intercept makes the median residual 0. Thoughts do not get faster by being longer: a negative slope becomes 0.

    Parameters
    ----------
    tokens, seconds : array_like of shape (R,)
        Rows with a NaN are left out. All tokens may be equal: the slope is then 0.

    References
    ----------
    P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968).
    """
    x, y = np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) < MIN_ROWS:
        return None
    order = np.lexsort((y, x))  # by tokens, then seconds: the line does not hang on the order of the rows
    x, y = x[order], y[order]
    px, py = (x, y) if len(x) <= _BINS else (_medians(x), _medians(y))
    run, rise = px[:, None] - px, py[:, None] - py
    apart = run > 0  # each pair once, and none with equal tokens
    slope = max(0.0, float(np.median(rise[apart] / run[apart]))) if apart.any() else 0.0
    intercept = float(np.median(y - slope * x))
    return Line(intercept, slope, x, y - slope * x - intercept)


def _medians(values: Floats) -> Floats:
    return np.array([np.median(part) for part in np.array_split(values, _BINS)])


def resample(values: ArrayLike, pick: Picks) -> Floats | None:
    """One of the finite values for each pick, shape of ``pick``; None below `MIN_ROWS` of them."""
    known = np.asarray(values, dtype=np.float64)
    known = np.sort(known[np.isfinite(known)])
    return known[(pick % np.uint64(len(known))).astype(np.int64)] if len(known) >= MIN_ROWS else None


def picks(keys: Picks, tokens: ArrayLike) -> Picks:
    """Well-mixed number of each (key, tokens): equal tokens of one thought always pick the same residual.

    Parameters
    ----------
    keys : ndarray of uint64, shape (N,)
        One number a question, from a hash of its text.
    tokens : array_like
        Broadcast to the shape of ``keys``; NaN counts as 0.

    References
    ----------
    G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA (2014): the finalizer.
    """
    whole = np.broadcast_to(np.nan_to_num(np.asarray(tokens, dtype=np.float64)), np.shape(keys)).astype(np.uint64)
    z = keys + (whole + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # uint64 arrays wrap around without a warning
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def parse_rates(text: str, option: str = "rate") -> dict[str, float]:
    """Numbers by arm from ``base=250,mtp=438``; a number without an arm serves all arms, under the key ``""``.

    Parameters
    ----------
    text : str
        Parts joined by commas, each ARM=NUMBER or one NUMBER; numbers are finite and 0 or more.
    option : str
        Name for error messages, such as ``--tokens-per-second``.

    Raises
    ------
    CalibError
        A part that is no number, an arm named twice.
    """
    rates: dict[str, float] = {}
    for part in text.split(","):
        arm, equals, number = (piece.strip() for piece in part.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0) or bool(equals) != bool(arm):
            raise CalibError(
                f"{option} {text!r}: {part.strip()!r} is neither ARM=NUMBER nor a NUMBER of 0 or more; "
                f"write {option} base=45,mtp=50, or one number for all arms: {option} 45"
            )
        if arm in rates:
            raise CalibError(
                f"{option} {text!r}: {f'arm {arm!r}' if arm else 'the number for all arms'} is given twice"
            )
        rates[arm] = value
    return rates
