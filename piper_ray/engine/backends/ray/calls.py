"""Calls of a function of arrays on the workers, for searches whose parts share a bound and little else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from piper_ray.engine.backends.ray.call import Call, Shared
from piper_ray.engine.backends.ray.worker import Function

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.dispatcher import Dispatcher

_TURNS = itertools.count()
_LEAST_EXPECTED_S = 1.0
_UNTIL_LATE = 2.0
"""A call may take so many times as long as the longest one before it, and four times that before it is late."""


class Calls:
    """Those of one search. started: the dispatcher, which is started with the first call."""

    def __init__(self, started: Callable[[], Dispatcher], on_replied: Callable[[Call], None]) -> None:
        self._started = started
        self._on_replied = on_replied
        self._dispatcher: Dispatcher | None = None
        self._open: dict[Future[Any], Call] = {}
        self._turn = next(_TURNS)
        self._longest_s = 0.0

    @property
    def workers(self) -> int:
        """That are there at the moment."""
        return 0 if self._dispatcher is None else self._dispatcher.workers

    def submit(
        self, function: Function, shared: tuple[Shared, ...], arguments: tuple[object, ...], what: str, bound_s: float
    ) -> Future[Any]:
        """The call's answer to be, or ClusterError."""
        if self._dispatcher is None:
            self._dispatcher = self._started()
        expected_s = max(_LEAST_EXPECTED_S, _UNTIL_LATE * self._longest_s)
        call = Call(function, shared, arguments, what, self._turn, bound_s, expected_s)
        self._open[call.answer] = call
        self._dispatcher.submit(call)
        return call.answer

    def take(self, answer: Future[Any]) -> Any:
        """The result of one that is done."""
        call = self._open.pop(answer)
        found = answer.result()
        self._longest_s = max(self._longest_s, call.worked_s)
        self._on_replied(call)
        return found

    def tell(self, bound_s: float) -> None:
        """Lowers the bound of all that is open, sooner or later."""
        if self._dispatcher is not None and self._open:
            self._dispatcher.tell(self._turn, bound_s, stop=False)

    def stop(self) -> None:
        """Ends all that is open, sooner or later, and begins a new turn."""
        if self._dispatcher is not None and self._open:
            self._dispatcher.tell(self._turn, np.inf, stop=True)
        self._turn = next(_TURNS)

    def forget(self) -> None:
        """What is still open: nobody waits for it any more."""
        for call in self._open.values():
            assert self._dispatcher is not None
            self._dispatcher.cancel(call)
        self._open.clear()
