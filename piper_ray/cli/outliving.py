"""Commands that use Ray, as a child process whose answer so far outlives it.

Where the raylet of its machine or the cluster's GCS ends, Ray ends whoever is connected, by ``_exit`` or ``abort`` from
outside Python: no handler, no ``atexit`` and no other thread gets a word in. So such a command runs in a child, which
tells of each better answer through a pipe. The parent does nothing but wait, and passes signals on. It ends as the
child does; if that was ended from outside, the parent runs the command itself, up to where the answer is searched for,
and goes on with the one that it was told of last.

The child is forked before anything is loaded and any thread is there, which takes a few ms. It does not outlive the
parent; if SIGKILL ends that, so only on Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from piper_ray.cli.interrupts import SHOW_CURSOR, STOPPING, Signals, noted
from piper_ray.model.errors import ClusterError, PiperRayError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from piper_ray.engine.backends.ray.session import Services

SUPERVISED = "PIPER_RAY_SUPERVISED"
"""The variable in the environment of a child that is started again when it dies: its answer is in its checkpoint."""

_ANSWER, _INPUT, _SERVICES, _WHOLE = "answer", "input", "services", "whole"
"""Kinds of messages from the child to its parent."""

_ANSWERS_WITHIN_S = 1.0
_PR_SET_PDEATHSIG = 1


class Left:
    """What a child has left that was ended from outside. cause: what ended it, in words. exit_code: what to end
    with."""

    def __init__(self, told: Mapping[str, bytes], cause: str, exit_code: int) -> None:
        self.cause, self.exit_code = cause, exit_code
        self._told = told

    @property
    def answer(self) -> Any:
        """The last answer that it reported; None if there was none."""
        return _value(self._told.get(_ANSWER))

    @property
    def stdin(self) -> str | None:
        """What it read there."""
        text: str | None = _value(self._told.get(_INPUT))
        return text


_left: Left | None = None
_to_parent: Connection | None = None
_lock = threading.Lock()


def left() -> Left | None:
    """What is left of the child, in whose place this process now is."""
    return _left


def tell(answer: object) -> None:
    """Says that this is what there is from now on, should the process be ended. Does nothing without a parent."""
    _tell(_ANSWER, answer)


def tell_of_services(services: Services) -> None:
    """The process lives by these from now on."""
    _tell(_SERVICES, tuple(services))


def stdin_text() -> str:
    """All of stdin, which can be read once."""
    if _left is not None and (known := _left.stdin) is not None:
        return known
    text = sys.stdin.read()
    _tell(_INPUT, text)
    return text


def end() -> None:
    """The process comes to its own end."""
    _tell(_WHOLE, None)


def has_parent() -> bool:
    """Whether a parent process receives messages."""
    return _to_parent is not None


def may_be_ended(arguments: Collection[str], environment: Mapping[str, str]) -> bool:
    """Whether the command may connect to Ray, and nobody starts it again."""
    if "--supervise" in arguments or SUPERVISED in environment or not hasattr(os, "fork"):
        return False
    if "sweep" in arguments:
        return "--dry-run" not in arguments
    asked = any(argument.partition("=")[0] == "--address" for argument in arguments)
    return "solve" in arguments and (asked or bool(environment.get("RAY_ADDRESS")))


def outlive() -> None:
    """Returns in the child; in the parent only if the child was ended from outside, else the process ends with it."""
    global _to_parent, _left  # noqa: PLW0603 - of the process
    from multiprocessing import Pipe

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reader, writer = Pipe(duplex=False)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        reader.close()
        _end_with(parent)
        _to_parent = writer
        return
    writer.close()
    told, ended, status = _watched(child, reader)
    reader.close()
    if _WHOLE in told or not _is_from_outside(status):
        _end_like(status)
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, SHOW_CURSOR + b"\n")
    _left = Left(told, *_explained(told, ended, status))


def _tell(kind: str, value: object) -> None:
    if _to_parent is None:
        return
    import pickle

    # Pickled by itself: the parent looks into it, and loads what it is of, only when it is needed.
    message = kind, pickle.dumps(value)
    with _lock, contextlib.suppress(OSError):  # without a parent this process ends, too
        _to_parent.send(message)


def _value(content: bytes | None) -> Any:
    import pickle

    return None if content is None else pickle.loads(content)


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(PiperRayError.exit_code)


def _watched(child: int, reader: Connection) -> tuple[dict[str, bytes], list[str], int]:
    """Until the child has ended: what it told of, which services ended, in turn, and its status as of ``waitpid``.

    Signals are passed on. A terminal's go to both, and so come twice, which changes nothing.
    """
    from multiprocessing.connection import wait

    told: dict[str, bytes] = {}
    services: dict[int, str] = {}  # by what becomes readable at their end
    ended: list[str] = []
    with Signals(STOPPING, noted) as signals:
        while True:
            ready = wait([reader, signals.reader, *services])
            for number in signals.wait(0.0):
                os.kill(child, number)
            for descriptor in [each for each in ready if each in services]:
                ended.append(services.pop(descriptor))
                os.close(descriptor)
            if reader not in ready:
                continue
            try:
                kind, told[kind] = reader.recv()
            except (EOFError, OSError):  # of a message that is cut off
                break
            if kind == _SERVICES:
                watched, gone = _ends_of(told[kind])
                services |= watched
                ended += gone
        _, status = os.waitpid(child, 0)
    return told, ended, status


def _ends_of(content: bytes) -> tuple[dict[int, str], list[str]]:
    """What becomes readable when a service ends (where the system has no such thing, nothing), and those that have."""
    _, pids = _value(content)
    found, gone = {}, []
    for name, pid in pids.items():
        with contextlib.suppress(OSError, AttributeError):
            try:
                found[os.pidfd_open(pid)] = name
            except ProcessLookupError:
                gone.append(name)
    return found, gone


def _is_from_outside(status: int) -> bool:
    """A fault of ours ends with the same exit code as Ray's, but tells before that it comes to its end."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) not in STOPPING
    return os.WEXITSTATUS(status) == PiperRayError.exit_code


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _explained(told: Mapping[str, bytes], ended: list[str], status: int) -> tuple[str, int]:
    """Words that say what ended the child, and the exit code for that."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how, code = f"was killed by {signal.Signals(number).name}", 128 + number
    else:
        how, code = f"was ended with exit code {os.WEXITSTATUS(status)}", PiperRayError.exit_code
    if _SERVICES not in told or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        return f"the process that did the work {how}", code
    address, pids = _value(told[_SERVICES])
    if ended:
        died = f"Ray's {ended[0]} on this machine (process {pids[ended[0]]}) died"
    elif not _listens(address):
        died = f"Ray's GCS, the cluster's head, no longer answers at {address}"
    else:
        died = "Ray ended the connection"
    return f"{died}, and with it the process that did the work", ClusterError.exit_code


def _listens(address: str) -> bool:
    import socket

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
    except (OSError, ValueError):
        return False
    return True
