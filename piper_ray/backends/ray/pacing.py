"""How large batches and blocks should be, from what earlier ones took. No I/O; changes the speed, never the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper_ray.kernels.blocks import BLOCK_SIZE
from piper_ray.kernels.types import IndexArray

LEAST_BATCH_S = 0.02
"""What takes less stays in the driver, unless several workers gain more than a round trip costs."""

_BLOCK_S = 0.075
_LEAST_BLOCK_S = 0.005
_PER_WORKER = 2
_FEWEST_BOUNDS = 100_000  # fewer say little
_MARGIN = 1.5
_WEIGHT = 0.3  # of the newest figure in a running mean


@dataclass(frozen=True)
class Span:
    """Levels up to ``end_level`` - 1. far: block bounds over finished levels. near: over those of the span itself."""

    end_level: int
    far: int
    near: int


@dataclass
class Pacing:
    """s_per_bound: of one worker, for a block bound and what comes of it; near: of the driver, inside a batch.

    round_trip_s: of a batch, beyond its work.
    """

    s_per_bound: float = 8e-9
    s_per_near_bound: float = 3e-8
    round_trip_s: float = 0.003

    def record_whole(self, bounds: int, seconds: float) -> None:
        """What the driver took for levels of its own: so dear levels are seen to be worth sending."""
        if bounds >= _FEWEST_BOUNDS:
            self.s_per_bound += _WEIGHT * (min(seconds / bounds, 1e-6) - self.s_per_bound)

    def record_near(self, bounds: int, seconds: float) -> None:
        """What the driver took for a batch's inside: dearer, as the stages there are short and most of them fit."""
        if bounds > 0:
            self.s_per_near_bound += _WEIGHT * (min(seconds / bounds, 1e-6) - self.s_per_near_bound)

    def batch(self, level_start: IndexArray, level: int, blocks: int) -> Span:
        """The next levels for the workers: until the rest, which the driver does alone, takes as long as a round trip.

        Both stand still all workers but the driver, so a batch of this size wastes least.
        """
        far, near, extra, end = 0, 0, 0, level
        while end < level_start.size - 1:
            size = int(level_start[end + 1] - level_start[end])
            if end > level and (near + size * extra) * self.s_per_near_bound > self.round_trip_s:
                break
            far += size * blocks
            near += size * extra
            extra += 1 + size // BLOCK_SIZE
            end += 1
        return Span(end, far, near)

    def seconds(self, span: Span) -> float:
        """Of one worker, for the part that workers can do."""
        return span.far * self.s_per_bound

    def pays(self, span: Span, workers: int) -> bool:
        """Whether the workers are done with it sooner than the driver alone would be."""
        seconds = self.seconds(span)
        return seconds >= LEAST_BATCH_S or seconds * (1.0 - 1.0 / max(1, workers)) > _MARGIN * self.round_trip_s

    def blocks(self, seconds: float, workers: int, downsets: int) -> int:
        """Two for each worker unless these were tiny; more where they would be longer than 75 ms."""
        least = max(1, min(_PER_WORKER * workers, int(seconds / _LEAST_BLOCK_S)))
        return max(1, min(downsets, max(least, math.ceil(seconds / _BLOCK_S))))

    def record(self, bounds: int, worked_s: float, elapsed_s: float, workers: int) -> None:
        """A batch is done: ``worked_s`` is the sum over its blocks, ``elapsed_s`` what the driver waited."""
        if bounds > 0 and worked_s > 0:
            self.s_per_bound += _WEIGHT * (worked_s / bounds - self.s_per_bound)
            waste_s = min(max(elapsed_s - worked_s / max(1, workers), 0.0005), 0.05)
            self.round_trip_s += _WEIGHT * (waste_s - self.round_trip_s)
