"""Calls that do not depend on each other, made side by side in forks of this process.

A fork knows all that this process knows, so a call needs no preparation, and only its result is sent. Threads would
make calls one after the other, as Python has one lock.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
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
    """The results of these calls, in their order, until ``stop`` is requested.

    A call gets a ``Watch``; of a fork's events only ``CellBegun`` arrive. Each core has a fork at a time. Without
    several cores or outside Linux the calls are made here, one after the other, and so is a call whose fork ends
    without a result, as after an error. Raises what the calls raise.
    """
    width = min(usable_cores(), len(calls)) if sys.platform == "linux" else 1
    running: dict[Connection, tuple[int, int]] = {}  # number of the call, id of the process
    made: dict[int, _Result] = {}
    begun = 0
    try:
        for number, call in enumerate(calls):
            while number not in made:
                while width > 1 and begun < len(calls) and len(running) < width:
                    try:
                        reader, process = _forked(calls[begun])
                    except OSError:  # as where a user may have no more processes
                        width = 1
                        break
                    running[reader] = begun, process
                    begun += 1
                if not running:
                    made[number] = call(watch)
                for reader in [one for one in wait([*running], _POLL_S) if isinstance(one, Connection)]:
                    of, process = running[reader]
                    try:
                        event, result = reader.recv()
                    except (EOFError, OSError):
                        event, result = None, calls[of](watch)
                    if event is not None:
                        watch(event)
                        continue
                    made[of] = result
                    del running[reader]
                    _end(reader, process)
                if stop.requested:
                    return
            yield made.pop(number)
    finally:
        for reader, (_, process) in running.items():
            os.kill(process, signal.SIGKILL)
            _end(reader, process)


def _end(reader: Connection, process: int) -> None:
    reader.close()
    os.waitpid(process, 0)


def _forked(call: Callable[[Watch], object]) -> tuple[Connection, int]:
    """Where the events and the result of a call arrive, and the id of the process that makes it."""
    reader, writer = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python warns of locks that other threads hold: here they wait for the answer, or print, which a fork does not.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _make(call, writer, parent)
    writer.close()
    return reader, process


def _make(call: Callable[[Watch], object], writer: Connection, parent: int) -> NoReturn:
    """What a fork does. The parent handles signals, such as a terminal's, which go to both."""

    def end_as_orphan(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    def watch(event: object) -> None:
        if isinstance(event, CellBegun):
            writer.send((event, None))

    try:
        gc.freeze()  # else the collector writes to all pages that both have in common
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, end_as_orphan)
        signal.setitimer(signal.ITIMER_REAL, _ORPHAN_POLL_S, _ORPHAN_POLL_S)
        writer.send((None, call(watch)))
    finally:
        os._exit(0)
