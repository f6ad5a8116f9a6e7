"""The factors under which predictions come nearest to measurements, for as many constants as these tell apart.

Of the logarithms of predicted over measured times the sum of squares is made small (Gauss-Newton), each factor held to
1 by what is known of it before anything is measured. One constant is fitted by default, others where each measurement
is told better with them from all the others, and all of them only where they are clear of 1: what is no matter of
constants changes none, and a few runs do no harm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.software import Calibration, Constant, Spread

_PRIOR = 0.3
"""The deviation of a factor's logarithm: what the tables may well be off by."""

_NOISE = 0.04
"""The deviation of a time's logarithm: what a formula with the right constants is good to, for one layout among
others."""

_HOLD = (_NOISE / _PRIOR) ** 2

_WORTH = 0.3
"""The share of what is left that a further constant must take off."""

_SPREAD = 0.08
"""Of a time's logarithm: what layouts of one machine differ by among each other, where its rates are right (vTrain)."""

_CLEAR = 2.0
"""Standard deviations of a factor's logarithm from which on it is fitted."""

_FEW = 4
"""With up to this many measurements one outlier among layouts would decide."""

_STEP = 0.05
_LARGEST_STEP = 0.5
_ROUNDS = 8
_FAR = 6.0
"""A measurement that differs from its estimate by more than this factor is of something else."""

_Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """What took ``measured_s``, and what is predicted for it. weight: 1 for a step; of layers their share of it."""

    label: str
    measured_s: float
    predicted_s: Callable[[Calibration], float]
    weight: float = 1.0


@dataclass(frozen=True)
class Fit:
    """before, after: (predicted - measured) / measured of each measurement. left_out: the mean of what is left of each
    where it is told from the others; None of a single one. left: constants that stay as they are."""

    calibration: Calibration
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: float | None
    left: tuple[Constant, ...]


def fit(measurements: Sequence[Measurement]) -> Fit:
    """Raises UsageError where nothing is measured, or something else than is estimated."""
    if not measurements:
        raise UsageError("nothing to calibrate with: expected at least one run with a measured step")
    start = np.zeros(len(Constant))
    before = _residuals(measurements, start)
    for one, ratio in zip(measurements, before, strict=True):
        if abs(ratio) > math.log(_FAR):
            raise UsageError(
                f"{one.label}: measured {one.measured_s:.4g} s, estimated {one.measured_s * math.exp(ratio):.4g} s; "
                "no constants explain that: expected the same model, GPU and layout"
            )
    scale = np.sqrt(np.array([one.weight for one in measurements]))
    slopes = scale[:, None] * _jacobian(measurements, start, before, range(len(Constant)))
    chosen = _told_apart(slopes, scale * before)
    logs, after = _fitted(measurements, chosen, scale, before)
    factors = {constant: float(math.exp(logs[k])) for k, constant in enumerate(Constant) if k in chosen}
    return Fit(
        Calibration(factors, spread=_spread_of(measurements, slopes[:, chosen], before)),
        tuple(float(math.expm1(x)) for x in before),
        tuple(float(math.expm1(x)) for x in after),
        _left_out_mean(slopes[:, chosen], scale * before),
        tuple(constant for k, constant in enumerate(Constant) if k not in chosen),
    )


def _residuals(measurements: Sequence[Measurement], logs: _Vector) -> _Vector:
    calibration = Calibration({constant: float(math.exp(x)) for constant, x in zip(Constant, logs, strict=True) if x})
    return np.array([math.log(one.predicted_s(calibration) / one.measured_s) for one in measurements])


def _jacobian(
    measurements: Sequence[Measurement], logs: _Vector, residuals: _Vector, columns: Sequence[int]
) -> _Vector:
    """float64[measurements, columns]: by how much each prediction's logarithm changes with each factor's."""
    found = np.empty((len(measurements), len(columns)))
    for place, column in enumerate(columns):
        moved = logs.copy()
        moved[column] -= _STEP  # slower: shares of a rate may be at their most
        found[:, place] = (residuals - _residuals(measurements, moved)) / _STEP
    return found


def _told_apart(jacobian: _Vector, residuals: _Vector) -> list[int]:
    """The columns to fit, by the slopes at the start: those that tell each measurement better from all the others, as
    far as each is clear of what layouts of one machine differ by anyhow; of a few measurements, whichever is left out.

    A single measurement tells of the most general constant alone.
    """
    clear = [k for k in range(jacobian.shape[1]) if np.linalg.norm(jacobian[:, k]) * _PRIOR > _NOISE / 2.0]
    if len(residuals) == 1:
        return [k for k in clear[:1] if min(_clearness(jacobian[:, [k]], residuals)) >= _CLEAR]
    best, chosen = float(np.sum(np.abs(residuals))), list[int]()
    for count in range(1, min(len(clear), len(residuals) - 1) + 1):
        for columns in itertools.combinations(clear, count):
            error = _left_out_error(jacobian[:, columns], residuals)
            kept, worth = jacobian[:, columns], error < best * (1.0 - _WORTH)
            if worth and min(_clearness(kept, residuals)) >= _CLEAR and _clear_without_any(kept, residuals):
                best, chosen = error, list(columns)
    return chosen


def _clear_without_any(jacobian: _Vector, residuals: _Vector) -> bool:
    """Whether each column's factor is clear of 1 whichever of a few measurements is left out: none decides alone."""
    return len(residuals) > _FEW or all(
        min(_clearness(np.delete(jacobian, left, axis=0), np.delete(residuals, left))) >= _CLEAR
        for left in range(len(residuals))
    )


def _clearness(jacobian: _Vector, residuals: _Vector) -> list[float]:
    """Of each column's factor in the fit, its logarithm in standard deviations of its own."""
    inverse = np.linalg.inv(jacobian.T @ jacobian + _HOLD * np.eye(jacobian.shape[1]))
    found = inverse @ jacobian.T @ residuals
    left = residuals - jacobian @ found
    freedom = max(1, len(residuals) - jacobian.shape[1])
    deviation = math.sqrt(max(_SPREAD**2, float(left @ left) / freedom))
    return [abs(float(x)) / (deviation * math.sqrt(float(v))) for x, v in zip(found, np.diag(inverse), strict=True)]


def _left_out(jacobian: _Vector, residuals: _Vector) -> _Vector:
    """What the others leave of each measurement; all fits at once (Allen's PRESS)."""
    inverse = np.linalg.inv(jacobian.T @ jacobian + _HOLD * np.eye(jacobian.shape[1]))
    hat = jacobian @ inverse @ jacobian.T
    found: _Vector = (residuals - hat @ residuals) / (1.0 - np.diag(hat))
    return found


def _left_out_error(jacobian: _Vector, residuals: _Vector) -> float:
    """Sum over measurements of what the others leave of it."""
    return float(np.sum(np.abs(_left_out(jacobian, residuals))))


def _left_out_mean(jacobian: _Vector, residuals: _Vector) -> float | None:
    if len(residuals) == 1:
        return None
    return _left_out_error(jacobian, residuals) / len(residuals)


def _spread_of(measurements: Sequence[Measurement], jacobian: _Vector, residuals: _Vector) -> Spread | None:
    """How far off steps of further layouts may be, by what the others leave of each, at least what formulas are good
    to; with Student's factor. None of a single step, and of layers."""
    count = len(measurements)
    if count == 1 or any(one.weight != 1.0 for one in measurements):
        return None
    deviation = max(_NOISE, float(np.sqrt(np.mean(_left_out(jacobian, residuals) ** 2))))
    half = student_90(count - 1) * deviation * math.sqrt(1.0 + 1.0 / count)
    return Spread(math.exp(-half), math.exp(half), count)


_STUDENT_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


def student_90(freedom: int) -> float:
    """Half the width of a 90 % interval, in standard deviations, for 1, 2, ... degrees of freedom."""
    return _STUDENT_90[freedom - 1] if freedom <= len(_STUDENT_90) else 1.645 + 1.7 / freedom


def _fitted(
    measurements: Sequence[Measurement], chosen: Sequence[int], scale: _Vector, residuals: _Vector
) -> tuple[_Vector, _Vector]:
    """Logarithms of all factors, and what is left of each measurement."""
    logs = np.zeros(len(Constant))

    def loss(at: _Vector, left: _Vector) -> float:
        return float(np.sum((scale * left) ** 2) + _HOLD * np.sum(at**2))

    for _ in range(_ROUNDS if chosen else 0):
        jacobian = scale[:, None] * _jacobian(measurements, logs, residuals, chosen)
        slope = jacobian.T @ (scale * residuals) + _HOLD * logs[list(chosen)]
        step = np.linalg.solve(jacobian.T @ jacobian + _HOLD * np.eye(len(chosen)), -slope)
        step *= min(1.0, _LARGEST_STEP / max(1e-12, float(np.max(np.abs(step)))))
        moved, left = logs, residuals
        for _half in range(4):
            moved = logs.copy()
            moved[list(chosen)] += step
            left = _residuals(measurements, moved)
            if loss(moved, left) < loss(logs, residuals):
                break
            step = step / 2.0
        else:
            break
        gained = loss(logs, residuals) - loss(moved, left)
        logs, residuals = moved, left
        if gained < 1e-4 * len(measurements) * _NOISE**2:
            break
    return logs, residuals
