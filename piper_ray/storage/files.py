"""Files that are written whole or not at all, and what is no file, though it lies where one should."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from piper_ray.model.errors import UsageError


@contextlib.contextmanager
def replacing(target: Path, unfinished: Path) -> Iterator[Path]:
    """``unfinished``, to be written: it takes the place of ``target`` at the end, and is gone if anything fails.

    unfinished: of the same folder, by a name that nobody else uses. Raises OSError.
    """
    try:
        yield unfinished
        unfinished.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """The file to write: it takes the place of ``path`` at the end, and what was there stays if anything fails.

    Devices and pipes are written themselves, and a link stays one. Raises UsageError if the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        target = Path(os.path.realpath(path))
        with replacing(target, target.with_name(f".{uuid4().hex}.partial")) as unfinished:
            yield unfinished
            if target.exists():
                shutil.copymode(target, unfinished)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_atomically(path: Path, text: str) -> None:
    """As ``written_whole``: in UTF-8, lines as they are."""
    with written_whole(path) as file:
        file.write_text(text, encoding="utf-8", newline="\n")


_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_unless_file(path: str | os.PathLike[str]) -> str | None:
    """What lies at ``path`` if reading it could wait or go on for ever; None for files, and for folders: reading fails.

    A pipe without a name, as the shell's <(command) makes it, has a writer at its other end and may be read.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISFIFO(mode) and not os.path.lexists(os.path.realpath(path)):
        return None
    return _KINDS.get(stat.S_IFMT(mode))
