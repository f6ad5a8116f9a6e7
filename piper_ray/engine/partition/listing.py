"""Of one partition, the downsets that plans can use at a threshold, made as states reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from piper_ray.engine.evaluation.potentials import Potentials
from piper_ray.engine.evaluation.reach import AT_ONCE, STEPS_AT_ONCE, Reach, empty_set_alone, grown
from piper_ray.engine.kernels.reach import Reached, StagePaths, note_arrivals, reach_from
from piper_ray.engine.kernels.types import BitArray, IndexArray
from piper_ray.engine.lattice.downsets import downset_order
from piper_ray.engine.partition.setting import owners

_FIRST_ROOM = 4096
_SENT_AT_ONCE = 1 << 18
"""Downsets that are found before they are sent to those that have them."""


class Arrivals(NamedTuple):
    """Ways to downsets, with what plans for them take at least: see ``Reached``."""

    bits: BitArray  # uint64[a, words]
    size: IndexArray  # int64[a]
    devices: IndexArray  # int64[a]
    least_sum: IndexArray  # int64[a]


class PartitionListing:
    """number: of this partition, of so many. room: downsets that fit here. Starts with the empty set in partition 0."""

    def __init__(
        self, reach: Reach, paths: StagePaths, potentials: Potentials, number: int, partitions: int, room: int
    ) -> None:
        self._paths, self._partitions, self._room = paths, partitions, room
        # Sent by another process, its arrays are read-only: kernels are compiled for those that are not.
        potentials = Potentials(potentials.threshold_s, np.array(potentials.of_vertex))
        self._kinds, self._limits = reach.kinds(potentials), reach.limits(potentials)
        self._words = max(1, (paths.order.size + 63) // 64)
        make = empty_set_alone if number == 0 else _no_downsets
        self._reached = make(min(room, _FIRST_ROOM), self._words)
        self._spreading: tuple[int, Iterator[Reached]] | None = None

    @property
    def arrays(self) -> list[np.ndarray]:
        """What is kept here."""
        return list(self._reached)

    def spread(self, size: int) -> tuple[bool, list[Arrivals]]:
        """Some of what the downsets of this size here lead to, by partition, and whether there was any: to be asked for
        until there is no more.
        """
        if self._spreading is None or self._spreading[0] != size:
            self._spreading = size, self._all_from(size)
        found = next(self._spreading[1], None)
        if found is None:
            return False, [self._none] * self._partitions
        used = int(found.used[0])
        new = np.flatnonzero(found.size[:used] > size)
        of = owners(found.bits[new], self._partitions)
        return True, [_of_rows(found, new[of == owner]) for owner in range(self._partitions)]

    def take_in(self, parts: Sequence[Arrivals]) -> bool:
        """Ways to downsets that are kept here. Whether there is room for them."""
        for part in parts:
            taken, ours = 0, _ours(part)
            while (taken := _note(ours, taken, self._reached)) < ours.size.size:
                if self._reached.devices.size >= self._room:
                    return False
                self._reached = grown(self._reached, min(self._room, 4 * self._reached.devices.size))
        return True

    def downsets(self) -> BitArray:
        """uint64[m, words]: those that are kept here, in order, and the empty set before them."""
        bits = self._reached.bits[: int(self._reached.used[0])]
        bits = np.concatenate((np.zeros((1, self._words), np.uint64), bits[bits.any(axis=1)]))
        return np.ascontiguousarray(bits[downset_order(bits)])

    @property
    def _none(self) -> Arrivals:
        return _of_rows(self._reached, np.zeros(0, np.int64))

    def _all_from(self, size: int) -> Iterator[Reached]:
        """A table at a time, with the downsets here among those that they lead to."""
        own = self._reached
        sources = np.flatnonzero(own.size[: int(own.used[0])] == size)
        sources = sources[np.lexsort(own.bits[sources].T)]
        room, found = _SENT_AT_ONCE, None
        for begin in range(0, sources.size, AT_ONCE):
            alike, here = _of_rows(own, sources[begin : begin + AT_ONCE]), None
            number, before = 0, -1
            while number < alike.size.size * self._kinds.degree.size:
                if found is None or (here is None and found.devices.size - found.used[0] <= alike.size.size):
                    if found is not None:
                        yield found
                    found, here = _no_downsets(max(room, 2 * AT_ONCE), self._words), None
                if here is None:
                    here = np.arange(found.used[0], found.used[0] + alike.size.size)
                    _note(alike, 0, found)
                number = reach_from(here, number, STEPS_AT_ONCE, self._paths, self._kinds, self._limits, found)
                if found.used[0] == found.devices.size:
                    yield found
                    if number == before:  # one of them leads to more than that
                        room *= 2
                    found, before = None, number
        if found is not None:
            yield found


def _ours(arrivals: Arrivals) -> Arrivals:
    """As arrays that may be written, as kernels are compiled for them: those from another process may not."""
    bits, size, devices, least_sum = arrivals
    return Arrivals(np.array(bits), np.array(size), np.array(devices), np.array(least_sum))


def _note(arrivals: Arrivals, first: int, reached: Reached) -> int:
    return note_arrivals(arrivals.bits, arrivals.size, arrivals.devices, arrivals.least_sum, first, reached)


def _of_rows(reached: Reached, rows: IndexArray) -> Arrivals:
    return Arrivals(reached.bits[rows], reached.size[rows], reached.devices[rows], reached.least_sum[rows])


def _no_downsets(room: int, words: int) -> Reached:
    """Reached, with room for so many."""
    reached = empty_set_alone(room, words)
    reached.used[0], reached.slot[:] = 0, -1
    return reached
