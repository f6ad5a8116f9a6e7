"""The Ray backend on a Ray of this machine: the answer of the threads, whatever becomes of the workers."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from piper_ray.engine.backends.ray import RayBackend, WithoutWorkers
from piper_ray.engine.solve import solve
from piper_ray.model.errors import ClusterError, UsageError
from piper_ray.model.events import EvaluationAdvanced, Event, Note
from piper_ray.model.instance import Instance
from piper_ray.model.solution import EvaluationStats, Solution, Status
from piper_ray.report.summary import cluster_lines
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.ray_support import (
    CPUS,
    backend_of,
    send_every_level_to_workers,
    until_workers_are_there,
    workers_that_die,
    workers_that_fail,
)
from tests.solver_support import ONE_THREAD
from tests.solver_support import tables as solver_tables

pytestmark = pytest.mark.usefixtures("local_ray")

WAIT, CONTINUE = WithoutWorkers.WAIT, WithoutWorkers.CONTINUE

INSTANCES: dict[str, Instance] = {
    "towers": two_towers(7, devices=9, microbatches=12, memory_bytes=90.0),
    "branches": parallel_branches(2, 5, devices=12, microbatches=8, memory_bytes=120.0),
    "chain": equal_chain(9, devices=5, memory_bytes=60.0),
    "does not fit": two_towers(3, devices=2, memory_bytes=7.0),
    "one layer": equal_chain(1),
    **{f"random {seed}": random_instance(seed, most_layers=8, most_devices=9).replace(devices=9) for seed in (1, 5)},
}
TOWERS = INSTANCES["towers"]


class Log:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


@cache
def by_threads(name: str) -> Solution:
    return solve(INSTANCES[name], options=ONE_THREAD)


def plan_bytes(solution: Solution) -> bytes | None:
    return None if solution.plan is None else json.dumps(solution.plan.to_dict()).encode()


def assert_same_answer(found: Solution, expected: Solution) -> None:
    """Byte for byte: plan, values, and each evaluation's answer. How much was tested may differ."""
    for solution in (found, expected):
        assert solution.stopped_by is None
    assert (found.status, found.infeasibility) == (expected.status, expected.infeasibility)
    assert repr(found.time_per_sample_s) == repr(expected.time_per_sample_s)
    assert repr(found.lower_bound_s) == repr(expected.lower_bound_s)
    assert plan_bytes(found) == plan_bytes(expected)
    assert answers(found) == answers(expected)


def answers(solution: Solution) -> list[EvaluationStats]:
    return [
        replace(evaluation, seconds=0.0, buckets_tested=0, candidates_tested=0, stages_costed=0)
        for evaluation in solution.stats.evaluations
    ]


def assert_gone(processes: list[int]) -> None:
    """Ray ends actors soon, not at once."""
    deadline = time.monotonic() + 30
    for process in processes:
        while is_there(process):
            assert time.monotonic() < deadline, f"process {process} goes on"
            time.sleep(0.02)


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_workers(backend: RayBackend, count: int) -> None:
    until_workers_are_there(backend, count, lambda: solve(INSTANCES["one layer"], backend=backend))


def processes_of(backend: RayBackend) -> list[int]:
    assert backend._dispatcher is not None
    return [hello.process for hello in backend._dispatcher._pool._ready.values()]


def test_it_ends_with_its_context() -> None:
    with RayBackend() as backend:
        found = solve(TOWERS, backend=backend)
        assert found.status is Status.OPTIMAL
    with pytest.raises(RuntimeError, match="shutdown"):
        backend._local._pool.submit(print)


@pytest.fixture(scope="class")
def two_workers(local_ray: None) -> Iterator[RayBackend]:  # noqa: ARG001 - the cluster
    with backend_of(workers=2, without_workers=WAIT) as backend:
        with pytest.MonkeyPatch.context() as patch:
            send_every_level_to_workers(patch)
            wait_for_workers(backend, 2)
        yield backend
        processes = processes_of(backend)
    assert len(processes) == 2
    assert_gone(processes)


class TestOneBackend:
    """What leaves its workers as they are."""

    def test_same_answer_as_threads(self, monkeypatch: pytest.MonkeyPatch, two_workers: RayBackend) -> None:
        """All instances on one backend: what workers keep of one must not leak into the next."""
        send_every_level_to_workers(monkeypatch)
        for name, instance in INSTANCES.items():
            found = solve(instance, backend=two_workers)
            assert_same_answer(found, by_threads(name))
            assert found.stats.threads == 2
        stats = two_workers.stats()
        assert stats.workers == 2
        assert sum(node.chunks for node in stats.nodes) == stats.chunks > stats.batches > 0
        assert stats.worked_s > 0

    @pytest.mark.long
    def test_same_answer_on_the_downsets_that_count(
        self, monkeypatch: pytest.MonkeyPatch, two_workers: RayBackend
    ) -> None:
        """A lattice of some downsets, whose levels are not all sizes; bounds and plans on the way to it too."""
        whole = {name: by_threads(name) for name in ("towers", "branches", "random 1", "random 5")}
        monkeypatch.setattr("piper_ray.engine.preparation._MANY", 20)
        monkeypatch.setattr("piper_ray.engine.preparation._MANY_A_LAYER", 1)
        alone = {name: solve(INSTANCES[name], options=ONE_THREAD) for name in whole}
        assert any(found.stats.downsets < whole[name].stats.downsets for name, found in alone.items())
        send_every_level_to_workers(monkeypatch)
        for name, expected in alone.items():
            found = solve(INSTANCES[name], backend=two_workers)
            assert_same_answer(found, expected)
            assert plan_bytes(expected) == plan_bytes(whole[name])
            assert found.stats.cluster is not None
            assert found.stats.cluster.chunks > 0

    def test_nothing_is_fetched_on_the_drivers_own_machine(
        self, monkeypatch: pytest.MonkeyPatch, two_workers: RayBackend
    ) -> None:
        send_every_level_to_workers(monkeypatch)
        stats = solve(TOWERS, backend=two_workers).stats.cluster
        assert stats is not None
        (node,) = stats.nodes
        assert node.fetched_bytes == 0
        assert node.chunks == stats.chunks
        # At least the workload's tables are put, once; levels of past evaluations are let go.
        tables = solver_tables(TOWERS).problem.tables
        downset_bytes = tables.lattice.bits.nbytes + tables.costs.need_s.nbytes
        assert downset_bytes < node.held_bytes <= stats.put_bytes

    @pytest.mark.long
    def test_figures_are_those_of_the_solve_alone(
        self, monkeypatch: pytest.MonkeyPatch, two_workers: RayBackend
    ) -> None:
        """Of several by one backend; also where the last one needed no worker."""
        found = []
        with monkeypatch.context() as patched:
            send_every_level_to_workers(patched)
            for _ in range(3):
                stats = solve(TOWERS, backend=two_workers).stats.cluster
                assert stats is not None
                found.append(stats)
        last = solve(INSTANCES["one layer"], backend=two_workers).stats.cluster
        for figures in zip(*((stats.batches, stats.chunks, stats.put_bytes) for stats in found), strict=True):
            assert max(figures) < 2 * min(figures), "they were added up"
        for stats in found:
            assert sum(node.chunks for node in stats.nodes) == stats.chunks > 0
            assert all(node.held_bytes > 0 for node in stats.nodes)
        assert last is not None
        assert (last.batches, last.chunks, last.put_bytes, last.worked_s, last.waited_s) == (0, 0, 0, 0.0, 0.0)
        assert sum(node.chunks for node in last.nodes) == 0

    def test_backend_serves_again_after_an_interrupt(
        self, monkeypatch: pytest.MonkeyPatch, two_workers: RayBackend
    ) -> None:
        send_every_level_to_workers(monkeypatch)

        def listener(event: Event) -> None:
            if isinstance(event, EvaluationAdvanced) and event.done > 20:
                raise KeyboardInterrupt

        assert solve(TOWERS, backend=two_workers, listener=listener).stopped_by == "interrupt"
        assert_same_answer(solve(TOWERS, backend=two_workers), by_threads("towers"))


@pytest.mark.parametrize(
    ("round_trip_s", "workers"), long_after(0, [(0.0, 2), (10.0, 1)]), ids=["level by level", "in long batches"]
)
def test_same_answer_whatever_the_batches(monkeypatch: pytest.MonkeyPatch, round_trip_s: float, workers: int) -> None:
    send_every_level_to_workers(monkeypatch, round_trip_s)
    with backend_of(workers=workers, cpus_per_worker=CPUS // workers, without_workers=WAIT) as backend:
        for name in ("branches", "random 5"):
            found = solve(INSTANCES[name], backend=backend)
            assert_same_answer(found, by_threads(name))
            assert found.stats.threads == CPUS


def test_small_problem_needs_no_worker() -> None:
    with backend_of(workers=2) as backend:
        found = solve(TOWERS, backend=backend)
        assert_same_answer(found, by_threads("towers"))
        assert backend.activity() == (0, 0)
        assert found.stats.cluster is not None
        assert (found.stats.cluster.workers, found.stats.cluster.chunks, found.stats.cluster.nodes) == (0, 0, ())


def test_why_nothing_was_sent_is_told() -> None:
    with backend_of(workers=2) as backend:
        stats = solve(TOWERS, backend=backend).stats.cluster
    assert stats is not None
    assert re.fullmatch(r"its workers would have saved 0\.\d s, and take longer to start", stats.unused or "")
    assert cluster_lines(stats, 1.0) == [f"cluster: nothing was sent: {stats.unused}"]


def test_a_cluster_without_more_threads_gets_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Ray is looked at, once a search is long enough to want it."""
    monkeypatch.setattr("piper_ray.engine.backends.ray.backend._WORTH_A_START_S", 0.0)
    with backend_of(threads=CPUS) as backend:
        assert_same_answer(solve(TOWERS, backend=backend), by_threads("towers"))
        assert backend._starting is not None
        assert backend._starting.result() is None
        assert backend.stats().unused == f"its workers would have {CPUS} threads, and there are {CPUS} here"


@pytest.mark.long
def test_ray_is_not_loaded_before_it_is_needed() -> None:
    script = """
import socket, sys
from piper_ray import RayBackend, solve
from tests.instances import two_towers
with socket.create_server(("127.0.0.1", 0)) as listening:
    backend = RayBackend(f"127.0.0.1:{listening.getsockname()[1]}")
    print(solve(two_towers(5), backend=backend).status.value, "ray" in sys.modules)
    backend.close()
"""
    assert output_of(script) == ["optimal", "False"]


def test_same_answer_when_the_worker_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the middle of a chunk; another one comes in its place."""
    send_every_level_to_workers(monkeypatch)
    workers_that_die(monkeypatch, tmp_path, deaths=1, downset=10)
    log = Log()
    with backend_of(workers=1, without_workers=WAIT) as backend:
        assert_same_answer(solve(TOWERS, backend=backend, listener=log), by_threads("towers"))
    assert len(list(tmp_path.iterdir())) == 1
    assert sum("is lost" in note for note in log.notes) == 1
    assert "no worker is left: waiting for one" in log.notes


@pytest.mark.long
def test_driver_goes_on_when_all_workers_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    send_every_level_to_workers(monkeypatch)
    workers_that_die(monkeypatch, tmp_path, deaths=1, downset=30)
    log = Log()
    with backend_of(workers=1, without_workers=CONTINUE) as backend:
        wait_for_workers(backend, 1)
        assert_same_answer(solve(TOWERS, backend=backend, listener=log), by_threads("towers"))
    assert "no worker is left: going on in the driver" in log.notes
    assert (tmp_path / "0").exists()


@pytest.mark.long
def test_chunk_that_kills_each_worker_ends_the_solve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    send_every_level_to_workers(monkeypatch)
    monkeypatch.setattr("piper_ray.engine.backends.ray.calls.MOST_DEATHS", 2)  # each worker takes seconds to start
    workers_that_die(monkeypatch, tmp_path, deaths=10**6, downset=50)
    with backend_of(workers=1, cpus_per_worker=1, without_workers=WAIT) as backend:
        with pytest.raises(ClusterError, match=r"downsets \d+ to \d+ ended 2 workers in turn.* MB in each worker"):
            solve(TOWERS, backend=backend)
        processes = processes_of(backend)
    assert len(list(tmp_path.iterdir())) in (2, 3), "the first time it may be behind another chunk"
    assert_gone(processes)


def test_chunk_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    send_every_level_to_workers(monkeypatch)
    workers_that_fail(monkeypatch, tmp_path, failures=2)
    with backend_of(workers=1, without_workers=WAIT) as backend:
        assert_same_answer(solve(TOWERS, backend=backend), by_threads("towers"))
        assert len(list(tmp_path.iterdir())) == 2
        assert backend.stats().workers == 1


@pytest.mark.long
def test_chunk_that_fails_always_ends_the_solve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    send_every_level_to_workers(monkeypatch)
    workers_that_fail(monkeypatch, tmp_path, failures=10**6)
    with (
        backend_of(workers=1, without_workers=WAIT) as backend,
        pytest.raises(ClusterError, match="no room for downset"),
    ):
        solve(TOWERS, backend=backend)


@pytest.mark.long
def test_fault_of_the_dispatcher_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not leave the caller waiting."""

    def full(*_: object) -> None:
        raise OSError("the object store is full")

    send_every_level_to_workers(monkeypatch)
    monkeypatch.setattr("piper_ray.engine.backends.ray.publication.Publisher.put", full)
    with backend_of(workers=1, without_workers=WAIT) as backend:
        for _ in range(2):
            with pytest.raises(OSError, match="the object store is full"):
                solve(TOWERS, backend=backend)


@pytest.mark.parametrize("error", long_after(1, [KeyboardInterrupt, ZeroDivisionError]))
def test_workers_are_gone_after_an_error_in_a_listener(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Raised once workers have answered; an interrupt ends the search with the best plan so far."""
    send_every_level_to_workers(monkeypatch)
    backend = RayBackend(workers=2, without_workers=WAIT)
    processes: list[int] = []

    def listener(event: Event) -> None:
        if isinstance(event, EvaluationAdvanced) and event.done > 20:
            processes.extend(processes_of(backend))
            raise error

    with closing(backend):
        if error is KeyboardInterrupt:
            found = solve(TOWERS, backend=backend, listener=listener)
            assert (found.status, found.stopped_by) == (Status.FEASIBLE, "interrupt")
        else:
            with pytest.raises(error):
                solve(TOWERS, backend=backend, listener=listener)
    assert processes
    assert_gone(processes)


def test_ray_of_the_process_is_used_and_left_alone() -> None:
    import ray

    job = ray.get_runtime_context().get_job_id()
    with backend_of(address="198.51.100.1:6379") as backend:
        assert backend.stats().workers == 0
    assert ray.is_initialized()
    assert ray.get_runtime_context().get_job_id() == job


@pytest.mark.long
def test_ray_of_our_own_listens_on_loopback_where_it_was_imported_before() -> None:
    script = """
import ray
from piper_ray.engine.backends.ray.session import connect
session = connect("local", 1)
print(ray.nodes()[0]["NodeManagerAddress"])
session.close()
"""
    assert output_of(script) == ["127.0.0.1"]


def output_of(script: str) -> list[str]:
    """The words that it prints, in a process whose environment says nothing of Ray."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_cluster_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once: Ray itself would try for a quarter of an hour."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setattr("ray.is_initialized", lambda: False)
        with pytest.raises(
            ClusterError, match=r"no Ray cluster could be reached at 127\.0\.0\.1:(?s:.*)--address local"
        ):
            RayBackend(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("option", ["workers", "cpus_per_worker"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} must be at least 1, not 0"):
        RayBackend(**{option: 0})  # type: ignore[arg-type]
