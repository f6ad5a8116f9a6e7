"""How a file of this machine is replaced: others find it whole, or as it was before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


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
