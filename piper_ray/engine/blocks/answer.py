"""What both ways of planning by blocks share: the layers' order along a plan of blocks, and the answer."""

from __future__ import annotations

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.model.plan import Plan
from piper_ray.model.solution import BlockStats, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy

CHAIN_GAP = 1e-4
"""How exactly borders within blocks are placed: far finer than what the blocks may cost."""

MOST_ON_CHAIN = 1_000
"""Layers up to which a chain of single layers takes seconds; it gains a percent or two."""


def order_through(graph: LayerGraph, plan: Plan | None) -> list[int]:
    """The vertices in an order that passes the borders of ``plan``, from the back; without one, in the graph's."""
    stage_of = {layer: number for number, stage in enumerate(plan.stages if plan else ()) for layer in stage.layers}
    return sorted(range(graph.size), key=lambda v: (-stage_of.get(graph.layer_ids[v], 0), v))


def unknown_answer(bound_s: float, stopped_by: StoppedBy, stats: SolveStats, blocks: BlockStats) -> Solution:
    """No plan of blocks was found, which proves nothing of the layers."""
    return Solution(Status.UNKNOWN, None, bound_s, None, stats, stopped_by=stopped_by, blocks=blocks)


def answer_of_layers(
    plan: Plan,
    time_per_sample_s: float,
    bound_s: float,
    gap: float,
    stopped_by: StoppedBy,
    stats: SolveStats,
    blocks: BlockStats,
) -> Solution:
    """bound_s: that of all plans of the layers. gap: the one asked for. stopped_by: why no better plan was sought."""
    optimal = bound_s >= time_per_sample_s * (1.0 - PROOF)
    within_gap = bound_s >= time_per_sample_s * (1.0 - gap)
    return Solution(
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        time_per_sample_s=time_per_sample_s,
        lower_bound_s=min(bound_s, time_per_sample_s),
        plan=plan,
        stats=stats,
        stopped_by=None if optimal else StoppedBy.GAP if within_gap else stopped_by,
        blocks=blocks,
    )
