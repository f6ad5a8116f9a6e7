"""The (d, t, p, v) that a plan may have, with a first bound on what any plan of theirs takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from piper_ray.cost.schedules import degree_choices, rank_counts, sync_s_per_byte
from piper_ray.cost.shares import surely_in_flight
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.cost.variants import Variant, layer_without_choice, usable_variants
from piper_ray.engine.chunks.tables import DegreeTables, MixedTables, ModelOrder
from piper_ray.engine.kernels.chunk_program import ChunkProgram, build_program
from piper_ray.engine.lattice.layer_graph import offsets
from piper_ray.model.constraints import FilledPipeline, PipelinedChunks, Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.schedule import V_SHAPED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Infeasibility
from piper_ray.simulate.actions import check_shape, flush_lists, stage_of_chunk


@dataclass(frozen=True)
class PipelineShape:
    """Everything that determines the order of passes. ranks: p. microbatches: m, of a replica."""

    schedule: Schedule
    ranks: int
    microbatches: int

    @property
    def chunks(self) -> int:
        """The chunks of a rank: v."""
        return self.schedule.v

    @property
    def stages(self) -> int:
        """The stages of the plan: a stage is a chunk."""
        return self.ranks * self.chunks

    @property
    def apart(self) -> int | None:
        """How far apart the chunks of one rank are at least; None if each rank has one."""
        if self.ranks > 1 and self.chunks == 1:
            return None
        return 1 if self.schedule.name in V_SHAPED else self.ranks

    @property
    def runs(self) -> bool:
        """Whether the schedule can run these microbatches on these ranks."""
        try:
            check_shape(self.schedule, self.ranks, self.microbatches)
        except UsageError:
            return False
        return True

    @property
    def about_in_flight(self) -> float:
        """Microbatches whose activations the fullest rank holds, counted in activations of all its chunks, if chunks
        are equal."""
        p, v, m = self.ranks, self.chunks, self.microbatches
        if self.schedule.name is ScheduleName.LOOPED_BFS:
            return m
        return min(m, p + (p - 1) / v if self.schedule.name is ScheduleName.INTERLEAVED else p)

    @property
    def about_fill(self) -> float:
        """Microbatches that could have run on a rank while the pipeline fills and drains, if chunks are equal."""
        return (self.ranks - 1) / self.chunks

    def program(self) -> ChunkProgram | None:
        """The order of passes. None if the ranks would wait for each other forever."""
        return _PROGRAMS.of(self)

    def _built(self) -> ChunkProgram | None:
        lists = flush_lists(self.schedule, self.ranks, self.microbatches)
        stage_of = np.array(
            [
                [stage_of_chunk(self.schedule, self.ranks, rank, chunk) for chunk in range(self.chunks)]
                for rank in range(self.ranks)
            ],
            np.int64,
        )
        whole, program = build_program(
            self.microbatches, np.concatenate(lists).astype(np.int64), offsets(len(x) for x in lists), stage_of
        )
        return program if whole else None


class _Programs:
    """The programs of the last shapes, which many problems have in common. They are never written to."""

    def __init__(self, most_passes: int) -> None:
        self._most_passes = most_passes
        self._known: dict[PipelineShape, ChunkProgram | None] = {}  # the last one that was asked for is the last
        self._lock = threading.Lock()

    def of(self, shape: PipelineShape) -> ChunkProgram | None:
        with self._lock:
            if shape in self._known:
                found = self._known[shape] = self._known.pop(shape)
                return found
        found = shape._built()
        with self._lock:
            self._known[shape] = found
            passes = sum(one.kind.size for one in self._known.values() if one is not None)
            for oldest in list(self._known):
                if passes <= self._most_passes:
                    break
                dropped = self._known.pop(oldest)
                passes -= 0 if dropped is None else dropped.kind.size
        return found


_PROGRAMS = _Programs(most_passes=8_000_000)
"""A pass takes 16 bytes."""

_WHOLE_BACKWARD = (ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS)
"""Schedules that do not split the backward pass."""


class TaskKey(NamedTuple):
    """The key of a task among the tasks of one problem."""

    data_parallel_degree: int
    tensor_parallel_degree: int
    ranks: int
    chunks: int


@dataclass(frozen=True)
class Task:
    """All plans of one shape with one d and t. tables: the best of what any layer may run; mixed: everything that a
    layer may run; choices: what layers may run that all choose together, where those of a chunk have to. lower_s: no
    batch of such a plan takes less. about_s: the time of a plan whose ranks are equal, inf if that does not fit; it
    says where to search first.
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
        """The degree of all stages: t."""
        return self.tables.degree

    @property
    def devices(self) -> int:
        """The devices of all ranks: d t p."""
        return self.data_parallel_degree * self.tensor_parallel_degree * self.shape.ranks

    @property
    def key(self) -> TaskKey:
        """A key that is the same on any number of devices."""
        return TaskKey(self.data_parallel_degree, self.tensor_parallel_degree, self.shape.ranks, self.shape.chunks)

    @property
    def least_fixed_bytes(self) -> float:
        """The least fixed bytes of all layers together."""
        return self.tables.least_fixed_bytes(self.data_parallel_degree)


@dataclass(frozen=True)
class ChunkProblem:
    """A problem, on as many devices as ``instance`` has or fewer.

    schedules: of one name, with the possible numbers of chunks. impossible: why some layer can be in no plan. tables_s:
    how long it took to make the tables.
    """

    instance: Instance
    restrictions: Restrictions
    schedules: Sequence[Schedule]
    step: StepTerms
    variants: tuple[Variant, ...]
    impossible: Infeasibility | None
    order: ModelOrder
    tables_s: float

    @classmethod
    def of(
        cls,
        instance: Instance,
        restrictions: Restrictions,
        schedules: Sequence[Schedule],
        step: StepTerms = StepTerms(),
        tell: Callable[[str], None] | None = None,
    ) -> ChunkProblem:
        """tell: is called with the assumptions about passes."""
        began_s = time.perf_counter()
        instance = with_passes(instance, tell)
        variants, order = usable_variants(instance, restrictions), ModelOrder.of(instance)
        impossible = layer_without_choice(instance, variants)
        return cls(instance, restrictions, schedules, step, variants, impossible, order, time.perf_counter() - began_s)

    def on(self, devices: int) -> Instance:
        """The instance on as many devices as it has, or fewer."""
        return self.instance if devices == self.instance.devices else self.instance.replace(devices=devices)

    def tasks(self, instance: Instance) -> list[Task]:
        """The tasks that fit the cluster, by rising bound. instance: the problem on other devices."""
        found: list[Task] = []
        known: dict[tuple[int, ...], _Choices | None] = {}
        for d, (t,), usable in degree_choices(instance, self.restrictions, self.variants):
            if usable not in known:
                known[usable] = _tables(self.order, t, [self.variants[index] for index in usable])
            choices = known[usable]
            if choices is not None:
                found += self._of_degrees(instance, d, choices)
        found.sort(key=lambda task: (task.lower_s, task.devices, task.data_parallel_degree, task.shape.stages))
        return found

    def _of_degrees(self, instance: Instance, d: int, known: _Choices) -> list[Task]:
        restrictions, tables = self.restrictions, known.tables
        m = instance.microbatches // d
        sync_of_byte_s = sync_s_per_byte(self.step, instance.cluster, d, tables.degree)
        memory_bytes = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)
        fixed_bytes = tables.least_fixed_bytes(d)
        choices = [(x, x.least_fixed_bytes(d)) for x in known.choices]
        chunks = [schedule.v for schedule in self.schedules]
        held = tables.held_layers(d, m, sync_of_byte_s)
        found = []
        for p in rank_counts(instance, restrictions, d * tables.degree):
            if fixed_bytes > p * memory_bytes or (p > m and restrictions.has(FilledPipeline)):
                continue
            held_s = float(held.least_s(surely_in_flight(self.schedules[0], p, m), memory_bytes))
            if held_s == np.inf:
                continue
            whole_s = float(held.whole_s(p))
            # On one rank no number of chunks is faster than the least, or holds less, where these have no choice.
            most_chunks = min(chunks) if p == 1 and known.mixed.count == 1 else max(chunks)
            for schedule in self.schedules:
                shape = PipelineShape(schedule, p, m)
                if shape.stages > tables.order.size or not shape.runs or schedule.v > most_chunks:
                    continue
                if restrictions.has(PipelinedChunks) and _is_run_otherwise(schedule, p):
                    continue
                # The ranks' work and synchronisation on average; and one microbatch there and back.
                lower_s = (m * tables.least_s + sync_of_byte_s * tables.least_weights_bytes) / p
                there_s = tables.least_s if schedule.name in _WHOLE_BACKWARD else tables.least_there_and_back_s
                lower_s = max(lower_s, there_s, held_s, whole_s)
                about_s = min(_about_s(shape, x, held, sync_of_byte_s, memory_bytes) for x, held in choices)
                found.append(Task(shape, d, *known, sync_of_byte_s, memory_bytes, lower_s, about_s))
        return found


def _is_run_otherwise(schedule: Schedule, ranks: int) -> bool:
    """Whether runtimes run it under another schedule: several chunks on one rank, or one chunk on each rank,
    interleaved."""
    if ranks == 1:
        return schedule.v > 1
    return schedule.v == 1 and schedule.name is ScheduleName.INTERLEAVED


class _Choices(NamedTuple):
    """As in ``Task``."""

    tables: DegreeTables
    mixed: MixedTables
    choices: tuple[DegreeTables, ...]


def _tables(order: ModelOrder, t: int, variants: list[Variant]) -> _Choices | None:
    """Makes the tables; None if some layer may run nothing.

    Where recomputation has a rule, each chunk may choose for itself; most plans are sought where all layers have the
    same role.
    """
    together = DegreeTables.of(order, t, variants)
    if together is None:
        return None
    if len(variants) == 1:
        return _Choices(together, MixedTables.of_one(together), (together,))
    mixed = MixedTables.of(order, t, variants)
    alike = [variant for variant in variants if variant.recompute is not None] or variants
    choices = (DegreeTables.of(order, t, [variant]) for variant in alike)
    return _Choices(together, mixed, tuple(x for x in choices if x is not None))


def _about_s(
    shape: PipelineShape, tables: DegreeTables, fixed_bytes: float, sync_of_byte_s: float, memory_bytes: float
) -> float:
    """As in ``Task``, for one choice whose layers together hold this much, for any number of microbatches in flight."""
    p, v, m = shape.ranks, shape.chunks, shape.microbatches
    held_bytes = fixed_bytes + shape.about_in_flight * tables.least_activation_bytes
    if held_bytes > p * memory_bytes:
        return float("inf")
    rank_s = tables.least_s / p + (v * tables.usual_border_s(shape.stages) if p > 1 else 0.0)
    return (m + shape.about_fill) * rank_s + sync_of_byte_s * tables.least_weights_bytes / p
