"""Tensor parallelism alone: the whole model sharded over the devices."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.baselines.equal_runs import EqualRuns
from piper_ray.baselines.planner import Proposal
from piper_ray.model import Instance
from piper_ray.restrictions import Restrictions


@dataclass(frozen=True)
class TensorParallel:
    """One stage, d = 1, the best t."""

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(runs=(1,), data_parallel_degrees=(1,)).propose(instance, restrictions)
