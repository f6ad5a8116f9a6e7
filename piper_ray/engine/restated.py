"""Constraints on a plan as a whole that are kept by solving another problem than the one asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from piper_ray.cost.variants import never_worse, stage_variants
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.several import Solver, answer_of, better, faster_than, in_time, unfinished
from piper_ray.model.constraints import KeepOrder, Recompute, SustainedRate, WholePieces
from piper_ray.model.errors import UsageError
from piper_ray.model.in_order import in_order, layers_in_order
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.options import Contract
from piper_ray.model.passes import passes_of, with_passes
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.settings import OneSetting
from piper_ray.model.solution import Solution
from piper_ray.model.stop import StoppedBy


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
    if restrictions.has(OneSetting):
        return _one_setting(request, lambda one: solve_restated(one, schedule, solve))
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
        return unfinished(of_layers) if found.dropped else of_layers

    return _said(request, replace(request, instance=found.instance, restrictions=restrictions), solve, said)


def _one_for_all(request: SolveRequest, solve: Solver) -> Solution:
    """The better of both settings."""
    parts = [
        replace(request, restrictions=request.restrictions.with_recompute(rule))
        for rule in (Recompute.NEVER, Recompute.ALWAYS)
    ]
    return _best_of(request, parts, solve, "recomputation one-for-all")


def _one_setting(request: SolveRequest, solve: Solver) -> Solution:
    """The best of all settings but those that another one never loses to."""
    restrictions = request.restrictions.without(OneSetting)
    found: list[Instance] = []
    for constraint in request.restrictions.constraints:
        if isinstance(constraint, OneSetting):
            for setting in constraint.settings(request.instance):
                instance = constraint.under(request.instance, setting)
                if not any(_never_loses(other, instance) for other in found):
                    found = [*(other for other in found if not _never_loses(instance, other)), instance]
    parts = [replace(request, instance=instance, restrictions=restrictions) for instance in found]
    return _best_of(request, parts, solve, "one setting for all layers")


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
    if one == other:
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


def _best_of(request: SolveRequest, parts: Sequence[SolveRequest], solve: Solver, what: str) -> Solution:
    """The best answer of several solves, one after the other. what: asks for them, in words.

    Until all have been begun nothing is known of what the others would find. Each but the first is over once none of
    its plans can be better than the best one.
    """
    if len(parts) > 1 and request.options.resume is not None:
        raise UsageError(f"{what} takes {len(parts)} solves, which one folder cannot keep: leave out resume")
    found: Solution | None = None
    for index, part in enumerate(parts):
        others, so_far = len(parts) - index - 1, found

        def answered(one: Solution, so_far: Solution | None = so_far, last: bool = others == 0) -> Solution:
            together = one if so_far is None else better(so_far, one)
            return together if last else unfinished(together)

        timed = in_time(request, part, others + 1)
        answer = answer_of(request, timed if found is None else faster_than(found, timed), solve, answered)
        found = answer if found is None else better(found, answer)
        if answer.stopped_by is StoppedBy.INTERRUPT and others:
            return unfinished(found)
    assert found is not None
    return found
