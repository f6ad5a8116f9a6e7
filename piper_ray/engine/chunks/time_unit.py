"""The unit in which whole layers of ranks are counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.chunks.crossings import rank_seconds
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import FIGURE, NO_LIMIT, LayerKinds
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_A_LITTLE_LESS = 1.0 - 1e-9
"""A factor on the time of a layer, so that it stays a whole unit after rounding."""


@dataclass(frozen=True)
class TimeUnit:
    """The time that the most frequent layer takes of its rank for a microbatch, with synchronisation; 0 if it takes
    none."""

    seconds: float

    @classmethod
    def of(cls, kinds: LayerKinds, task: Task) -> TimeUnit:
        """Kinds of layers. Here layers are of one kind if they take and hold the same, wherever they may be."""
        alike: dict[bytes, tuple[int, int]] = {}
        ranges = zip(kinds.option_start[:-1].tolist(), kinds.option_start[1:].tolist(), strict=True)
        for (first, end), count in zip(ranges, kinds.layers.tolist(), strict=True):
            key = kinds.figures[first:end, : FIGURE.fixed].tobytes()
            start, layers = alike.get(key, (first, 0))
            alike[key] = start, layers + count
        key = max(alike, key=lambda key: (alike[key][1], -alike[key][0]))
        first, options = alike[key][0], len(key) // (FIGURE.fixed * kinds.figures.itemsize)
        return cls(float(rank_seconds(kinds.figures, task)[first : first + options].min()) * _A_LITTLE_LESS)

    def told(self, kinds: LayerKinds, task: Task) -> LayerKinds:
        """The kinds with their options' whole units."""
        if self.seconds <= 0.0:
            return kinds
        return kinds._replace(units=np.floor(rank_seconds(kinds.figures, task) / self.seconds))

    def most(self, task: Task, crossing_s: FloatArray, rank_of: IndexArray, target_s: float) -> FloatArray:
        """float64[p]: the most that a rank can have in plans that take less than ``target_s``."""
        p = task.shape.ranks
        if self.seconds <= 0.0 or not np.isfinite(target_s):
            return np.full(p, NO_LIMIT)
        room_s = target_s / task.shape.microbatches - np.bincount(rank_of, 2.0 * crossing_s, p)
        found: FloatArray = np.floor(room_s / self.seconds)
        return found
