"""What the devices of a layer exchange in a pass: tensor, sequence, context and expert parallelism.

A ``Group`` of GPUs takes as long as its links need: NVLink within a node, the network between. Ranks lie in the order
t, c, d, p (tensor, context, data, pipeline parallelism), as Megatron's do: the members of a group are ``stride`` ranks
apart. Collectives are rings (Thakur et al. 2005; NCCL): n devices take n - 1 steps for an all-gather or a
reduce-scatter, each of 1/n of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.dispatch import dispatch_s, dispatcher_for, sorting_s
from piper_ray.workloads.estimate.groups import Group, latency_s, ring_bytes_per_s
from piper_ray.workloads.estimate.hardware import Gpu
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import Exchange, LayerKind
from piper_ray.workloads.estimate.roofline import forward_s as one_s
from piper_ray.workloads.estimate.software import ContextExchange, Precision, Stack, TokenDispatcher


def all_gather_s(size_bytes: float, group: Group, gpu: Gpu, domain: int) -> float:
    """The seconds in which each of n devices gets the other devices' parts of ``size_bytes``; a reduce-scatter takes as
    long."""
    n = group.size
    if n == 1:
        return 0.0
    moved_s = size_bytes * (n - 1) / n / ring_bytes_per_s(group, gpu, domain)
    return moved_s + latency_s(group, gpu, domain)


def all_reduce_s(size_bytes: float, group: Group, gpu: Gpu, domain: int) -> float:
    """The seconds of a reduce-scatter and an all-gather."""
    return 2.0 * all_gather_s(size_bytes, group, gpu, domain)


def all_to_all_s(size_bytes: float, group: Group, gpu: Gpu, domain: int) -> float:
    """The seconds in which each device sends 1/n of its ``size_bytes`` to each of the n - 1 others, over the node's
    links within a node."""
    n = group.size
    if n == 1:
        return 0.0
    near = group.in_node(domain)
    near_s = size_bytes * (near - 1) / n / gpu.ring_bytes_per_s(near)
    far_s = size_bytes * (n - near) / n / (gpu.network_bytes_per_s * gpu.network_fraction)
    return max(near_s, far_s) + latency_s(group, gpu, domain)


def transfer_bytes_per_s(devices: int, gpu: Gpu, domain: int) -> float:
    """The rate from one stage to the next, in one direction. More devices than ``domain`` need the network."""
    if devices <= domain:
        return gpu.ring_bytes_per_s(2)
    return gpu.network_bytes_per_s * gpu.network_fraction


@dataclass(frozen=True)
class ExchangeSeconds:
    """The exposed seconds of exchanges in a layer's passes, which products do not hide. again_s: those that
    recomputation repeats."""

    forward_s: float
    backward_s: float
    again_s: float


def exchanges_of(kind: LayerKind, mode: LayerMode, stack: Stack) -> ExchangeSeconds:
    """All exchanges of a layer in a mode.

    An exchange of tensor parallelism is an all-reduce; with sequence parallelism a reduce-scatter and an all-gather.
    Its backward pass gathers once more what norms handed to products, because only shards of that are kept (Korthikanti
    et al. 2022, section 4.2.2), unless they are kept whole.
    """
    software = stack.software
    forward_s = backward_s = again_s = 0.0
    for exchange in kind.exchanges:
        once_s = exchange_s(exchange, kind, mode, stack)
        if once_s == 0.0:
            continue
        to_experts = is_all_to_all(exchange, mode)
        hidden = (0.0, 0.0) if to_experts else (software.forward_overlap, software.backward_overlap)
        exposed_s = exchange.forward * once_s * (1.0 - hidden[0])
        forward_s += exposed_s
        again_s += exposed_s if mode.does_again(exchange) else 0.0
        backward_s += exchange.backward * once_s * (1.0 - hidden[1])
        if regathers(exchange, mode):
            backward_s += regather_s(exchange, kind, mode, stack) * (1.0 - hidden[1])
    core = [operator for operator in kind.operators if operator.on_chip or "scores" in operator.name]
    if mode.context > 1 and core:
        moved_s = context_s(kind, mode, stack)
        ring = software.context is ContextExchange.RING or software.context_overlap
        hiding_s = sum(one_s(operator, kind, mode, stack) for operator in core) if ring else 0.0
        there_and_back = 1.0 if software.context is ContextExchange.ALL_TO_ALL else 2.0
        exposed_s = max(0.0, moved_s - hiding_s)
        forward_s += exposed_s
        again_s += exposed_s if any(map(mode.does_again, core)) else 0.0
        backward_s += max(0.0, there_and_back * moved_s - 2.0 * hiding_s)
    return ExchangeSeconds(forward_s, backward_s, forward_s if mode.recomputation == Recomputation.FULL else again_s)


def regathers(exchange: Exchange, mode: LayerMode) -> bool:
    """Whether the backward pass gathers a product's input again."""
    whole = not mode.sequence_parallel or mode.gathered or is_all_to_all(exchange, mode)
    return not whole and exchange.forward > 0.0 and exchange.backward > 0.0


def is_all_to_all(exchange: Exchange, mode: LayerMode) -> bool:
    """Whether tokens are sent to their experts: devices have shards of the tokens, or experts lie on other devices."""
    return bool(exchange.expert_bytes) and (mode.sequence_parallel or mode.experts is not None)


def exchange_s(exchange: Exchange, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The exposed seconds of one exchange on each device. Sorting tokens for experts is never hidden."""
    gpu, per_node = stack.gpu, stack.domain
    group = Group(mode.degree)
    if is_all_to_all(exchange, mode):
        sent_s = _to_experts_s(exchange, kind, mode, stack)
        seen = 1.0 - stack.software.expert_overlap
        imbalance = stack.imbalance if mode.expert_ranks > 1 else 1.0
        once_s, messages = imbalance * sent_s, 2.0 * seen
    else:
        size_bytes = kind.value(exchange.bytes) / mode.context
        parts = 1.0 + _gathered_share(kind, stack) if mode.sequence_parallel else 2.0
        once_s = stack.software.tensor_slowdown * parts * all_gather_s(size_bytes, group, gpu, per_node)
        messages = 2.0 if mode.sequence_parallel else 1.0
    return once_s + messages * stack.software.message_s if once_s > 0.0 else 0.0


def _to_experts_s(exchange: Exchange, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The seconds to send tokens to experts and back.

    If several devices share an expert, kernels that know nodes send each of them a copy. After an all-to-all these
    devices gather their tokens, and sum up the results by a reduce-scatter.
    """
    each, seen = mode.expert_tensor, 1.0 - stack.software.expert_overlap
    spread, copies = Group(mode.expert_ranks, each), kind.value("e")
    share = kind.value(exchange.expert_bytes) / (mode.degree * mode.context)
    tokens = kind.value("s b") / (mode.degree * mode.context) * each
    if each == 1:
        return seen * dispatch_s(share, copies, spread, stack) + sorting_s(tokens, copies, spread, stack)
    whole = Group(mode.expert_ranks * each)
    if dispatcher_for(whole.size, stack) is TokenDispatcher.ONCE_PER_NODE:
        return seen * dispatch_s(share * each, copies * each, whole, stack)
    gather_s = all_gather_s(share * each, Group(each), stack.gpu, stack.domain)
    return seen * (dispatch_s(share, copies, spread, stack) + gather_s) + sorting_s(tokens, copies, whole, stack)


def regather_s(exchange: Exchange, kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The seconds of sequence parallelism's all-gather in the backward pass, for one exchange."""
    size_bytes = _gathered_share(kind, stack) * kind.value(exchange.bytes) / mode.context
    return all_gather_s(size_bytes, Group(mode.degree), stack.gpu, stack.domain)


def _gathered_share(kind: LayerKind, stack: Stack) -> float:
    """The share of a half-precision tensor's bytes that sequence parallelism gathers: inputs of 8-bit products are cast
    before."""
    return 0.5 if stack.precision is Precision.FP8 and kind.recomputable else 1.0


def context_s(kind: LayerKind, mode: LayerMode, stack: Stack) -> float:
    """The seconds of context parallelism over c groups, in a forward pass.

    Either keys and values of all tokens go around a ring, while attention works on those that have arrived; or they are
    gathered before attention. Their gradients return in the same way. Or an all-to-all distributes heads instead of
    tokens before attention, and reverses this after it.
    """
    value_size = "v" if "v" in kind.symbols else "d"
    group = Group(mode.context, mode.degree)
    gpu, per_node = stack.gpu, stack.domain
    message_s = stack.software.message_s
    keys = kind.value(f"2 s b g d + 2 s b g {value_size}") / mode.degree
    if stack.software.context is not ContextExchange.ALL_TO_ALL:
        return all_gather_s(keys, group, gpu, per_node) + message_s
    queries = kind.value(f"2 s b a d + 2 s b a {value_size}") / mode.degree
    return all_to_all_s((keys + queries) / mode.context, group, gpu, per_node) + 2.0 * message_s
