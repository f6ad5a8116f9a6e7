"""``solve``: the whole way from an instance to a proved plan. Only puts the parts together."""

from __future__ import annotations

import os
from collections.abc import Sequence

from piper_ray.compiled.observers import compiling_told
from piper_ray.cost.schedules import chunk_schedules
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.layers import solve_layers
from piper_ray.engine.preparation import Preparation
from piper_ray.engine.request import SolveRequest, is_by_degrees
from piper_ray.engine.restated import solve_restated, stashing
from piper_ray.engine.subproblems import solve_on_levels
from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Listener, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.restrictions import Restrictions
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
) -> Solution:
    """The plan of least time per sample, with proof; or the best one found when a limit or an interrupt comes first.

    instance: may be what ``load`` takes, such as a path.
    devices, microbatches, memory_bytes, bandwidth_bytes_per_s: K, N, M and B in place of the instance's own; sizes as
    numbers of bytes or as texts such as "8GiB" and "25GB/s".
    gap, time_limit, threads, memory_limit, checkpoint, contract: those of ``options`` (where a checkpoint is
    ``resume``), in their place; a time limit in seconds or as "10m", a memory limit in bytes or as "16GB".
    backend: who does the work; None: threads of this process.
    prepared: of this graph and shape, to be shared by many solves under 2bw; what it cost is in none of their stats;
    left aside where a constraint takes another problem (KeepOrder, SustainedRate, recomputation one-for-all).
    stop: ends the search as an interrupt does, and is offered the solution so far.
    schedule: that which the plan is to run under, or its name; None: the instance's own, else Piper's, "2bw". Under all
    others stages have one d and one t, time per sample is the simulated time of a batch over N, and no plan of that
    kind beats the lower bound. "1f1b" and "gpipe" end with a proof. Those with chunks on each rank ("interleaved",
    "looped-bfs", "zb-h1", "zb-v", "dualpipe-v") end with a gap: the plan's stages are its chunks, and by the name alone
    every number of chunks on a rank is tried. "pipedream" is planned as "2bw" is, with a version of the weights for
    each microbatch in flight, and gradients summed after each round of a stage's replicas.

    step: terms of a step under a flush: how gradients are summed, how much of that hides, the optimizer.

    Raises LimitError if the lattice does not fit, InputError with all faults of an instance that is not sound,
    UsageError for arguments that make no sense, and StopSearch if ``stop`` asks before the search began.

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
    with compiling_told(listener):
        request = SolveRequest(instance, restrictions, options, backend, listener, stop or Stop(), step)
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
            # Restated, or on a smaller level, another problem is solved than what was prepared for.
            other = one.restrictions != restrictions or one.instance.devices != instance.devices
            return _solve(one, schedules, None if other else prepared)

        def solve_levels(one: SolveRequest) -> Solution:
            return solve_on_levels(one, solve_one)

        return solve_restated(request, planned_for, stashing(solve_levels) if stashes else solve_levels)


def _solve(request: SolveRequest, schedules: Sequence[Schedule], prepared: Preparation | None) -> Solution:
    """schedules: of one name, with the numbers of chunks that may be. Each way loads its own modules: that of single
    layers is so quick that loading the others would show."""
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
    """Raises UsageError for each that is something else, and for two that contradict."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    arguments.of_kind("prepared", prepared, (Preparation, type(None)), "a Preparation")
    arguments.of_kind("stop", stop, (Stop, type(None)), "a Stop")
    arguments.function("listener", listener)
    if backend is not None and not callable(getattr(backend, "evaluate_downsets", None)):
        raise UsageError(f"backend must be a backend, such as RayBackend('auto'), not {arguments.shown(backend)}")
    if prepared is not None and isinstance(options, SolveOptions) and options.contract is Contract.OPERATORS:
        raise UsageError("prepared is for single layers; leave it out, or contract=OPERATORS")


def _check_prepared(planned_for: Schedule, restrictions: Restrictions) -> None:
    """Raises UsageError where another lattice is planned on than one that was prepared."""
    if planned_for.name is ScheduleName.PIPEDREAM:
        raise UsageError("prepared has the lattice of 2bw: leave it out under pipedream, which has other figures")
    if planned_for.name in CHUNKED or is_by_degrees(planned_for, restrictions):
        raise UsageError(
            "prepared has the lattice of 2bw, whose stages have d and t of their own: leave it out under "
            f"{planned_for.name.value} with one d and one t for all"
        )
