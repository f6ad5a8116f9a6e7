"""Files that are written completely or not at all, and paths that are not regular files."""

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
    """Yields ``unfinished``, to be written. At the end it replaces ``target``; if anything fails it is removed.

    unfinished: in the same folder, under a name that nobody else uses. Raises OSError.
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
    """Yields the file to write. At the end it replaces ``path``; if anything fails the old file stays.

    Devices and pipes are written directly, and a link stays a link. Raises UsageError if the file cannot be written.
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
    """Writes ``text`` as ``written_whole`` does, in UTF-8 and without changing line ends."""
    with written_whole(path) as file:
        file.write_text(text, encoding="utf-8", newline="\n")


_KINDS = {
    stat.S_IFIFO: "a named pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_unless_file(path: str | os.PathLike[str]) -> str | None:
    """The kind of what is at ``path`` if reading it could block or never end; None for files, and for folders, which
    cannot be read.

    An unnamed pipe, as the shell makes for <(command), has a writer at its other end and may be read.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISFIFO(mode) and not os.path.lexists(os.path.realpath(path)):
        return None
    return _KINDS.get(stat.S_IFMT(mode))
