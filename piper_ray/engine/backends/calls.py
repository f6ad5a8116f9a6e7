"""Calls of functions, several at a time: what a call is, what is asked of those who take them, and threads that do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.events import Listener

PROCESS_BYTES = 400e6
"""Of a worker before any call: Python, Ray and the kernels."""

Function = Callable[..., Any]
"""Of what calls share, then of arguments of its own, then of control, float64[2]: a bound, in s, that it lowers when it
finds better and that others lower, and the wish to stop (not 0). One that a module has by its name, so that it can be
sent."""


@dataclass(frozen=True, eq=False)
class Call:
    """function(*shared, *arguments, control), here or in another process. shared: what many calls take, sent once.

    key: the caller's, for whom it means what was asked. what: in words. bound_s: control's to begin with. memory_bytes:
    of a worker for it, all told. expected_s: how long it should take; None: as long as others took. most_deaths:
    of workers over it, then it is lost; None: as many as usual.
    """

    key: Any
    function: Function
    shared: tuple[Any, ...]
    arguments: tuple[Any, ...]
    what: str
    bound_s: float = np.inf
    memory_bytes: float = PROCESS_BYTES
    expected_s: float | None = None
    most_deaths: int | None = None


class Finished(NamedTuple):
    """A call, and what its function returned. attempts: workers that have had it.

    lost: where each of these has ended with it, how the last one did; there is no result then.
    """

    call: Call
    result: Any
    attempts: int = 1
    lost: str | None = None


class Workers(Protocol):
    """Take calls. What they are asked, they are asked on one thread. Whoever opens them closes them."""

    @property
    def width(self) -> int:
        """How many calls are worth giving at a time."""
        ...

    def give(self, call: Call) -> None:
        """It is done as soon as somebody is free."""
        ...

    def tell(self, bound_s: float) -> None:
        """Lowers the bounds of the calls that were given. It may come late, or not at all."""
        ...

    def heard_s(self) -> float:
        """The least bound of the calls under way: what one of them has found, or was told. May be inf."""
        ...

    def done(self, timeout_s: float) -> Sequence[Finished]:
        """What is finished since the last time; waits for so long while there is nothing."""
        ...

    def recall(self) -> Sequence[Finished]:
        """Ends all that was given, and returns what it has come to, as far as that is soon to be had."""
        ...

    def close(self) -> None:
        """Nothing is asked of them after that; what they have in hand is not waited for."""
        ...


@runtime_checkable
class TakesCalls(Protocol):
    """A backend that does: ``LocalBackend`` and ``RayBackend`` do."""

    def open_workers(self) -> Workers:
        """Who opens them closes them."""
        ...

    def listen(self, listener: Listener) -> None:
        """A solve begins: notes for the user go there."""
        ...


class ThreadWorkers:
    """Threads of this process."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="piper-ray")
        self._threads = threads
        self._running: dict[Future[Any], tuple[Call, FloatArray]] = {}

    @property
    def width(self) -> int:
        return self._threads

    @property
    def futures(self) -> Collection[Future[Any]]:
        """Of what is under way."""
        return self._running.keys()

    @property
    def busy(self) -> bool:
        """Whether each thread has a call."""
        return len(self._running) >= self._threads

    def give(self, call: Call) -> None:
        control = np.array([call.bound_s, 0.0])
        self._running[self._pool.submit(call.function, *call.shared, *call.arguments, control)] = call, control

    def tell(self, bound_s: float) -> None:
        for _, control in self._running.values():
            control[0] = min(control[0], bound_s)

    def heard_s(self) -> float:
        return min((float(control[0]) for _, control in self._running.values()), default=np.inf)

    def done(self, timeout_s: float) -> Sequence[Finished]:
        finished, _ = wait(self._running, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return [Finished(self._running.pop(future)[0], future.result()) for future in finished]

    def recall(self) -> Sequence[Finished]:
        for _, control in self._running.values():
            control[1] = 1.0
        wait(self._running)
        return self.done(0.0)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
