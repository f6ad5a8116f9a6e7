"""Assigns chunks of work to workers, despite losses and delays: a state machine without I/O and without a clock.

Events are method calls with the time; their results are commands. A chunk is a pure function, so giving it to two
workers is harmless: the first answer counts. A chunk is some downsets of a level, or a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

HERE = -1
"""The driver's machine as a further worker: a last resort, and only if that is allowed."""


class WithoutWorkers(str, Enum):
    """What to do while there is no worker: continue in the driver, or wait for one.

    >>> WithoutWorkers("wait").value
    'wait'
    """

    CONTINUE = "continue"
    WAIT = "wait"


MOST_DEATHS = 3
"""Number of workers that may die with one chunk."""


@dataclass(frozen=True)
class Chunk:
    """id: unique among all chunks ever. expected_s: how long a worker should take. most_deaths: after which it is given
    up."""

    id: int
    expected_s: float
    most_deaths: int = MOST_DEATHS


@dataclass(frozen=True)
class Send:
    """Send the chunk to the worker, or run it in the driver (HERE)."""

    worker: int
    chunk: int


@dataclass(frozen=True)
class GiveUp:
    """Give the chunk up: it has ended ``deaths`` workers, or failed as often, and would end the next one too."""

    chunk: int
    deaths: int
    cause: str


@dataclass(frozen=True)
class Late:
    """The worker has kept its chunks longer than it should: it is slow or hangs. Reported once for each chunk."""

    worker: int
    chunk: int
    kept_s: float
    expected_s: float


Command = Send | GiveUp | Late


@dataclass
class _Losses:
    """Workers that a chunk may have ended. with_machine: those lost with their whole machine, probably for another
    reason."""

    alone: int = 0
    with_machine: int = 0


@dataclass
class _Worker:
    """in_flight: chunks given and not answered, the running one first. since: when that one started. told: whether its
    delay was reported.
    """

    in_flight: deque[int] = field(default_factory=deque)
    since: float = 0.0
    told: bool = False


class Coordinator:
    """Chunks wait in a queue; a worker has at most IN_FLIGHT of them.

    without_workers: may be changed at any time. overdue_floor_s: a worker may keep a chunk for at least this time.
    """

    IN_FLIGHT = 2
    MOST_MACHINES = 10
    OVERDUE_FACTOR = 4.0
    OVERDUE_FLOOR_S = 1.0

    def __init__(
        self,
        without_workers: WithoutWorkers = WithoutWorkers.CONTINUE,
        *,
        overdue_floor_s: float = OVERDUE_FLOOR_S,
    ) -> None:
        self.without_workers = without_workers
        self._overdue_floor_s = overdue_floor_s
        self._queue: deque[int] = deque()
        self._chunks: dict[int, Chunk] = {}  # neither answered nor given up
        self._losses: dict[int, _Losses] = {}  # losses for which a chunk is blamed
        self._workers: dict[int, _Worker] = {}
        self._here = _Worker()  # the driver's machine: with at most one chunk

    @property
    def workers(self) -> int:
        return len(self._workers)

    @property
    def in_flight(self) -> int:
        """The number of chunks that are being computed."""
        return len(self._chunks.keys() - set(self._queue))

    @property
    def open_chunks(self) -> int:
        return len(self._chunks)

    def add(self, chunks: Iterable[Chunk], now: float) -> list[Command]:
        for chunk in chunks:
            self._chunks[chunk.id] = chunk
            self._queue.append(chunk.id)
        return self._give(now)

    def cancel(self, chunks: Iterable[int]) -> None:
        """Cancels chunks. Workers that have them finish them nevertheless."""
        gone = set(chunks)
        for chunk in gone:
            self._chunks.pop(chunk, None)
            self._losses.pop(chunk, None)
        self._queue = deque(chunk for chunk in self._queue if chunk not in gone)

    def deaths(self, chunk: int) -> int:
        """Returns the number of workers lost while they ran the chunk."""
        losses = self._losses.get(chunk, _Losses())
        return losses.alone + losses.with_machine

    def expect(self, chunk: int, expected_s: float) -> None:
        """Updates how long the chunk should take."""
        if chunk in self._chunks:
            self._chunks[chunk] = replace(self._chunks[chunk], expected_s=expected_s)

    def joined(self, worker: int, now: float) -> list[Command]:
        self._workers.setdefault(worker, _Worker(since=now))
        return self._give(now)

    def lost(self, worker: int, now: float, cause: str, *, with_machine: bool = False) -> list[Command]:
        """The worker is lost, perhaps with its whole machine. The chunk that it ran may be the reason."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return []
        commands: list[Command] = []
        for place, chunk in enumerate(gone.in_flight):
            if chunk not in self._chunks:
                continue
            self._losses.setdefault(chunk, _Losses())
            if place == 0:
                commands += self._blame(chunk, cause, with_machine=with_machine)
            self._requeue(chunk)
        return commands + self._give(now)

    def failed(self, worker: int, chunk: int, now: float, cause: str, *, with_machine: bool = False) -> list[Command]:
        """The chunk failed; the worker continues with others. with_machine: a machine was lost because of it."""
        self._answered(worker, chunk, now)
        commands = self._blame(chunk, cause, with_machine=with_machine) if chunk in self._chunks else []
        self._requeue(chunk)
        return commands + self._give(now)

    def replied(self, worker: int, chunk: int, now: float) -> tuple[bool, list[Command]]:
        """Returns whether this is the first answer to the chunk, which counts, and commands. Lost workers may answer
        too."""
        self._answered(worker, chunk, now)
        wanted = self._chunks.pop(chunk, None) is not None
        if wanted:
            self._losses.pop(chunk, None)
            if chunk in self._queue:
                self._queue.remove(chunk)
        return wanted, self._give(now)

    def tick(self, now: float) -> list[Command]:
        """Must be called regularly: overdue chunks are given to a further worker."""
        return self._give(now)

    def _blame(self, chunk: int, cause: str, *, with_machine: bool = False) -> list[Command]:
        losses = self._losses.setdefault(chunk, _Losses())
        if with_machine:
            losses.with_machine += 1
        else:
            losses.alone += 1
        if losses.alone < self._chunks[chunk].most_deaths and losses.with_machine < self.MOST_MACHINES:
            return []
        deaths = self.deaths(chunk)
        self.cancel([chunk])
        return [GiveUp(chunk, deaths, cause)]

    def _requeue(self, chunk: int) -> None:
        """Puts the chunk at the front, unless it is answered, given up, waiting, or still held by a worker."""
        if chunk in self._chunks and chunk not in self._queue and not any(True for _ in self._holders(chunk)):
            self._queue.appendleft(chunk)

    def _holders(self, chunk: int) -> Iterator[int]:
        if chunk in self._here.in_flight:
            yield HERE
        for name, worker in self._workers.items():
            if chunk in worker.in_flight:
                yield name

    def _answered(self, name: int, chunk: int, now: float) -> None:
        if name == HERE:
            self._here.in_flight.clear()
            return
        worker = self._workers.get(name)
        if worker is not None and chunk in worker.in_flight:
            if worker.in_flight[0] == chunk:  # the next one starts: a chunk behind the first may overtake it
                worker.since, worker.told = now, False
            worker.in_flight.remove(chunk)

    def _give(self, now: float) -> list[Command]:
        commands: list[Command] = []
        # First one chunk for each worker, then the next one, so that a small number of chunks is spread over all
        # workers.
        for depth in range(self.IN_FLIGHT):
            for name, worker in self._workers.items():
                if len(worker.in_flight) == depth and self._queue and self._may_take(self._queue[0], worker, now):
                    commands.append(self._send(name, self._queue.popleft(), now))
        commands += self._late(now)
        for chunk, times in self._overdue(now).items():
            free = [name for name, worker in self._workers.items() if not worker.in_flight]
            # Each further copy is made later: a chunk that is hard, without any worker's fault, soon gets no more
            # copies.
            if free and times > sum(1 for _ in self._holders(chunk)):
                # If one worker hangs, others may too, unnoticed since they have nothing to do.
                commands.append(self._send(max(free, key=lambda name: self._workers[name].since), chunk, now))
        return commands + self._help(now)

    def _may_take(self, chunk: int, worker: _Worker, now: float) -> bool:
        """Whether a worker may take a chunk. Late workers get no more. A chunk that a lost worker had is given alone,
        to find out which one ends workers.
        """
        if self._lateness(worker, now) > 1:
            return False
        return not worker.in_flight or not {chunk, *worker.in_flight} & self._losses.keys()

    def _late(self, now: float) -> Iterator[Late]:
        for name, worker in self._workers.items():
            wanted = [chunk for chunk in worker.in_flight if chunk in self._chunks]
            if wanted and not worker.told and self._lateness(worker, now) > 1:
                worker.told = True
                yield Late(name, wanted[0], now - worker.since, self._expected_s(worker))

    def _help(self, now: float) -> list[Command]:
        """Lets the driver take chunks that no worker gets done: all workers are lost, silent, or have nothing new to
        do."""
        if self._here.in_flight or self.without_workers is WithoutWorkers.WAIT:
            return []
        if self._queue and any(self._lateness(worker, now) <= 1 for worker in self._workers.values()):
            return []
        overdue = next(iter(self._overdue(now)), None)
        if overdue is not None:
            return [self._send(HERE, overdue, now)]
        return [self._send(HERE, self._queue.popleft(), now)] if self._queue else []

    def _send(self, name: int, chunk: int, now: float) -> Send:
        worker = self._here if name == HERE else self._workers[name]
        if not worker.in_flight:
            worker.since = now
        worker.in_flight.append(chunk)
        return Send(name, chunk)

    def _overdue(self, now: float) -> dict[int, float]:
        """Returns chunks whose holders have all kept them too long, the latest first, with the least factor by which
        they did."""
        late: dict[int, float] = {}
        for worker in (self._here, *self._workers.values()):
            times = self._lateness(worker, now)
            for chunk in worker.in_flight:
                if chunk in self._chunks:
                    late[chunk] = min(late.get(chunk, times), times)
        return {chunk: late[chunk] for chunk in sorted(late, key=lambda chunk: -late[chunk]) if late[chunk] > 1}

    def _lateness(self, worker: _Worker, now: float) -> float:
        """Returns the time for which a worker has kept its chunks, relative to the allowed time; 0 if it has none."""
        if not worker.in_flight:
            return 0.0
        return (now - worker.since) / max(self._overdue_floor_s, self.OVERDUE_FACTOR * self._expected_s(worker))

    def _expected_s(self, worker: _Worker) -> float:
        """Returns the expected time of the worker's chunks that are still needed."""
        return sum(self._chunks[chunk].expected_s for chunk in worker.in_flight if chunk in self._chunks)
