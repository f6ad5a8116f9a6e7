"""Which links a plan's stages and their replicas have: where devices lie, counted device by device.

What is to share a node gets consecutive devices, the most first, so that nothing that divides a node is cut by its
border: a whole stage, or else as many of its replicas as divide a node together. What lies beside that is chance, and
nothing counts on it.
"""

from __future__ import annotations

from collections import Counter

from piper_ray.model.cluster import Cluster


def transfer_bytes_per_s(cluster: Cluster, devices: int) -> float:
    """Of what the stages of a plan of so many devices hand over: some two neighbours have no other link."""
    _, bandwidth = _groups(cluster, devices)[-1]
    return bandwidth


def replicas_bytes_per_s(cluster: Cluster, devices: int, d: int, t: int) -> float:
    """Of a ring through the d replicas of a stage, t devices each, in a plan of so many. Where several of them share a
    node, each has a link out of it. inf for one replica.
    """
    *inner, (_, between) = _groups(cluster, devices)
    row = max((n for n in (size // t for size in cluster.blocks if size % t == 0) if d % n == 0), default=1)
    carried, near = float("inf"), 1
    for size, bandwidth in inner:
        together = min(Counter(replica * t // size for replica in range(row)).values())
        if together > near:
            carried, near = min(carried, near * bandwidth), together
    return min(carried, near * between) if near < d else carried


def _groups(cluster: Cluster, devices: int) -> list[tuple[int, float]]:
    """Devices and bandwidth of each group that a ring or a transfer may lie in, the smallest first; the last one holds
    the plan. Within a node the network can be used as well, should it be faster.
    """
    found: list[tuple[int, float]] = []
    for level, link in enumerate(cluster.links):
        size = devices if link.devices is None else link.devices
        found.append((size, max(x.bandwidth_bytes_per_s for x in cluster.links[level:])))
        if cluster.packed and devices <= size:
            break
    return found
