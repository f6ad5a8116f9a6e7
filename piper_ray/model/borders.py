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
    """Whether the links of its borders and replicas follow from where its stages lie: there are several links, and one
    d and one t on each kind of devices."""
    degrees = {(stage.kind, stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in plan.stages}
    has_links = any(len(own.links) > 1 for own in cluster.alike)
    return has_links and schedule.name in FLUSHED and len(degrees) == len({stage.kind for stage in plan.stages})


def stage_borders(cluster: Cluster, plan: Plan, schedule: Schedule) -> tuple[StageBorder, ...]:
    """Of each two neighbouring stages, front to back. None where all have one link, ranks hold several stages, or
    pipelines are of one kind each.

    What goes to a stage further on is charged at the outermost link.
    """
    stages, places = plan.stages, plan.places if schedule.asynchronous else None
    if plan.shares or schedule.v > 1 or (len(cluster.links) == 1 and not cluster.kinds):
        return ()
    kinds = [stage.kind for stage in stages]
    in_groups, found = lies_in_groups(cluster, plan, schedule), []
    for place, (one, other) in enumerate(pairwise(kinds), start=1):
        own = cluster.of_kind(one)
        level, sending = len(own.links) - 1 if cluster.kinds else own.level_holding(plan.span), None
        if places is not None:
            level = own.shared_level(places[place], places[place - 1] + stages[place - 1].devices)
        if in_groups:
            sending = stages[place].devices
            level = own.border_level(kinds[place:].count(one), own.border_periods(sending, kinds.count(one)))
        border = StageBorder(own.level_bytes_per_s(level, sending), own.links[level].devices)
        found.append(border if one == other else StageBorder(cluster.rate_between(one, other), kinds=(one, other)))
    return tuple(found)
