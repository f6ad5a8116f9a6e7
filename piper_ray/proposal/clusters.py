"""Plans for several clusters: types of GPU, numbers of nodes, batches or headrooms. Each has its own search.

Also the weights and optimizer state that move between GPUs when the plan changes, for example when nodes are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from piper_ray.model.constraints import choices_made, odd_part
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.mode import Sharding
from piper_ray.model.stop import Stop
from piper_ray.proposal.cells import Cells, Watch, unwatched
from piper_ray.proposal.demand import PlanDemand, Proposed, Tell
from piper_ray.proposal.forks import each_of
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.propose import FoundPlans, priced, propose
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


def _gpu_of(meshes: Sequence[Mesh], sites: Sequence[str], kind: str) -> Callable[[RankPlace], _Gpu]:
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
    gpu = _gpu_of(meshes, one.instance.cluster.sites, kind)
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


@dataclass(frozen=True)
class ClusterPlan:
    """The result of a search for one cluster: ``found`` has the best plan and no combinations; None: ``reason`` says
    why there is no plan."""

    demand: PlanDemand
    found: FoundPlans | None
    reason: str = ""

    @property
    def nodes(self) -> dict[str, int]:
        """The nodes of each kind or site."""
        return {name: one.nodes for name, _, one in self.demand.kinds}

    def moved_from(self, before: ClusterPlan) -> Moved:
        """What moving to this plan takes."""
        assert before.found is not None
        assert self.found is not None
        kind, *others = self.nodes if self.demand.further else [""]
        return moved_between(before.found.best, self.found.best, "" if others else kind)


def plans_of(
    demands: Iterable[PlanDemand],
    stop: Stop[Any],
    tell: Tell | None = None,
    watch: Watch = unwatched,
    like: FoundPlans | None = None,
) -> Iterator[ClusterPlan]:
    """The best plan for each demand. Plans that are already known start the next search on the same GPUs; searches on
    other GPUs each have a process. like: as of ``propose``. Raises StopSearch."""
    asked, known, tell = list(demands), list[FoundPlans](), tell or (lambda _: None)
    if len(set(map(_gpus, asked))) == len(asked):
        likes = _priced_once(asked, stop) if like is None else [like] * len(asked)
        calls = [partial(_alone, demand, stop, one) for demand, one in zip(asked, likes, strict=True)]
        for plan, notes in each_of(calls, stop, watch):
            for text in notes:
                tell(text)
            yield plan
        return
    for demand in asked:
        plan = _planned(demand, known, stop, tell, watch)
        if plan.found is not None:
            known.append(plan.found)
        yield plan
        if stop.requested:
            return


def _gpus(demand: PlanDemand) -> tuple[tuple[str, str, int], ...]:
    """The name, the GPU and the nodes of each kind or site."""
    return tuple((name, gpu, one.nodes) for name, gpu, one in demand.kinds)


def _priced_once(asked: Sequence[PlanDemand], stop: Stop[Any]) -> list[FoundPlans | None]:
    """For each demand the combinations of the largest one that it ``prices_like``, if there are several such."""
    demands, likes = [one.with_batch(lambda _: None) for one in asked], list[FoundPlans | None]([None] * len(asked))
    for number in sorted(range(len(demands)), key=lambda number: -demands[number].devices):
        if likes[number] is None:
            with suppress(InfeasibleError, UsageError):  # which the search says
                alike = [other for other, one in enumerate(demands) if one.prices_like(demands[number])]
                made = priced(demands[number], stop) if len(alike) > 1 else None
                for other in alike:
                    likes[other] = likes[other] or made
    return likes


def _alone(demand: PlanDemand, stop: Stop[Any], like: FoundPlans | None, watch: Watch) -> tuple[ClusterPlan, list[str]]:
    """The best plan, and the notes on the way to it."""
    notes: list[str] = []
    return _planned(demand, [], stop, notes.append, watch, like), notes


def _planned(
    demand: PlanDemand,
    known: list[FoundPlans],
    stop: Stop[Any],
    tell: Tell,
    watch: Watch,
    like: FoundPlans | None = None,
) -> ClusterPlan:
    try:
        found = _after(known, demand, stop, tell, watch, like)
    except (InfeasibleError, UsageError) as error:
        return ClusterPlan(demand, None, str(error).partition("\n")[0])
    # Combinations are of no more interest, and large.
    return ClusterPlan(demand, replace(found, found=found.found[:1], cells=Cells((), (), ())))


def _after(
    known: list[FoundPlans],
    demand: PlanDemand,
    stop: Stop[Any],
    tell: Tell,
    watch: Watch,
    like: FoundPlans | None,
) -> FoundPlans:
    """The best plan, found with the help of earlier demands' plans.

    If this demand only has less memory than an earlier one, the earlier bound holds here, and the earlier best plan, if
    it fits, is still the best.
    """
    alike = [one for one in known if _gpus(one.demand) == _gpus(demand)]
    roomier = [one for one in alike if replace(one.demand, headroom=demand.headroom) == demand]
    if roomier:
        before = roomier[-1]
        instance = before.best.instance
        limit_bytes = demand.planned_bytes(before.demand.whole_bytes(instance.memory_bytes))
        if before.best.simulation.peak_memory_bytes <= limit_bytes <= instance.memory_bytes:
            best = before.best.on(instance.replace(memory_bytes=limit_bytes), demand.step)
            return replace(before, demand=demand, found=(best,), seconds=0.0)
    plans = [one.best for one in alike]
    found = propose(demand, stop.part(), tell, watch, listed=1, known=plans, like=like)
    bounds_s = [one.lower_s for one in roomier if one.best.instance.memory_bytes >= found.best.instance.memory_bytes]
    return replace(found, lower_s=max([found.lower_s, *bounds_s]))


def with_nodes_before(plans: Iterable[ClusterPlan]) -> Iterator[tuple[ClusterPlan, ClusterPlan | None]]:
    """Each cluster with the last one before it that has a plan, and as many nodes of each kind or more."""
    known: list[ClusterPlan] = []
    for one in plans:
        more = (x for x in reversed(known) if all(x.nodes.get(name, 0) >= n for name, n in one.nodes.items()))
        yield one, next(more, None)
        if one.found is not None:
            known.append(one)


_MOST_BATCHES = 12


def batches_between(low: int, high: int, devices: int) -> tuple[int, ...]:
    """Batches from ``low`` to ``high``: both ends, the roundest number between them, and multiples of the odd part of
    the number of devices times a power of two, which replicas can divide in many ways. The power of two is the least
    that leaves at most a dozen batches."""
    step, roundest = odd_part(devices), 1
    while high // step - (low - 1) // step > _MOST_BATCHES - 3:
        step *= 2
    while high // (2 * roundest) > (low - 1) // (2 * roundest):
        roundest *= 2
    between = range(-(-low // step) * step, high + 1, step)
    return tuple(sorted({low, high, high // roundest * roundest, *between}))
