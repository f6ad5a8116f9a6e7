"""A backend that passes everything on to another and writes down what each batch took."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np

from piper_ray.engine.evaluation.backend import Activity, Backend, NextBatch, OnProgress
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model.events import Listener
from piper_ray.model.solution import ClusterStats


@dataclass(frozen=True)
class BatchRecord:
    """One batch of levels. put_bytes: by the driver, for it. worked_s: of its chunks together; seconds: waited for it.

    first: of its evaluation, so that its bytes are the evaluation's tables too. Batches of two evaluations at a time
    may be charged with each other's; sums over all are right. began_s: by ``time.perf_counter``.
    """

    first: bool
    levels: int
    downsets: int
    chunks: int
    put_bytes: int
    worked_s: float
    began_s: float
    seconds: float


class Meter:
    """``backend`` with a record of each batch."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.batches: list[BatchRecord] = []
        self._evaluations: WeakSet[StateTables] = WeakSet()  # weak: what is held stays in the object store
        self._charged = backend.stats()
        self._lock = threading.Lock()

    @property
    def threads(self) -> int:
        return self.backend.threads

    def next_batch(self, states: StateTables) -> NextBatch:
        return self.backend.next_batch(states)

    def listen(self, listener: Listener) -> None:
        self.backend.listen(listener)
        self._charged = self.backend.stats()  # what it counts begins anew

    def activity(self) -> Activity:
        return self.backend.activity()

    def stats(self) -> ClusterStats | None:
        return self.backend.stats()

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        began_s = time.perf_counter()
        found = self.backend.evaluate_downsets(states, first, last, on_progress)
        seconds = time.perf_counter() - began_s
        with self._lock:
            before, after = self._charged, self.backend.stats()
            if before is not None and after is not None:
                ends = states.tables.lattice.level_start
                self.batches.append(
                    BatchRecord(
                        first=states not in self._evaluations,
                        levels=int(np.searchsorted(ends, last) - np.searchsorted(ends, first)),
                        downsets=last - first,
                        chunks=after.chunks - before.chunks,
                        put_bytes=after.put_bytes - before.put_bytes,
                        worked_s=after.worked_s - before.worked_s,
                        began_s=began_s,
                        seconds=seconds,
                    )
                )
            self._charged = after
            self._evaluations.add(states)
        return found

    def close(self) -> None:
        self.backend.close()
