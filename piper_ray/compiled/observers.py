"""Reports to observers that kernels are being compiled, or that those on disk are faulty. Does not import numba, so
commands that may not need a kernel can observe too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache

from piper_ray.model.events import Compiling, Listener, Note

COMPILING = "compiling kernels: up to half a minute"
"""The text that observers receive when a kernel has to be compiled."""

_observers: list[Callable[[str], None]] = []


@contextlib.contextmanager
def observed(observer: Callable[[str], None]) -> Iterator[None]:
    """Inside this context ``observer`` is called with COMPILING when any thread of this process compiles its first
    kernel, and with a text about faulty kernels on disk. It is called on the thread that compiles, once for each
    text."""
    once = cache(observer)  # numba's lock lets only one thread at a time load and compile
    _observers.append(once)
    try:
        yield
    finally:
        _observers.remove(once)


def compiling_told(listener: Listener) -> AbstractContextManager[None]:
    """The same, with events for a listener."""
    return observed(lambda text: listener(Compiling() if text == COMPILING else Note(text)))


def tell(text: str) -> None:
    """Calls all observers with ``text``: COMPILING, or a fault."""
    for observer in _observers.copy():
        observer(text)
