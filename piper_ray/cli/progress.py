"""What a terminal shows while a command has nothing to print yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from piper_ray.cli.common import note
from piper_ray.compiled.observers import observed

if TYPE_CHECKING:
    from piper_ray.report.live import Working


def kernels_told() -> AbstractContextManager[None]:
    """Kernels that are compiled meanwhile are told of, and what is amiss with those on disk."""
    return observed(compiling=lambda: note("compiling kernels: up to half a minute"), note=note)


@contextmanager
def working(what: str) -> Iterator[Working]:
    """A phase's live line on stderr, and ``kernels_told``. Nothing is to be printed to stdout meanwhile."""
    from piper_ray.report.live import Working

    with kernels_told(), Working(what) as line:
        yield line
