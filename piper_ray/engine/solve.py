"""``solve``: finds the best plan for an instance, with a proof. This module only puts the parts together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from piper_ray.compiled.observers import compiling_told
from piper_ray.cost.schedules import chunk_schedules
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.layers import solve_layers
from piper_ray.engine.preparation import Preparation
from piper_ray.engine.request import SolveRequest, is_by_degrees
from piper_ray.engine.restated import solve_restated, stashing
from piper_ray.engine.subproblems import solve_on_levels
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Listener, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.schedule import CHUNKED, FLUSHED, PAPERS_SCHEDULE, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop
from piper_ray.workloads.formats.load import Source, on_cluster


def solve(
    instance: Instance | Source,
    *,
    devices: int | None = None,
    microbatches: int | None = None,
    memory_bytes: float | str | None = None,
    bandwidth_bytes_per_s: float | str | None = None,
    gap: float | None = None,
    time_limit: float | str | None = None,
    threads: int | None = None,
    memory_limit: float | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    contract: Contract | str | None = None,
    restrictions: Restrictions = Restrictions(),
    options: SolveOptions = SolveOptions(),
    backend: Backend | None = None,
    listener: Listener = silent,
    prepared: Preparation | None = None,
    stop: Stop[Solution] | None = None,
    schedule: Schedule | ScheduleName | str | None = None,
    step: StepTerms = StepTerms(),
    kept: Any = None,
) -> Solution:
    """Returns the plan of least time per sample, with proof; or the best one found before a limit or an interrupt.

    instance: an ``Instance``, or what ``load`` takes, such as a path.
    devices, microbatches, memory_bytes, bandwidth_bytes_per_s: replace K, N, M and B of the instance; sizes are numbers
    of bytes or texts such as "8GiB" and "25GB/s".
    gap, time_limit, threads, memory_limit, checkpoint, contract: replace those of ``options`` (there, a checkpoint is
    called ``resume``). A time limit is in seconds or a text such as "10m"; a memory limit is in bytes or a text such as
    "16GB".
    backend: does the work; None: threads of this process.
    prepared: the tables of this graph and shape, which many solves under 2bw can share. No solve's statistics include
    the time to make them. They are not used if a constraint changes the problem (KeepOrder, SustainedRate,
    recomputation one-for-all).
    stop: ends the search as an interrupt does, and gets the solution so far.
    schedule: the schedule under which the plan runs, or its name; None: the instance's own, or else Piper's, "2bw".
    Under all others every stage has the same d and t, and time per sample is the simulated time of a batch divided by
    N; the lower bound holds for such plans. "1f1b" and "gpipe" end with a proof. Schedules with chunks on each rank
    ("interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v") end with a gap. Their plans have a stage for each
    chunk; if only the name is given, every number of chunks per rank is tried. "pipedream" is planned like "2bw", but
    with a version of the weights for each microbatch in flight, and with gradients summed after each round of a stage's
    replicas.
    step: the terms of a step under a flush: how gradients are summed, how much of that is hidden, and the optimizer.
    kept: ``KeptSearches`` of the engine, in which searches with chunks are kept. With it, another solve of the same
    problem goes on where they ended, with a larger limit of passes and at most the same ``within_s``. All passes so far
    count.

    Raises LimitError if the lattice does not fit in memory, InputError with all faults of an invalid instance,
    UsageError for invalid or contradictory arguments, and StopSearch if ``stop`` is requested before the search begins.

    >>> import piper_ray
    >>> instance = piper_ray.estimate("bert-large", "A100-80", nodes=1)
    >>> piper_ray.solve(instance, devices=4, time_limit="1m").status
    <Status.OPTIMAL: 'optimal'>
    """
    arguments.of_kind("options", options, SolveOptions, "SolveOptions")
    options = options.changed(
        gap=gap,
        time_limit=time_limit,
        threads=threads,
        memory_limit=memory_limit,
        checkpoint=checkpoint,
        contract=contract,
    )
    _check_arguments(restrictions, options, backend, listener, prepared, stop)
    arguments.of_kind("step", step, StepTerms, "StepTerms")
    given, instance = instance, on_cluster(instance, devices, microbatches, memory_bytes, bandwidth_bytes_per_s)
    asked = schedule or instance.schedule
    planned_for = Schedule.first_of(asked)
    if planned_for.name not in FLUSHED | {ScheduleName.TWO_BW}:
        instance.require_one_kind(f"plans for schedule {planned_for.name.value}")
    if planned_for.asynchronous:
        instance.require_one_site(f"plans for schedule {planned_for.name.value}")
    with compiling_told(listener):
        request = SolveRequest(instance, restrictions, options, backend, listener, stop or Stop(), step, kept=kept)
        if not isinstance(given, Instance):
            for note in instance.notes:
                request.note(note)
        if prepared is not None:
            _check_prepared(planned_for, restrictions)
        if step != StepTerms() and planned_for.name not in FLUSHED | CHUNKED:
            raise UsageError(
                "terms of a step (--all-reduce, --all-reduce-overlap, --optimizer) are for schedules with a flush; "
                f"{planned_for.name.value} has its own"
            )

        stashes = planned_for.name is ScheduleName.PIPEDREAM
        schedules = chunk_schedules(PAPERS_SCHEDULE if stashes else asked or planned_for)

        def solve_one(one: SolveRequest) -> Solution:
            # Prepared tables are only of the given problem, not of a restated one or one on fewer devices.
            other = one.restrictions != restrictions or one.instance.devices != instance.devices
            return _solve(one, schedules, None if other else prepared)

        def solve_levels(one: SolveRequest) -> Solution:
            return solve_on_levels(one, solve_one)

        return solve_restated(request, planned_for, stashing(solve_levels) if stashes else solve_levels)


def _solve(request: SolveRequest, schedules: Sequence[Schedule], prepared: Preparation | None) -> Solution:
    """schedules: all of one name, with the numbers of chunks that are tried. Modules are imported where they are used:
    a solve of single layers is so quick that loading the others would show."""
    if request.options.contract is Contract.OPERATORS:
        request.instance.require_one_kind("blocks of operators")
        from piper_ray.engine.blocks.solve import solve_by_blocks

        return solve_by_blocks(request, schedules, lambda exact: _solve(exact, schedules, None))
    planned_for = schedules[0]
    if planned_for.name in CHUNKED:
        from piper_ray.engine.chunks.solve import solve_with_chunks

        return solve_with_chunks(request, schedules)
    if is_by_degrees(planned_for, request.restrictions):
        from piper_ray.engine.flush.solve import solve_under_flush

        return solve_under_flush(request, planned_for)
    request.restrictions.require_stages_alone("solve")
    if request.instance.cluster.kinds:
        from piper_ray.engine.mixed import solve_mixed

        return solve_mixed(request)
    return solve_layers(request, prepared)


def _check_arguments(
    restrictions: object, options: object, backend: object, listener: object, prepared: object, stop: object
) -> None:
    """Raises UsageError for each argument of the wrong type, and for two that contradict each other."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    arguments.of_kind("prepared", prepared, (Preparation, type(None)), "a Preparation")
    arguments.of_kind("stop", stop, (Stop, type(None)), "a Stop")
    arguments.function("listener", listener)
    if backend is not None and not callable(getattr(backend, "evaluate_downsets", None)):
        raise UsageError(f"backend must be a backend, such as RayBackend('auto'), not {arguments.shown(backend)}")
    if prepared is not None and isinstance(options, SolveOptions) and options.contract is Contract.OPERATORS:
        raise UsageError("prepared is for single layers; leave it out, or contract=OPERATORS")


def _check_prepared(planned_for: Schedule, restrictions: Restrictions) -> None:
    """Raises UsageError if the schedule is planned on a lattice other than the prepared one."""
    if planned_for.name is ScheduleName.PIPEDREAM:
        raise UsageError("prepared has the lattice of 2bw: leave it out under pipedream, which has other figures")
    if planned_for.name in CHUNKED or is_by_degrees(planned_for, restrictions):
        raise UsageError(
            "prepared has the lattice of 2bw, whose stages have d and t of their own: leave it out under "
            f"{planned_for.name.value} with one d and one t for all"
        )
