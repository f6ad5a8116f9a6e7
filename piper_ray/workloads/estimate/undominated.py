"""Ways to run a layer that never win: what combines several further options is left out where another is as good."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from piper_ray.model.settings import Sharding
from piper_ray.workloads.estimate.costs import Costs
from piper_ray.workloads.estimate.modes import Mode

_figures = attrgetter(
    "forward_pass_s",
    "planned_s",
    "weight_s",
    "synchronised_bytes",
    "activation_bytes",
    "fixed_bytes",
    "shared_bytes",
)


def undominated(costs: Mapping[Mode, Costs]) -> dict[Mode, Costs]:
    """Of a kind's modes those that may be the best choice somewhere, and all of one further option, or of none."""
    return {
        mode: found
        for mode, found in costs.items()
        if _options(mode) < 2 or not any(_never_loses(other, costs[other], mode, found) for other in costs)
    }


def _options(mode: Mode) -> int:
    further = (mode.context > 1, mode.experts is not None, mode.offload, mode.gathered)
    return sum((*further, mode.shares > Sharding.OPTIMIZER))


def _never_loses(one: Mode, of_one: Costs, other: Mode, of_other: Costs) -> bool:
    """In any stage that layers divided in the same way run in; the earlier of equals stays."""
    divided = (one.degree, one.context, one.experts, one.expert_tensor)
    if one == other or divided != (other.degree, other.context, other.experts, other.expert_tensor):
        return False
    if one.least_data_parallel_degree > other.least_data_parallel_degree:
        return False
    if other.sequence_parallel and not one.sequence_parallel:
        return False  # which hands more on
    mine, theirs = ((*_figures(costs), *_backward(costs)) for costs in (of_one, of_other))
    return mine != theirs and all(x <= y for x, y in zip(mine, theirs, strict=True))


def _backward(costs: Costs) -> tuple[float, float]:
    """The whole pass, and its gradients of inputs."""
    whole_s = costs.planned_s - costs.forward_pass_s
    return whole_s, whole_s - costs.weight_s
