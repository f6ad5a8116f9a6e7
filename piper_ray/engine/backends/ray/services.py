"""Ray's own processes that a connection lives by: with them Ray ends whoever is connected, from outside Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from piper_ray.engine.backends.ray import keeper

RAYLET, GCS = "raylet", "GCS"
_PROGRAMS = {RAYLET: "raylet", GCS: "gcs_server"}


class Services(NamedTuple):
    """gcs: where it listens, host:port. pids: of those on this machine, by name; none where there is no /proc."""

    gcs: str
    pids: dict[str, int]

    @classmethod
    def of(cls, node: Any) -> Services:
        """node: the driver's, by Ray's own record."""
        session = os.fsencode(node.session_name)
        pids = {}
        for pid in keeper.processes():
            arguments = keeper.read(pid, "cmdline").split(b"\0")
            program = Path(os.fsdecode(arguments[0])).name
            for name, known in _PROGRAMS.items():
                if program == known and b"--session-name=" + session in arguments:
                    pids[name] = pid
        return cls(str(node.gcs_address), pids)


_observers: list[Callable[[Services], object]] = []


def observe(observer: Callable[[Services], object]) -> None:
    """Each connection from now on is told of."""
    _observers.append(observer)


def connected(worker: Any) -> None:
    """Tells of the connection just made. worker: the module of Ray that keeps it."""
    node = getattr(worker, "_global_node", None)
    if _observers and node is not None:
        services = Services.of(node)
        for observer in _observers:
            observer(services)
