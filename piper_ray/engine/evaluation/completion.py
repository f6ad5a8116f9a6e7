"""Two-sided bounds: how many devices a plan below a threshold leaves to each downset, by dual prices or by known
states."""

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
"""Downsets in one kernel call, which cannot be interrupted."""

_SHARE, _LARGEST_SHARE = 0.5, 1.0
"""Shares of the evaluation's time. A pass that takes longer than the first share usually rules out too little to pay,
and one that takes longer than the second never pays."""

_SHORTENED = 0.1
"""Share of the downsets settled so far that must lose states for a pass to go on."""

_GUARD = 1e-9


def limits_by_price(devices: int, own: FloatArray, of_all: float) -> IndexArray:
    """Returns int64[m]: the devices left to downsets whose prices sum to ``own``, float64[m], of ``of_all`` for all
    layers."""
    room = np.floor(devices - (of_all - own) + _GUARD)
    return np.maximum(room, 0.0).astype(np.int64)


@dataclass(frozen=True)
class Completion:
    """Limits ``device_limit``, int64[m]: no plan that keeps ``threshold_s`` has a downset with more devices."""

    threshold_s: float
    device_limit: IndexArray

    @classmethod
    def of(cls, threshold_s: float, states: StateTables, scratch: StepCache, check: Callable[[], None]) -> Completion:
        """Computes the limits from all states of a feasible evaluation. ``check`` may raise, to end it.

        A pass takes longest if it rules out little. Once it has taken half of the evaluation's time, or all of it if
        downsets lose states, the remaining, smaller downsets keep their old limits.
        """
        downsets = states.fronts.states.size
        device_limit = states.target.device_limit.copy()
        outside = np.full(downsets, UNREACHABLE)
        outside[-1] = 0
        most_outside = np.full(states.buckets_used, UNREACHABLE)
        working = make_scratch(states.tables, max(1, states.buckets_used), scratch)
        # Arrays that are only read are read-only, as in an evaluation, so that the functions shared by both kernels
        # compile once.
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
        """Computes the limits from dual prices: what is outside a downset takes at least as many devices as its
        price."""
        own = problem.workload.lattice.sums(dual_prices.of_vertex[:, None])[:, 0]
        device_limit = limits_by_price(problem.cluster.devices, own, float(own[-1]))
        device_limit.setflags(write=False)
        return cls(dual_prices.threshold_s, device_limit)

    def within(self, other: Completion | None) -> Completion:
        """Returns limits that combine both, for thresholds for which both hold."""
        if other is None:
            return self
        device_limit = np.minimum(self.device_limit, other.device_limit)
        device_limit.setflags(write=False)
        return Completion(min(self.threshold_s, other.threshold_s), device_limit)

    def serves(self, threshold_s: float) -> bool:
        """Whether the limits hold for plans that keep this threshold."""
        return threshold_s <= self.threshold_s


def _share_shortened(states: StateTables, device_limit: IndexArray, first: int) -> float:
    """Returns the share of the downsets from ``first`` on with states that lose some by these limits."""
    fronts = states.fronts
    live = first + np.flatnonzero(fronts.states[first:])
    # A front's first state has the most devices.
    devices = fronts.tally[fronts.start[live]] // states.target.device_weight
    return float(np.mean(devices > device_limit[live])) if live.size else 0.0
