"""Where the stages of a pipeline lie, computed stage by stage, and the link at each border between them.

Ranks are in order, all stages have equally many devices, and groups are filled from the back. A stage lies whole in a
group of each level in which all stages of the plan fit whole; at any other level all borders count as outside.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from piper_ray.model.cluster import Cluster


def border_rates(cluster: Cluster, stage_devices: int, stages: int) -> list[float]:
    """Bytes per second at each border, the last one first."""
    outward = [max(x.bandwidth_bytes_per_s for x in cluster.links[level:]) for level in range(len(cluster.links))]
    return [outward[level] for level in border_levels(cluster, stage_devices, stages)]


def border_levels(cluster: Cluster, stage_devices: int, stages: int) -> tuple[int, ...]:
    """For each border the index of its link in the cluster, the last border first."""
    sizes, there = [x.devices for x in cluster.links if x.devices is not None], cluster.devices
    held = min([size for size in sizes if stage_devices * stages <= size] + [there])
    whole: tuple[int, ...] = ()
    for size in sizes:
        if size < held and len(_starts(held, stage_devices, (*whole, size))) >= stages:
            whole += (size,)
    starts = _starts(held, stage_devices, whole)[:stages]
    found = []
    for one, other in pairwise(starts):
        shared = [size >= held or (size in whole and one // size == other // size) for size in sizes]
        found.append(max((level for level, is_shared in enumerate(shared, 1) if not is_shared), default=0))
    return tuple(found)


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
