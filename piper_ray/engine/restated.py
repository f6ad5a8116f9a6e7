"""Constraints on a plan as a whole that are kept by solving another problem than the one asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from piper_ray.cost.tolerances import PROOF
from piper_ray.cost.variants import never_worse, stage_variants
from piper_ray.engine.blocks.block_instance import build_instance
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.sustained import solve_sustained
from piper_ray.model.constraints import KeepOrder, Recompute, SustainedRate, WholePieces
from piper_ray.model.errors import UsageError
from piper_ray.model.in_order import in_order, layers_in_order
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.options import Contract
from piper_ray.model.passes import passes_of, with_passes
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.settings import OneSetting
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy

Solver = Callable[[SolveRequest], Solution]

_A_MOMENT_S = 1e-3


def solve_restated(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """``solve``, also for constraints that it does not know: ``SustainedRate``, ``KeepOrder``, one for all layers.

    Raises UsageError where they cannot be kept: a rate under a schedule that drains, or an order of blocks.
    """
    restrictions = request.restrictions
    if restrictions.has(SustainedRate):
        if schedule != PAPERS_SCHEDULE:
            raise UsageError(f"only 2bw has a rate to sustain; {schedule.name.value} does not go on for ever")
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
    found = build_instance(instance, stage_variants(instance, restrictions), members)

    def said(solution: Solution) -> Solution:
        plan = solution.plan
        of_layers = replace(solution, plan=None if plan is None else found.expand(plan, instance))
        return _unfinished(of_layers) if found.dropped else of_layers

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
            together = one if so_far is None else _better(so_far, one)
            return together if last else _unfinished(together)

        timed = _in_time(request, part, others + 1)
        answer = _answer_of(request, timed if found is None else _faster_than(found, timed), solve, answered)
        found = answer if found is None else _better(found, answer)
        if answer.stopped_by is StoppedBy.INTERRUPT and others:
            return _unfinished(found)
    assert found is not None
    return found


def _faster_than(found: Solution, part: SolveRequest) -> SolveRequest:
    """Whose plans are of interest only if they are as fast."""
    known_s = [s for s in (found.time_per_sample_s, part.options.within_s) if s is not None]
    return replace(part, options=replace(part.options, within_s=min(known_s, default=None)))


def _in_time(request: SolveRequest, part: SolveRequest, parts_left: int) -> SolveRequest:
    """With its share of the time that is left."""
    limit_s, now_s = request.options.time_limit_s, time.perf_counter()
    if limit_s is None:
        return replace(part, started_s=now_s)
    left_s = max(_A_MOMENT_S, (limit_s - (now_s - request.started_s)) / parts_left)
    return replace(part, options=replace(part.options, time_limit_s=left_s), started_s=now_s)


def _answer_of(
    request: SolveRequest, part: SolveRequest, solve: Solver, so_far: Callable[[Solution], Solution]
) -> Solution:
    """The answer to a part; at any moment before it ``so_far`` of what that has is offered."""
    stop = request.stop.part()
    request.stop.offer(lambda: None if (found := stop.answer()) is None else so_far(found))
    return solve(replace(part, stop=stop))


def _unfinished(found: Solution) -> Solution:
    """What is said of it while there are solves that were not begun."""
    status = Status.UNKNOWN if found.plan is None else Status.FEASIBLE
    return replace(found, status=status, lower_bound_s=0.0, infeasibility=None)


def _better(first: Solution, second: Solution) -> Solution:
    """Of two solves the better plan, with what both have proved."""
    found = (first, second)
    stats = replace(
        second.stats,
        lattice_s=first.stats.lattice_s + second.stats.lattice_s,
        stage_costs_s=first.stats.stage_costs_s + second.stats.stage_costs_s,
        search_s=first.stats.search_s + second.stats.search_s,
        evaluations=(*first.stats.evaluations, *second.stats.evaluations),
    )
    if all(one.status is Status.INFEASIBLE for one in found):
        return replace(min(found, key=_least_memory_bytes), stats=stats)
    lower_s = min(one.lower_bound_s for one in found)
    early = [one.stopped_by for one in found if one.stopped_by is not None]
    stopped_by = next((reason for reason in early if reason is not StoppedBy.TOO_SLOW), early[0] if early else None)
    with_plan = [(one.time_per_sample_s, one) for one in found if one.time_per_sample_s is not None]
    if not with_plan:
        unknown = next(one for one in found if one.status is not Status.INFEASIBLE)
        return replace(unknown, lower_bound_s=lower_s, stats=stats, stopped_by=stopped_by)
    value_s, best = min(with_plan, key=lambda x: x[0])
    proved = lower_s >= value_s * (1.0 - PROOF)
    return replace(
        best,
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        lower_bound_s=min(lower_s, value_s),
        stats=stats,
        stopped_by=None if proved else stopped_by,
    )


def _least_memory_bytes(solution: Solution) -> float:
    found = None if solution.infeasibility is None else solution.infeasibility.least_memory_bytes
    return float("inf") if found is None else found
