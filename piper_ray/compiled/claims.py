"""Processes of a machine that need the same kernel: one compiles it, the others wait for that.

A lock of the system's for each kernel, in one file: a process that ends, however it does, holds nothing any more.
Kernels call each other in one direction only, so no two processes wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from piper_ray.compiled.trust import fault_of, made

_FILE = "compiling"


def claim(folders: Sequence[Path], number: int) -> bool:
    """Takes the lock of that number, at most 63 bits; waits for it if another process has it, and returns whether one
    had. Where no lock can be taken, whoever asks has it."""
    file = _opened(tuple(folders))
    if file is None:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except OSError:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, number)
        except OSError:
            return False
        return True
    return False


def release(folders: Sequence[Path], number: int) -> None:
    """Who waits for the lock has it."""
    file = _opened(tuple(folders))
    if file is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, number)


@cache
def _opened(folders: tuple[Path, ...]) -> int | None:
    """Kept open: a process that closes the file anywhere gives up all its locks. None if no folder can be written."""
    for folder in folders:
        if fault_of(folder) is not None:
            continue
        with contextlib.suppress(OSError):
            made(folder)
            return os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return None
