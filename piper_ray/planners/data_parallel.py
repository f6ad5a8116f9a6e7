"""Data parallelism alone: every device, or as many as divide the batch, holds the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.planners.equal_runs import EqualRuns
from piper_ray.planners.planner import Light, Proposal


@dataclass(frozen=True)
class DataParallel(Light):
    """One stage, t = 1, the best d that divides N."""

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(runs=(1,), tensor_parallel_degrees=(1,)).propose(instance, restrictions)
