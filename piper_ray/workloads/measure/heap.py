"""Keeps freed memory in the process for its next tensors, as the allocator of a GPU does.

The C library returns freed memory to the system and requests new pages for the next tensor. How often depends on the
order in which memory is freed; the times of a layer alone and of the same layer in a stage therefore differed by up to
a third.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
_NEVER, _USUAL_TRIM_BYTES, _USUAL_MAPS = -1, 128 * 1024, 65536


def keep_freed_memory() -> None:
    """From now on this process returns no memory. Does nothing if the C library is not glibc."""
    _set(_NEVER, 0)


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """``keep_freed_memory`` inside this context; at the end all freed memory is returned."""
    _set(_NEVER, 0)
    try:
        yield
    finally:
        _set(_USUAL_TRIM_BYTES, _USUAL_MAPS)
        if (library := _glibc()) is not None:
            library.malloc_trim(0)


def _set(trim_bytes: int, maps: int) -> None:
    if (library := _glibc()) is not None:
        library.mallopt(_TRIM_THRESHOLD, trim_bytes)
        library.mallopt(_MMAP_MAX, maps)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
