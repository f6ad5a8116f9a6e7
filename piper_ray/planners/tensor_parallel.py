"""Tensor parallelism alone: the whole model sharded over the devices."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.planners.equal_runs import EqualRuns
from piper_ray.planners.planner import Light, Proposal


@dataclass(frozen=True)
class TensorParallel(Light):
    """One stage, d = 1, the best t."""

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(runs=(1,), data_parallel_degrees=(1,)).propose(instance, restrictions)
