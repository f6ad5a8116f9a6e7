"""Calls that do not depend on each other, made side by side in forks of this process.

A fork knows all that this process knows, so a call needs no preparation, and only its result is sent. Threads would
make calls one after the other, as Python has one lock.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

from piper_ray.model.cores import usable_cores
from piper_ray.model.stop import Stop
from piper_ray.proposal.cells import CellBegun, Watch

_Result = TypeVar("_Result")

_POLL_S = 0.1
_ORPHAN_POLL_S = 1.0


def each_of(calls: Sequence[Callable[[Watch], _Result]], stop: Stop[Any], watch: Watch) -> Iterator[_Result]:
    """The results of these calls, in their order; after ``stop`` is requested those that are there.

    A call gets a ``Watch``; of a fork's events only ``CellBegun`` arrive. There is a fork for each core. The last calls
    are made first: the longest ones should be last. Without several cores or outside Linux the calls are made here, one
    after the other, and so are those whose forks end without a result, as after an error. Raises what the calls raise.
    """
    left, made = deque(range(len(calls))), dict[int, _Result]()
    count = min(usable_cores(), len(calls)) if sys.platform == "linux" else 1
    forks = [] if count < 2 else _forked(calls, count)
    try:
        # A fork that knows of the request would end its call at once, as if that were the result.
        for number in () if stop.requested else range(len(calls)):
            while number not in made:
                for one in forks:
                    if one.call is None and left:
                        one.give(left.pop())
                working = {one.pipe: one for one in forks if one.call is not None}
                if not working:
                    here = left.popleft()
                    result = calls[here](watch)
                    if not stop.requested:
                        made[here] = result
                for one in [working[pipe] for pipe in wait([*working], _POLL_S) if isinstance(pipe, Connection)]:
                    assert one.call is not None
                    said = one.said()
                    if said is None:
                        left.appendleft(one.call)
                        forks.remove(one)
                        one.end()
                    elif said[0] is None:
                        made[one.call], one.call = said[1], None
                    else:
                        watch(said[0])
                if stop.requested:
                    yield from (made[done] for done in sorted(made))
                    return
            yield made.pop(number)
    finally:
        for one in forks:
            one.end()


@dataclass
class _Fork:
    """process: its id. call: the number of the call that it makes."""

    pipe: Connection
    process: int
    call: int | None = None

    def give(self, number: int) -> None:
        self.call = number
        with contextlib.suppress(OSError):  # a fork that is lost is seen at its answer
            self.pipe.send(number)

    def said(self) -> tuple[CellBegun | None, Any] | None:
        """An event, or None and the result of the call; None: the fork is lost."""
        try:
            found: tuple[CellBegun | None, Any] = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return found

    def end(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        self.pipe.close()


def _forked(calls: Sequence[Callable[[Watch], object]], count: int) -> list[_Fork]:
    """At most ``count`` forks; fewer where the user may have no more processes."""
    found: list[_Fork] = []
    parent = os.getpid()
    with contextlib.suppress(OSError), warnings.catch_warnings():
        # Python warns of locks that other threads hold: here they wait for the answer, or print, which a fork does not.
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(count):
            pipe, own = Pipe()
            process = os.fork()
            if process == 0:
                _work(calls, own, parent)
            own.close()
            found.append(_Fork(pipe, process))
    return found


def _work(calls: Sequence[Callable[[Watch], object]], pipe: Connection, parent: int) -> NoReturn:
    """What a fork does until it is killed. The parent handles signals, such as a terminal's, which go to both."""

    def end_as_orphan(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    def watch(event: object) -> None:
        if isinstance(event, CellBegun):
            pipe.send((event, None))

    try:
        gc.freeze()  # else the collector writes to all pages that both have in common
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, end_as_orphan)
        signal.setitimer(signal.ITIMER_REAL, _ORPHAN_POLL_S, _ORPHAN_POLL_S)
        while True:
            pipe.send((None, calls[pipe.recv()](watch)))
    finally:
        os._exit(1)
