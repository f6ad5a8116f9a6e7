"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from piper_ray.model.errors import UsageError
from piper_ray.storage.replacing import replacing


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
