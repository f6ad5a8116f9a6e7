"""One point solved: from the planner's answer, or its error, to a row of the dataset."""

from __future__ import annotations

import json
import math
import platform
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

from piper_ray import planners
from piper_ray.compiled.jit import sources_digest
from piper_ray.engine.solve import solve
from piper_ray.model.errors import InfeasibleError
from piper_ray.model.events import Listener, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import INTERRUPT, Stop, StopSearch
from piper_ray.sweep.lattices import Lattices
from piper_ray.sweep.point import Point
from piper_ray.sweep.schema import PIPER
from piper_ray.version import __version__

if TYPE_CHECKING:
    from piper_ray.engine.evaluation.backend import Backend

Row = dict[str, object]

_LONGEST_MESSAGE = 2_000


def answer(
    point: Point,
    graph: Instance,
    options: SolveOptions,
    lattices: Lattices,
    backend: Backend | None = None,
    listener: Listener = silent,
    stop: Stop[Any] | None = None,
) -> Row:
    """The point's row, but for what the sweep alone knows (``identity``). An error of the planner is an answer too.

    Raises KeyboardInterrupt when interrupted, StopSearch when ``stop`` asks.
    """
    began = time.perf_counter()
    instance = point.on(graph)
    try:
        if point.planner == PIPER:
            row = _by_piper(point, instance, options, lattices, backend, listener, stop or Stop())
        else:
            row = _by_baseline(point, instance)
    except StopSearch:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the other points go on
        row = error_row(type(error).__name__, str(error))
    return {**row, **_of_run(), "seconds": time.perf_counter() - began, "spread": backend is not None}


def identity(point: Point, input_hash: str, graph_hash: str, options: SolveOptions) -> Row:
    """Which point a row is of."""
    return {
        "workload": point.workload,
        "input_hash": input_hash,
        "graph_hash": graph_hash,
        "planner": point.planner,
        "devices": point.devices,
        "microbatches": point.microbatches,
        "memory_bytes": point.memory_bytes,
        "bandwidth_bytes_per_s": point.bandwidth_bytes_per_s,
        "tensor_parallelism": point.restrictions.tensor_parallelism,
        "data_parallelism": point.restrictions.data_parallelism,
        "recompute": point.restrictions.recompute.value,
        "gap_limit": options.gap,
        "time_limit_s": options.time_limit_s,
    }


def lost_row(message: str) -> Row:
    """Of a point that ended every worker that had it."""
    return {**error_row("WorkerLost", message), **_of_run(), "seconds": 0.0, "spread": False}


def error_row(kind: str, message: str) -> Row:
    return {"status": "error", "error_kind": kind, "error": message[:_LONGEST_MESSAGE]}


def _by_piper(
    point: Point,
    instance: Instance,
    options: SolveOptions,
    lattices: Lattices,
    backend: Backend | None,
    listener: Listener,
    stop: Stop[Any],
) -> Row:
    prepared, lattice_s, stage_costs_s = lattices.of(point, instance)
    with _interrupts() as interrupts:
        solution = solve(
            instance,
            restrictions=point.restrictions,
            options=options,
            backend=backend,
            prepared=prepared,
            listener=listener,
            stop=stop.part(),
        )
    stop.check()
    if interrupts or solution.stopped_by == INTERRUPT:
        raise KeyboardInterrupt
    stats = solution.stats
    return {
        **_of_solution(solution),
        "layers": stats.layers,
        "downsets": stats.downsets,
        "levels": stats.levels,
        "pairs": stats.pairs,
        "evaluations": len(stats.evaluations),
        "lattice_s": lattice_s,
        "stage_costs_s": stage_costs_s + stats.stage_costs_s,
        "search_s": stats.search_s,
    }


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Those that come meanwhile: solve takes one as the wish for what it has, which is not the point's answer."""
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
        "time_per_sample_s": solution.time_per_sample,
        "lower_bound_s": solution.lower_bound if proved and math.isfinite(solution.lower_bound) else None,
        "gap": solution.gap,
        **_of_plan(solution.plan),
        "stopped_by": solution.stopped_by,
        "note": infeasibility.reason if infeasibility is not None else None,
        "least_memory_bytes": infeasibility.least_memory_bytes if infeasibility is not None else None,
    }


def _by_baseline(point: Point, instance: Instance) -> Row:
    try:
        result = planners.plan(instance, point.planner, restrictions=point.restrictions)
    except InfeasibleError as error:
        return {"status": Status.INFEASIBLE.value, "note": str(error)}
    return {
        "status": (Status.INFEASIBLE if result.plan is None else Status.FEASIBLE).value,
        "time_per_sample_s": result.time_per_sample,
        **_of_plan(result.plan),
        "note": result.note,
        "tried": result.tried,
    }


def _of_plan(plan: Plan | None) -> Row:
    if plan is None:
        return {}
    text = json.dumps(plan.to_dict(), separators=(",", ":"), ensure_ascii=False)
    return {"devices_used": plan.devices, "stages": len(plan.stages), "plan": text}


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
