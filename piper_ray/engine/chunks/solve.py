"""``solve_chunks``: from an instance to a plan with a bound under a schedule with chunks. Only puts the parts together."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from piper_ray.cost.chunk_schedules import ChunkSchedule
from piper_ray.cost.step import StepFactors
from piper_ray.cost.variants import layer_without_choice, stage_variants
from piper_ray.engine.chunks.candidates import Candidate
from piper_ray.engine.chunks.records import ChunkPlan, ChunkRules, ChunkSolution, ChunkStats
from piper_ray.engine.chunks.search import ChunkSearch
from piper_ray.engine.chunks.tables import ModelOrder
from piper_ray.engine.chunks.tasks import list_tasks
from piper_ray.engine.flush.records import FlushConstraints
from piper_ray.engine.kernels.chunk_bound import FORWARD_S, WEIGHT_S
from piper_ray.engine.kernels.chunk_program import build_program
from piper_ray.engine.kernels.chunk_stages import chunk_figures, sync_of_ranks
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Status
from piper_ray.model.stop import Stop


def solve_chunks(
    instance: Instance,
    schedule: ChunkSchedule,
    *,
    rules: ChunkRules = ChunkRules(),
    constraints: FlushConstraints = FlushConstraints(),
    restrictions: Restrictions = Restrictions(),
    factors: StepFactors = StepFactors(),
    options: SolveOptions = SolveOptions(),
    stop: Stop[Any] | None = None,
) -> ChunkSolution:
    """A plan whose simulated batch takes little under the schedule, and what is proved of all plans, over all d, t, p
    and v that may be.

    ``constraints.stages`` is p, the number of ranks. Of ``options`` gap, time_limit_s and threads count.
    """
    started = time.perf_counter()
    stop = stop or Stop()
    variants = tuple(
        variant for variant in stage_variants(instance, restrictions) if variant.degree <= instance.devices
    )
    impossible = layer_without_choice(instance, variants)
    if impossible is not None:
        return _without_plan(instance, schedule, impossible.reason, ChunkStats(0, 0, 0, False, 0.0, 0.0))
    order = ModelOrder.of(instance)
    tasks = list_tasks(instance, order, schedule, variants, constraints, rules, factors, restrictions.data_parallelism)
    tables_s = time.perf_counter() - started

    began = time.perf_counter()
    threads = options.threads or _cores()
    deadline = None if options.time_limit_s is None else started + options.time_limit_s
    search = ChunkSearch(tasks, threads, options.gap, deadline, stop)

    def solution() -> ChunkSolution:
        stats = ChunkStats(
            threads=threads,
            tasks=len(tasks),
            bounded=search.bounded,
            borders_counted=order.lattice is not None,
            tables_s=tables_s,
            search_s=time.perf_counter() - began,
        )
        return _solution(instance, schedule, search, stats)

    stop.offer(solution)
    search.run()
    return solution()


def build_chunk_plan(found: Candidate) -> ChunkPlan:
    """Layers in file order."""
    task, order = found.task, found.task.tables.order
    shape, d = task.shape, task.data_parallel_degree
    file_position = {layer.id: index for index, layer in enumerate(order.instance.layers)}
    stages = []
    for first, end in zip(found.cuts[:-1].tolist(), found.cuts[1:].tolist(), strict=True):
        tmpc_ids = {
            order.layers[x]: found.tables.tmpcs[x][int(found.choice[x] - found.tables.option_start[x])].id
            for x in range(first, end)
        }
        layers = tuple(sorted(tmpc_ids, key=file_position.__getitem__))
        stages.append(Stage(layers, d, task.tensor_parallel_degree, {layer: tmpc_ids[layer] for layer in layers}))
    _, program = build_program(shape.schedule.code, shape.ranks, shape.chunks, shape.microbatches, shape.group)
    figures = chunk_figures(
        found.tables.layers(d), program.rank_of, found.cuts, found.choice, np.empty(order.size, np.int64)
    )
    sync_s = sync_of_ranks(program, figures, task.sync_s_per_byte)
    return ChunkPlan(Plan(tuple(stages)), shape, found.batch_s, figures[:, FORWARD_S : WEIGHT_S + 1].copy(), sync_s)


def _solution(
    instance: Instance, schedule: ChunkSchedule, search: ChunkSearch, stats: ChunkStats
) -> ChunkSolution:
    """What the search has found, at whatever moment."""
    found, lower_s = search.best, search.lower_s
    if found is None:
        if search.stopped_by is None and lower_s == float("inf"):
            return _without_plan(instance, schedule, "no plan fits", stats)
        return ChunkSolution(
            Status.UNKNOWN, schedule, instance.microbatches, None, lower_s, stats, search.stopped_by
        )
    proved = search.proved
    return ChunkSolution(
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        schedule=schedule,
        microbatches=instance.microbatches,
        best=build_chunk_plan(found),
        lower_bound_batch_s=min(lower_s, found.batch_s),
        stats=stats,
        stopped_by=None if proved else search.stopped_by,
    )


def _without_plan(
    instance: Instance, schedule: ChunkSchedule, reason: str, stats: ChunkStats
) -> ChunkSolution:
    return ChunkSolution(
        Status.INFEASIBLE, schedule, instance.microbatches, None, float("inf"), stats, reason=reason
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
