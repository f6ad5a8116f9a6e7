"""The answer of an evaluation, and the key under which it is recorded. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from piper_ray.engine.kernels.scan import BUCKETS_TESTED, CANDIDATES_TESTED, STAGES_COSTED
from piper_ray.engine.kernels.types import IndexArray

BUCKET_S, _CANDIDATE_S, _STAGE_S = 2e-8, 8e-8, 6e-7
"""Rough seconds for each bucket, candidate and stage, with knapsacks. They are the same on every machine."""


def work_s(tested: IndexArray) -> float:
    """Returns rough CPU seconds of the work counted in ``tested``. From counters, so that decisions are the same in
    each run."""
    return float(
        BUCKET_S * tested[BUCKETS_TESTED] + _CANDIDATE_S * tested[CANDIDATES_TESTED] + _STAGE_S * tested[STAGES_COSTED]
    )


class EvaluationKey(NamedTuple):
    """Identifies an evaluation of the whole lattice. Floats are written as by ``float.hex``: equal only bit for bit."""

    memory_bytes: str
    threshold_s: str
    fewest_stages: bool

    @classmethod
    def of(cls, memory_bytes: float, threshold_s: float, fewest_stages: bool = False) -> EvaluationKey:
        return cls(float(memory_bytes).hex(), float(threshold_s).hex(), fewest_stages)


@dataclass(frozen=True)
class TracedStage:
    """A stage in terms of the tables: downset ``outer`` without ``inner``, in a variant, with d and the sum of d behind
    it.

    budget_s: the limit that it was found to keep, as time on one device.
    """

    outer: int
    inner: int
    variant: int
    data_parallel_degree: int
    later_sum: int
    budget_s: float


@dataclass(frozen=True)
class Outcome:
    """The answer of an evaluation. feasible: some plan keeps the threshold. devices: the fewest of such a plan. stages:
    those of one such plan, front to back.

    reach: the largest share of all work that a downset with states has; 1 if feasible.
    """

    feasible: bool
    devices: int
    stages: tuple[TracedStage, ...]
    reach: float
    live_downsets: int
    cells: int
    tested: IndexArray
