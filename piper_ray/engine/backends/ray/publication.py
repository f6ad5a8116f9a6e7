"""Tracks what the driver has put into the object store, and how many bytes were copied where."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import ray

from piper_ray.engine.backends.ray.calls import array_bytes


@dataclass(frozen=True)
class Stored:
    """An object that the driver owns. It is removed from the store with the last reference to this."""

    ref: ray.ObjectRef[Any]
    size_bytes: int


@dataclass
class Traffic:
    """put: by the driver. fetched: copied to another node, once for each object and node. held: the most at a time."""

    put_bytes: int = 0
    fetched_bytes: Counter[str] = field(default_factory=Counter)
    held_bytes: Counter[str] = field(default_factory=Counter)


class Publisher:
    """Puts each table once. node: the driver's own, which fetches nothing."""

    def __init__(self, node: str) -> None:
        self.traffic = Traffic()
        self._node = node
        self._on_node: defaultdict[str, WeakSet[Stored]] = defaultdict(WeakSet)

    def put(self, value: object) -> Stored:
        """Stores any value that can be sent. Arrays are read in place where they are fetched."""
        stored = Stored(ray.put(value), array_bytes(value))
        self.traffic.put_bytes += stored.size_bytes
        self._hold(self._node, stored)
        return stored

    def sent(self, node: str, stored: Stored) -> None:
        """Records that the node needs this, and that it fetches it if it does not have it."""
        if stored not in self._on_node[node]:
            self.traffic.fetched_bytes[node] += stored.size_bytes
            self._hold(node, stored)

    def count_anew(self) -> None:
        """Restarts the count from what each node holds now."""
        self.traffic = Traffic()
        for node, objects in self._on_node.items():
            self.traffic.held_bytes[node] = sum(item.size_bytes for item in objects)

    def _hold(self, node: str, stored: Stored) -> None:
        self._on_node[node].add(stored)
        held_bytes = sum(item.size_bytes for item in self._on_node[node])
        self.traffic.held_bytes[node] = max(self.traffic.held_bytes[node], held_bytes)
