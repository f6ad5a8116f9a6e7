"""Solves with one d and one t for all on a cluster: the answers of one process, whatever becomes of the workers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from piper_ray.compiled.jit import is_loaded
from piper_ray.engine.backends.calls import Call, ThreadWorkers
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.backends.ray import RayBackend, calls
from piper_ray.engine.backends.ray.coordinator import Coordinator
from piper_ray.engine.backends.ray.publication import Publisher, Stored
from piper_ray.engine.solve import solve
from piper_ray.model.errors import UsageError
from piper_ray.model.events import DegreesAdvanced, Event
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop
from tests.flush_instances import uneven_layers
from tests.instances import random_instance, two_towers
from tests.lengths import long_after
from tests.ray_support import backend_of, until_workers_are_there

pytestmark = pytest.mark.usefixtures("local_ray")

LONG = two_towers(20, devices=64, microbatches=64, memory_bytes=170.0)
ENOUGH = SolveOptions(passes_limit=20_000_000)
"""What ends its search under a schedule with chunks, which would take half a minute."""


@pytest.fixture(scope="module")
def backend(local_ray: None) -> Iterator[RayBackend]:  # noqa: ARG001 - the cluster
    long_by_one_thread()  # its kernels are on disk for the workers then: one that is lost amid compiling costs a minute
    with backend_of(workers=2) as opened:
        yield opened


@pytest.fixture
def _workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is searched by the driver's own thread, however small."""
    monkeypatch.setattr(ThreadWorkers, "busy", property(lambda _: True))
    monkeypatch.setattr(calls, "_ALONE_S", 0.0)


@pytest.fixture
def _no_worker_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: what a worker keeps for long would go to the driver too, and so would new calls if
    each worker still had one of the search before."""
    monkeypatch.setattr(Coordinator, "_lateness", lambda *_: 0.0)


def figures(solution: Solution) -> tuple[object, ...]:
    return solution.status, solution.time_per_sample_s, solution.lower_bound_s, solution.plan, solution.stopped_by


@cache
def long_by_one_thread(schedule: str = "1f1b") -> Solution:
    return solve(LONG, schedule=schedule, options=replace(ENOUGH, threads=1))


def workers_at_work(backend: RayBackend) -> list[int]:
    """Their processes."""
    dispatcher = backend._dispatcher
    if dispatcher is None or dispatcher.in_flight == 0:
        return []
    return [hello.process for hello in list(dispatcher._pool._ready.values())]


@pytest.mark.usefixtures("_workers_alone")
@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "interleaved"]))
@pytest.mark.parametrize("instance", [uneven_layers(3), random_instance(5), two_towers(5, devices=8)])
def test_the_answer_is_that_of_threads(backend: RayBackend, instance: Instance, schedule: str) -> None:
    found = solve(instance, schedule=schedule, options=ENOUGH, backend=backend)
    assert figures(found) == figures(solve(instance, schedule=schedule, options=replace(ENOUGH, threads=1)))
    assert found.stats.cluster is not None
    assert found.stats.cluster.chunks > 0


@pytest.mark.usefixtures("_workers_alone", "_no_worker_is_late")
def test_a_worker_fetches_what_calls_share_once(monkeypatch: pytest.MonkeyPatch, backend: RayBackend) -> None:
    fetched: Counter[Stored] = Counter()

    def sent(publisher: Publisher, node: str, stored: Stored) -> None:
        fetched[stored] += 1
        as_it_is(publisher, node, stored)

    as_it_is = Publisher.sent
    monkeypatch.setattr(Publisher, "sent", sent)
    until_workers_are_there(backend, 2, lambda: solve(uneven_layers(3), schedule="interleaved", backend=backend))
    fetched.clear()
    found = solve(uneven_layers(3), schedule="interleaved", options=ENOUGH, backend=backend).stats.cluster
    assert found is not None
    assert max(fetched.values()) <= found.workers < found.chunks


@pytest.mark.usefixtures("_no_worker_is_late")
def test_the_driver_takes_no_call_once_there_are_workers(backend: RayBackend) -> None:
    def process(_: object) -> int:
        return os.getpid()

    opened = backend.open_workers()
    assert isinstance(opened, calls.ClusterWorkers)
    with closing(opened):
        opened.start(0.0, 0.0)
        while opened.workers == 0:
            time.sleep(0.02)
        opened.give(Call(0, process, (), (), "a call"))
        while not (found := opened.done(1.0)):
            pass
    assert found[0].result != os.getpid()


@pytest.mark.usefixtures("_workers_alone", "_no_worker_is_late")
def test_a_worker_for_calls_may_be_any_process_and_has_no_kernels_of_levels(backend: RayBackend) -> None:
    import ray

    def environment() -> str:
        return str(ray.get_runtime_context().get_runtime_env_string())

    def about_itself(_: object) -> tuple[str, bool]:
        from piper_ray.engine.kernels.level import evaluate_runs

        return environment(), is_loaded(evaluate_runs)

    until_workers_are_there(backend, 2, lambda: solve(uneven_layers(3), schedule="interleaved", backend=backend))
    task: Any = ray.remote(num_cpus=0)(environment)
    with closing(backend.open_workers()) as opened:
        opened.give(Call(0, about_itself, (), (), "a call"))
        while not (found := opened.done(1.0)):
            pass
    assert found[0].result == (ray.get(task.remote()), False), "processes of other environments serve no worker"


@pytest.mark.usefixtures("_workers_alone")
@pytest.mark.parametrize(
    ("schedule", "number"), long_after(0, [("1f1b", signal.SIGKILL), ("interleaved", signal.SIGSTOP)])
)
def test_a_worker_that_is_no_more_costs_time_alone(
    backend: RayBackend, schedule: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_LEAST_EXPECTED_S", 0.05)
    monkeypatch.setattr(calls, "_END_WITHIN_S", 0.1)  # each bound that is asked for ends with one who does not answer
    struck: list[int] = []
    until_workers_are_there(backend, 1, lambda: solve(random_instance(5), schedule="1f1b", backend=backend))

    def listener(event: Event) -> None:
        at_work = workers_at_work(backend)
        if isinstance(event, DegreesAdvanced) and event.running and at_work and not struck:
            struck.append(at_work[0])
            os.kill(at_work[0], number)

    try:
        while not struck:
            found = solve(LONG, schedule=schedule, options=ENOUGH, backend=backend, listener=listener)
    finally:
        for process in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert figures(found) == figures(long_by_one_thread(schedule))


@pytest.mark.usefixtures("_workers_alone")
@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "interleaved"]))
def test_a_stop_ends_what_workers_do(backend: RayBackend, schedule: str) -> None:
    stop: Stop[Solution] = Stop()

    def listener(event: Event) -> None:
        if isinstance(event, DegreesAdvanced) and event.running:
            stop.request()

    whole = long_by_one_thread(schedule)
    ended = solve(LONG, schedule=schedule, options=ENOUGH, backend=backend, listener=listener, stop=stop)
    assert ended.stopped_by == "interrupt"
    assert ended.status in (Status.UNKNOWN, Status.FEASIBLE)
    assert ended.lower_bound_s <= whole.lower_bound_s
    small = random_instance(5)
    again = solve(small, schedule=schedule, backend=backend)
    assert figures(again) == figures(solve(small, schedule=schedule, options=SolveOptions(threads=1)))


def test_what_is_small_stays_in_the_driver() -> None:
    with backend_of(workers=1) as fresh:
        found = solve(random_instance(5), schedule="1f1b", backend=fresh)
        assert found.stats.cluster is not None
        assert found.stats.cluster.chunks == 0
        assert fresh._dispatcher is None


def test_other_backends() -> None:
    instance = random_instance(5)
    local = LocalBackend(2)
    try:
        assert figures(solve(instance, schedule="1f1b", backend=local)) == figures(solve(instance, schedule="1f1b"))
    finally:
        local.close()

    class LevelsAlone:
        def __getattr__(self, name: str) -> object:
            if name in ("open_workers", "__array_interface__"):
                raise AttributeError(name)
            return np.nan if name != "evaluate_downsets" else len

    with pytest.raises(UsageError, match="evaluates levels alone"):
        solve(instance, schedule="1f1b", backend=LevelsAlone())  # type: ignore[arg-type]
