"""Plans for several clusters: GPU types and numbers of nodes, each by a search of its own; and what moves between plans
when nodes are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from piper_ray.model.constraints import choices_made
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.mode import Sharding
from piper_ray.model.restrictions import odd_part
from piper_ray.model.stop import Stop
from piper_ray.proposal.cells import Watch, unwatched
from piper_ray.proposal.demand import PlanDemand, Proposed, Tell
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.propose import FoundPlans, propose
from piper_ray.runtimes.runtime import gpus_per_node_of, rank_places


@dataclass(frozen=True)
class ClusterPlan:
    """What a search for one cluster found: found, or why there is none."""

    demand: PlanDemand
    found: FoundPlans | None
    reason: str = ""


def plans_of(
    demands: Iterable[PlanDemand], stop: Stop[Any], tell: Tell | None = None, watch: Watch = unwatched
) -> Iterator[ClusterPlan]:
    """The best plan for each; those found before begin the next search on the same GPUs. Raises StopSearch."""
    known: list[FoundPlans] = []
    for demand in demands:
        try:
            found = _after(known, demand, stop, tell, watch)
        except (InfeasibleError, UsageError) as error:
            yield ClusterPlan(demand, None, str(error).partition("\n")[0])
        else:
            known.append(found)
            yield ClusterPlan(demand, found)
        if stop.requested:
            return


def _after(known: list[FoundPlans], demand: PlanDemand, stop: Stop[Any], tell: Tell | None, watch: Watch) -> FoundPlans:
    """The best plan, after those of other demands. With less memory than before no plan is faster than the bound of
    before, and the best one that fits is still the best."""
    alike = [one for one in known if (one.demand.gpu, one.demand.devices) == (demand.gpu, demand.devices)]
    roomier = [one for one in alike if replace(one.demand, headroom=demand.headroom) == demand]
    if roomier:
        before = roomier[-1]
        instance = before.best.instance
        limit_bytes = demand.planned_bytes(before.demand.whole_bytes(instance.memory_bytes))
        if before.best.simulation.peak_memory_bytes <= limit_bytes <= instance.memory_bytes:
            best = before.best.on(instance.replace(memory_bytes=limit_bytes), demand.step)
            return replace(before, demand=demand, found=(best,), seconds=0.0)
    plans = [one.best for one in alike]
    found = propose(demand, stop.part(), tell, watch, listed=1, known=plans)
    bounds_s = [one.lower_s for one in roomier if one.best.instance.memory_bytes >= found.best.instance.memory_bytes]
    return replace(found, lower_s=max([found.lower_s, *bounds_s]))


_MOST_BATCHES = 12


def batches_between(low: int, high: int, devices: int) -> tuple[int, ...]:
    """Both ends and batches between that replicas can divide in many ways: multiples of the odd part of the number of
    devices and of as small a power of two as leaves a dozen at most; and the roundest of all."""
    step, roundest = odd_part(devices), 1
    while high // step - (low - 1) // step > _MOST_BATCHES - 3:
        step *= 2
    while high // (2 * roundest) > (low - 1) // (2 * roundest):
        roundest *= 2
    between = range(-(-low // step) * step, high + 1, step)
    return tuple(sorted({low, high, high // roundest * roundest, *between}))


@dataclass(frozen=True)
class Moved:
    """Bytes that GPUs of a plan have to get, as they did not hold them before. all_bytes: what the plan holds in all,
    of weights and optimizer's state, each replica's weights counted."""

    weights_bytes: float
    state_bytes: float
    all_bytes: float


_Part = tuple[float, float]
"""An interval between 0 and 1."""

_ALL: _Part = (0.0, 1.0)


@dataclass(frozen=True)
class _HeldParts:
    """What a GPU holds of parameters, by layer and whether they are experts': of these so many, and of each so much.
    Of dense ones each is there, and so much of it."""

    weights: dict[tuple[int, bool], tuple[_Part, _Part]] = field(default_factory=dict)
    state: dict[tuple[int, bool], tuple[_Part, _Part]] = field(default_factory=dict)


def moved_between(before: Proposed, after: Proposed) -> Moved:
    """What changes place from one plan to the next. GPUs keep their numbers; those that are lost are the last ones.

    A layer's parameters are laid out alike in all plans: dense ones divided over t, experts in their order over the
    ranks that they are spread over, and the optimizer's state of each part over the replicas that share it.
    """
    old, new = list(_held(before)), list(_held(after))
    training = after.estimate.setting.training
    numbers: dict[tuple[int, bool], float] = {}
    for layer, node in enumerate(after.estimate.architecture.nodes):
        routed = sum(node.kind.value(each.parameters) for each in node.kind.operators if each.routed)
        numbers |= {(layer, True): routed, (layer, False): node.kind.parameters - routed}
    weights_bytes = state_bytes = all_bytes = 0.0
    for number, own in enumerate(new):
        had = old[number] if number < len(old) else _HeldParts()
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
    """The share of the whole that both have."""
    found = 1.0
    for (low, high), (least, most) in zip(one, other, strict=True):
        found *= max(0.0, min(high, most) - max(low, least))
    return found


def _held(one: Proposed) -> Iterator[_HeldParts]:
    """What each GPU holds, in the order of ranks."""
    words, schedule, node = layout_words(one), one.simulation.schedule, gpus_per_node_of(one.instance)
    kinds = [each.kind for each in one.estimate.architecture.nodes]
    ranks = words.tensor * words.context * words.data
    for place in rank_places(one.plan, schedule, node, words.context):
        held, within = _HeldParts(), place.rank % ranks
        for layer, _, tmpc in (x for stage in place.stages for x in choices_made(one.instance, one.plan.stages[stage])):
            mode = tmpc.mode
            spread = (mode.experts or words.tensor) * mode.expert_tensor
            for routed in (False, True)[: 1 + bool(kinds[layer].experts)]:
                copy, own = divmod(within, spread if routed else words.tensor)
                parts = (_nth(own, words.tensor), _ALL)
                if routed:
                    parts = (_nth(own // mode.expert_tensor, spread // mode.expert_tensor),
                             _nth(own % mode.expert_tensor, mode.expert_tensor))  # fmt: skip
                copies = ranks // (spread if routed else words.tensor)
                shards = mode.optimizer_shards * words.tensor // (spread if routed else words.tensor)
                shards = max(1, shards) if mode.optimizer_shards else max(1, copies)
                (low, high), of_each = parts
                least, most = _nth(copy % shards, shards)
                shared = (low + least * (high - low), low + most * (high - low)), of_each
                held.state[layer, routed] = shared
                held.weights[layer, routed] = shared if mode.sharding is Sharding.WEIGHTS else parts
        yield held


def _nth(number: int, count: int) -> _Part:
    """One of so many equal parts."""
    return number / count, (number + 1) / count
