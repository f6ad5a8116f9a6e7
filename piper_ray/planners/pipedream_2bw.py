"""PipeDream-2BW's planner (Narayanan et al., ICML 2021), the "equi" baseline of Piper (NeurIPS 2021, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model import arguments
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.planners.equal_runs import EqualRuns
from piper_ray.planners.planner import Light, Proposal


@dataclass(frozen=True)
class PipeDream2BW(Light):
    """The whole grid of equal runs. separate: try the layers before and after the repeated ones as own stages too.

    Without tensor parallelism under ``Restrictions(tensor_parallelism=False)``.
    """

    separate: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "separate", arguments.flag("separate", self.separate))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        return EqualRuns(separate=self.separate).propose(instance, restrictions)
