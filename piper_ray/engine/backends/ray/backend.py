"""The solver's second backend: chunks of downsets on the actors of a Ray cluster, if that is quicker than on this
machine."""

from __future__ import annotations

import queue
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, final

import numpy as np

from piper_ray.engine.backends.calls import PROCESS_BYTES
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.backends.ray.calls import ClusterWorkers
from piper_ray.engine.backends.ray.coordinator import WithoutWorkers
from piper_ray.engine.backends.ray.levels import ChunkBatch, SharedLevels
from piper_ray.engine.backends.ray.pacing import Pacing, Span
from piper_ray.engine.backends.ray.placement import WorkerSize
from piper_ray.engine.backends.ray.session import LOCAL, Session, connect, may_wait
from piper_ray.engine.evaluation.backend import Activity, NextBatch, OnProgress
from piper_ray.engine.evaluation.state_tables import StateTables, between
from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.kernels.types import Earlier, LevelStates
from piper_ray.model import arguments
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import ClusterError
from piper_ray.model.events import Listener, Note, silent
from piper_ray.model.solution import ClusterStats, NodeStats

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.dispatcher import Dispatcher
    from piper_ray.engine.backends.ray.machines import Machines

_HEARTBEAT_S = 0.1

_WORTH_A_START_S = 2.0
"""Time that workers would have saved. Once it is reached, they are started, while the search goes on."""

_MANY = 8
"""Assumed size of an unknown cluster, as a multiple of the threads on this machine."""


_TOO_LATE = "no worker was ready before the search was over"


@final
class RayBackend:
    """Solves on the cluster at ``address``: "host:port", "auto", or "local" for a Ray that is started on this machine.

    Work is sent if, by its measured cost, workers finish it sooner than the threads of this process; all else stays.
    The constructor only checks whether the address answers; the connection is made and workers are started once a
    search is found to be long enough for them. If this process is already connected to a Ray, that one is used and left
    as it is.

    workers: the number of actors to keep, spread over the machines; None: one on each machine, as machines join and
    leave. cpus_per_worker: threads of each; None: the cores of its machine, shared among its actors. threads: of this
    process; None: one for each core. pacing: decides what is worth sending; None: by measurement. Close the backend
    after use. Raises ClusterError if the cluster cannot be reached, UsageError for invalid arguments.

    >>> import piper_ray
    >>> with piper_ray.RayBackend("auto") as backend:  # doctest: +SKIP
    ...     solution = piper_ray.solve("workload.toml", backend=backend)
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        cpus_per_worker: int | None = None,
        threads: int | None = None,
        without_workers: WithoutWorkers | str = WithoutWorkers.CONTINUE,
        pacing: Pacing | None = None,
    ) -> None:
        arguments.of_kind("address", address, (str, type(None)), "a text: host:port, auto or local")
        self._address = address
        self._workers = None if workers is None else arguments.positive("workers", workers)
        self._cpus_per_worker = (
            None if cpus_per_worker is None else arguments.positive("cpus_per_worker", cpus_per_worker)
        )
        self._without_workers = arguments.choice("without_workers", without_workers, WithoutWorkers)
        self._local = LocalBackend(None if threads is None else arguments.positive("threads", threads))
        self._pacing = pacing or Pacing()
        self._session: Session | None = None
        if not may_wait(address):
            self._session = self._connected()
        self._starting: Future[Dispatcher | None] | None = None
        self._size: WorkerSize | None = None  # with which the dispatcher was started
        self._needless: str | None = None  # why no worker was started, once that is decided
        self._machines: Machines | None = None
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener: Listener = silent
        self._told_of_start = False
        self._last_threads = 0  # of workers, when there were some
        self._shared = SharedLevels()
        self._ahead: ChunkBatch | None = None  # sent before it is needed
        self._held: ChunkBatch | None = None  # answered, but not finished
        self._worked_s = self._waited_s = 0.0  # time of workers; time of the driver waiting for them
        self._saved_s = 0.0  # time that workers would have saved
        self._batches = self._chunks = 0

    @property
    def threads(self) -> int:
        there = self._threads_there
        return there if there > 0 else self._local.threads

    def activity(self) -> Activity:
        self._pass_notes_on()
        dispatcher = self._dispatcher
        return Activity(dispatcher.workers, dispatcher.in_flight) if dispatcher else Activity(0, 0)

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        self._worked_s = self._waited_s = 0.0
        self._batches = self._chunks = 0
        self._saved_s = 0.0
        dispatcher = self._dispatcher
        if dispatcher is not None:
            self._forget_ahead(dispatcher)
            dispatcher.count_anew()
        self._ahead = self._held = None

    def next_batch(self, states: StateTables) -> NextBatch:
        """Gives levels to workers if they finish them sooner, else to the threads of this process."""
        self._pass_notes_on()
        self._raise_failure()
        if self._held_of(states) is not None or self._sent_ahead(states) is not None:
            return NextBatch(states.level + 1, here=False)
        span = self._next_span(states, states.level)
        far_s, near_s = states.rates.far.seconds(span.far), states.rates.near.seconds(span.near)
        if self._pays(far_s, near_s):
            return NextBatch(states.level + 1, here=False)
        self._consider_workers(states, far_s, near_s)
        return self._local.next_batch(states)

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        """Finishes the levels of a batch that workers evaluated, one after the other, in this process."""
        held = self._held_of(states)
        if held is None:
            ahead = self._sent_ahead(states)
            bounds = (last - first) * states.buckets_used
            if ahead is None and not self._pays(states.rates.far.seconds(bounds), 0.0):
                return self._local.evaluate_downsets(states, first, last, on_progress)
            held = self._by_workers(states, first, last, on_progress, ahead)
        begin, end, found = held.edges[0], held.edges[-1], held.found
        if last == end:
            self._held = None
        known = between(found, first - begin, last - begin)
        if first == begin:
            known = known._replace(tested=found.tested)
        if held.buckets == states.buckets_used:
            return known
        earlier = Earlier(held.buckets, known)
        return self._local.evaluate(states, first, last, on_progress, earlier=earlier).states

    def _by_workers(
        self, states: StateTables, first: int, last: int, on_progress: OnProgress, ahead: ChunkBatch | None
    ) -> ChunkBatch:
        dispatcher = self._started(self._size_for(states))
        self._tell_of_start()
        began_s = time.perf_counter()
        batch = ahead or self._submit(dispatcher, states, states.level, *self._span(states, first, last))
        self._ahead = None
        first, last = batch.edges[0], batch.edges[-1]
        try:
            self._send_ahead(dispatcher, states, last)
            self._wait(batch, on_progress)
        except BaseException:
            dispatcher.do(dispatcher.cancel, batch.calls)
            self._forget_ahead(dispatcher)
            raise
        finally:
            self._pass_notes_on()
        self._waited_s += time.perf_counter() - began_s
        states.rates.far.record((last - first) * batch.buckets, batch.worked_s)
        if ahead is None:
            self._pacing.record(batch.worked_s, batch.answered_s - began_s, max(1, dispatcher.threads))
        self._pacing.record_calls(dispatcher.busy_s, dispatcher.chunks_sent)
        self._worked_s += batch.worked_s
        self._batches += 1
        self._chunks += len(batch.calls)
        self._held = batch
        return batch

    def _span(self, states: StateTables, first: int, last: int) -> tuple[int, int]:
        """Returns the downsets of the levels that are sent together, from the requested ones on."""
        level_start = states.tables.lattice.level_start
        span = self._next_span(states, states.level)
        return first, max(last, int(level_start[span.end_level]))

    def _next_span(self, states: StateTables, level: int) -> Span:
        dispatcher = self._dispatcher
        return self._pacing.batch(
            states.rates.near,
            states.tables.lattice.level_start,
            level,
            states.buckets_used,
            dispatcher.workers if dispatcher is not None else 1,
            self._local.threads,
        )

    def _held_of(self, states: StateTables) -> ChunkBatch | None:
        """Returns what workers found of the evaluation, if it includes the next level."""
        held = self._held
        return held if held is not None and held.states is states else None

    def open_workers(self, *, guarded: bool = False) -> ClusterWorkers:
        """Opens workers for calls of functions, see ``ClusterWorkers``. Close them after use; the backend stays
        open."""
        return ClusterWorkers(self, guarded=guarded)

    def start_for_calls(self, memory_bytes: float, *, guarded: bool) -> Dispatcher:
        """Starts workers for calls. memory_bytes: of a worker. A call takes one thread, so a worker has one core by
        default."""
        return self._started(WorkerSize(self._cpus_per_worker or 1, memory_bytes, guarded))

    def count_call(self, worked_s: float) -> None:
        """Counts a call that was answered."""
        self._worked_s += worked_s
        self._batches += 1
        self._chunks += 1

    def stats(self) -> ClusterStats:
        """Returns what was computed where, and what was sent, for the current or the last solve."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return ClusterStats(0, 0, 0, 0, 0.0, 0.0, (), self._why_unused())
        traffic, chunks = dispatcher.publisher.traffic, dispatcher.chunks_by_node
        nodes = sorted({*traffic.fetched_bytes, *traffic.held_bytes, *chunks})
        return ClusterStats(
            workers=dispatcher.workers,
            batches=self._batches,
            chunks=self._chunks,
            put_bytes=traffic.put_bytes,
            worked_s=self._worked_s,
            waited_s=self._waited_s,
            nodes=tuple(
                NodeStats(dispatcher.host_of(node), chunks[node], traffic.fetched_bytes[node], traffic.held_bytes[node])
                for node in nodes
            ),
            unused=self._why_unused(),
        )

    def __enter__(self) -> RayBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the actors, and Ray if it was started by this backend."""
        self.end_workers()
        if self._session is not None:
            self._session.close()
        self._local.close()

    @property
    def _dispatcher(self) -> Dispatcher | None:
        """Returns the dispatcher once it has started."""
        starting = self._starting
        if starting is None or not starting.done() or starting.exception() is not None:
            return None
        return starting.result()

    @property
    def _threads_there(self) -> int:
        """Returns the threads of workers that are ready; while the last worker is awaited, those of the previous
        ones."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return 0
        threads = dispatcher.threads
        if threads > 0:
            self._last_threads = threads
        elif self._without_workers is WithoutWorkers.WAIT and dispatcher.had_workers:
            return self._last_threads
        return threads

    @property
    def _threads_asked(self) -> int:
        """Returns the number of threads that a cluster may have, before it is known."""
        if self._workers is not None and self._cpus_per_worker is not None:
            return self._workers * self._cpus_per_worker
        return usable_cores() if self._address == LOCAL else _MANY * self._local.threads

    def _pays(self, far_s: float, near_s: float) -> bool:
        return self._pacing.pays(far_s, near_s, self._local.threads, self._threads_there)

    def _consider_workers(self, states: StateTables, far_s: float, near_s: float) -> None:
        """Adds up the time that workers would save with a batch. Once it is enough, they are started, in another
        thread."""
        if self._starting is not None:
            return
        self._saved_s += max(0.0, self._pacing.gain_s(far_s, near_s, self._local.threads, self._threads_asked))
        if self._saved_s >= _WORTH_A_START_S:
            self._start(self._size_for(states))

    def _size_for(self, states: StateTables) -> WorkerSize:
        """Returns the size of a worker: shared tables, and its own Python, Ray, kernels, fronts, members and
        buckets."""
        downsets = states.fronts.start.size
        bucket_bytes = sum(array.nbytes for array in states.buckets) / states.buckets.least_tally.size
        member_bytes = sum(array.nbytes for array in states.members)
        own_bytes = member_bytes + 4 * (64.0 * downsets + bucket_bytes * downsets / 32)
        return WorkerSize(self._cpus_per_worker, PROCESS_BYTES + own_bytes, for_levels=True)

    def _started(self, size: WorkerSize) -> Dispatcher:
        """Waits for the connection, but not for workers."""
        if self._starting is not None and self._size is not None and not self._size.serves(size):
            self.end_workers()
        self._start(size, whatever_it_has=True)
        assert self._starting is not None
        dispatcher = self._starting.result()
        if dispatcher is None:
            self._starting = self._needless = None
            return self._started(size)
        return dispatcher

    def end_workers(self) -> None:
        """Ends the workers. Others start with the next request."""
        starting, self._starting = self._starting, None
        self._shared = SharedLevels()
        with suppress(ClusterError):
            dispatcher = starting.result() if starting is not None else None
            if dispatcher is not None:
                dispatcher.close()

    def _start(self, size: WorkerSize, *, whatever_it_has: bool = False) -> None:
        if self._starting is not None:
            return
        self._size = size
        thread = ThreadPoolExecutor(1, thread_name_prefix="piper-ray-start")
        self._starting = thread.submit(self._dispatching, size, whatever_it_has)
        thread.shutdown(wait=False)

    def _dispatching(self, size: WorkerSize, whatever_it_has: bool) -> Dispatcher | None:
        """Starts a dispatcher. None if the cluster has too few cores to be of use."""
        if self._session is None:
            self._session = self._connected()
        from piper_ray.engine.backends.ray.dispatcher import Dispatcher
        from piper_ray.engine.backends.ray.machines import Machines, RayView

        session, view = self._session, RayView()
        cores = int(sum(node.cpus for node in view.nodes()))
        threads = cores if self._workers is None else min(cores, self._workers * (size.cpus or cores))
        if not whatever_it_has and cores > 0 and threads <= self._local.threads:
            self._needless = f"its workers would have {threads} threads, and there are {self._local.threads} here"
            return None
        if self._machines is None:  # what machines run stays known when other workers start
            self._machines = Machines(view, self._notes.put, session.node, trusted=session.ours is not None)
        return Dispatcher(self._machines, self._notes, self._workers, size, self._without_workers)

    def _connected(self) -> Session:
        if self._workers is None:
            return connect(self._address, None)
        return connect(self._address, max(usable_cores(), self._workers * (self._cpus_per_worker or 1)))

    def _raise_failure(self) -> None:
        starting = self._starting
        if starting is not None and starting.done():
            error = starting.exception()
            if error is not None:
                raise error
        dispatcher = self._dispatcher
        if dispatcher is not None and dispatcher.failure is not None:
            raise dispatcher.failure

    def _submit(self, dispatcher: Dispatcher, states: StateTables, level: int, first: int, last: int) -> ChunkBatch:
        """Sends the levels from ``level`` on, over all finished levels."""
        seconds = states.rates.far.seconds((last - first) * states.buckets_used)
        workers, threads = max(1, dispatcher.workers), max(1, dispatcher.threads)
        count = self._pacing.chunks(seconds, workers, threads, last - first)
        expected_s = seconds / count * workers / threads
        edges = np.linspace(first, last, count + 1).astype(np.int64).tolist()
        calls = self._shared.calls(states, edges, expected_s, self._local)
        dispatcher.do(dispatcher.submit, calls)
        return ChunkBatch(states, level, states.buckets_used, edges, calls)

    def _send_ahead(self, dispatcher: Dispatcher, states: StateTables, last: int) -> None:
        """Sends the batch after the one that ends before downset ``last``, as far as it can be done by now. So workers
        have work while the current batch is returned and finished in this process, which also does what lies between
        the two.
        """
        level_start = states.tables.lattice.level_start
        level = int(np.searchsorted(level_start, last))
        if level >= level_start.size - 1:
            return
        span = self._next_span(states, level)
        end = int(level_start[span.end_level])
        sizes = np.diff(level_start[states.level : level + 1])
        bounds_between = (end - last) * int(np.sum(1 + sizes // BUCKET_SIZE))
        between_s = states.rates.near.seconds(bounds_between) / self._local.threads
        far_s, near_s = states.rates.far.seconds(span.far), states.rates.near.seconds(span.near)
        if self._pacing.pays_ahead(far_s, near_s, between_s, self._local.threads, self._threads_there):
            self._ahead = self._submit(dispatcher, states, level, last, end)

    def _sent_ahead(self, states: StateTables) -> ChunkBatch | None:
        """Returns what was sent ahead for the evaluation. A batch of another evaluation, which was given up, is
        dropped."""
        batch = self._ahead
        if batch is None or (batch.states is states and batch.first_level == states.level):
            return batch
        dispatcher = self._dispatcher
        assert dispatcher is not None
        self._forget_ahead(dispatcher)
        return None

    def _forget_ahead(self, dispatcher: Dispatcher) -> None:
        batch, self._ahead = self._ahead, None
        if batch is not None:
            dispatcher.do(dispatcher.cancel, batch.calls)

    def _wait(self, batch: ChunkBatch, on_progress: OnProgress) -> None:
        """Waits for a batch. Raises its error if it failed."""
        answers = [call.answer for call in batch.calls]
        while True:
            done, missing = wait(answers, _HEARTBEAT_S, FIRST_EXCEPTION)
            for answer in done:
                answer.result()
            if not missing:
                return
            self._pass_notes_on()
            on_progress(batch.done)

    def _pass_notes_on(self) -> None:
        while not self._notes.empty():
            self._listener(Note(self._notes.get()))

    def _tell_of_start(self) -> None:
        if not self._told_of_start:
            self._told_of_start = True
            self._listener(Note("levels that workers are done with sooner go to workers, in chunks of up to 75 ms"))

    def _why_unused(self) -> str | None:
        """Returns why nothing was sent in this solve, in words; None if something was."""
        if self._chunks:
            return None
        if self._needless is not None:
            return self._needless
        if self._starting is None:
            return f"its workers would have saved {self._saved_s:.1f} s, and take longer to start"
        if not self._threads_there:
            return _TOO_LATE
        return f"the {self._local.threads} threads here are sooner done with what there was than its workers"
