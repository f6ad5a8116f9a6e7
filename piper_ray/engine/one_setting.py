"""One setting for all layers: the settings that are worth a solve, each a sub-problem."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from piper_ray.cost.schedules import rank_counts, sync_s_per_byte
from piper_ray.cost.shares import HeldLayers, surely_in_flight
from piper_ray.cost.tolerances import MEMORY_TOLERANCE, PROOF
from piper_ray.cost.variants import never_worse, unbeaten
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import Solver, SubProblem, best_of, numbered
from piper_ray.model.cluster import Cluster
from piper_ray.model.constraints import Recompute, SameDegrees
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.one_mode import OneMode
from piper_ray.model.passes import passes_of
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import CHUNKED, FLUSHED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution


class Worth(NamedTuple):
    """Of a setting, a sample in s. about_s: what a plan of equal ranks takes; least_s: no plan takes less. inf: none
    fits."""

    about_s: float
    least_s: float


@dataclass(frozen=True)
class ModeSetting:
    """One mode for all layers. instance: with its TMPCs alone; tables: by tensor-parallel degree, their figures."""

    instance: Instance
    tables: dict[int, FigureTable]

    @property
    def text(self) -> str:
        """The ids of its TMPCs, the commonest first."""
        counts = Counter(tmpc.id for layer in self.instance.layers for row in layer.tmpcs.values() for tmpc in row)
        return ", ".join(tmpc_id for tmpc_id, _ in counts.most_common())

    def on(self, cluster: Cluster) -> ModeSetting:
        """The same on another cluster."""
        return replace(self, instance=self.instance.replace(cluster=cluster))

    def worth(self, restrictions: Restrictions, schedule: Schedule, step: StepTerms) -> Worth:
        """What may be had of it. restrictions: the others."""
        return _worth(self.tables, self.instance, restrictions, _Terms(schedule, step))

    def never_loses(self, other: ModeSetting) -> bool:
        """Whether each plan of the other one is one of this, at no more cost, with some TMPCs changed for others."""
        for t, theirs in other.tables.items():
            if t not in self.tables or (self.tables[t].totals > theirs.totals * (1.0 + PROOF)).any():
                return False
        return _never_loses(self.instance, other.instance)


class Settings(NamedTuple):
    """worth_a_solve: but for those that another one never loses to. others: those with a TMPC for each layer."""

    worth_a_solve: tuple[ModeSetting, ...]
    others: tuple[ModeSetting, ...]

    def above(self, other: ModeSetting) -> ModeSetting:
        """That never loses to one of the others."""
        return next(one for one in self.worth_a_solve if one.never_loses(other))


def solve_one_setting(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """The best of all settings but those that another one never loses to."""
    restrictions = request.restrictions.without(OneMode)
    settings = settings_of(request.instance, request.restrictions).worth_a_solve
    valued = sorted(
        ((one.worth(restrictions, schedule, request.step), one) for one in settings), key=lambda pair: pair[0]
    )
    named = numbered("one setting for all layers", [one.text for _, one in valued])
    parts = [
        SubProblem(worth.least_s, replace(request, instance=one.instance, restrictions=restrictions), name)
        for (worth, one), name in zip(valued, named, strict=True)
    ]
    return best_of(request, parts, solve)


def settings_of(instance: Instance, restrictions: Restrictions) -> Settings:
    """The plainest first. restrictions: with their ``OneMode``."""
    figures, listed = _LayerFigures(instance), list[ModeSetting]()
    for constraint in restrictions.constraints:
        if isinstance(constraint, OneMode):
            for narrowed in constraint.under_each(instance, constraint.modes(instance)):
                by_rule = narrowed if constraint.by_layer else _under_rule(restrictions.recompute, instance, narrowed)
                listed.append(ModeSetting(by_rule, figures.tables(by_rule)))
    kept = unbeaten(listed, ModeSetting.never_loses)
    places = {id(one) for one in kept}
    others = [one for one in listed if one.tables and id(one) not in places]
    return Settings(kept, tuple(others))


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


def worth_of(
    instance: Instance, restrictions: Restrictions, schedule: Schedule, step: StepTerms = StepTerms()
) -> Worth:
    """Of all plans of an instance."""
    return _worth(_LayerFigures(instance).tables(instance), instance, restrictions, _Terms(schedule, step))


def _worth(tables: dict[int, FigureTable], instance: Instance, restrictions: Restrictions, under: _Terms) -> Worth:
    """Where plans have not one d and one t for all stages, all devices together do the work."""
    if not under.schedule.asynchronous or restrictions.has(SameDegrees):
        found = [
            _worth_at(table, t, instance, restrictions, under)
            for t, table in tables.items()
            if restrictions.admits_tensor_parallel_degree(t)
        ]
        about_s, least_s = (min((one[index] for one in found), default=math.inf) for index in range(2))
        return Worth(about_s, least_s)
    device_s, degrees = 0.0, [t for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    for layer in instance.layers:
        rows = [(t, tmpc.time_per_sample_s) for t in degrees for tmpc in layer.tmpcs.get(t, ())]
        device_s += min((t * time_s for t, time_s in rows), default=math.inf)
    return Worth(device_s / instance.devices, device_s / instance.devices)


_FIGURES = (
    "time_per_sample_s",
    "activation_bytes",
    "fixed_bytes",
    "shared_bytes",
    "weights_bytes",
    "least_data_parallel_degree",
)
_TIME, _ACTIVATION, _FIXED, _SHARED, _WEIGHTS, _NEEDED = range(len(_FIGURES))


@dataclass(frozen=True)
class FigureTable:
    """The TMPCs of all layers at one degree. rows: float64[kind of layer, TMPC, figure], inf where a layer has fewer;
    counts: float64[kind of layer], how many layers have these figures."""

    rows: FloatArray
    counts: FloatArray

    @cached_property
    def totals(self) -> FloatArray:
        """float64[figure], sums over layers of the least of each figure that ``never_worse`` compares: memory with one
        microbatch in flight, for many replicas and for one."""
        held = self.rows[:, :, _ACTIVATION] + self.rows[:, :, _FIXED]
        plain = self.rows[:, :, [_TIME, _ACTIVATION, _WEIGHTS]]
        every = np.concatenate([plain, held[:, :, None], (held + self.rows[:, :, _SHARED])[:, :, None]], axis=2)
        found: FloatArray = self.counts @ every.min(axis=1)
        return found


class _LayerFigures:
    """The figures of an instance's TMPCs, looked up once for all settings, which have some of them each."""

    def __init__(self, instance: Instance) -> None:
        self._known: dict[tuple[float, ...], int] = {}
        self._place: dict[int, int] = {}  # of a TMPC of the instance, which outlives its settings, by identity
        for layer in instance.layers:
            for row in layer.tmpcs.values():
                for tmpc in row:
                    figures = tuple(getattr(tmpc, name) for name in _FIGURES)
                    self._place[id(tmpc)] = self._known.setdefault(figures, len(self._known))
        self._figures = np.array([*self._known, (math.inf,) * len(_FIGURES)])

    def tables(self, instance: Instance) -> dict[int, FigureTable]:
        """Of those degrees at which each layer has a TMPC. instance: has none but those of the whole one."""
        found = {}
        for t in instance.degrees:
            rows = Counter(tuple(self._place[id(tmpc)] for tmpc in layer.tmpcs.get(t, ())) for layer in instance.layers)
            if () in rows:
                continue
            most = max(map(len, rows))
            places = np.array([row + (-1,) * (most - len(row)) for row in rows])
            found[t] = FigureTable(self._figures[places], np.array(list(rows.values()), float))
        return found


def _worth_at(table: FigureTable, t: int, instance: Instance, restrictions: Restrictions, under: _Terms) -> Worth:
    """Of plans with that t in all stages."""
    memory_bytes = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)
    batch, schedule = instance.microbatches, under.schedule
    in_flight, fill = (1.5, 0.5) if schedule.name in CHUNKED else (1.0, 1.0)  # with two chunks on each rank
    about_s = least_s = math.inf
    for d in restrictions.data_parallel_degrees(instance):
        counts = rank_counts(instance, restrictions, d * t)
        if not counts:
            continue
        of_d, m = _OfReplicas.of(table, d), batch // d
        if not of_d.held_bytes.max() <= memory_bytes:
            continue
        work_s = of_d.total(_TIME)
        sum_s = 0.0 if schedule.asynchronous else sync_s_per_byte(under.step, instance.cluster, d, t)
        batch_s = of_d.least_batch_s(counts[-1], m, schedule, sum_s, memory_bytes)
        least_s = min(least_s, batch_s / batch)
        if batch_s == math.inf:
            continue
        ranks = np.array(counts)
        kept_bytes = of_d.total(_FIXED) / ranks
        in_flight_bytes = of_d.total(_ACTIVATION) * np.minimum(m, in_flight * ranks) / ranks
        sums_s = 4.0 * (d - 1) / d * of_d.total(_WEIGHTS) / ranks / instance.bandwidth_bytes_per_s
        step_s = (m + fill * (ranks - 1)) * work_s / ranks + sums_s
        fitting = kept_bytes + in_flight_bytes <= memory_bytes
        about_s = min(about_s, float(np.where(fitting, step_s, math.inf).min()) / batch)
    return Worth(about_s, least_s * (1.0 - PROOF))


class _Terms(NamedTuple):
    """What a batch's time depends on besides the stages."""

    schedule: Schedule
    step: StepTerms


@dataclass(frozen=True)
class _OfReplicas:
    """The figures for d replicas, with what they share out under fixed bytes. rows: float64[kind of layer, TMPC,
    figure]; least: float64[kind of layer, figure], of each by itself; counts: as ``FigureTable`` has them."""

    least: FloatArray
    rows: FloatArray
    counts: FloatArray

    @classmethod
    def of(cls, table: FigureTable, d: int) -> _OfReplicas:
        rows = np.where(table.rows[:, :, _NEEDED, None] <= d, table.rows, math.inf)
        rows[:, :, _FIXED] += rows[:, :, _SHARED] / d
        return cls(rows.min(axis=1), rows, table.counts)

    def total(self, figure: int) -> float:
        """Over all layers."""
        return float(self.counts @ self.least[:, figure])

    @property
    def held_bytes(self) -> FloatArray:
        """float64[kind of layer], with one microbatch in flight."""
        found: FloatArray = (self.rows[:, :, _ACTIVATION] + self.rows[:, :, _FIXED]).min(axis=1)
        return found

    def least_batch_s(self, ranks: int, m: int, schedule: Schedule, sum_s: float, memory_bytes: float) -> float:
        """No batch of m microbatches takes less on so many ranks, or fewer; inf: none fits. sum_s: of the gradients of
        each byte of a rank's weights.

        Under a flush without chunks the stages before one have each passed a microbatch on before it begins, and go
        backwards through one after it ends: with stage times x_1 .. x_p the batch takes T >= x_1 + .. + x_(q-1) + m x_q
        for each q. So what is left of T behind the first q stages, which is T - x_1 - .. - x_q, is at least (1 - 1/m)
        of what is left behind q - 1, and T - w >= (1 - 1/m)^p T.
        """
        work_s = self.total(_TIME)
        shared_out_s = self._shared_out_s(ranks, m, schedule, sum_s, memory_bytes)
        if schedule.asynchronous:
            return shared_out_s
        if schedule.name in FLUSHED:
            return max(shared_out_s, work_s / (1.0 - (1.0 - 1.0 / m) ** ranks))
        return max(shared_out_s, work_s if schedule.name is ScheduleName.INTERLEAVED else 0.0)

    def _shared_out_s(self, ranks: int, m: int, schedule: Schedule, sum_s: float, memory_bytes: float) -> float:
        flight = surely_in_flight(schedule, ranks, m)
        if schedule.name is ScheduleName.INTERLEAVED:  # with fewer ranks it may be less, but no less than this
            flight = np.minimum(flight, np.arange(ranks, 0, -1.0))
        seconds = m * self.least[:, _TIME] + sum_s * self.least[:, _WEIGHTS]
        held = HeldLayers(self.counts, seconds, self.rows[:, :, _FIXED], self.rows[:, :, _ACTIVATION])
        return held.least_s(flight, memory_bytes)


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
    if one is other:
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
