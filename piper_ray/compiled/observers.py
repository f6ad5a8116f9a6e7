"""Who is told that kernels are compiled, and what is amiss with those on disk: without numba, so that whoever may need
no kernel can listen too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache

from piper_ray.model.events import Compiling, Listener, Note

COMPILING = "compiling kernels: up to half a minute"
"""What observers hear when a kernel really has to be compiled."""

_observers: list[Callable[[str], None]] = []


@contextlib.contextmanager
def observed(observer: Callable[[str], None]) -> Iterator[None]:
    """Calls ``observer`` with COMPILING when the first kernel has to be compiled meanwhile, by any thread of this
    process, and with what is amiss with the kernels on disk. On the thread that compiles, with each text once."""
    once = cache(observer)  # numba's lock lets one thread at a time load and compile
    _observers.append(once)
    try:
        yield
    finally:
        _observers.remove(once)


def compiling_told(listener: Listener) -> AbstractContextManager[None]:
    """The same as events."""
    return observed(lambda text: listener(Compiling() if text == COMPILING else Note(text)))


def tell(text: str) -> None:
    """text: COMPILING, or what is amiss."""
    for observer in _observers.copy():
        observer(text)
