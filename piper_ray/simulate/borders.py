"""Where the stages of a pipeline lie, computed stage by stage, and the link at each border between them.

Ranks are in order, all stages have equally many devices, and groups are filled from the back. A stage lies whole in a
group of each level in which all stages of the plan fit whole; at any other level all borders count as outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby, pairwise

from piper_ray.model.cluster import Cluster
from piper_ray.model.plan import Plan


def plan_border_rates(cluster: Cluster, plan: Plan) -> list[float]:
    """Bytes per second at each border, front to back. Stages on devices of one kind are a pipeline of their own there,
    whatever lies between them. Of a plan with places, these tell the groups that both stages lie in."""
    if plan.places is not None:
        ends = [at + stage.devices - 1 for at, stage in zip(plan.places, plan.stages, strict=True)]
        sizes = [x.devices for x in cluster.links if x.devices is not None] + [plan.span]
        outermost = next(level for level, size in enumerate(sizes) if plan.span <= size)
        return [
            reached_bytes_per_s(cluster, sum(first // size != last // size for size in sizes[:outermost]))
            for first, last in zip(plan.places[1:], ends, strict=False)
        ]
    kinds = [stage.kind for stage in plan.stages]
    of_kind = {x.kind: border_rates(cluster.of_kind(x.kind), x.devices, kinds.count(x.kind)) for x in plan.stages}
    return [
        of_kind[one][-sum(kind == one for kind in kinds[: place + 1])]
        if one == other
        else cluster.rate_between(one, other)
        for place, (one, other) in enumerate(pairwise(kinds))
    ]


def border_rates(cluster: Cluster, stage_devices: int, stages: int) -> list[float]:
    """Bytes per second at each border, the last one first; with several sites those of the pipelines at one."""
    cluster, stage_devices = cluster.at_site, stage_devices // max(1, len(cluster.sites))
    levels = border_levels(cluster, stage_devices, stages)
    return [reached_bytes_per_s(cluster, level, stage_devices) for level in levels]


def reached_bytes_per_s(cluster: Cluster, level: int, sending: int | None = None) -> float:
    """What a device has towards the others of its group of link ``level``, by this link or one further out.

    sending: the devices that share the uplinks of smaller groups; None: all. Those of this group and larger ones are
    shared by all.
    """
    found = []
    for outer in range(level, len(cluster.links)):
        shares = [cluster.links[outer].bandwidth_bytes_per_s]
        for inner, link in enumerate(cluster.links[:outer]):
            if link.uplink_bytes_per_s is not None and link.devices is not None:
                there = link.devices if sending is None or inner >= level else min(sending, link.devices)
                shares.append(link.uplink_bytes_per_s / there)
        found.append(min(shares))
    return max(found)


def border_levels(cluster: Cluster, stage_devices: int, stages: int) -> tuple[int, ...]:
    """For each border the link that stages hand over at, by its number in the cluster, the last border first."""
    sizes = [x.devices for x in cluster.links if x.devices is not None]
    whole = whole_groups(cluster, stage_devices, stages)
    starts = _starts(cluster.devices, stage_devices, whole)[:stages]
    found = []
    for one, other in pairwise(starts):
        shared = [size in whole and one // size == other // size for size in sizes]
        found.append(max((level for level, is_shared in enumerate(shared, 1) if not is_shared), default=0))
    return tuple(found)


def whole_groups(cluster: Cluster, stage_devices: int, stages: int) -> tuple[int, ...]:
    """The devices of the groups, those of each level, in which each stage lies whole."""
    sizes = [x.devices for x in cluster.links if x.devices is not None]
    held = min([size for size in sizes if stage_devices * stages <= size] + [cluster.devices])
    whole: tuple[int, ...] = ()
    for size in sizes:
        if size >= held or len(_starts(held, stage_devices, (*whole, size))) >= stages:
            whole += (size,)
    return whole


def listed_places(cluster: Cluster, stage_devices: int, stages: int) -> list[int]:
    """The first device of each stage, front to back, where launch files list nodes: the group that is filled last comes
    first, and in each the stages come before idle devices. Without gaps, where groups hold no whole stages or one of
    them has fewer devices."""
    held = min(
        [x.devices for x in cluster.links if x.devices is not None and stage_devices * stages <= x.devices]
        + [cluster.devices]
    )
    whole = tuple(size for size in whole_groups(cluster, stage_devices, stages) if size < held)
    starts = _starts(cluster.devices, stage_devices, whole)[:stages]
    total = -(-(starts[-1] + stage_devices) // whole[-1]) * whole[-1] if whole else 0
    if not 0 < total <= cluster.devices:
        return [place * stage_devices for place in range(stages)]
    found = []
    for _, group in groupby(reversed(starts), key=lambda at: at // whole[0]):
        inside = [*group]
        first = total - (inside[0] // whole[0] + 1) * whole[0]
        found += [first + place * stage_devices for place in range(len(inside))]
    return found


def best_ring(cluster: Cluster, d: int, t: int, stages: int, ring: Callable[[Cluster, int, int, int], float]) -> float:
    """The bandwidth of the ring through a stage's replicas: whole in the least group that it can be, or n of them in
    each group one level below that which holds the plan, by the n that is best.

    ring: through n replicas of t devices each in a group of so many devices.
    """
    own, sizes = (
        Cluster(cluster.devices, 1.0, cluster.links),
        [x.devices for x in cluster.links if x.devices is not None],
    )
    held = min([size for size in sizes if stages * d * t <= size] + [cluster.devices])
    below = [size for size in sizes if size < held]
    whole = [size for size in whole_groups(cluster, d * t, stages) if size < held]
    if whole:
        return ring(own, whole[0], d, t)
    found = [ring(own, held, d, t)]
    outside = reached_bytes_per_s(cluster, len(below))
    runs = [n for n in range(2, d) if d % n == 0 and below]
    runs = [n for n in runs if len(_starts(held, n * t, (below[-1],))) >= stages * d // n]
    return max(found + [min(ring(own, below[-1], n, t), n * outside) for n in runs])


@lru_cache(maxsize=4096)
def _starts(devices: int, stage_devices: int, groups: tuple[int, ...]) -> tuple[int, ...]:
    """The first device of each stage that fits, numbered from the back, where no stage crosses the border of a
    group."""
    found: list[int] = []
    at = 0
    while at + stage_devices <= devices:
        end = at + stage_devices - 1
        left = [size for size in groups if at // size != end // size]
        if not left:
            found.append(at)
            at = end + 1
        elif stage_devices > left[0]:
            break
        else:
            at = end // left[0] * left[0]
    return tuple(found)
