"""Who searches the tasks of a search, several at a time: threads of this process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np

from piper_ray.engine.flush.task_search import TaskResult, run_task
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_types import FlushTables
from piper_ray.engine.kernels.types import FloatArray

Done = Sequence[tuple[DegreePair, TaskResult]]


class Crew(Protocol):
    """Searches tasks. What it is asked, it is asked on one thread.

    Each task has a bound of its own: a time, in s, that its plans must beat. It falls with what the task finds itself,
    and by ``tell``.
    """

    @property
    def width(self) -> int:
        """How many tasks are worth giving at a time."""
        ...

    def give(self, tables: FlushTables, task: DegreePair, bound_s: float) -> None:
        """The task is searched as soon as somebody is free."""
        ...

    def tell(self, bound_s: float) -> None:
        """Lowers the bounds of the tasks that were given. It may come late, or not at all."""
        ...

    def heard_s(self) -> float:
        """The least bound of the tasks under way: what one of them has found, or was told. May be inf."""
        ...

    def done(self, timeout_s: float) -> Done:
        """What has been searched since the last call; waits for so long while there is nothing."""
        ...

    def recall(self) -> Done:
        """Ends all that was given, and returns what it has come to, as far as that is soon to be had."""
        ...


class ThreadCrew:
    """Threads of this process. Close it after use."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="piper-ray")
        self._threads = threads
        self._running: dict[Future[TaskResult], tuple[DegreePair, FloatArray]] = {}

    @property
    def width(self) -> int:
        return self._threads

    @property
    def futures(self) -> Collection[Future[TaskResult]]:
        """Of what is under way."""
        return self._running.keys()

    @property
    def busy(self) -> bool:
        """Whether each thread has a task."""
        return len(self._running) >= self._threads

    def give(self, tables: FlushTables, task: DegreePair, bound_s: float) -> None:
        control = np.array([bound_s, 0.0])
        self._running[self._pool.submit(run_task, tables, task, control)] = task, control

    def tell(self, bound_s: float) -> None:
        for _, control in self._running.values():
            control[0] = min(control[0], bound_s)

    def heard_s(self) -> float:
        return min((float(control[0]) for _, control in self._running.values()), default=np.inf)

    def done(self, timeout_s: float) -> Done:
        finished, _ = wait(self._running, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return [(self._running.pop(future)[0], future.result()) for future in finished]

    def recall(self) -> Done:
        for _, control in self._running.values():
            control[1] = 1.0
        wait(self._running)
        return self.done(0.0)

    def close(self) -> None:
        """Ends the threads, each once it is done with what it has in hand."""
        self._pool.shutdown(wait=False, cancel_futures=True)
