"""Downsets that plans can use at a threshold, made as states reach them: a lattice's live part, without the rest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from piper_ray.engine.evaluation.potentials import Potentials, StageCover
from piper_ray.engine.kernels.reach import Reached, ReachKinds, ReachLimits, file_reached, reach_from
from piper_ray.engine.kernels.types import BitArray, IndexArray, frozen
from piper_ray.engine.tables.problem import Problem

_FIRST_ROOM = 4096
_AT_ONCE = 256
"""Downsets of one kernel call, which cannot be interrupted."""


class Reach:
    """For one problem, whatever downsets its own lattice has."""

    def __init__(self, problem: Problem, cover: StageCover) -> None:
        self._problem, self._cover = problem, cover
        self._paths = cover.paths

    def downsets(
        self,
        potentials: Potentials,
        most: int,
        width: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> BitArray | None:
        """uint64[m, words]: all that plans within the potentials' threshold can use; None if there are more than
        ``most``. Without V if there is no plan.

        width: of each size so many at most are followed, those that waste least: a beam. ``check`` may raise, to end it.
        """
        n, cluster = self._paths.order.size, self._problem.cluster
        limits = ReachLimits(
            potentials.of_vertex,
            cluster.devices - potentials.devices,
            cluster.data_parallel_limit,
            cluster.memory_bytes,
        )
        kinds = self.kinds(potentials)
        reached = _with_room(min(most, _FIRST_ROOM), max(1, (n + 63) // 64))
        kept: list[IndexArray] = []
        for size in range(n + 1):
            check()
            sources = np.flatnonzero(reached.size[: int(reached.count[0])] == size)
            if width is not None and sources.size > width:
                sources = sources[self._least_waste(reached, sources, potentials, width)]
            kept.append(sources)
            sources = sources[np.lexsort(reached.bits[sources].T)]
            first = 0
            while size < n and first < sources.size:
                check()
                last = min(first + _AT_ONCE, sources.size)
                if reach_from(sources[first:last], self._paths, kinds, limits, reached):
                    first = last
                elif reached.devices.size == most:
                    return None
                else:
                    reached = _grown(reached, min(most, 4 * reached.devices.size))
        return reached.bits[np.concatenate(kept)]

    def _least_waste(self, reached: Reached, sources: IndexArray, potentials: Potentials, width: int) -> IndexArray:
        inside = np.unpackbits(
            reached.bits[sources].astype("<u8").view(np.uint8), axis=1, bitorder="little"
        )[:, : potentials.of_vertex.size]
        waste = reached.devices[sources] - inside @ potentials.of_vertex
        return np.argsort(waste, kind="stable")[:width]

    def kinds(self, potentials: Potentials) -> ReachKinds:
        """Stages of other kinds waste more than plans can spare."""
        kinds = self._cover.kinds(potentials, self._problem.cluster.devices - potentials.devices)
        least = self._problem.workload.options.least
        return frozen(
            ReachKinds(
                variant=kinds.variant,
                degree=kinds.devices // self._problem.options.degree[kinds.variant],
                devices=kinds.devices,
                weight_s=kinds.weight_s,
                budget_s=kinds.budget_s,
                least_a=np.ascontiguousarray(least.least_a),
                least_b=np.ascontiguousarray(least.least_b),
                least_shared=np.ascontiguousarray(least.least_shared),
            )
        )


def _with_room(room: int, words: int) -> Reached:
    """The empty set alone."""
    reached = Reached(
        count=np.ones(1, np.int64),
        bits=np.zeros((room, words), np.uint64),
        size=np.zeros(room, np.int64),
        devices=np.zeros(room, np.int64),
        least_sum=np.zeros(room, np.int64),
        slot=np.full(1 << (2 * room - 1).bit_length(), -1, np.int64),
    )
    file_reached(reached)
    return reached


def _grown(reached: Reached, room: int) -> Reached:
    grown = _with_room(room, reached.bits.shape[1])
    count = int(reached.count[0])
    for old, new in zip(reached[1:-1], grown[1:-1], strict=True):
        new[:count] = old[:count]
    grown.count[0] = count
    grown.slot[:] = -1
    file_reached(grown)
    return grown
