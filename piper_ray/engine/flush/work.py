"""What the stages of a plan take together at least, with a price on the memory that they hold.

A stage S of a plan fits: y_S a_S + b_S <= M. So for any prices p_S >= 0

    sum of t_S >= sum of (t_S + p_S (y_S a_S + b_S - M)).

With p_S = p y_S^-e and 0 <= e <= 1 the terms of a layer depend on no stage, as y_S^(1 - e) >= 1 and y_S^-e >= Y^-e for
the most microbatches Y that a stage has in flight. What is left is the least sum over the layers, each with its own
choice, which is concave in p.
"""

from __future__ import annotations

import numpy as np

from piper_ray.engine.kernels.flush_stages import in_flight
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_EXPONENTS = (0.0, 0.5, 1.0)
_HALVINGS = 40
_DOUBLINGS = 200
_ROUNDING = 1e-9
"""Relative, of sums."""


def least_work_s(tables: FlushTables, task: FlushTask) -> float:
    """Of one microbatch in all stages, forwards and backwards; inf if no plan has the memory."""
    if not np.isfinite(task.memory_bytes):
        return 0.0
    at_once = np.array([in_flight(task.schedule, task.microbatches, q) for q in range(task.most_stages)], np.float64)
    return max(_priced_s(tables, task, at_once, exponent) for exponent in _EXPONENTS)


def _priced_s(tables: FlushTables, task: FlushTask, at_once: FloatArray, exponent: float) -> float:
    """At the best price. at_once: float64[stages], microbatches in flight."""
    time_s = tables.option_forward_s + tables.option_backward_s
    held = tables.option_fixed + tables.option_shared / task.data_parallel_degree
    held = tables.option_activation + held * at_once.max() ** -exponent
    room = task.memory_bytes * float((at_once**-exponent).sum())
    layers = _Layers(tables.option_start[task.variants], time_s, held)
    low, high = 0.0, layers.first_price()
    for _ in range(_DOUBLINGS):
        if layers.choice(high)[1] <= room:
            break
        low, high = high, 2.0 * high
    else:
        return np.inf if layers.least_bytes() > room * (1.0 + _ROUNDING) else 0.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if layers.choice(middle)[1] <= room else (middle, high)
    spent_s, _ = layers.choice(high)
    return float(spent_s - high * room - _ROUNDING * (spent_s + high * room))


class _Layers:
    """start: int64[r, n + 1], options of each layer. time_s, held: float64[options]."""

    def __init__(self, start: IndexArray, time_s: FloatArray, held: FloatArray) -> None:
        self._start, self._time_s, self._held = start, time_s, held

    def choice(self, price: float) -> tuple[float, float]:
        """The least sum over the layers of time and priced bytes; and the bytes that it holds."""
        spent_s, held = np.full(self._start.shape[1] - 1, np.inf), np.zeros(self._start.shape[1] - 1)
        for start in self._start:
            options = slice(start[0], start[-1])
            priced_s = self._time_s[options] + price * self._held[options]
            filled = np.flatnonzero(start[:-1] < start[1:])
            first = start[:-1][filled] - start[0]
            least_s = np.minimum.reduceat(priced_s, first)
            of_least = np.where(priced_s == np.repeat(least_s, np.diff(start)[filled]), self._held[options], np.inf)
            better = least_s < spent_s[filled]
            spent_s[filled] = np.where(better, least_s, spent_s[filled])
            held[filled] = np.where(better, np.minimum.reduceat(of_least, first), held[filled])
        return float(spent_s.sum()), float(held.sum())

    def least_bytes(self) -> float:
        """That all layers hold."""
        return _Layers(self._start, np.zeros_like(self._time_s), self._held).choice(1.0)[1]

    def first_price(self) -> float:
        """To begin with, in s a byte: of no unit, but of the sizes that there are."""
        time_s, held = self._time_s.max(initial=0.0), self._held.max(initial=0.0)
        return float(time_s / held) * 2.0**-20 if time_s > 0.0 and held > 0.0 else 1.0
