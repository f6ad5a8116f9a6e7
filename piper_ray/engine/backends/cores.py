"""How many threads can work at the same time here."""

from __future__ import annotations

import os
from collections.abc import Callable


def usable_cores() -> int:
    """Cores that this process may use: in a container or under taskset fewer than the machine has.

    All of the machine's on systems that cannot bind processes to cores, as macOS.
    """
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
