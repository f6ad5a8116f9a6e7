"""What a training step takes beside the passes of its microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper_ray.model.errors import UsageError
from piper_ray.model.step import StepTerms

PARAMETER_SERVER_FACTOR = 4.0
"""Piper's (and PipeDream's) all-reduce: each byte goes to a server and back, on links that count both directions."""
RING_FACTOR = 2.0
"""Ring all-reduce: a reduce-scatter and an all-gather."""


@dataclass(frozen=True)
class StepFactors:
    """Factors of the terms of a step under a flush. Raises UsageError for figures that make no sense.

    sync: of the all-reduce of a stage's weights gradients over its d replicas, after its last backward pass:
    sync * (d - 1) / d * w / B seconds for w bytes.
    overlapped_sync_share: the share of these seconds that hides behind the backward passes, 0 to 1.
    """

    sync: float = PARAMETER_SERVER_FACTOR
    overlapped_sync_share: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sync) and self.sync >= 0.0):
            raise UsageError(f"the factor of the all-reduce must be a number, 0 or more, not {self.sync!r}")
        if not 0.0 <= self.overlapped_sync_share <= 1.0:
            raise UsageError(f"the share of the all-reduce that overlaps is 0 to 1, not {self.overlapped_sync_share!r}")

    @classmethod
    def of(cls, terms: StepTerms) -> StepFactors:
        """Of terms as a user gives them; the optimizer, which takes every rank as long, is no factor of a plan."""
        return cls(terms.all_reduce.factor, terms.all_reduce_overlap)

    def sync_s_per_byte(self, data_parallel_degree: int, bandwidth_bytes_per_s: float) -> float:
        """Seconds at the end of a step for each byte of a stage's weights."""
        d = data_parallel_degree
        return self.sync * (1.0 - self.overlapped_sync_share) * (d - 1) / d / bandwidth_bytes_per_s
