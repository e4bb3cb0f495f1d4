"""`Temperatures`: what calibration does to stored probabilities, by stage, question kind and number of options.

``p ** (1 / T)`` renormalised is the exact re-temperature of a softmax, so it can be done afterwards on what was stored.
T above 1 takes confidence away, below 1 adds it; the order of the options stays. A stored 0 stays 0 at any T; a
share of the uniform distribution is what can lift it.

Leaves to others: where the numbers come from (`calib.calibrate`), when each stage applies (`calib.policy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calib.errors import CalibError
from calib.jsonnumbers import is_number

__all__ = ["ANY", "BANDS", "HIGHEST", "LOWEST", "STAGES", "Temperatures", "band", "cell", "retempered"]

Floats = NDArray[np.float64]

STAGES = ("p1", "p2", "cut", "final")
"""System 1; System 2 after a finished thought, and after one that was cut; the answer after the mix."""

ANY = "*"
"""Key of the temperature that holds where no closer one is given."""

BANDS = ((2, 2), (3, 4), (5, 8), (9, 16), (17, None))
"""Numbers of options that share a temperature. Above 16 the reference server reads the options in another way."""

LOWEST, HIGHEST = 0.05, 100.0
"""Temperatures beyond these make a forecast one-hot or uniform to every digit that matters."""

_EXAMPLE = '{"p1": {"*": 1.2, "choice:3-4": 1.3}}'


def band(n_options: int) -> str:
    """The band of a number of options: ``2``, ``3-4``, ``5-8``, ``9-16`` or ``17-``."""
    for low, high in BANDS:
        if high is None:
            return f"{low}-"
        if n_options <= high:
            return str(high) if low == high else f"{low}-{high}"
    raise AssertionError("the last band is open")


def cell(kind: str, n_options: int) -> str:
    """Key of the temperature of one kind and number of options, for instance ``choice:3-4``."""
    return f"{kind}:{band(n_options)}"


def retempered(
    p: ArrayLike, temperature: ArrayLike, uniform: float = 0.0, n_options: ArrayLike | None = None
) -> Floats:
    """``(1 - uniform) * p ** (1 / T) / sum + uniform / n_options`` along the last axis.

    Parameters
    ----------
    p : array_like of shape (..., C)
        Distributions; padded options hold 0 and keep it. A row of NaN stays NaN.
    temperature : array_like of shape (...)
        Positive, one for each distribution or one for all; 1 returns its rows to the last bit.
    uniform : float, default 0
        Share of the uniform distribution over the options that exist, 0 to 1.
    n_options : array_like of int, shape (...), optional
        Needed with a share where options are padded; all C when left out.
    """
    given = np.ascontiguousarray(p, dtype=np.float64)
    t = np.asarray(temperature, dtype=np.float64)
    if (t == 1).all():
        q = given
    else:
        with np.errstate(divide="ignore"):
            z = np.log(given) / t[..., None]
        z -= z.max(axis=-1, keepdims=True)
        np.exp(z, out=z)
        q = z / z.sum(axis=-1, keepdims=True)
        if t.ndim:
            q = np.where((t == 1)[..., None], given, q)
    if uniform == 0:
        return q
    width = given.shape[-1]
    k = np.asarray(width if n_options is None else n_options)[..., None]
    return np.asarray((1 - uniform) * q + np.where(np.arange(width) < k, uniform / k, 0.0))


@dataclass(frozen=True)
class Temperatures:
    """Temperatures of each stage; a stage without any is left as it is.

    Attributes
    ----------
    p1, p2, cut, final : mapping of str to float
        By ``KIND:BAND``, ``KIND`` or ``*``; the closest that is given holds, and 1 where none is. ``final`` is applied
        to answers after thinking only: an answer without it is p1, which has its own.
    uniform : mapping of str to float
        Share of the uniform distribution by stage, 0 to below 1.

    Raises
    ------
    CalibError
        When a stage is unknown, or a number out of range.
    """

    p1: Mapping[str, float] = field(default_factory=dict)
    p2: Mapping[str, float] = field(default_factory=dict)
    cut: Mapping[str, float] = field(default_factory=dict)
    final: Mapping[str, float] = field(default_factory=dict)
    uniform: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in STAGES:
            table = self._frozen(stage)
            for key, t in table.items():
                if not LOWEST <= t <= HIGHEST:
                    raise CalibError(
                        f"temperatures: {stage} of {key!r} must be from {LOWEST:g} to {HIGHEST:g}, got {t}"
                    )
        for stage, share in self._frozen("uniform").items():
            if stage not in STAGES:
                raise CalibError(f"temperatures: uniform of {stage!r}: a stage is one of {', '.join(STAGES)}")
            if not 0 <= share < 1:
                raise CalibError(f"temperatures: uniform of {stage} must be from 0 to below 1, got {share}")

    def _frozen(self, name: str) -> Mapping[str, float]:
        given = getattr(self, name)
        if not isinstance(given, Mapping):
            raise CalibError(f"temperatures: {name} must map a kind to a number, got {given!r}; write {_EXAMPLE}")
        for key, value in given.items():
            if not is_number(value):
                raise CalibError(f"temperatures: {name} of {key!r} must be a number, got {value!r}; write {_EXAMPLE}")
        table = MappingProxyType({str(key): float(value) for key, value in given.items()})
        object.__setattr__(self, name, table)
        return table

    def __hash__(self) -> int:
        return hash(tuple((name, *sorted(getattr(self, name).items())) for name in (*STAGES, "uniform")))

    @classmethod
    def read(cls, values: Mapping[str, Any] | Temperatures) -> Temperatures:
        """Temperatures from the values of `to_dict`.

        Raises
        ------
        CalibError
            Naming what is unknown or out of range.
        """
        if isinstance(values, Temperatures):
            return values
        if not isinstance(values, Mapping):
            raise CalibError(f"temperatures must be a mapping, got {values!r}; write {_EXAMPLE}")
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(map(str, values)) - set(known))
        if unknown:
            raise CalibError(f"temperatures: unknown stage {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Plain values for JSON; what is left as it is does not appear."""
        return {f.name: dict(getattr(self, f.name)) for f in fields(self) if getattr(self, f.name)}

    @property
    def nothing(self) -> bool:
        """Whether every stage is left as it is."""
        return not self.to_dict()

    def only(self, *stages: str) -> Temperatures:
        """These stages alone."""
        return Temperatures(
            **{stage: getattr(self, stage) for stage in stages},
            uniform={stage: share for stage, share in self.uniform.items() if stage in stages},
        )

    def changes(self, stage: str) -> bool:
        """Whether this stage is not left as it is."""
        return bool(getattr(self, stage)) or self.uniform.get(stage, 0.0) > 0

    def of(self, stage: str, kind: ArrayLike | None = None, n_options: ArrayLike | None = None) -> Floats:
        """The temperature of one question (shape ()), or of N (shape (N,)).

        Parameters
        ----------
        stage : str
            One of `STAGES`.
        kind : str or array_like of str, optional
        n_options : int or array_like of int, optional
        """
        table = getattr(self, stage)
        rest = table.get(ANY, 1.0)
        if kind is None or set(table) <= {ANY}:
            return np.asarray(rest)

        def closest(one: str, number: int | None) -> float:
            known = table.get(one, rest)
            return float(known if number is None else table.get(cell(one, number), known))

        kinds = np.asarray(kind)
        if kinds.ndim == 0:
            return np.asarray(closest(str(kinds), None if n_options is None else int(np.asarray(n_options))))
        counts = [None] * kinds.size if n_options is None else np.asarray(n_options).tolist()
        pairs = list(zip(kinds.tolist(), counts, strict=True))
        found = {pair: closest(*pair) for pair in set(pairs)}
        return np.array([found[pair] for pair in pairs])

    def at(self, stage: str, p: ArrayLike, kind: ArrayLike | None = None, n_options: ArrayLike | None = None) -> Floats:
        """Distributions of a stage, calibrated.

        Parameters
        ----------
        stage : str
            One of `STAGES`.
        p : array_like of shape (C,), (N, C) or (N, B, C)
        kind, n_options : optional
            Of the one question, or of the N.
        """
        given = np.asarray(p, dtype=np.float64)
        if not self.changes(stage):
            return given
        t, k = self.of(stage, kind, n_options), None if n_options is None else np.asarray(n_options)
        if given.ndim == 3:  # several budgets of each question
            t = t[:, None] if t.ndim else t
            k = k[:, None] if k is not None and k.ndim else k
        return retempered(given, t, self.uniform.get(stage, 0.0), k)

    def system2(
        self,
        p2: ArrayLike,
        finished: ArrayLike = True,
        kind: ArrayLike | None = None,
        n_options: ArrayLike | None = None,
    ) -> Floats:
        """System 2's distributions, calibrated: a thought that was cut is its own class.

        Parameters
        ----------
        p2 : array_like of shape (C,), (N, C) or (N, B, C)
        finished : array_like of bool, shape (), (N,) or (N, B)
        kind, n_options : optional
        """
        if not (self.changes("p2") or self.changes("cut")):
            return np.asarray(p2, dtype=np.float64)
        whole = np.asarray(finished, dtype=bool)
        if whole.all():
            return self.at("p2", p2, kind, n_options)
        cut = self.at("cut", p2, kind, n_options)
        return cut if not whole.any() else np.where(whole[..., None], self.at("p2", p2, kind, n_options), cut)
