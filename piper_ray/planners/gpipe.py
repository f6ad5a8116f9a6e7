"""Pipeline parallelism alone, stages as GPipe cuts them (Huang et al., NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.planners.equal_runs import EqualRuns
from piper_ray.planners.planner import Light, Proposal


@dataclass(frozen=True)
class GPipe(Light):
    """Equal stages on one device each: d = 1, t = 1. Valued under the schedule asked for, which need not be GPipe's."""

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        grid = EqualRuns(data_parallel_degrees=(1,), tensor_parallel_degrees=(1,))
        return grid.propose(instance, restrictions)
