"""Whose compiled kernels are run: what lies in their folder is unpickled, and so can do anything."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_OTHERS_MAY_WRITE = 0o022
_MODE = 0o755


def fault_of(folder: Path) -> str | None:
    """Why nothing in it is read or written, in words. None for one that is not there yet."""
    if not hasattr(os, "getuid"):
        return None
    try:
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid not in _trusted():
        return "it belongs to another user"
    if status.st_mode & _OTHERS_MAY_WRITE:
        return "others may write to it; delete it, and it is made anew"
    return None


def made(folder: Path) -> None:
    """The folder, whatever the umask for no one else to write to. Raises OSError."""
    folder.mkdir(_MODE, parents=True, exist_ok=True)


@cache
def _trusted() -> frozenset[int]:
    """This user, root, and whoever has installed what is run anyhow."""
    return frozenset((os.getuid(), 0, Path(__file__).stat().st_uid))
