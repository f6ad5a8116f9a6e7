"""What runs in a Ray task: a batch of points, one after the other. Knows nothing of the sweep.

Ray gives tasks to processes that have run such ones before; what those keep (graphs, lattices) spares work, and no
answer depends on it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import ray

from piper_ray.compiled.jit import is_kept
from piper_ray.engine.backends.ray.software import Software, software
from piper_ray.engine.solve import solve
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.sweep.answer import Row, answer
from piper_ray.sweep.lattices import Lattices
from piper_ray.sweep.point import Point

_GRAPHS = 4
"""Kept in a process."""

_LAST_KERNELS = {PAPERS_SCHEDULE: "evaluation.evaluate_runs"}
_LAST_KERNEL_OF_A_FLUSH = "flush_simulation.simulate_step"
"""Where these are kept, so are those that are needed before them, for each schedule."""


@dataclass(frozen=True)
class Order:
    """Points of one graph and one schedule. graph: its ref, in a list so that only a process that lacks it fetches
    it.
    """

    points: tuple[Point, ...]
    graph_hash: str
    graph: list[Any]
    options: SolveOptions


class Began(NamedTuple):
    """Who has the batch now, and what it runs. compiled: kernels are there; else they come first, for a while."""

    node: str
    software: Software
    compiled: bool


class Report(NamedTuple):
    """seconds: of all the work, preparing included."""

    rows: tuple[Row, ...]
    seconds: float


@dataclass
class _Kept:
    lattices: Lattices = field(default_factory=Lattices)
    graphs: OrderedDict[str, Instance] = field(default_factory=OrderedDict)

    def graph(self, order: Order) -> Instance:
        found = self.graphs.pop(order.graph_hash, None)
        if found is None:
            (found,) = ray.get(order.graph)
            while len(self.graphs) >= _GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs[order.graph_hash] = found
        return found


_kept = _Kept()
"""Of this process."""


def _last_kernel(schedule: Schedule) -> str:
    return _LAST_KERNELS.get(schedule, _LAST_KERNEL_OF_A_FLUSH)


@cache
def _warm(schedule: Schedule) -> None:
    """Makes the schedule's kernels ready, as far as it can be planned for."""
    with suppress(UsageError):
        solve(_two_layers(), options=SolveOptions(threads=1), schedule=schedule)


def solve_batch(order: Order) -> Iterator[Began | Report]:
    """A word at the beginning, then each point's row. Errors of planners are in the rows."""
    schedule = order.points[0].schedule
    yield Began(ray.get_runtime_context().get_node_id(), software(), is_kept(_last_kernel(schedule)))
    _warm(schedule)
    began = time.perf_counter()
    graph = _kept.graph(order)
    rows = tuple(answer(point, graph, order.options, _kept.lattices) for point in order.points)
    yield Report(rows, time.perf_counter() - began)


def _two_layers() -> Instance:
    """Enough of an instance to load every kernel that most solves need."""
    before, after = {0: 1.0}, {1: 1.0}
    tmpcs = [Tmpc("fast", 1.0, 1.0, 2.0, 1.0), Tmpc("small", 2.0, 1.0, 1.0, 1.0, recompute=True)]
    first = tuple(Tmpc(t.id, t.time_per_sample_s, 1.0, t.activation_bytes, 1.0, {}, after) for t in tmpcs)
    second = tuple(Tmpc(t.id, t.time_per_sample_s, 1.0, t.activation_bytes, 1.0, before, {}) for t in tmpcs)
    layers = (Layer(0, "first", {1: first}), Layer(1, "second", {1: second}))
    return Instance(layers, (Edge(0, 1, 1.0),), 2, 2, 4.0, 1.0)
