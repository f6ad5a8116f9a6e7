"""Stages on devices of several kinds: which may come before which, and at which rates their borders are charged.

A stage pays for what crosses its borders at rates that follow from its own kind and those of its neighbours. So a
variant is taken once for each kind of the stage behind it and of the one in front; a tail *promises* the kind of the
stage that is put in front. With one kind there is nothing to promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from piper_ray.cost.variants import Variant
from piper_ray.engine.kernels.flush_mixes import mix_tables
from piper_ray.engine.kernels.flush_types import FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.model.cluster import Cluster


@dataclass(frozen=True)
class Placed:
    """A variant between stages on devices of these kinds, by their numbers in the cluster. The last stage counts as
    having one of its own kind behind it, and so the first one in front."""

    variant: Variant
    kind: int
    behind: int
    ahead: int


def placed_variants(variants: Sequence[Variant], cluster: Cluster) -> list[Placed]:
    """Each variant with all neighbours that its stages may have."""
    numbers = {name: number for number, name in enumerate(cluster.kind_names)}
    pairs = list(product(numbers.values(), repeat=2))
    return [Placed(variant, numbers[variant.kind], *pair) for variant in variants for pair in pairs]


class EdgeRates(NamedTuple):
    """float64[r, e] each, in bytes per second: what a stage of a placed variant counts on for an edge that comes in,
    and for one that goes out. are_exact: no plan has another rate for one of them; else none is slower."""

    come_in: FloatArray
    go_out: FloatArray
    are_exact: bool


def edge_rates(graph: LayerGraph, placed: Sequence[Placed], cluster: Cluster) -> EdgeRates:
    """An edge that no stage can lie between the ends of goes to a neighbour. Any other may go to a stage further on, on
    devices of any kind that the layer there may run on."""
    names, shape = cluster.kind_names, (len(placed), len(graph.edges))
    if len(names) == 1:
        alike = np.full(shape, cluster.bandwidth_bytes_per_s)
        return EdgeRates(alike, alike, are_exact=True)
    rates = np.array([[cluster.rate_between(one, other) for other in names] for one in names])
    own, behind, ahead = (np.array([getattr(x, name) for x in placed]) for name in ("kind", "behind", "ahead"))
    come_in, go_out = np.empty(shape), np.empty(shape)
    kinds, are_exact = possible_kinds(graph, placed), True
    for e, (tail, head, _) in enumerate(graph.edges):
        if _joins_neighbours(graph, tail, head):
            come_in[:, e], go_out[:, e] = rates[own, ahead], rates[own, behind]
        else:
            come_in[:, e], go_out[:, e] = (rates[own][:, list(kinds[v])].max(axis=1) for v in (tail, head))
            are_exact = are_exact and len(kinds[tail]) == len(kinds[head]) == 1
    return EdgeRates(come_in, go_out, are_exact and all(len(kinds[v]) == 1 for ends, _ in graph.tensors for v in ends))


def tensor_rates(graph: LayerGraph, placed: Sequence[Placed], cluster: Cluster) -> FloatArray:
    """float64[h], in bytes per second, of tensors with several ends: none is slower in any plan, nor faster where all
    ends can be on one kind alone."""
    kinds, names = possible_kinds(graph, placed), cluster.kind_names
    found = np.full(len(graph.tensors), cluster.bandwidth_bytes_per_s)
    for h, (ends, _) in enumerate(graph.tensors):
        certain = {kind for v in ends for kind in kinds[v] if len(kinds[v]) == 1}
        if certain:
            found[h] = cluster.slowest_rate(names[kind] for kind in certain)
    return found


def possible_kinds(graph: LayerGraph, placed: Sequence[Placed]) -> list[frozenset[int]]:
    """Of each vertex the numbers of the kinds of devices that it may run on; all of them where it can on none."""
    found = [frozenset(x.kind for x in placed if x.variant.tmpcs[layer]) for layer in graph.layer_ids]
    return [kinds or frozenset(x.kind for x in placed) for kinds in found]


def _joins_neighbours(graph: LayerGraph, tail: int, head: int) -> bool:
    """Whether each layer comes before or with the tail, or after or with the head: none is left for a stage between."""
    return len(_reached(graph.predecessors, tail) | _reached(graph.successors, head)) == graph.size


def _reached(neighbours: Sequence[Sequence[int]], start: int) -> set[int]:
    found, left = {start}, [start]
    while left:
        for v in neighbours[left.pop()]:
            if v not in found:
                found.add(v)
                left.append(v)
    return found


class MixLimits(NamedTuple):
    """most: stages on devices of each kind. stages: how many a plan may have; uses_all: of each kind as many as there
    can be."""

    most: tuple[int, ...]
    stages: range
    uses_all: bool

    @property
    def most_mixes(self) -> int:
        """There are no more."""
        return prod(x + 1 for x in self.most) * len(self.most) ** 2


def moves_of(placed: Sequence[Placed], kinds: int) -> IndexArray:
    """int64[r]: see ``FlushTask``."""
    return np.array([(x.kind * kinds + x.behind) * kinds + x.ahead for x in placed], np.int64)


def with_mixes(task: FlushTask, limits: MixLimits) -> FlushTask:
    """With those that its tails may have."""
    most, stages, uses_all = limits
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
    return task._replace(**mix_tables(grown, ends_here)._asdict(), share_left=left)


def share_within(task: FlushTask, limits: MixLimits) -> float:
    """``FlushTask.share_left`` of no stages: all are left."""
    return float(np.array(limits.most) @ _share_of_kinds(task, len(limits.most)))


def _share_of_kinds(task: FlushTask, kinds: int) -> FloatArray:
    found = np.zeros(kinds)
    found[task.move[task.variants] // kinds**2] = task.share_of_s[task.variants]
    return found
