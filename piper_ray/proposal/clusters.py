"""Plans for several clusters: GPU types and numbers of nodes, each by a search of its own; and what moves between plans
when nodes are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from piper_ray.model.constraints import choices_made
from piper_ray.model.errors import InfeasibleError, UsageError
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
    """The best plan for each. Raises StopSearch."""
    for demand in demands:
        try:
            found = propose(demand, stop.part(), tell, watch, listed=1)
        except (InfeasibleError, UsageError) as error:
            yield ClusterPlan(demand, None, str(error).partition("\n")[0])
        else:
            yield ClusterPlan(demand, found)
        if stop.requested:
            return


@dataclass(frozen=True)
class Moved:
    """Bytes that GPUs of a plan have to get, as they did not hold them before. all_bytes: what the plan holds in all,
    of weights and optimizer's state, each replica's weights counted."""

    weights_bytes: float
    state_bytes: float
    all_bytes: float


@dataclass(frozen=True)
class _MovedState:
    """Intervals of layers' parameters that a GPU holds, from 0 to 1, by layer: of weights, and of optimizer's state."""

    weights: dict[int, tuple[float, float]]
    state: dict[int, tuple[float, float]]


def moved_between(before: Proposed, after: Proposed) -> Moved:
    """What changes place from one plan to the next. GPUs keep their numbers; those that are lost are the last ones.

    A layer's parameters are laid out alike in all plans: divided over t, and the optimizer's state of each part over
    the replicas that share it. So parts of experts are where t puts them, whatever they are spread over.
    """
    old, new = list(_held(before)), list(_held(after))
    parameters = {layer: node.kind.parameters for layer, node in enumerate(after.estimate.architecture.nodes)}
    training = after.estimate.setting.training
    weights_bytes = state_bytes = all_bytes = 0.0
    for number, own in enumerate(new):
        had = old[number] if number < len(old) else _MovedState({}, {})
        for each_bytes, held, known in (
            (training.weight_bytes, own.weights, had.weights),
            (training.optimizer_bytes, own.state, had.state),
        ):
            for layer, (low, high) in held.items():
                was_low, was_high = known.get(layer, (0.0, 0.0))
                missing = (high - low) - max(0.0, min(high, was_high) - max(low, was_low))
                size_bytes = each_bytes * parameters[layer]
                all_bytes += size_bytes * (high - low)
                if known is had.weights:
                    weights_bytes += size_bytes * missing
                else:
                    state_bytes += size_bytes * missing
    return Moved(weights_bytes, state_bytes, all_bytes)


def _held(one: Proposed) -> Iterator[_MovedState]:
    """What each GPU holds, in the order of ranks."""
    words, schedule, node = layout_words(one), one.simulation.schedule, gpus_per_node_of(one.instance)
    sharers = words.data * words.context
    for place in rank_places(one.plan, schedule, node, words.context):
        low, width = place.shard / words.tensor, 1.0 / words.tensor
        sharer = place.replica * words.context + place.context
        weights, state = {}, {}
        for layer, _, tmpc in (x for stage in place.stages for x in choices_made(one.instance, one.plan.stages[stage])):
            shards = tmpc.mode.optimizer_shards or sharers
            first = low + sharer % shards * width / shards
            weights[layer], state[layer] = (low, low + width), (first, first + width / shards)
        yield _MovedState(weights, state)
