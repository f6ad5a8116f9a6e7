"""An instance as the check's kernels read it: the formulas of the paper's section 3, from the instance alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from piper_ray.certificate import certificate
from piper_ray.certificate.certificate import StageWay
from piper_ray.certificate.joined import edge_charges
from piper_ray.certificate.kernels.downsets import Bits, DownsetRoom, Floats, Ints, list_downsets, sums_over
from piper_ray.certificate.kernels.types import Budgets, Claim, ClaimedTails, Graph, Least, Ways
from piper_ray.evaluate import links_holding, replicas_bytes_per_s
from piper_ray.model.errors import CertificateRefused, LimitError
from piper_ray.model.instance import Instance, Tmpc

MARGIN_S = 5e-11
"""Relative. What stages may take in the check is more by that than the bound: far more than sums of so many figures are
rounded by, and less than the solver's own margin."""

MARGIN_BYTES = 2.5e-10
"""The same of memory."""

_FIGURES: Mapping[str, Callable[[Tmpc], float]] = {
    "time_s": attrgetter("time_per_sample_s"),
    "weights_bytes": attrgetter("weights_bytes"),
    "a_bytes": attrgetter("activation_bytes"),
    "b_bytes": attrgetter("fixed_bytes"),
    "shared_bytes": attrgetter("shared_bytes"),
}
"""Of a TMPC, by the name that kernels have."""

_EPSILON = 2.0**-52
_FIRST_ROOM = 1 << 14
_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Vertices:
    """Layers that downsets are told apart by, each after its successors, and the edges that cost something."""

    layers: tuple[int, ...]
    successors: tuple[frozenset[int], ...]
    edges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, instance: Instance, tails: certificate.Tails) -> Vertices:
        """Raises CertificateRefused for layers that are not the instance's, or not in such an order."""
        joined = tails.joined
        if sorted([*tails.layers, *joined]) != sorted(layer.id for layer in instance.layers):
            raise CertificateRefused("the certificate's layers are not those of the workload")
        number = {layer: v for v, layer in enumerate(tails.layers)}
        successors: list[set[int]] = [set() for _ in tails.layers]
        edges = []
        for (source, target), charge in edge_charges(instance).items():
            u, v = number[joined.get(source, source)], number[joined.get(target, target)]
            if u == v:
                continue
            if u < v:
                raise CertificateRefused(f"the certificate has layer {target} in front of {source}, which it reads")
            successors[u].add(v)
            if charge > 0.0:
                if source in joined or target in joined:
                    raise CertificateRefused(f"the edge {source} -> {target} is not free, but one of its ends joins")
                edges.append((u, v))
        return cls(tails.layers, tuple(map(frozenset, successors)), tuple(edges))


def count_downsets(instance: Instance, tails: certificate.Tails, most: int) -> int:
    """Of the layers that do not join others. Raises as ``claim_of``."""
    return int(downsets_of(Vertices.of(instance, tails), most)[0].shape[0])


def claim_of(
    instance: Instance, ways: Sequence[StageWay], tails: certificate.Tails, bound_s: float, most: int
) -> Claim:
    """Raises CertificateRefused for tails that are none, and LimitError past ``most`` downsets.

    instance: on the devices of ``tails``. bound_s: above 0.
    """
    vertices = Vertices.of(instance, tails)
    budget_s = bound_s * (1.0 + MARGIN_S)
    bits, parent, added = downsets_of(vertices, most)
    graph = _graph(instance, vertices, tails)
    of_ways = _ways(instance, vertices, ways)

    def summed(values: Floats) -> Floats:
        return np.stack([sums_over(parent, added, np.ascontiguousarray(row)) for row in values])

    worth, worth_replicas = (_worth(instance, vertices, ways, budget_s, by_degree=x) for x in (True, False))
    of_vertex, of_replicas = sums_over(parent, added, worth), sums_over(parent, added, worth_replicas)
    # By what they are worth; of equal ones the smaller first. Sums are made in the order of the vertices and rounded in
    # one direction alike, so no set is worth less than one in it: the empty one comes first, and the whole last.
    order = np.lexsort((np.bitwise_count(bits).sum(axis=1), of_vertex))
    rounding = 4.0 * (len(vertices.layers) + 1) * _EPSILON * max(1.0, instance.devices)
    least = _least(instance, vertices, ways, lambda values: np.ascontiguousarray(summed(values)[:, order]))
    start, devices, sums = _listed(bits[order], tails)
    return Claim(
        graph=graph,
        cluster=Budgets(
            devices=instance.devices,
            budget_s=budget_s,
            memory_bytes=instance.memory_bytes * (1.0 + MARGIN_BYTES),
            degrees=_degrees(ways),
            products=np.array(sorted({d * way.degree for way in ways for d in way.data_parallel_degrees}), np.int64),
            rounding_devices=rounding,
        ),
        ways=of_ways,
        least=least,
        tails=ClaimedTails(
            bits=np.ascontiguousarray(bits[order]),
            worth=np.ascontiguousarray(of_vertex[order]),
            device_limit=_limit(instance.devices, of_vertex[order], rounding),
            sum_limit=_limit(instance.data_parallel_limit, of_replicas[order], rounding),
            start=start,
            devices=devices,
            data_parallel_sum=sums,
            live=np.flatnonzero(np.diff(start)).astype(np.int64),
        ),
    )


def _limit(available: int, worth: Floats, rounding: float) -> Ints:
    """What the layers in front leave; below 0 where they leave nothing."""
    found: Ints = np.floor(np.maximum(available - (worth[-1] - worth) + rounding, -1.0)).astype(np.int64)
    return found


def downsets_of(vertices: Vertices, most: int) -> tuple[Bits, Ints, Ints]:
    """Each with the one that it was made from, and by which vertex. Raises LimitError past ``most``."""
    words = max(1, (len(vertices.layers) + 63) // 64)
    successors = as_bits(vertices.successors, words)
    before: list[list[int]] = [[] for _ in vertices.layers]
    for u, heads in enumerate(vertices.successors):
        for v in heads:
            before[v].append(u)
    before_start, listed = flat(before)
    size = min(_FIRST_ROOM, most)
    while True:
        room = DownsetRoom(
            bits=np.zeros((size, words), np.uint64),
            addable=np.zeros((size, words), np.uint64),
            parent=np.zeros(size, np.int64),
            added=np.zeros(size, np.int64),
        )
        count = int(list_downsets(successors, before_start, listed, room))
        if count > 0:
            return room.bits[:count], room.parent[:count], room.added[:count]
        if size == most:
            raise LimitError(
                f"the graph has more than {most:,} downsets, which take more memory than is free; check the "
                "certificate on a machine that has it"
            )
        size = min(most, 8 * size)


def flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Where each list begins in all of them one after the other, and these: int64[lists + 1], int64[..]."""
    start = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    return start, np.array([x for listed in lists for x in listed], np.int64)


def as_bits(rows: Sequence[Iterable[int]], words: int) -> Bits:
    """uint64[rows, words]."""
    found = np.zeros((len(rows), words), np.uint64)
    for row, members in enumerate(rows):
        for v in members:
            found[row, v >> 6] |= np.uint64(1 << (v & 63))
    return found


def _graph(instance: Instance, vertices: Vertices, tails: certificate.Tails) -> Graph:
    words = max(1, (len(vertices.layers) + 63) // 64)
    number = {layer: v for v, layer in enumerate(vertices.layers)}
    ends, bytes_of = [], []
    for tensor in instance.tensors:
        held = {number[tails.joined.get(layer, layer)] for layer in tensor.layers}
        if len(held) > 1:
            ends.append(held)
            bytes_of.append(tensor.forward_bytes + tensor.backward_bytes)
    return Graph(
        tail=np.array([u for u, _ in vertices.edges], np.int64),
        head=np.array([v for _, v in vertices.edges], np.int64),
        tensors=as_bits(ends, words),
        tensor_s=np.array(bytes_of, np.float64) / between_bytes_per_s(instance),
    )


def between_bytes_per_s(instance: Instance) -> float:
    """Of the link between stages."""
    _, found = links_holding(instance, instance.devices)[-1]
    return found


def _degrees(ways: Sequence[StageWay]) -> Ints:
    return np.array(sorted({d for way in ways for d in way.data_parallel_degrees}), np.int64)


def _ways(instance: Instance, vertices: Vertices, ways: Sequence[StageWay]) -> Ways:
    degrees = _degrees(ways)
    place = {int(d): k for k, d in enumerate(degrees)}
    edges_of: list[list[int]] = [[] for _ in vertices.layers]
    for e, (u, v) in enumerate(vertices.edges):
        edges_of[u].append(e)
        edges_of[v].append(e)
    edge_start, edge = flat(edges_of)
    edge_bytes = edge_bytes_of(instance)
    resync = np.zeros((len(ways), degrees.size))
    start = np.zeros((len(ways), len(vertices.layers) + 1), np.int64)
    options: list[Tmpc] = []
    charges: list[float] = []
    charge_start: list[int] = []
    for r, way in enumerate(ways):
        for k, d in enumerate(degrees.tolist()):
            if d > 1:
                link = replicas_bytes_per_s(instance, instance.devices, d, way.degree)
                resync[r, k] = 4.0 * (d - 1) / (instance.microbatches * link)
        for v, layer in enumerate(vertices.layers):
            start[r, v] = len(options)
            for tmpc in _undominated(way.tmpcs[layer]):
                options.append(tmpc)
                charge_start.append(len(charges))
                charges += [charge_bytes(vertices, e, v, tmpc, edge_bytes) for e in edges_of[v]]
        start[r, -1] = len(options)
    return Ways(
        degree=np.array([way.degree for way in ways], np.int64),
        first=np.array([place[way.data_parallel_degrees[0]] for way in ways], np.int64),
        end=np.array([place[way.data_parallel_degrees[-1]] + 1 for way in ways], np.int64),
        resync_s=resync,
        start=start,
        **{name: np.array([figure(tmpc) for tmpc in options], np.float64) for name, figure in _FIGURES.items()},
        charge_start=np.array(charge_start, np.int64),
        charge_s=2.0 * np.array(charges, np.float64) / between_bytes_per_s(instance),
        edge_start=edge_start,
        edge=edge,
    )


def edge_bytes_of(instance: Instance) -> Mapping[tuple[int, int], float]:
    """By the ends of edges, whatever the TMPCs."""
    found: dict[tuple[int, int], float] = {}
    for edge in instance.edges:
        ends = edge.source, edge.target
        found[ends] = found.get(ends, 0.0) + edge.communication_bytes
    return found


def charge_bytes(vertices: Vertices, e: int, v: int, tmpc: Tmpc, edge_bytes: Mapping[tuple[int, int], float]) -> float:
    """Bytes in one direction that edge e costs the stage of its end v."""
    u, w = (vertices.layers[end] for end in vertices.edges[e])
    more = tmpc.forward_sync_bytes.get(u, 0.0) if vertices.edges[e][1] == v else tmpc.backward_sync_bytes.get(w, 0.0)
    return edge_bytes[u, w] + more


def _undominated(tmpcs: Sequence[Tmpc]) -> list[Tmpc]:
    """Without those that another one is as good as in every figure by itself; of equal ones the first."""
    kept: list[Tmpc] = []
    for tmpc in sorted(tmpcs, key=_all_figures):
        if not any(_is_as_good(other, tmpc) for other in kept):
            kept.append(tmpc)
    return kept


def _all_figures(tmpc: Tmpc) -> tuple[float, ...]:
    extra = sum(tmpc.forward_sync_bytes.values()), sum(tmpc.backward_sync_bytes.values())
    return (*(figure(tmpc) for figure in _FIGURES.values()), *extra)


def _is_as_good(one: Tmpc, other: Tmpc) -> bool:
    tables = (one.forward_sync_bytes, other.forward_sync_bytes), (one.backward_sync_bytes, other.backward_sync_bytes)
    return all(
        mine <= theirs for mine, theirs in zip(_all_figures(one)[:5], _all_figures(other)[:5], strict=True)
    ) and (all(size <= theirs.get(end, 0.0) for mine, theirs in tables for end, size in mine.items()))


def _worth(
    instance: Instance, vertices: Vertices, ways: Sequence[StageWay], budget_s: float, *, by_degree: bool
) -> Floats:
    """float64[n]: devices, or replicas, that a layer takes at least: a stage of d replicas has d budgets of time."""
    found = np.zeros(len(vertices.layers))
    for v, layer in enumerate(vertices.layers):
        least_s = min(
            (x.time_per_sample_s * (way.degree if by_degree else 1) for way in ways for x in way.tmpcs[layer]),
            default=0.0,
        )
        found[v] = min(least_s / budget_s, float(instance.devices + 1))
    return found


def _least(
    instance: Instance,
    vertices: Vertices,
    ways: Sequence[StageWay],
    summed: Callable[[Floats], Floats],
) -> Least:
    """summed: float64[r, m], of float64[r, n]."""
    of_vertex = {
        name: np.array(
            [[min(map(figure, way.tmpcs[layer]), default=0.0) for layer in vertices.layers] for way in ways], np.float64
        )
        for name, figure in _FIGURES.items()
    }
    missing = np.array([[float(not way.tmpcs[layer]) for layer in vertices.layers] for way in ways], np.float64)
    edge_bytes, per_byte = edge_bytes_of(instance), 2.0 / between_bytes_per_s(instance)
    incoming, outgoing = np.zeros((len(ways), len(vertices.edges))), np.zeros((len(ways), len(vertices.edges)))
    for r, way in enumerate(ways):
        for e, (u, v) in enumerate(vertices.edges):
            for found, end in ((incoming, v), (outgoing, u)):
                of_end = way.tmpcs[vertices.layers[end]]
                found[r, e] = per_byte * min(
                    (charge_bytes(vertices, e, end, x, edge_bytes) for x in of_end), default=0.0
                )
    # A vertex that is added to a set has all behind it there: what came into these from it crosses no more.
    into = np.zeros((len(ways), len(vertices.layers)))
    for e, (u, v) in enumerate(vertices.edges):
        into[:, v] += incoming[:, e]
        into[:, u] -= incoming[:, e]
    terms = 8.0 * (len(vertices.layers) + 2 * len(vertices.edges) + 2) * _EPSILON
    totals = {name: values.sum(axis=1) for name, values in of_vertex.items()}
    return Least(
        **{name: summed(values) for name, values in of_vertex.items()},
        into_s=summed(into),
        missing=summed(missing).astype(np.int64),
        incoming_s=incoming,
        outgoing_s=outgoing,
        rounding_s=terms * (totals["time_s"] + incoming.sum(axis=1) + outgoing.sum(axis=1)),
        rounding_weights=terms * totals["weights_bytes"],
        rounding_bytes=terms * (totals["a_bytes"] + totals["b_bytes"] + totals["shared_bytes"]),
    )


def _listed(bits: Bits, tails: certificate.Tails) -> tuple[Ints, Ints, Ints]:
    """The states by downset. Raises CertificateRefused for a row whose layers are no tail."""
    padded = np.zeros((tails.members.shape[0], 8 * bits.shape[1]), np.uint8)
    padded[:, : tails.members.shape[1]] = tails.members
    rows = padded.view("<u8").astype(np.uint64)
    # Found by a hash, and then compared.
    known = _hashed(bits)
    by_key = np.argsort(known)
    at = np.searchsorted(known[by_key], _hashed(rows))
    place = by_key[np.minimum(at, known.size - 1)]
    if not np.array_equal(bits[place], rows):
        raise CertificateRefused("the certificate lists layers that can be no tail of a pipeline")
    order = np.argsort(place, kind="stable")
    start = np.searchsorted(place[order], np.arange(bits.shape[0] + 1)).astype(np.int64)
    devices = np.ascontiguousarray(tails.used_devices[order], np.int64)
    return start, devices, np.ascontiguousarray(tails.data_parallel_sum[order], np.int64)


def _hashed(bits: Bits) -> npt.NDArray[np.uint64]:
    """uint64[rows]. Mixed after each word, so that sets that are alike are told apart."""
    found = np.zeros(bits.shape[0], np.uint64)
    for word in bits.T:
        found = (found ^ word) * np.uint64(_FACTOR)
        found ^= found >> np.uint64(32)
        found *= np.uint64(_FACTOR)
        found ^= found >> np.uint64(29)
    return found
