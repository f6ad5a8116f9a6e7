"""Partitions of a lattice on a Ray of this machine: the answer of one process, whatever becomes of the actors."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

import piper_ray
from piper_ray.cli.solve import exit_code
from piper_ray.engine.backends.ray import RayBackend
from piper_ray.engine.backends.ray.backend import PROCESS_BYTES
from piper_ray.engine.backends.ray.machines import RayNode
from piper_ray.engine.backends.ray.partitions import PartitionWorker, Place, free_machines, places
from piper_ray.engine.backends.ray.session import Session
from piper_ray.engine.backends.ray.software import Software, question, software
from piper_ray.model.errors import ClusterError
from piper_ray.model.events import EvaluationAdvanced, Event
from piper_ray.model.solution import ClusterStats, Solution, Status
from piper_ray.model.stop import Stop, StoppedBy
from tests.instances import two_towers
from tests.partition_support import Log, little_room, same_result
from tests.ray_support import backend_of
from tests.solver_support import ONE_THREAD

MANY = two_towers(9, devices=8, memory_bytes=60.0)


def node(number: int, memory_bytes: float, cpus: float = 2.0) -> RayNode:
    return RayNode(str(number), f"host{number}", f"10.0.0.{number}", cpus, memory_bytes)


def test_machines_are_taken_for_as_many_downsets_as_possible() -> None:
    small, large, largest = (node(number, PROCESS_BYTES + size) for number, size in enumerate((1e6, 5e6, 8e6)))
    free = [(small, 2), (large, 1), (largest, 2)]
    assert places(free, 1e3, None) == [
        Place(largest, 2, 5000, largest.memory_bytes),
        Place(large, 1, 5000, large.memory_bytes),
    ]
    assert places(free, 1e3, 1) == [Place(largest, 2, 8000, largest.memory_bytes)]
    assert [place.downsets for place in places([(small, 1)] * 3, 1e3, None)] == [1000] * 3


def test_machines_without_cores_or_memory_are_of_no_use() -> None:
    assert places([(node(1, PROCESS_BYTES + 1e9), 0), (node(2, PROCESS_BYTES), 2), (node(3, 0.0), 2)], 1e3, None) == []


def solved(monkeypatch: pytest.MonkeyPatch, log: Log, backend: RayBackend, **options: Any) -> Solution:
    with little_room(monkeypatch):
        return piper_ray.solve(MANY, backend=backend, listener=log, **options)


@pytest.mark.usefixtures("local_ray")
def test_the_answer_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    with backend_of() as backend:
        found = solved(monkeypatch, log, backend)
        again = piper_ray.solve(MANY, backend=backend)
    whole = piper_ray.solve(MANY, options=ONE_THREAD)
    assert same_result(found, whole)
    assert "more downsets count than fit here: 1 machine of the cluster has them" in log.notes
    cluster = found.stats.cluster
    assert cluster is not None
    (used,) = cluster.nodes
    assert cluster.workers == 1
    assert used.chunks == cluster.chunks > 10
    assert used.held_bytes > 1000
    assert used.fetched_bytes > 1000
    assert cluster.unused is None
    assert again.stats.cluster is not None
    assert again.stats.cluster.chunks == 0


@pytest.mark.usefixtures("local_ray")
def test_what_was_sent_is_told_at_any_moment_and_nobody_busy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted solve answers from another thread, while partitions are at work."""

    # Local, so that Ray ships it whole: workers cannot import the tests.
    class Slow(PartitionWorker):
        def ask(self, method: str, *arguments: object) -> Any:
            if method == "extend":
                time.sleep(6.0)
            return super().ask(method, *arguments)

    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions.PartitionWorker", Slow)
    stop: Stop[Solution] = Stop()
    meanwhile: list[ClusterStats] = []
    stopped_at_s: list[float] = []

    class Impatient(Log):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            if isinstance(event, EvaluationAdvanced) and backend.stats().chunks > 0:
                meanwhile.append(backend.stats())
                stopped_at_s.append(time.perf_counter())
                stop.request()

    with backend_of() as backend:
        found = solved(monkeypatch, Impatient(), backend, stop=stop)
        assert time.perf_counter() - stopped_at_s[0] < 4.0
    assert found.stopped_by is StoppedBy.INTERRUPT
    assert meanwhile[0].workers == 1
    assert meanwhile[0].batches > 0
    assert found.stats.cluster is not None
    assert found.stats.cluster.chunks == meanwhile[0].chunks
    assert found.stats.cluster.unused is None


@pytest.mark.usefixtures("local_ray")
def test_memory_that_others_have_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Other:
        def is_there(self) -> bool:
            return True

    remote: Any = ray.remote(num_cpus=0, memory=10**8)(Other)
    other = remote.remote()
    try:
        assert ray.get(other.is_there.remote())
        with backend_of() as backend:
            found = solved(monkeypatch, Log(), backend)
    finally:
        ray.kill(other)
    assert found.status is Status.OPTIMAL


@pytest.mark.usefixtures("local_ray")
def test_no_machine_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions.places", lambda *_: [])
    log = Log()
    with backend_of() as backend:
        found = solved(monkeypatch, log, backend)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.NO_MACHINE)
    assert exit_code(found) == ClusterError.exit_code
    words = "the cluster cannot have parts of the downsets: none of its machines has a core and memory to spare"
    assert words in log.notes
    assert found.stats.cluster is not None
    assert found.stats.cluster.unused == "none of its machines has a core and memory to spare"


@pytest.mark.usefixtures("local_ray")
def test_a_machine_that_answers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real = question()

    def slow() -> dict[str, str]:
        time.sleep(4.0)
        return real()

    monkeypatch.setattr("piper_ray.engine.backends.ray.machines.question", lambda: slow)
    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions._ANSWERS_WITHIN_S", 0.5)
    log = Log()
    with backend_of() as backend:
        found = solved(monkeypatch, log, backend)
    assert same_result(found, piper_ray.solve(MANY, options=ONE_THREAD))
    (waited,) = [note for note in log.notes if "to say what runs there" in note]
    assert waited.startswith("waiting for ")


@pytest.mark.usefixtures("local_ray")
def test_a_machine_where_a_part_starts_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(PartitionWorker):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(3.0)
            super().__init__(*arguments)

    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions.PartitionWorker", Late)
    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions._READY_WITHIN_S", 0.5)
    log = Log()
    with backend_of() as backend:
        found = solved(monkeypatch, log, backend)
    assert found.status is Status.OPTIMAL
    assert any(note.startswith("waiting for a part of the lattice to start on ") for note in log.notes)


@dataclass
class Dying:
    """A cluster of two: one answers at once, the other one never, and dies."""

    looks: int = 0
    asked: list[str] = field(default_factory=list)

    def nodes(self) -> list[RayNode]:
        self.looks += 1
        return [node(1, 1e9), *([node(2, 1e9)] if self.looks < 3 else [])]

    def ask(self, node: str) -> None:
        self.asked.append(node)

    def answers(self) -> dict[str, Software | RayError]:
        return {"1": software()} if "1" in self.asked else {}

    def free_cpus(self) -> dict[str, float]:
        return {"1": 2.0, "2": 2.0}

    def free_memory_bytes(self) -> dict[str, float]:
        return {"1": 1e9, "2": 1e9}

    def deaths(self) -> dict[str, str]:
        return {"2": "its power was cut"}


def test_a_machine_that_dies_before_it_answers_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions.RayView", Dying)
    told: list[str] = []
    _, free = free_machines(Session("1", None), None, lambda: None, told.append)
    assert [found.id for found, _ in free] == ["1"]
    assert told == ["host2 (10.0.0.2) is gone: its power was cut; it had not yet said what it runs"]


@pytest.mark.usefixtures("local_ray")
def test_machines_that_are_left_out_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.engine.backends.ray.machines.difference", lambda _: "it runs another numpy")
    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions._ANSWERS_WITHIN_S", 0.5)
    log = Log()
    with backend_of() as backend:
        found = solved(monkeypatch, log, backend)
    assert found.stopped_by is StoppedBy.NO_MACHINE
    (why,) = [note for note in log.notes if "cannot have parts" in note]
    assert "none of its machines can work (" in why
    assert why.endswith(": it runs another numpy)")


@pytest.mark.usefixtures("local_ray")
def test_a_lost_process_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Local, so that Ray ships it whole: workers cannot import the tests.
    class Mortal(PartitionWorker):
        def ask(self, method: str, *arguments: object) -> Any:
            if method == "extend" and not (tmp_path / "died").exists():
                (tmp_path / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().ask(method, *arguments)

    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions.PartitionWorker", Mortal)
    log = Log()
    with backend_of() as backend:
        found = solved(monkeypatch, log, backend)
    assert same_result(found, piper_ray.solve(MANY, options=ONE_THREAD))
    (lost,) = [note for note in log.notes if "lost" in note]
    assert lost.startswith("a partition of the lattice is lost: its process on ")
    assert lost.endswith("; all downsets are listed anew on the machines that are left")


@pytest.mark.usefixtures("local_ray")
def test_an_error_there_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faulty(PartitionWorker):
        def ask(self, method: str, *arguments: object) -> Any:
            if method == "prepare":
                raise MemoryError("no room for tables")
            return super().ask(method, *arguments)

    monkeypatch.setattr("piper_ray.engine.backends.ray.partitions.PartitionWorker", Faulty)
    log = Log()
    with backend_of() as backend:
        found = solved(monkeypatch, log, backend)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.NO_MACHINE)
    (failed,) = [note for note in log.notes if "failed" in note]
    assert failed.startswith("a partition of the lattice failed: MemoryError: no room for tables on ")
