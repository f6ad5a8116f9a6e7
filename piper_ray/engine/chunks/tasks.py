"""The (d, t, p, v) that a plan may have, each with a bound that is quickly known."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from piper_ray.cost.chunk_schedules import ChunkSchedule, PipelineShape, pipeline_shape
from piper_ray.cost.step import StepFactors
from piper_ray.cost.variants import Variant
from piper_ray.engine.chunks.records import ChunkRules
from piper_ray.engine.chunks.tables import DegreeTables, ModelOrder
from piper_ray.engine.flush.records import FlushConstraints
from piper_ray.engine.kernels.chunk_bound import FIXED
from piper_ray.model.instance import Instance, divisors

MEMORY_TOLERANCE = 5e-10
"""Relative. Sums in other orders round otherwise; ``evaluate`` allows twice as much."""


@dataclass(frozen=True)
class Task:
    """All plans of one shape with one d and t. tables: what any plan may run; choices: what one plan may, which are
    several where all layers have to decide alike. lower_s: no batch of such a plan takes less.
    """

    shape: PipelineShape
    data_parallel_degree: int
    tables: DegreeTables
    choices: tuple[DegreeTables, ...]
    sync_s_per_byte: float
    memory_bytes: float
    lower_s: float

    @property
    def tensor_parallel_degree(self) -> int:
        return self.tables.degree

    @property
    def devices(self) -> int:
        return self.data_parallel_degree * self.tensor_parallel_degree * self.shape.ranks


def list_tasks(
    instance: Instance,
    order: ModelOrder,
    schedule: ChunkSchedule,
    variants: Collection[Variant],
    constraints: FlushConstraints,
    rules: ChunkRules,
    factors: StepFactors,
    data_parallelism: bool,
) -> list[Task]:
    """Those that fit the cluster and the constraints, by rising bound."""
    found: list[Task] = []
    known: dict[tuple[int, ...], tuple[DegreeTables, tuple[DegreeTables, ...]] | None] = {}
    variants = list(variants)
    for d in divisors(instance.microbatches) if data_parallelism else [1]:
        for t in sorted({variant.degree for variant in variants}):
            ranks = _ranks(instance, constraints, d, t)
            if not constraints.allows(d, t) or not ranks:
                continue
            usable = tuple(
                index
                for index, variant in enumerate(variants)
                if variant.degree == t and variant.least_data_parallel_degree <= d <= variant.most_data_parallel_degree
            )
            if usable not in known:
                known[usable] = _tables(order, t, [variants[index] for index in usable])
            tables = known[usable]
            if tables is not None:
                found += _of_degrees(instance, schedule, rules, factors, d, *tables, ranks)
    found.sort(key=lambda task: (task.lower_s, task.devices, task.data_parallel_degree, task.shape.stages))
    return found


def _ranks(instance: Instance, constraints: FlushConstraints, d: int, t: int) -> range:
    """p"""
    most, asked = instance.devices // (d * t), constraints.stages
    if constraints.all_devices:
        if instance.devices % (d * t) or asked not in (None, most):
            return range(0)
        return range(most, most + 1) if most <= len(instance.layers) else range(0)
    most = min(most, len(instance.layers))
    if asked is None:
        return range(1, most + 1)
    return range(asked, asked + 1) if asked <= most else range(0)


def _tables(
    order: ModelOrder, t: int, variants: list[Variant]
) -> tuple[DegreeTables, tuple[DegreeTables, ...]] | None:
    together = DegreeTables.of(order, t, variants)
    if together is None:
        return None
    if len(variants) == 1:
        return together, (together,)
    each = (DegreeTables.of(order, t, [variant]) for variant in variants)
    return together, tuple(tables for tables in each if tables is not None)


def _of_degrees(
    instance: Instance,
    schedule: ChunkSchedule,
    rules: ChunkRules,
    factors: StepFactors,
    d: int,
    tables: DegreeTables,
    choices: tuple[DegreeTables, ...],
    ranks: range,
) -> list[Task]:
    m = instance.microbatches // d
    sync_s_per_byte = factors.sync_s_per_byte(d, instance.bandwidth_bytes_per_s)
    figures = tables.figures(d)
    memory_bytes = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)
    fixed_bytes = sum(
        float(figures[first:end, FIXED].min()) for first, end in pairwise(tables.option_start.tolist())
    )
    found = []
    for p in ranks:
        if fixed_bytes > p * memory_bytes:
            continue
        for v in rules.chunk_counts(schedule, tables.order.size // p):
            shape = pipeline_shape(schedule, p, v, m, rules.group)
            if shape is None:
                continue
            # The ranks' work and synchronisation on average; and one microbatch there and back.
            lower_s = (m * tables.least_s + sync_s_per_byte * tables.least_weights_bytes) / p
            lower_s = max(lower_s, tables.least_s)
            found.append(Task(shape, d, tables, choices, sync_s_per_byte, memory_bytes, lower_s))
    return found
