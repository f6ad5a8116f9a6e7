"""Where workers are started: one for each machine, or as many and as large as was asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.backends.ray.machines import RayNode
from piper_ray.engine.backends.ray.placement import WorkerSize, missing_places

MEMORY = 1e9


def node(name: str, cpus: float, memory_bytes: float = 8e9) -> RayNode:
    return RayNode(name, name, name, cpus, memory_bytes)


def places(
    nodes: list[RayNode], wanted: int | None = None, cpus: int | None = None, **held: list[int]
) -> list[tuple[str | None, int]]:
    return [(place.node, place.cpus) for place in missing_places(nodes, held, wanted, WorkerSize(cpus, MEMORY))]


def test_one_for_each_machine_with_all_of_its_cores() -> None:
    assert places([node("a", 16), node("b", 8)]) == [("a", 16), ("b", 8)]
    assert places([node("a", 16), node("b", 8)], a=[16]) == [("b", 8)]


def test_cores_that_became_free_get_a_worker() -> None:
    assert places([node("a", 16)], a=[6]) == [("a", 10)]


def test_by_size_each_machine_is_filled() -> None:
    assert places([node("a", 16), node("b", 7)], cpus=4) == [("a", 4)] * 4 + [("b", 4)]


def test_by_number_they_are_spread_and_share_the_cores() -> None:
    machines = [node("a", 8), node("b", 8)]
    assert places(machines, wanted=2) == [("a", 8), ("b", 8)]
    assert places(machines, wanted=3) == [("a", 4), ("a", 4), ("b", 8)]
    assert places(machines, wanted=1) == [("a", 8)]
    assert places(machines, wanted=2, a=[8]) == [("b", 8)]
    assert places([node("a", 5)], wanted=2) == [("a", 3), ("a", 2)]


def test_by_number_and_size() -> None:
    assert places([node("a", 8), node("b", 8)], wanted=3, cpus=4) == [("a", 4), ("a", 4), ("b", 4)]
    assert places([node("a", 3)], wanted=3, cpus=4) == []


def test_by_size_no_more_than_its_memory_holds() -> None:
    machines = [node("a", 16, memory_bytes=2.5e9), node("b", 2)]
    assert places(machines, cpus=1) == [("a", 1)] * 2 + [("b", 1)] * 2
    assert places(machines, cpus=1, a=[1], b=[1]) == [("a", 1), ("b", 1)]


def test_guarded_workers_serve_who_asks_for_the_same_alone() -> None:
    exact, other = WorkerSize(1, 1e9, guarded=True), WorkerSize(1, 2e9, guarded=True)
    assert exact.serves(exact)
    assert not exact.serves(other)
    assert WorkerSize(1, 1e9).serves(WorkerSize(1, 2e9))
    assert not WorkerSize(1, 1e9).serves(exact)
    assert not WorkerSize(None, 1e9).serves(WorkerSize(1, 1e9))


def test_workers_for_levels_serve_calls_but_not_the_other_way_round() -> None:
    assert WorkerSize(1, 1e9, for_levels=True).serves(WorkerSize(1, 1e9))
    assert not WorkerSize(1, 1e9).serves(WorkerSize(1, 1e9, for_levels=True))


def test_a_machine_without_the_memory_gets_none() -> None:
    assert places([node("a", 8, memory_bytes=5e8), node("b", 2)]) == [("b", 2)]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5), st.none() | st.integers(1, 12), st.none() | st.integers(1, 4)
)
def test_never_more_than_there_is(cores: list[int], wanted: int | None, cpus: int | None) -> None:
    nodes = [node(str(number), count) for number, count in enumerate(cores)]
    found = missing_places(nodes, {}, wanted, WorkerSize(cpus, MEMORY))
    for one in nodes:
        assert sum(place.cpus for place in found if place.node == one.id) <= one.cpus
    assert all(place.cpus >= 1 for place in found)
    assert wanted is None or len(found) <= wanted
    held: dict[str, list[int]] = {}
    for place in found:
        assert place.node is not None
        held.setdefault(place.node, []).append(place.cpus)
    assert missing_places(nodes, held, wanted, WorkerSize(cpus, MEMORY)) == [], "then none is missing"
