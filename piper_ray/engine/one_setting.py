"""``OneSetting`` kept by other solves: one for each setting that may be the best, those of the least bound first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from piper_ray.cost.tolerances import MEMORY_TOLERANCE, PROOF
from piper_ray.cost.variants import never_worse
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.several import Solver, best_of
from piper_ray.model.constraints import SameDegrees
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.passes import passes_of
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.settings import OneSetting
from piper_ray.model.solution import Solution


class _Part(NamedTuple):
    """A setting's instance. least_s: no plan of it takes less a sample; inf: there is none."""

    least_s: float
    instance: Instance


def solve_one_setting(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """The best of all settings but those that another one never loses to."""
    restrictions = request.restrictions.without(OneSetting)
    parts = [
        _Part(least_s(instance, restrictions, schedule), instance)
        for constraint in request.restrictions.constraints
        if isinstance(constraint, OneSetting)
        for instance in constraint.under_each(request.instance, constraint.settings(request.instance))
    ]
    found: list[_Part] = []
    for part in sorted(parts, key=lambda part: part.least_s):  # of equal ones the plainest first
        if not any(_never_loses(other.instance, part.instance) for other in found):
            found = [*(other for other in found if not _never_loses(part.instance, other.instance)), part]
    requests = [(part.least_s, replace(request, instance=part.instance, restrictions=restrictions)) for part in found]
    return best_of(request, requests, solve, "one setting for all layers")


def least_s(instance: Instance, restrictions: Restrictions, schedule: Schedule) -> float:
    """No plan takes less a sample, in s; inf where none fits into the cluster's memory.

    With one d and one t the busiest of p ranks does at least a p-th of a microbatch's work, m = N / d times, and under
    a flush the first microbatch has gone through all layers before the batch is done. Without, all devices together do
    the work.
    """
    degrees = [t for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    if not schedule.asynchronous or restrictions.has(SameDegrees):
        able = [t for t in degrees if all(layer.tmpcs.get(t) for layer in instance.layers)]
        return min((_least_at_s(instance, restrictions, schedule, t) for t in able), default=math.inf)
    device_s = 0.0
    for layer in instance.layers:
        rows = [(t, tmpc.time_per_sample_s) for t in degrees for tmpc in layer.tmpcs.get(t, ())]
        device_s += min((t * time_s for t, time_s in rows), default=math.inf)
    return device_s / instance.devices


def _least_at_s(instance: Instance, restrictions: Restrictions, schedule: Schedule, t: int) -> float:
    """Of plans with that t in all stages."""
    rows = [layer.tmpcs[t] for layer in instance.layers]
    most = max(map(len, rows))

    def figures(name: str) -> FloatArray:
        """float64[layer, TMPC]; inf where a layer has fewer."""
        table = np.full((len(rows), most), math.inf)
        for index, row in enumerate(rows):
            table[index, : len(row)] = [getattr(tmpc, name) for tmpc in row]
        return table

    time_s, needed_d = figures("time_per_sample_s"), figures("least_data_parallel_degree")
    alone_bytes, shared_bytes = figures("fixed_bytes") + figures("activation_bytes"), figures("shared_bytes")
    memory_bytes, found_s = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE), math.inf
    for d in restrictions.data_parallel_degrees(instance):
        ranks = min(instance.devices // (d * t), restrictions.stage_count or len(rows), len(rows))
        if ranks == 0:
            continue
        able = needed_d <= d
        held_bytes = np.where(able, alone_bytes + shared_bytes / d, math.inf).min(axis=1)
        if held_bytes.max() > memory_bytes or held_bytes.sum() > ranks * memory_bytes:
            continue
        work_s = float(np.where(able, time_s, math.inf).min(axis=1).sum())
        found_s = min(
            found_s, max(work_s / (d * ranks), 0.0 if schedule.asynchronous else work_s / instance.microbatches)
        )
    return found_s * (1.0 - PROOF)


def _never_loses(one: Instance, other: Instance) -> bool:
    """Whether each plan of ``other`` is one of ``one``, at no more cost, with some of its TMPCs changed for others."""
    return all(
        any(_as_good(better, tmpc) for better in mine.tmpcs.get(t, ()))
        for mine, layer in zip(one.layers, other.layers, strict=True)
        for t, row in layer.tmpcs.items()
        for tmpc in row
    )


def _as_good(one: Tmpc, other: Tmpc) -> bool:
    """In every stage, under any schedule."""
    if one == other:
        return True
    mine, theirs = passes_of(one), passes_of(other)
    split = mine.weight_s == theirs.weight_s is None
    if mine.weight_s is not None and theirs.weight_s is not None:
        inputs_s = mine.backward_s - mine.weight_s, theirs.backward_s - theirs.weight_s
        split = mine.weight_s <= theirs.weight_s and inputs_s[0] <= inputs_s[1]
    return (
        split
        and mine.forward_s <= theirs.forward_s
        and mine.backward_s <= theirs.backward_s
        and one.least_data_parallel_degree <= other.least_data_parallel_degree
        and never_worse(one, other)
    )
