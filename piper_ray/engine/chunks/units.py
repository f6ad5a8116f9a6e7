"""Whole units of time and of bytes: what layers come to in them, rounded down, and what a rank can have."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import (
    ACTIVATION,
    FIXED,
    FORWARD_S,
    NO_LIMIT,
    WEIGHT_S,
    WEIGHTS,
    LayerKinds,
    ShapeLimits,
)
from piper_ray.engine.kernels.types import FloatArray, IndexArray

TIME = 0
"""The sort of units that ranks are told apart by: what the most frequent layer takes."""

FINE_TIME = 1
"""The sort of units of time of which ranks have the least to spare. All further sorts are of bytes."""

_TIMES = 2
_MOST_PARTS = 4

_MOST_OPTIONS = 3
_A_LITTLE_LESS = 1.0 - 1e-9
"""Of what a layer takes: so that rounding leaves it a whole unit."""


@dataclass(frozen=True)
class Units:
    """A unit of time is what the most frequent layer takes, or a part of what some layer takes; a unit of bytes what an
    option of the most frequent layer holds.

    time_s, fine_s: seconds of a microbatch's passes with their part of the synchronisation. bytes_each: float64[p, sorts - 2],
    by rank. moment: float64[s], the microbatches of each chunk in flight at the moment of its rank that bytes are told at.
    """

    time_s: float
    fine_s: float
    bytes_each: FloatArray
    moment: FloatArray
    rank_of: IndexArray
    frequent: tuple[int, int, int]

    @property
    def sorts(self) -> int:
        return _TIMES + self.bytes_each.shape[1]

    @classmethod
    def of(cls, kinds: LayerKinds, task: Task, held: FloatArray, moment_rank: IndexArray, rank_of: IndexArray) -> Units:
        """held, moment_rank: as in ``ShapeLimits``."""
        seconds = _rank_seconds(kinds, task)
        starts, ends = kinds.option_start[:-1], kinds.option_start[1:]
        alike: dict[bytes, int] = {}
        for kind, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            key = kinds.figures[first:end, :FIXED].tobytes()
            alike[key] = alike.get(key, 0) + int(kinds.count[kind])
        frequent = max(alike, key=lambda key: (alike[key], key))
        for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if kinds.figures[first:end, :FIXED].tobytes() == frequent:
                break
        p = int(rank_of.max()) + 1
        moment = np.zeros(rank_of.size)
        bytes_each = np.zeros((p, min(_MOST_OPTIONS, end - first)))
        for rank in range(p):
            mine = held[moment_rank == rank]
            chunks = rank_of == rank
            fullest = mine[mine.sum(axis=1).argmax()]
            moment[chunks] = fullest[chunks]
            for n in range(bytes_each.shape[1]):
                option = kinds.figures[first + n]
                bytes_each[rank, n] = np.median(fullest[chunks]) * option[ACTIVATION] + option[FIXED]
        time_s = float(seconds[first:end].min()) * _A_LITTLE_LESS
        return cls(time_s, time_s, bytes_each * _A_LITTLE_LESS, moment, rank_of, (first, end, alike[frequent]))

    def told(self, kinds: LayerKinds, task: Task) -> LayerKinds:
        """The kinds with what they come to in units."""
        options, s = kinds.figures.shape[0], self.rank_of.size
        units = np.zeros((options, s, self.sorts))
        for sort, unit_s in ((TIME, self.time_s), (FINE_TIME, self.fine_s)):
            if unit_s > 0.0:
                units[:, :, sort] = np.floor(_rank_seconds(kinds, task) / unit_s)[:, None]
        held_bytes = kinds.figures[:, ACTIVATION, None] * self.moment + kinds.figures[:, FIXED, None]
        for n in range(self.bytes_each.shape[1]):
            each = self.bytes_each[self.rank_of, n]
            if np.all(each > 0.0):
                units[:, :, _TIMES + n] = np.floor(held_bytes / each)
        return kinds._replace(units=units)

    def most(self, task: Task, crossing_s: FloatArray, target_s: float) -> FloatArray:
        """float64[p, sorts]: the most that a rank can have in plans that fit and take less than ``target_s``."""
        found = np.full((self.bytes_each.shape[0], self.sorts), NO_LIMIT)
        if np.isfinite(target_s):
            room_s = self._room_s(task, crossing_s, target_s)
            for sort, unit_s in ((TIME, self.time_s), (FINE_TIME, self.fine_s)):
                if unit_s > 0.0:
                    found[:, sort] = np.floor(room_s / unit_s)
        for n in range(self.bytes_each.shape[1]):
            if np.all(self.bytes_each[:, n] > 0.0):
                found[:, _TIMES + n] = np.floor(task.memory_bytes / self.bytes_each[:, n])
        return found

    def finer(self, kinds: LayerKinds, task: Task, crossing_s: FloatArray, target_s: float) -> tuple[Units, bool]:
        """With the fine unit of which all ranks together have the least to spare, and whether that is not enough: then no
        plan takes less than ``target_s``."""
        seconds = _rank_seconds(kinds, task)
        least_s = np.minimum.reduceat(seconds, kinds.option_start[:-1])
        room_s = self._room_s(task, crossing_s, target_s)
        best, used = self.fine_s, 0.0
        for layer_s in np.unique(least_s[least_s > 0.0]).tolist():
            for parts in range(1, _MOST_PARTS + 1):
                unit_s = layer_s / parts * _A_LITTLE_LESS
                needed = float((kinds.count * np.floor(least_s / unit_s)).sum())
                there = float(np.maximum(0.0, np.floor(room_s / unit_s)).sum())
                if needed > there:
                    return replace(self, fine_s=unit_s), True
                if needed > used * there:
                    best, used = unit_s, needed / there
        return replace(self, fine_s=best), False

    def _room_s(self, task: Task, crossing_s: FloatArray, target_s: float) -> FloatArray:
        """float64[p]: of each rank, for the layers of a microbatch."""
        transfers_s = np.bincount(self.rank_of, 2.0 * crossing_s, self.bytes_each.shape[0])
        found: FloatArray = target_s / task.shape.microbatches - transfers_s
        return found


def no_units(limits: ShapeLimits, sorts: int) -> ShapeLimits:
    """Limits that let ranks have any number of so many sorts."""
    p = int(limits.rank_of.max()) + 1
    return limits._replace(least_units=np.zeros((p, sorts)), most_units=np.full((p, sorts), NO_LIMIT))


def _rank_seconds(kinds: LayerKinds, task: Task) -> FloatArray:
    """float64[options]: seconds of the rank for a microbatch, with its part of the synchronisation."""
    sync_s = kinds.figures[:, WEIGHTS] * task.sync_s_per_byte
    found: FloatArray = kinds.figures[:, FORWARD_S : WEIGHT_S + 1].sum(axis=1) + sync_s / task.shape.microbatches
    return found
