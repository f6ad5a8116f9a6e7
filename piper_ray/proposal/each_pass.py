"""Plans for a runtime that reduces gradients in every pass if there is one pipeline rank, and once a batch otherwise.

A TMPC states what happens in a pass and what happens once a batch, for any number of ranks. TMPCs with sharded weights
price every pass. So plans with other TMPCs must have several ranks, or have nothing to reduce: one replica, or one
microbatch for each replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from piper_ray.cost.schedules import rank_counts
from piper_ray.engine.one_setting import ModeSetting
from piper_ray.engine.subproblems import rank_of
from piper_ray.model.constraints import Constraint, DataParallelDegrees, Restrictions, StageCount, choices_made
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Sharding
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, StepTerms
from piper_ray.model.solution import Solution, Status

Solve = Callable[[tuple[Constraint, ...], float | None], Solution]
"""Solves under further constraints, within a given time per sample."""


def counts_on_one_sum(instance: Instance, plan: Plan) -> bool:
    """Whether a plan with one rank and several microbatches has TMPCs that reduce gradients once a batch."""
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


def solve_each_pass(
    setting: ModeSetting, restrictions: Restrictions, under: tuple[Schedule, StepTerms], solve: Solve, within_s: float
) -> Solution:
    """The best plan that the runtime runs as it is priced, and a lower bound for all such plans."""
    free = solve((), _limit(within_s))
    if free.plan is None or not counts_on_one_sum(setting.instance, free.plan):
        return free
    valued = [
        (setting.worth(restrictions.adding(*further), *under), further)
        for further in _parts(setting.instance, restrictions)
    ]
    best, lower_s, known_s = None, math.inf, within_s
    for worth, further in sorted(valued, key=lambda pair: pair[0]):
        if worth.least_s >= known_s:
            lower_s = min(lower_s, worth.least_s)
            continue
        one = solve(further, _limit(known_s))
        lower_s = min(lower_s, one.lower_bound_s)
        if one.plan is not None and one.time_per_sample_s is not None:
            known_s = min(known_s, one.time_per_sample_s)
            best = one if best is None else min(best, one, key=_preference)
        if one.stopped_by is not None and one.stopped_by.ends_all:
            return replace(best or replace(one, plan=None), lower_bound_s=free.lower_bound_s, stopped_by=one.stopped_by)
    if best is None:
        return replace(free, status=Status.UNKNOWN, plan=None, time_per_sample_s=None, lower_bound_s=lower_s)
    return replace(best, status=Status.FEASIBLE, lower_bound_s=min(lower_s, known_s))


def _limit(within_s: float) -> float | None:
    return None if within_s == math.inf else within_s


def _preference(found: Solution) -> tuple[float, ...]:
    return (found.time_per_sample_s or 0.0, *rank_of(found))


def _parts(instance: Instance, restrictions: Restrictions) -> Iterator[tuple[Constraint, ...]]:
    """Sets of restrictions that together keep every plan whose gradients are reduced once a batch.

    restrictions: those that hold in any case.
    """
    for count in rank_counts(instance, restrictions, 1):
        if count > 1:
            yield (StageCount(count),)
        elif count == 1:
            for degree in {1, instance.microbatches}.intersection(restrictions.data_parallel_degrees(instance)):
                yield StageCount(1), DataParallelDegrees((degree,))
