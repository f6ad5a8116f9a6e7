"""Tables of an instance for the check's kernels: the formulas of the paper's section 3, from the instance alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.certificate import certificate
from piper_ray.certificate.certificate import StageWay
from piper_ray.certificate.joined import edge_charges
from piper_ray.certificate.kernels.downsets import Bits, DownsetRoom, Floats, Ints, list_downsets, sums_over
from piper_ray.certificate.kernels.types import Budgets, Claim, ClaimedTails, Graph, Least, Ways
from piper_ray.evaluate import replicas_bytes_per_s
from piper_ray.model.errors import CertificateRefused, LimitError
from piper_ray.model.instance import Instance, Tensor, Tmpc

if TYPE_CHECKING:
    from piper_ray.certificate.flush_kinds import PlacedWays

MARGIN_S = 5e-11
"""Relative. In the check stages may take this much more than the bound. It is far more than the rounding of such sums,
and less than the solver's own margin."""

MARGIN_BYTES = 2.5e-10
"""The same for memory."""

_figures: Callable[[Tmpc], tuple[float, ...]] = attrgetter(
    "time_per_sample_s", "weights_bytes", "activation_bytes", "fixed_bytes", "shared_bytes"
)
_FIGURES = ("time_s", "weights_bytes", "a_bytes", "b_bytes", "shared_bytes")
"""The names of the figures in kernels."""

_EPSILON = 2.0**-52
_TINY = 1e-30
_FIRST_ROOM = 1 << 14
_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Vertices:
    """The layers that distinguish downsets, each after its successors, and the edges that cost something. joined: each
    other layer, with the one whose stage it shares."""

    layers: tuple[int, ...]
    successors: tuple[frozenset[int], ...]
    edges: tuple[tuple[int, int], ...]
    joined: Mapping[int, int]

    @classmethod
    def of(cls, instance: Instance, tails: certificate.Tails) -> Vertices:
        """Raises CertificateRefused if the layers are not the instance's, or not in such an order."""
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
        return cls(tails.layers, tuple(map(frozenset, successors)), tuple(edges), joined)

    def predecessors(self) -> list[list[int]]:
        """Of each vertex."""
        found: list[list[int]] = [[] for _ in self.layers]
        for u, heads in enumerate(self.successors):
            for v in heads:
                found[v].append(u)
        return found


def count_downsets(instance: Instance, tails: certificate.Tails, most: int) -> int:
    """Counts the downsets of the layers that do not join others. Raises as ``claim_of``."""
    return int(downsets_of(Vertices.of(instance, tails), most)[0].shape[0])


def claim_of(
    instance: Instance,
    vertices: Vertices,
    ways: Sequence[StageWay],
    placed: PlacedWays,
    tails: certificate.Tails,
    bound_s: float,
    most: int,
) -> Claim:
    """Makes the tables of a claim. Raises CertificateRefused for invalid tails, and LimitError for more than ``most``
    downsets.

    instance: on the devices of ``tails``. ways: those of ``placed``, each once for each pair of neighbours. bound_s:
    above 0.
    """
    budget_s = bound_s * (1.0 + MARGIN_S)
    bits, parent, added = downsets_of(vertices, most)
    graph = _graph(instance, vertices, placed)
    devices = np.array([own.devices for own in instance.cluster.alike], np.int64)
    prices = _prices(instance, ways)
    total = float(prices @ devices)
    choices = choice_table(instance, vertices, ways, _figures)

    def summed(values: Floats) -> Floats:
        return np.stack([sums_over(parent, added, np.ascontiguousarray(row)) for row in values])

    of_ways = np.array([prices[kind] * way.degree for kind, way in zip(placed.kind, ways, strict=True)])
    each_way = list(zip(of_ways, ways, strict=True))
    worth, worth_replicas = (
        _worth(vertices, ways, units, budget_s, upto)
        for units, upto in ((of_ways, total), (np.ones(len(ways)), float(instance.devices)))
    )
    of_vertex, of_replicas = sums_over(parent, added, worth), sums_over(parent, added, worth_replicas)
    # Downsets are sorted by worth; of equal ones the smaller comes first. Sums are made in the order of the vertices
    # and all rounded in the same direction, so no set is worth less than a subset: the empty set comes first, and the
    # whole last.
    order = np.lexsort((np.bitwise_count(bits).sum(axis=1), of_vertex))
    rounding = 4.0 * (len(vertices.layers) + 1) * _EPSILON
    least = _least(vertices, choices, placed, lambda values: np.ascontiguousarray(summed(values)[:, order]))
    start, used, sums = _listed(bits[order], tails, devices, prices)
    return Claim(
        graph=graph,
        cluster=Budgets(
            devices=devices,
            prices=prices,
            worth=total,
            budget_s=budget_s,
            degrees=_degrees(ways),
            products=np.unique(np.concatenate([x * np.array(way.data_parallel_degrees) for x, way in each_way])),
            rounding=rounding * max(1.0, total),
        ),
        ways=_ways(instance, ways, placed, choices),
        least=least,
        tails=ClaimedTails(
            bits=np.ascontiguousarray(bits[order]),
            worth=np.ascontiguousarray(of_vertex[order]),
            room=_left(total, of_vertex[order], rounding),
            sum_limit=np.floor(_left(instance.data_parallel_limit, of_replicas[order], rounding)).astype(np.int64),
            start=start,
            devices=used,
            spent=used @ prices,
            data_parallel_sum=sums,
            live=np.flatnonzero(np.diff(start)).astype(np.int64),
        ),
    )


def _left(available: float, worth: Floats, rounding: float) -> Floats:
    """Returns what the layers in front leave; negative if nothing."""
    found: Floats = np.maximum(available - (worth[-1] - worth) + rounding * max(1.0, available), -1.0)
    return found


def _prices(instance: Instance, ways: Sequence[StageWay]) -> Floats:
    """Returns float64[g]: the longer all layers take on a kind, the less a device is worth; a device of the slowest
    kind is worth 1. Any prices are valid."""
    work_s = []
    for kind in instance.cluster.kind_names:
        own = [way for way in ways if way.kind == kind]
        least = [
            min((x.time_per_sample_s * way.degree for way in own for x in way.tmpcs[layer.id]), default=0.0)
            for layer in instance.layers
        ]
        work_s.append(sum(least))
    most_s = max(work_s)
    return np.array([most_s / max(x, _TINY * most_s) if x > 0.0 else 0.0 for x in work_s])


def downsets_of(vertices: Vertices, most: int) -> tuple[Bits, Ints, Ints]:
    """Returns the downsets, each with the one from which it was made, and the added vertex. Raises LimitError past
    ``most``."""
    words = max(1, (len(vertices.layers) + 63) // 64)
    successors = as_bits(vertices.successors, words)
    before_start, listed = flat(vertices.predecessors())
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
    """Concatenates lists. Returns the start of each, int64[lists + 1], and the values, int64[..]."""
    start = np.cumsum([0, *map(len, lists)]).astype(np.int64)
    return start, np.array([x for listed in lists for x in listed], np.int64)


def as_bits(rows: Sequence[Iterable[int]], words: int) -> Bits:
    """Returns uint64[rows, words]."""
    found = np.zeros((len(rows), words), np.uint64)
    for row, members in enumerate(rows):
        for v in members:
            found[row, v >> 6] |= np.uint64(1 << (v & 63))
    return found


def _graph(instance: Instance, vertices: Vertices, placed: PlacedWays) -> Graph:
    tensors, tensor_bytes = tensors_of(instance, vertices)
    return Graph(
        tail=np.array([u for u, _ in vertices.edges], np.int64),
        head=np.array([v for _, v in vertices.edges], np.int64),
        tensors=tensors,
        tensor_s=tensor_bytes.sum(axis=1) / placed.tensor_rate,
    )


def tensors_of(instance: Instance, vertices: Vertices) -> tuple[Bits, Floats]:
    """Returns the ends of tensors that a stage can cut, uint64[h, words], and the bytes that they then move, forward
    and backward, float64[h, 2]."""
    number = {layer: v for v, layer in enumerate(vertices.layers)}
    crossing = crossing_tensors(instance, vertices)
    ends = [{number[vertices.joined.get(layer, layer)] for layer in tensor.layers} for tensor in crossing]
    moved = [(tensor.forward_bytes, tensor.backward_bytes) for tensor in crossing]
    words = max(1, (len(vertices.layers) + 63) // 64)
    return as_bits(ends, words), np.array(moved, np.float64).reshape(-1, 2)


def crossing_tensors(instance: Instance, vertices: Vertices) -> list[Tensor]:
    """Returns the tensors that several vertices share."""
    joined = vertices.joined
    return [tensor for tensor in instance.tensors if len({joined.get(layer, layer) for layer in tensor.layers}) > 1]


def _degrees(ways: Sequence[StageWay]) -> Ints:
    return np.array(sorted({d for way in ways for d in way.data_parallel_degrees}), np.int64)


class ChoiceTable(NamedTuple):
    """The undominated choices of layers. Those of vertex v in way r are start[r, v] .. start[r, v + 1] - 1.

    figures: float64[choices, 5]. edge: the edges of each vertex, from edge_start[v] on; enters: bool, whether it is
    their head. charge_bytes: of each of these in turn, in one direction, from charge_start[choice] on.
    """

    start: Ints
    figures: Floats
    edge_start: Ints
    edge: Ints
    enters: npt.NDArray[np.bool_]
    charge_start: Ints
    charge_bytes: Floats


def choice_table(
    instance: Instance, vertices: Vertices, ways: Sequence[StageWay], figures: Callable[[Tmpc], tuple[float, ...]]
) -> ChoiceTable:
    """Makes the table. figures: returns five figures of a TMPC; less is better."""
    edge_bytes = edge_bytes_of(instance)
    edges_of: list[list[int]] = [[] for _ in vertices.layers]
    for e, (u, v) in enumerate(vertices.edges):
        edges_of[u].append(e)
        edges_of[v].append(e)
    edge_start, edge = flat(edges_of)
    start = np.zeros((len(ways), len(vertices.layers) + 1), np.int64)
    rows: list[tuple[float, ...]] = []
    charges: list[float] = []
    charge_start: list[int] = []
    for r, way in enumerate(ways):
        for v, layer in enumerate(vertices.layers):
            start[r, v] = len(rows)
            paid = [
                (figures(tmpc), tuple(_charge_bytes(vertices, e, v, tmpc, edge_bytes) for e in edges_of[v]))
                for tmpc in way.tmpcs[layer]
            ]
            for row, of_edges in _unbeaten(paid):
                rows.append(row)
                charge_start.append(len(charges))
                charges += of_edges
        start[r, -1] = len(rows)
    return ChoiceTable(
        start=start,
        figures=np.array(rows, np.float64).reshape(-1, len(_FIGURES)),
        edge_start=edge_start,
        edge=edge,
        enters=np.array([vertices.edges[e][1] == v for v, edges in enumerate(edges_of) for e in edges], np.bool_),
        charge_start=np.array(charge_start, np.int64),
        charge_bytes=np.array(charges, np.float64),
    )


_Paid = tuple[tuple[float, ...], tuple[float, ...]]
"""A choice's figures, and what it pays for edges."""


def _unbeaten(choices: Sequence[_Paid]) -> list[_Paid]:
    """Returns the choices that no other dominates; of equal ones one."""
    kept: list[_Paid] = []
    for choice in sorted(choices):
        if not any(_is_as_good(other, choice) for other in kept):
            kept.append(choice)
    return kept


def _is_as_good(one: _Paid, other: _Paid) -> bool:
    return all(x <= y for mine, theirs in zip(one, other, strict=True) for x, y in zip(mine, theirs, strict=True))


def least_charge_bytes(vertices: Vertices, choices: ChoiceTable) -> tuple[Floats, Floats]:
    """Returns float64[r, e]: the least cost of each edge, in one direction, in the stage of its head and of its
    tail."""
    ways = choices.start.shape[0]
    incoming, outgoing = np.zeros((ways, len(vertices.edges))), np.zeros((ways, len(vertices.edges)))
    for v in range(len(vertices.layers)):
        edges = choices.edge[choices.edge_start[v] : choices.edge_start[v + 1]].tolist()
        for r in range(ways):
            starts = choices.charge_start[choices.start[r, v] : choices.start[r, v + 1]]
            for n, e in enumerate(edges):
                found = incoming if vertices.edges[e][1] == v else outgoing
                found[r, e] = choices.charge_bytes[starts + n].min(initial=np.inf) if starts.size else 0.0
    return incoming, outgoing


def _ways(instance: Instance, ways: Sequence[StageWay], placed: PlacedWays, choices: ChoiceTable) -> Ways:
    degrees, kinds = _degrees(ways), len(instance.cluster.kind_names)
    place = {int(d): k for k, d in enumerate(degrees)}
    resync = np.zeros((len(ways), degrees.size))
    own = [instance.cluster.of_kind(way.kind) for way in ways]
    for r, way in enumerate(ways):
        for k, d in enumerate(degrees.tolist()):
            if d > 1:
                link = replicas_bytes_per_s(own[r], own[r].devices, d, way.degree)
                resync[r, k] = 4.0 * (d - 1) / (instance.microbatches * link)
    return Ways(
        degree=np.array([way.degree for way in ways], np.int64),
        kind=placed.kind,
        behind=placed.behind % kinds,
        ahead=placed.ahead % kinds,
        memory_bytes=np.array([cluster.memory_bytes * (1.0 + MARGIN_BYTES) for cluster in own]),
        first=np.array([place[way.data_parallel_degrees[0]] for way in ways], np.int64),
        end=np.array([place[way.data_parallel_degrees[-1]] + 1 for way in ways], np.int64),
        resync_s=resync,
        start=choices.start,
        **{name: np.ascontiguousarray(column) for name, column in zip(_FIGURES, choices.figures.T, strict=True)},
        charge_start=choices.charge_start,
        charge_s=2.0 * choices.charge_bytes / _charge_rates(placed, choices),
        edge_start=choices.edge_start,
        edge=choices.edge,
    )


def _charge_rates(placed: PlacedWays, choices: ChoiceTable) -> Floats:
    """Returns the rate of each of the charges, in bytes per second."""
    found = []
    for r, starts in enumerate(choices.start):
        for v, count in enumerate(np.diff(starts)):
            edges = choices.edge[choices.edge_start[v] : choices.edge_start[v + 1]]
            enters = choices.enters[choices.edge_start[v] : choices.edge_start[v + 1]]
            found.append(np.tile(np.where(enters, placed.in_rate[r, edges], placed.out_rate[r, edges]), count))
    return np.concatenate(found)


def edge_bytes_of(instance: Instance) -> Mapping[tuple[int, int], float]:
    """Returns bytes by the ends of edges, for any TMPCs."""
    found: dict[tuple[int, int], float] = {}
    for edge in instance.edges:
        ends = edge.source, edge.target
        found[ends] = found.get(ends, 0.0) + edge.communication_bytes
    return found


def _charge_bytes(vertices: Vertices, e: int, v: int, tmpc: Tmpc, edge_bytes: Mapping[tuple[int, int], float]) -> float:
    """Returns the bytes, in one direction, that edge e costs the stage of its end v."""
    u, w = (vertices.layers[end] for end in vertices.edges[e])
    more = tmpc.forward_sync_bytes.get(u, 0.0) if vertices.edges[e][1] == v else tmpc.backward_sync_bytes.get(w, 0.0)
    return edge_bytes[u, w] + more


def _worth(vertices: Vertices, ways: Sequence[StageWay], units: Floats, budget_s: float, most: float) -> Floats:
    """Returns float64[n]: the least devices, at prices, or replicas that a layer takes: a stage of d replicas has d
    budgets of time. units: float64[r], those of one replica."""
    found = np.zeros(len(vertices.layers))
    for v, layer in enumerate(vertices.layers):
        least_s = min(
            (x.time_per_sample_s * each for way, each in zip(ways, units, strict=True) for x in way.tmpcs[layer]),
            default=0.0,
        )
        found[v] = min(least_s / budget_s, most + 1.0)
    return found


def _least(vertices: Vertices, choices: ChoiceTable, placed: PlacedWays, summed: Callable[[Floats], Floats]) -> Least:
    """Returns the least sums. summed: float64[r, m], of float64[r, n]."""
    ways, layers = choices.start.shape[0], len(vertices.layers)
    least, missing = np.zeros((len(_FIGURES), ways, layers)), np.zeros((ways, layers))
    for r in range(ways):
        for v in range(layers):
            rows = choices.figures[choices.start[r, v] : choices.start[r, v + 1]]
            missing[r, v] = not rows.size
            if rows.size:
                least[:, r, v] = rows.min(axis=0)
    of_vertex = dict(zip(_FIGURES, least, strict=True))
    in_bytes, out_bytes = least_charge_bytes(vertices, choices)
    incoming, outgoing = 2.0 * in_bytes / placed.in_rate, 2.0 * out_bytes / placed.out_rate
    # When a vertex is added to a set, all vertices behind it are there: edges from it to these cross no more.
    into = np.zeros((ways, layers))
    for e, (u, v) in enumerate(vertices.edges):
        into[:, v] += incoming[:, e]
        into[:, u] -= incoming[:, e]
    terms = 8.0 * (layers + 2 * len(vertices.edges) + 2) * _EPSILON
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


def _listed(bits: Bits, tails: certificate.Tails, available: Ints, prices: Floats) -> tuple[Ints, Ints, Ints]:
    """Returns the states by place, and by price. Raises CertificateRefused for a row whose layers are not a tail."""
    padded = np.zeros((tails.members.shape[0], 8 * bits.shape[1]), np.uint8)
    padded[:, : tails.members.shape[1]] = tails.members
    rows = padded.view("<u8").astype(np.uint64)
    # Rows are found by a hash, and then compared.
    known = _hashed(bits)
    by_key = np.argsort(known)
    at = np.searchsorted(known[by_key], _hashed(rows))
    place = by_key[np.minimum(at, known.size - 1)]
    if not np.array_equal(bits[place], rows):
        raise CertificateRefused("the certificate lists layers that can be no tail of a pipeline")
    fronts, mix = available.size**2, tails.used_devices
    mix, front = np.divmod(mix, fronts)
    place = place + front * bits.shape[0]
    devices = np.empty((place.size, available.size), np.int64)
    for kind in range(available.size - 1, 0, -1):
        mix, devices[:, kind] = np.divmod(mix, available[kind] + 1)
    devices[:, 0] = mix
    order = np.lexsort((devices @ prices, place))
    start = np.searchsorted(place[order], np.arange(fronts * bits.shape[0] + 1)).astype(np.int64)
    return start, devices[order], np.ascontiguousarray(tails.data_parallel_sum[order], np.int64)


def _hashed(bits: Bits) -> npt.NDArray[np.uint64]:
    """Returns uint64[rows]. Mixed after each word, so that similar sets have different hashes."""
    found = np.zeros(bits.shape[0], np.uint64)
    for word in bits.T:
        found = (found ^ word) * np.uint64(_FACTOR)
        found ^= found >> np.uint64(32)
        found *= np.uint64(_FACTOR)
        found ^= found >> np.uint64(29)
    return found
