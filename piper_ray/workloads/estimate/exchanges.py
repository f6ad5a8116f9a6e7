"""What the devices of a layer exchange in a pass: tensor, sequence, context and expert parallelism.

A ``Group`` of GPUs takes as long as its links need: NVLink within a node, the network between. Ranks lie in the order
t, c, d, p (tensor, context, data, pipeline parallelism), as Megatron's do: the members of a group are ``stride`` ranks
apart. Collectives are rings (Thakur et al. 2005; NCCL): n devices take n - 1 steps for an all-gather or a
reduce-scatter, each of 1/n of the whole.

Also the gradients and weights that a layer's replicas exchange, once a batch or in each pass.

A stage of d replicas has g d copies of a weight: c d with context parallelism; fewer for experts that are spread over
several replicas' devices; one for each group of replicas that share a weight. A ring of n takes 2 (n - 1) / n times the
bytes. The planner charges 2 (d - 1) / d of w. With n = g d it leaves out 2 (1 - 1 / g) / d, which is spread over the N
/ d microbatches, so that the charge for one is the same at every d.

Also how tokens reach experts on other devices: which bytes the software's dispatcher moves on which links.

An all-to-all (NCCL) sends a copy for each expert of a token. Kernels that know nodes (DeepEP, HybridEP) send a token
over the network once for each node that has one of its experts, and pass it on over the node's links. An all-gather
sends all tokens of the group to each of its devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper_ray.model.cluster import ring_bytes_per_s as ring_through_nodes
from piper_ray.model.instance import TrainedModel
from piper_ray.model.mode import Recomputation, Sharding
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.estimate.memory import numbers_on_device
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.operators import Exchange, LayerKind
from piper_ray.workloads.estimate.roofline import forward_s as one_s
from piper_ray.workloads.estimate.software import ContextExchange, Precision, Stack, TokenDispatcher, dispatcher_named

NEAR_RANKS = 8
"""NVIDIA's recipes send tokens by all-to-all in nodes of at most this many GPUs, otherwise by kernels that know nodes.
"""


_WITHOUT_KERNELS = ("PCIe", "NVLink 2")
"""How names of links begin between GPUs on which kernels that know nodes do not run: DeepEP's need NVLink within a node
and Ampere GPUs or later ones (deepseek-ai/DeepEP, issues 216 and 162)."""


def dispatcher_for(ranks: int, stack: Stack) -> TokenDispatcher:
    """The software's dispatcher, or the usual one for ``ranks`` ranks in such nodes."""
    if stack.software.dispatcher is not None:
        return stack.software.dispatcher
    if stack.gpu.link.startswith(_WITHOUT_KERNELS):
        return TokenDispatcher.ALL_TO_ALL
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

    @property
    def all_s(self) -> float:
        return self.forward_s + self.backward_s + self.again_s


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


def in_passes_s(kind: LayerKind, mode: LayerMode, stack: Stack, training: Training) -> tuple[float, float]:
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
