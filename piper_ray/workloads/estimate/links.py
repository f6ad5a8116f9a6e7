"""What groups of GPUs tell each other takes, on the links that they have: NVLink within a node, the network between.

Ranks lie in the order t, c, d, p (tensor, context, data, pipeline parallelism), as Megatron's do: the members of a
group are ``stride`` ranks apart. Collectives are rings (Thakur et al. 2005; NCCL): n devices take n - 1 steps for an
all-gather or a reduce-scatter, each of 1/n of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.cluster import ring_bytes_per_s as ring_through_nodes
from piper_ray.workloads.estimate.hardware import Gpu


@dataclass(frozen=True)
class Group:
    """size devices that are stride ranks apart."""

    size: int
    stride: int = 1

    def in_node(self, gpus_per_node: int) -> int:
        """How many of them share a node."""
        return max(1, min(self.size, gpus_per_node // self.stride))


def ring_bytes_per_s(group: Group, gpu: Gpu, gpus_per_node: int) -> float:
    """What a ring of the group carries in one direction."""
    members = group.in_node(gpus_per_node)
    return ring_through_nodes(
        group.size, members, gpu.ring_bytes_per_s(members), gpu.network_bytes_per_s * gpu.network_fraction
    )


def all_gather_s(size_bytes: float, group: Group, gpu: Gpu, gpus_per_node: int) -> float:
    """Each of n devices gets the parts of ``size_bytes`` that the others have; a reduce-scatter likewise."""
    n = group.size
    if n == 1:
        return 0.0
    moved_s = size_bytes * (n - 1) / n / ring_bytes_per_s(group, gpu, gpus_per_node)
    return moved_s + _latency_s(group, gpu, gpus_per_node)


def all_reduce_s(size_bytes: float, group: Group, gpu: Gpu, gpus_per_node: int) -> float:
    """A reduce-scatter and an all-gather."""
    return 2.0 * all_gather_s(size_bytes, group, gpu, gpus_per_node)


def all_to_all_s(size_bytes: float, group: Group, gpu: Gpu, gpus_per_node: int) -> float:
    """Each device sends 1/n of its own ``size_bytes`` to each of the n - 1 others, those in its node over its links."""
    n = group.size
    if n == 1:
        return 0.0
    near = group.in_node(gpus_per_node)
    near_s = size_bytes * (near - 1) / n / gpu.ring_bytes_per_s(near)
    far_s = size_bytes * (n - near) / n / (gpu.network_bytes_per_s * gpu.network_fraction)
    return max(near_s, far_s) + _latency_s(group, gpu, gpus_per_node)


def transfer_bytes_per_s(devices: int, gpu: Gpu, gpus_per_node: int) -> float:
    """What a stage hands to the next in one direction: of so many devices in all, some pair needs the network."""
    if devices <= gpus_per_node:
        return gpu.ring_bytes_per_s(2)
    return gpu.network_bytes_per_s * gpu.network_fraction


def _latency_s(group: Group, gpu: Gpu, gpus_per_node: int) -> float:
    """Of the steps of a ring: one in each device, of which one in each node goes over the network."""
    members = group.in_node(gpus_per_node)
    nodes = -(-group.size // members)
    within = group.size - nodes
    between = nodes if nodes > 1 else 0
    return within * gpu.link_latency_s + between * gpu.network_latency_s
