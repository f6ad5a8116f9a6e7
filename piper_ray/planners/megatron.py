"""Uniform pipeline, tensor and data parallelism, as Megatron-LM runs it (Narayanan et al., SC 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model import arguments
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.restrictions import Restrictions
from piper_ray.planners.equal_runs import EqualRuns
from piper_ray.planners.planner import Light, Proposal


@dataclass(frozen=True)
class Megatron(Light):
    """Best of one t, one d and a number of stages that divides the repeated layers.

    t divides ``devices_per_node``, so that no tensor-parallel group leaves its node. Where no layers repeat the stages
    are runs of a topological order that differ by a layer at most. Raises UsageError for devices_per_node < 1.
    """

    devices_per_node: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices_per_node", arguments.positive("devices_per_node", self.devices_per_node))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        grid = EqualRuns(even=True, tensor_parallel_degrees=tuple(divisors(self.devices_per_node)))
        return grid.propose(instance, restrictions)
