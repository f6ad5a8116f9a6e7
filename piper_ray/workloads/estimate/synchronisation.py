"""The gradients and weights that a layer's replicas exchange, once a batch or in each pass.

A stage of d replicas has g d copies of a weight: c d with context parallelism; fewer for experts that are spread over
several replicas' devices; one for each group of replicas that share a weight. A ring of n takes 2 (n - 1) / n times the
bytes. The planner charges 2 (d - 1) / d of w. With n = g d it leaves out 2 (1 - 1 / g) / d, which is spread over the N
/ d microbatches, so that the charge for one is the same at every d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper_ray.model.cluster import ring_bytes_per_s as ring_through_nodes
from piper_ray.model.mode import Sharding
from piper_ray.workloads.estimate.exchanges import all_gather_s, all_reduce_s
from piper_ray.workloads.estimate.groups import Group, ring_bytes_per_s
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.memory import numbers_on_device
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.software import Stack


@dataclass(frozen=True)
class Reduced:
    """A reduction. size_bytes: half of what is scattered and gathered around a ring, on each device, once a batch.
    replicas: the members of the ring for each replica of a stage (g). stride: the ranks between two members."""

    size_bytes: float
    replicas: float
    stride: int

    def group(self, data: int) -> Group:
        """The ring in a stage with ``data`` replicas."""
        return Group(max(1, round(self.replicas * data)), self.stride)

    def ring_s(self, data: int, stack: Stack) -> float:
        """The seconds once a batch, on the replicas' links."""
        group = self.group(data)
        rate = ring_bytes_per_s(group, stack.gpu, stack.domain)
        return 2.0 * (group.size - 1) / group.size * self.size_bytes / rate


def reduced(kind: LayerKind, mode: LayerMode, stack: Stack, training: Training) -> Iterator[Reduced]:
    """How replicas synchronise a layer once a batch.

    Gradients are all-reduced, twice around the ring; or gradients are scattered and updated weights gathered (ZeRO-1,
    Rajbhandari et al. 2020). If gradients are scattered in each pass, only weights are gathered (ZeRO-2) or nothing is
    (ZeRO-3); then groups of replicas that share weights reduce their shards among each other (HSDP).
    """
    gradient_bytes = stack.software.reduced_bytes(stack.precision, training)
    for numbers in numbers_on_device(kind, mode):
        if not numbers.trained:
            continue
        replicas, shards = mode.replicas(numbers.routed), mode.state_parts(numbers.routed)
        stride = mode.expert_ranks * mode.expert_tensor if numbers.routed else mode.degree
        once_bytes = {
            Sharding.NONE: gradient_bytes,
            Sharding.OPTIMIZER: (gradient_bytes + training.weight_bytes) / 2.0,
            Sharding.GRADIENTS: training.weight_bytes / 2.0,
            Sharding.WEIGHTS: 0.0,
        }[mode.sharding]
        if once_bytes:
            yield Reduced(numbers.trained * once_bytes, replicas, stride)
        if mode.sharding >= Sharding.GRADIENTS and not mode.groups:
            yield Reduced(numbers.trained / shards * gradient_bytes, replicas / shards, round(stride * shards))


def passes_s(kind: LayerKind, mode: LayerMode, stack: Stack, training: Training) -> tuple[float, float]:
    """The seconds in each forward and backward pass: sharded weights are gathered for both; in the latter gradients are
    scattered, and summed between groups of replicas if that happens in each pass (HSDP)."""
    forward_s = backward_s = 0.0
    if mode.sharding < Sharding.GRADIENTS:
        return forward_s, backward_s
    gradient_bytes = stack.software.reduced_bytes(stack.precision, training)
    for numbers in numbers_on_device(kind, mode):
        if not numbers.held:
            continue
        stride = mode.expert_ranks * mode.expert_tensor if numbers.routed else mode.degree
        group = Group(round(mode.state_parts(numbers.routed)), stride)
        backward_s += all_gather_s(numbers.trained * gradient_bytes, group, stack.gpu, stack.domain)
        if mode.sharding is Sharding.WEIGHTS:
            gather_s = all_gather_s(numbers.held * training.weight_bytes, group, stack.gpu, stack.domain)
            forward_s, backward_s = forward_s + gather_s, backward_s + gather_s
        if mode.groups > 1:
            between = Group(mode.groups, round(stride * group.size))
            shard_bytes = numbers.trained / group.size * gradient_bytes
            backward_s += all_reduce_s(shard_bytes, between, stack.gpu, stack.domain)
    return forward_s, backward_s


def unsaid_s(kind: LayerKind, mode: LayerMode, stack: Stack, training: Training, microbatches: int) -> float:
    """The seconds for each of N microbatches that ``synchronised_bytes`` does not cover; negative if it covers too
    much.

    An excess is taken back at the fastest rate that the planner may have charged: that of the least number of replicas,
    which may be neighbours.
    """
    total_s = 0.0
    for one in reduced(kind, mode, stack, training):
        beyond = 1.0 - 1.0 / one.replicas
        if beyond > 0.0:
            rate = ring_bytes_per_s(Group(max(2, round(one.replicas)), one.stride), stack.gpu, stack.domain)
        else:
            near = Group(max(2, mode.least_data_parallel_degree), mode.devices)
            rate = planner_ring_bytes_per_s(near, stack)
        total_s += 2.0 * beyond * one.size_bytes / (rate * microbatches)
    return total_s


def planner_ring_bytes_per_s(group: Group, stack: Stack) -> float:
    """The rate of a ring in one direction, by the planner's links (``build.links_of``)."""
    gpu = stack.gpu
    link, network = gpu.link_bytes_per_s * gpu.link_fraction, gpu.network_bytes_per_s * gpu.network_fraction
    return ring_through_nodes(group.size, group.in_node(stack.domain), max(link, network), network)


def synchronised_bytes(kind: LayerKind, mode: LayerMode, stack: Stack, training: Training) -> float:
    """w: the bytes that replicas synchronise."""
    return sum(one.size_bytes for one in reduced(kind, mode, stack, training))
