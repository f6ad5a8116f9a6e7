"""The TMPC choices of the contracted graph, flattened for the kernels. Depends on none of K, N, M, B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper_ray.cost.variants import Variant, undominated
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, OptionArrays
from piper_ray.engine.lattice.bits import bit_rows, offsets
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.model.instance import Instance, Tmpc

_Figure = Callable[[Sequence[Tmpc]], float]
_Difference = tuple[float, float, float, float]
"""Of an option from the fastest: time (s), a, b and shared (bytes)."""


@dataclass(frozen=True)
class VertexCosts:
    """Least figures of each vertex in each variant: what any choice costs at least. Zero where it has no option.

    work_s, weights_bytes, least_a, least_b, least_shared, fast_a, fast_b, fast_shared: float64[n, r]. missing:
    int64[n, r], 1 where there is none.
    in_bytes, out_bytes: float64[e, r], least charge of an edge in the stage of its head, and of its tail (c + extra).
    """

    work_s: FloatArray
    weights_bytes: FloatArray
    least_a: FloatArray
    least_b: FloatArray
    fast_a: FloatArray
    fast_b: FloatArray
    least_shared: FloatArray
    fast_shared: FloatArray
    missing: IndexArray
    in_bytes: FloatArray
    out_bytes: FloatArray


@dataclass(frozen=True)
class TmpcOptions:
    """All that the solver knows of TMPCs. ``tmpcs[r][v]`` are the options in the order of ``arrays``.

    ``arrays`` holds w in option_resync_s and c + extra in charge_s, both in bytes: see ``in_seconds``.
    tensor_bytes: float64[h], both passes. shares: whether any option has bytes that replicas share out.
    """

    variants: tuple[Variant, ...]
    tmpcs: tuple[tuple[tuple[Tmpc, ...], ...], ...]
    least: VertexCosts
    arrays: OptionArrays
    tensor_bytes: FloatArray
    shares: bool

    def in_seconds(self, resync_s_per_byte: FloatArray, transfer_s_per_byte: float) -> OptionArrays:
        """The same with weights as 4 w / (N B), of each variant, and charges as 2 (c + extra) / B."""
        of_variant = np.array([sum(map(len, rows)) for rows in self.tmpcs], np.int64)
        return self.arrays._replace(
            option_resync_s=self.arrays.option_resync_s * np.repeat(resync_s_per_byte, of_variant),
            charge_s=self.arrays.charge_s * transfer_s_per_byte,
        )


def build_options(instance: Instance, graph: LayerGraph, variants: Sequence[Variant]) -> TmpcOptions:
    """Flattens the variants' TMPCs, without the dominated ones, in vertex order."""
    tmpcs = tuple(tuple(undominated(variant.tmpcs[layer_id]) for layer_id in graph.layer_ids) for variant in variants)
    in_edges, out_edges = _incident_edges(graph)
    charges = _Charges(instance, graph, in_edges, out_edges)
    charge_lists_of = [
        [[charges.of(v, tmpc) for tmpc in of_vertex] for v, of_vertex in enumerate(of_variant)] for of_variant in tmpcs
    ]
    flat = [tmpc for of_variant in tmpcs for of_vertex in of_variant for tmpc in of_vertex]
    option_count = [[len(of_vertex) for of_vertex in of_variant] for of_variant in tmpcs]
    starts = offsets(count for row in option_count for count in row)
    n = graph.size
    charge_lists = [charge for of_variant in charge_lists_of for of_vertex in of_variant for charge in of_vertex]
    classes = _Classes(n)
    uniform = []
    for of_variant, charges_of_variant in zip(tmpcs, charge_lists_of, strict=True):
        uniform.append(all(map(_is_uniform, of_variant, charges_of_variant)))
        classes.add_variant(of_variant)

    arrays = OptionArrays(
        degree=np.array([variant.degree for variant in variants], np.int64),
        uniform=np.array(uniform, np.int64),
        option_start=np.stack([starts[r * n : (r + 1) * n + 1] for r in range(len(variants))])
        if variants
        else np.zeros((0, n + 1), np.int64),
        option_p_s=_floats(tmpc.time_per_sample_s for tmpc in flat),
        option_resync_s=_floats(tmpc.weights_bytes for tmpc in flat),
        option_a=_floats(tmpc.activation_bytes for tmpc in flat),
        option_b=_floats(tmpc.fixed_bytes for tmpc in flat),
        option_shared=_floats(tmpc.shared_bytes for tmpc in flat),
        charge_start=offsets(len(charge) for charge in charge_lists)[:-1].copy(),
        charge_s=_floats(charge for of_option in charge_lists for charge in of_option),
        in_start=offsets(len(edges) for edges in in_edges),
        in_edge=np.array([edge for edges in in_edges for edge in edges], np.int64),
        out_start=offsets(len(edges) for edges in out_edges),
        out_edge=np.array([edge for edges in out_edges for edge in edges], np.int64),
        class_start=np.array(classes.start, np.int64),
        class_bits=classes.bits(),
        class_vertex=classes.only_vertex(),
        choice_start=offsets(len(key) for key in classes.keys),
        choice_p_s=_floats(choice[0] for key in classes.keys for choice in key),
        choice_a=_floats(choice[1] for key in classes.keys for choice in key),
        choice_b=_floats(choice[2] for key in classes.keys for choice in key),
        choice_shared=_floats(choice[3] for key in classes.keys for choice in key),
        choices_share=np.array([_choices_share(of_variant) for of_variant in tmpcs], np.int64),
    )
    tensors = [instance.tensors[index] for _, index in graph.tensors]
    return TmpcOptions(
        tuple(variants),
        tmpcs,
        _least(graph, tmpcs, charges),
        arrays,
        _floats(tensor.forward_bytes + tensor.backward_bytes for tensor in tensors),
        any(tmpc.shared_bytes > 0.0 for tmpc in flat),
    )


class _Charges:
    """Bytes c + extra that a vertex pays for each of its edges, by TMPC."""

    def __init__(
        self, instance: Instance, graph: LayerGraph, in_edges: list[list[int]], out_edges: list[list[int]]
    ) -> None:
        self._in_edges, self._out_edges = in_edges, out_edges
        # An edge's ends name the layers that its figures are filed under. One with a contracted end costs nothing.
        self._edge = [instance.edges[index] for _, _, index in graph.edges]

    def incoming(self, e: int, tmpc: Tmpc) -> float:
        edge = self._edge[e]
        return edge.communication_bytes + tmpc.forward_sync_bytes.get(edge.source, 0.0)

    def outgoing(self, e: int, tmpc: Tmpc) -> float:
        edge = self._edge[e]
        return edge.communication_bytes + tmpc.backward_sync_bytes.get(edge.target, 0.0)

    def of(self, v: int, tmpc: Tmpc) -> list[float]:
        return [self.incoming(e, tmpc) for e in self._in_edges[v]] + [
            self.outgoing(e, tmpc) for e in self._out_edges[v]
        ]


class _Classes:
    """Groups the vertices of a uniform variant whose options differ from the fastest by the same amounts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.start = [0]
        self.keys: list[tuple[_Difference, ...]] = []
        self._members: list[list[int]] = []

    def add_variant(self, of_variant: Sequence[tuple[Tmpc, ...]]) -> None:
        first = len(self.keys)
        index: dict[tuple[_Difference, ...], int] = {}
        for v, options in enumerate(of_variant):
            if len(options) < 2:
                continue
            fast = fastest(options)
            key = tuple(
                (
                    tmpc.time_per_sample_s - fast.time_per_sample_s,
                    tmpc.activation_bytes - fast.activation_bytes,
                    tmpc.fixed_bytes - fast.fixed_bytes,
                    tmpc.shared_bytes - fast.shared_bytes,
                )
                for tmpc in options
                if tmpc is not fast
            )
            if key not in index:
                index[key] = len(self.keys)
                self.keys.append(key)
                self._members.append([])
            self._members[index[key]].append(v)
        self.start.append(first + len(index))

    def bits(self) -> BitArray:
        return bit_rows(self._members, self._size)

    def only_vertex(self) -> IndexArray:
        return np.array([group[0] if len(group) == 1 else -1 for group in self._members], np.int64)


def fastest(options: Sequence[Tmpc]) -> Tmpc:
    """Least time; of equally fast ones (they trade a for b) the least a."""
    return min(options, key=lambda tmpc: (tmpc.time_per_sample_s, tmpc.activation_bytes))


def _is_uniform(options: Sequence[Tmpc], charges: Sequence[list[float]]) -> bool:
    """Whether no weight and no charge depends on the option chosen."""
    return all(
        tmpc.weights_bytes == options[0].weights_bytes and charge == charges[0]
        for tmpc, charge in zip(options, charges, strict=True)
    )


def _choices_share(of_variant: Sequence[tuple[Tmpc, ...]]) -> bool:
    """Whether some vertex has options that differ in what replicas share out."""
    return any(tmpc.shared_bytes != options[0].shared_bytes for options in of_variant for tmpc in options)


def _least(graph: LayerGraph, tmpcs: Sequence[Sequence[Sequence[Tmpc]]], charges: _Charges) -> VertexCosts:
    n, r = graph.size, len(tmpcs)

    def per_vertex(figure: _Figure) -> FloatArray:
        table = np.zeros((n, r))
        for column, of_variant in enumerate(tmpcs):
            for v, options in enumerate(of_variant):
                table[v, column] = figure(options) if options else 0.0
        return table

    in_bytes, out_bytes = np.zeros((len(graph.edges), r)), np.zeros((len(graph.edges), r))
    for column, of_variant in enumerate(tmpcs):
        for e, (tail, head, _) in enumerate(graph.edges):
            in_bytes[e, column] = min((charges.incoming(e, tmpc) for tmpc in of_variant[head]), default=0.0)
            out_bytes[e, column] = min((charges.outgoing(e, tmpc) for tmpc in of_variant[tail]), default=0.0)
    return VertexCosts(
        work_s=per_vertex(lambda options: min(tmpc.time_per_sample_s for tmpc in options)),
        weights_bytes=per_vertex(lambda options: min(tmpc.weights_bytes for tmpc in options)),
        least_a=per_vertex(lambda options: min(tmpc.activation_bytes for tmpc in options)),
        least_b=per_vertex(lambda options: min(tmpc.fixed_bytes for tmpc in options)),
        fast_a=per_vertex(lambda options: fastest(options).activation_bytes),
        fast_b=per_vertex(lambda options: fastest(options).fixed_bytes),
        least_shared=per_vertex(lambda options: min(tmpc.shared_bytes for tmpc in options)),
        fast_shared=per_vertex(lambda options: fastest(options).shared_bytes),
        missing=np.array([[int(not of_variant[v]) for of_variant in tmpcs] for v in range(n)], np.int64).reshape(n, r),
        in_bytes=in_bytes,
        out_bytes=out_bytes,
    )


def _incident_edges(graph: LayerGraph) -> tuple[list[list[int]], list[list[int]]]:
    in_edges: list[list[int]] = [[] for _ in range(graph.size)]
    out_edges: list[list[int]] = [[] for _ in range(graph.size)]
    for e, (tail, head, _) in enumerate(graph.edges):
        in_edges[head].append(e)
        out_edges[tail].append(e)
    return in_edges, out_edges


def _floats(values: Iterable[float]) -> npt.NDArray[np.float64]:
    return np.fromiter(values, np.float64)
