"""Points solved: from a planner's answer, or its error, to a row of the dataset.

Each process keeps what the points of one graph share (``Lattices``), and builds what it needs; nothing is shipped:
lattice and sums of Inception-v3's 221,565 downsets take some 30 ms, less than reading them from another machine would,
and those of small graphs 2 ms. What a process holds is bounded, and part of the memory that workers ask for
(``demand``).
"""

from __future__ import annotations

import json
import math
import platform
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from types import FrameType
from typing import Any, NamedTuple

from piper_ray.compiled.jit import sources_digest
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.preparation import PointShape, Preparation, bytes_per_downset, prepare
from piper_ray.engine.solve import solve
from piper_ray.evaluate import Evaluation
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.events import Listener, silent
from piper_ray.model.fields import plain_fields
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import Solution, SolveStats, Status
from piper_ray.model.stop import Stop, StoppedBy, StopSearch
from piper_ray.planners import planner_of
from piper_ray.planners.planner import Proposal, Terms, allowed_proposal, evaluated
from piper_ray.sweep.plan_point import PlannedModel, PlanPoint, Row, plan_row, schedules_tried
from piper_ray.sweep.point import AnyPoint, Point
from piper_ray.version import __version__

KEPT = 8
KEPT_BYTES = 100e6
"""The most bytes that are kept in addition to the one in use."""


class Lattices:
    """Preparations by workload and shape. Those used least recently go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, PointShape], Preparation] = OrderedDict()

    def of(self, point: Point, instance: Instance) -> tuple[Preparation, float, float]:
        """The preparation, with the seconds that lattice and stage costs took just now. Raises LimitError if it does
        not fit."""
        key = point.workload, PointShape.of(instance, point.restrictions)
        kept = self._kept.pop(key, None)
        self._make_room()
        if kept is not None and kept.serves(instance, point.restrictions):
            self._kept[key] = kept
            return kept, 0.0, 0.0
        made = self._kept[key] = prepare(instance, point.restrictions)
        return made, made.lattice_s, made.stage_costs_s

    def _make_room(self) -> None:
        while len(self._kept) >= KEPT or sum(map(_size_bytes, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)


def _size_bytes(made: Preparation) -> float:
    downsets = made.workload.lattice.size if made.workload is not None else 0
    return downsets * bytes_per_downset(made.outline.graph, len(made.outline.variants))


class KeptLattice:
    """What one point needs of ``Lattices``, once somebody asks. lattice_s, stage_costs_s: what was made for it took."""

    def __init__(self, lattices: Lattices, point: Point) -> None:
        self._lattices, self._point = lattices, point
        self.lattice_s = self.stage_costs_s = 0.0

    def prepare(self, instance: Instance, restrictions: Restrictions) -> Preparation:
        """The preparation of the point's graph, under its restrictions. Raises LimitError if it does not fit."""
        assert restrictions == self._point.restrictions
        prepared, self.lattice_s, self.stage_costs_s = self._lattices.of(self._point, instance)
        return prepared


_LONGEST_MESSAGE = 2_000


def answer(
    point: AnyPoint,
    subject: Instance | PlannedModel,
    options: SolveOptions,
    lattices: Lattices,
    backend: Backend | None = None,
    listener: Listener = silent,
    stop: Stop[Any] | None = None,
) -> Row:
    """The point's row, but for ``Sweep.identity``. An error of the planner is an answer too.

    subject: what ``Sweep.subjects`` has of the point. Raises KeyboardInterrupt when interrupted, StopSearch when
    ``stop`` asks.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    stop = stop or Stop()
    try:
        if isinstance(point, PlanPoint):
            assert isinstance(subject, PlannedModel)
            with _interrupts() as interrupts:
                row = plan_row(point, subject, stop)
            stop.check()
            if interrupts:
                raise KeyboardInterrupt
        else:
            assert isinstance(subject, Instance)
            terms = Terms(options, backend, listener)
            row = _solved(point, point.on(subject), KeptLattice(lattices, point), terms, stop)
    except StopSearch:
        raise
    except InfeasibleError as error:
        row = {"status": Status.INFEASIBLE.value, "note": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other points go on
        row = error_row(type(error).__name__, str(error))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {**row, **_of_run(), "seconds": seconds, "cpu_s": cpu_s, "spread": backend is not None}


def _solved(point: Point, instance: Instance, kept: KeptLattice, terms: Terms, stop: Stop[Any]) -> Row:
    """instance: the point's. Raises what ``answer`` does, and what the planner does."""
    prepare = kept.prepare if point.schedule == PAPERS_SCHEDULE else None
    planner = planner_of(point.planner, replace(terms, stop=stop.part(), prepare=prepare))
    with _interrupts() as interrupts:
        proposal = allowed_proposal(planner, instance, point.restrictions)
    if proposal.solution is None:
        return _of_proposal(*evaluated(instance, proposal))
    stop.check()
    if interrupts or proposal.solution.stopped_by is StoppedBy.INTERRUPT:
        raise KeyboardInterrupt
    return {**_of_solution(proposal.solution), **_of_search(proposal.solution.stats, kept)}


class Report(NamedTuple):
    """The rows of a batch. seconds: the time of all the work, without that of getting ready."""

    rows: tuple[Row, ...]
    seconds: float


_lattices = Lattices()
"""What this process keeps from call to call. It spares work, and no answer depends on it."""


def solve_points(
    subject: Instance | PlannedModel,
    points: tuple[AnyPoint, ...],
    options: SolveOptions,
    control: object,  # noqa: ARG001
) -> Report:
    """What a worker is called with: each point's row. They are of one kind. Errors of planners are in the rows."""
    for schedule in _schedules_of(points[0]):
        _make_ready(schedule)
    began = time.perf_counter()
    rows = tuple(answer(point, subject, options, _lattices) for point in points)
    return Report(rows, time.perf_counter() - began)


def _schedules_of(point: AnyPoint) -> Iterator[Schedule]:
    """The schedules that its search goes through."""
    if isinstance(point, Point):
        yield point.schedule
    else:
        with suppress(UsageError):  # which its row tells
            for name in schedules_tried(point):
                yield Schedule.first_of(name).settled


@cache
def _make_ready(schedule: Schedule) -> None:
    """Loads the schedule's kernels, or compiles them, as far as it can be planned for."""
    before, after = {0: 1.0}, {1: 1.0}
    tmpcs = [Tmpc("fast", 1.0, 1.0, 2.0, 1.0), Tmpc("small", 2.0, 1.0, 1.0, 1.0, recompute=True)]
    first = tuple(replace(tmpc, backward_sync_bytes=after) for tmpc in tmpcs)
    second = tuple(replace(tmpc, forward_sync_bytes=before) for tmpc in tmpcs)
    layers = (Layer(0, "first", {1: first}), Layer(1, "second", {1: second}))
    with suppress(UsageError):
        solve(Instance(layers, (Edge(0, 1, 1.0),), 2, 2, 4.0, 1.0), options=SolveOptions(threads=1), schedule=schedule)


def lost_row(message: str) -> Row:
    """The row of a point that ended every worker that had it."""
    return {**error_row("WorkerLost", message), **_of_run(), "seconds": 0.0, "cpu_s": 0.0, "spread": False}


def error_row(kind: str, message: str) -> Row:
    """The columns of a point that could not be answered; a long message is cut."""
    return {"status": "error", "error_kind": kind, "error": message[:_LONGEST_MESSAGE]}


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the interrupts that come meanwhile: solve takes one as the wish for what it has, which is not the
    point's answer."""
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _of_solution(solution: Solution) -> Row:
    proved = solution.status in (Status.OPTIMAL, Status.FEASIBLE, Status.UNKNOWN)
    infeasibility = solution.infeasibility
    return {
        "status": solution.status.value,
        "time_per_sample_s": solution.time_per_sample_s,
        "lower_bound_s": solution.lower_bound_s if proved and math.isfinite(solution.lower_bound_s) else None,
        "gap": solution.gap,
        **_of_plan(solution.plan, solution.schedule),
        "stopped_by": None if solution.stopped_by is None else solution.stopped_by.value,
        "note": infeasibility.reason if infeasibility is not None else None,
        "least_memory_bytes": infeasibility.least_memory_bytes if infeasibility is not None else None,
    }


def _of_search(stats: SolveStats, kept: KeptLattice) -> Row:
    """What it took; times with those of the lattice, where it was made for this point."""
    return {
        **plain_fields(stats, ("layers", "downsets", "levels", "pairs")),
        "evaluations": len(stats.evaluations),
        "lattice_s": kept.lattice_s + stats.lattice_s,
        "stage_costs_s": kept.stage_costs_s + stats.stage_costs_s,
        "search_s": stats.search_s,
    }


def _of_proposal(proposal: Proposal, evaluation: Evaluation | None) -> Row:
    plan = proposal.plan
    return {
        "status": (Status.INFEASIBLE if plan is None else Status.FEASIBLE).value,
        "time_per_sample_s": None if evaluation is None else evaluation.time_per_sample_s,
        **_of_plan(plan, PAPERS_SCHEDULE if evaluation is None else evaluation.schedule),
        "note": proposal.note,
        "tried": proposal.tried,
    }


def _of_plan(plan: Plan | None, schedule: Schedule) -> Row:
    if plan is None:
        return {}
    text = json.dumps(plan.to_dict(), separators=(",", ":"), ensure_ascii=False)
    kinds = [stage.kind for stage in plan.stages]
    of_kinds = {"kinds_of_stages": json.dumps(kinds)} if any(kinds) else {}
    return {"devices_used": plan.by_rank(schedule).devices, "stages": len(plan.stages), "plan": text, **of_kinds}


def _of_run() -> Row:
    return {
        "version": __version__,
        "kernels": sources_digest(),
        "host": socket.gethostname(),
        "runtime": _runtime(),
        "finished_at": datetime.now(timezone.utc),
    }


@cache
def _runtime() -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba", "pyarrow", "ray"))
    return f"Python {platform.python_version()}, {libraries}"
