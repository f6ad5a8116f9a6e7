"""How tokens reach experts on other devices: which bytes the software's dispatcher moves on which links.

An all-to-all (NCCL) sends a copy for each expert of a token. Kernels that know nodes (DeepEP, HybridEP) send a token
over the network once for each node that has one of its experts, and pass it on over the node's links. An all-gather
sends all tokens of the group to each of its devices.
"""

from __future__ import annotations

from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.estimate.groups import Group, latency_s
from piper_ray.workloads.estimate.software import Stack, TokenDispatcher, dispatcher_named

NEAR_RANKS = 8
"""NVIDIA's recipes send tokens by all-to-all in nodes of at most this many GPUs, otherwise by kernels that know nodes.
"""


def dispatcher_for(ranks: int, stack: Stack) -> TokenDispatcher:
    """The software's dispatcher, or the usual one for ``ranks`` ranks in such nodes."""
    if stack.software.dispatcher is not None:
        return stack.software.dispatcher
    return _usual(max(ranks, stack.domain))


def _usual(ranks: int) -> TokenDispatcher:
    return TokenDispatcher.ALL_TO_ALL if ranks <= NEAR_RANKS else TokenDispatcher.ONCE_PER_NODE


def dispatcher_word(stack: Stack) -> str:
    """How the estimated times send tokens to experts, for any number of ranks, in the words of
    ``TrainedModel.dispatcher``."""
    usual = {dispatcher_for(ranks, stack) for ranks in (1, 1 + NEAR_RANKS)}
    return usual.pop().value if len(usual) == 1 else ""


def dispatcher_of(model: TrainedModel, ranks: int) -> TokenDispatcher:
    """How the times of a model's workload send tokens to experts on ``ranks`` ranks. Raises UsageError."""
    return dispatcher_named(model.dispatcher) if model.dispatcher else _usual(ranks)


def dispatch_s(size_bytes: float, copies: float, group: Group, stack: Stack) -> float:
    """The seconds to send tokens to their experts and back.

    size_bytes: all copies on a device, in both directions. copies: copies of a token.
    """
    if group.size == 1:
        return 0.0
    gpu, per_node, software = stack.gpu, stack.domain, stack.software
    how = dispatcher_for(group.size, stack)
    near_bytes, far_bytes = moved_bytes(size_bytes, copies, group, per_node, how)
    peers = max(1, group.in_node(per_node) - 1) if gpu.mesh else 1
    near_s = near_bytes / (gpu.link_bytes_per_s * peers * software.dispatch_fraction)
    far_s = far_bytes / (gpu.network_bytes_per_s * gpu.network_fraction)
    return max(near_s, far_s) + latency_s(group, gpu, per_node)


def sorting_s(tokens: float, copies: float, group: Group, stack: Stack) -> float:
    """The seconds to sort copies of tokens by expert on one side of an all-to-all, and again on the other side. Sorting
    goes row by row, so short rows cost as much as long ones. Kernels that know nodes sort on the way."""
    if group.size == 1 or dispatcher_for(group.size, stack) is not TokenDispatcher.ALL_TO_ALL:
        return 0.0
    return tokens * copies * stack.gpu.sorting_s


def moved_bytes(
    size_bytes: float, copies: float, group: Group, domain: int, how: TokenDispatcher
) -> tuple[float, float]:
    """The bytes that a device sends over its node's links, and over the network.

    Experts are assumed to lie on devices at random: of a token's ``copies`` a node gets at least one with probability 1
    - (1 - 1 / nodes)^copies.
    """
    n = group.size
    near = group.in_node(domain)
    nodes = n / near
    if how is TokenDispatcher.ALL_GATHER:
        token_bytes = size_bytes / copies
        return token_bytes * (near - 1), token_bytes * (n - near)
    near_bytes, far_bytes = size_bytes * (near - 1) / n, size_bytes * (n - near) / n
    if how is TokenDispatcher.ALL_TO_ALL or nodes == 1.0:
        return near_bytes, far_bytes
    reached = (nodes - 1.0) * (1.0 - (1.0 - 1.0 / nodes) ** copies)
    return near_bytes + far_bytes, size_bytes / copies * reached
