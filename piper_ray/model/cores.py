"""How many threads can work at the same time on this machine, and how many processes are working."""

from __future__ import annotations

import os
from collections.abc import Callable


def usable_cores() -> int:
    """Cores that this process may use; in a container or under taskset these may be fewer than the machine has.

    On systems that cannot bind processes to cores, such as macOS, these are all cores of the machine.
    """
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def share_of_cores(processes: int) -> int:
    """Threads for each of ``processes`` processes that compute at the same time."""
    return max(1, usable_cores() // processes)


def load_text(load: float) -> str:
    """``load 0.31 on 2 cores in the minute before``."""
    cores = usable_cores()
    return f"load {load:.2f} on {cores} core{'s' if cores > 1 else ''} in the minute before"


def machine_load() -> float | None:
    """The mean number of processes in the last minute that were running or waiting for a core; None if the system does
    not report it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
