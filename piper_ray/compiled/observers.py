"""Who is told that kernels are compiled, and what is amiss with those on disk: without numba, so that whoever may need
no kernel can listen too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from piper_ray.model.events import Compiling, Listener, Note


@dataclass
class _Observer:
    compiling: Callable[[], None]
    note: Callable[[str], None]
    told: set[str] = field(default_factory=set)


_observers: list[_Observer] = []
_telling = threading.Lock()
COMPILING = ""
"""Told once to each observer, as each note is."""


@contextlib.contextmanager
def observed(compiling: Callable[[], None], note: Callable[[str], None]) -> Iterator[None]:
    """Calls ``compiling`` when the first kernel really has to be compiled meanwhile, by any thread of this process, and
    ``note`` with what is amiss with the kernels on disk. On the thread that compiles, each once."""
    observer = _Observer(compiling, note)
    with _telling:
        _observers.append(observer)
    try:
        yield
    finally:
        with _telling:
            _observers.remove(observer)


def compiling_told(listener: Listener) -> AbstractContextManager[None]:
    """The same as events."""
    return observed(compiling=lambda: listener(Compiling()), note=lambda text: listener(Note(text)))


def tell(text: str) -> None:
    """text: a note, or COMPILING."""
    with _telling:
        untold = [observer for observer in _observers if text not in observer.told]
        for observer in untold:
            observer.told.add(text)
    for observer in untold:
        if text == COMPILING:
            observer.compiling()
        else:
            observer.note(text)
