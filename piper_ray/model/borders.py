"""Which link each stage of a plan hands over to the next at, for screens and files. Costs are charged elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from piper_ray.model.cluster import Cluster
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import FLUSHED, Schedule


@dataclass(frozen=True)
class StageBorder:
    """group_devices: of the group with a link of its own that both stages lie in; None: the plan counts on none. kinds:
    where they differ, of this stage's devices and of the next one's."""

    bandwidth_bytes_per_s: float
    group_devices: int | None = None
    kinds: tuple[str, str] | None = None


def lies_in_groups(cluster: Cluster, plan: Plan, schedule: Schedule) -> bool:
    """Whether the links of its borders and replicas follow from where its stages lie."""
    degrees = {(stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in plan.stages}
    return len(cluster.links) > 1 and not cluster.kinds and schedule.name in FLUSHED and len(degrees) == 1


def stage_borders(cluster: Cluster, plan: Plan, schedule: Schedule) -> tuple[StageBorder, ...]:
    """Of each two neighbouring stages, front to back. None where all have one link, or ranks hold several stages.

    What goes to a stage further on is charged at the outermost link.
    """
    stages = plan.stages
    if schedule.v > 1 or (len(cluster.links) == 1 and not cluster.kinds):
        return ()
    if cluster.kinds:
        kinds = [(one.kind, other.kind) for one, other in pairwise(stages)]
        return tuple(StageBorder(cluster.rate_between(*x), kinds=x if x[0] != x[1] else None) for x in kinds)
    if lies_in_groups(cluster, plan, schedule):
        periods = cluster.border_periods(stages[0].devices, len(stages))
        levels = [cluster.border_level(behind, periods) for behind in range(len(stages) - 1, 0, -1)]
    else:
        levels = [cluster.level_holding(plan.devices)] * (len(stages) - 1)
    return tuple(StageBorder(cluster.level_bytes_per_s(k), cluster.links[k].devices) for k in levels)
