"""A crew of a cluster's workers, and of a thread here that begins before they are there."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from piper_ray.engine.flush.crew import Done, ThreadCrew
from piper_ray.engine.flush.task_search import search_sent
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_types import FlushTables
from piper_ray.model.events import Listener

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.call import Shared
    from piper_ray.engine.backends.ray.calls import Calls

_ALONE_S = 0.3
"""What is searched in less is not worth a worker."""
_IN_FLIGHT = 2
"""Tasks for each worker: one in work, and one that waits there."""
_END_WITHIN_S = 1.0
"""For what was told to stop; nobody waits for the rest."""
_STATES_BYTES = 500e6
"""Of the states of a task's tails; few have as many."""


@runtime_checkable
class ClusterBackend(Protocol):
    """What a crew needs of a backend: ``RayBackend`` has it."""

    def calls(self, worker_bytes: float) -> Calls:
        """For calls of functions of arrays on the workers."""
        ...

    def listen(self, listener: Listener) -> None:
        """A solve begins: notes for the user go there."""
        ...

    def activity(self) -> object:
        """Passes notes for the user on."""
        ...


class ClusterCrew:
    """Close it after use; the backend stays. What a worker finds is told to all others."""

    def __init__(self, backend: ClusterBackend) -> None:
        self._backend = backend
        self._here = ThreadCrew(1)
        self._calls: Calls | None = None
        self._running: dict[Future[Any], DegreePair] = {}
        self._shared: dict[int, tuple[object, Shared]] = {}  # by identity, with what keeps it
        self._began_s: float | None = None

    @property
    def width(self) -> int:
        if self._began_s is None or time.perf_counter() - self._began_s < _ALONE_S:
            return self._here.width
        workers = 0 if self._calls is None else self._calls.workers
        return self._here.width + _IN_FLIGHT * max(1, workers)

    def give(self, tables: FlushTables, task: DegreePair, bound_s: float) -> None:
        if self._began_s is None:
            self._began_s = time.perf_counter()
        if not self._here.busy:
            self._here.give(tables, task, bound_s)
            return
        if self._calls is None:
            table_bytes = sum(array.nbytes for array in (*tables, *task.ahead))
            self._calls = self._backend.calls(2.0 * table_bytes + _STATES_BYTES)
        d, t = task.degrees
        answer = self._calls.submit(
            search_sent,
            (self._shared_of(tables), self._shared_of(task.ahead)),
            (tuple(task.arrays), task.order, task.lower_s),
            f"the search of d={d} t={t}",
            bound_s,
        )
        self._running[answer] = task

    def tell(self, bound_s: float) -> None:
        self._here.tell(bound_s)
        if self._calls is not None:
            self._calls.tell(bound_s)

    def heard_s(self) -> float:
        return self._here.heard_s()

    def done(self, timeout_s: float) -> Done:
        self._backend.activity()
        wait([*self._running, *self._here.futures], timeout_s, FIRST_COMPLETED)
        return [*self._here.done(0.0), *self._replies()]

    def recall(self) -> Done:
        if self._calls is not None:
            self._calls.stop()
        found = self._here.recall()
        wait(self._running, _END_WITHIN_S)
        replies = self._replies()
        if self._calls is not None:
            self._calls.forget()
        self._running.clear()
        return [*found, *replies]

    def close(self) -> None:
        """Ends the thread, and forgets what was sent."""
        self._here.close()
        self._shared.clear()

    def _replies(self) -> Done:
        answers = [answer for answer in self._running if answer.done()]
        assert self._calls is not None or not answers
        return [(self._running.pop(answer), self._calls.take(answer)) for answer in answers if self._calls is not None]

    def _shared_of(self, arrays: Any) -> Shared:
        from piper_ray.engine.backends.ray.call import Shared

        if id(arrays) not in self._shared:
            self._shared[id(arrays)] = arrays, Shared(arrays._asdict())
        return self._shared[id(arrays)][1]
