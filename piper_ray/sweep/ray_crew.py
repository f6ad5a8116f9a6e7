"""A Ray cluster that solves points: each batch a task that asks for a core and for the memory it may take.

Tasks, not actors: Ray places them by what each machine has left, as machines come and go, and gives them to processes
that are there already. None is retried by Ray: who has which batch, and what becomes of a late or a lost one, is the
coordinator's to say, as in a solve. Its workers here are the cores of all good machines, whichever they are.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn, final

import ray
from ray.exceptions import RayError, TaskCancelledError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from piper_ray.engine.backends.ray.backend import RayBackend
from piper_ray.engine.backends.ray.causes import address_of, cause_of, is_loss
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
from piper_ray.engine.backends.ray.machines import Machines, RayView
from piper_ray.engine.backends.ray.session import connect
from piper_ray.engine.backends.ray.software import difference
from piper_ray.model.errors import ClusterError
from piper_ray.model.events import Event, Note
from piper_ray.model.stop import Stop
from piper_ray.sweep.answer import Row, answer
from piper_ray.sweep.crew import Reply
from piper_ray.sweep.lattices import Lattices
from piper_ray.sweep.point import Point, Sweep
from piper_ray.sweep.queue import PointBatch, PointKind
from piper_ray.sweep.worker import Began, Order, Report, solve_batch

_LOSSES = 25
"""In a row, with no batch answered in between, after which it is the cluster and not the points."""

_OVERDUE_FLOOR_S = 10.0
"""A process that starts, and loads what it needs, may take some seconds on a busy machine."""

_COMPILING_S = 30.0

_FIRST_ANSWERS_S = 10.0
"""To wait for machines to say what they run; after that the others begin."""

_ENVIRONMENT: dict[str, Any] = {"runtime_env": {"env_vars": {"NUMBA_NUM_THREADS": "1"}}}


@dataclass
class _Copy:
    """A batch in the hands of a worker. began: where, once it has."""

    worker: int
    chunk: int
    began: Began | None = None


@final
class RayCrew:
    """The cluster at an address, as ``backends.ray`` takes it. tell: is told what the user should know.

    Raises ClusterError if it cannot be reached, or if none of its machines can work.
    """

    def __init__(self, sweep: Sweep, address: str | None, tell: Callable[[str], None], stop: Stop[Any]) -> None:
        self._sweep = sweep
        self._tell = tell
        self._stop = stop
        self._told: set[tuple[str, str]] = set()
        self._session = connect(address, None)
        self._task: Any = ray.remote(solve_batch)
        self._machines = Machines(RayView(_ENVIRONMENT), tell, self._session.node, trusted=self._session.owned)
        self._coordinator = Coordinator(overdue_floor_s=_OVERDUE_FLOOR_S)
        self._ids = itertools.count()
        self._cores: list[int] = []
        self._batches: dict[int, PointBatch] = {}  # by chunk: neither answered nor given up
        self._deaths: Counter[int] = Counter()
        self._copies: dict[Any, _Copy] = {}
        self._replies: deque[Reply] = deque()
        self._graphs: dict[str, Any] = {}
        self._losses = 0
        try:
            self._wait_for_machines()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> int:
        return len(self._cores)

    @property
    def in_flight(self) -> int:
        return len(self._batches) + len(self._replies)

    @property
    def wants_more(self) -> bool:
        return not self._coordinator.waiting

    def expect(self, kind: PointKind, point_s: float) -> None:
        for chunk, batch in self._batches.items():
            if batch.kind == kind:
                self._coordinator.expect(chunk, point_s * len(batch.tasks))

    def holds(self, memory_bytes: float) -> bool:
        return memory_bytes <= self._machines.memory_bytes or not self._machines.cpus

    def submit(self, batch: PointBatch) -> None:
        chunk = next(self._ids)
        self._batches[chunk] = batch
        # One that ends its worker comes again point by point, so that the others are not tried with it.
        most_deaths = 1 if len(batch.tasks) > 1 else MOST_DEATHS
        self._carry_out(self._coordinator.add([Chunk(chunk, batch.expected_s, most_deaths)], time.monotonic()))

    def replies(self, timeout_s: float) -> list[Reply]:
        self._keep_up(time.monotonic())
        if self._copies and not self._replies:
            running = [*self._copies]
            done, _ = ray.wait(running, num_returns=1, timeout=timeout_s, fetch_local=False)
            if done:
                done, _ = ray.wait(running, num_returns=len(running), timeout=0, fetch_local=False)
            for stream in done:
                self._hear(stream, time.monotonic())
        found, self._replies = [*self._replies], deque()
        return found

    def solve_together(self, point: Point) -> Row:
        def listen(event: Event) -> None:
            if isinstance(event, Note):
                self._tell(event.text)

        with closing(RayBackend()) as backend:
            graph = self._sweep.graphs[point.workload]
            return answer(
                point, graph, self._sweep.options, Lattices(), backend=backend, listener=listen, stop=self._stop
            )

    def close(self) -> None:
        if not self._session.owned:  # else all ends with it
            for stream in self._copies:
                _cancel(stream)
        self._copies.clear()
        self._session.close()

    def _wait_for_machines(self) -> None:
        """A sweep begins on all machines that there are."""
        deadline = time.monotonic() + _FIRST_ANSWERS_S
        self._keep_up(time.monotonic())
        while self._machines.asking and time.monotonic() < deadline:
            time.sleep(0.02)
            self._keep_up(time.monotonic())

    def _keep_up(self, now: float) -> None:
        self._machines.look(now)
        self._machines.check()
        cores = max(1, self._machines.cpus)  # one in any case: for clusters that grow when somebody waits
        for core in self._cores[cores:]:
            self._coordinator.retire(core)
        del self._cores[cores:]
        while len(self._cores) < cores:
            self._cores.append(next(self._ids))
            self._carry_out(self._coordinator.joined(self._cores[-1], now))
        most_bytes = max((batch.memory_bytes for batch in self._batches.values()), default=0.0)
        helps = self._machines.memory_here_bytes() >= max(most_bytes, 1.0)
        self._coordinator.without_workers = WithoutWorkers.CONTINUE if helps else WithoutWorkers.WAIT
        self._carry_out(self._coordinator.tick(now))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            batch = self._batches[command.chunk]
            if isinstance(command, Send):
                self._send(command, batch)
            elif isinstance(command, Late):
                self._tell_of(command)
            else:
                self._give_up(command)

    def _send(self, command: Send, batch: PointBatch) -> None:
        label = batch.tasks[0].point.workload
        if label not in self._graphs:
            self._graphs[label] = ray.put(self._sweep.graphs[label])
        points = tuple(task.point for task in batch.tasks)
        order = Order(points, self._sweep.graph_hashes[label], [self._graphs[label]], self._sweep.options)
        if command.worker == HERE:  # beside all that holds the cores of this machine and gets nothing done
            here = NodeAffinitySchedulingStrategy(self._session.node, soft=False)
            wants = {"num_cpus": 0, "scheduling_strategy": here}
        else:
            wants = {"num_cpus": 1, "memory": int(batch.memory_bytes), **self._machines.placement()}
        task = self._task.options(max_retries=0, num_returns="streaming", **_ENVIRONMENT, **wants)
        self._copies[task.remote(order)] = _Copy(command.worker, command.chunk)

    def _hear(self, stream: Any, now: float) -> None:
        """The next that a task has to say."""
        copy = self._copies[stream]
        try:
            heard: Began | Report = ray.get(next(stream, None) or _ended())
        except RayError as error:
            del self._copies[stream]
            self._carry_out(self._failed(copy, error, now))
            return
        if isinstance(heard, Began):
            self._begin(stream, copy, heard, now)
        else:
            del self._copies[stream]
            self._finish(copy, heard, now)

    def _begin(self, stream: Any, copy: _Copy, began: Began, now: float) -> None:
        copy.began = began
        fault = difference(began.software)
        if fault is None:
            if not began.compiled and copy.chunk in self._batches:
                self._coordinator.expect(copy.chunk, self._batches[copy.chunk].expected_s + _COMPILING_S)
            self._carry_out(self._coordinator.began(copy.worker, copy.chunk, now))
            return
        _cancel(stream)
        del self._copies[stream]
        self._machines.leave_out(began.node, fault)
        self._machines.check()
        self._carry_out(self._coordinator.returned(copy.worker, copy.chunk, now))

    def _finish(self, copy: _Copy, report: Report, now: float) -> None:
        self._losses = 0
        first, commands = self._coordinator.replied(copy.worker, copy.chunk, now)
        batch = self._batches.pop(copy.chunk, None)
        if first and batch is not None:
            attempts = 1 + self._deaths.pop(copy.chunk, 0)
            # Other copies are left to end by themselves: to cancel one that hangs holds this process up for 5 s.
            self._replies.append(Reply(batch, report.rows, report.seconds, attempts))
        self._carry_out(commands)

    def _failed(self, copy: _Copy, error: RayError, now: float) -> list[Command]:
        if copy.chunk not in self._batches or isinstance(error, TaskCancelledError):
            return self._coordinator.returned(copy.worker, copy.chunk, now)
        node = self._machines.node_at(address_of(error)) if copy.began is None else copy.began.node
        host = self._machines.name_at(address_of(error)) if node is None else self._machines.name(node)
        if not is_loss(error) and node is not None:
            # An error of a point is a row: this one is the machine's.
            self._machines.doubt(node, f"it cannot solve points: {cause_of(error, host, 0.0)}", now)
            self._machines.check()
            return self._coordinator.returned(copy.worker, copy.chunk, now)
        gone = copy.began is not None and not self._machines.is_alive(copy.began.node, now)
        cause = cause_of(error, host, self._batches[copy.chunk].memory_bytes, machine_gone=gone)
        self._losses += 1
        if self._losses >= _LOSSES:
            raise ClusterError(f"{self._losses} workers in a row died, the last one so: {cause}") from error
        self._tell_once(host, type(error).__name__, f"a worker is lost, and its points go to others: {cause}")
        self._deaths[copy.chunk] += 1
        return self._coordinator.failed(copy.worker, copy.chunk, now, cause, with_machine=gone)

    def _give_up(self, command: GiveUp) -> None:
        batch = self._batches.pop(command.chunk)
        self._deaths.pop(command.chunk, None)
        self._replies.append(Reply(batch, None, 0.0, command.deaths, command.cause))

    def _tell_of(self, late: Late) -> None:
        places = [
            copy.began for copy in self._copies.values() if (copy.worker, copy.chunk) == (late.worker, late.chunk)
        ]
        began = places[0] if places else None
        others = "others get them too"
        if began is not None:
            host = self._machines.name(began.node)
            text = f"{host} is slow or hangs: {late.kept_s:.0f} s for points of {late.expected_s:.1f} s; {others}"
            self._tell_once(host, "late", text)
        else:
            text = (
                f"nobody has begun with some points for {late.kept_s:.0f} s: a worker hangs, or no machine has a core "
                f"and the memory free; {others}"
            )
            self._tell_once("", "late", text)

    def _tell_once(self, host: str, what: str, text: str) -> None:
        if (host, what) not in self._told:
            self._told.add((host, what))
            self._tell(text)


def _ended() -> NoReturn:
    """A task that was cancelled may end without another word."""
    raise WorkerCrashedError


def _cancel(stream: Any) -> None:
    """Its process ends, if it can."""
    with contextlib.suppress(RayError):
        ray.cancel(stream, force=True)
