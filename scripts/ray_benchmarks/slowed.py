"""An evaluation on machines whose work takes a set time, so that several of them can share few cores.

A program of its own, for the machine where Ray's head is: prints what it measured as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import piper_ray.engine.backends.ray.worker as workers
from piper_ray.engine.backends.ray.backend import RayBackend
from piper_ray.engine.backends.ray.placement import WorkerSize
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.preparation import prepare
from piper_ray.engine.tables.problem import Problem, build_problem
from piper_ray.model.constraints import Restrictions
from scripts.ray_benchmarks.cases import towers
from scripts.ray_benchmarks.sending import SendPairs

HEIGHT = 60
S_PER_BOUND = 5e-5
"""Seconds of a worker for a bound: about twenty times what its work takes."""

_ABOVE = 1.3
"""The threshold over the lower bound: nearly every downset is live."""

_WORKERS_WITHIN_S = 60.0
_CALLS = 50


def main(address: str, machines: int) -> None:
    """Prints the seconds of one evaluation, and what the model needs to know."""
    _slow_workers_down()
    restrictions = Restrictions()
    instance = towers(2, HEIGHT, devices=16, microbatches=64, memory="8GiB")
    workload = prepare(instance, restrictions).workload
    assert workload is not None
    problem = build_problem(workload, instance, restrictions.data_parallel_degrees(instance))
    threshold_s = _ABOVE * problem.lower_bound_s()
    with closing(
        RayBackend(address, workers=machines, cpus_per_worker=1, threads=1, without_workers="wait", pacing=SendPairs())
    ) as backend:
        deadline = time.monotonic() + _WORKERS_WITHIN_S
        while backend.activity().workers < machines:
            if time.monotonic() > deadline:
                raise SystemExit(f"{machines} workers did not start in {_WORKERS_WITHIN_S:g} s")
            evaluate_threshold(problem, backend, problem.lower_bound_s())
        _evaluate(problem, backend, threshold_s)  # tables are there then, and all code is loaded
        dispatcher = backend._started(WorkerSize(1, 0.0))
        before = dispatcher.busy_s, dispatcher.chunks_sent
        seconds, states = _evaluate(problem, backend, threshold_s)
        chunks = dispatcher.chunks_sent - before[1]
        measured = {
            "seconds": seconds,
            "call_s": (dispatcher.busy_s - before[0]) / chunks,
            "round_trip_s": _round_trip_s(dispatcher),
            "near_s": states.rates.near.s_per_bound,
            "buckets": [0, *states.buckets.level_first[1:].tolist(), states.buckets_used],
            "level_start": problem.lattice.level_start.tolist(),
        }
    print(json.dumps(measured))


def _evaluate(problem: Problem, backend: RayBackend, threshold_s: float) -> tuple[float, StateTables]:
    kept: list[StateTables] = []
    problem.rates.far.s_per_bound = S_PER_BOUND
    began_s = time.perf_counter()
    evaluate_threshold(
        problem, backend, threshold_s, on_finished=lambda states: kept.__setitem__(slice(None), [states])
    )
    return time.perf_counter() - began_s, kept[0]


def _round_trip_s(dispatcher: Any) -> float:
    """The median seconds of a call that does nothing."""
    import ray

    (actor, *_) = dispatcher._pool._actors.values()
    taken_s = []
    for _ in range(_CALLS):
        began_s = time.perf_counter()
        ray.get(actor.handle.tell.remote(-1, 0.0, 0.0))
        taken_s.append(time.perf_counter() - began_s)
    return sorted(taken_s)[_CALLS // 2]


def _slow_workers_down() -> None:
    s_per_bound = S_PER_BOUND
    sleep: Callable[[float], None] = time.sleep

    # Local, so that Ray ships it whole: workers cannot import scripts.
    class Slowed(workers.Worker):
        def call(self, order: Any) -> Any:
            began_s = time.perf_counter()
            reply, (chunk,) = super().call(order), order.arguments
            wanted_s = (chunk.last - chunk.first) * chunk.buckets * s_per_bound
            sleep(max(0.0, began_s + wanted_s - time.perf_counter()))
            return reply._replace(found=reply.found._replace(seconds=wanted_s))

    workers.Worker = Slowed  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
