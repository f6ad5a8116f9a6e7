"""The coordinator on scripts of events: who gets which chunk, and what becomes of it when a worker is lost or slow."""

from __future__ import annotations

from itertools import pairwise

import pytest

from piper_ray.engine.backends.ray.coordinator import (
    HERE,
    MOST_DEATHS,
    Chunk,
    Command,
    Coordinator,
    GiveUp,
    Late,
    Send,
    WithoutWorkers,
)

SECOND_S = 1.0
FLOOR_S = Coordinator.OVERDUE_FLOOR_S


def coordinator_with(workers: int, without_workers: WithoutWorkers = WithoutWorkers.CONTINUE) -> Coordinator:
    coordinator = Coordinator(without_workers)
    for worker in range(workers):
        assert coordinator.joined(worker, 0.0) == []
    return coordinator


def sent(commands: list[Command]) -> list[Send]:
    return [command for command in commands if isinstance(command, Send)]


def chunks(count: int, expected_s: float = 0.05, first: int = 0) -> list[Chunk]:
    return [Chunk(first + number, expected_s) for number in range(count)]


def test_each_worker_gets_one_and_then_another_and_the_rest_waits() -> None:
    coordinator = coordinator_with(2)
    assert coordinator.add(chunks(6), 0.0) == [Send(0, 0), Send(1, 1), Send(0, 2), Send(1, 3)]
    assert (coordinator.open_chunks, coordinator.in_flight) == (6, 4)
    assert coordinator.replied(1, 1, 0.1) == (True, [Send(1, 4)])
    assert coordinator.replied(1, 3, 0.2) == (True, [Send(1, 5)])
    assert coordinator.replied(0, 0, 0.3) == (True, [])
    assert (coordinator.open_chunks, coordinator.in_flight) == (3, 3)


def test_who_joins_late_gets_what_waits() -> None:
    coordinator = coordinator_with(1)
    coordinator.add(chunks(5), 0.0)
    assert coordinator.joined(7, 0.1) == [Send(7, 2), Send(7, 3)]
    assert coordinator.joined(7, 0.1) == [], "it is known already"
    assert coordinator.joined(8, 0.2) == [Send(8, 4)]


def test_chunks_of_a_lost_worker_come_first_and_alone() -> None:
    coordinator = coordinator_with(2)
    coordinator.add(chunks(6), 0.0)  # 0 has 0 and 2, 1 has 1 and 3
    assert coordinator.lost(1, 0.1, "killed") == []
    assert coordinator.lost(1, 0.1, "killed") == [], "it is known already"
    assert coordinator.in_flight == 2
    answers = [coordinator.replied(0, chunk, 0.2) for chunk in (0, 2, 3, 1)]
    assert answers == [(True, []), (True, [Send(0, 3)]), (True, [Send(0, 1)]), (True, [Send(0, 4), Send(0, 5)])]


def test_late_reply_of_a_lost_worker_counts_and_the_second_answer_does_not() -> None:
    coordinator = coordinator_with(2)
    coordinator.add(chunks(2), 0.0)
    coordinator.replied(0, 0, 0.1)
    assert coordinator.lost(1, 0.1, "cut off") == [Send(0, 1)]
    assert coordinator.replied(1, 1, 0.2) == (True, [])
    assert coordinator.replied(0, 1, 0.3) == (False, [])
    assert coordinator.open_chunks == 0


def test_late_reply_takes_the_chunk_out_of_the_queue() -> None:
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    coordinator.add(chunks(1), 0.0)
    assert coordinator.lost(0, 0.1, "cut off") == []
    assert coordinator.replied(0, 0, 0.2) == (True, [])
    assert coordinator.joined(1, 0.3) == []


def test_overdue_chunk_goes_to_an_idle_worker_too_and_only_once() -> None:
    coordinator = coordinator_with(2)
    coordinator.add(chunks(2, SECOND_S), 0.0)
    assert coordinator.replied(0, 0, 1.0) == (True, [])
    late_s = Coordinator.OVERDUE_FACTOR * SECOND_S
    assert coordinator.tick(late_s) == []
    assert coordinator.tick(late_s + 0.1) == [Late(1, 1, late_s + 0.1, SECOND_S), Send(0, 1)]
    assert coordinator.tick(late_s + 0.2) == []
    assert coordinator.replied(0, 1, late_s + 1.0) == (True, [])
    assert coordinator.replied(1, 1, late_s + 2.0) == (False, [])


def test_short_chunks_are_overdue_after_the_floor() -> None:
    coordinator = coordinator_with(2, WithoutWorkers.WAIT)
    coordinator.add(chunks(2, 0.01), 0.0)
    coordinator.replied(0, 0, 0.01)
    assert coordinator.tick(FLOOR_S) == []
    assert sent(coordinator.tick(FLOOR_S + 0.01)) == [Send(0, 1)]


def test_turn_of_the_second_chunk_comes_with_the_reply_to_the_first() -> None:
    coordinator = coordinator_with(2, WithoutWorkers.WAIT)
    coordinator.add(chunks(3, 0.01), 0.0)  # 0 has 0 and 2
    coordinator.replied(1, 1, 0.0)
    coordinator.replied(0, 0, 0.9)
    assert coordinator.tick(1.5) == []
    assert sent(coordinator.tick(0.9 + FLOOR_S + 0.01)) == [Send(1, 2)]


def test_each_copy_more_takes_longer() -> None:
    """A chunk that takes long everywhere soon has no more copies; one whose holders all hang is done in the end."""
    coordinator = coordinator_with(5, WithoutWorkers.WAIT)
    coordinator.add(chunks(1, SECOND_S), 0.0)
    late_s = Coordinator.OVERDUE_FACTOR * SECOND_S
    now, found = 0.0, []
    for tenth in range(1, round(200 * late_s)):
        now = 0.1 * tenth
        found += [now for _ in sent(coordinator.tick(now))]
    gaps = [later - earlier for earlier, later in pairwise([0.0, *found])]
    assert [round(gap / late_s) for gap in gaps] == [1, 2, 3, 4]


def test_a_copy_goes_to_who_was_heard_of_last() -> None:
    """A machine that hangs takes its idle workers with it."""
    coordinator = coordinator_with(4, WithoutWorkers.WAIT)
    coordinator.add(chunks(4), 0.0)
    for number, worker in enumerate((1, 3, 2)):
        coordinator.replied(worker, worker, 0.1 * number)
    assert sent(coordinator.tick(10.0)) == [Send(2, 0)]


def test_a_hung_first_chunk_counts_whatever_overtakes_it() -> None:
    """As with tasks, each of which has a process of its own."""
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    coordinator.add(chunks(20), 0.0)
    told = [command for number in range(1, 12) for command in coordinator.replied(0, number, 0.1 * number)[1]]
    assert [(late.worker, late.chunk) for late in told if isinstance(late, Late)] == [(0, 0)]
    assert sent(coordinator.joined(1, 1.3)) == [Send(1, 12), Send(1, 13)]


def test_who_is_late_gets_no_more() -> None:
    coordinator = coordinator_with(2, WithoutWorkers.WAIT)
    coordinator.add(chunks(6), 0.0)
    coordinator.replied(0, 2, 0.1)
    assert coordinator.open_chunks - coordinator.in_flight == 1
    late = coordinator.replied(1, 1, 2.0)[1]
    assert sent(late) == [Send(1, 5)]
    coordinator.add(chunks(2, first=6), 2.0)
    assert coordinator.replied(0, 4, 2.0)[1] == [], "its first chunk still hangs"
    assert sent(coordinator.replied(0, 0, 2.1)[1]) == [Send(0, 6), Send(0, 7)]


def test_who_is_late_is_told_once_for_each_chunk() -> None:
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    coordinator.add(chunks(3), 0.0)
    told = [command for tenth in range(30) for command in coordinator.tick(0.1 * tenth)]
    assert [(late.worker, late.chunk) for late in told if isinstance(late, Late)] == [(0, 0)]
    coordinator.replied(0, 0, 3.0)
    told = [command for tenth in range(30) for command in coordinator.tick(3.0 + 0.1 * tenth)]
    assert [(late.worker, late.chunk) for late in told if isinstance(late, Late)] == [(0, 1)]
    coordinator.cancel([1, 2])
    assert coordinator.tick(100.0) == [], "nobody wants its answers"


def test_what_is_expected_may_change() -> None:
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    coordinator.add(chunks(1, 60.0), 0.0)
    assert coordinator.tick(10.0) == []
    coordinator.expect(0, 1.0)
    coordinator.expect(99, 1.0)
    assert coordinator.tick(10.0) == [Late(0, 0, 10.0, 1.0)]


def test_who_hangs_on_the_drivers_machine_is_late_too() -> None:
    coordinator = coordinator_with(0)
    assert coordinator.add(chunks(1), 0.0) == [Send(HERE, 0)]
    assert coordinator.joined(0, 0.5) == []
    assert coordinator.tick(FLOOR_S + 0.01) == [Send(0, 0)]


def test_a_chunk_may_be_given_up_sooner() -> None:
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    coordinator.add([Chunk(0, 1.0, most_deaths=1)], 0.0)
    assert coordinator.failed(0, 0, 0.1, "machine", with_machine=True) == [Send(0, 0)]
    assert coordinator.deaths(0) == 1
    assert coordinator.failed(0, 0, 0.1, "killed") == [GiveUp(0, 2, "killed")]


def test_driver_takes_an_overdue_chunk_when_no_worker_is_idle() -> None:
    coordinator = coordinator_with(1)
    coordinator.add(chunks(1), 0.0)
    assert coordinator.tick(0.5) == []
    assert sent(coordinator.tick(10.0)) == [Send(HERE, 0)]
    assert coordinator.replied(HERE, 0, 11.0) == (True, [])


def test_silent_workers_do_not_stop_the_driver() -> None:
    """Neither while they hold chunks that are wanted nor after."""
    coordinator = coordinator_with(1)
    coordinator.add(chunks(4), 0.0)
    assert sent(coordinator.tick(10.0)) == [Send(HERE, 0)]
    for chunk, following in ((0, 1), (1, 2), (2, 3)):
        assert coordinator.replied(HERE, chunk, 20.0) == (True, [Send(HERE, following)])
    assert coordinator.replied(HERE, 3, 20.0) == (True, [])


def test_driver_leaves_the_queue_to_workers_that_work() -> None:
    coordinator = coordinator_with(2)
    coordinator.add(chunks(8), 0.0)
    first, commands = coordinator.replied(0, 0, 9.9)
    assert (first, sent(commands)) == (True, [Send(0, 4)])
    assert coordinator.tick(10.0) == []


def test_last_worker_lost_and_the_driver_goes_on_one_chunk_at_a_time() -> None:
    coordinator = coordinator_with(1)
    coordinator.add(chunks(3), 0.0)
    assert coordinator.lost(0, 0.1, "killed") == [Send(HERE, 1)]
    assert coordinator.tick(0.2) == []
    assert coordinator.replied(HERE, 1, 0.3) == (True, [Send(HERE, 0)])
    assert coordinator.joined(1, 0.4) == [Send(1, 2)], "a new worker takes what is left"
    assert coordinator.replied(HERE, 0, 0.5) == (True, [])


def test_last_worker_lost_and_the_chunks_wait_for_another() -> None:
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    coordinator.add(chunks(2), 0.0)
    assert coordinator.lost(0, 0.1, "killed") == []
    assert coordinator.tick(1e6) == []
    assert (coordinator.open_chunks, coordinator.in_flight) == (2, 0)
    assert coordinator.joined(1, 1e6) == [Send(1, 1)]
    assert coordinator.replied(1, 1, 1e6) == (True, [Send(1, 0)])


def test_chunk_that_kills_each_worker_is_given_up() -> None:
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    coordinator.add(chunks(2), 0.0)
    for death in range(1, MOST_DEATHS):
        assert coordinator.lost(death - 1, 0.0, "killed") == []
        sends = coordinator.joined(death, 0.0)
        if death == 1:
            assert sends == [Send(1, 1)], "in work or behind: both are tried alone"
            assert coordinator.replied(1, 1, 0.0) == (True, [Send(1, 0)])
        else:
            assert sends == [Send(death, 0)]
    assert coordinator.add(chunks(1, first=9), 0.0) == [], "not behind a chunk that may end the worker"
    last = MOST_DEATHS - 1
    assert coordinator.lost(last, 0.0, "out of memory") == [GiveUp(0, MOST_DEATHS, "out of memory")]
    assert coordinator.open_chunks == 1
    assert coordinator.joined(99, 0.0) == [Send(99, 9)]


def test_killer_behind_a_chunk_whose_reply_is_lost_with_the_worker_is_found() -> None:
    """Every worker dies over chunk 1, whatever it had before: no other chunk is given up."""
    coordinator = coordinator_with(2, WithoutWorkers.WAIT)
    commands = coordinator.add(chunks(4), 0.0)
    held: dict[int, list[int]] = {0: [], 1: []}
    deaths = 0
    while not (given_up := [command for command in commands if isinstance(command, GiveUp)]):
        for command in commands:
            if isinstance(command, Send):
                held[command.worker].append(command.chunk)
        worker = next((name for name, has in held.items() if 1 in has), None)
        if worker is None:
            worker = next(name for name, has in held.items() if has)
            commands = coordinator.replied(worker, held[worker].pop(0), 0.0)[1]
            continue
        del held[worker]
        deaths += 1
        commands = coordinator.lost(worker, 0.0, "killed")
        held[worker + 10] = []
        commands += coordinator.joined(worker + 10, 0.0)
    assert given_up == [GiveUp(1, MOST_DEATHS, "killed")]
    assert deaths <= MOST_DEATHS + 1


def test_each_chunk_is_blamed_for_its_own_deaths_alone() -> None:
    coordinator = coordinator_with(0, WithoutWorkers.WAIT)
    coordinator.add(chunks(2, first=0), 0.0)
    given_up: list[GiveUp] = []
    for worker in range(2 * MOST_DEATHS):
        coordinator.joined(worker, 0.0)
        given_up += [c for c in coordinator.lost(worker, 0.0, "killed") if isinstance(c, GiveUp)]
    assert sorted(c.chunk for c in given_up) == [0, 1]
    assert {c.deaths for c in given_up} == {MOST_DEATHS}


def test_lost_machines_are_not_its_fault_unless_there_are_many() -> None:
    coordinator = coordinator_with(0, WithoutWorkers.WAIT)
    coordinator.add(chunks(1), 0.0)
    for loss in range(1, Coordinator.MOST_MACHINES):
        coordinator.joined(loss, 0.0)
        assert coordinator.lost(loss, 0.0, "no sign of life", with_machine=True) == []
    coordinator.joined(0, 0.0)
    assert coordinator.lost(0, 0.0, "killed") == []
    coordinator.joined(99, 0.0)
    losses = Coordinator.MOST_MACHINES + 1
    assert coordinator.lost(99, 0.0, "no sign of life", with_machine=True) == [GiveUp(0, losses, "no sign of life")]


def test_failure_keeps_the_worker_and_counts_like_a_death() -> None:
    coordinator = coordinator_with(1)
    coordinator.add(chunks(1), 0.0)
    for _ in range(1, MOST_DEATHS):
        assert coordinator.failed(0, 0, 0.1, "no room") == [Send(0, 0)]
    assert coordinator.failed(0, 0, 0.1, "no room") == [GiveUp(0, MOST_DEATHS, "no room")]
    assert coordinator.workers == 1
    assert coordinator.failed(0, 0, 0.1, "no room") == [], "nobody wants it any more"


@pytest.mark.parametrize("without_workers", WithoutWorkers)
def test_cancelled_chunks_are_not_given_again_and_their_answers_do_not_count(without_workers: WithoutWorkers) -> None:
    coordinator = coordinator_with(1, without_workers)
    coordinator.add(chunks(4), 0.0)
    coordinator.cancel(range(4))
    assert (coordinator.open_chunks, coordinator.in_flight) == (0, 0)
    coordinator.add(chunks(2, first=4), 0.0)
    assert coordinator.replied(0, 0, 0.1) == (False, [Send(0, 4)])
    assert coordinator.replied(0, 1, 0.1) == (False, [Send(0, 5)])
    assert coordinator.replied(0, 4, 0.2) == (True, [])


def test_death_over_a_cancelled_chunk_blames_nobody() -> None:
    coordinator = coordinator_with(1, WithoutWorkers.WAIT)
    for worker in range(1, 2 * MOST_DEATHS):
        coordinator.add(chunks(2, first=2 * worker), 0.0)
        coordinator.cancel([2 * worker])
        assert coordinator.lost(worker - 1, 0.0, "killed") == []
        coordinator.joined(worker, 0.0)
        coordinator.cancel([2 * worker + 1])
