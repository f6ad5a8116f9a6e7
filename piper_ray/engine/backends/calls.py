"""Calls of functions, several at a time: what a call is, what workers must do, and workers that are threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.events import Listener

PROCESS_BYTES = 400e6
"""Memory of a worker before any call: Python, Ray and the kernels."""

Function = Callable[..., Any]
"""A function of the shared arguments, then the call's own, then control. control is float64[2]: a bound, in s, which
the function lowers when it finds better and which others may lower, and the request to stop (not 0). The function must
be importable by its name, so that it can be sent."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call function(*shared, *arguments, control), made here or in another process. shared: arguments of many calls,
    sent once.

    key: identifies the call to the caller. what: the call in words. bound_s: the first value of control. memory_bytes:
    of a worker that makes it, in total. expected_s: the time that it should take; None: as long as others took.
    most_deaths: the number of workers that may die with it before it is lost; None: the default number.
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
    """A call, and the result of its function. attempts: the number of workers that had it.

    lost: given if each of these died with it: how the last one did. There is no result then.
    """

    call: Call
    result: Any
    attempts: int = 1
    lost: str | None = None


class Workers(Protocol):
    """Take calls. Their methods are called on one thread. Whoever opens them closes them."""

    @property
    def width(self) -> int:
        """The number of calls that are worth giving at a time."""
        ...

    def give(self, call: Call) -> None:
        """Takes a call. It is made as soon as a worker is free."""
        ...

    def tell(self, bound_s: float) -> None:
        """Lowers the bounds of the calls that were given. It may take effect late or not at all."""
        ...

    def heard_s(self) -> float:
        """Returns the least bound of the calls that are being made, whether they found it or received it. May be
        inf."""
        ...

    def done(self, timeout_s: float) -> Sequence[Finished]:
        """Returns the calls finished since the last time. Waits for up to ``timeout_s`` if there are none."""
        ...

    def recall(self) -> Sequence[Finished]:
        """Ends all calls that were given, and returns those of their results that are soon available."""
        ...

    def close(self) -> None:
        """Closes the workers without waiting for calls. No other method may be called afterwards."""
        ...


@runtime_checkable
class TakesCalls(Protocol):
    """A backend that takes calls. ``LocalBackend`` and ``RayBackend`` do."""

    def open_workers(self) -> Workers:
        """Returns workers. Whoever opens them closes them."""
        ...

    def listen(self, listener: Listener) -> None:
        """Begins a solve: notes for the user go to ``listener``."""
        ...


class ThreadWorkers:
    """Workers that are threads of this process."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="piper-ray")
        self._threads = threads
        self._running: dict[Future[Any], tuple[Call, FloatArray]] = {}

    @property
    def width(self) -> int:
        return self._threads

    @property
    def futures(self) -> Collection[Future[Any]]:
        """The futures of the calls that are being made."""
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
