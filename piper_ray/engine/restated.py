"""Constraints on a plan as a whole that are kept by solving another problem than the one asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import Solver, SubProblem, best_of, numbered, unproved
from piper_ray.model.constraints import KeepOrder, Recompute, SustainedRate, WholePieces
from piper_ray.model.errors import UsageError
from piper_ray.model.one_mode import OneMode
from piper_ray.model.options import Contract
from piper_ray.model.passes import with_passes
from piper_ray.model.plan_rules import in_order, layers_in_order
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import Solution


def solve_restated(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """``solve``, also for constraints that it does not know: ``SustainedRate``, ``KeepOrder``, one for all layers.

    Raises UsageError where they cannot be kept: a rate under a schedule that drains, or an order of blocks.
    """
    restrictions = request.restrictions
    if restrictions.has(SustainedRate):
        if schedule != PAPERS_SCHEDULE:
            raise UsageError(f"only 2bw has a rate to sustain; {schedule.name.value} does not go on for ever")
        from piper_ray.engine.sustained import solve_sustained

        by_rule = replace(request, restrictions=restrictions.without(SustainedRate))
        return solve_sustained(by_rule, lambda one: solve_restated(one, schedule, solve))
    if restrictions.has(KeepOrder):
        chain = replace(request, instance=in_order(request.instance), restrictions=restrictions.without(KeepOrder))
        return _said(request, chain, lambda one: solve_restated(one, schedule, solve), _keeping_order)
    if restrictions.has(OneMode):
        from piper_ray.engine.one_setting import solve_one_setting

        return solve_one_setting(request, schedule, lambda one: solve_restated(one, schedule, solve))
    for rule in restrictions.constraints:
        if isinstance(rule, WholePieces):
            return _whole_pieces(request, rule, lambda one: solve_restated(one, schedule, solve))
    if restrictions.recompute is Recompute.ONE_FOR_ALL:
        return _one_for_all(request, solve)
    if restrictions.recompute is Recompute.FIRST_K and request.options.contract is not Contract.SAFE:
        raise UsageError("blocks of operators have no first k layers to recompute: leave out contract")
    return solve(request)


def _said(request: SolveRequest, changed: SolveRequest, solve: Solver, say: Callable[[Solution], Solution]) -> Solution:
    """The answer to ``changed`` in the words of ``request``, at the end and at any moment before it."""
    part = request.stop.part()
    request.stop.offer(lambda: None if (found := part.answer()) is None else say(found))
    return say(solve(replace(changed, stop=part)))


def _keeping_order(solution: Solution) -> Solution:
    plan = solution.plan
    return solution if plan is None else replace(solution, plan=replace(plan, keeps_order=True))


def _whole_pieces(request: SolveRequest, rule: WholePieces, solve: Solver) -> Solution:
    """Of an instance whose layers are the pieces. Nothing is proved where these have too many choices of TMPCs."""
    instance = with_passes(request.instance, request.note)
    restrictions = request.restrictions.without(WholePieces)
    piece_of = {layer: piece for piece in rule.pieces for layer in piece}
    members = tuple(dict.fromkeys(piece_of.get(layer, (layer,)) for layer in layers_in_order(instance)))
    if restrictions.recompute is Recompute.FIRST_K and any(len(piece) > 1 for piece in members):
        raise UsageError("pieces of several layers have no first k layers to recompute: leave out recompute first-k")
    from piper_ray.engine.blocks.block_instance import build_instance

    found = build_instance(instance, stage_variants(instance, restrictions), members)

    def said(solution: Solution) -> Solution:
        plan = solution.plan
        of_layers = replace(solution, plan=None if plan is None else found.expand(plan, instance))
        return unproved(of_layers) if found.dropped else of_layers

    return _said(request, replace(request, instance=found.instance, restrictions=restrictions), solve, said)


def _one_for_all(request: SolveRequest, solve: Solver) -> Solution:
    """The better of both settings."""
    named = numbered("recomputation one-for-all", ["recomputation in no layer", "recomputation in every layer"])
    parts = [
        SubProblem(0.0, replace(request, restrictions=request.restrictions.with_recompute(rule)), name)
        for rule, name in zip((Recompute.NEVER, Recompute.ALWAYS), named, strict=True)
    ]
    return best_of(request, parts, solve)
