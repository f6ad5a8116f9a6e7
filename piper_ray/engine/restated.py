"""Satisfies some constraints on a plan as a whole by solving another problem than the one posed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from piper_ray.cost.plan import cost_of
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.cost.variants import stage_variants
from piper_ray.engine.ledger import TIE
from piper_ray.engine.one_setting import solve_one_setting
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.subproblems import Solver, SubProblem, best_of, numbered, unproved
from piper_ray.model.constraints import (
    Constraint,
    KeepOrder,
    Recompute,
    Restrictions,
    SameDegrees,
    SustainedRate,
    WholePieces,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc, divisors
from piper_ray.model.one_mode import OneMode
from piper_ray.model.options import Contract
from piper_ray.model.passes import with_passes
from piper_ray.model.plan_rules import in_order, layers_in_order
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy, StopSearch


def solve_restated(request: SolveRequest, schedule: Schedule, solve: Solver) -> Solution:
    """Runs ``solve``, also for constraints that it does not handle: ``SustainedRate``, ``KeepOrder``, one setting for
    all layers, and whole pieces.

    Raises UsageError if they cannot be satisfied: a rate under a schedule that drains, or an order of blocks.
    """
    restrictions = request.restrictions

    def again(one: SolveRequest) -> Solution:
        return solve_restated(one, schedule, solve)

    if restrictions.has(SustainedRate):
        if schedule != PAPERS_SCHEDULE:
            raise UsageError(f"a sustained rate is planned for under 2bw alone, not {schedule.name.value}")
        by_rule = replace(request, restrictions=restrictions.without(SustainedRate))
        return solve_sustained(by_rule, again)
    if restrictions.has(KeepOrder):
        chain = replace(request, instance=in_order(request.instance), restrictions=restrictions.without(KeepOrder))
        return request.answered(again, chain, _keeping_order)
    if restrictions.has(OneMode):
        return solve_one_setting(request, schedule, again)
    for rule in restrictions.constraints:
        if isinstance(rule, WholePieces):
            return _whole_pieces(request, rule, again)
    if restrictions.recompute is Recompute.ONE_FOR_ALL:
        return _one_for_all(request, solve)
    if restrictions.recompute is Recompute.FIRST_K and request.options.contract is not Contract.SAFE:
        raise UsageError("blocks of operators have no first k layers to recompute: leave out contract")
    return solve(request)


def stashing(solve: Solver) -> Solver:
    """Makes a solver for PipeDream's schedule from ``solve`` for 2bw.

    A stage of d replicas sums gradients after each round of d microbatches and not after all N. This is 2bw's charge
    for N / d times the weights. So each TMPC is repeated for each d, with that many weights, and may be used from d
    replicas on; with d replicas the last one is the fastest. Each microbatch in flight has a version of the weights,
    which replaces those in the fixed memory.
    """

    def solved(request: SolveRequest) -> Solution:
        restated = replace(request, instance=stashing_instance(request.instance, request.restrictions))
        return request.answered(solve, restated, _of_pipedream)

    return solved


def stashing_instance(instance: Instance, restrictions: Restrictions) -> Instance:
    """Returns an instance whose plans under 2bw have the time and memory of ``instance``'s under PipeDream's
    schedule."""
    microbatches, limit = instance.microbatches, instance.data_parallel_limit
    degrees = [d for d in divisors(microbatches) if d <= limit and restrictions.admits_data_parallel_degree(d)]
    in_fixed = instance.versions_in_fixed

    def for_degrees(tmpc: Tmpc) -> Iterator[Tmpc]:
        weights_bytes = tmpc.weights_bytes
        least = tmpc.least_data_parallel_degree
        for d in [d for d in degrees if d >= least] or [least]:
            yield replace(
                tmpc,
                id=f"{tmpc.id}{_FOR}{d}",
                weights_bytes=weights_bytes * microbatches / d,
                activation_bytes=tmpc.activation_bytes + weights_bytes,
                fixed_bytes=max(0.0, tmpc.fixed_bytes - in_fixed * weights_bytes),
                least_data_parallel_degree=d,
            )

    layers = [
        replace(x, tmpcs={t: tuple(y for tmpc in row for y in for_degrees(tmpc)) for t, row in x.tmpcs.items()})
        for x in instance.layers
    ]
    return replace(instance, layers=tuple(layers)).checked_as(instance)


_FOR = " for d = "


def _of_pipedream(solution: Solution) -> Solution:
    """Returns the solution with the instance's own TMPCs."""
    plan = solution.plan
    if plan is not None:
        stages = [
            replace(stage, tmpc_ids={v: name.rpartition(_FOR)[0] for v, name in stage.tmpc_ids.items()})
            for stage in plan.stages
        ]
        plan = replace(plan, stages=tuple(stages))
    return replace(solution, plan=plan, schedule=Schedule(ScheduleName.PIPEDREAM))


def _keeping_order(solution: Solution) -> Solution:
    plan = solution.plan
    return solution if plan is None else replace(solution, plan=replace(plan, keeps_order=True))


def _whole_pieces(request: SolveRequest, rule: WholePieces, solve: Solver) -> Solution:
    """Solves an instance whose layers are the pieces. Nothing is proved if these have too many choices of TMPCs."""
    instance = with_passes(request.instance, request.note)
    restrictions = request.restrictions.without(WholePieces)
    piece_of = {layer: piece for piece in rule.pieces for layer in piece}
    members = tuple(dict.fromkeys(piece_of.get(layer, (layer,)) for layer in layers_in_order(instance)))
    if restrictions.recompute is Recompute.FIRST_K and any(len(piece) > 1 for piece in members):
        raise UsageError("pieces of several layers have no first k layers to recompute: leave out recompute first-k")
    from piper_ray.engine.blocks.block_instance import build_instance

    found = build_instance(instance, stage_variants(instance, restrictions), members)
    _require_order(found.instance)

    def said(solution: Solution) -> Solution:
        plan = None if solution.plan is None else found.expand(solution.plan, instance)
        of_layers = replace(solution, plan=plan)
        if plan is not None and plan.places is not None:
            time_s = cost_of(instance, plan).sample_s
            ended = solution.stopped_by or StoppedBy.GAP
            if time_s > (solution.time_per_sample_s or 0.0) * (1.0 + TIE):
                of_layers = replace(of_layers, time_per_sample_s=time_s, status=Status.FEASIBLE, stopped_by=ended)
        return unproved(of_layers) if found.dropped else of_layers

    return request.answered(solve, replace(request, instance=found.instance, restrictions=restrictions), said)


def _require_order(pieces: Instance) -> None:
    """Raises UsageError if pieces, which are the layers of the instance, read each other in a cycle."""
    readers = {piece.id: [edge.source for edge in pieces.edges if edge.target == piece.id] for piece in pieces.layers}
    try:
        TopologicalSorter(readers).prepare()
    except CycleError as error:
        circle = ", which ".join(f"is read by {pieces.layer_by_id[piece].name!r}" for piece in error.args[1][1:])
        raise UsageError(
            f"pieces that are to stay whole need each other: {pieces.layer_by_id[error.args[1][0]].name!r} {circle}. "
            "Take one of them apart, or add the layers between to it"
        ) from None


def _one_for_all(request: SolveRequest, solve: Solver) -> Solution:
    """Returns the better of both settings."""
    named = numbered("recomputation one-for-all", ["recomputation in no layer", "recomputation in every layer"])
    parts = [
        SubProblem(0.0, replace(request, restrictions=request.restrictions.with_recompute(rule)), name)
        for rule, name in zip((Recompute.NEVER, Recompute.ALWAYS), named, strict=True)
    ]
    return best_of(request, parts, solve)


_TRIALS = 10
"""Largest number of solves with less memory."""

_STEP = 0.01
"""Share of the memory by which each trial frees at least that much more."""


def solve_sustained(request: SolveRequest, solve: Solver) -> Solution:
    """Returns the best plan found that sustains its rate. request: without that constraint."""
    first = solve(replace(request, stop=request.stop.part()))
    kept, missing_bytes = _kept(request.instance, first)
    if kept is not None:
        return kept
    without = replace(first, status=Status.UNKNOWN, plan=None, time_per_sample_s=None)
    request.stop.offer(lambda: without)
    best = _best_of_others(request, solve, missing_bytes)
    stopped_by = request.limits.reached or first.stopped_by
    if best is None:
        return replace(without, stopped_by=stopped_by)
    lower_s = min(first.lower_bound_s, best.time_per_sample_s or 0.0)
    return replace(best, status=Status.FEASIBLE, lower_bound_s=lower_s, stats=first.stats, stopped_by=stopped_by)


def _kept(instance: Instance, found: Solution) -> tuple[Solution | None, float]:
    """Returns the solution with the microbatches in flight that its plan needs, by analysis, and checked by simulation.
    If the plan does not fit, returns None and about how many bytes a device lacks."""
    from piper_ray.simulate.assemble import most_bytes, sustaining_in_flight
    from piper_ray.simulate.run import simulate

    if found.plan is None:
        return found, 0.0
    in_flight = sustaining_in_flight(instance, found.plan)
    if in_flight is None:
        return None, _STEP * instance.memory_bytes
    plan = replace(found.plan, in_flight=in_flight)
    missing_bytes = most_bytes(instance, plan) - instance.memory_bytes
    if missing_bytes > MEMORY_TOLERANCE * instance.memory_bytes:
        return None, missing_bytes
    if not simulate(instance, plan, PAPERS_SCHEDULE).keeps_promise:
        return None, _STEP * instance.memory_bytes
    return replace(found, plan=plan), 0.0


def _best_of_others(request: SolveRequest, solve: Solver, missing_bytes: float) -> Solution | None:
    """Returns the first plan that sustains its rate among those that leave ever more memory free, or one with one d and
    t."""
    instance = request.instance
    best = None
    if request.backend is None:  # such a solve cannot use a custom backend
        best = _tried(request, solve, instance.memory_bytes, SameDegrees())[0]
    limit_bytes = instance.memory_bytes
    for _ in range(_TRIALS):
        limit_bytes -= max(_STEP * instance.memory_bytes, missing_bytes)
        if limit_bytes <= 0.0:
            break
        found, missing_bytes = _tried(request, solve, limit_bytes)
        if found is None or not _faster(found, best):
            break
        if missing_bytes == 0.0:
            return found
    return best


def _tried(
    request: SolveRequest, solve: Solver, memory_bytes: float, *rules: Constraint
) -> tuple[Solution | None, float]:
    """Solves with ``memory_bytes`` per device. Returns the solution, or None without a plan, and the bytes that its
    plan lacks to sustain its rate."""
    limit_s = request.options.time_limit_s
    if limit_s is not None and time.perf_counter() - request.started_s >= limit_s:
        return None, 0.0
    options = request.options
    if options.resume is not None:  # a checkpoint of its own
        options = replace(options, resume=f"{options.resume}/{memory_bytes:.0f}{'-alike' if rules else ''}")
    changed = replace(
        request,
        options=options,
        instance=request.instance.replace(memory_bytes=memory_bytes),
        restrictions=request.restrictions.adding(*rules),
        stop=request.stop.part(),
    )
    try:
        found = solve(changed)
    except StopSearch:
        return None, 0.0
    if found.plan is None:
        return None, 0.0
    kept, missing_bytes = _kept(request.instance, found)
    return kept or found, missing_bytes


def _faster(one: Solution, other: Solution | None) -> bool:
    if other is None or other.time_per_sample_s is None or one.time_per_sample_s is None:
        return True
    return one.time_per_sample_s < other.time_per_sample_s
