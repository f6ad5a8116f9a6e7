"""Decides what is worth sending, and the size of batches and chunks, from measurements of earlier ones. No I/O; it
changes the speed, never the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.kernels.types import IndexArray
from piper_ray.engine.tables.problem import Rate

_LEAST_GAIN = 1.1
"""Least factor by which workers must be faster with a batch to get it."""

_CHUNK_S = 0.075
_LEAST_CHUNK_S = 0.005
_PER_WORKER, _FEW_WORKERS = 2, 16
_WEIGHT, _UP, _DOWN = 0.3, 0.1, 0.5
"""Weights of the newest figure in running means."""

_MOST_ROUND_TRIP_S = 0.05
_FORGET = 0.02
"""Share of the stretch that is forgotten with each batch kept here because of it: its cause may have passed."""


@dataclass(frozen=True)
class Span:
    """Levels up to ``end_level`` - 1. far: bucket bounds over finished levels. near: over levels of the span itself."""

    end_level: int
    far: int
    near: int


@dataclass
class Pacing:
    """round_trip_s: of a batch, besides its work. stretch: factor on both together if cores are shared with others.
    call_s: time of the driver for each chunk.
    """

    round_trip_s: float = 0.003
    stretch: float = 1.0
    call_s: float = 2e-4

    def batch(
        self,
        near_rate: Rate,
        level_start: IndexArray,
        level: int,
        buckets: int,
        workers: int = 1,
        threads_here: int = 1,
    ) -> Span:
        """Returns the next levels for the workers: until the rest, which the driver does, takes as long as a round trip
        or the driver's calls, one for each worker.

        During these all workers but the driver are idle, so a batch of this size wastes least.
        """
        far, near, extra, end = 0, 0, 0, level
        allowed_s = threads_here * max(self.round_trip_s, self.call_s * workers)
        while end < level_start.size - 1:
            size = int(level_start[end + 1] - level_start[end])
            if end > level and near_rate.seconds(near + size * extra) > allowed_s:
                break
            far += size * buckets
            near += size * extra
            extra += 1 + size // BUCKET_SIZE
            end += 1
        return Span(end, far, near)

    def gain_s(self, far_s: float, near_s: float, threads_here: int, threads_there: float) -> float:
        """Returns the seconds gained if workers with ``threads_there`` threads do the far part of a batch; negative:
        lost. far_s, near_s: of its parts on one thread.
        """
        here_s = (far_s + near_s) / threads_here
        if threads_there <= 0:
            return -math.inf
        there_s = self.stretch * (far_s / threads_there + self.round_trip_s) + near_s / threads_here
        return here_s - _LEAST_GAIN * there_s

    def pays(self, far_s: float, near_s: float, threads_here: int, threads_there: float) -> bool:
        """Whether the workers should get the batch."""
        if self.gain_s(far_s, near_s, threads_here, threads_there) > 0.0:
            return True
        self.stretch += _FORGET * (1.0 - self.stretch)
        return False

    def pays_ahead(
        self, far_s: float, near_s: float, between_s: float, threads_here: int, threads_there: float
    ) -> bool:
        """Whether a batch should be sent while the previous one is being returned and finished. Workers would be idle
        for that time, but the driver has to do the part between the two alone.
        """
        wins = between_s < self.round_trip_s + near_s / threads_here
        return wins and self.gain_s(far_s, near_s + between_s * threads_here, threads_here, threads_there) > 0.0

    def chunks(self, seconds: float, workers: int, threads: int, downsets: int) -> int:
        """Returns the number of chunks: two for each of a few workers, one for each of many, unless these were tiny;
        more if they would take longer than 75 ms.

        seconds: on one thread. threads: of all workers.
        """
        of_one_worker_s = seconds * max(1, workers) / max(1, workers, threads)
        for_each = _PER_WORKER if workers <= _FEW_WORKERS else 1
        least = max(1, min(for_each * workers, int(of_one_worker_s / _LEAST_CHUNK_S)))
        return max(1, min(downsets, max(least, math.ceil(of_one_worker_s / _CHUNK_S))))

    def record_calls(self, busy_s: float, chunks: int) -> None:
        """Records the driver's total time for calls, and the number of chunks."""
        if chunks > 0:
            self.call_s = busy_s / chunks

    def record(self, worked_s: float, elapsed_s: float, threads: int) -> None:
        """Records a batch: ``worked_s`` is the sum over its threads, ``elapsed_s`` the time that the driver waited."""
        if worked_s > 0:
            expected_s = worked_s / max(1, threads)
            self.stretch += _WEIGHT * (max(1.0, elapsed_s / (expected_s + self.round_trip_s)) - self.stretch)
            waste_s = min(max(elapsed_s - expected_s, 0.0005), _MOST_ROUND_TRIP_S)
            # A long round trip may include fetching tables, or waiting for a worker.
            self.round_trip_s += (_UP if waste_s > self.round_trip_s else _DOWN) * (waste_s - self.round_trip_s)
