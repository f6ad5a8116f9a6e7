"""One setting for all layers: the settings that are worth a solve, each a sub-problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from piper_ray.cost.tolerances import MEMORY_TOLERANCE, PROOF
from piper_ray.cost.variants import never_worse, unbeaten
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import Solver, SubProblem, best_of, numbered
from piper_ray.model.constraints import Recompute, SameDegrees
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.one_mode import OneMode
from piper_ray.model.passes import passes_of
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.model.solution import Solution


class Worth(NamedTuple):
    """Of a setting, a sample in s. about_s: what a plan of equal ranks takes; least_s: no plan takes less. inf: none
    fits."""

    about_s: float
    least_s: float


class _Setting(NamedTuple):
    """A setting's instance and what may be had of it."""

    worth: Worth
    instance: Instance


def solve_one_setting(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """The best of all settings but those that another one never loses to."""
    restrictions = request.restrictions.without(OneMode)
    instances = (
        instance if constraint.by_layer else _under_rule(restrictions.recompute, request.instance, instance)
        for constraint in request.restrictions.constraints
        if isinstance(constraint, OneMode)
        for instance in constraint.under_each(request.instance, constraint.modes(request.instance))
    )
    settings = [_Setting(worth_of(instance, restrictions, schedule), instance) for instance in instances]
    plainest_first = sorted(settings, key=lambda one: one.worth)  # of equal ones
    found = unbeaten(plainest_first, lambda one, other: _never_loses(one.instance, other.instance))
    named = numbered("one setting for all layers", [", ".join(_ids(one.instance)) for one in found])
    parts = [
        SubProblem(one.worth.least_s, replace(request, instance=one.instance, restrictions=restrictions), name)
        for one, name in zip(found, named, strict=True)
    ]
    return best_of(request, parts, solve)


def _under_rule(rule: Recompute, whole: Instance, narrowed: Instance) -> Instance:
    """The setting's instance without the degrees at which it breaks the rule of recomputation.

    The rule speaks of layers that have the choice, and in the setting's instance none has it any more.
    """
    if rule is Recompute.AUTO:
        return narrowed
    made: dict[int, set[bool]] = {}
    for layer, own in zip(whole.layers, narrowed.layers, strict=True):
        for t, row in own.tmpcs.items():
            if len({tmpc.recompute for tmpc in layer.tmpcs[t]}) > 1:
                made.setdefault(t, set()).update(tmpc.recompute for tmpc in row)
    allowed = {Recompute.ALWAYS: {True}, Recompute.NEVER: {False}}.get(rule)
    broken = {t for t, found in made.items() if len(found) > 1 or (allowed is not None and not found <= allowed)}
    if not broken:
        return narrowed
    layers = tuple(
        replace(layer, tmpcs={t: row for t, row in layer.tmpcs.items() if t not in broken}) for layer in narrowed.layers
    )
    found = replace(narrowed, layers=layers)
    if narrowed.checked:
        found.mark_checked()
    return found


def _ids(instance: Instance) -> Iterator[str]:
    """Those of the TMPCs, the commonest first."""
    counts = Counter(tmpc.id for layer in instance.layers for row in layer.tmpcs.values() for tmpc in row)
    return (tmpc_id for tmpc_id, _ in counts.most_common())


def worth_of(instance: Instance, restrictions: Restrictions, schedule: Schedule) -> Worth:
    """With one d and one t the busiest of p ranks does at least a p-th of a microbatch's work, m = N / d times, and
    under a flush the first microbatch has gone through all layers before the batch is done. Without, all devices
    together do the work.
    """
    degrees = [t for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    if not schedule.asynchronous or restrictions.has(SameDegrees):
        able = [t for t in degrees if all(layer.tmpcs.get(t) for layer in instance.layers)]
        found = [_worth_at(instance, restrictions, schedule, t) for t in able]
        about_s, least_s = (min((one[index] for one in found), default=math.inf) for index in range(2))
        return Worth(about_s, least_s)
    device_s = 0.0
    for layer in instance.layers:
        rows = [(t, tmpc.time_per_sample_s) for t in degrees for tmpc in layer.tmpcs.get(t, ())]
        device_s += min((t * time_s for t, time_s in rows), default=math.inf)
    return Worth(device_s / instance.devices, device_s / instance.devices)


def _worth_at(instance: Instance, restrictions: Restrictions, schedule: Schedule, t: int) -> Worth:
    """Of plans with that t in all stages."""
    rows = [layer.tmpcs[t] for layer in instance.layers]
    most = max(map(len, rows))

    def figures(name: str) -> FloatArray:
        """float64[layer, TMPC]; inf where a layer has fewer."""
        table = np.full((len(rows), most), math.inf)
        for index, row in enumerate(rows):
            table[index, : len(row)] = [getattr(tmpc, name) for tmpc in row]
        return table

    time_s, needed_d, weights_bytes = map(figures, ("time_per_sample_s", "least_data_parallel_degree", "weights_bytes"))
    activation_bytes, fixed_bytes, shared_bytes = map(figures, ("activation_bytes", "fixed_bytes", "shared_bytes"))
    memory_bytes, batch = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE), instance.microbatches
    in_flight, fill = (1.5, 0.5) if schedule.name in CHUNKED else (1.0, 1.0)  # with two chunks on each rank
    about_s = least_s = math.inf
    for d in restrictions.data_parallel_degrees(instance):
        most_ranks = min(instance.devices // (d * t), restrictions.stage_count or len(rows), len(rows))
        if most_ranks == 0:
            continue
        able = needed_d <= d

        def least(table: FloatArray, able: NDArray[np.bool_] = able) -> FloatArray:
            found: FloatArray = np.where(able, table, math.inf).min(axis=1)
            return found

        held_bytes = least(activation_bytes + fixed_bytes + shared_bytes / d)
        if held_bytes.max() > memory_bytes or held_bytes.sum() > most_ranks * memory_bytes:
            continue
        work_s = float(least(time_s).sum())
        least_s = min(least_s, max(work_s / (d * most_ranks), 0.0 if schedule.asynchronous else work_s / batch))
        ranks, m = np.arange(1, most_ranks + 1), batch // d
        kept_bytes = float(least(fixed_bytes + shared_bytes / d).sum()) / ranks
        in_flight_bytes = float(least(activation_bytes).sum()) * np.minimum(m, in_flight * ranks) / ranks
        sums_s = 4.0 * (d - 1) / d * float(least(weights_bytes).sum()) / ranks / instance.bandwidth_bytes_per_s
        step_s = (m + fill * (ranks - 1)) * work_s / ranks + sums_s
        fitting = kept_bytes + in_flight_bytes <= memory_bytes
        about_s = min(about_s, float(np.where(fitting, step_s, math.inf).min()) / batch)
    return Worth(about_s, least_s * (1.0 - PROOF))


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
