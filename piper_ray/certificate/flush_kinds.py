"""Borders between stages, from the instance alone: the rates of edges and tensors.

Between stages on different kinds of devices there is one rate. Within a kind, the number of its stages behind a border
determines the link under a flush. So a neighbour of a stage has a *number*: that of its kind, plus the number of kinds
for each link inwards from the outermost one. A way to run a stage is repeated for each pair of neighbours behind it and
in front of it. An edge goes to one of these if no stage can lie between its ends. Any other edge, and a tensor with
several ends, uses outermost links and is charged at the fastest possible rate. If several rates are possible, its
*open* ends are the layers whose kinds would decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, groupby, pairwise, product

import numpy as np

from piper_ray.certificate.certificate import StageWay
from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.certificate.paths import reached
from piper_ray.certificate.tables import Vertices, crossing_tensors, edge_bytes_of
from piper_ray.evaluate import links_holding, replicas_bytes_per_s
from piper_ray.model.cluster import Cluster
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import FLUSHED, Schedule
from piper_ray.simulate.borders import border_levels, reached_bytes_per_s, whole_groups


def border_bytes_per_s(cluster: Cluster, one: str, neighbour: int, sending: int | None = None) -> float:
    """Returns the rate between a stage on devices of a kind and a neighbour of this number. sending: the devices of a
    stage that share an uplink; None: all of a group."""
    link, other = divmod(neighbour, len(cluster.kind_names))
    if one != cluster.kind_names[other] and cluster.between_bytes_per_s is not None:
        return cluster.between_bytes_per_s
    own = cluster.of_kind(one).at_site
    here = None if sending is None else sending // max(1, len(cluster.sites))
    return reached_bytes_per_s(own, len(links_holding(own, own.devices)) - 1 - link, here)


@dataclass(frozen=True)
class AlikeRanks:
    """Numbers of stages on devices of one kind with the same links. borders: the numbers of neighbours within the kind,
    by its stages behind, up to the most stages. ring_bytes_per_s: through replicas.

    Behind the last stage, and in front of the first, there is no border: the entry there is one that other borders have
    too.
    """

    stages: range
    borders: tuple[int, ...]
    ring_bytes_per_s: float


def alike_ranks(cluster: Cluster, kind: int, schedule: Schedule, d: int, t: int, most: int) -> list[AlikeRanks]:
    """All numbers up to the most, in ascending order. The first of the groups also has none."""
    own, kinds = cluster.of_kind(cluster.kind_names[kind]), len(cluster.kind_names)
    site, sites = own.at_site, max(1, len(own.sites))
    held = links_holding(site, site.devices)
    if len(held) == 1 or schedule.name not in FLUSHED or most == 0:
        ring = replicas_bytes_per_s(own, own.devices, d, t) if t > 0 else float("inf")
        return [AlikeRanks(range(most + 1), (kind,) * (most + 1), ring)]

    def links(stages: int) -> tuple[tuple[int, ...], float]:
        found = replicas_bytes_per_s(own, own.devices, d, t, stages)
        return whole_groups(site, d * t // sites, stages), found

    found, least = list[AlikeRanks](), 0
    for (_, ring), numbers in groupby(range(1, most + 1), links):
        end = [*numbers][-1]
        inwards = [kind + kinds * (len(held) - 1 - level) for level in border_levels(site, d * t // sites, end)]
        none = min(inwards, default=kind)
        found.append(AlikeRanks(range(least, end + 1), (none, *inwards, none), ring))
        least = end + 1
    return found


@dataclass(frozen=True)
class PlacedWays:
    """Ways placed between neighbours. way, kind, behind, ahead: int64[r], their numbers. in_rate, out_rate: float64[r,
    e], in bytes per second, for the stage of an edge's head and of its tail. tensor_rate: float64[h]. open_ends: for
    layers that may be on several kinds, the bytes whose rate they leave open, and their ids, the most first."""

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
        cls,
        instance: Instance,
        vertices: Vertices,
        ways: Sequence[StageWay],
        borders: Sequence[tuple[int, ...]],
        d: int | None,
    ) -> PlacedWays:
        """borders: of each kind, as in ``AlikeRanks``. d: of all stages; None: at outermost links alone."""
        names = instance.cluster.kind_names
        number = {name: g for g, name in enumerate(names)}
        placed = []
        for w, x in enumerate(ways):
            own = borders[number[x.kind]]
            near = sorted({*own, *(g for g in range(len(names)) if g != number[x.kind])})
            pairs = [pair for pair in product(near, repeat=2) if pair in {*pairwise(own)} or not {*pair} <= {*own}]
            placed += [(w, number[x.kind], *pair) for pair in pairs]
        way, kind, behind, ahead = np.array(placed, np.int64).T.copy()
        rates = np.array([[border_bytes_per_s(instance.cluster, one, x) for x in range(len(names))] for one in names])
        from_front, to_back = (
            [
                border_bytes_per_s(instance.cluster, ways[w].kind, x, None if d is None else d * ways[w].degree)
                for w, x in zip(way, near, strict=True)
            ]
            for near in (ahead.tolist(), behind.tolist())
        )
        kinds_of = {x.id: sorted({number[way.kind] for way in ways if way.tmpcs[x.id]}) for x in instance.layers}
        shape, left = (len(placed), len(vertices.edges)), dict.fromkeys(kinds_of, 0.0)
        sizes = edge_bytes_of(instance)
        in_rate, out_rate = np.empty(shape), np.empty(shape)

        def leave_open(ends: Sequence[int], size: float) -> None:
            for v in ends:
                left[v] += size if len(kinds_of[v]) > 1 else 0.0

        for e, (u, w) in enumerate(vertices.edges):
            tail, head = vertices.layers[u], vertices.layers[w]
            if _joins_neighbours(vertices, u, w):
                in_rate[:, e], out_rate[:, e] = from_front, to_back
                continue
            in_rate[:, e] = rates[kind][:, kinds_of[tail]].max(axis=1)
            out_rate[:, e] = rates[kind][:, kinds_of[head]].max(axis=1)
            if np.ptp(rates[np.ix_(kinds_of[tail], kinds_of[head])]) > 0.0:
                leave_open((tail, head), sizes[tail, head] + 1.0)
        tensor_rate = []
        for tensor in crossing_tensors(instance, vertices):
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
    return len(reached(tail, vertices.predecessors()) | reached(head, vertices.successors)) == len(vertices.layers)
