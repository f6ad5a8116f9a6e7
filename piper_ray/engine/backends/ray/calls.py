"""Calls sent to a cluster, with what they share with others; and cluster workers that take calls, with a thread in this
process that takes some before the workers are ready.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from piper_ray.engine.backends.calls import Call, Finished, ThreadWorkers
from piper_ray.engine.backends.ray.coordinator import MOST_DEATHS
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.errors import ClusterError

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.backend import RayBackend
    from piper_ray.engine.backends.ray.dispatcher import Dispatcher
    from piper_ray.engine.backends.ray.machines import Overview
    from piper_ray.engine.backends.ray.publication import Stored

_KEYS = itertools.count()
_TURNS = itertools.count()
_LEAST_EXPECTED_S = 1.0
_UNTIL_LATE = 2.0
"""A call may take this multiple of the longest one before it; at four times that it is late."""

_ALONE_S = 0.3
"""A call that takes less is not worth a worker."""
_IN_FLIGHT = 2
"""Calls for each worker: one that runs, and one that waits there."""
_END_WITHIN_S = 1.0
"""Time to wait for calls that were asked to stop. The others are abandoned."""
_LOOK_S = 0.02

OF_WORKER = -1
"""The key of what each worker has for itself: its threads for chunks of levels."""


class CallLost(ClusterError):
    """The call ended ``deaths`` workers in turn, or failed on them. ``cause``: the message of the last one."""

    def __init__(self, text: str, deaths: int, cause: str) -> None:
        super().__init__(text)
        self.deaths, self.cause = deaths, cause


@dataclass(eq=False)
class Shared:
    """Arguments that many calls share. They are put into the object store with the first call, and removed with this
    object."""

    value: Any
    key: int = field(default_factory=lambda: next(_KEYS))
    stored: Stored | None = None


@dataclass(eq=False)
class GivenCall:
    """A call that was given. shared: replaces the call's own. turn: calls of one turn share bounds and the request to
    stop. here: a function that this process runs instead. answered_s: the time of the answer, by ``time.perf_counter``;
    worked_s: its duration. control: given if it runs in this process.
    """

    call: Call
    shared: tuple[Shared, ...]
    expected_s: float
    turn: int = -1
    here: Callable[[], Any] | None = None
    answer: Future[Any] = field(default_factory=Future)
    worked_s: float = 0.0
    answered_s: float = 0.0
    attempts: int = 1
    bound_s: float = field(init=False)
    control: FloatArray | None = None

    def __post_init__(self) -> None:
        self.bound_s = self.call.bound_s

    @property
    def most_deaths(self) -> int:
        return self.call.most_deaths or MOST_DEATHS

    def compute(self) -> tuple[Any, float]:
        """Returns the answer, computed in this process, and the seconds."""
        began_s = time.perf_counter()
        if self.here is not None:
            return self.here(), time.perf_counter() - began_s
        self.control = np.array([self.bound_s, 0.0])
        found = self.call.function(*(one.value for one in self.shared), *self.call.arguments, self.control)
        return found, time.perf_counter() - began_s

    def tell(self, bound_s: float, *, stop: bool) -> None:
        """Passes a bound to a call that runs in this process or is still to be sent."""
        self.bound_s = min(self.bound_s, bound_s)
        if self.control is not None:
            self.control[0] = min(self.control[0], bound_s)
            self.control[1] = float(stop) or self.control[1]

    def give_up(self, deaths: int, cause: str) -> None:
        """Gives up: the call has ended this many workers, and there is no answer."""
        size_bytes = sum(array_bytes(one.value) for one in self.shared)
        text = (
            f"{self.call.what} ended {deaths} workers in turn, or failed on them; the last said: {cause}. "
            f"Their tables take {size_bytes / 1e6:,.0f} MB in each worker; if "
            "memory ran out, use machines with more of it, or fewer workers on each (--cpus-per-worker)"
        )
        self.answer.set_exception(CallLost(text, deaths, cause))


def array_bytes(value: object) -> int:
    """Returns the bytes of an array, or of all arrays in a tuple."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(map(array_bytes, value)) if isinstance(value, tuple) else 0


@final
class ClusterWorkers:
    """guarded: calls run only in workers, never in this process, which a call must not be able to end; a call that ends
    several workers is answered as lost. Otherwise a thread of this process takes calls as long as there are no workers,
    and such a call ends the search.
    """

    def __init__(self, backend: RayBackend, *, guarded: bool = False) -> None:
        self._backend = backend
        self._guarded = guarded
        self._here = ThreadWorkers(1)
        self._dispatcher: Dispatcher | None = None
        self._open: dict[Future[Any], GivenCall] = {}
        self._shared: dict[int, Shared] = {}  # by identity of the shared value
        self._turn = next(_TURNS)
        self._longest_s = 0.0
        self._began_s: float | None = None

    @property
    def workers(self) -> int:
        """The number of workers at the moment."""
        return 0 if self._dispatcher is None else self._dispatcher.workers

    @property
    def width(self) -> int:
        if self._guarded:  # a worker with a long call should not hold another one that others could take
            return max(1, 0 if self._dispatcher is None else self._dispatcher.workers_asked_for)
        if self._began_s is None or time.perf_counter() - self._began_s < _ALONE_S:
            return self._here.width
        return _IN_FLIGHT * self.workers if self.workers else self._here.width + _IN_FLIGHT

    def start(self, memory_bytes: float, within_s: float) -> Overview:
        """Requests workers with ``memory_bytes`` each. Waits until all machines have answered; from
        ``within_s`` on, one with cores suffices.

        Raises ClusterError if there is no cluster, or none of its machines can work.
        """
        dispatcher = self._dispatcher = self._backend.start_for_calls(memory_bytes, guarded=self._guarded)
        deadline_s = time.monotonic() + within_s
        while (seen := dispatcher.overview()).asking and dispatcher.failure is None:
            if seen.cpus and time.monotonic() >= deadline_s:
                break
            time.sleep(_LOOK_S)
        self._backend.activity()
        if dispatcher.failure is not None:
            raise dispatcher.failure
        return seen

    def give(self, call: Call) -> None:
        if self._began_s is None:
            self._began_s = time.perf_counter()
        if not self._guarded and not self.workers and not self._here.busy:
            self._here.give(call)
            return
        if self._dispatcher is None:
            self._dispatcher = self._backend.start_for_calls(call.memory_bytes, guarded=self._guarded)
        expected_s = call.expected_s or max(_LEAST_EXPECTED_S, _UNTIL_LATE * self._longest_s)
        given = GivenCall(call, tuple(map(self._shared_of, call.shared)), expected_s, self._turn)
        self._open[given.answer] = given
        self._dispatcher.do(self._dispatcher.submit, [given])

    def expect(self, expected_s: Callable[[Call], float | None]) -> None:
        """Updates how long current calls should take; None: unknown for a call."""
        for given in self._open.values():
            seconds = expected_s(given.call)
            if seconds is not None and self._dispatcher is not None:
                self._dispatcher.do(self._dispatcher.expect, given, seconds)

    def tell(self, bound_s: float) -> None:
        self._here.tell(bound_s)
        if self._dispatcher is not None and self._open:
            self._dispatcher.do(self._dispatcher.tell, self._turn, bound_s, stop=False)

    def heard_s(self) -> float:
        return self._here.heard_s()

    def done(self, timeout_s: float) -> Sequence[Finished]:
        wait([*self._open, *self._here.futures], timeout_s, FIRST_COMPLETED)
        self._backend.activity()
        return [*self._here.done(0.0), *self._replies()]

    def recall(self) -> Sequence[Finished]:
        if self._dispatcher is not None and self._open:
            self._dispatcher.do(self._dispatcher.tell, self._turn, np.inf, stop=True)
        self._turn = next(_TURNS)
        found = self._here.recall()
        wait(self._open, _END_WITHIN_S)
        replies = self._replies()
        self._forget()
        return [*found, *replies]

    def close(self) -> None:
        """Ends the thread, and drops what was sent. Guarded workers of the cluster end, others stay."""
        self._forget()
        self._shared.clear()
        self._here.close()
        if self._guarded and self._dispatcher is not None:
            self._backend.end_workers()

    def _forget(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.do(self._dispatcher.cancel, [*self._open.values()])
        self._open.clear()

    def _replies(self) -> list[Finished]:
        return [self._reply(self._open.pop(answer)) for answer in [*self._open] if answer.done()]

    def _reply(self, given: GivenCall) -> Finished:
        error = given.answer.exception()
        if self._guarded and isinstance(error, CallLost):
            return Finished(given.call, None, error.deaths, error.cause)
        result = given.answer.result()
        self._longest_s = max(self._longest_s, given.worked_s)
        self._backend.count_call(given.worked_s)
        return Finished(given.call, result, given.attempts)

    def _shared_of(self, value: object) -> Shared:
        """Returns the shared form of a value. The value is kept alive, so that its identity stays unique."""
        if id(value) not in self._shared:
            self._shared[id(value)] = Shared(value)
        return self._shared[id(value)]
