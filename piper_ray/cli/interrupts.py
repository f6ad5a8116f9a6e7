"""SIGINT, SIGTERM and SIGHUP: a command ends within three seconds, with what it has found, whatever it is doing.

Python runs signal handlers on the main thread, between two steps of Python code. A kernel, the compiler or a storage
that does not answer keeps it from there, and an exception raised inside numba's loader is lost. So whatever takes long
runs on a thread of its own, where nothing is ever raised (``run``); the main thread waits for it, or for a signal. Work
that does not look at its ``Stop`` soon enough after a signal is given up, and its answer so far is taken. A third one
hears of signals from the system itself and ends the process if the main thread does not: it may hang on a pipe that
nobody reads.

A closed pipe counts as a signal too, SIGPIPE: what nobody reads any more need not be found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar, final

from piper_ray.cli.process import end_loading
from piper_ray.model.stop import Stop, StopSearch

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ANSWER_WITHIN_S = 0.8
"""Time that work which was asked to stop has to answer."""

_NOTHING_WITHIN_S = 0.3
"""The same, as long as it has nothing to answer with."""

END_WITHIN_S = 2.6
"""The time after a signal at which all remaining work is abandoned."""

_POLL_S = 0.05
_WORDS: dict[int | None, str] = {signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_END = 0
"""A byte that is no signal."""
SHOW_CURSOR = b"\x1b[?25h"

_Answer = TypeVar("_Answer")


@final
class Signals:
    """Signals of this process as bytes of a pipe, while the context lasts, so that whoever waits for something else can
    wait for them too. For the main thread. But for SIGCHLD those that the process was started to ignore, as under nohup
    or in the background of a script, stay ignored.

    handler: called besides, by Python. handlers: what was there before, by signal.
    """

    def __init__(self, numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> None:
        self._numbers = numbers
        self._handler = handler

    def __enter__(self) -> Signals:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        before = {number: signal.getsignal(number) for number in self._numbers}
        self.handlers: dict[int, Any] = {
            number: was
            for number, was in before.items()
            if number == signal.SIGCHLD or was not in (signal.SIG_IGN, None)
        }
        for number in self.handlers:
            signal.signal(number, self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.reader)
        os.close(self.writer)

    def wait(self, timeout_s: float | None) -> bytes:
        """The signals since the last call, once there is one or the time is up."""
        ready, _, _ = select.select([self.reader], [], [], timeout_s)
        return os.read(self.reader, 4096) if ready else b""


def noted(number: int, frame: FrameType | None) -> None:
    """The handler for ``Signals``: the byte in the pipe is all there is to do."""


@final
class Interrupts:
    """The interrupts of this process, while the context lasts. In any other than the main thread there are none.

    number: the number of the first signal that came, after which others change nothing; but a closed pipe gives way to
    any.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._came_at_s = 0.0
        self._ends: list[threading.Thread] = []
        self._raising = False
        self._raised = False
        self._stop: Stop[Any] | None = None
        self._signals = Signals(STOPPING, self._handle)

    def __enter__(self) -> Interrupts:
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._signals.__enter__()
            self._watcher = threading.Thread(target=self._watch, name="piper-ray-signals", daemon=True)
            self._watcher.start()
            self._unraisable_before = sys.unraisablehook
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves all as it is after a signal: the process has to end, and in time."""
        if not self._listens or self.number in self._signals.handlers:
            return
        sys.unraisablehook = self._unraisable_before
        os.write(self._signals.writer, bytes([_END]))
        self._watcher.join()
        self._signals.__exit__()

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A context in which a signal, until ``run``, raises KeyboardInterrupt on the main thread: there is nothing to
        lose yet.

        What is being loaded then may make another error of it, as a descriptor's ``__set_name__`` does, which is
        reported as what it comes from.
        """
        self._raising = True
        try:
            yield
        except Exception as error:
            if not self._raised:
                raise
            raise KeyboardInterrupt from error
        finally:
            self._raising = False

    def tell(self, *details: object) -> None:
        """Says on stderr what happened to the command, unless its reader has gone."""
        if self.number != signal.SIGPIPE:
            words = "; ".join([_WORDS.get(self.number, "interrupted"), *map(str, details)])
            print(f"piper-ray: {words}", file=sys.stderr)  # noqa: T201 - nothing else may be loaded yet

    @property
    def exit_code(self) -> int | None:
        """The exit code as shells have it; None if there was no signal."""
        return None if self.number is None else 128 + self.number

    def stop(self, number: int) -> None:
        """Does what the signal would do, but raises nothing."""
        if self.number in (None, signal.SIGPIPE):
            self._came_at_s = time.monotonic()
            self.number = number
        if self._stop is not None:
            self._stop.request()

    def run(self, work: Callable[[Stop[_Answer]], _Answer]) -> _Answer:
        """What ``work`` returns or raises; after a signal, what it has offered to its ``Stop`` if it does not end soon.

        Raises KeyboardInterrupt after a signal if there is nothing yet. From here on a signal raises nothing, so that
        the answer can be written.
        """
        from concurrent.futures import Future, wait

        end_loading()
        self._raising = False
        stop: Stop[_Answer] = Stop()
        # A cluster that is shut down may take the process with it, and ends with the process in any case.
        stop.rest = threading.Event().wait
        self._stop = stop
        if self.number is not None:
            stop.request()
        running: Future[_Answer | None] = Future()

        def run_work() -> None:
            try:
                try:
                    answer = work(stop)
                except StopSearch:
                    running.set_result(stop.answer())
                else:
                    running.set_result(answer)
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                running.set_exception(error)

        threading.Thread(target=run_work, name="piper-ray-work", daemon=True).start()
        while not wait([running], _POLL_S).done:
            if self.number is not None and time.monotonic() - self._came_at_s > _patience_s(stop):
                self._give_up(stop)
                return _required(stop.answer())
        error = running.exception()
        if error is None:
            return _required(running.result())
        so_far = None if self.number is None else stop.answer()
        if so_far is None:
            raise error
        self.tell(error)  # the signal may have ended a process that the search needs
        return so_far

    def _give_up(self, stop: Stop[Any]) -> None:
        """What work would have done at its end is done meanwhile."""
        end = threading.Thread(target=stop.give_up, name="piper-ray-end", daemon=True)
        self._ends.append(end)
        end.start()

    def finish(self) -> None:
        """Waits, once the answer is written, for the end of what was given up, but not for long."""
        for end in self._ends:
            end.join(ANSWER_WITHIN_S)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handles a signal on the main thread, whenever it comes by."""
        self.stop(number)
        if self._raising:
            self._raising = False
            self._raised = True
            raise KeyboardInterrupt

    def _unraisable(self, lost: Any) -> None:
        """A signal amid what can raise nothing, such as a weak reference's callback, is on record all the same: ``run``
        ends the work, or the watcher the process."""
        if self.number is None or lost.exc_type is not KeyboardInterrupt:
            self._unraisable_before(lost)

    def _watch(self) -> None:
        while True:
            number = os.read(self._signals.reader, 1)[0]
            if number == _END:
                return
            if number in self._signals.handlers:
                break
        self.stop(number)
        time.sleep(END_WITHIN_S)
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                if os.isatty(stream):
                    os.write(stream, SHOW_CURSOR)
        os._exit(self.exit_code or 128 + number)


def _patience_s(stop: Stop[Any]) -> float:
    if stop.is_concluded:
        return 0.0
    return ANSWER_WITHIN_S if stop.has_answer else _NOTHING_WITHIN_S


def _required(answer: _Answer | None) -> _Answer:
    if answer is None:
        raise KeyboardInterrupt("nothing had been found yet, so nothing is lost")
    return answer


_current: Interrupts | None = None


@contextlib.contextmanager
def listening() -> Iterator[Interrupts]:
    """The interrupts of this process, from the outermost of such contexts on."""
    global _current  # noqa: PLW0603 - signals are the process's
    if _current is not None:
        yield _current
        return
    with Interrupts() as _current:
        try:
            yield _current
        finally:
            _current = None


def current() -> Interrupts:
    """The interrupts of this process, inside ``listening``."""
    assert _current is not None
    return _current
