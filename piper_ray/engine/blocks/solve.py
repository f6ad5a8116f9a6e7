"""Planning by blocks of operators: exact on the blocks, then improved layer by layer, with a bound for all plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

from piper_ray.cost.tolerances import PROOF
from piper_ray.cost.variants import Variant
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.blocks.blocks import find_blocks
from piper_ray.engine.blocks.instance import BlockInstance, build_instance
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.lattice.contracted import ContractedGraph
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.preparation import Outline
from piper_ray.engine.search.search import Search, lower_bound_s
from piper_ray.engine.tables.options import build_options
from piper_ray.engine.tables.problem import Problem, Workload, build_problem
from piper_ray.evaluate import evaluate
from piper_ray.model.events import Listener, Note, StepFinished
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import BlockStats, Solution, SolveStats, Status
from piper_ray.model.stop import INTERRUPT, Stop

STOPPED_BY = "blocks of operators"
_STOPPED_EARLY = ("time limit", INTERRUPT, "TMPC choice too hard")

_CHAIN_GAP = 1e-4
"""How exactly borders within blocks are placed: far finer than what the blocks may cost."""

_MOST_ON_CHAIN = 1_000
"""Layers up to which a chain of single layers takes seconds; it gains a percent or two."""


def merge_operators(
    instance: Instance, variants: Sequence[Variant], contracted: ContractedGraph
) -> tuple[BlockInstance, BlockStats] | None:
    """The blocks as an instance of their own, and what was given up; None if the layers are few enough as they are.

    Raises LimitError if they cannot be merged into few enough blocks.
    """
    blocks = find_blocks(instance, variants, contracted)
    if len(blocks.members) == contracted.graph.size:
        return None
    merged = build_instance(instance, variants, blocks.members)
    stats = BlockStats(
        layers=len(instance.layers),
        blocks=len(blocks.members),
        downsets_before=contracted.downsets,
        downsets=blocks.downsets,
        largest_share=blocks.largest_share,
        choices_dropped=merged.dropped,
    )
    return merged, stats


def solve_by_blocks(
    instance: Instance,
    outline: Outline,
    restrictions: Restrictions,
    options: SolveOptions,
    listener: Listener,
    solve_exactly: Callable[[Instance, Stop[Solution]], Solution],
    stop: Stop[Solution],
) -> Solution:
    """The best plan of whole blocks, improved on a chain of single layers that passes its stages' borders if short.

    The lower bound is that of the layers: all their work over all devices, or the dearest of them. So a plan of blocks
    is "optimal" only if it meets that, and that no plan of blocks fits proves nothing of the layers.
    Raises LimitError as ``merge_operators``.
    """
    started = time.perf_counter()
    found = merge_operators(instance, outline.variants, outline.contracted)
    if found is None:
        return solve_exactly(instance, stop)
    merged, blocks = found
    merging_s = time.perf_counter() - started
    listener(StepFinished("blocks", merging_s, f"{blocks.layers:,} layers in {blocks.blocks:,} blocks"))
    listener(Note("the bounds of this log are those of plans of whole blocks"))
    part = stop.part()

    def before_the_chain() -> Solution | None:
        """The solution so far while blocks are planned."""
        of_blocks = part.answer()
        if of_blocks is None:
            return None
        plan = None if of_blocks.plan is None else merged.expand(of_blocks.plan, instance)
        incumbent = None if plan is None else (plan, evaluate(instance, plan).time_per_sample_s)
        bound_s = lower_bound_s(_chain_problem(instance, outline, restrictions, None))
        return _solution(incumbent, bound_s, options.gap, INTERRUPT, of_blocks.stats, blocks)

    stop.offer(before_the_chain)
    of_blocks = solve_exactly(merged.instance, part)
    began = time.perf_counter()
    plan = None if of_blocks.plan is None else merged.expand(of_blocks.plan, instance)
    problem = _chain_problem(instance, outline, restrictions, plan)
    bound_s = lower_bound_s(problem)
    blocks = replace(blocks, time_per_sample=of_blocks.time_per_sample, proved=of_blocks.status is Status.OPTIMAL)
    with closing(LocalBackend(options.threads)) as backend, closing(Evaluations(backend)) as evaluations:
        search = Search(
            instance,
            outline.contraction,
            problem,
            evaluations,
            gap=max(options.gap, _CHAIN_GAP),
            stop=stop,
            started=started,
        )
        if options.time_limit_s is not None:
            search.deadline = started + options.time_limit_s
        if plan is not None:
            search.incumbent = plan, evaluate(instance, plan).time_per_sample_s
            search.bracket.record_plan(search.incumbent[1])

        def solution(*reasons: str | None) -> Solution:
            stats = replace(
                of_blocks.stats,
                layers=len(instance.layers),
                lattice_s=of_blocks.stats.lattice_s + merging_s,
                search_s=of_blocks.stats.search_s + time.perf_counter() - began,
                evaluations=(*of_blocks.stats.evaluations, *search.evaluations),
            )
            early = next((reason for reason in reasons if reason in _STOPPED_EARLY), None)
            return _solution(search.incumbent, bound_s, options.gap, early or STOPPED_BY, stats, blocks)

        stop.offer(lambda: solution(INTERRUPT))
        if of_blocks.stopped_by not in _STOPPED_EARLY and problem.workload.lattice.graph.size <= _MOST_ON_CHAIN:
            search.run()
        return solution(of_blocks.stopped_by, search.stopped_by)


def _chain_problem(instance: Instance, outline: Outline, restrictions: Restrictions, plan: Plan | None) -> Problem:
    """The layers in an order that passes the borders of ``plan``, from the back; without one, in the graph's order."""
    graph = outline.graph
    stage_of = {layer: number for number, stage in enumerate(plan.stages if plan else ()) for layer in stage.layers}
    order = sorted(range(graph.size), key=lambda v: (-stage_of.get(graph.layer_ids[v], 0), v))
    workload = Workload.build(chain_lattice(graph, order), build_options(instance, graph, outline.variants))
    return build_problem(workload, instance, restrictions.data_parallelism)


def _solution(
    incumbent: tuple[Plan, float] | None,
    bound_s: float,
    gap: float,
    stopped_by: str,
    stats: SolveStats,
    blocks: BlockStats,
) -> Solution:
    if incumbent is None:
        return Solution(Status.UNKNOWN, None, bound_s, None, stats, stopped_by=stopped_by, blocks=blocks)
    plan, time_per_sample_s = incumbent
    optimal = bound_s >= time_per_sample_s * (1.0 - PROOF)
    within_gap = bound_s >= time_per_sample_s * (1.0 - gap)
    return Solution(
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        time_per_sample=time_per_sample_s,
        lower_bound=min(bound_s, time_per_sample_s),
        plan=plan,
        stats=stats,
        stopped_by=None if optimal else "gap" if within_gap else stopped_by,
        blocks=blocks,
    )
