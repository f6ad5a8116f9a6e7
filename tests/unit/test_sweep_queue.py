"""Batches: every point once, sized by what its kind takes, and again after a loss."""

from __future__ import annotations

import random
from dataclasses import replace

from piper_ray import Restrictions
from piper_ray.sweep.demand import BATCH_POINTS, BATCH_S, Demand, PointQueue, kind_of
from piper_ray.sweep.point import AnyPoint, Point


def points(count: int, planner: str = "piper", first: int = 0) -> list[AnyPoint]:
    base = Point("w", planner, 1, 1, 1.0, 1.0, Restrictions())
    return [replace(base, devices=first + k) for k in range(count)]


def take(schedule: PointQueue, workers: int = 2) -> tuple[AnyPoint, ...]:
    kind = schedule.next_kind()
    found = schedule.next_points(workers)
    assert {kind_of(point) for point in found} == {kind}
    return found


def test_every_point_is_handed_out_once() -> None:
    rng = random.Random(1)
    everything = [*points(50), *points(30, "gpipe"), *points(20, first=50)]
    schedule = PointQueue(everything)
    found: list[AnyPoint] = []
    while schedule.next_kind() is not None:
        assert schedule.left == len(everything) - len(found)
        tasks = take(schedule)
        found += tasks
        if rng.random() < 0.7:
            schedule.took(kind_of(tasks[0]), len(tasks), len(tasks) * rng.random() * 0.1)
    assert set(found) == set(everything)
    assert len(found) == len(everything)
    assert schedule.left == 0


def test_batches_grow_to_the_wanted_time_and_shrink_at_the_end() -> None:
    schedule = PointQueue(points(2_000))
    sizes = []
    while schedule.next_kind() is not None:
        tasks = take(schedule)
        sizes.append(len(tasks))
        schedule.took(kind_of(tasks[0]), len(tasks), 0.005 * len(tasks))
    assert sizes[:7] == [1, 2, 4, 8, 16, 32, round(BATCH_S / 0.005)]
    assert sizes[-1] == 1
    assert sorted(sizes[20:], reverse=True) == sizes[20:]


def test_quick_points_come_in_bounded_batches_and_slow_ones_alone() -> None:
    for point_s, most in ((1e-9, BATCH_POINTS), (2 * BATCH_S, 1)):
        schedule = PointQueue(points(10_000))
        for _ in range(12):
            tasks = take(schedule)
            schedule.took(kind_of(tasks[0]), len(tasks), point_s * len(tasks))
        assert len(take(schedule)) == most


def test_a_slow_point_counts_at_once() -> None:
    schedule = PointQueue(points(1_000))
    kind = schedule.next_kind()
    assert kind is not None
    for _ in range(6):
        tasks = take(schedule)
        schedule.took(kind, len(tasks), 0.01 * len(tasks))
    schedule.took(kind, 1, 10.0)
    assert len(take(schedule)) == 1


def test_points_of_a_lost_batch_come_again_alone_and_first() -> None:
    schedule = PointQueue([*points(6), *points(2, "gpipe")])
    tasks = tuple(task for _ in range(4) for task in take(schedule))
    schedule.again(tasks)
    assert schedule.left == 8
    assert [take(schedule) for _ in range(4)] == [(task,) for task in tasks]
    assert [point for _ in range(4) for point in take(schedule)] == [*points(6)[4:], *points(2, "gpipe")]
    assert schedule.next_kind() is None


def test_what_a_point_takes_is_known_once_one_is_solved() -> None:
    schedule = PointQueue(points(4))
    kind = schedule.next_kind()
    assert kind is not None
    assert schedule.point_s(kind) is None
    schedule.took(kind, 2, 3.0)
    assert schedule.point_s(kind) == 1.5


def test_points_are_grouped_by_the_memory_of_their_workers() -> None:
    """Each group by what its largest point needs, less than or equal to twice what its smallest does."""
    needs = {1: 3e9, 2: 1e9, 3: None, 4: 2e9, 5: 2.1e9, 6: 1e9, 7: 9e9}

    class Known(Demand):
        def memory_bytes(self, point: AnyPoint) -> float | None:
            return needs[point.devices]

    found = Known({}, {}).by_memory(points(7, first=1))
    grouped = [(memory_bytes, [point.devices for point in group]) for memory_bytes, group in found]
    assert grouped == [(2e9, [2, 6, 4]), (3e9, [5, 1]), (9e9, [7])]
