"""Pacing that sends whatever that gains: for what sending costs."""

from __future__ import annotations

from piper_ray.engine.backends.ray.pacing import Pacing, Span
from piper_ray.engine.kernels.types import IndexArray
from piper_ray.engine.tables.problem import Rate

_LEVELS = 2


class SendAll(Pacing):
    """Workers get all levels."""

    def pays(self, *_: object) -> bool:
        return True

    def pays_ahead(self, *_: object) -> bool:
        return True


class SendPairs(SendAll):
    """Two levels at a time: what is given out does not depend on what was measured on the way."""

    def batch(
        self,
        near_rate: Rate,  # noqa: ARG002
        level_start: IndexArray,
        level: int,
        buckets: int,
        workers: int = 1,  # noqa: ARG002
        threads_here: int = 1,  # noqa: ARG002
    ) -> Span:
        end = min(level + _LEVELS, level_start.size - 1)
        return Span(end, int(level_start[end] - level_start[level]) * buckets, 0)
