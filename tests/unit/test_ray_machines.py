"""Machines that come, go, answer and do not: who may work, who is left out, and what the user reads about it, once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray import exceptions
from ray.exceptions import RayError

from piper_ray.engine.backends.ray.machines import (
    _ASK_AGAIN_S,
    _ATTEMPTS,
    _LOOK_EVERY_S,
    Machines,
    RayNode,
    Software,
    difference,
    question,
    software,
)
from piper_ray.model.errors import ClusterError

ray: Any = exceptions  # untyped

OURS = software()
OTHER = {**OURS, "numpy": "0.9"}


def node(number: int, cpus: float = 4.0) -> RayNode:
    return RayNode(f"id{number}", f"host{number}", f"10.0.0.{number}", cpus, 1e9 * number)


@dataclass
class Cluster:
    """As a test makes it. asked: nodes that have yet to answer."""

    alive: list[RayNode] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    come: dict[str, Software | RayError] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def nodes(self) -> list[RayNode]:
        return self.alive

    def ask(self, node: str) -> None:
        assert node not in self.asked, "asked twice"
        self.asked.append(node)

    def answers(self) -> dict[str, Software | RayError]:
        found, self.come = self.come, {}
        return found

    def free_cpus(self) -> dict[str, float]:
        return {node.id: node.cpus / 2 for node in self.alive}

    def answer(self, number: int, what: Software | RayError) -> None:
        self.asked.remove(f"id{number}")
        self.come[f"id{number}"] = what


def machines_of(*numbers: int, trusted: bool = False) -> tuple[Cluster, Machines]:
    """The driver is on machine 0, which has no cores."""
    cluster = Cluster([node(0, cpus=0.0), *map(node, numbers)])
    machines = Machines(cluster, cluster.told.append, "id0", trusted=trusted)
    machines.look(0.0)
    return cluster, machines


def test_free_cores_are_whole_ones() -> None:
    cluster, machines = machines_of(1)
    cluster.alive = [node(1, 7.0)]
    assert machines.free_cpus(node(1).id) == 3
    assert machines.free_cpus("another") == 0


def test_a_machine_counts_once_it_has_answered() -> None:
    cluster, machines = machines_of(1, 2)
    assert machines.overview == (0, 0.0, True)
    cluster.answer(1, OURS)
    machines.look(0.1)
    assert machines.overview == (4, 1e9, True)
    cluster.answer(0, OURS)
    cluster.answer(2, OURS)
    machines.look(0.2)
    assert machines.overview == (8, 2e9, False)
    machines.check()
    assert cluster.told == []


def test_another_software_is_left_out_and_told_once() -> None:
    cluster, machines = machines_of(1, 2, 3)
    cluster.answer(1, OURS)
    cluster.answer(2, OTHER)
    cluster.answer(3, {})
    machines.look(0.1)
    assert machines.overview.cpus == 4
    assert list(machines.left_out) == ["id2", "id3"]
    text = f"it has numpy 0.9 ({OURS['numpy']} here)"
    nothing = "Python, piper_ray, numpy, numba, pyarrow and ray cannot be imported there"
    assert cluster.told == [f"host2 (10.0.0.2) is left out: {text}", f"host3 (10.0.0.3) is left out: {nothing}"]
    machines.leave_out("id2", text)
    machines.leave_out("gone", text)
    machines.look(1e6)
    assert len(cluster.told) == 2
    assert cluster.asked == ["id0"], "nobody is asked again"
    machines.check()


def test_a_machine_may_come_back_as_another() -> None:
    """Its Ray has been started again: it may have other software now."""
    cluster, machines = machines_of(1, 2)
    cluster.answer(1, OTHER)
    machines.look(0.1)
    again = node(1)._replace(id="again")
    cluster.alive = [node(0, cpus=0.0), again, node(2)]
    machines.look(0.2)
    assert "again" not in cluster.asked
    machines.look(_LOOK_EVERY_S)
    cluster.come["again"] = OURS
    machines.look(_LOOK_EVERY_S)
    assert machines.overview.cpus == 4
    assert machines.name("id1") == "host1 (10.0.0.1)", "of one that is gone, too"
    assert machines.name("other") == "an unknown machine"


def test_a_lost_machine_is_known_at_once() -> None:
    cluster, machines = machines_of(1, 2)
    assert machines.is_alive("id1", 0.1)
    cluster.alive = [node(2)]
    assert not machines.is_alive("id1", 0.2)
    cluster.come["id1"] = OURS
    machines.look(0.3)
    assert machines.overview.cpus == 0


def test_the_end_of_the_node_here_is_a_fault() -> None:
    """A driver that asks nothing of a worker is not ended with its node by Ray, and would wait for ever."""
    cluster, machines = machines_of(1, 2)
    machines.check_here()
    cluster.alive = [node(0, cpus=0.0), node(1)]
    machines.look(0.1, at_once=True)
    machines.check_here()
    cluster.alive = [node(1)]
    machines.look(0.2, at_once=True)
    with pytest.raises(ClusterError, match="Ray on this machine has ended"):
        machines.check_here()


def test_without_a_good_machine_all_faults_are_named() -> None:
    cluster, machines = machines_of(1, 2)
    cluster.answer(2, OTHER)
    machines.look(0.1)
    machines.check()
    cluster.answer(1, {**OURS, "sources": "0"})
    machines.look(0.2)
    with pytest.raises(ClusterError) as raised:
        machines.check()
    lines = str(raised.value).splitlines()
    assert lines[0] == "no machine of the cluster can work:"
    assert re.match(r"  host1 \(10\.0\.0\.1\): its piper_ray has other sources", lines[1])
    assert lines[2].startswith("  host2 (10.0.0.2): it has numpy 0.9")
    cluster.alive.append(node(3))
    machines.look(_LOOK_EVERY_S)
    machines.check()


def test_an_empty_cluster_may_grow() -> None:
    _, machines = machines_of()
    machines.check()
    assert machines.overview.cpus == 0


@pytest.mark.parametrize("error", [ray.WorkerCrashedError(), ray.OutOfMemoryError("the node (IP: 10.0.0.1) ran low")])
def test_one_that_cannot_answer_is_asked_again_and_again_later(error: RayError) -> None:
    cluster, machines = machines_of(1, 2)
    cluster.answer(2, OURS)
    for attempt in range(_ATTEMPTS):
        assert "id1" not in machines.left_out
        cluster.answer(1, error)
        machines.look(0.1 * attempt)
    assert list(machines.left_out) == ["id1"]
    (text,) = cluster.told
    assert text.startswith("host1 (10.0.0.1) is left out: it cannot be asked what it runs: ")
    machines.look(_ASK_AGAIN_S - 1.0)
    assert "id1" not in cluster.asked
    machines.look(_ASK_AGAIN_S + 1.0)
    cluster.answer(1, OURS)
    machines.look(_ASK_AGAIN_S + 1.0)
    assert machines.overview.cpus == 8
    assert len(cluster.told) == 1


def test_one_where_the_question_fails_is_left_out_at_once() -> None:
    cluster, machines = machines_of(1)
    cluster.answer(
        1, ray.RayTaskError("software", "Traceback:\nOSError: disk full", OSError("disk full"), ip="10.0.0.1")
    )
    machines.look(0.1)
    assert cluster.told == [
        "host1 (10.0.0.1) is left out: it cannot be asked what it runs: OSError: disk full on host1"
    ]


def test_the_drivers_own_machine_is_asked_whether_it_has_cores_or_not() -> None:
    cluster, machines = machines_of(1)
    assert cluster.asked == ["id0", "id1"]
    assert machines.memory_here_bytes() == 0.0
    cluster.alive[0] = cluster.alive[0]._replace(memory_bytes=7.0)
    cluster.answer(0, OURS)
    machines.look(_LOOK_EVERY_S)
    assert machines.memory_here_bytes() == 7.0
    assert machines.overview.memory_bytes == 0.0, "of machines that may work"
    machines.leave_out("id0", "no good")
    assert cluster.told == [], "nobody counted on it"


def test_a_ray_of_our_own_needs_no_question() -> None:
    cluster = Cluster([node(1)])
    machines = Machines(cluster, cluster.told.append, "id1", trusted=True)
    machines.look(0.0)
    assert (machines.overview.cpus, cluster.asked) == (4, [])


def test_machines_are_known_by_their_address_too() -> None:
    _, machines = machines_of(1, 2)
    assert machines.name_at("10.0.0.2") == "host2 (10.0.0.2)"
    assert machines.name_at("10.9.9.9") == "10.9.9.9"
    assert machines.name_at(None) == "an unknown machine"
    only = Cluster([node(1)])
    machines = Machines(only, only.told.append, "id1")
    machines.look(0.0)
    assert machines.name_at(None) == "host1 (10.0.0.1)"


def test_a_machine_where_work_fails_is_asked_anew_a_few_times() -> None:
    cluster, machines = machines_of(1, 2)
    cluster.answer(1, OURS)
    cluster.answer(2, OURS)
    machines.look(0.1)
    for doubt in range(_ATTEMPTS):
        machines.doubt("id2", "it cannot", 0.2)
        assert list(machines.left_out) == ["id2"]
        machines.look(0.2)
        if doubt < _ATTEMPTS - 1:
            cluster.answer(2, OURS)
            machines.look(0.3)
            assert machines.overview.cpus == 8
    assert cluster.asked == ["id0"]
    assert machines.overview.cpus == 4
    assert cluster.told == ["host2 (10.0.0.2) is left out: it cannot"]
    machines.doubt("gone", "it cannot", 0.4)


def test_what_differs_is_said_in_words() -> None:
    assert difference(OURS) is None
    assert difference(question()()) is None
    assert difference({**OURS, "numba": ""}) == "numba cannot be imported there"
    both = {**OURS, "Python": "3.9.1", "ray": "2.1"}
    assert difference(both) == f"it has Python 3.9.1 ({OURS['Python']} here) and ray 2.1 ({OURS['ray']} here)"
    assert "other sources" in str(difference({**OURS, "sources": "1"}))
    assert "other sources" in str(difference({name: text for name, text in OURS.items() if name != "sources"}))
