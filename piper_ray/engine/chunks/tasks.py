"""The (d, t, p, v) that a plan may have, with a first bound on what any plan of theirs takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from piper_ray.cost.schedules import sync_s_per_byte
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.cost.variants import Variant
from piper_ray.engine.chunks.shapes import PipelineShape
from piper_ray.engine.chunks.tables import DegreeTables, MixedTables, ModelOrder
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms

_WHOLE_BACKWARD = (ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS)
"""Schedules that do not split the backward pass."""


@dataclass(frozen=True)
class PlanSpace:
    """What plans may be, and what their step takes beside passes. ranks: p; None: any number.

    data_parallel_degrees: those that d may be. filled: no more ranks than microbatches of a replica. pipelined: a
    single rank has no several chunks.
    """

    schedules: Sequence[Schedule]
    variants: Sequence[Variant]
    data_parallel_degrees: Sequence[int]
    ranks: int | None
    all_devices: bool
    step: StepTerms = StepTerms()
    filled: bool = False
    pipelined: bool = False


class TaskKey(NamedTuple):
    """Of the tasks of one problem."""

    data_parallel_degree: int
    tensor_parallel_degree: int
    ranks: int
    chunks: int


@dataclass(frozen=True)
class Task:
    """All plans of one shape with one d and t. tables: the best of what any may run; mixed: all that one may; choices:
    what one may whose layers all decide alike, where a chunk's have to. lower_s: no batch of such a plan takes less.
    about_s: what one takes whose ranks are equal, inf if that does not fit: says where to look first.
    """

    shape: PipelineShape
    data_parallel_degree: int
    tables: DegreeTables
    mixed: MixedTables
    choices: tuple[DegreeTables, ...]
    sync_s_per_byte: float
    memory_bytes: float
    lower_s: float
    about_s: float

    @property
    def tensor_parallel_degree(self) -> int:
        """Of all stages: t."""
        return self.tables.degree

    @property
    def devices(self) -> int:
        """Of all ranks: d t p."""
        return self.data_parallel_degree * self.tensor_parallel_degree * self.shape.ranks

    @property
    def key(self) -> TaskKey:
        """The same on any number of devices."""
        return TaskKey(self.data_parallel_degree, self.tensor_parallel_degree, self.shape.ranks, self.shape.chunks)

    @property
    def least_fixed_bytes(self) -> float:
        """Of all layers together."""
        return self.tables.least_fixed_bytes(self.data_parallel_degree)


def list_tasks(instance: Instance, order: ModelOrder, space: PlanSpace) -> list[Task]:
    """Those that fit the cluster, by rising bound."""
    found: list[Task] = []
    known: dict[tuple[int, ...], _Choices | None] = {}
    for d in space.data_parallel_degrees:
        for t in sorted({variant.degree for variant in space.variants}):
            usable = tuple(
                index
                for index, variant in enumerate(space.variants)
                if variant.degree == t and variant.least_data_parallel_degree <= d <= variant.most_data_parallel_degree
            )
            if usable not in known:
                known[usable] = _tables(order, t, [space.variants[index] for index in usable])
            choices = known[usable]
            if choices is not None:
                found += _of_degrees(instance, space, d, choices)
    found.sort(key=lambda task: (task.lower_s, task.devices, task.data_parallel_degree, task.shape.stages))
    return found


def _ranks(instance: Instance, space: PlanSpace, devices: int) -> range:
    """p, where each rank takes so many devices."""
    most = instance.devices // devices
    if space.all_devices and instance.devices % devices:
        return range(0)
    least = most if space.all_devices else 1
    if space.ranks is not None:
        least, most = max(least, space.ranks), min(most, space.ranks)
    return range(least, min(most, len(instance.layers)) + 1)


class _Choices(NamedTuple):
    """As in ``Task``."""

    tables: DegreeTables
    mixed: MixedTables
    choices: tuple[DegreeTables, ...]


def _tables(order: ModelOrder, t: int, variants: list[Variant]) -> _Choices | None:
    """None if some layer may run nothing.

    Where recomputation has a rule, chunks may decide each for itself; most plans are sought where all layers have the
    same role.
    """
    together = DegreeTables.of(order, t, variants)
    if together is None:
        return None
    mixed = MixedTables.of(order, t, variants)
    if len(variants) == 1:
        return _Choices(together, mixed, (together,))
    alike = [variant for variant in variants if variant.recompute is not None] or variants
    choices = (DegreeTables.of(order, t, [variant]) for variant in alike)
    return _Choices(together, mixed, tuple(x for x in choices if x is not None))


def _of_degrees(instance: Instance, space: PlanSpace, d: int, known: _Choices) -> list[Task]:
    tables = known.tables
    m = instance.microbatches // d
    sync_of_byte_s = sync_s_per_byte(space.step, instance.cluster, d, tables.degree)
    memory_bytes = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)
    fixed_bytes = tables.least_fixed_bytes(d)
    choices = [(x, x.least_fixed_bytes(d)) for x in known.choices]
    chunks = [schedule.v for schedule in space.schedules]
    found = []
    for p in _ranks(instance, space, d * tables.degree):
        if space.filled and p > m:
            continue
        if fixed_bytes > p * memory_bytes:
            continue
        # On one rank no number of chunks is faster than the least, or holds less, where chunks have nothing to decide.
        most_chunks = min(chunks) if p == 1 and known.mixed.count == 1 else max(chunks)
        for schedule in space.schedules:
            shape = PipelineShape(schedule, p, m)
            if shape.stages > tables.order.size or not shape.runs or schedule.v > most_chunks:
                continue
            if space.pipelined and p == 1 < schedule.v:
                continue
            # The ranks' work and synchronisation on average; and one microbatch there and back.
            lower_s = (m * tables.least_s + sync_of_byte_s * tables.least_weights_bytes) / p
            whole = schedule.name in _WHOLE_BACKWARD
            lower_s = max(lower_s, tables.least_s if whole else tables.least_there_and_back_s)
            about_s = min(_about_s(shape, x, held, sync_of_byte_s, memory_bytes) for x, held in choices)
            found.append(Task(shape, d, *known, sync_of_byte_s, memory_bytes, lower_s, about_s))
    return found


def _about_s(
    shape: PipelineShape, tables: DegreeTables, fixed_bytes: float, sync_of_byte_s: float, memory_bytes: float
) -> float:
    """As in ``Task``, of one choice, whose layers together hold so much whatever is in flight."""
    p, v, m = shape.ranks, shape.chunks, shape.microbatches
    held_bytes = fixed_bytes + shape.about_in_flight * tables.least_activation_bytes
    if held_bytes > p * memory_bytes:
        return float("inf")
    rank_s = tables.least_s / p + (v * tables.usual_border_s if p > 1 else 0.0)
    return (m + shape.about_fill) * rank_s + sync_of_byte_s * tables.least_weights_bytes / p
