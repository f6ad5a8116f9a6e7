"""The driver's side at run time: a thread that carries out what the coordinator says, over Ray."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from ray.exceptions import RayError

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.backends.ray.arrow import array_table
from piper_ray.engine.backends.ray.call import Call
from piper_ray.engine.backends.ray.causes import address_of, cause_of, is_loss
from piper_ray.engine.backends.ray.coordinator import (
    HERE,
    Chunk,
    Command,
    Coordinator,
    GiveUp,
    Late,
    Send,
    WithoutWorkers,
)
from piper_ray.engine.backends.ray.machines import Machines, RayView
from piper_ray.engine.backends.ray.pool import Answered, Pool, Started
from piper_ray.engine.backends.ray.publication import Publisher
from piper_ray.engine.backends.ray.session import Session
from piper_ray.engine.backends.ray.worker import CallOrder, CallReply, ChunkOrder
from piper_ray.engine.evaluation.state_tables import StateTables, joined
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model.errors import ClusterError

_TICK_S = 0.25

_LONG_WAIT_S = 30.0
"""Without a worker, before the user is told."""


@dataclass
class ChunkBatch:
    """Chunks whose answers belong together: of levels ``first_level`` .. end_level - 1, over the first ``buckets``
    buckets, which are those of the levels below ``level``.

    expected_s: of each chunk. answer: their states, once all are there. worked_s: of all threads together. answered_s:
    when, by ``time.perf_counter``.
    """

    states: StateTables
    first_level: int
    end_level: int
    level: int
    buckets: int
    edges: Sequence[int]
    expected_s: float
    answer: Future[LevelStates] = field(default_factory=Future)
    found: dict[int, LevelStates] = field(default_factory=dict)
    worked_s: float = 0.0
    answered_s: float = 0.0
    first_chunk: int = 0

    @property
    def done(self) -> int:
        """Downsets answered. Asked for on another thread: ``list`` looks at the dict in one go."""
        return sum(part.counts.size for part in list(self.found.values()))

    def span(self, chunk: int) -> tuple[int, int]:
        place = chunk - self.first_chunk
        return self.edges[place], self.edges[place + 1]

    @property
    def chunks(self) -> range:
        return range(self.first_chunk, self.first_chunk + len(self.edges) - 1)


@dataclass(frozen=True)
class _Added:
    batch: ChunkBatch | Call


@dataclass(frozen=True)
class _Cancelled:
    batch: ChunkBatch | Call


@dataclass(frozen=True)
class _Told:
    turn: int
    bound_s: float
    stop: bool


@dataclass(frozen=True)
class _ComputedHere:
    chunk: int
    reply: Future[tuple[object, float]]  # states, or what a call returned, and the seconds that they took


@dataclass(frozen=True)
class _CountAnew:
    done: threading.Event = field(default_factory=threading.Event)


_Event = _Added | _Cancelled | _Told | _CountAnew | _ComputedHere | Started | Answered


class Dispatcher:
    """Owns coordinator, pool and publisher: only its thread touches them."""

    def __init__(
        self,
        session: Session,
        workers: int | None,
        cpus_per_worker: int | None,
        threads_here: int,
        memory_bytes: float,
        without_workers: WithoutWorkers,
    ) -> None:
        self.publisher = Publisher(session.node)
        self.chunks_by_node: Counter[str] = Counter()
        self.notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._coordinator = Coordinator(without_workers)
        self._without_workers = without_workers
        self._memory_bytes = memory_bytes
        self._machines = Machines(RayView(), self.notes.put, session.node, trusted=session.owned)
        self._pool = Pool(workers, cpus_per_worker, memory_bytes, self._machines, self._events.put)
        self._ids = itertools.count()
        self._batches: dict[int, ChunkBatch | Call] = {}  # by chunk
        self._known: dict[int, dict[int, int]] = {}  # worker -> evaluation -> levels that it has
        self._here = LocalBackend(threads_here)
        self._here_thread = ThreadPoolExecutor(1, thread_name_prefix="piper-ray-here")
        self._failure: Exception | None = None
        self._had_workers = False
        self._slow: set[str] = set()  # machines that the user has been told of
        self._alone_since: float | None = None
        self.busy_s, self.chunks_sent = 0.0, 0  # of CPU for chunks: these are what the driver does for each
        self._thread = threading.Thread(target=self._run, name="piper-ray-dispatcher", daemon=True)
        self._thread.start()

    @property
    def workers(self) -> int:
        return self._coordinator.workers

    @property
    def threads(self) -> int:
        """Of all workers."""
        return self._pool.threads

    @property
    def failure(self) -> Exception | None:
        """What ends all that is asked of it from now on."""
        return self._failure

    @property
    def had_workers(self) -> bool:
        """Whether there ever was one."""
        return self._had_workers

    @property
    def in_flight(self) -> int:
        return self._coordinator.in_flight

    def host_of(self, node: str) -> str:
        return self._machines.name(node)

    def submit(self, batch: ChunkBatch | Call) -> None:
        self._events.put(_Added(batch))

    def cancel(self, batch: ChunkBatch | Call) -> None:
        self._events.put(_Cancelled(batch))

    def tell(self, turn: int, bound_s: float, *, stop: bool) -> None:
        """To all calls of a turn, wherever they run."""
        self._events.put(_Told(turn, bound_s, stop))

    def count_anew(self) -> None:
        """Of what is submitted from now on, chunks and traffic."""
        anew = _CountAnew()
        self._events.put(anew)
        anew.done.wait(_TICK_S)

    def close(self) -> None:
        """Ends the thread and the actors; nothing is waited for."""
        self._events.put(None)
        self._thread.join()
        self._here_thread.shutdown(wait=True, cancel_futures=True)
        self._here.close()

    def _run(self) -> None:
        with closing(self._pool):
            while True:
                try:
                    event = self._events.get(timeout=_TICK_S)
                except queue.Empty:
                    self._guarded(partial(self._coordinator.tick, time.monotonic()))
                else:
                    if event is None:
                        return
                    began_s = time.thread_time()
                    self._guarded(partial(self._take, event))
                    self.busy_s += time.thread_time() - began_s
                self._guarded(self._keep_up)

    def _keep_up(self) -> list[Command]:
        now = time.monotonic()
        self._pool.keep_up(now)
        if not self._had_workers:
            self._machines.check()
        if self._alone_since is None and self._coordinator.workers == 0:
            self._alone_since = now
        if self._coordinator.workers > 0:
            self._alone_since = None
            self._had_workers = True
        elif self._alone_since is not None and now - self._alone_since > _LONG_WAIT_S:
            self._alone_since = float("inf")
            self.notes.put(
                f"no worker for {_LONG_WAIT_S:.0f} s: perhaps the cluster has neither CPUs nor memory free for one"
            )
        return []

    def _guarded(self, step: Callable[[], list[Command]]) -> None:
        try:
            self._carry_out(step())
        except (RayError, ConnectionError) as error:
            self._failure = ClusterError(f"the connection to the cluster is lost: {_last_line(error)}")
            self._fail(self._failure)
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer must hear of it
            # What was to be sent may not have been: there is no going on from here.
            self._failure = error
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Nothing more can come of what is under way."""
        for batch in {id(batch): batch for batch in self._batches.values()}.values():
            self._forget(batch)
            batch.answer.set_exception(error)

    def _forget(self, batch: ChunkBatch | Call) -> None:
        self._coordinator.cancel(batch.chunks)
        for chunk in batch.chunks:
            self._batches.pop(chunk, None)

    def _take(self, event: _Event) -> list[Command]:
        now = time.monotonic()
        if isinstance(event, _Added):
            return self._add(event.batch, now)
        if isinstance(event, _Cancelled):
            self._forget(event.batch)
            return []
        if isinstance(event, _Told):
            return self._tell(event)
        if isinstance(event, _CountAnew):
            self.chunks_by_node = Counter()
            self.publisher.count_anew()
            event.done.set()
            return []
        if isinstance(event, Started):
            return self._start(event, now)
        if isinstance(event, _ComputedHere):
            fault = event.reply.exception()
            if fault is not None:
                return self._coordinator.failed(HERE, event.chunk, now, _last_line(fault))
            return self._finish(HERE, event.chunk, *event.reply.result(), now)
        return self._answer(event, now)

    def _tell(self, told: _Told) -> list[Command]:
        self._pool.tell(told.turn, told.bound_s, stop=told.stop)
        for batch in self._batches.values():
            if isinstance(batch, Call) and batch.turn == told.turn:
                batch.tell(told.bound_s, stop=told.stop)
        return []

    def _add(self, batch: ChunkBatch | Call, now: float) -> list[Command]:
        if self._failure is not None:
            batch.answer.set_exception(self._failure)
            return []
        count = 1 if isinstance(batch, Call) else len(batch.edges) - 1
        chunks = [Chunk(next(self._ids), batch.expected_s) for _ in range(count)]
        batch.first_chunk = chunks[0].id
        self._batches |= dict.fromkeys(batch.chunks, batch)
        self._pool.keep_up(now)
        return self._coordinator.add(chunks, now)

    def _start(self, event: Started, now: float) -> list[Command]:
        error = event.hello.exception()
        if error is not None:
            self._pool.drop(event.worker, now)
            if self._pool.failures == 3:
                host = self._machines.name_at(address_of(error))
                self.notes.put(f"workers do not start: {cause_of(error, host, self._memory_bytes)}")
            return []
        if not self._pool.started(event.worker, event.hello.result(), now):
            return []
        self._known[event.worker] = {}
        return self._coordinator.joined(event.worker, now)

    def _answer(self, event: Answered, now: float) -> list[Command]:
        error = event.reply.exception()
        if error is None:
            reply = event.reply.result()
            if isinstance(reply, CallReply):
                return self._finish(event.worker, event.chunk, reply.result, reply.seconds, now)
            return self._finish(event.worker, event.chunk, reply.states, reply.worked_s, now)
        if not isinstance(error, RayError):
            raise error
        if event.worker not in self._known:
            return []  # its loss is known
        node = self._pool.node_of(event.worker)
        host = self._machines.name(node)
        if not is_loss(error):
            # It lives but cannot do it: it starts afresh with this evaluation's tables.
            self._known[event.worker] = {}
            cause = cause_of(error, host, self._memory_bytes)
            return self._coordinator.failed(event.worker, event.chunk, now, cause)
        self._pool.drop(event.worker, now)
        del self._known[event.worker]
        gone = not self._machines.is_alive(node, now)
        cause = cause_of(error, host, self._memory_bytes, machine_gone=gone)
        commands = self._coordinator.lost(event.worker, now, cause, with_machine=gone)
        left = self._coordinator.workers
        self.notes.put(f"a worker on {host} is lost, {left} left; its chunks go to others: {cause}")
        if left == 0:
            goes_on = self._without_workers is WithoutWorkers.CONTINUE
            self.notes.put("no worker is left: " + ("going on in the driver" if goes_on else "waiting for one"))
        return commands

    def _finish(self, worker: int, chunk: int, found: object, seconds: float, now: float) -> list[Command]:
        first, commands = self._coordinator.replied(worker, chunk, now)
        batch = self._batches.pop(chunk, None)
        if first and batch is not None:
            batch.worked_s += seconds
            if worker in self._known:
                self.chunks_by_node[self._pool.node_of(worker)] += 1
            if isinstance(batch, Call):
                batch.answer.set_result(found)
                return commands
            assert isinstance(found, LevelStates)
            batch.found[chunk] = found
            if len(batch.found) == len(batch.edges) - 1:
                batch.answered_s = time.perf_counter()
                batch.answer.set_result(joined([batch.found[chunk] for chunk in batch.chunks]))
        return commands

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            batch = self._batches.get(command.chunk)
            if batch is None:
                continue
            if isinstance(command, Late):
                self._tell_of(command)
            elif isinstance(command, GiveUp):
                self._give_up(command, batch)
            elif command.worker == HERE:
                self._compute_here(command.chunk, batch)
            elif isinstance(batch, Call):
                self._call(command, batch)
            else:
                self._send(command, batch)

    def _tell_of(self, late: Late) -> None:
        """Once for each machine."""
        host = self._machines.name(self._pool.node_of(late.worker))
        if host not in self._slow:
            self._slow.add(host)
            self.notes.put(
                f"{host} is slow or hangs: {late.kept_s:.1f} s for chunks of {late.expected_s:.2f} s, which now go to "
                "others too"
            )

    def _give_up(self, command: GiveUp, batch: ChunkBatch | Call) -> None:
        if isinstance(batch, Call):
            what, arrays = batch.what, [array for shared in batch.shared for array in shared.arrays.values()]
        else:
            first, last = batch.span(command.chunk)
            what, arrays = f"downsets {first:,} to {last - 1:,}", batch.states.grown
        size_bytes = sum(array.nbytes for array in arrays)
        self._forget(batch)
        batch.answer.set_exception(
            ClusterError(
                f"{what} ended {command.deaths} workers in turn, or failed on them; "
                f"the last said: {command.cause}. Their tables take {size_bytes / 1e6:,.0f} MB in each worker; if "
                "memory ran out, use machines with more of it, or fewer workers on each (--cpus-per-worker)"
            )
        )

    def _compute_here(self, chunk: int, batch: ChunkBatch | Call) -> None:
        def compute() -> tuple[object, float]:
            if isinstance(batch, Call):
                return batch.compute()
            return self._here.evaluate(batch.states, *batch.span(chunk), _ignore, buckets=batch.buckets)

        future = self._here_thread.submit(compute)
        future.add_done_callback(lambda reply: self._events.put(_ComputedHere(chunk, reply)))

    def _call(self, command: Send, call: Call) -> None:
        node, shared = self._pool.node_of(command.worker), []
        for one in call.shared:
            if one.stored is None:
                one.stored = self.publisher.put(array_table(dict(one.arrays)))
            self.publisher.sent(node, [one.stored])
            shared.append((one.key, [one.stored.ref]))
        open_calls = [batch for batch in self._batches.values() if isinstance(batch, Call)]
        in_use = tuple(sorted({one.key for other in open_calls for one in other.shared}))
        order = CallOrder(call.function, tuple(shared), call.arguments, call.turn, call.bound_s, in_use)
        self._pool.call(command.worker, command.chunk, order)

    def _send(self, command: Send, batch: ChunkBatch) -> None:
        states = batch.states
        published = self.publisher.publish(states)
        key, in_use = published.order.key, self.publisher.keys_in_use()
        known = {other: level for other, level in self._known[command.worker].items() if other in in_use}
        self._known[command.worker] = known
        objects = self.publisher.needed(states, known.get(key), batch.level)
        self.publisher.sent(self._pool.node_of(command.worker), objects)
        first, last = batch.span(command.chunk)
        known_level = known.get(key, 1)
        order = ChunkOrder(
            evaluation=published.order,
            known_level=known_level,
            buckets=batch.buckets,
            first=first,
            last=last,
            in_use=in_use,
        )
        known[key] = max(known_level, batch.level)
        levels = [objects[-1].ref] if known_level < batch.level else []
        self._pool.send(command.worker, command.chunk, order, levels)
        self.chunks_sent += 1


def _ignore(done: int) -> None:
    pass


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
