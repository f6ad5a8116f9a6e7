"""The solver's second backend: chunks of downsets on the actors of a Ray cluster."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING

import numpy as np

from piper_ray.engine.backends.ray.coordinator import WithoutWorkers
from piper_ray.engine.backends.ray.pacing import Pacing
from piper_ray.engine.backends.ray.session import connect
from piper_ray.engine.evaluation.backend import Activity, NextBatch, OnProgress
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model import arguments
from piper_ray.model.events import Listener, Note, silent
from piper_ray.model.solution import ClusterStats, NodeStats

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.call import Call
    from piper_ray.engine.backends.ray.calls import Calls
    from piper_ray.engine.backends.ray.dispatcher import ChunkBatch, Dispatcher

_HEARTBEAT_S = 0.1
_BUSY = 0.6
"""Share of the waiting that workers work; below it there is room for a second evaluation."""

_PROCESS_BYTES = 400e6
"""Of a worker: Python, Ray and the kernels."""

_HERE_S = 0.1
"""Of small levels in one kernel call of the driver."""


class RayBackend:
    """Solves on the cluster at ``address``: "host:port", "auto", or "local" for a Ray started here.

    A Ray that this process is already connected to is used as it is, and stays. workers: actors to keep (None: as many
    as the cluster has room for, as machines come and go), each with cpus_per_worker threads. Close it after use.
    Raises ClusterError if the cluster cannot be reached, UsageError for arguments that make no sense.

    >>> import piper_ray
    >>> with piper_ray.RayBackend("auto") as backend:  # doctest: +SKIP
    ...     solution = piper_ray.solve("workload.toml", backend=backend)
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        cpus_per_worker: int = 1,
        without_workers: WithoutWorkers | str = WithoutWorkers.CONTINUE,
    ) -> None:
        arguments.of_kind("address", address, (str, type(None)), "a text: host:port, auto or local")
        self._workers = None if workers is None else arguments.positive("workers", workers)
        self._cpus_per_worker = arguments.positive("cpus_per_worker", cpus_per_worker)
        self._without_workers = arguments.choice("without_workers", without_workers, WithoutWorkers)
        cpus = None if self._workers is None else self._workers * self._cpus_per_worker
        self._session = connect(address, cpus)
        self._dispatcher: Dispatcher | None = None
        self._pacing = Pacing()
        self._listener: Listener = silent
        self._listening = threading.get_ident()
        self._told_of_room = False
        self._worked_s = self._waited_s = self._here_s = 0.0  # of workers; of the driver for them; of the driver
        self._asked_at_s = (0.0, 0.0)  # the worked and the passed time when last asked for room
        self._batches = self._chunks = 0

    @property
    def threads(self) -> int:
        workers = self._dispatcher.workers if self._dispatcher else 0
        return max(1, workers or self._workers or 1) * self._cpus_per_worker

    def activity(self) -> Activity:
        """Asked for while another thread waits for a batch, too: then this is where notes pass."""
        self._pass_notes_on()
        dispatcher = self._dispatcher
        return Activity(dispatcher.workers, dispatcher.in_flight) if dispatcher else Activity(0, 0)

    def has_room(self) -> bool:
        """Where levels were too small to keep all workers busy since the last time: then two thresholds a pass."""
        dispatcher = self._dispatcher
        if dispatcher is None or dispatcher.workers < 2:
            return False
        worked_s, passed_s = self._worked_s, self._waited_s + self._here_s
        before_s, self._asked_at_s = self._asked_at_s, (worked_s, passed_s)
        room = worked_s - before_s[0] < _BUSY * (passed_s - before_s[1]) * dispatcher.workers
        if room and not self._told_of_room:
            self._told_of_room = True
            self._listener(Note("levels are too small to keep all workers busy: two thresholds are tried at a time"))
        return room

    def listen(self, listener: Listener) -> None:
        self._listener, self._listening = listener, threading.get_ident()
        self._worked_s = self._waited_s = self._here_s = 0.0
        self._asked_at_s = (0.0, 0.0)
        self._batches = self._chunks = 0
        if self._dispatcher is not None:
            self._dispatcher.count_anew()

    def next_batch(self, states: StateTables) -> NextBatch:
        """Workers take what is worth a round trip; the driver what is not."""
        self._pass_notes_on()
        level_start = states.tables.lattice.level_start
        rates, pays = states.rates, self._pacing.pays
        span = self._pacing.batch(rates.near, level_start, states.level, states.buckets_used)
        workers = self._dispatcher.workers if self._dispatcher else self._workers or 1
        if pays(rates.far.seconds(span.far), workers):
            return NextBatch(span.end_level, here=False)
        longest = rates.far.bounds_within(_HERE_S)
        end, buckets, total = states.level, states.buckets_used, 0
        while end < level_start.size - 1 and total < longest:
            size = int(level_start[end + 1] - level_start[end])
            if end > states.level and pays(rates.far.seconds(size * buckets), workers):
                break
            total += size * buckets
            buckets += 1 + size // BUCKET_SIZE
            end += 1
        self._here_s += rates.far.seconds(total)
        return NextBatch(end, here=True)

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        from piper_ray.engine.backends.ray.dispatcher import ChunkBatch

        dispatcher = self._started(states)
        bounds = (last - first) * states.buckets_used
        seconds = states.rates.far.seconds(bounds)
        count = self._pacing.chunks(seconds, max(1, dispatcher.workers), last - first)
        edges = np.linspace(first, last, count + 1).astype(np.int64).tolist()
        batch = ChunkBatch(states, edges, seconds / count)
        began = time.perf_counter()
        dispatcher.submit(batch)
        try:
            found = self._wait(batch, on_progress)
        except BaseException:
            dispatcher.cancel(batch)
            raise
        finally:
            self._pass_notes_on()
        elapsed_s = time.perf_counter() - began
        states.rates.far.record(bounds, batch.worked_s)
        self._pacing.record(batch.worked_s, elapsed_s, dispatcher.workers)
        self._worked_s += batch.worked_s
        self._waited_s += elapsed_s
        self._batches += 1
        self._chunks += count
        return found

    def calls(self, worker_bytes: float) -> Calls:
        """For a search whose parts are calls of a function of arrays. worker_bytes: that one takes in a worker."""
        from piper_ray.engine.backends.ray.calls import Calls

        return Calls(lambda: self._dispatching(_PROCESS_BYTES + worker_bytes), self._count_call)

    def _count_call(self, call: Call) -> None:
        self._worked_s += call.worked_s
        self._batches += 1
        self._chunks += 1

    def stats(self) -> ClusterStats:
        """What was computed where, and what moved, for the solve under way or the last one."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return ClusterStats(0, 0, 0, 0, 0.0, 0.0, ())
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
        )

    def close(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._session.close()

    def _wait(self, batch: ChunkBatch, on_progress: OnProgress) -> LevelStates:
        while not wait([batch.answer], timeout=_HEARTBEAT_S).done:
            self._pass_notes_on()
            on_progress(batch.done)
        return batch.answer.result()

    def _pass_notes_on(self) -> None:
        if self._dispatcher is None or threading.get_ident() != self._listening:
            return  # an evaluation ahead of need: the listener's own thread comes by as well
        while not self._dispatcher.notes.empty():
            self._listener(Note(self._dispatcher.notes.get()))

    def _started(self, states: StateTables) -> Dispatcher:
        """Actors start with the first batch: small problems need none."""
        if self._dispatcher is None:
            self._dispatching(_worker_bytes(states))
            self._listener(Note("levels from 20 ms on go to workers, in chunks of up to 75 ms; smaller ones stay here"))
        return self._dispatching(0.0)

    def _dispatching(self, worker_bytes: float) -> Dispatcher:
        """worker_bytes: that a worker may take, if it is the first one that asks."""
        if self._dispatcher is None:
            from piper_ray.engine.backends.ray.dispatcher import Dispatcher

            self._dispatcher = Dispatcher(
                self._session, self._workers, self._cpus_per_worker, worker_bytes, self._without_workers
            )
        return self._dispatcher


def _worker_bytes(states: StateTables) -> float:
    """Of one worker beside what it shares: Python, Ray and the kernels, and its own fronts and buckets."""
    downsets = states.fronts.start.size
    bucket_bytes = sum(array.nbytes for array in states.buckets) / states.buckets.least_tally.size
    return _PROCESS_BYTES + 4 * (64.0 * downsets + bucket_bytes * downsets / 32)
