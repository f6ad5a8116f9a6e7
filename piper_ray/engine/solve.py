"""``solve``: the whole way from an instance to a proved plan. Only puts the parts together."""

from __future__ import annotations

from piper_ray.compiled.observers import observed
from piper_ray.engine.blocks.solve import solve_by_blocks
from piper_ray.engine.chunks.answer import chunk_schedules, solve_with_chunks
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.flush.answer import solve_under_flush
from piper_ray.engine.layers import solve_layers
from piper_ray.engine.preparation import Preparation
from piper_ray.engine.request import Request
from piper_ray.model import arguments
from piper_ray.model.constraints import AllDevices, SameDegrees, StageCount
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Compiling, Listener, Note, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import CHUNKED, PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop
from piper_ray.workloads.formats.load import Source, instance_of

_FLUSHED = (ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE)


def solve(
    instance: Instance | Source,
    *,
    restrictions: Restrictions = Restrictions(),
    options: SolveOptions = SolveOptions(),
    backend: Backend | None = None,
    listener: Listener = silent,
    prepared: Preparation | None = None,
    stop: Stop[Solution] | None = None,
    schedule: Schedule | ScheduleName | str | None = None,
) -> Solution:
    """The plan of least time per sample, with proof; or the best one found when a limit or an interrupt comes first.

    instance: may be what ``load`` takes, such as a path. Without ``backend`` threads of this process do the work.
    prepared: of this graph and shape, to be shared by many solves; what it cost is in none of their stats. stop: ends
    the search as an interrupt does, and is offered the solution so far.
    schedule: that which the plan is to run under, or its name; None: the instance's own, else Piper's, "2bw". Under all
    others stages have one d and one t, time per sample is the simulated time of a batch over N, and no plan of that
    kind beats the lower bound. "1f1b" and "gpipe" end with a proof. Those with chunks on each rank ("interleaved",
    "looped-bfs", "zb-h1", "zb-v", "dualpipe-v") end with a gap: the plan's stages are its chunks, and by the name alone
    every number of chunks on a rank is tried.

    Raises LimitError if the lattice does not fit, InputError with all faults of an instance that is not sound,
    UsageError for arguments that make no sense, and StopSearch if ``stop`` asks before the search began.
    """
    _check_arguments(restrictions, options, backend, listener, prepared, stop)
    with observed(compiling=lambda: listener(Compiling()), note=lambda text: listener(Note(text))):
        given, instance = instance, instance_of(instance)
        request = Request(instance, restrictions, options, backend, listener, stop or Stop())
        if given is not instance:
            for note in instance.notes:
                request.note(note)
        asked = schedule or instance.schedule or PAPERS_SCHEDULE
        planned_for = Schedule.of(asked)
        if planned_for.name in CHUNKED:
            return solve_with_chunks(request, chunk_schedules(asked))
        same_degrees = any(isinstance(rule, SameDegrees) for rule in restrictions.plan_wide)
        if planned_for.name in _FLUSHED or (planned_for == PAPERS_SCHEDULE and same_degrees):
            return solve_under_flush(request, planned_for)
        if planned_for != PAPERS_SCHEDULE:
            able = ", ".join(name.value for name in ScheduleName if name is not ScheduleName.PIPEDREAM)
            raise UsageError(f"plans for schedule {planned_for.name.value} are not made yet; expected one of {able}")
        if any(isinstance(rule, (StageCount, AllDevices)) for rule in restrictions.plan_wide):
            rules = ", ".join(map(repr, restrictions.plan_wide))
            raise UsageError(f"under 2bw {rules} needs equal d and t in all stages: add SameDegrees (--same-degrees)")
        restrictions.require_stages_alone("solve")
        by_blocks = options.contract is Contract.OPERATORS
        return solve_by_blocks(request) if by_blocks else solve_layers(request, prepared)


def _check_arguments(
    restrictions: object, options: object, backend: object, listener: object, prepared: object, stop: object
) -> None:
    """Raises UsageError for each that is something else, and for two that contradict."""
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    arguments.of_kind("options", options, SolveOptions, "SolveOptions")
    arguments.of_kind("prepared", prepared, (Preparation, type(None)), "a Preparation")
    arguments.of_kind("stop", stop, (Stop, type(None)), "a Stop")
    arguments.function("listener", listener)
    if backend is not None and not callable(getattr(backend, "evaluate_downsets", None)):
        raise UsageError(f"backend must be a backend, such as RayBackend('auto'), not {arguments.shown(backend)}")
    if prepared is not None and isinstance(options, SolveOptions) and options.contract is Contract.OPERATORS:
        raise UsageError("prepared is for single layers; leave it out, or contract=OPERATORS")
