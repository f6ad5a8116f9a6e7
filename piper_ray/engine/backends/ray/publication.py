"""What the driver has put into the object store, and how many bytes went where."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import ray

from piper_ray.engine.backends.ray.worker import EvaluationOrder, narrow
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.types import Tables


@dataclass(frozen=True)
class Stored:
    """An object that the driver owns: gone from the store when the last of these goes."""

    ref: ray.ObjectRef[Any]
    size_bytes: int


def array_bytes(value: object) -> int:
    """Of an array, or all arrays in a tuple."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(map(array_bytes, value)) if isinstance(value, tuple) else 0


@dataclass
class Traffic:
    """put: by the driver. fetched: copied to another node, once for each object and node. held: most at a time."""

    put_bytes: int = 0
    fetched_bytes: Counter[str] = field(default_factory=Counter)
    held_bytes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Workload:
    """Tables of one problem, whatever its memory limit."""

    key: int
    tables: Tables
    stored: Stored

    def holds(self, tables: Tables) -> bool:
        return self.tables.costs is tables.costs and self.tables.options is tables.options


@dataclass
class Published:
    """An evaluation in the object store: what every worker needs, and spans of finished levels, each put once."""

    order: EvaluationOrder
    tables: tuple[Stored, ...]
    levels: dict[tuple[int, int], Stored] = field(default_factory=dict)


class Publisher:
    """Puts each table once. node: the driver's own, which fetches nothing."""

    def __init__(self, node: str) -> None:
        self.traffic = Traffic()
        self._node = node
        self._keys = itertools.count()
        self._workload: _Workload | None = None
        self._published: WeakKeyDictionary[StateTables, Published] = WeakKeyDictionary()
        self._on_node: defaultdict[str, WeakSet[Stored]] = defaultdict(WeakSet)

    def publish(self, states: StateTables) -> Published:
        """The evaluation's entry; what it needs is put when it is new."""
        if states not in self._published:
            workload = self._workload_of(states.tables)
            target = self.put(states.target)
            order = EvaluationOrder(
                next(self._keys), workload.key, [workload.stored.ref], states.tables.cluster, [target.ref]
            )
            self._published[states] = Published(order, (workload.stored, target))
        return self._published[states]

    def needed(self, states: StateTables, known_level: int | None, level: int) -> list[Stored]:
        """What a worker must fetch to know the evaluation's levels below ``level``, who knows those below
        ``known_level``, or nothing of it (None).

        The levels come last, as one object.
        """
        published = self.publish(states)
        objects = [] if known_level is not None else list(published.tables)
        span = (known_level or 1, level)
        if span[0] < span[1]:
            if span not in published.levels:
                published.levels[span] = self.put(narrow(states.finished(*span)))
            objects.append(published.levels[span])
        return objects

    def keys_in_use(self) -> tuple[int, ...]:
        """Of the evaluations that somebody still holds."""
        return tuple(sorted(published.order.key for published in self._published.values()))

    def put(self, value: object) -> Stored:
        """Anything that can be sent; arrays are read in place where they are fetched."""
        stored = Stored(ray.put(value), array_bytes(value))
        self.traffic.put_bytes += stored.size_bytes
        self._hold(self._node, stored)
        return stored

    def sent(self, node: str, objects: list[Stored]) -> None:
        """The node needs these: it fetches those that it does not have."""
        for stored in objects:
            if stored not in self._on_node[node]:
                self.traffic.fetched_bytes[node] += stored.size_bytes
                self._hold(node, stored)

    def count_anew(self) -> None:
        """From what each node holds now on."""
        self.traffic = Traffic()
        for node, objects in self._on_node.items():
            self.traffic.held_bytes[node] = sum(item.size_bytes for item in objects)

    def _hold(self, node: str, stored: Stored) -> None:
        self._on_node[node].add(stored)
        held_bytes = sum(item.size_bytes for item in self._on_node[node])
        self.traffic.held_bytes[node] = max(self.traffic.held_bytes[node], held_bytes)

    def _workload_of(self, tables: Tables) -> _Workload:
        if self._workload is None or not self._workload.holds(tables):
            stored = self.put((tables.lattice, tables.costs, tables.options))
            self._workload = _Workload(next(self._keys), tables, stored)
        return self._workload
