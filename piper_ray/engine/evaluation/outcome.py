"""What an evaluation of a threshold answers, and under which key the answer is kept. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from piper_ray.engine.kernels.scan import BUCKETS_TESTED, CANDIDATES_TESTED, STAGES_COSTED
from piper_ray.engine.kernels.types import IndexArray

BUCKET_S, _CANDIDATE_S, _STAGE_S = 2e-8, 8e-8, 6e-7
"""What an evaluation takes for each, knapsacks and all: roughly, and the same on every machine."""


def work_s(tested: IndexArray) -> float:
    """CPU seconds of what was tested, about: by counters, so that what they decide is the same in every run."""
    return float(
        BUCKET_S * tested[BUCKETS_TESTED] + _CANDIDATE_S * tested[CANDIDATES_TESTED] + _STAGE_S * tested[STAGES_COSTED]
    )


class EvaluationKey(NamedTuple):
    """Which evaluation of the whole lattice. Floats as ``float.hex`` writes them: equal only bit for bit."""

    memory_bytes: str
    threshold_s: str
    fewest_stages: bool

    @classmethod
    def of(cls, memory_bytes: float, threshold_s: float, fewest_stages: bool = False) -> EvaluationKey:
        return cls(float(memory_bytes).hex(), float(threshold_s).hex(), fewest_stages)


@dataclass(frozen=True)
class TracedStage:
    """A stage as the tables know it: downset ``outer`` without ``inner``, in a variant, with d and y.

    budget_s: what it was found to keep, as time on one device.
    """

    outer: int
    inner: int
    variant: int
    data_parallel_degree: int
    later_sum: int
    budget_s: float


@dataclass(frozen=True)
class Outcome:
    """feasible: some plan keeps the threshold. devices: the fewest, if so. stages: one such plan, front to back.

    reach: the largest share of all work that a downset with states has; 1 if feasible.
    """

    feasible: bool
    devices: int
    stages: tuple[TracedStage, ...]
    reach: float
    live_downsets: int
    cells: int
    tested: IndexArray
