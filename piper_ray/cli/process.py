"""The process around a command: its standard streams, and the time in which it loads.

Printing never fails, so that no answer is lost with a log that nobody reads. A reader that went away is no fault: what
is printed from then on goes nowhere. That stdout's disk is full, or that it was never open, is told at the end, when
the answer is wherever else it was to be.

Modules, arguments and input are a large part of short commands. While they are loaded nothing is collected: what is
loaded stays, and the collector would look through it again and again. Numpy's OpenBLAS gets no threads of its own: they
begin with a tenth of a second of spinning each, and what is multiplied here is too small for them. Pydantic does not
look for plugins in all that is installed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO, cast, final


def open_standard_streams() -> None:
    """Opens standard streams to nowhere, where the process was started with closed ones: before any other file, which
    would take their place and get what is printed. As all are opened in turn, each gets its own descriptor, the lowest
    that is free."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process


@contextlib.contextmanager
def lasting(closed: Callable[[], None]) -> Iterator[Stdout]:
    """Looks after the process's own streams; others, put in their place, are left to whoever put them there.

    closed: called once stdout has no reader any more.
    """
    before = sys.stdout, sys.stderr
    output = Stdout(closed)
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _replaced(cast(TextIO, sys.stdout), output)
    elif sys.__stdout__ is None and getattr(sys.stdout, "name", None) == os.devnull:
        sys.stdout = _replaced(cast(TextIO, sys.stdout), output, fault="it is closed")
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _replaced(cast(TextIO, sys.stderr), Stdout(lambda: None))
    try:
        yield output
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


class Stdout:
    """fault: why it could not be written, in words."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self.fault: str | None = None
        self.is_closed = False
        self._closed = closed

    def close(self) -> None:
        """Marks that its reader is gone."""
        if not self.is_closed:
            self.is_closed = True
            self._closed()


def _replaced(stream: TextIO, output: Stdout, fault: str | None = None) -> TextIO:
    """The same file descriptor, encoding and buffering. fault: why nothing that is written there is received."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(stream.fileno(), output, fault)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering if isinstance(stream, io.TextIOWrapper) else False,
        write_through=stream.write_through if isinstance(stream, io.TextIOWrapper) else False,
    )


@final
class _Descriptor(io.RawIOBase):
    """A file descriptor, open for as long as the process."""

    def __init__(self, descriptor: int, output: Stdout, fault: str | None) -> None:
        self._descriptor = descriptor
        self._output = output
        self._fault = fault

    def write(self, data: Any, /) -> int:
        """Writes data, which are bytes."""
        if self._output.is_closed:
            return len(data)
        if self._fault is not None:
            self._output.fault = self._fault
            return len(data)
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            select.select([], [self._descriptor], [])
            return self.write(data)
        except BrokenPipeError:
            self._output.close()
        except OSError as error:
            self._output.fault = self._output.fault or error.strerror or str(error)
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


@contextlib.contextmanager
def others_on_stderr(wanted: bool) -> Iterator[None]:
    """What other processes and libraries print on stdout meanwhile, Ray's among them, goes to stderr."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


_VARIABLES: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1", "PYDANTIC_DISABLE_PLUGINS": "1"}
"""Read as numpy and pydantic are loaded. What the user has set stays, and no process that the command starts inherits
ours."""

_at_end = ExitStack()


def begin_loading() -> None:
    """Begins the loading of a process that runs one command and ends."""
    for name, value in _VARIABLES.items():
        if name not in os.environ:
            os.environ[name] = value
            _at_end.callback(os.environ.pop, name, None)
    if gc.isenabled():
        gc.disable()
        _at_end.callback(gc.enable)
        _at_end.callback(gc.freeze)  # before: what has been loaded is never looked at


def end_loading() -> None:
    """Ends the loading before work that may take long. Does nothing in another process, or a second time."""
    _at_end.close()
