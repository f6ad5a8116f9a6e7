"""Weights and optimizer state that move between GPUs when the plan changes, for example when nodes are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from piper_ray.model.constraints import choices_made
from piper_ray.model.mode import Sharding
from piper_ray.proposal.demand import Proposed
from piper_ray.proposal.layout_words import layout_words
from piper_ray.runtimes.meshes import Mesh, gpus_per_node_of, meshes_of, node_sizes
from piper_ray.runtimes.runtime import RankPlace, rank_places


@dataclass(frozen=True)
class Moved:
    """Bytes that the GPUs of a plan need and did not hold before.

    all_bytes: all weights and optimizer state that the plan holds, counting each replica's weights.
    """

    weights_bytes: float
    state_bytes: float
    all_bytes: float


_Part = tuple[float, float]
"""An interval between 0 and 1."""

_ALL: _Part = (0.0, 1.0)


@dataclass(frozen=True)
class _HeldParts:
    """The parameters that a GPU holds, by layer and by whether they are experts'.

    Two intervals each. For experts: which experts, and which part of each. For dense parameters: which part, and the
    whole interval.
    """

    weights: dict[tuple[int, bool], tuple[_Part, _Part]] = field(default_factory=dict)
    state: dict[tuple[int, bool], tuple[_Part, _Part]] = field(default_factory=dict)


def moved_between(before: Proposed, after: Proposed, kind: str = "") -> Moved:
    """The bytes that move from one plan to the next. GPUs keep their numbers among those of their kind or site; lost
    GPUs are the last ones. kind: of the GPUs of a plan for one kind.

    All plans lay out a layer's parameters alike: dense ones divided over t, experts in their order over the ranks that
    hold them, and the optimizer's state of each part over the replicas that share it.
    """
    old = dict(_held(before, kind))
    training = after.estimate.setting.training
    numbers: dict[tuple[int, bool], float] = {}
    for layer, node in enumerate(after.estimate.architecture.nodes):
        routed = sum(node.kind.value(each.parameters) for each in node.kind.operators if each.routed)
        numbers |= {(layer, True): routed, (layer, False): node.kind.parameters - routed}
    weights_bytes = state_bytes = all_bytes = 0.0
    for gpu, own in _held(after, kind):
        had = old.get(gpu, _HeldParts())
        for each_bytes, held, known in (
            (training.weight_bytes, own.weights, had.weights),
            (training.optimizer_bytes, own.state, had.state),
        ):
            for of, parts in held.items():
                size_bytes, there = each_bytes * numbers[of], _common(parts, parts)
                missing_bytes = size_bytes * (there - (_common(parts, known[of]) if of in known else 0.0))
                all_bytes += size_bytes * there
                if known is had.weights:
                    weights_bytes += missing_bytes
                else:
                    state_bytes += missing_bytes
    return Moved(weights_bytes, state_bytes, all_bytes)


def _common(one: tuple[_Part, _Part], other: tuple[_Part, _Part]) -> float:
    """The share of the whole that both intervals have in common."""
    found = 1.0
    for (low, high), (least, most) in zip(one, other, strict=True):
        found *= max(0.0, min(high, most) - max(low, least))
    return found


_Gpu = tuple[str, int, int]
"""Kind or site, node among those of it, and number on that node."""


def _gpus(meshes: Sequence[Mesh], sites: Sequence[str], kind: str) -> Callable[[RankPlace], _Gpu]:
    """The GPU of each rank. With pipelines at each of several sites, those of each pipeline rank lie site by site."""
    nodes, firsts = Counter[str](), dict[int, tuple[str, int]]()  # of each mesh: its kind, and its first node there
    for mesh in meshes:
        for node in range(mesh.nodes):
            firsts[mesh.first_node + node] = mesh.kind or kind, nodes[mesh.kind] + node
        nodes[mesh.kind] += mesh.nodes
    each = meshes[0].nodes // meshes[0].ranks

    def gpu(place: RankPlace) -> _Gpu:
        name, node = firsts[place.node]
        if sites:
            rank, of_rank = divmod(node, each)
            name, first = sites[of_rank * len(sites) // each], sites.index(sites[of_rank * len(sites) // each])
            own = sites.count(name) * each // len(sites)
            node = rank * own + of_rank - first * each // len(sites)
        return name, node, place.local_rank

    return gpu


def _held(one: Proposed, kind: str) -> Iterator[tuple[_Gpu, _HeldParts]]:
    """The parameters that each GPU holds. kind: as of ``moved_between``."""
    words, schedule = layout_words(one), one.simulation.schedule
    kinds = [each.kind for each in one.estimate.architecture.nodes]
    meshes = meshes_of(
        one.plan, schedule, node_sizes(one.instance, gpus_per_node_of(one.instance)), one.instance.cluster
    )
    gpu = _gpus(meshes, one.instance.cluster.sites, kind)
    for place in rank_places(meshes, schedule, words.context):
        tensor = one.plan.stages[place.stages[0]].tensor_parallel_degree // words.context
        held, ranks = _HeldParts(), tensor * words.context * words.data
        within = (place.replica * words.context + place.context) * tensor + place.shard
        for layer, _, tmpc in (x for stage in place.stages for x in choices_made(one.instance, one.plan.stages[stage])):
            mode = tmpc.mode
            spread = (mode.experts or tensor) * mode.expert_tensor
            for routed in (False, True)[: 1 + bool(kinds[layer].experts)]:
                copy, own = divmod(within, spread if routed else tensor)
                parts = (_nth(own, tensor), _ALL)
                if routed:
                    parts = (_nth(own // mode.expert_tensor, spread // mode.expert_tensor),
                             _nth(own % mode.expert_tensor, mode.expert_tensor))  # fmt: skip
                copies = ranks // (spread if routed else tensor)
                shards = mode.optimizer_shards * tensor // (spread if routed else tensor)
                shards = max(1, shards) if mode.optimizer_shards else max(1, copies)
                (low, high), of_each = parts
                least, most = _nth(copy % shards, shards)
                shared = (low + least * (high - low), low + most * (high - low)), of_each
                held.state[layer, routed] = shared
                held.weights[layer, routed] = shared if mode.sharding is Sharding.WEIGHTS else parts
        yield gpu(place), held


def _nth(number: int, count: int) -> _Part:
    """One of ``count`` equal intervals."""
    return number / count, (number + 1) / count
