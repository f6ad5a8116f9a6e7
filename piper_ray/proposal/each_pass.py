"""Plans for a runtime that reduces gradients in every pass where there is one pipeline rank, else once a batch.

A TMPC says what happens in a pass and what once a batch, whatever the number of ranks. So one rank is planned by
itself, of TMPCs that share out weights and price every pass, and several ranks number by number, where the best of all
plans counts on what the runtime does not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from piper_ray.engine.subproblems import rank_of
from piper_ray.model.constraints import StageCount, choices_made
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.mode import Sharding
from piper_ray.model.plan import Plan
from piper_ray.model.solution import Solution, Status

Solve = Callable[[Instance, tuple[StageCount, ...], float | None], Solution]
"""Of an instance under further constraints, within so many seconds a sample."""


def counts_on_one_sum(instance: Instance, plan: Plan) -> bool:
    """Whether a plan of one rank and several microbatches has TMPCs that reduce gradients once a batch."""
    if len(plan.stages) > 1:
        return False
    (stage,) = plan.stages
    d = stage.data_parallel_degree
    if instance.microbatches == d:
        return False
    for layer, _, tmpc in choices_made(instance, stage):
        unshared = d * tmpc.mode.context > 1 and tmpc.mode.sharding < Sharding.WEIGHTS
        if unshared and _has_weights(instance, layer):
            return True
    return False


def _has_weights(instance: Instance, layer: int) -> bool:
    rows = instance.layer_by_id[layer].tmpcs.values()
    return any(tmpc.weights_bytes > 0.0 for row in rows for tmpc in row)


def solve_each_pass(instance: Instance, solve: Solve, within_s: float | None, *, several: bool) -> Solution:
    """The best plan of those that the runtime runs as they are priced; where there is none, of all. several: whether
    plans may have several pipeline ranks."""
    free = solve(instance, (), within_s)
    if free.plan is None or free.time_per_sample_s is None or not counts_on_one_sum(instance, free.plan):
        return free
    found: list[Solution] = []
    for narrowed, ranks in _parts(instance, several):
        known_s = [one.time_per_sample_s for one in found if one.time_per_sample_s is not None]
        limits_s = [*known_s, *([] if within_s is None else [within_s])]
        one = solve(narrowed, (StageCount(ranks),), min(limits_s, default=None))
        if one.plan is not None and not counts_on_one_sum(instance, one.plan):
            found.append(one)
    best = min(found, key=lambda one: (one.time_per_sample_s or 0.0, rank_of(one)), default=None)
    if best is None:
        return free
    return replace(best, status=Status.FEASIBLE, lower_bound_s=free.lower_bound_s)


def _parts(instance: Instance, several: bool) -> Iterator[tuple[Instance, int]]:
    yield _sharing_weights(instance), 1
    for ranks in divisors(instance.devices) if several else ():
        if 1 < ranks <= len(instance.layers):
            yield instance, ranks


def _sharing_weights(instance: Instance) -> Instance:
    """With those TMPCs alone that share out weights, where there are such."""
    layers = []
    for layer in instance.layers:
        rows = {}
        for t, row in layer.tmpcs.items():
            sharing = tuple(tmpc for tmpc in row if tmpc.mode.sharding is Sharding.WEIGHTS)
            rows[t] = sharing or row
        layers.append(replace(layer, tmpcs=rows))
    found = replace(instance, layers=tuple(layers))
    if instance.checked:
        found.mark_checked()
    return found
