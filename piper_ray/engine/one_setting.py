"""One setting for all layers: selects the settings that are worth a solve. Each is a sub-problem."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.cost.products import dot
from piper_ray.cost.schedules import choices_of_kinds, rank_counts, sync_s_per_byte
from piper_ray.cost.shares import HeldLayers, surely_in_flight
from piper_ray.cost.tolerances import MEMORY_TOLERANCE, PROOF
from piper_ray.cost.variants import never_worse, unbeaten
from piper_ray.engine.flush.paths import fits_in_order, room
from piper_ray.engine.flush.tasks import TASK_CODES
from piper_ray.engine.kernels.flush_mixes import share_rooms
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import Solver, SubProblem, best_of, instances, numbered
from piper_ray.model.cluster import Cluster
from piper_ray.model.constraints import Recompute, Restrictions, SameDegrees
from piper_ray.model.instance import Instance, Layer, MovedRows, Tmpc
from piper_ray.model.one_mode import OneMode
from piper_ray.model.passes import passes_of
from piper_ray.model.schedule import CHUNKED, FLUSHED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution


class Worth(NamedTuple):
    """Times per sample of a setting, in s; inf: no plan fits. about_s: the estimate for a plan of equal ranks. least_s:
    a lower bound for all plans."""

    about_s: float
    least_s: float


@dataclass(frozen=True)
class AlikeLayers:
    """Groups layers that differ only in their places. sample: the instance with one layer of each group ("kind of
    layer"). places: those of all layers of each kind."""

    whole: Instance
    sample: Instance
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, whole: Instance) -> AlikeLayers:
        """Returns the kinds of layers, in the order of their first layers."""
        found: dict[object, list[int]] = {}
        rows: dict[int, int] = {}  # their number, by the identity of the layer that they were made for
        numbers: dict[object, int] = {}
        for place, layer in enumerate(whole.layers):
            if (key := id(layer.priced)) not in rows:
                rows[key] = numbers.setdefault(_rows_seen_from(layer.priced), len(numbers))
            found.setdefault((layer.experts, layer.key_heads, rows[key]), []).append(place)
        first = tuple(whole.layers[places[0]] for places in found.values())
        sample = replace(whole, layers=first, edges=(), tensors=()).checked_as(whole)
        return cls(whole, sample, tuple(map(tuple, found.values())))

    @cached_property
    def counts(self) -> FloatArray:
        """float64[kind]: the number of layers of each kind."""
        return np.array([len(places) for places in self.places], float)

    @cached_property
    def kind_of(self) -> npt.NDArray[np.intp]:
        """int[layer]: the kind of each layer."""
        found = np.zeros(len(self.whole.layers), np.intp)
        for kind, places in enumerate(self.places):
            found[list(places)] = kind
        return found

    @cached_property
    def is_chain(self) -> bool:
        """Whether each layer feeds the next one."""
        edges = {(edge.source, edge.target) for edge in self.whole.edges}
        return all((one.id, other.id) in edges for one, other in pairwise(self.whole.layers))

    def in_all(self, narrowed: Instance) -> Instance:
        """Returns the whole instance, with the TMPCs that a narrowed sample leaves to each kind of layer."""
        layers = list(self.whole.layers)
        for own, places in zip(narrowed.layers, self.places, strict=True):
            for place in places:
                layer = layers[place]
                layers[place] = layer.having(MovedRows(own, layer.id - own.id))
        return replace(self.whole, layers=tuple(layers)).checked_as(self.whole)


_FIGURES = (
    "time_per_sample_s",
    "activation_bytes",
    "fixed_bytes",
    "shared_bytes",
    "weights_bytes",
    "least_data_parallel_degree",
)
_TIME, _ACTIVATION, _FIXED, _SHARED, _WEIGHTS, _NEEDED = range(len(_FIGURES))
_TOTALS = 5
_figures_of = attrgetter(*_FIGURES)
_all_of = attrgetter(*_FIGURES, "id", "kind", "recompute", "forward_s", "backward_s", "weight_s")


def _rows_seen_from(layer: Layer) -> tuple[object, ...]:
    """Returns all TMPCs of a layer in comparable form. Neighbours are given by their distance from the layer."""
    known: dict[int, tuple[object, ...]] = {}  # by the identity of a table, which many TMPCs share

    def seen(sizes: Mapping[int, float]) -> tuple[object, ...]:
        if id(sizes) not in known:
            known[id(sizes)] = tuple([(end - layer.id, size) for end, size in sizes.items()])
        return known[id(sizes)]

    return tuple(
        (t, *((*_all_of(x), id(x.mode), seen(x.forward_sync_bytes), seen(x.backward_sync_bytes)) for x in row))
        for t, row in layer.tmpcs.items()
    )


@dataclass(frozen=True)
class ModeSetting:
    """One mode for all layers. sample: the kinds' sample with only the mode's TMPCs. tables: their figures, by
    tensor-parallel degree."""

    kinds: AlikeLayers
    sample: Instance
    tables: dict[int, FigureTable]

    @cached_property
    def instance(self) -> Instance:
        """The instance with all layers and only the mode's TMPCs."""
        return self.kinds.in_all(self.sample)

    @cached_property
    def text(self) -> str:
        """The ids of its TMPCs, the most common first."""
        counts = Counter[str]()
        for layer, places in zip(self.sample.layers, self.kinds.places, strict=True):
            for tmpc in chain.from_iterable(layer.tmpcs.values()):
                counts[tmpc.id] += len(places)
        return ", ".join(tmpc_id for tmpc_id, _ in counts.most_common())

    @cached_property
    def spread(self) -> frozenset[tuple[int, int | None, int]]:
        """How its TMPCs spread sequences and experts: everything but recomputation, sharding and sequence
        parallelism."""
        rows = chain.from_iterable(layer.tmpcs.values() for layer in self.sample.layers)
        modes = {id(tmpc.mode): tmpc.mode for tmpc in chain.from_iterable(rows)}
        return frozenset((mode.context, mode.experts, mode.expert_tensor) for mode in modes.values())

    def worth(self, restrictions: Restrictions, schedule: Schedule, step: StepTerms) -> Worth:
        """Returns the estimated and the least time of its plans. restrictions: without ``OneMode``."""
        (found,) = worths_of([self], restrictions, schedule, step)
        return found

    def may_take(self, sample_s: float, restrictions: Restrictions, schedule: Schedule) -> bool:
        """Whether a plan under a flush may take ``sample_s`` or less. False: none does. This follows from stages that
        hold a chain's layers in order, each as many as fit into its memory and the time that is left to it; on several
        kinds of devices, from stages that hold all layers in any order."""
        whole = self.kinds.whole
        if schedule.name not in FLUSHED or schedule.asynchronous:
            return True
        batch_s, memory_bytes = sample_s * whole.microbatches * (1.0 + PROOF), whole.memory_bytes
        if whole.cluster.kinds:
            every = _on_kinds([self], restrictions, schedule)
            return any(one.batch_s[0] <= batch_s and one.may_hold_all(schedule, batch_s) for one in every)
        if not self.kinds.is_chain:
            return True
        for t, table in self.tables.items():
            if not restrictions.admits_tensor_parallel_degree(t):
                continue
            for d in restrictions.data_parallel_degrees(whole):
                if not (counts := rank_counts(whole, restrictions, d * t)):
                    continue
                m, ranks = whole.microbatches // d, counts[-1]
                least = _OfReplicas.of(table.rows[None], table.counts, d).least[0, self.kinds.kind_of]
                if (left_s := batch_s - least[:, _TIME].sum()) < 0.0:  # of layers that cannot run so, too
                    continue
                shares = room(TASK_CODES[schedule.name], m, ranks)
                if shares.size and left_s * shares[-1] < (batch_s - left_s) * (1.0 - PROOF):  # for any memory
                    continue
                if not shares.size or fits_in_order(
                    least[::-1, _TIME],
                    least[::-1, [_FIXED, _ACTIVATION]],
                    left_s * np.diff(shares),
                    surely_in_flight(schedule, ranks, m)[::-1],
                    memory_bytes * (1.0 + MEMORY_TOLERANCE),
                ):
                    return True
        return False


@dataclass(frozen=True)
class ChangedSetting(ModeSetting):
    """A mode whose TMPCs have changed figures. sample: without the change. tables: with it. change: maps each TMPC of
    an instance to another or to none."""

    change: Callable[[Instance], Instance]

    @cached_property
    def instance(self) -> Instance:
        """The instance with all layers and only the mode's TMPCs, changed."""
        return self.change(self.kinds.in_all(self.sample))


def changed(settings: Sequence[ModeSetting], change: Callable[[Instance], Instance]) -> list[ModeSetting]:
    """Returns these settings of one instance with the change. It is made for all layers when a setting is solved."""
    if not settings:
        return []
    kinds = settings[0].kinds
    made = _with_tables(kinds, [change(one.sample) for one in settings])
    return [ChangedSetting(kinds, one.sample, own.tables, change) for one, own in zip(settings, made, strict=True)]


def together(settings: Sequence[ModeSetting]) -> ModeSetting:
    """Returns a setting in which each layer may run what any of these settings of one instance allows, so that it has
    all their plans."""
    first, layers = settings[0], []
    for own in zip(*(one.sample.layers for one in settings), strict=True):
        rows: dict[int, dict[int, Tmpc]] = {}
        for t, row in chain.from_iterable(layer.tmpcs.items() for layer in own):
            rows.setdefault(t, {}).update((id(tmpc), tmpc) for tmpc in row)
        layers.append(own[0].having({t: tuple(rows[t].values()) for t in sorted(rows)}))
    sample = replace(first.sample, layers=tuple(layers)).checked_as(first.sample)
    found = _with_tables(first.kinds, [sample])
    return (changed(found, first.change) if isinstance(first, ChangedSetting) else found)[0]


class Settings(NamedTuple):
    """The settings of an instance. worth_a_solve: those that no other setting dominates, each without degrees at which
    an earlier one has the same TMPCs. others: the dominated ones that have a TMPC for each layer, each with one that
    dominates it."""

    worth_a_solve: tuple[ModeSetting, ...]
    others: tuple[tuple[ModeSetting, ModeSetting], ...]

    def on(self, instance: Instance) -> Settings:
        """Returns the same settings of an instance that differs only in its cluster."""
        if not self.worth_a_solve:
            return self
        kinds = replace(self.worth_a_solve[0].kinds, whole=instance)
        kept = {id(one): replace(one, kinds=kinds) for one in self.worth_a_solve}
        others = tuple((replace(one, kinds=kinds), kept[id(better)]) for one, better in self.others)
        return Settings(tuple(kept.values()), others)


def solve_one_setting(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """Returns the best plan of all settings that no other one dominates."""
    restrictions = request.restrictions.without(OneMode)
    settings = settings_of(request.instance, request.restrictions).worth_a_solve
    worths = worths_of(settings, restrictions, schedule, request.step)
    valued = sorted(zip(worths, settings, strict=True), key=lambda pair: pair[0])
    named = numbered("one setting for all layers", [one.text for _, one in valued])
    parts = [
        SubProblem(worth.least_s, replace(request, instance=one.instance, restrictions=restrictions), name)
        for (worth, one), name in zip(valued, named, strict=True)
    ]
    return best_of(request, parts, solve)


def settings_of(instance: Instance, restrictions: Restrictions) -> Settings:
    """Returns the settings, the plainest first. restrictions: with their ``OneMode``."""
    kinds, samples = AlikeLayers.of(instance), list[Instance]()
    for constraint in restrictions.constraints:
        if isinstance(constraint, OneMode):
            for narrowed in constraint.under_each(kinds.sample, constraint.modes(kinds.sample)):
                by_layer = constraint.by_layer
                samples.append(narrowed if by_layer else _under_rule(restrictions.recompute, kinds.sample, narrowed))
    listed = _with_tables(kinds, samples)
    missing = np.full(_TOTALS, math.inf)
    totals = np.array(
        [[one.tables[t].totals if t in one.tables else missing for t in kinds.sample.degrees] for one in listed]
    ).reshape(len(listed), -1)
    may_be_as_good = [np.all(totals <= theirs * (1.0 + PROOF), axis=1) for theirs in totals]

    def never_loses(mine: int, theirs: int) -> bool:
        return bool(may_be_as_good[theirs][mine]) and _never_loses(listed[mine].sample, listed[theirs].sample)

    kept = unbeaten(range(len(listed)), never_loses)
    own = dict(zip(kept, _without_twins(listed[number] for number in kept), strict=True))
    others = [
        (one, own[next(better for better in kept if never_loses(better, number))])
        for number, one in enumerate(listed)
        if one.tables and number not in own
    ]
    return Settings(tuple(own.values()), tuple(others))


def _without_twins(settings: Iterable[ModeSetting]) -> Iterator[ModeSetting]:
    """Drops degrees at which an earlier setting has the same TMPCs; at t = 1, for example, there is no sequence
    parallelism."""
    seen = set[tuple[object, ...]]()
    for one in settings:
        rows = {t: (t, *(tuple(map(id, layer.tmpcs[t])) for layer in one.sample.layers)) for t in one.tables}
        new = [t for t, row in rows.items() if row not in seen]
        seen.update(rows.values())
        if not new or len(new) == len(one.tables):
            yield one
            continue
        twins = one.tables.keys() - set(new)
        yield replace(one, sample=_without(one.sample, twins), tables={t: one.tables[t] for t in new})


def _without(narrowed: Instance, degrees: Collection[int]) -> Instance:
    layers = (layer.having({t: row for t, row in layer.tmpcs.items() if t not in degrees}) for layer in narrowed.layers)
    return replace(narrowed, layers=tuple(layers)).checked_as(narrowed)


def _with_tables(kinds: AlikeLayers, samples: Sequence[Instance]) -> list[ModeSetting]:
    """Returns settings whose tables have equally many TMPCs. samples: narrowed ones of the kinds."""
    widths = Counter[int]()
    for sample in samples:
        for t, row in chain.from_iterable(layer.tmpcs.items() for layer in sample.layers):
            widths[t] = max(widths[t], len(row))
    found = []
    for sample in samples:
        tables = {
            t: FigureTable(_padded([layer.tmpcs[t] for layer in sample.layers], widths[t]), kinds.counts)
            for t in sample.degrees
            if all(layer.tmpcs.get(t) for layer in sample.layers)
        }
        found.append(ModeSetting(kinds, sample, tables))
    return found


def _padded(rows: Sequence[Sequence[Tmpc]], width: int) -> FloatArray:
    """Returns float64[row, TMPC, figure], padded with inf."""
    found = np.full((len(rows), width, len(_FIGURES)), math.inf)
    for number, row in enumerate(rows):
        if row:
            found[number, : len(row)] = [_figures_of(tmpc) for tmpc in row]
    return found


def _under_rule(rule: Recompute, whole: Instance, narrowed: Instance) -> Instance:
    """Returns the setting's instance without the degrees at which it violates the rule of recomputation.

    The rule is about layers that have the choice; in the setting's instance no layer has it any more.
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
    return _without(narrowed, broken) if broken else narrowed


def worth_of(
    instance: Instance, restrictions: Restrictions, schedule: Schedule, step: StepTerms = StepTerms()
) -> Worth:
    """Returns the estimated and the least time of all plans of an instance."""
    kinds = AlikeLayers.of(instance)
    (found,) = worths_of(_with_tables(kinds, [kinds.sample]), restrictions, schedule, step)
    return found


def worths_of(
    settings: Sequence[ModeSetting], restrictions: Restrictions, schedule: Schedule, step: StepTerms
) -> list[Worth]:
    """Returns the estimated and the least time for each setting of one instance. restrictions: without ``OneMode``.

    Unless all stages have one d and one t, all devices are assumed to share the work. The same holds under PipeDream's
    schedule, where a stage may hold fewer versions of its weights than its fixed memory includes.
    """
    if schedule.name is ScheduleName.PIPEDREAM or (schedule.asynchronous and not restrictions.has(SameDegrees)):
        return [_on_all_devices(one, restrictions) for one in settings]
    found, under = np.full((len(settings), 2), math.inf), _Terms(schedule, step)
    if settings and settings[0].kinds.whole.cluster.kinds:
        return [Worth(*pair) for pair in _worths_on_kinds(settings, restrictions, under).tolist()]
    tried = list[_AtDegrees]()
    for t in settings[0].kinds.whole.degrees if settings else ():
        able = [number for number, one in enumerate(settings) if t in one.tables]
        if able and restrictions.admits_tensor_parallel_degree(t):
            rows = np.stack([settings[number].tables[t].rows for number in able])
            tried += _at_degrees(np.array(able), rows, t, settings[0].kinds, restrictions, under)
    for one in sorted(tried, key=lambda one: one.quick_s.min()):
        one.improve(found, under.schedule)
    return [Worth(*pair) for pair in found.tolist()]


def _on_all_devices(one: ModeSetting, restrictions: Restrictions) -> Worth:
    device_s, whole = 0.0, one.kinds.whole
    degrees = [t for t in whole.degrees if restrictions.admits_tensor_parallel_degree(t)]
    for layer, places in zip(one.sample.layers, one.kinds.places, strict=True):
        rows = [(t, tmpc.time_per_sample_s) for t in degrees for tmpc in layer.tmpcs.get(t, ())]
        device_s += len(places) * min((t * time_s for t, time_s in rows), default=math.inf)
    return Worth(device_s / whole.devices, device_s / whole.devices)


@dataclass(frozen=True)
class FigureTable:
    """The TMPCs of all layers at one degree. rows: float64[kind of layer, TMPC, figure], inf where a layer has fewer.
    counts: float64[kind of layer], the number of layers."""

    rows: FloatArray
    counts: FloatArray

    @cached_property
    def totals(self) -> FloatArray:
        """float64[figure]: sums over layers of the least of each figure that ``never_worse`` compares. Memory is with
        one microbatch in flight, for many replicas and for one."""
        held = self.rows[:, :, _ACTIVATION] + self.rows[:, :, _FIXED]
        plain = self.rows[:, :, [_TIME, _ACTIVATION, _WEIGHTS]]
        every = np.concatenate([plain, held[:, :, None], (held + self.rows[:, :, _SHARED])[:, :, None]], axis=2)
        found: FloatArray = dot(self.counts, every.min(axis=1))
        return found


@dataclass(frozen=True)
class _AtDegrees:
    """Plans with one d and one t in all stages. settings: int[one], the numbers of the settings that may have some.
    figures: theirs. counts: the possible numbers of ranks. m: microbatches of a replica. sum_s: seconds to sum the
    gradients per byte of a rank's weights. about_s, quick_s: float64[one], of a sample; the estimate, and a lower bound
    without a look at memory."""

    settings: npt.NDArray[np.intp]
    figures: _OfReplicas
    whole: Instance
    counts: range
    m: int
    sum_s: float
    about_s: FloatArray
    quick_s: FloatArray

    def improve(self, found: FloatArray, schedule: Schedule) -> None:
        """Puts what these plans take into ``found``, float64[setting, 2], the fields of ``Worth``. Memory, which takes
        longer, is looked at only where these plans may take less than what is found."""
        memory_bytes = _memory_bytes(self.whole)
        near = np.flatnonzero(self.quick_s < found[self.settings, 1])
        least_s = self.quick_s.copy()
        if near.size:
            batch_s = self.figures.only(near).least_batch_s(self.counts, self.m, schedule, self.sum_s, memory_bytes)
            least_s[near] = batch_s * (1.0 - PROOF) / self.whole.microbatches
        about_s = np.where(np.isfinite(least_s), self.about_s, math.inf)
        found[self.settings] = np.minimum(found[self.settings], np.stack([about_s, least_s], axis=1))


def _memory_bytes(instance: Instance) -> float:
    return instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)


def _at_degrees(
    settings: npt.NDArray[np.intp],
    rows: FloatArray,
    t: int,
    kinds: AlikeLayers,
    restrictions: Restrictions,
    under: _Terms,
) -> Iterator[_AtDegrees]:
    """Yields the plans with this t for each d. rows: float64[setting, kind of layer, TMPC, figure].

    With chunks, plans that fit a smaller group of devices have its links, and are looked at by themselves.
    """
    schedule, is_chunked = under.schedule, under.schedule.name in CHUNKED
    memory_bytes, batch = _memory_bytes(kinds.whole), kinds.whole.microbatches
    in_flight, fill = (1.5, 0.5) if is_chunked else (1.0, 1.0)  # with two chunks on each rank
    levels = instances(kinds.whole) if is_chunked else (kinds.whole,)
    for instance, d in ((one, d) for one in levels for d in restrictions.data_parallel_degrees(one)):
        counts = rank_counts(instance, restrictions, d * t)
        if not counts:
            continue
        of_d, m = _OfReplicas.of(rows, kinds.counts, d), batch // d
        able = np.flatnonzero(of_d.held_bytes.max(axis=1) <= memory_bytes)
        if not able.size:
            continue
        of_d = of_d.only(able)
        work_s = of_d.total(_TIME)
        fewest = counts[0] if schedule.name in FLUSHED else None  # with fewer of them, replicas are nearer
        sum_s = 0.0 if schedule.asynchronous else sync_s_per_byte(under.step, instance.cluster, d, t, fewest)
        ranks = np.array(counts)
        kept_bytes = of_d.total(_FIXED)[:, None] / ranks
        in_flight_bytes = of_d.total(_ACTIVATION)[:, None] * np.minimum(m, in_flight * ranks) / ranks
        sums_s = 4.0 * (d - 1) / d * of_d.total(_WEIGHTS)[:, None] / ranks / instance.bandwidth_bytes_per_s
        step_s = (m + fill * (ranks - 1)) * work_s[:, None] / ranks + sums_s
        about_s = np.where(kept_bytes + in_flight_bytes <= memory_bytes, step_s, math.inf).min(axis=1) / batch
        quick_s = of_d.quick_batch_s(counts[-1], m, schedule, sum_s) * (1.0 - PROOF) / batch
        yield _AtDegrees(settings[able], of_d, instance, counts, m, sum_s, about_s, quick_s)


def _worths_on_kinds(settings: Sequence[ModeSetting], restrictions: Restrictions, under: _Terms) -> FloatArray:
    """Returns float64[setting, 2], the fields of ``Worth``, on devices of several kinds."""
    instance, schedule = settings[0].kinds.whole, under.schedule
    memory_bytes, found = _memory_bytes(instance), np.full((len(settings), 2), math.inf)
    fewest = 1 if schedule.name in FLUSHED else None
    looked_at = list[tuple[float, _OnKinds, FloatArray]]()
    for one in _on_kinds(settings, restrictions, schedule):
        held = np.minimum.reduce([alone.held_bytes for alone in one.alone]).max(axis=1)
        batch_s = np.where(held <= memory_bytes, one.batch_s, math.inf)
        both_s = np.stack([np.where(_have_room(one), batch_s, math.inf), batch_s], axis=1)
        looked_at.append((batch_s.min(), one, both_s))
    for _, one, both_s in sorted(looked_at, key=itemgetter(0)):
        # First without a look at memory, which takes longer.
        able = np.flatnonzero((both_s / instance.microbatches < found).any(axis=1))
        if able.size:
            sum_s = min(
                sync_s_per_byte(under.step, own, one.d, t, fewest)
                for t, own in zip(one.degrees, one.clusters, strict=True)
            )
            every = _OfReplicas.joined([x.only(able) for x in one.alone])
            batch_s = every.least_batch_s(range(one.ranks, one.ranks + 1), one.m, schedule, sum_s, memory_bytes)
            both_s = np.maximum(both_s[able], batch_s[:, None])
            found[able] = np.minimum(found[able], both_s / instance.microbatches)
    found[:, 1] *= 1.0 - PROOF
    return found


def _on_kinds(settings: Sequence[ModeSetting], restrictions: Restrictions, schedule: Schedule) -> Iterator[_OnKinds]:
    """Yields plans with one d and one t on each kind."""
    kinds = settings[0].kinds
    instance, names = kinds.whole, kinds.whole.cluster.kind_names
    clusters = [instance.cluster.of_kind(name) for name in names]
    degrees = [t for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    rows = {(t, name): _rows_on(settings, t, name) for t in degrees for name in names}
    for d in restrictions.data_parallel_degrees(instance):
        there = [
            [t for t in degrees if d * t <= own.devices and np.isfinite(rows[t, name]).any()]
            for own, name in zip(clusters, names, strict=True)
        ]
        own_rows = {
            (t, name): _OfReplicas.of(rows[t, name], kinds.counts, d)
            for ts, name in zip(there, names, strict=True)
            for t in ts
        }
        for chosen in choices_of_kinds(there, restrictions):
            counts = rank_counts(instance, restrictions, *(d * t for t in chosen))
            used = [(t, name, own) for t, name, own in zip(chosen, names, clusters, strict=True) if t]
            if not counts or not used:
                continue
            m, ranks, alone = instance.microbatches // d, counts[-1], [own_rows[t, name] for t, name, _ in used]
            most = [min(ranks, own.devices // (d * t)) for t, _, own in used]
            seconds = [one.least[..., _TIME] for one in alone]
            batch_s, of_second = _least_on_kinds(seconds, most, kinds.counts, schedule, m, ranks)
            yield _OnKinds(
                d, m, ranks, [t for t, _, _ in used], [own for _, _, own in used], most, alone, batch_s, of_second
            )


class _OnKinds(NamedTuple):
    """Plans with one d and one t on each kind. degrees, clusters, most, alone: for each kind that is used its t, its
    devices, the most stages, and the figures there. batch_s, of_second: as ``_least_on_kinds`` returns them."""

    d: int
    m: int
    ranks: int
    degrees: list[int]
    clusters: list[Cluster]
    most: list[int]
    alone: list[_OfReplicas]
    batch_s: FloatArray
    of_second: FloatArray

    def may_hold_all(self, schedule: Schedule, batch_s: float) -> bool:
        """Whether stages that take ``batch_s`` a batch at most may hold all layers, for the first setting.

        A stage with f microbatches in flight holds layers of no more than its kind's memory, and takes no more than the
        m-th part of the batch. So it has at most a ``cap`` of all shares (see ``_least_on_kinds``). There is one stage
        at each place from the back, and at most ``most`` on a kind. For any prices of stages on a kind, the shares of
        all places and kinds are at most the excess of the caps over the prices, plus the prices of all stages together.
        """
        seconds = np.stack([one.least[0, :, _TIME] for one in self.alone])
        counts, of_second = self.alone[0].counts, self.of_second[0]
        shares = np.where(np.isfinite(seconds), seconds * of_second[:, None], math.inf).min(axis=0)
        whole, in_flight = dot(shares, counts), surely_in_flight(schedule, self.ranks, self.m)[::-1]
        caps = np.stack(
            [
                np.minimum(_most_shares(shares, one, in_flight, own.memory_bytes), batch_s / self.m * share)
                for one, own, share in zip(self.alone, self.clusters, of_second, strict=True)
            ]
        )
        most, prices = np.array(self.most, float), np.zeros(len(self.most))
        for _ in range(_PRICE_STEPS):
            worth = caps - prices[:, None]
            kind, above = worth.argmax(axis=0), np.maximum(worth.max(axis=0), 0.0)
            excess = above.sum() + dot(prices, most) - whole * (1.0 - PROOF)
            if excess < 0.0:
                return False
            slope = most - np.bincount(kind[above > 0.0], minlength=most.size)
            if not slope.any():
                break
            prices = np.maximum(0.0, prices - (excess + _BELOW * whole) / dot(slope, slope) * slope)
        return True


_PRICE_STEPS, _BELOW = 60, 1e-3
"""Steps towards the prices, and how far below all shares they aim."""


def _most_shares(shares: FloatArray, own: _OfReplicas, in_flight: FloatArray, memory_bytes: float) -> FloatArray:
    """Returns float64[place]: the most shares of layers, and parts of them, that a device has memory for. shares:
    float64[kind of layer], of a layer. own: of the first setting. in_flight: float64[place]."""
    held = own.least[0, :, _FIXED] + in_flight[:, None] * own.least[0, :, _ACTIVATION]
    can = np.isfinite(held)
    order = np.argsort(np.where(can, -shares / np.maximum(held, np.finfo(float).tiny), 0.0), axis=1, kind="stable")
    held_bytes = np.take_along_axis(np.where(can, held, 0.0) * own.counts, order, axis=1)
    all_shares = np.take_along_axis(np.where(can, shares, 0.0) * own.counts, order, axis=1)
    left = memory_bytes * (1.0 + MEMORY_TOLERANCE) - np.cumsum(held_bytes, axis=1) + held_bytes
    found: FloatArray = (all_shares * np.clip(left / np.maximum(held_bytes, np.finfo(float).tiny), 0.0, 1.0)).sum(
        axis=1
    )
    return found


def _least_on_kinds(
    of_kinds: Sequence[FloatArray],
    most: Sequence[int],
    counts: FloatArray,
    schedule: Schedule,
    m: int,
    ranks: int,
) -> tuple[FloatArray, FloatArray]:
    """Returns float64[setting]: a lower bound on a batch of m microbatches, if at most ``most`` stages are on each
    kind, and ``ranks`` in all; and float64[setting, kind], the 1 / W_g. of_kinds: for each kind of devices
    float64[setting, kind of layer], the least seconds of a layer there; inf: no layer of it can be there.

    A stage on devices g that takes x has the share x / W_g of W_g, the time of all layers there. Each layer has at
    least the least of its shares. ``share_room`` says how much of all shares the stages of a batch can have.
    """
    shares, of_second = np.full(of_kinds[0].shape, math.inf), np.zeros((len(of_kinds[0]), len(of_kinds)))
    for kind, seconds in enumerate(of_kinds):
        can = np.isfinite(seconds)
        whole_s = np.maximum(dot(np.where(can, seconds, 0.0), counts), np.finfo(float).tiny)
        shares = np.minimum(shares, seconds / whole_s[:, None])
        of_second[:, kind] = np.where(can.any(axis=1), 1.0 / whole_s, 0.0)
    rooms = share_rooms(TASK_CODES[schedule.name], m, ranks, np.array(most), of_second)
    return dot(shares, counts) / rooms, of_second


def _have_room(one: _OnKinds) -> npt.NDArray[np.bool_]:
    """Returns bool[setting]: whether stages that take equally long have room, with the largest memory in front."""
    all_share, in_flight = dot(one.of_second, np.array(one.most, float)), min(one.m, one.ranks)
    share = one.of_second / np.maximum(all_share, np.finfo(float).tiny)[:, None]
    found = np.ones(len(share), np.bool_)
    for kind in sorted(range(len(one.alone)), key=lambda kind: -one.clusters[kind].memory_bytes):
        held = one.alone[kind].total(_FIXED) + one.alone[kind].total(_ACTIVATION) * max(1, in_flight)
        fits = share[:, kind] * np.where(share[:, kind] > 0.0, held, 0.0) <= one.clusters[kind].memory_bytes
        found &= fits
        in_flight -= one.most[kind]
    return found


def _rows_on(settings: Sequence[ModeSetting], t: int, name: str) -> FloatArray:
    """Returns float64[setting, kind of layer, TMPC, figure]: the TMPCs on one kind of devices."""
    every = [[[x for x in layer.tmpcs.get(t, ()) if x.kind == name] for layer in one.sample.layers] for one in settings]
    width = max((len(row) for rows in every for row in rows), default=0)
    return np.stack([_padded(rows, max(width, 1)) for rows in every])


class _Terms(NamedTuple):
    """What a batch's time depends on apart from the stages."""

    schedule: Schedule
    step: StepTerms


@dataclass(frozen=True)
class _OfReplicas:
    """The figures for d replicas; fixed bytes include each one's share of the shared bytes. rows: float64[setting, kind
    of layer, TMPC, figure]. least: float64[setting, kind of layer, figure], each by itself. counts: of layers, by
    kind."""

    least: FloatArray
    rows: FloatArray
    counts: FloatArray

    @classmethod
    def of(cls, rows: FloatArray, counts: FloatArray, d: int) -> _OfReplicas:
        rows = np.where(rows[..., _NEEDED, None] <= d, rows, math.inf)
        rows[..., _FIXED] += rows[..., _SHARED] / d
        return cls(rows.min(axis=2), rows, counts)

    @classmethod
    def joined(cls, alone: Sequence[_OfReplicas]) -> _OfReplicas:
        """Returns the TMPCs on several kinds of devices as those of each layer."""
        rows = np.concatenate([one.rows for one in alone], axis=2)
        return cls(rows.min(axis=2), rows, alone[0].counts)

    def only(self, settings: npt.NDArray[np.intp]) -> _OfReplicas:
        """Returns the figures of these settings alone."""
        return replace(self, least=self.least[settings], rows=self.rows[settings])

    def total(self, figure: int) -> FloatArray:
        """Returns float64[setting]: the sum over all layers."""
        found: FloatArray = dot(self.least[..., figure], self.counts)
        return found

    @property
    def held_bytes(self) -> FloatArray:
        """float64[setting, kind of layer]: the least bytes with one microbatch in flight."""
        found: FloatArray = (self.rows[..., _ACTIVATION] + self.rows[..., _FIXED]).min(axis=2)
        return found

    def _held(self, m: int, sum_s: float) -> HeldLayers:
        seconds = m * self.least[..., _TIME] + sum_s * self.least[..., _WEIGHTS]
        return HeldLayers(self.counts, seconds, self.rows[..., _FIXED], self.rows[..., _ACTIVATION])

    def quick_batch_s(self, most: int, m: int, schedule: Schedule, sum_s: float) -> FloatArray:
        """Returns float64[setting]: a lower bound on a batch of m microbatches on at most ``most`` ranks, where memory
        is no limit. Each of its terms is least with the most ranks."""
        held = self._held(m, sum_s)
        found: FloatArray = np.maximum(dot(held.seconds, held.counts) / most, held.whole_s(most))
        return np.maximum(found, _filled_s(self.total(_TIME), most, m, schedule))

    def least_batch_s(self, counts: range, m: int, schedule: Schedule, sum_s: float, memory_bytes: float) -> FloatArray:
        """Returns float64[setting]: a lower bound on a batch of m microbatches; inf: none fits. counts: the possible
        numbers of ranks. sum_s: seconds to sum the gradients per byte of a rank's weights."""
        held = self._held(m, sum_s)
        found, open_ = np.full(len(self.rows), math.inf), np.arange(len(self.rows))
        work_s = self.total(_TIME)
        for ranks in reversed(counts):
            so_many_s = _least_on_s(held, work_s[open_], ranks, m, schedule, memory_bytes)
            still = so_many_s < found[open_]  # otherwise fewer ranks are no better
            if not still.all():
                open_, so_many_s, held = open_[still], so_many_s[still], held.only(still)
            if not open_.size:
                break
            found[open_] = np.minimum(found[open_], np.maximum(so_many_s, held.whole_s(ranks)))
        return found


def _least_on_s(
    held: HeldLayers, work_s: FloatArray, ranks: int, m: int, schedule: Schedule, memory_bytes: float
) -> FloatArray:
    """Returns float64[setting]: a lower bound on a batch on at most ``ranks`` ranks. work_s: of a microbatch."""
    flight = surely_in_flight(schedule, ranks, m)
    # Fewer ranks may have less in flight, but no less than this.
    if schedule.name in (ScheduleName.INTERLEAVED, ScheduleName.ZB_H1):
        flight = np.minimum(flight, np.arange(ranks, 0, -1.0))
    return np.maximum(held.least_s(flight, memory_bytes), _filled_s(work_s, ranks, m, schedule))


def _filled_s(work_s: FloatArray, ranks: int, m: int, schedule: Schedule) -> FloatArray:
    """Returns float64[setting]: a lower bound on a batch on at most ``ranks`` ranks, as pipelines fill and drain.
    work_s: of a microbatch.

    Under a flush without chunks, the stages in front of a stage have each passed a microbatch on before it begins,
    and run a backward pass after it ends. With stage times x_1 .. x_p the batch takes T >= x_1 + .. + x_(q-1) + m
    x_q for each q. So what is left of T after the first q stages, T - x_1 - .. - x_q, is at least (1 - 1/m) of what
    is left after q - 1 of them. Hence T - w >= (1 - 1/m)^p T, where w is the sum of all x.
    """
    if schedule.name in FLUSHED and not schedule.asynchronous:
        found: FloatArray = work_s / (1.0 - (1.0 - 1.0 / m) ** ranks)
        shares = room(TASK_CODES[schedule.name], m, ranks)
        return np.maximum(found, work_s * (1.0 + 1.0 / shares[-1])) if shares.size else found
    return work_s if schedule.name is ScheduleName.INTERLEAVED else np.zeros_like(work_s)


def _never_loses(one: Instance, other: Instance) -> bool:
    """Whether each plan of ``other`` becomes one of ``one``, at no more cost, by exchanging some TMPCs."""
    return all(
        any(_as_good(better, tmpc) for better in mine.tmpcs.get(t, ()))
        for mine, layer in zip(one.layers, other.layers, strict=True)
        for t, row in layer.tmpcs.items()
        for tmpc in row
    )


def _as_good(one: Tmpc, other: Tmpc) -> bool:
    """Whether a TMPC is as good as another in every stage under any schedule."""
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
