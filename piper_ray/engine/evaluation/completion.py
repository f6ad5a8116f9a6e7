"""What plans below a threshold leave to each downset: by dual prices, and from both sides once its states are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from piper_ray.engine.evaluation.dual_prices import DualPrices
from piper_ray.engine.evaluation.outcome import work_s
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.completion import bound_completions
from piper_ray.engine.kernels.scan import UNREACHABLE, make_scratch
from piper_ray.engine.kernels.selection import StepCache
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.tables.problem import Problem

_AT_ONCE = 512
"""Downsets of one kernel call, which cannot be interrupted."""

_SHARE, _LARGEST_SHARE = 0.5, 1.0
"""Of what the evaluation took: a pass that takes longer mostly leaves out so little that it does not pay, and none pays
that takes still longer."""

_SHORTENED = 0.1
"""Share of the downsets settled so far that have to lose states for a pass to go on."""

_GUARD = 1e-9


def limits_by_price(devices: int, own: FloatArray, of_all: float) -> IndexArray:
    """int64[m]: devices that may go to downsets with so much price, float64[m], of all there is."""
    room = np.floor(devices - (of_all - own) + _GUARD)
    return np.maximum(room, 0.0).astype(np.int64)


@dataclass(frozen=True)
class Completion:
    """Downsets with more devices than ``device_limit``, int64[m], are part of no plan that keeps ``threshold_s``."""

    threshold_s: float
    device_limit: IndexArray

    @classmethod
    def of(cls, threshold_s: float, states: StateTables, scratch: StepCache, check: Callable[[], None]) -> Completion:
        """From all states of a feasible evaluation. ``check`` may raise, to end it.

        Where it leaves out little it takes longest: once that is half of what the evaluation took, or all of it where
        downsets lose states, the smaller ones keep the limits that they had.
        """
        downsets = states.fronts.states.size
        device_limit = states.target.device_limit.copy()
        outside = np.full(downsets, UNREACHABLE)
        outside[-1] = 0
        most_outside = np.full(states.buckets_used, UNREACHABLE)
        working = make_scratch(states.tables, max(1, states.buckets_used), scratch)
        # Read-only where it is read, as for an evaluation: so what both kernels call is compiled once.
        target = frozen(states.target._replace(device_limit=device_limit.view()))
        arrays = states.arrays._replace(target=target)
        for last in range(downsets, 0, -_AT_ONCE):
            check()
            share = work_s(working.tested) / work_s(states.tested)
            if share > _LARGEST_SHARE or (share > _SHARE and _share_shortened(states, device_limit, last) < _SHORTENED):
                break
            bound_completions(max(0, last - _AT_ONCE), last, arrays, working, outside, most_outside, device_limit)
        device_limit.setflags(write=False)
        return cls(threshold_s, device_limit)

    @classmethod
    def by_dual_prices(cls, dual_prices: DualPrices, problem: Problem) -> Completion:
        """What is outside a downset takes as many devices as its price, at least."""
        own = problem.workload.lattice.sums(dual_prices.of_vertex[:, None])[:, 0]
        device_limit = limits_by_price(problem.cluster.devices, own, float(own[-1]))
        device_limit.setflags(write=False)
        return cls(dual_prices.threshold_s, device_limit)

    def within(self, other: Completion | None) -> Completion:
        """Both at once, where both hold."""
        if other is None:
            return self
        device_limit = np.minimum(self.device_limit, other.device_limit)
        device_limit.setflags(write=False)
        return Completion(min(self.threshold_s, other.threshold_s), device_limit)

    def serves(self, threshold_s: float) -> bool:
        """Whether it holds for plans that keep this threshold."""
        return threshold_s <= self.threshold_s


def _share_shortened(states: StateTables, device_limit: IndexArray, first: int) -> float:
    """Of the downsets from ``first`` on that have states, how many lose some by these limits."""
    fronts = states.fronts
    live = first + np.flatnonzero(fronts.states[first:])
    # A front begins with the most devices.
    devices = fronts.tally[fronts.start[live]] // states.target.device_weight
    return float(np.mean(devices > device_limit[live])) if live.size else 0.0
