"""Runs the cases: one local thread, one worker and two, in turns, on a Ray of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.backends.ray import RayBackend
from piper_ray.engine.backends.ray.session import LOCAL as HERE
from piper_ray.engine.backends.ray.session import connect
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.solve import solve
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from scripts.ray_benchmarks.cases import RayCase, towers
from scripts.ray_benchmarks.meter import Meter
from scripts.ray_benchmarks.results import CHOSEN, EXECUTORS, LOCAL, ONE, TWO, RayResult, Run
from scripts.ray_benchmarks.sending import SendAll

_WARM_UP_S = 10.0
_WORKERS_WITHIN_S = 120.0

Tell = Callable[[str], None]


class WorkersMissingError(Exception):
    """The workers did not start in time."""


def measure(cases: Sequence[RayCase], results: list[RayResult], tell: Tell) -> None:
    """Fills ``results``, valid whenever it stops. Raises WorkersMissingError if Ray starts no workers."""
    with _executors(tell) as executors:
        for number, case in enumerate(cases, 1):
            tell(f"[{number}/{len(cases)}] {case.title}")
            result, instance = RayResult(case), case.load()
            for _ in range(case.repeats):
                for name in EXECUTORS:
                    run = _run(instance, executors[name], case.limit_s)
                    result.runs[name].append(run)
                    tell(f"  {name}: {run.solution.status.value}, {run.search_s:.4g} s" + " (limit)" * run.bounded)
            results.append(result)


@contextmanager
def _executors(tell: Tell) -> Iterator[Mapping[str, Backend]]:
    """All kept open and warm: workers of one that waits take no time from the others."""
    tell("starting Ray and its workers")
    with (
        closing(connect(HERE, 5)),
        closing(LocalBackend(1)) as local,
        closing(RayBackend(workers=1, cpus_per_worker=1, threads=1, pacing=SendAll())) as one,
        closing(RayBackend(workers=2, cpus_per_worker=1, threads=1, pacing=SendAll())) as two,
        closing(RayBackend(workers=2, cpus_per_worker=1, threads=1)) as where_it_pays,
    ):
        instance = towers(4, 16, devices=16, microbatches=64, memory="4GiB")  # levels wide enough for workers
        solve(instance, backend=local, options=SolveOptions(time_limit_s=_WARM_UP_S))
        for backend, workers in ((one, 1), (two, 2)):
            until = time.monotonic() + _WORKERS_WITHIN_S
            while backend.activity().workers < workers:  # they start with the first batch, however late that comes
                if time.monotonic() > until:
                    raise WorkersMissingError(f"{workers} workers did not start in {_WORKERS_WITHIN_S:g} s")
                solve(instance, backend=backend, options=SolveOptions(time_limit_s=_WARM_UP_S))
            solve(instance, backend=backend, options=SolveOptions(time_limit_s=_WARM_UP_S))
        yield {LOCAL: local, ONE: one, TWO: two, CHOSEN: where_it_pays}


def _run(instance: Instance, backend: Backend, limit_s: float) -> Run:
    meter = Meter(backend)
    began = time.perf_counter()
    solution = solve(instance, backend=meter, options=SolveOptions(time_limit_s=limit_s))
    elapsed_s = time.perf_counter() - began
    if solution.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return Run(solution, tuple(meter.batches), solution.stopped_by is not None or elapsed_s >= limit_s)
