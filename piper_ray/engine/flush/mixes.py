"""Which stages may come before which, and the rates at which their borders are charged: on devices of several kinds,
and on one kind with faster links within groups.

The rates at a stage's borders follow from its own kind and those of its neighbours. So there is a copy of a variant for
each kind of the stage behind it and of the one in front; a tail *promises* the kind of the stage that comes in front.
With one kind nothing is promised: there is a copy of a variant for each rate behind it and in front of it, and the
number of stages behind determines which of them a stage has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.cost.variants import Variant
from piper_ray.engine.kernels.flush_mixes import MixTables, mix_tables
from piper_ray.engine.kernels.flush_types import FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.layer_graph import LayerGraph, ancestors, descendants
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import FLUSHED, Schedule


@dataclass(frozen=True)
class Placed:
    """A variant between stages on devices of given kinds, by their numbers in the cluster.

    The last stage counts as having one of its own kind behind it, and the first one as having one in front. With one
    kind of devices, ``behind`` and ``ahead`` are the rates of the borders, by their numbers in ``BorderRates``.
    """

    variant: Variant
    kind: int
    behind: int
    ahead: int


@dataclass(frozen=True)
class BorderRates:
    """On devices of one kind. rates: of borders, in bytes per second, the fastest first. Edges that may skip stages go
    at the last one, that of the outermost link. by_stages: whether the links of borders, or of replicas, depend on how
    many stages there are."""

    rates: tuple[float, ...] = ()
    by_stages: bool = False

    @classmethod
    def of(cls, instance: Instance, graph: LayerGraph, schedule: Schedule) -> BorderRates:
        """Returns one rate alone if borders are alike: with one link, under 2bw, or if all edges may skip stages."""
        rates, cluster = instance.cluster.border_rates, instance.cluster
        by_stages = len(cluster.links) > 1 and schedule.name in FLUSHED and not cluster.kinds
        return cls(rates if by_stages and unpassed_edges(graph).any() else rates[-1:], by_stages)

    def numbers(self, cluster: Cluster, degree: int) -> range:
        """Returns the numbers of the rates that borders between stages of at least ``degree`` devices may have."""
        if len(self.rates) == 1:
            return range(1)
        shared = next(k for k, x in enumerate(cluster.links) if x.devices is None or 2 * degree <= x.devices)
        return range(self.rates.index(cluster.level_bytes_per_s(shared)), len(self.rates))

    def parts(self, cluster: Cluster, d: int, t: int, stages: range) -> Iterator[tuple[range, tuple[int, ...]]]:
        """The numbers of stages with the same rates at their borders and of their replicas; and the numbers of the
        borders' rates, by the stages behind: behind the last stage the slowest of all. None where all are alike."""
        if not self.by_stages:
            yield stages, ()
            return

        def links(count: int) -> tuple[tuple[int, ...], Link]:
            return cluster.border_periods(d * t, count), cluster.replicas_link(d, t, count)

        for (periods, _), counts in groupby(stages, key=links):
            part = [*counts]
            found = [0] * part[-1]
            if len(self.rates) > 1:
                found = [self.rates.index(cluster.border_bytes_per_s(q, periods)) for q in range(1, part[-1] + 1)]
            yield range(part[0], part[-1] + 1), (max(found[:-1], default=found[-1]), *found)


def placed_variants(
    variants: Sequence[Variant], cluster: Cluster, borders: BorderRates = BorderRates()
) -> list[Placed]:
    """Returns each variant with all neighbours that its stages may have."""
    names = cluster.kind_names
    if len(names) > 1:
        pairs = list(product(range(len(names)), repeat=2))
        return [Placed(variant, names.index(variant.kind), *pair) for variant in variants for pair in pairs]
    return [
        Placed(variant, 0, *pair)
        for variant in variants
        for pair in product(borders.numbers(cluster, variant.degree), repeat=2)
    ]


class EdgeRates(NamedTuple):
    """The rates assumed for edges that enter and that leave a stage of a placed variant: float64[r, e] each, in bytes
    per second. are_exact: every plan has these rates; else no plan has slower ones.
    """

    come_in: FloatArray
    go_out: FloatArray
    are_exact: bool


def edge_rates(
    graph: LayerGraph, placed: Sequence[Placed], cluster: Cluster, borders: BorderRates = BorderRates()
) -> EdgeRates:
    """Returns the rates of edges. If no stage can lie between the ends of an edge, it goes to a neighbour. Any other
    edge may go to a stage further on, on devices of any kind that can run the layer there. borders: for one kind of
    devices.
    """
    names, shape = cluster.kind_names, (len(placed), len(graph.edges))
    own, behind, ahead = (np.array([getattr(x, name) for x in placed]) for name in ("kind", "behind", "ahead"))
    unpassed = unpassed_edges(graph)
    if len(names) == 1:
        of_border = np.array(borders.rates)
        come_in, go_out = (np.where(unpassed, of_border[at][:, None], of_border[-1]) for at in (ahead, behind))
        return EdgeRates(come_in, go_out, are_exact=True)
    rates = np.array([[cluster.rate_between(one, other) for other in names] for one in names])
    come_in, go_out = np.empty(shape), np.empty(shape)
    kinds, are_exact = possible_kinds(graph, placed), True
    for e, (tail, head, _) in enumerate(graph.edges):
        if unpassed[e]:
            come_in[:, e], go_out[:, e] = rates[own, ahead], rates[own, behind]
        else:
            come_in[:, e], go_out[:, e] = (rates[own][:, list(kinds[v])].max(axis=1) for v in (tail, head))
            are_exact = are_exact and len(kinds[tail]) == len(kinds[head]) == 1
    return EdgeRates(come_in, go_out, are_exact and all(len(kinds[v]) == 1 for ends, _ in graph.tensors for v in ends))


def unpassed_edges(graph: LayerGraph) -> npt.NDArray[np.bool_]:
    """Returns bool[e]: whether every other layer comes before the edge's tail or after its head, so that no stage can
    lie between."""
    before, after = ancestors(graph.successors), descendants(graph.successors)
    found = [before[tail].bit_count() + after[head].bit_count() == graph.size - 2 for tail, head, _ in graph.edges]
    return np.array(found, np.bool_)


def tensor_rates(graph: LayerGraph, placed: Sequence[Placed], cluster: Cluster) -> FloatArray:
    """Returns float64[h]: rates of tensors with several ends, in bytes per second. No plan has a slower one, and none a
    faster one if each end can be on one kind only.
    """
    kinds, names = possible_kinds(graph, placed), cluster.kind_names
    found = np.full(len(graph.tensors), cluster.bandwidth_bytes_per_s)
    for h, (ends, _) in enumerate(graph.tensors):
        certain = {kind for v in ends for kind in kinds[v] if len(kinds[v]) == 1}
        if certain:
            found[h] = cluster.slowest_rate(names[kind] for kind in certain)
    return found


def possible_kinds(graph: LayerGraph, placed: Sequence[Placed]) -> list[frozenset[int]]:
    """Returns for each vertex the numbers of the kinds of devices that can run it; all kinds if none can."""
    found = [frozenset(x.kind for x in placed if x.variant.tmpcs[layer]) for layer in graph.layer_ids]
    return [kinds or frozenset(x.kind for x in placed) for kinds in found]


class MixLimits(NamedTuple):
    """Limits on the mixes of a task. most: stages on devices of each kind. stages: the numbers that a plan may have.
    uses_all: whether a plan must have the most stages of each kind. moves: with one kind of devices and different
    borders, the only move of a stage, by the number of stages behind it.
    """

    most: tuple[int, ...]
    stages: range
    uses_all: bool
    moves: tuple[int, ...] = ()

    @property
    def most_mixes(self) -> int:
        """An upper bound on the number of mixes."""
        return prod(x + 1 for x in self.most) * len(self.most) ** 2


def moves_of(placed: Sequence[Placed], neighbours: int) -> IndexArray:
    """Returns int64[r]: ``FlushTask.move``. neighbours: the number of kinds of devices, or of rates of borders."""
    return np.array([(x.kind * neighbours + x.behind) * neighbours + x.ahead for x in placed], np.int64)


def with_mixes(task: FlushTask, limits: MixLimits) -> FlushTask:
    """Returns the task with the mixes that its tails may have."""
    most, stages, uses_all, moves = limits
    kinds = len(most)
    grid = np.stack(np.meshgrid(*(np.arange(x + 1) for x in most), indexing="ij"), axis=-1).reshape(-1, kinds)
    total = grid.sum(axis=1)
    order = np.argsort(total, kind="stable")
    counts = grid[order[total[order] < stages.stop]]
    cell_of = np.full(tuple(x + 2 for x in most), -1, np.int64)
    cell_of[tuple(counts.T)] = np.arange(len(counts))
    grown = np.stack([cell_of[tuple((counts + one).T)] for one in np.eye(kinds, dtype=np.int64)], axis=1)
    ends_here = counts.sum(axis=1) >= stages.start
    if uses_all:
        ends_here &= (counts == np.array(most)).all(axis=1)
    left = np.empty(0)
    if kinds > 1:
        of_counts = (np.array(most) - counts) @ _share_of_kinds(task, kinds)
        left = np.concatenate([of_counts[:1], np.tile(of_counts[1:], kinds**2)])
    tables = mix_tables(grown, ends_here)
    if moves:
        tables = _by_position(tables, np.array(moves))
    return task._replace(**tables._asdict(), share_left=left)


def _by_position(tables: MixTables, moves: IndexArray) -> MixTables:
    """Returns the mixes by position, for one kind of devices. moves: int64[stages], as in ``MixLimits``."""
    position, columns = np.arange(moves.size), int(moves.max()) + 1
    following, previous = (np.full((len(tables.next_mix), columns), -1, np.int64) for _ in range(2))
    following[position, moves] = tables.next_mix[:-1, 0]
    previous[position + 1, moves] = tables.previous_mix[1:, 0]
    return MixTables(following, previous, tables.is_whole)


def share_within(task: FlushTask, limits: MixLimits) -> float:
    """Returns ``FlushTask.share_left`` of the empty tail."""
    return float(np.array(limits.most) @ _share_of_kinds(task, len(limits.most)))


def _share_of_kinds(task: FlushTask, kinds: int) -> FloatArray:
    found = np.zeros(kinds)
    found[task.move[task.variants] // kinds**2] = task.share_of_s[task.variants]
    return found
