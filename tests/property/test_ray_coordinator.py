"""Whatever happens to workers, in whatever order: each chunk is answered once or given up, and nobody idles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


class World(RuleBasedStateMachine):
    """A cluster as the coordinator's commands make it, and what it does back."""

    without_workers: WithoutWorkers

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator(self.without_workers)
        self.now = 0.0
        self.added = 0
        self.names = 0
        self.held: dict[int, list[int]] = {}  # of live workers; HERE is one while it computes
        self.ghosts: list[tuple[int, int]] = []  # chunks of lost workers, whose replies may still come
        self.open: set[int] = set()
        self.blamed: Counter[int] = Counter()
        self.most_deaths: dict[int, int] = {}
        self.suspects: set[int] = set()  # have been in the hands of a lost worker, or failed

    @property
    def workers(self) -> list[int]:
        return [name for name in self.held if name != HERE]

    def carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            assert command.chunk in self.open
            if isinstance(command, Late):
                assert command.chunk in self.held[command.worker]
                assert command.kept_s > Coordinator.OVERDUE_FLOOR_S
                continue
            if isinstance(command, GiveUp):
                assert command.deaths == self.blamed[command.chunk] == self.most_deaths[command.chunk]
                self.open.remove(command.chunk)
                continue
            if command.worker == HERE:
                assert self.without_workers is WithoutWorkers.CONTINUE
                assert HERE not in self.held
                self.held[HERE] = []
            assert command.chunk not in self.held[command.worker], "the same chunk twice"
            assert command.chunk not in self.suspects or not self.held[command.worker], "not alone"
            self.held[command.worker].append(command.chunk)

    def reply(self, worker: int, chunk: int) -> None:
        wanted, commands = self.coordinator.replied(worker, chunk, self.now)
        assert wanted == (chunk in self.open)
        self.open.discard(chunk)
        self.carry_out(commands)

    def let_go(self, worker: int, chunk: int) -> None:
        self.held[worker].remove(chunk)
        if worker == HERE:
            del self.held[worker]

    def somebody_busy(self, data: st.DataObject) -> tuple[int, int]:
        pairs = [(worker, chunk) for worker, chunks in self.held.items() for chunk in chunks]
        return data.draw(st.sampled_from(pairs))

    @rule(
        count=st.integers(1, 6),
        expected_s=st.sampled_from([0.0, 0.1, 5.0]),
        most_deaths=st.sampled_from([1, MOST_DEATHS]),
    )
    def add(self, count: int, expected_s: float, most_deaths: int) -> None:
        chunks = [Chunk(self.added + number, expected_s, most_deaths) for number in range(count)]
        self.most_deaths |= {chunk.id: most_deaths for chunk in chunks}
        self.added += count
        self.open |= {chunk.id for chunk in chunks}
        self.carry_out(self.coordinator.add(chunks, self.now))

    @rule()
    def join(self) -> None:
        self.held[self.names] = []
        self.names += 1
        self.carry_out(self.coordinator.joined(self.names - 1, self.now))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        chunks = self.held.pop(worker)
        self.ghosts += [(worker, chunk) for chunk in chunks]
        self.suspects |= set(chunks)
        self.blamed.update(chunks[:1] if chunks[:1] and chunks[0] in self.open else [])
        self.carry_out(self.coordinator.lost(worker, self.now, "lost"))
        assert self.coordinator.lost(worker, self.now, "lost") == []

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        worker, chunk = self.somebody_busy(data)
        self.let_go(worker, chunk)
        self.reply(worker, chunk)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        worker, chunk = self.somebody_busy(data)
        self.let_go(worker, chunk)
        self.blamed.update([chunk] if chunk in self.open else [])
        self.suspects.add(chunk)
        self.carry_out(self.coordinator.failed(worker, chunk, self.now, "failed"))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), expected_s=st.sampled_from([0.0, 1.0]))
    def expect(self, data: st.DataObject, expected_s: float) -> None:
        _, chunk = self.somebody_busy(data)
        self.coordinator.expect(chunk, expected_s)
        self.carry_out(self.coordinator.tick(self.now))

    @precondition(lambda self: self.ghosts)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        self.reply(*data.draw(st.sampled_from(self.ghosts)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        chunks = data.draw(st.sets(st.sampled_from(sorted(self.open)), min_size=1))
        self.open -= chunks
        self.coordinator.cancel(chunks)
        self.carry_out(self.coordinator.tick(self.now))  # what may go along now goes then

    @rule(seconds=st.sampled_from([0.0, 0.25, 1.5, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.coordinator.tick(self.now))

    @invariant()
    def no_worker_holds_more_than_two(self) -> None:
        assert all(len(self.held[worker]) <= Coordinator.IN_FLIGHT for worker in self.workers)
        assert self.coordinator.workers == len(self.workers)

    @invariant()
    def nothing_is_lost(self) -> None:
        held = {chunk for chunks in self.held.values() for chunk in chunks}
        assert self.coordinator.open_chunks == len(self.open)
        assert self.coordinator.in_flight == len(self.open & held)

    @invariant()
    def no_chunk_waits_while_somebody_could_take_it(self) -> None:
        held = {chunk for chunks in self.held.values() for chunk in chunks}
        if self.open - held:
            staying = [worker for worker in self.workers if not self.is_late(worker)]
            assert all(self.held[worker] for worker in staying)
            if not self.suspects & (self.open | held):
                assert all(len(self.held[worker]) == Coordinator.IN_FLIGHT for worker in staying)
            if self.without_workers is WithoutWorkers.CONTINUE and not self.workers:
                assert HERE in self.held

    def is_late(self, worker: int) -> bool:
        return self.coordinator._lateness(self.coordinator._workers[worker], self.now) > 1

    def finish_alone(self) -> None:
        """No worker says anything any more, none is known to be lost: the driver gets everything done."""
        # Each idle worker may be tried first.
        for _ in range(len(self.open) + 2 * len(self.workers) + 1):
            self.now += 1000.0
            self.carry_out(self.coordinator.tick(self.now))
            if HERE in self.held:
                (chunk,) = self.held.pop(HERE)
                self.reply(HERE, chunk)

    def finish_with_one_worker(self) -> None:
        """All others hang, without notice: they may have been given anything first."""
        one = self.names
        self.names += 1
        self.held[one] = []
        self.carry_out(self.coordinator.joined(one, self.now))
        for _ in range(len(self.open) * (len(self.workers) + 1) + 1):
            while self.held[one]:
                chunk = self.held[one][0]
                self.let_go(one, chunk)
                self.reply(one, chunk)
            self.now += 100_000.0
            self.carry_out(self.coordinator.tick(self.now))

    def teardown(self) -> None:
        if self.without_workers is WithoutWorkers.CONTINUE and self.now % 2 < 1:
            self.finish_alone()
        else:
            self.held.pop(HERE, None)
            self.finish_with_one_worker()
        assert not self.open
        assert self.coordinator.open_chunks == self.coordinator.in_flight == 0


class WorldGoingOn(World):
    without_workers = WithoutWorkers.CONTINUE


class WorldWaiting(World):
    without_workers = WithoutWorkers.WAIT


TestGoingOn: type = WorldGoingOn.TestCase
TestWaiting: type = WorldWaiting.TestCase


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_few_chunks_are_spread_over_all(workers: int) -> None:
    coordinator = Coordinator()
    for worker in range(workers):
        coordinator.joined(worker, 0.0)
    sends = coordinator.add([Chunk(chunk, 1.0) for chunk in range(workers)], 0.0)
    assert sends == [Send(worker, worker) for worker in range(workers)]
