"""Makes the certificate that proves a solution's bound. Under 2bw it has the states of one more evaluation, just below
the bound; under a flush it has prices for each d and t, and the bound may be lower, if the check can prove only
that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from piper_ray.certificate.certificate import Certificate, PassPrices, Tails, charged, require_certifiable
from piper_ray.certificate.flush_check import (
    FlushProblem,
    batch_limit_s,
    in_threads,
    least_on_ranks,
    proved_by,
    shapes_of,
)
from piper_ray.certificate.flush_tables import StagePrices
from piper_ray.certificate.kernels.flush_states import FOUND, PROVED
from piper_ray.cost.tolerances import PROOF
from piper_ray.cost.variants import layer_without_choice, usable_variants
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.flush.kinds import on_kind, open_end
from piper_ray.engine.kernels.types import BitArray, IndexArray
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph, count_downsets
from piper_ray.engine.layers import solve_unplaced
from piper_ray.engine.mixed import MixedWorkload
from piper_ray.engine.preparation import Outline, downset_limit, lattice_within, prepare
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.subproblems import instances
from piper_ray.engine.tables.problem import build_problem
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions, Unplaced
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.events import silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.plan_rules import with_fastest_borders
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch
from piper_ray.workloads.formats.load import Source, instance_of

_NOT_OF_THIS = (
    "the solution's bound of {:.9g} s does not hold for this instance under these restrictions: give those that it was "
    "solved for"
)
_ANY_TIME_S = 1e200
"""A threshold that every stage keeps."""


def certify(
    instance: Instance | Source,
    solution: Solution,
    *,
    restrictions: Restrictions = Restrictions(),
    threads: int | None = None,
    memory_limit: float | str | None = None,
    backend: Backend | None = None,
    stop: Stop[Any] | None = None,
) -> Certificate:
    """Returns a certificate of the solution's lower bound. For an optimal solution it proves that no plan takes less
    than (1 - 1e-9) of its time, and for an infeasible one that there is no plan.

    instance, restrictions: those of the solve. Under 2bw one evaluation of the lattice is made. It takes as long as the
    last ones of the solve, or longer if these had closer bounds on what a plan may still use. Under a flush the bound
    may be lower than the solution's, if the check cannot look through all plans between the two. On nodes with faster
    links the bound of plans with places (``Plan.places``) is that of all borders at the fastest rate. If this is lower
    than the solution's, and its plan has no places, the certificate is restricted to plans without them (``Unplaced``).
    threads: None: one for each core. memory_limit: as for ``solve``. backend: does the work; None: threads of this
    process.
    Raises UsageError if there is no certificate for "pipedream", for constraints on more than a stage or for blocks of
    operators, or if the solution is of another instance. Raises LimitError if, under 2bw, all downsets do not fit in
    memory.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1, schedule="2bw")
    >>> piper_ray.certify(bert, solution).bound_s >= solution.time_per_sample_s * (1 - 1e-8)
    True
    """
    instance = instance_of(instance)
    arguments.of_kind("solution", solution, Solution, "a Solution")
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    contract = Contract.SAFE if solution.blocks is None else Contract.OPERATORS
    require_certifiable(restrictions, solution.schedule, contract)
    limit_bytes = SolveOptions().changed(memory_limit=memory_limit).memory_limit_bytes
    if not solution.schedule.asynchronous:
        return _under_flush(instance, solution, restrictions, threads or usable_cores(), stop or Stop())
    require_listable(instance, restrictions, limit_bytes)
    bound_s = certifiable_s(solution)
    if instance.cluster.kinds:
        parts = _on_kinds(charged(instance, restrictions), restrictions, bound_s, limit_bytes, stop or Stop())
        return Certificate(instance.digest, instance.name, restrictions, bound_s, tuple(parts))
    levels = instances(charged(instance, restrictions))
    with closing(LocalBackend(threads)) if backend is None else nullcontext(backend) as used:
        if levels[-1].cluster.has_faster_groups and not restrictions.has(Unplaced):
            relaxed = tuple(map(with_fastest_borders, levels))
            options = SolveOptions().changed(memory_limit=memory_limit)
            requests = (SolveRequest(x, restrictions, options, used, silent, stop or Stop()) for x in relaxed)
            least_s = min(certifiable_s(solve_unplaced(request)) for request in requests)
            if least_s < bound_s and (solution.plan is None or solution.plan.places is None):
                restrictions = restrictions.adding(Unplaced())
            else:
                levels, bound_s = relaxed, min(bound_s, least_s)
        tails = tuple(_tails(level, restrictions, bound_s, limit_bytes, used, stop or Stop()) for level in levels)
    return Certificate(instance.digest, instance.name, restrictions, bound_s, tails)


def _under_flush(
    instance: Instance, solution: Solution, restrictions: Restrictions, threads: int, stop: Stop[Any]
) -> Certificate:
    from piper_ray.engine.certified_prices import find_prices  # HiGHS is loaded where it is needed

    problem = FlushProblem(instance, restrictions, solution.schedule, solution.step)
    wanted_s = certifiable_s(solution)
    limit_s = batch_limit_s(instance, solution.step, wanted_s)
    control = np.zeros(1)

    def look() -> None:
        if control[0] != 0.0:
            raise StopSearch(StoppedBy.INTERRUPT)

    def settle(number: int) -> tuple[float, list[PassPrices]]:
        pair = pairs[number]
        proved_s, prices = np.inf, []
        for ranks in shapes_of(pair):
            least_s = least_on_ranks(pair, ranks)
            given = None if pair.has_kinds or least_s >= limit_s else find_prices(pair, ranks, limit_s, look)
            if given is not None:
                prices.append(given)
                least_s = max(least_s, proved_by(StagePrices.of(pair, given), pair))
            proved_s = min(proved_s, least_s)
        if proved_s >= limit_s or not problem.is_whole:
            return proved_s, prices
        of_pair = StagePrices.of(pair, prices[0]) if prices else None
        try:
            status, least_s, _ = problem.look(pair, of_pair, limit_s, control)
            if status == PROVED:
                return limit_s, prices
            if status == FOUND:
                raise UsageError(_NOT_OF_THIS.format(wanted_s))
            nearly_s = least_s * (1.0 - PROOF)
            if nearly_s > proved_s and problem.look(pair, of_pair, nearly_s, control)[0] == PROVED:
                proved_s = nearly_s
        except LimitError:
            pass
        return proved_s, prices

    pairs = [pair for pair in problem.pairs() if pair.least_s < limit_s] if limit_s > 0.0 else []
    found = in_threads(settle, len(pairs), threads, stop, control)
    proved_s = min([limit_s, *(one for one, _ in found)])
    if proved_s < limit_s:
        proved_s *= 1.0 - PROOF
    bound_s = wanted_s if proved_s >= limit_s else (proved_s + solution.step.optimizer_s) / instance.microbatches
    return Certificate(
        instance.digest,
        instance.name,
        restrictions,
        bound_s,
        schedule=solution.schedule,
        step=solution.step,
        prices=tuple(prices for _, of_pair in found for prices in of_pair),
    )


def require_listable(instance: Instance, restrictions: Restrictions, memory_limit_bytes: float | None) -> None:
    """Raises LimitError if there are more downsets than fit in memory. A certificate covers all of them, even if a
    solve lists only the useful ones."""
    for level in instances(charged(instance, restrictions)):
        outline = Outline.of(level, restrictions)
        downset_limit(outline.graph, len(outline.variants), outline.downsets, memory_limit_bytes)


def certifiable_s(solution: Solution) -> float:
    """Returns the bound to prove for all plans, slightly below the one that the search proved."""
    if solution.status is Status.OPTIMAL and solution.time_per_sample_s is not None:
        return solution.time_per_sample_s * (1.0 - PROOF)
    return solution.lower_bound_s * (1.0 - PROOF)


def _tails(
    instance: Instance,
    restrictions: Restrictions,
    bound_s: float,
    limit_bytes: float | None,
    backend: Backend,
    stop: Stop[Any],
) -> Tails:
    made, kept = prepare(instance, restrictions, limit_bytes), list[StateTables]()
    if made.workload is not None and bound_s > 0.0:
        problem = build_problem(made.workload, instance, restrictions.data_parallel_degrees(instance))
        outcome = evaluate_threshold(
            problem,
            backend,
            min(bound_s, _ANY_TIME_S),
            on_progress=lambda _: stop.check(),
            on_finished=kept.append,
        )
        if outcome.feasible:
            raise UsageError(_NOT_OF_THIS.format(bound_s))
    states = _states(kept[-1]) if kept else _EMPTY_SET_ALONE
    return _rows(instance, made.outline.graph, made.outline.contraction.keeper, states)


def _on_kinds(
    instance: Instance, restrictions: Restrictions, bound_s: float, limit_bytes: float | None, stop: Stop[Any]
) -> Iterator[Tails]:
    """Yields the tails of all plans; or of parts of these, with some layers on given kinds of devices, if edges that
    skip stages have several rates."""
    graph, usable = build_graph(instance, without_contraction()), usable_variants(instance, restrictions)
    if bound_s == 0.0 or layer_without_choice(instance, usable) is not None:
        yield _rows(instance, graph, {}, _EMPTY_SET_ALONE)
        return
    variants = len(usable) * len(instance.cluster.kinds) ** 2
    lattice, _ = lattice_within(graph, variants, count_downsets(graph), limit_bytes, silent, 0.0)
    left: list[tuple[Instance, dict[int, str]]] = [(instance, {})]
    while left:
        part, kinds = left.pop()
        workload, threshold_s = MixedWorkload.of(part, restrictions, lattice), min(bound_s, _ANY_TIME_S)
        tails, used, _ = workload.tails(threshold_s, stop.check)
        stages = workload.stages(tails, used, threshold_s)
        if stages is not None:
            plan = Planning(part, without_contraction()).plan(workload.problem, stages)
            layer, names = open_end(part, workload, workload.missed_s(plan))
            if not names:
                raise UsageError(_NOT_OF_THIS.format(bound_s))
            left += [(on_kind(part, layer, name), {**kinds, layer: name}) for name in names]
            continue
        fronts = tails.start.shape[1] - 1
        front = np.repeat(np.tile(np.arange(fronts), len(tails.start)), np.diff(tails.start, axis=1).ravel())
        bits = np.repeat(workload.problem.tables.lattice.bits, tails.start[:, -1] - tails.start[:, 0], axis=0)
        states = bits, tails.cell[:used] * fronts + front, tails.sums[:used]
        yield replace(_rows(instance, graph, {}, states), kinds=kinds)


def _rows(instance: Instance, graph: LayerGraph, joined: Mapping[int, int], states: _States) -> Tails:
    bits, used_devices, data_parallel_sum = states
    width = (graph.size + 7) // 8
    members = np.ascontiguousarray(bits.astype("<u8")).view(np.uint8).reshape(bits.shape[0], -1)
    return Tails(
        devices=instance.devices,
        layers=tuple(graph.layer_ids),
        joined=dict(joined),
        members=np.ascontiguousarray(np.pad(members, ((0, 0), (0, max(0, width - members.shape[1]))))[:, :width]),
        used_devices=used_devices,
        data_parallel_sum=data_parallel_sum,
    )


_States = tuple[BitArray, IndexArray, IndexArray]
"""For each state: its downset, uint64[states, words], its devices, and its sum of d."""

_EMPTY_SET_ALONE: _States = np.zeros((1, 1), np.uint64), np.zeros(1, np.int64), np.zeros(1, np.int64)


def _states(found: StateTables) -> _States:
    fronts, live = found.fronts, np.flatnonzero(found.fronts.states)
    counts = fronts.states[live]
    at = np.repeat(fronts.start[live] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    bits = found.tables.lattice.bits[np.repeat(live, counts)]
    return bits, fronts.tally[at], fronts.data_parallel_sum[at]
