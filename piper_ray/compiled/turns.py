"""Turns at compiling: of a machine's processes one compiles a kernel, and the others wait and find it on disk.

A turn is a lock on one byte of a file beside the kernels, which ends with the process that holds it at the latest. Who
waits for a kernel may hold turns at those that call it, never at those that it calls: so no two wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_guards: dict[Path, int] = {}
"""A descriptor of each folder's file, open as long as the process: closing one would end the process's turns."""


def take_turn(folders: Sequence[Path], name: str, waiting: Callable[[], None]) -> None:
    """Waits for whoever has it, in the first of the folders that can be used. waiting: called if there is somebody.

    Where no such turns can be taken, each process compiles for itself.
    """
    guard = _guard(folders)
    if guard is None:
        return
    with contextlib.suppress(OSError):
        try:
            fcntl.lockf(guard, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(name))
        except (BlockingIOError, PermissionError):  # as systems have it
            waiting()
            fcntl.lockf(guard, fcntl.LOCK_EX, 1, _place(name))


def end_turn(folders: Sequence[Path], name: str) -> None:
    """Of this process; nothing where it has none."""
    guard = _guard(folders)
    if guard is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(guard, fcntl.LOCK_UN, 1, _place(name))


def _guard(folders: Sequence[Path]) -> int | None:
    for folder in folders:
        if folder not in _guards:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                _guards[folder] = os.open(folder / "compiling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if folder in _guards:
            return _guards[folder]
    return None


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
