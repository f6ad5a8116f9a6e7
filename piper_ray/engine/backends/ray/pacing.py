"""How large batches and chunks should be, from what earlier ones took. No I/O; changes the speed, never the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.kernels.types import IndexArray
from piper_ray.engine.tables.rate import Rate

LEAST_BATCH_S = 0.02
"""What takes less stays in the driver, unless several workers gain more than a round trip costs."""

_CHUNK_S = 0.075
_LEAST_CHUNK_S = 0.005
_PER_WORKER = 2
_MARGIN = 1.5
_WEIGHT = 0.3  # of the newest figure in a running mean


@dataclass(frozen=True)
class Span:
    """Levels up to ``end_level`` - 1. far: bucket bounds over finished levels. near: over those of the span itself."""

    end_level: int
    far: int
    near: int


@dataclass
class Pacing:
    """round_trip_s: of a batch, beyond its work."""

    round_trip_s: float = 0.003

    def batch(self, near_rate: Rate, level_start: IndexArray, level: int, buckets: int) -> Span:
        """The next levels for the workers: until the rest, which the driver does alone, takes as long as a round trip.

        Both stand still all workers but the driver, so a batch of this size wastes least.
        """
        far, near, extra, end = 0, 0, 0, level
        while end < level_start.size - 1:
            size = int(level_start[end + 1] - level_start[end])
            if end > level and near_rate.seconds(near + size * extra) > self.round_trip_s:
                break
            far += size * buckets
            near += size * extra
            extra += 1 + size // BUCKET_SIZE
            end += 1
        return Span(end, far, near)

    def pays(self, seconds: float, workers: int) -> bool:
        """Whether workers are done with what takes one of them so long sooner than the driver alone would be."""
        return seconds >= LEAST_BATCH_S or seconds * (1.0 - 1.0 / max(1, workers)) > _MARGIN * self.round_trip_s

    def chunks(self, seconds: float, workers: int, downsets: int) -> int:
        """Two for each worker unless these were tiny; more where they would be longer than 75 ms."""
        least = max(1, min(_PER_WORKER * workers, int(seconds / _LEAST_CHUNK_S)))
        return max(1, min(downsets, max(least, math.ceil(seconds / _CHUNK_S))))

    def record(self, worked_s: float, elapsed_s: float, workers: int) -> None:
        """A batch is done: ``worked_s`` is the sum over its chunks, ``elapsed_s`` what the driver waited."""
        if worked_s > 0:
            waste_s = min(max(elapsed_s - worked_s / max(1, workers), 0.0005), 0.05)
            self.round_trip_s += _WEIGHT * (waste_s - self.round_trip_s)
