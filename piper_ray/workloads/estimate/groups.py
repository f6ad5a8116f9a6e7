"""Groups of GPUs that communicate, and what their links carry.

Ranks lie in the order t, c, d, p (tensor, context, data, pipeline parallelism), as Megatron's do: the members of a
group are ``stride`` ranks apart.
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

    def in_node(self, domain: int) -> int:
        """How many devices of the group share a node."""
        return max(1, min(self.size, domain // self.stride))


def ring_bytes_per_s(group: Group, gpu: Gpu, domain: int) -> float:
    """The rate of a ring of the group in one direction."""
    members = group.in_node(domain)
    return ring_through_nodes(
        group.size, members, gpu.ring_bytes_per_s(members), gpu.network_bytes_per_s * gpu.network_fraction
    )


def latency_s(group: Group, gpu: Gpu, domain: int) -> float:
    """The latency of a ring: one step for each device; one step for each node crosses the network."""
    members = group.in_node(domain)
    nodes = -(-group.size // members)
    within = group.size - nodes
    between = nodes if nodes > 1 else 0
    return within * gpu.link_latency_s + between * gpu.network_latency_s
