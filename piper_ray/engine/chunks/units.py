"""Whole units of time: what layers take in them, rounded down, and what a rank has room for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import FIXED, FORWARD_S, NO_LIMIT, WEIGHT_S, WEIGHTS, LayerKinds
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_A_LITTLE_LESS = 1.0 - 1e-9
"""Of what a layer takes: so that rounding leaves it a whole unit."""


@dataclass(frozen=True)
class TimeUnit:
    """What the most frequent layer takes of its rank for a microbatch, synchronisation included; 0 s if it takes none.

    first_option, end_option: its options, a unit each at least. layers: how many of its kind there are.
    """

    seconds: float
    first_option: int
    end_option: int
    layers: int

    @classmethod
    def of(cls, kinds: LayerKinds, task: Task) -> TimeUnit:
        """Layers are of one kind here that take and hold the same, wherever they may be."""
        alike: dict[bytes, tuple[int, int, int]] = {}
        ranges = zip(kinds.option_start[:-1].tolist(), kinds.option_start[1:].tolist(), strict=True)
        for (first, end), count in zip(ranges, kinds.layers.tolist(), strict=True):
            key = kinds.figures[first:end, :FIXED].tobytes()
            start, stop, layers = alike.get(key, (first, end, 0))
            alike[key] = start, stop, layers + count
        first, end, layers = max(alike.values(), key=lambda found: (found[2], -found[0]))
        return cls(float(_rank_seconds(kinds, task)[first:end].min()) * _A_LITTLE_LESS, first, end, layers)

    def told(self, kinds: LayerKinds, task: Task) -> LayerKinds:
        """The kinds with their options' whole units."""
        if self.seconds <= 0.0:
            return kinds
        return kinds._replace(units=np.floor(_rank_seconds(kinds, task) / self.seconds))

    def most(self, task: Task, crossing_s: FloatArray, rank_of: IndexArray, target_s: float) -> FloatArray:
        """float64[p]: the most that a rank can have in plans that take less than ``target_s``."""
        p = task.shape.ranks
        if self.seconds <= 0.0 or not np.isfinite(target_s):
            return np.full(p, NO_LIMIT)
        room_s = target_s / task.shape.microbatches - np.bincount(rank_of, 2.0 * crossing_s, p)
        found: FloatArray = np.floor(room_s / self.seconds)
        return found


def _rank_seconds(kinds: LayerKinds, task: Task) -> FloatArray:
    """float64[options]: seconds of the rank for a microbatch, with its part of the synchronisation."""
    sync_s = kinds.figures[:, WEIGHTS] * task.sync_s_per_byte
    found: FloatArray = kinds.figures[:, FORWARD_S : WEIGHT_S + 1].sum(axis=1) + sync_s / task.shape.microbatches
    return found
