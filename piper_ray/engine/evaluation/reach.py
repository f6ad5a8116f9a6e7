"""Downsets that plans can use at a threshold, made as states reach them: the live part of a lattice alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from piper_ray.engine.evaluation.dual_prices import DualPrices, StageCover
from piper_ray.engine.kernels.reach import Reached, ReachKinds, ReachLimits, file_reached, reach_from
from piper_ray.engine.kernels.types import BitArray, IndexArray, frozen
from piper_ray.engine.tables.problem import Problem

_FIRST_ROOM = 4096
_AT_ONCE = 256
_STEPS_AT_ONCE = 5_000_000
"""Of one kernel call, which cannot be interrupted."""

_NO_CHECK: Callable[[], None] = lambda: None  # noqa: E731


@dataclass(frozen=True)
class Room:
    """What there is to look for downsets: how many can be kept, at least one, and labels that may be tried, a measure
    of time.
    """

    downsets: int
    steps: int


@dataclass(frozen=True)
class Beam:
    """Not all downsets are followed: of each size so many that waste least, and of these none that wastes more than
    ``early`` devices before its share of what can be spared.
    """

    width: int
    early: float


class Reach:
    """For one problem, whatever downsets its own lattice has. steps: those that the last search took, see ``Room``.
    outgrown: it ended for want of room for downsets.
    """

    def __init__(self, problem: Problem, cover: StageCover) -> None:
        self._problem, self._cover = problem, cover
        self._paths = cover.paths
        self.steps = 0
        self.outgrown = False

    def downsets(
        self, dual_prices: DualPrices, room: Room, beam: Beam | None = None, check: Callable[[], None] = _NO_CHECK
    ) -> BitArray | None:
        """uint64[m, words]: all that plans within the dual prices' threshold can use, or those along a beam; None if
        they need more than the room. Without V if there is no such plan. ``check`` may raise, to end it.
        """
        n = self._paths.order.size
        limits = self.limits(dual_prices, beam)
        self.steps, self.outgrown = 0, False
        kinds = self.kinds(dual_prices)
        reached = _empty_set_alone(min(room.downsets, _FIRST_ROOM), max(1, (n + 63) // 64))
        kept: list[IndexArray] = []
        for size in range(n + 1):
            sources = np.flatnonzero(reached.size[: int(reached.used[0])] == size)
            if beam is not None and sources.size > beam.width:
                sources = sources[_least_waste(reached, sources, dual_prices)[: beam.width]]
            kept.append(sources)
            if size == n:
                break
            sources = sources[np.lexsort(reached.bits[sources].T)]
            for begin in range(0, sources.size, _AT_ONCE):
                alike = sources[begin : begin + _AT_ONCE]
                number = 0
                while number < alike.size * kinds.degree.size:
                    check()
                    number = reach_from(alike, number, _STEPS_AT_ONCE, self._paths, kinds, limits, reached)
                    self.steps = int(reached.steps[0])
                    if self.steps > room.steps:
                        return None
                    if reached.used[0] == reached.devices.size:
                        if reached.devices.size > room.downsets:
                            self.outgrown = True
                            return None
                        reached = grown(reached, min(room.downsets + 1, 4 * reached.devices.size))
        return reached.bits[np.concatenate(kept)]

    def limits(self, dual_prices: DualPrices, beam: Beam | None = None) -> ReachLimits:
        """Of the search for downsets at these dual prices."""
        cluster = self._problem.cluster
        spare = cluster.devices - dual_prices.devices
        return ReachLimits(
            price=dual_prices.of_vertex,
            spare=spare,
            early=spare if beam is None else min(beam.early, spare),
            data_parallel_sum=cluster.data_parallel_limit,
            memory_bytes=cluster.memory_bytes,
        )

    def kinds(self, dual_prices: DualPrices) -> ReachKinds:
        """Stages of other kinds waste more than plans can spare."""
        problem, least = self._problem, self._problem.workload.options.least
        kinds = self._cover.kinds(dual_prices, problem.cluster.devices - dual_prices.devices)
        return frozen(
            ReachKinds(
                variant=kinds.variant,
                degree=kinds.devices // problem.options.degree[kinds.variant],
                devices=kinds.devices,
                weight_s=kinds.weight_s,
                budget_s=kinds.budget_s,
                least_a=np.ascontiguousarray(least.least_a),
                least_b=np.ascontiguousarray(least.least_b),
                least_shared=np.ascontiguousarray(least.least_shared),
            )
        )


def _least_waste(reached: Reached, sources: IndexArray, dual_prices: DualPrices) -> IndexArray:
    """Their order by what plans for them take beyond the price."""
    rows = np.ascontiguousarray(reached.bits[sources].astype("<u8")).view(np.uint8)
    inside = np.unpackbits(rows, axis=1, bitorder="little")[:, : dual_prices.of_vertex.size]
    return np.argsort(reached.devices[sources] - inside @ dual_prices.of_vertex, kind="stable")


def _empty_set_alone(room: int, words: int) -> Reached:
    """Reached, with room for so many."""
    reached = Reached(
        used=np.ones(1, np.int64),
        steps=np.zeros(1, np.int64),
        bits=np.zeros((room, words), np.uint64),
        size=np.zeros(room, np.int64),
        devices=np.zeros(room, np.int64),
        least_sum=np.zeros(room, np.int64),
        slot=np.full(1 << (2 * room).bit_length(), -1, np.int64),
    )
    file_reached(reached)
    return reached


def grown(reached: Reached, room: int) -> Reached:
    """The same, with room for more."""
    larger = _empty_set_alone(room, reached.bits.shape[1])
    count = int(reached.used[0])
    for name in ("bits", "size", "devices", "least_sum"):
        getattr(larger, name)[:count] = getattr(reached, name)
    larger.used[0], larger.steps[0], larger.slot[:] = count, reached.steps[0], -1
    file_reached(larger)
    return larger
