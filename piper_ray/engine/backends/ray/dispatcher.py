"""The driver's side at run time: a thread that carries out the coordinator's commands, over Ray."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, ParamSpec
from weakref import WeakSet

from ray.exceptions import RayError

from piper_ray.engine.backends.ray.calls import OF_WORKER, GivenCall, Shared
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
from piper_ray.engine.backends.ray.machines import Machines, Overview, address_of, cause_of, is_loss
from piper_ray.engine.backends.ray.placement import WorkerSize
from piper_ray.engine.backends.ray.pool import Pool
from piper_ray.engine.backends.ray.publication import Publisher
from piper_ray.engine.backends.ray.worker import CallOrder, Hello
from piper_ray.model.errors import ClusterError

_TICK_S = 0.25

_LONG_WAIT_S = 30.0
"""Time without a worker after which the user gets a note."""

_Arguments = ParamSpec("_Arguments")


class Dispatcher:
    """Owns coordinator, pool and publisher and, while it exists, machines: only its thread uses them. Requests of
    others and events of workers are steps that this thread takes in turn.

    notes: for the user. failure: raised by all requests from now on. had_workers: whether there ever was a worker.
    busy_s: CPU time of the thread for ``chunks_sent`` chunks.
    """

    def __init__(
        self,
        machines: Machines,
        notes: queue.SimpleQueue[str],
        workers: int | None,
        size: WorkerSize,
        without_workers: WithoutWorkers,
    ) -> None:
        self.publisher = Publisher(machines.here)
        self.chunks_by_node: Counter[str] = Counter()
        self._notes = notes
        self._steps: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._coordinator = Coordinator(WithoutWorkers.WAIT if size.guarded else without_workers)
        self._without_workers = without_workers
        self._size = size
        self._machines = machines
        self._pool = Pool(
            workers,
            size,
            self._machines,
            lambda worker, hello: self.do(self._start, worker, hello),
            lambda worker, chunk, reply: self.do(self._answer, worker, chunk, reply),
        )
        self._ids = itertools.count()
        self._work: dict[int, GivenCall] = {}  # by chunk
        self._shared: WeakSet[Shared] = WeakSet()
        self._known: dict[int, set[int]] = {}  # worker -> keys of what it has
        self._here_thread = ThreadPoolExecutor(1, thread_name_prefix="piper-ray-here")
        self.failure: Exception | None = None
        self.had_workers = False
        self._slow: set[str] = set()  # machines that were reported to the user
        self._alone_since: float | None = None
        self.busy_s, self.chunks_sent = 0.0, 0
        self._thread = threading.Thread(target=self._run, name="piper-ray-dispatcher", daemon=True)
        self._thread.start()

    @property
    def workers(self) -> int:
        return self._coordinator.workers

    @property
    def workers_asked_for(self) -> int:
        """The number of workers, with those that are starting."""
        return self._pool.asked_for

    @property
    def threads(self) -> int:
        """The number of threads of all workers."""
        return self._pool.threads

    @property
    def in_flight(self) -> int:
        return self._coordinator.in_flight

    def host_of(self, node: str) -> str:
        return self._machines.name(node)

    def do(
        self, step: Callable[_Arguments, object], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
    ) -> None:
        """Requests ``submit``, ``cancel``, ``expect`` or ``tell`` from any thread: the dispatcher's thread runs it,
        after earlier requests."""
        self._steps.put(partial(step, *arguments, **keywords))

    def overview(self) -> Overview:
        """Returns an overview of its machines, as known by now."""
        answer: Future[Overview] = Future()
        self.do(self._look, answer)
        return answer.result()

    def count_anew(self) -> None:
        """Counts chunks and traffic from now on only."""
        done = threading.Event()
        self.do(self._count_anew, done)
        done.wait(_TICK_S)

    def close(self) -> None:
        """Ends the thread and the actors, without waiting for anything."""
        self._steps.put(None)
        self._thread.join()
        self._here_thread.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        with closing(self._pool):
            while True:
                try:
                    step = self._steps.get(timeout=_TICK_S)
                except queue.Empty:
                    self._guarded(lambda: self._carry_out(self._coordinator.tick(time.monotonic())))
                else:
                    if step is None:
                        return
                    began_s = time.thread_time()
                    self._guarded(step)
                    self.busy_s += time.thread_time() - began_s
                self._guarded(self._keep_up)

    def _keep_up(self) -> None:
        now = time.monotonic()
        self._pool.keep_up(now)
        if not self.had_workers:
            self._machines.check()
        if self._alone_since is None and self._coordinator.workers == 0:
            self._alone_since = now
        if self._coordinator.workers > 0:
            self._alone_since = None
            self.had_workers = True
        elif self._alone_since is not None and now - self._alone_since > _LONG_WAIT_S:
            self._alone_since = float("inf")
            self._notes.put(
                f"no worker for {_LONG_WAIT_S:.0f} s: perhaps the cluster has neither CPUs nor memory free for one"
            )
        if self._size.guarded:
            self._machines.check_here()
            begun = self.had_workers or self._alone_since == float("inf")
            helps = begun and self._machines.memory_here_bytes() >= self._size.memory_bytes
            self._coordinator.without_workers = WithoutWorkers.CONTINUE if helps else WithoutWorkers.WAIT

    def _guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (RayError, ConnectionError) as error:
            self._fail(ClusterError(f"the connection to the cluster is lost: {_last_line(error)}"))
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer must hear of it
            # A message may not have been sent, so it is impossible to go on.
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fails all current calls."""
        self.failure = error
        calls = [*self._work.values()]
        self.cancel(calls)
        for call in calls:
            call.answer.set_exception(error)

    def cancel(self, calls: Sequence[GivenCall]) -> None:
        """Cancels calls whose answers are no longer needed."""
        gone = set(calls)
        chunks = [chunk for chunk, call in self._work.items() if call in gone]
        self._coordinator.cancel(chunks)
        for chunk in chunks:
            del self._work[chunk]

    def submit(self, calls: Sequence[GivenCall]) -> None:
        """Submits calls. Each of them will be answered."""
        now = time.monotonic()
        if self.failure is not None:
            for call in calls:
                call.answer.set_exception(self.failure)
            return
        chunks = [Chunk(next(self._ids), call.expected_s, call.most_deaths) for call in calls]
        self._work |= {chunk.id: call for chunk, call in zip(chunks, calls, strict=True)}
        self._pool.keep_up(now)
        self._carry_out(self._coordinator.add(chunks, now))

    def expect(self, wanted: GivenCall, expected_s: float) -> None:
        """Updates how long the call should take."""
        for chunk, call in self._work.items():
            if call is wanted:
                self._coordinator.expect(chunk, expected_s)

    def tell(self, turn: int, bound_s: float, *, stop: bool) -> None:
        """Passes a bound and the request to stop to all calls of a turn, wherever they run."""
        self._pool.tell(turn, bound_s, stop=stop)
        for call in self._work.values():
            if call.turn == turn:
                call.tell(bound_s, stop=stop)

    def _count_anew(self, done: threading.Event) -> None:
        self.chunks_by_node = Counter()
        self.publisher.count_anew()
        done.set()

    def _look(self, answer: Future[Overview]) -> None:
        try:
            self._machines.look(time.monotonic())
        finally:  # an error is known as the failure
            answer.set_result(self._machines.overview)

    def _start(self, worker: int, hello: Future[Hello]) -> None:
        now, error = time.monotonic(), hello.exception()
        if error is not None:
            self._pool.drop(worker, now)
            if self._pool.failures == 3:
                host = self._machines.name_at(address_of(error))
                self._notes.put(f"workers do not start: {cause_of(error, host, self._size.memory_bytes)}")
        elif self._pool.started(worker, hello.result(), now):
            self._known[worker] = {OF_WORKER}
            self._carry_out(self._coordinator.joined(worker, now))

    def _answer(self, worker: int, chunk: int, reply: Future[Any]) -> None:
        now, error = time.monotonic(), reply.exception()
        if error is None:
            self._finish(worker, chunk, *reply.result())
        elif not isinstance(error, RayError):
            raise error
        elif worker in self._known or worker == HERE:  # otherwise its loss is known already
            self._carry_out(self._lost(worker, chunk, now, error))

    def _lost(self, worker: int, chunk: int, now: float, error: RayError) -> list[Command]:
        """Handles a call that failed or whose worker is lost."""
        node = self._pool.node_of(worker)
        host, wanted_bytes = self._machines.name(node), self._size.memory_bytes
        failed = not is_loss(error)
        if failed and not self._size.guarded:
            # The worker lives but cannot do the call: it starts afresh with all that calls share.
            self._known[worker] = {OF_WORKER}
            return self._coordinator.failed(worker, chunk, now, cause_of(error, host, wanted_bytes))
        self._pool.drop(worker, now)
        gone = not self._machines.is_alive(node, now)
        cause = cause_of(error, host, wanted_bytes, machine_gone=gone)
        if failed:  # an error of the call itself would be its answer, so this is due to the machine
            self._machines.doubt(node, f"it cannot work: {cause}", now)
            self._machines.check()
        self._known.pop(worker, None)
        if worker == HERE:
            return self._coordinator.failed(HERE, chunk, now, cause, with_machine=gone or failed)
        commands = self._coordinator.lost(worker, now, cause, with_machine=gone or failed)
        left = self._coordinator.workers
        self._notes.put(f"a worker on {host} is lost, {left} left; what it had goes to others: {cause}")
        if left == 0 and not self._size.guarded:
            goes_on = self._without_workers is WithoutWorkers.CONTINUE
            self._notes.put("no worker is left: " + ("going on in the driver" if goes_on else "waiting for one"))
        return commands

    def _finish(self, worker: int, chunk: int, found: object, seconds: float) -> None:
        deaths = self._coordinator.deaths(chunk)
        first, commands = self._coordinator.replied(worker, chunk, time.monotonic())
        work = self._work.pop(chunk, None)
        if first and work is not None:
            work.worked_s, work.answered_s, work.attempts = seconds, time.perf_counter(), 1 + deaths
            if worker in self._known:
                self.chunks_by_node[self._pool.node_of(worker)] += 1
            work.answer.set_result(found)
        self._carry_out(commands)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            work = self._work.get(command.chunk)
            if work is None:
                continue
            if isinstance(command, Late):
                self._tell_of(command)
            elif isinstance(command, GiveUp):
                self.cancel([work])
                work.give_up(command.deaths, command.cause)
            elif command.worker == HERE and not self._size.guarded:
                self._compute_here(command.chunk, work)
            else:
                self._call(command, work)

    def _tell_of(self, late: Late) -> None:
        """Reports a slow machine, once for each."""
        host = self._machines.name(self._pool.node_of(late.worker))
        if host not in self._slow:
            self._slow.add(host)
            self._notes.put(
                f"{host} is slow or hangs: {late.kept_s:.1f} s for what should take {late.expected_s:.2f} s, which now "
                "goes to others too"
            )

    def _compute_here(self, chunk: int, given: GivenCall) -> None:
        answer = self._here_thread.submit(given.compute)
        answer.add_done_callback(lambda reply: self.do(self._take_from_here, chunk, reply))

    def _take_from_here(self, chunk: int, reply: Future[tuple[Any, float]]) -> None:
        fault = reply.exception()
        if fault is None:
            self._finish(HERE, chunk, *reply.result())
        else:
            self._carry_out(self._coordinator.failed(HERE, chunk, time.monotonic(), _last_line(fault)))

    def _call(self, command: Send, given: GivenCall) -> None:
        """Sends a call. The worker fetches what it does not have yet."""
        node, call, fetched = self._pool.node_of(command.worker), given.call, dict[int, list[Any]]()
        known = self._known.setdefault(command.worker, {OF_WORKER})
        for one in given.shared:
            if one.key not in known:
                if one.stored is None:
                    one.stored = self.publisher.put(one.value)
                self._shared.add(one)
                self.publisher.sent(node, one.stored)
                fetched[one.key] = [one.stored.ref]
        in_use = tuple(sorted(one.key for one in self._shared))
        known.update(fetched)
        known.intersection_update({OF_WORKER, *in_use})
        shared = tuple(one.key for one in given.shared)
        order = CallOrder(call.function, shared, fetched, call.arguments, given.turn, given.bound_s, in_use)
        self._pool.call(command.worker, command.chunk, order, time.monotonic())
        self.chunks_sent += 1


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
