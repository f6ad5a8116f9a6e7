"""Stages on devices of several kinds, from the instance alone: the rates of edges and tensors.

Between stages on different kinds there is one rate; within a kind, that of its outermost link. A way to run a stage is
repeated for each kind of the stage behind it and in front of it. An edge goes to one of these if no stage can lie
between its ends. Any other edge, and a tensor with several ends, is charged at the fastest possible rate. If several
rates are possible, its *open* ends are the layers whose kinds would decide.

On devices of one kind with several links, the number of stages behind determines the link of a border. There a way is
repeated for each pair of links behind it and in front of it; edges that may skip stages use the outermost one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, groupby, pairwise, product

import numpy as np

from piper_ray.certificate.certificate import StageWay
from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.certificate.tables import Vertices, crossing_tensors, edge_bytes_of
from piper_ray.evaluate import links_holding, replicas_bytes_per_s
from piper_ray.model.cluster import Cluster
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import FLUSHED, Schedule
from piper_ray.simulate.borders import border_levels, whole_groups


def outermost_bytes_per_s(cluster: Cluster, one: str, other: str) -> float:
    """Returns the rate between stages on devices of these kinds."""
    if one != other and cluster.between_bytes_per_s is not None:
        return cluster.between_bytes_per_s
    own = cluster.of_kind(one)
    return links_holding(own, own.devices)[-1][1]


def borders_of(
    cluster: Cluster, schedule: Schedule, d: int, t: int, most: int
) -> list[tuple[int, tuple[int, ...], float]]:
    """The fewest of some numbers of stages; the links of their borders, by the stages behind, as numbers from the
    outermost link inwards, up to the most of these; and the bandwidth of rings. One of all, with no borders, where
    links do not depend on how many there are.

    Behind the last stage, and in front of the first, there is no border: the entry there is one that other borders have
    too.
    """
    held = links_holding(cluster, cluster.devices)
    if len(held) == 1 or cluster.kinds or schedule.name not in FLUSHED:
        return [(1, (), replicas_bytes_per_s(cluster, cluster.devices, d, t))]

    def links(stages: int) -> tuple[tuple[int, ...], float]:
        found = replicas_bytes_per_s(cluster, cluster.devices, d, t, stages)
        return whole_groups(cluster, d * t, stages), found

    found = []
    for (_, ring), numbers in groupby(range(1, most + 1), links):
        alike = [*numbers]
        own = tuple(len(held) - 1 - level for level in border_levels(cluster, d * t, alike[-1]))
        found.append((alike[0], (min(own, default=0), *own, min(own, default=0)), ring))
    return found


@dataclass(frozen=True)
class PlacedWays:
    """Ways placed between neighbours. way, kind, behind, ahead: int64[r], the number of the way and those of kinds or
    links. in_rate, out_rate: float64[r, e], in bytes per second, for the stage of an edge's head and of its tail.
    tensor_rate: float64[h]. open_ends: for layers that may be on several kinds, the bytes whose rate they leave open,
    and their ids, the most first."""

    way: Ints
    kind: Ints
    behind: Ints
    ahead: Ints
    in_rate: Floats
    out_rate: Floats
    tensor_rate: Floats
    open_ends: tuple[tuple[float, int], ...]

    @classmethod
    def of(
        cls, instance: Instance, vertices: Vertices, ways: Sequence[StageWay], borders: tuple[int, ...]
    ) -> PlacedWays:
        """borders: from ``borders_of``."""
        names = instance.cluster.kind_names
        number = {name: g for g, name in enumerate(names)}
        pairs = sorted({*pairwise(borders)} if borders else product(range(len(names)), repeat=2))
        placed = [(w, number[way.kind], *pair) for w, way in enumerate(ways) for pair in pairs]
        way, kind, behind, ahead = np.array(placed, np.int64).T.copy()
        rates = np.array([[outermost_bytes_per_s(instance.cluster, one, other) for other in names] for one in names])
        if borders:
            outward = links_holding(instance.cluster, instance.devices)
            rates = np.array([[bandwidth for _, bandwidth in reversed(outward)]])
        kinds_of = {v: sorted({number[x.kind] for x in ways if x.tmpcs[v]}) for v in vertices.layers}
        shape, left = (len(placed), len(vertices.edges)), dict.fromkeys(vertices.layers, 0.0)
        sizes = edge_bytes_of(instance)
        in_rate, out_rate = np.empty(shape), np.empty(shape)

        def leave_open(ends: Sequence[int], size: float) -> None:
            for v in ends:
                left[v] += size if len(kinds_of[v]) > 1 else 0.0

        for e, (u, w) in enumerate(vertices.edges):
            tail, head = vertices.layers[u], vertices.layers[w]
            if _joins_neighbours(vertices, u, w):
                in_rate[:, e], out_rate[:, e] = rates[kind, ahead], rates[kind, behind]
                continue
            in_rate[:, e] = rates[kind][:, kinds_of[tail]].max(axis=1)
            out_rate[:, e] = rates[kind][:, kinds_of[head]].max(axis=1)
            if np.ptp(rates[np.ix_(kinds_of[tail], kinds_of[head])]) > 0.0:
                leave_open((tail, head), sizes[tail, head] + 1.0)
        tensor_rate = []
        for tensor in crossing_tensors(instance):
            held = [kinds_of[v] for v in tensor.layers]
            certain = sorted({kinds[0] for kinds in held if len(kinds) == 1})
            known = [float(rates[pair]) for pair in combinations_with_replacement(certain, 2)]
            tensor_rate.append(min(known, default=float(rates.max())))
            if np.ptp(rates) > 0.0:
                leave_open(tensor.layers, tensor.forward_bytes + tensor.backward_bytes + 1.0)
        ends = sorted(((size, v) for v, size in left.items() if size > 0.0), reverse=True)
        return cls(way, kind, behind, ahead, in_rate, out_rate, np.array(tensor_rate), tuple(ends))


def _joins_neighbours(vertices: Vertices, tail: int, head: int) -> bool:
    """Whether each other layer comes before the tail or after the head, so that no stage can lie between."""
    before: list[list[int]] = [[] for _ in vertices.layers]
    for u, heads in enumerate(vertices.successors):
        for v in heads:
            before[v].append(u)
    return len(_reached(before, tail) | _reached(vertices.successors, head)) == len(vertices.layers)


def _reached(neighbours: Sequence[Sequence[int] | frozenset[int]], start: int) -> set[int]:
    found, left = {start}, [start]
    while left:
        new = set(neighbours[left.pop()]) - found
        found |= new
        left += new
    return found
