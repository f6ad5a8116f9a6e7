"""``run_sweep``: every point solved once, and on record within about a second; whatever fails, it can go on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from piper_ray.compiled.observers import observed
from piper_ray.engine.backends.calls import Call, Finished
from piper_ray.engine.backends.ray.backend import RayBackend
from piper_ray.engine.backends.ray.session import LOCAL
from piper_ray.model import arguments
from piper_ray.model.errors import ClusterError
from piper_ray.model.events import Event, Note, silent
from piper_ray.model.figures import plural
from piper_ray.model.stop import Stop, StopSearch
from piper_ray.sweep.answer import Lattices, Report, answer, lost_row, solve_points
from piper_ray.sweep.dataset import Dataset
from piper_ray.sweep.demand import Demand, PointQueue, kind_of
from piper_ray.sweep.plan_point import PlanPoint, Row
from piper_ray.sweep.point import AnyPoint, Progress, Sweep, SweepListener
from piper_ray.sweep.read import read_sweep

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.calls import ClusterWorkers
    from piper_ray.engine.evaluation.backend import Backend

_HERE_S = 4.0
"""A sweep forecast to take no longer is done by this process: starting Ray takes as long."""

_WRITE_EVERY_S = 0.5
_WAIT_S = 0.25
_UNMEASURED_S = 30.0
"""Before any point of a kind is solved, a point may take this long whatever its forecast, because kernels may be
compiled."""

_LEAST_EXPECTED_S = 2.5
"""The least time expected of a batch: a busy machine may take four times that before others get the batch, too."""

_LEAST_PLAN_S = 30.0
"""The least time expected of plans, which differ a hundredfold within a kind."""

_MOST_DEATHS = 25
"""Deaths of workers in a row, with no answer in between, after which the cluster is at fault and not the points."""

_FIRST_ANSWERS_S = 10.0
"""The wait for machines to say what they run; after that the others begin."""


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
    """Solves every point of the sweep in ``source`` (TOML, see ``read``) that ``storage`` does not hold.

    storage: folder or URI (file, s3, gs) of the dataset (``columns``, ``dataset``). resume: go on with what is there.
    address: the address of a Ray cluster, or "local"; None: a Ray of our own on this machine, or this process if that
    is quicker.

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
        observed(on_warning),
        Dataset.open(storage, wanted.name, resume=resume, on_warning=on_warning) as dataset,
        stop.ending(dataset.close),
    ):
        left = [point for point in wanted.points if wanted.identity(point)["input_hash"] not in dataset.finished]
        progress = Progress(points=len(wanted.points), recorded=len(wanted.points) - len(left))
        if left:
            demand = Demand.of(wanted)
            run = _Run(wanted, dataset, progress, listener, on_warning, stop)
            here = not address and sum(map(demand.seconds, left)) <= _HERE_S
            with nullcontext() if here else RayBackend(address or LOCAL) as backend:
                progress.begin(time.monotonic() - began)
                with stop.ending(run.write), suppress(StopSearch), run.written():
                    if backend is None:
                        run.solve_each(left)
                    else:
                        run.solve_on(backend, left, demand)
                if stop.requested:
                    stop.conclude(progress)
        if not stop.requested:
            dataset.compact()
        listener(progress)
    return progress


@dataclass
class _Run:
    """The driver's loop. _deaths: the deaths of workers since a batch was last answered."""

    _sweep: Sweep
    _dataset: Dataset
    _progress: Progress
    _listener: SweepListener
    _on_warning: Callable[[str], None]
    _stop: Stop[Progress]
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _began: float = field(default_factory=time.monotonic)
    _unwritten: list[Row] = field(default_factory=list)
    _written_at: float = field(default_factory=time.monotonic)
    _deaths: int = 0

    @contextmanager
    def written(self) -> Iterator[None]:
        """Whatever is finished within it is on record afterwards."""
        try:
            yield
        finally:
            self.write()
            self._listener(self._progress)

    def solve_each(self, points: Iterable[AnyPoint], backend: Backend | None = None) -> None:
        """One after the other, in this process, or each by a whole cluster. Raises StopSearch once it is asked to."""
        lattices, sweep, listener = Lattices(), self._sweep, silent if backend is None else self._tell_note
        for point in points:
            self._stop.check()
            if backend is not None:  # it takes long
                self.write()
            subject = sweep.subjects[point.workload]
            row = answer(point, subject, sweep.options, lattices, backend, listener, self._stop)
            self._finished(point, row)
            self._go_on(1 if backend is None else backend.activity().workers)

    def solve_on(self, backend: RayBackend, left: Sequence[AnyPoint], demand: Demand) -> None:
        """All points, by workers of the sizes that they need; those that no worker holds, or that are long and few, by
        the whole cluster at the end. Raises StopSearch once it is asked to stop.
        """
        backend.listen(self._tell_note)
        whole = {point for point in left if demand.memory_bytes(point) is None}
        for memory_bytes, points in demand.by_memory(left):
            with closing(backend.open_workers(guarded=True)) as workers:
                seen = workers.start(memory_bytes, _FIRST_ANSWERS_S)
                if seen.cpus and memory_bytes > seen.memory_bytes:
                    whole.update(points)
                else:
                    whole |= demand.long_points(left, max(1, seen.cpus))
                queue = PointQueue(point for point in points if point not in whole)
                self._in_batches(workers, queue, demand, memory_bytes)
        self.solve_each([point for point in left if point in whole], backend)

    def _in_batches(self, workers: ClusterWorkers, queue: PointQueue, demand: Demand, memory_bytes: float) -> None:
        running = 0
        while running or queue.left:
            self._stop.check()
            while running < workers.width and (kind := queue.next_kind()) is not None:
                points = queue.next_points(workers.width)
                point_s = queue.point_s(kind) or max(_UNMEASURED_S, *map(demand.seconds, points))
                workers.give(self._call(points, memory_bytes, point_s))
                running += 1
            for finished in workers.done(_WAIT_S):
                running -= 1
                self._take(queue, finished)
                workers.expect(lambda call: _expected_s(queue, call.key))
            self._go_on(workers.workers)

    def _call(self, points: tuple[AnyPoint, ...], memory_bytes: float, point_s: float) -> Call:
        return Call(
            points,
            solve_points,
            (self._sweep.subjects[points[0].workload],),
            (points, self._sweep.options),
            plural(len(points), "point"),
            memory_bytes=memory_bytes,
            expected_s=_expected_of(points, point_s),
            # One that ends its worker comes again point by point, so that the others are not tried with it.
            most_deaths=1 if len(points) > 1 else None,
        )

    def _take(self, queue: PointQueue, finished: Finished) -> None:
        points: tuple[AnyPoint, ...] = finished.call.key
        if finished.lost is None:
            report: Report = finished.result
            self._deaths = 0
            queue.took(kind_of(points[0]), len(points), report.seconds)
            for point, row in zip(points, report.rows, strict=True):
                self._finished(point, row, finished.attempts)
            return
        self._deaths += finished.attempts
        if self._deaths >= _MOST_DEATHS:
            raise ClusterError(f"{self._deaths} workers in a row died, the last one so: {finished.lost}")
        if len(points) > 1:  # any of them can have been the cause
            queue.again(points)
        else:
            text = f"{finished.attempts} workers died with this point, the last one so: {finished.lost}"
            self._finished(points[0], lost_row(text), finished.attempts)

    def _finished(self, point: AnyPoint, row: Row, attempts: int = 1) -> None:
        self._unwritten.append({**self._sweep.identity(point), "attempts": attempts, **row})
        self._progress.note(point, row)

    def _tell_note(self, event: Event) -> None:
        if isinstance(event, Note):
            self._on_warning(event.text)

    def _go_on(self, workers: int) -> None:
        """Writes what is finished, if it is time, and tells how far it is."""
        if time.monotonic() - self._written_at >= _WRITE_EVERY_S:
            self.write()
        self._progress.advance(time.monotonic() - self._began, workers)
        self._listener(self._progress)

    def write(self) -> None:
        """Puts on record what is finished. By any thread."""
        with self._writing:
            rows, self._unwritten = self._unwritten, []
            if rows:
                self._dataset.add(rows)
                self._written_at = time.monotonic()


def _expected_s(queue: PointQueue, points: tuple[AnyPoint, ...]) -> float | None:
    """The time expected of a batch, now that some of its kind may be solved."""
    point_s = queue.point_s(kind_of(points[0]))
    return None if point_s is None else _expected_of(points, point_s)


def _expected_of(points: tuple[AnyPoint, ...], point_s: float) -> float:
    least_s = _LEAST_PLAN_S if isinstance(points[0], PlanPoint) else _LEAST_EXPECTED_S
    return max(least_s, point_s * len(points))
