"""Planners, the exact one and simpler ones to compare with: one protocol, and all valued by the same ``evaluate``
under the schedule asked for.

result = piper_ray.planners.plan(instance, "pipedream-2bw", restrictions=restrictions)
result.plan, result.time_per_sample_s, result.note
"""

from __future__ import annotations

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import EXACT
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.planners.equal_runs import DataParallel, EqualRuns, GPipe, Megatron, PipeDream2BW, TensorParallel
from piper_ray.planners.named import ALL_NAMES, PLANNERS, PiperPublished, planner_of
from piper_ray.planners.pipedream import Level, Partition, PipeDream, States
from piper_ray.planners.planner import (
    BaselineResult,
    Exact,
    NamedPlanner,
    Needs,
    Planner,
    Proposal,
    Terms,
    allowed_proposal,
    evaluated,
)
from piper_ray.workloads.formats.load import Source, instance_of

__all__ = [
    "plan",
    "planner_of",
    "PLANNERS",
    "ALL_NAMES",
    "BaselineResult",
    "Planner",
    "NamedPlanner",
    "Needs",
    "Proposal",
    "Terms",
    # the planners and their parameters
    "Exact",
    "PipeDream2BW",
    "DataParallel",
    "TensorParallel",
    "GPipe",
    "Megatron",
    "EqualRuns",
    "PipeDream",
    "Level",
    "States",
    "Partition",
    "PiperPublished",
]


def plan(
    instance: Instance | Source,
    planner: str | Planner,
    *,
    restrictions: Restrictions = Restrictions(),
    schedule: Schedule | ScheduleName | str | None = None,
) -> BaselineResult:
    """What a planner proposes, valued by ``evaluate``. planner: as ``planner_of`` takes it, or one with its parameters.

    instance: may be what ``load`` takes, such as a path. schedule: that which the planner chooses its best plan for,
    and which that is valued under; None: the instance's own, else Piper's. Under a flush a plan with stages of
    different degrees is refused: no runtime runs it. Raises UsageError for arguments that make no sense, InputError
    for an instance that is not sound, and LimitError where a planner's tables would be too large.

    >>> import piper_ray
    >>> result = piper_ray.baselines.plan(piper_ray.estimate("bert-large", "A100-80"), "data-parallel")
    >>> [stage.data_parallel_degree for stage in result.plan.stages]
    [8]
    """
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    if isinstance(planner, type) or not (isinstance(planner, str) or callable(getattr(planner, "propose", None))):
        names = ", ".join([*PLANNERS, EXACT])
        raise UsageError(
            f"planner must be a planner such as Megatron(), or one of {names}; not {arguments.shown(planner)}"
        )
    instance = instance_of(instance)
    under = Schedule.first_of(schedule, instance.schedule).settled
    instance = instance.replace(schedule=under)
    if isinstance(planner, str):
        name, planner = planner, planner_of(planner)
    else:
        name = repr(planner)
    proposal, evaluation = evaluated(instance, allowed_proposal(planner, instance, restrictions))
    return BaselineResult(name, proposal.plan, evaluation, proposal.tried, proposal.note, proposal.solution, under)
