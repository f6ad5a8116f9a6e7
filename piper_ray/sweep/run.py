"""``run_sweep``: every point solved once, and on record within about a second; whatever fails, it can go on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from piper_ray.compiled.observers import observed
from piper_ray.model import arguments
from piper_ray.model.stop import Stop, StopSearch
from piper_ray.sweep.answer import Row, identity, lost_row
from piper_ray.sweep.crew import Crew, Here, Reply
from piper_ray.sweep.dataset import Dataset
from piper_ray.sweep.demand import Demand
from piper_ray.sweep.point import Point, Sweep
from piper_ray.sweep.progress import Progress, SweepListener
from piper_ray.sweep.queue import PointBatch, PointQueue, PointTask
from piper_ray.sweep.read import read_sweep

_HERE_S = 4.0
"""A sweep forecast to take no longer is done by this process: starting Ray takes as long."""

_WRITE_EVERY_S = 0.5
_WAIT_S = 0.25
_UNMEASURED_S = 15.0
"""A point of a kind of which none is solved may well take so long, whatever its forecast."""


def run_sweep(
    source: str | os.PathLike[str],
    storage: str | os.PathLike[str],
    *,
    resume: bool = False,
    address: str | None = None,
    listener: SweepListener = lambda progress: None,  # noqa: ARG005
    on_warning: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    stop: Stop[Progress] | None = None,
) -> Progress:
    """Solves every point of the sweep in ``source`` (TOML, see ``schema``) that ``storage`` does not hold.

    storage: folder or URI (file, s3, gs) of the dataset (``columns``, ``dataset``). resume: go on with what is there.
    address: of a Ray cluster, or "local"; None: a Ray of our own on this machine, or this process if that is quicker.

    stop: ends it early; the progress tells how much is left. What that, an error or KeyboardInterrupt ends can be
    resumed. Raises InputError for a file that is no sweep, UsageError for arguments that make no sense,
    CheckpointRefused for a storage that cannot be used, CheckpointLost, ClusterError.

    >>> import piper_ray
    >>> progress = piper_ray.run_sweep("sweep.toml", "dataset")  # doctest: +SKIP
    >>> progress.done, progress.failed  # doctest: +SKIP
    (12, 0)
    """
    began = time.monotonic()
    resume = arguments.flag("resume", resume)
    arguments.of_kind("address", address, (str, type(None)), "a text: host:port, auto or local")
    arguments.function("listener", listener)
    arguments.function("on_warning", on_warning)
    arguments.of_kind("stop", stop, (Stop, type(None)), "a Stop")
    stop = stop or Stop()
    storage = arguments.location("storage", storage)
    wanted = read_sweep(source, on_warning)
    with (
        observed(compiling=lambda: on_warning("compiling kernels: up to half a minute"), note=on_warning),
        Dataset.open(storage, wanted.name, resume=resume, on_warning=on_warning) as dataset,
        stop.ending(dataset.close),
    ):
        tasks = [(point, wanted.input_hash(point)) for point in wanted.points]
        left = [(point, hash_) for point, hash_ in tasks if hash_ not in dataset.finished]
        progress = Progress(points=len(tasks), recorded=len(tasks) - len(left))
        if left:
            demand = Demand.of(wanted)
            with closing(_crew(wanted, left, demand, address, on_warning, stop)) as crew:
                progress.begin(time.monotonic() - began)
                run = _Run(wanted, dataset, crew, demand, progress, listener, stop)
                with stop.ending(run.write), suppress(StopSearch):
                    run.solve(left)
                if stop.requested:
                    stop.conclude(progress)
        if not stop.requested:
            dataset.compact()
        listener(progress)
    return progress


def _crew(
    wanted: Sweep,
    left: list[tuple[Point, str]],
    demand: Demand,
    address: str | None,
    on_warning: Callable[[str], None],
    stop: Stop[Progress],
) -> Crew:
    if not address and sum(demand.seconds(point) for point, _ in left) <= _HERE_S:
        return Here(wanted, stop)
    from piper_ray.sweep.ray_crew import RayCrew

    return RayCrew(wanted, address or "local", on_warning, stop)


class _Run:
    """The driver's loop."""

    def __init__(
        self,
        wanted: Sweep,
        dataset: Dataset,
        crew: Crew,
        demand: Demand,
        progress: Progress,
        listener: SweepListener,
        stop: Stop[Progress],
    ) -> None:
        self._sweep = wanted
        self._stop = stop
        self._writing = threading.Lock()
        self._dataset = dataset
        self._crew = crew
        self._demand = demand
        self._progress = progress
        self._listener = listener
        self._began = time.monotonic()
        self._unwritten: list[Row] = []
        self._written_at = self._began

    def solve(self, left: list[tuple[Point, str]]) -> None:
        """All points; those that one worker does not hold, or that are long and few, by the whole crew at the end.

        Raises StopSearch once it is asked to stop; what is finished by then is written.
        """
        together = self._demand.long_points(tuple(point for point, _ in left), self._crew.workers)
        single = [(p, h) for p, h in left if p not in together and self._fits_a_worker(p)]
        alone = {h for _, h in single}
        try:
            self._in_batches(PointQueue(single))
            for point, hash_ in left:
                if hash_ not in alone:
                    self._stop.check()
                    self.write()
                    self._finished(PointTask(point, hash_), self._crew.solve_together(point))
                    self._tell()
        finally:
            self.write()
            self._tell()

    def _fits_a_worker(self, point: Point) -> bool:
        memory_bytes = self._demand.memory_bytes(point)
        return memory_bytes is not None and self._crew.holds(memory_bytes)

    def _in_batches(self, schedule: PointQueue) -> None:
        while True:
            self._stop.check()
            self._hand_out(schedule)
            if not self._crew.in_flight:
                return
            for reply in self._crew.replies(_WAIT_S):
                self._take(schedule, reply)
            self._write_if_due()
            self._tell()

    def _hand_out(self, schedule: PointQueue) -> None:
        while self._crew.wants_more and (kind := schedule.next_kind()) is not None:
            tasks = schedule.next_tasks(self._crew.workers)
            needs = [self._demand.memory_bytes(task.point) for task in tasks]
            point_s = schedule.point_s(kind) or max(
                _UNMEASURED_S, *(self._demand.seconds(task.point) for task in tasks)
            )
            self._crew.submit(PointBatch(tasks, max(need for need in needs if need is not None), point_s * len(tasks)))

    def _take(self, schedule: PointQueue, reply: Reply) -> None:
        batch = reply.batch
        if reply.rows is not None:
            schedule.took(batch.kind, len(batch.tasks), reply.seconds)
            self._crew.expect(batch.kind, schedule.point_s(batch.kind) or 0.0)
            for task, row in zip(batch.tasks, reply.rows, strict=True):
                self._finished(task, row, reply.attempts)
        elif len(batch.tasks) > 1:  # any of them can have been the cause
            schedule.again(batch)
        else:
            text = f"{reply.attempts} workers died with this point, the last one so: {reply.lost}"
            self._finished(batch.tasks[0], lost_row(text), reply.attempts)

    def _finished(self, task: PointTask, row: Row, attempts: int = 1) -> None:
        hashes = self._sweep.graph_hashes
        known: dict[str, Any] = identity(task.point, task.hash, hashes[task.point.workload], self._sweep.options)
        self._unwritten.append({**known, "attempts": attempts, **row})
        self._progress.note(task.point, row)

    def _write_if_due(self) -> None:
        if time.monotonic() - self._written_at >= _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Puts on record what is finished. By any thread."""
        with self._writing:
            rows, self._unwritten = self._unwritten, []
            if rows:
                self._dataset.add(rows)
                self._written_at = time.monotonic()

    def _tell(self) -> None:
        self._progress.advance(time.monotonic() - self._began, self._crew.workers)
        self._listener(self._progress)
