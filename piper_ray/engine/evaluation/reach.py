"""Finds the downsets useful at a threshold. They are made as states reach them, without the rest of the lattice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.evaluation.dual_prices import Cover, DualPrices
from piper_ray.engine.kernels.reach import Reached, ReachKinds, ReachLimits, empty_path, file_reached, reach_from
from piper_ray.engine.kernels.types import BitArray, IndexArray

_FIRST_ROOM = 4096
_AT_ONCE = 256
_STEPS_AT_ONCE = 5_000_000
"""Limits of one kernel call, which cannot be interrupted."""

_TINY, _MUCH = np.finfo(float).tiny, 1e300
"""Replace a divisor of 0, and the devices of a layer that no stage can have."""

_NO_CHECK: Callable[[], None] = lambda: None  # noqa: E731


@dataclass(frozen=True)
class Room:
    """Limits of a search for downsets: the number that can be kept, at least one, and the number of labels that may be
    tried, a measure of time.
    """

    downsets: int
    steps: int


@dataclass(frozen=True)
class Beam:
    """Follows only some downsets: of each size the ``width`` ones that waste least, and none that wastes more than
    ``early`` devices beyond its share of what plans can spare.
    """

    width: int
    early: float


class Reach:
    """Searches for useful downsets, for the layers and stages of one cover.

    steps: the number taken by the last search, see ``Room``. outgrown: whether it ended because there was no room for
    more downsets.
    """

    def __init__(self, cover: Cover) -> None:
        self._cover = cover
        self._paths = cover.stages.paths
        self.steps = 0
        self.outgrown = False

    def downsets(
        self, dual_prices: DualPrices, room: Room, beam: Beam | None = None, check: Callable[[], None] = _NO_CHECK
    ) -> BitArray | None:
        """Returns uint64[m, words]: all downsets useful for plans within the dual prices' threshold, or those along a
        beam; None if the room does not suffice. V is not among them if there is no such plan. ``check`` may raise, to
        end it.
        """
        n = self._paths.order.size
        self.steps, self.outgrown = 0, False
        kinds = self.kinds(dual_prices)
        limits = self.limits(dual_prices, kinds, beam)
        reached = _empty_set_alone(min(room.downsets, _FIRST_ROOM), max(1, (n + 63) // 64))
        path = empty_path(n, reached.bits.shape[1])
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
                    number = reach_from(alike, number, _STEPS_AT_ONCE, self._paths, kinds, limits, path, reached)
                    self.steps = int(reached.steps[0])
                    if self.steps > room.steps:
                        return None
                    if reached.used[0] == reached.devices.size:
                        if reached.devices.size > room.downsets:
                            self.outgrown = True
                            return None
                        reached = grown(reached, min(room.downsets + 1, 4 * reached.devices.size))
        return reached.bits[np.concatenate(kept)]

    def limits(self, dual_prices: DualPrices, kinds: ReachKinds, beam: Beam | None = None) -> ReachLimits:
        """Returns the limits of the search for downsets, at these dual prices and with these kinds of stages."""
        limits, paths = self._cover.limits, self._paths
        spare = limits.devices - dual_prices.devices
        # If a kind has no time, nothing has a share of it.
        a_second = np.where(kinds.budget_s > 0.0, kinds.devices / np.maximum(kinds.budget_s, _TINY), 0.0)
        front = np.full(paths.target.shape, _MUCH)
        for r, devices in zip(kinds.variant.tolist(), a_second.tolist(), strict=True):
            front = np.minimum(front, paths.front_s[r] * devices)
        share = (kinds.weight_s * a_second[:, None]).min(axis=0, initial=_MUCH)
        return ReachLimits(
            devices=limits.devices,
            share=share,
            first_share=share + self._cover.first_s * a_second.min(initial=_MUCH),
            front=front,
            price=dual_prices.of_vertex,
            spare=spare,
            early=spare if beam is None else min(beam.early, spare),
            data_parallel_sum=limits.data_parallel_sum,
            memory_bytes=limits.memory_bytes,
            in_flight=limits.in_flight,
        )

    def kinds(self, dual_prices: DualPrices) -> ReachKinds:
        """Returns the kinds of stages that do not waste more than plans can spare."""
        return self._cover.with_memory(self._cover.kinds(dual_prices))


def _least_waste(reached: Reached, sources: IndexArray, dual_prices: DualPrices) -> IndexArray:
    """Returns the order of downsets by waste: devices beyond their price."""
    rows = np.ascontiguousarray(reached.bits[sources].astype("<u8")).view(np.uint8)
    inside = np.unpackbits(rows, axis=1, bitorder="little")[:, : dual_prices.of_vertex.size]
    return np.argsort(reached.devices[sources] - dot(inside, dual_prices.of_vertex), kind="stable")


def _empty_set_alone(room: int, words: int) -> Reached:
    """Returns the empty set as the only downset reached, with room for ``room`` downsets."""
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
    """Returns the same downsets, with room for ``room``."""
    larger = _empty_set_alone(room, reached.bits.shape[1])
    count = int(reached.used[0])
    for name in ("bits", "size", "devices", "least_sum"):
        getattr(larger, name)[:count] = getattr(reached, name)
    larger.used[0], larger.steps[0], larger.slot[:] = count, reached.steps[0], -1
    file_reached(larger)
    return larger
