"""An evaluation on a cluster, event by event: the backend's own pacing and coordinator; all that takes time is given.

Three things run side by side: the solver (sends batches, finishes them), the dispatcher (a thread that sends chunks and
takes replies, one after the other), and machines, each of which does its chunks in order with all of its threads.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from piper_ray.engine.backends.ray.coordinator import Chunk, Command, Coordinator, Send
from piper_ray.engine.backends.ray.pacing import Pacing
from piper_ray.engine.kernels.types import IndexArray
from piper_ray.engine.tables.problem import Rate


@dataclass(frozen=True)
class Lattice:
    """An evaluation's work. level_start: int64[levels + 1]. buckets: int64[levels + 1], in the levels below each.

    far_s, near_s: of one thread for a bucket bound over finished levels, and among the levels of a batch.
    """

    level_start: IndexArray
    buckets: IndexArray
    far_s: float
    near_s: float

    @property
    def work_s(self) -> float:
        """The seconds of one thread for all of the work."""
        return float(np.sum(np.diff(self.level_start) * self.buckets[:-1])) * self.far_s


@dataclass(frozen=True)
class Constants:
    """send_s, take_s: of the dispatcher, for a chunk and for its reply. way_s: from it to a machine, and as long back.

    chunk_s: of a machine, for each chunk beyond its work. batch_s, level_s: of the solver, for each batch and for each
    level beyond its part of them.
    """

    send_s: float
    take_s: float
    way_s: float
    chunk_s: float
    batch_s: float
    level_s: float


@dataclass
class _Batch:
    """of: chunks not yet answered."""

    end_level: int
    buckets: int
    chunk_work_s: float
    open_chunks: set[int]
    threads_s: float
    sent_s: float
    answered_s: float | None = None


@dataclass
class Simulation:
    """machines: with ``threads`` each. threads_here: of the solver's own machine, for what it finishes."""

    lattice: Lattice
    machines: int
    threads: int
    threads_here: int
    constants: Constants
    pacing: Pacing = field(default_factory=Pacing)
    ahead: bool = True

    def __post_init__(self) -> None:
        self._coordinator = Coordinator(overdue_floor_s=1e9)
        self._batches: dict[int, _Batch] = {}
        self._free_s = [0.0] * self.machines
        self._dispatcher_s = 0.0
        self._replies: list[tuple[float, int, int]] = []  # arrival, machine, chunk
        self._ids = itertools.count()
        self.pacing.call_s = self.constants.send_s + self.constants.take_s
        for machine in range(self.machines):
            self._coordinator.joined(machine, 0.0)

    def run(self) -> float:
        """Seconds of an evaluation, all of whose batches are sent."""
        now_s, level, ahead = 0.0, 1, None
        levels = self.lattice.level_start.size - 1
        while level < levels:
            first = ahead is None
            batch = ahead or self._submit(level, level, now_s)
            ahead = None
            if self.ahead and batch.end_level < levels:
                ahead = self._submit(batch.end_level, level, now_s)
            answered_s = self._answered(batch)
            if first:
                self.pacing.record(batch.threads_s, answered_s - batch.sent_s, self.machines * self.threads)
            now_s = max(now_s, answered_s) + self._finished_here_s(level, batch)
            level = batch.end_level
        return now_s

    def _submit(self, level: int, finished: int, now_s: float) -> _Batch:
        """The levels from ``level`` on, over those below ``finished``."""
        lattice, start = self.lattice, self.lattice.level_start
        buckets = int(lattice.buckets[finished])
        span = self.pacing.batch(Rate(lattice.near_s), start, level, buckets, self.machines, self.threads_here)
        downsets = int(start[span.end_level] - start[level])
        work_s = downsets * buckets * lattice.far_s
        count = self.pacing.chunks(work_s, self.machines, self.machines * self.threads, downsets)
        names = [next(self._ids) for _ in range(count)]
        batch = _Batch(span.end_level, buckets, work_s / count, set(names), work_s, now_s)
        self._batches |= dict.fromkeys(names, batch)
        self._dispatcher_s = max(self._dispatcher_s, now_s)
        self._send(self._coordinator.add([Chunk(name, 0.0) for name in names], self._dispatcher_s))
        return batch

    def _send(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self._dispatcher_s += self.constants.send_s
                began_s = max(self._dispatcher_s + self.constants.way_s, self._free_s[command.worker])
                work_s = self._batches[command.chunk].chunk_work_s / self.threads
                self._free_s[command.worker] = began_s + self.constants.chunk_s + work_s
                arrival_s = self._free_s[command.worker] + self.constants.way_s
                heapq.heappush(self._replies, (arrival_s, command.worker, command.chunk))

    def _answered(self, batch: _Batch) -> float:
        """When the last chunk of the batch is there. Replies are taken in the order in which they come."""
        while batch.open_chunks:
            arrival_s, machine, chunk = heapq.heappop(self._replies)
            self._dispatcher_s = max(self._dispatcher_s, arrival_s) + self.constants.take_s
            of = self._batches.pop(chunk)
            of.open_chunks.discard(chunk)
            if not of.open_chunks:
                of.answered_s = self._dispatcher_s
            self._send(self._coordinator.replied(machine, chunk, self._dispatcher_s)[1])
        assert batch.answered_s is not None
        return batch.answered_s

    def _finished_here_s(self, level: int, batch: _Batch) -> float:
        """The solver's part, level by level: over all that was not finished when the batch was sent."""
        sizes = np.diff(self.lattice.level_start[level : batch.end_level + 1])
        bounds = int(np.sum(sizes * (self.lattice.buckets[level : batch.end_level] - batch.buckets)))
        levels_s = self.constants.level_s * (batch.end_level - level)
        return self.constants.batch_s + levels_s + bounds * self.lattice.near_s / self.threads_here


def towers_lattice(height: int, far_s: float, near_s: float) -> Lattice:
    """The lattice of two chains of ``height`` layers between a first and a last one, with every downset live."""
    sizes = [1, *_cross(height), 1]
    level_start = np.cumsum([0, *sizes])
    buckets = np.cumsum([0, *(-(-size // 32) for size in sizes)])
    return Lattice(level_start, buckets, far_s, near_s)


def _cross(height: int) -> Iterator[int]:
    for level in range(2 * height + 1):
        yield min(level, 2 * height - level) + 1
