"""Who computes which block, through losses and delays: a state machine without I/O and without a clock.

Events come in as method calls with the time; what to do comes out as commands. A block is pure, so giving it to two
workers is harmless: the first answer counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

HERE = -1
"""The driver as a worker: of last resort, and only where that is allowed."""


class WithoutWorkers(str, Enum):
    """What to do while no worker is left: go on in the driver, or wait for one."""

    CONTINUE = "continue"
    WAIT = "wait"


@dataclass(frozen=True)
class Block:
    """id: unique among all blocks ever. expected_s: how long a worker should take."""

    id: int
    expected_s: float


@dataclass(frozen=True)
class Send:
    """Give the block to the worker (or to the driver itself: HERE)."""

    worker: int
    block: int


@dataclass(frozen=True)
class GiveUp:
    """The block has ended ``deaths`` workers, or failed as often: it will end the next one too."""

    block: int
    deaths: int
    cause: str


Command = Send | GiveUp


@dataclass
class _Losses:
    """Workers that a block may have ended. with_machine: those whose whole machine went, likely not because of it."""

    alone: int = 0
    with_machine: int = 0


@dataclass
class _Worker:
    """in_flight: blocks given and not answered, the one in work first. since: when that one's turn came."""

    in_flight: deque[int] = field(default_factory=deque)
    since: float = 0.0


class Coordinator:
    """Blocks wait in a queue; a worker has at most IN_FLIGHT of them."""

    IN_FLIGHT = 2
    MOST_DEATHS = 3
    MOST_MACHINES = 10
    OVERDUE_FACTOR = 4.0
    OVERDUE_FLOOR_S = 1.0
    MOST_COPIES = 3

    def __init__(self, without_workers: WithoutWorkers = WithoutWorkers.CONTINUE) -> None:
        self._without_workers = without_workers
        self._queue: deque[int] = deque()
        self._blocks: dict[int, Block] = {}  # neither answered nor given up
        self._losses: dict[int, _Losses] = {}  # of blocks that a lost worker had: those that they are blamed for
        self._workers: dict[int, _Worker] = {}
        self._here: int | None = None  # what the driver computes

    @property
    def workers(self) -> int:
        return len(self._workers)

    @property
    def in_flight(self) -> int:
        """Blocks that somebody computes."""
        return len(self._blocks.keys() - set(self._queue))

    @property
    def open_blocks(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Iterable[Block], now: float) -> list[Command]:
        for block in blocks:
            self._blocks[block.id] = block
            self._queue.append(block.id)
        return self._give(now)

    def cancel(self, blocks: Iterable[int]) -> None:
        """Nobody wants their answers any more. Workers that have them finish them all the same."""
        gone = set(blocks)
        for block in gone:
            self._blocks.pop(block, None)
            self._losses.pop(block, None)
        self._queue = deque(block for block in self._queue if block not in gone)

    def joined(self, worker: int, now: float) -> list[Command]:
        self._workers.setdefault(worker, _Worker(since=now))
        return self._give(now)

    def lost(self, worker: int, now: float, cause: str, *, with_machine: bool = False) -> list[Command]:
        """The worker is gone, perhaps with all of its machine. The block that it had in work may be why."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return []
        commands: list[Command] = []
        for place, block in enumerate(gone.in_flight):
            if block not in self._blocks:
                continue
            self._losses.setdefault(block, _Losses())
            if place == 0:
                commands += self._blame(block, cause, with_machine=with_machine)
            self._requeue(block)
        return commands + self._give(now)

    def failed(self, worker: int, block: int, now: float, cause: str) -> list[Command]:
        """The worker lives, but has no answer."""
        self._answered(worker, block, now)
        commands = self._blame(block, cause) if block in self._blocks else []
        self._requeue(block)
        return commands + self._give(now)

    def replied(self, worker: int, block: int, now: float) -> tuple[bool, list[Command]]:
        """Whether this is the first answer to the block, which counts. Comes from lost workers too."""
        self._answered(worker, block, now)
        wanted = self._blocks.pop(block, None) is not None
        if wanted:
            self._losses.pop(block, None)
            if block in self._queue:
                self._queue.remove(block)
        return wanted, self._give(now)

    def tick(self, now: float) -> list[Command]:
        """To be called now and then: what is overdue is given to somebody else too."""
        return self._give(now)

    def _blame(self, block: int, cause: str, *, with_machine: bool = False) -> list[Command]:
        losses = self._losses.setdefault(block, _Losses())
        if with_machine:
            losses.with_machine += 1
        else:
            losses.alone += 1
        if losses.alone < self.MOST_DEATHS and losses.with_machine < self.MOST_MACHINES:
            return []
        self.cancel([block])
        return [GiveUp(block, losses.alone + losses.with_machine, cause)]

    def _requeue(self, block: int) -> None:
        """Back to the front, unless it is answered, given up, waiting, or still in somebody's hands."""
        if block in self._blocks and block not in self._queue and not any(True for _ in self._holders(block)):
            self._queue.appendleft(block)

    def _holders(self, block: int) -> Iterator[int]:
        if self._here == block:
            yield HERE
        for name, worker in self._workers.items():
            if block in worker.in_flight:
                yield name

    def _answered(self, name: int, block: int, now: float) -> None:
        if name == HERE:
            self._here = None
            return
        worker = self._workers.get(name)
        if worker is not None and block in worker.in_flight:
            worker.in_flight.remove(block)
            worker.since = now

    def _give(self, now: float) -> list[Command]:
        commands: list[Command] = []
        # One each, then the next one each: so that few blocks are spread over all.
        for depth in range(self.IN_FLIGHT):
            for name, worker in self._workers.items():
                if len(worker.in_flight) == depth and self._queue and self._may_go_along(self._queue[0], worker):
                    commands.append(self._send(name, self._queue.popleft(), now))
        for block in self._overdue(now):
            free = next((n for n, w in self._workers.items() if not w.in_flight), None)
            if free is not None and sum(1 for _ in self._holders(block)) < self.MOST_COPIES:
                commands.append(self._send(free, block, now))
        return commands + self._help(now)

    def _may_go_along(self, block: int, worker: _Worker) -> bool:
        """A block that a lost worker had is given alone: then it is known which one ends workers."""
        return not worker.in_flight or not {block, *worker.in_flight} & self._losses.keys()

    def _help(self, now: float) -> list[Command]:
        """The driver takes what nobody gets done: all workers are gone, or silent, or have nothing new to do."""
        if self._here is not None or self._without_workers is WithoutWorkers.WAIT:
            return []
        if self._queue and any(self._overdue_s(worker, now) <= 0 for worker in self._workers.values()):
            return []
        overdue = self._overdue(now)
        if overdue:
            return [self._send(HERE, overdue[0], now)]
        return [self._send(HERE, self._queue.popleft(), now)] if self._queue else []

    def _send(self, name: int, block: int, now: float) -> Send:
        if name == HERE:
            self._here = block
        else:
            worker = self._workers[name]
            if not worker.in_flight:
                worker.since = now
            worker.in_flight.append(block)
        return Send(name, block)

    def _overdue(self, now: float) -> list[int]:
        """Blocks whose holders have all kept them too long, the longest first."""
        late: dict[int, float] = {}
        for worker in self._workers.values():
            overdue_s = self._overdue_s(worker, now)
            for block in worker.in_flight:
                if block in self._blocks and block != self._here:
                    late[block] = min(late.get(block, overdue_s), overdue_s)
        return sorted((block for block in late if late[block] > 0), key=lambda block: -late[block])

    def _overdue_s(self, worker: _Worker, now: float) -> float:
        """How much longer it has kept its blocks than it should; not above 0 if it has none."""
        if not worker.in_flight:
            return 0.0
        expected_s = sum(self._blocks[block].expected_s for block in worker.in_flight if block in self._blocks)
        return now - worker.since - max(self.OVERDUE_FLOOR_S, self.OVERDUE_FACTOR * expected_s)
