"""``solve_flush``: from an instance to a proved plan under a schedule with a flush. Only puts the parts together."""

from __future__ import annotations

import os
import time
from typing import Any

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.cost.step import StepFactors
from piper_ray.cost.variants import Variant, layer_without_choice, stage_variants
from piper_ray.engine.flush.plans import build_flush_plan
from piper_ray.engine.flush.records import FlushConstraints, FlushSolution, FlushStats
from piper_ray.engine.flush.search import FlushSearch
from piper_ray.engine.flush.tables import Workload, build_workload
from piper_ray.engine.flush.tasks import list_tasks
from piper_ray.engine.forecast import downset_limit, over_limit
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.counting import count_downsets
from piper_ray.engine.lattice.downsets import build_lattice, chain_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Status
from piper_ray.model.stop import Stop

_CHAIN_SHARE = 4
"""A chain pays when the lattice has this many times as many downsets."""


def solve_flush(
    instance: Instance,
    schedule: FlushSchedule,
    *,
    constraints: FlushConstraints = FlushConstraints(),
    restrictions: Restrictions = Restrictions(),
    factors: StepFactors = StepFactors(),
    options: SolveOptions = SolveOptions(),
    stop: Stop[Any] | None = None,
) -> FlushSolution:
    """The plan whose simulated batch takes the least under the schedule, with proof; or the best one found when a limit
    or a wish to stop comes first.

    Of ``options`` gap, time_limit_s, threads and memory_limit_bytes count. Raises LimitError if the lattice does not
    fit.

    The lattice is that of all layers: a layer that costs nothing may be a stage of its own, which under 1F1B lets the
    stages before it start with one more forward pass. So none may be merged with a neighbour.
    """
    started = time.perf_counter()
    stop = stop or Stop()
    variants = tuple(
        variant for variant in stage_variants(instance, restrictions) if variant.degree <= instance.devices
    )
    graph = build_graph(instance, without_contraction())
    impossible = layer_without_choice(instance, variants)
    if impossible is not None:
        return _without_plan(instance, schedule, impossible.reason)
    workload = _workload(instance, graph, variants, options.memory_limit_bytes)
    tasks = list_tasks(instance, workload, schedule, constraints, factors, restrictions.data_parallelism)
    tables_s = time.perf_counter() - started

    began = time.perf_counter()
    threads = options.threads or _cores()
    deadline = None if options.time_limit_s is None else started + options.time_limit_s
    search = FlushSearch(workload, tasks, threads, options.gap, deadline, stop)

    def solution() -> FlushSolution:
        stats = FlushStats(
            downsets=workload.lattice.size,
            levels=workload.lattice.levels,
            threads=threads,
            tasks=len(tasks),
            searched=search.searched,
            looked_through=search.looked_through,
            states=search.states,
            tables_s=tables_s,
            search_s=time.perf_counter() - began,
        )
        return _solution(instance, schedule, search, stats)

    stop.offer(solution)
    if workload.lattice.size >= _CHAIN_SHARE * (graph.size + 1):
        chain = build_workload(instance, chain_lattice(graph, range(graph.size)), variants)
        search.improve(
            chain, list_tasks(instance, chain, schedule, constraints, factors, restrictions.data_parallelism)
        )
    search.run()
    return solution()


def _workload(
    instance: Instance, graph: LayerGraph, variants: tuple[Variant, ...], memory_limit_bytes: float | None
) -> Workload:
    expected = count_downsets(graph)
    limit = downset_limit(graph, len(variants), expected, memory_limit_bytes)
    try:
        lattice = build_lattice(graph, limit, expected)
    except LimitError:
        raise over_limit(limit, memory_limit_bytes) from None
    return build_workload(instance, lattice, variants)


def _solution(instance: Instance, schedule: FlushSchedule, search: FlushSearch, stats: FlushStats) -> FlushSolution:
    """What the search has found, at whatever moment."""
    chosen, workload, lower_s = search.best, search.best_workload, search.lower_s
    if chosen is None or workload is None:
        if search.stopped_by is None and lower_s == float("inf"):
            return _without_plan(instance, schedule, "no plan fits", stats)
        stopped_by = search.stopped_by or search.left_open
        return FlushSolution(Status.UNKNOWN, schedule, instance.microbatches, None, lower_s, stats, stopped_by)
    best = build_flush_plan(instance, workload, chosen)
    proved = search.proved
    return FlushSolution(
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        schedule=schedule,
        microbatches=instance.microbatches,
        best=best,
        lower_bound_batch_s=min(lower_s, best.batch_s),
        stats=stats,
        stopped_by=None if proved else search.stopped_by or search.left_open,
    )


def _without_plan(
    instance: Instance, schedule: FlushSchedule, reason: str, stats: FlushStats | None = None
) -> FlushSolution:
    stats = stats or FlushStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
    return FlushSolution(Status.INFEASIBLE, schedule, instance.microbatches, None, float("inf"), stats, reason=reason)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
