"""The options of a contracted graph as arrays, vertex by vertex in loops: the twin of ``build_options``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from piper_ray.cost.variants import Variant, undominated
from piper_ray.engine.kernels.types import FloatArray, OptionArrays
from piper_ray.engine.lattice.layer_graph import LayerGraph, offsets
from piper_ray.engine.tables.tmpc_options import TmpcOptions, VertexCosts, fastest
from piper_ray.model.instance import Instance, Tmpc

_NO_FIGURES = (0.0, 0.0, 0.0, 0.0, 0.0)
_Difference = tuple[float, float, float, float]
"""Of an option from the fastest: time (s), a, b and shared (bytes)."""


def options_by_loops(instance: Instance, graph: LayerGraph, variants: Sequence[Variant]) -> TmpcOptions:
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
    classes = _Classes()
    uniform = []
    for of_variant, charges_of_variant in zip(tmpcs, charge_lists_of, strict=True):
        uniform.append(all(map(_is_uniform, of_variant, charges_of_variant)))
        classes.add_variant(of_variant)

    price_s = [_price_s(of_variant) for of_variant in tmpcs]
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
        class_of=np.array(classes.of_vertex, np.int64).reshape(len(variants), n),
        choice_start=offsets(len(key) for key in classes.keys),
        choice_p_s=_floats(choice[0] for key in classes.keys for choice in key),
        choice_a=_floats(choice[1] for key in classes.keys for choice in key),
        choice_b=_floats(choice[2] for key in classes.keys for choice in key),
        choice_shared=_floats(choice[3] for key in classes.keys for choice in key),
        choices_share=np.array([_choices_share(of_variant) for of_variant in tmpcs], np.int64),
        price_s=np.array(price_s, np.float64),
    )
    tensors = [instance.tensors[index] for _, index in graph.tensors]
    return TmpcOptions(
        tuple(variants),
        tmpcs,
        _least(graph, tmpcs, charge_lists_of, in_edges, out_edges, price_s),
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

    def __init__(self) -> None:
        self.start = [0]
        self.keys: list[tuple[_Difference, ...]] = []
        self.of_vertex: list[int] = []

    def add_variant(self, of_variant: Sequence[tuple[Tmpc, ...]]) -> None:
        first = len(self.keys)
        index: dict[tuple[_Difference, ...], int] = {}
        for options in of_variant:
            if len(options) < 2:
                self.of_vertex.append(-1)
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
            self.of_vertex.append(index[key])
        self.start.append(first + len(index))


def _is_uniform(options: Sequence[Tmpc], charges: Sequence[list[float]]) -> bool:
    """Whether no weight and no charge depends on the option chosen."""
    return all(
        tmpc.weights_bytes == options[0].weights_bytes and charge == charges[0]
        for tmpc, charge in zip(options, charges, strict=True)
    )


def _choices_share(of_variant: Sequence[tuple[Tmpc, ...]]) -> bool:
    """Whether some vertex has options that differ in what replicas share out."""
    return any(tmpc.shared_bytes != options[0].shared_bytes for options in of_variant for tmpc in options)


def _price_s(of_variant: Sequence[tuple[Tmpc, ...]]) -> float:
    """The upper middle one of what options take longer than the fastest, for a byte saved: of a and an eighth of b."""
    paid_s = []
    for options in of_variant:
        for tmpc in options:
            fast = fastest(options)
            saved_bytes = -(
                (tmpc.activation_bytes - fast.activation_bytes) + (tmpc.fixed_bytes - fast.fixed_bytes) / 8.0
            )
            if saved_bytes > 0.0:
                paid_s.append((tmpc.time_per_sample_s - fast.time_per_sample_s) / saved_bytes)
    return sorted(paid_s)[len(paid_s) // 2] if paid_s else 0.0


def _least(
    graph: LayerGraph,
    tmpcs: Sequence[Sequence[Sequence[Tmpc]]],
    charge_lists_of: Sequence[Sequence[Sequence[Sequence[float]]]],
    in_edges: Sequence[Sequence[int]],
    out_edges: Sequence[Sequence[int]],
    price_s: Sequence[float],
) -> VertexCosts:
    """charge_lists_of: of each variant, vertex and option what it pays for the vertex's in-edges, then for its
    out-edges."""
    figures_of = attrgetter("time_per_sample_s", "weights_bytes", "activation_bytes", "fixed_bytes", "shared_bytes")
    n, r, edges = graph.size, len(tmpcs), len(graph.edges)
    least: list[tuple[float, ...]] = []
    fast: list[tuple[float, ...]] = []
    in_bytes, out_bytes = [[0.0] * edges for _ in tmpcs], [[0.0] * edges for _ in tmpcs]
    for column, (of_variant, charges_of_variant) in enumerate(zip(tmpcs, charge_lists_of, strict=True)):
        for v, (options, charges) in enumerate(zip(of_variant, charges_of_variant, strict=True)):
            if not options:
                least.append(_NO_FIGURES)
                fast.append(_NO_FIGURES)
                continue
            least.append(tuple(map(min, zip(*map(figures_of, options), strict=True))))
            fast.append(figures_of(fastest(options)))
            charged = map(min, zip(*charges, strict=True))
            for e in in_edges[v]:
                in_bytes[column][e] = next(charged)
            for e in out_edges[v]:
                out_bytes[column][e] = next(charged)

    def tables(of_rows: list[tuple[float, ...]]) -> list[FloatArray]:
        """float64[n, r] for each figure, from rows by variant and vertex."""
        return list(np.ascontiguousarray(np.array(of_rows, np.float64).reshape(r, n, len(_NO_FIGURES)).T))

    def by_edge(of_columns: list[list[float]]) -> FloatArray:
        return np.ascontiguousarray(np.array(of_columns, np.float64).reshape(r, edges).T)

    def priced(fixed_share: float) -> FloatArray:
        """What an option of a vertex takes more than the fastest, with the price of a and a share of b."""
        rows = [
            [
                min(
                    tmpc.time_per_sample_s + price * (tmpc.activation_bytes + tmpc.fixed_bytes * fixed_share)
                    for tmpc in options
                )
                - fastest(options).time_per_sample_s
                if options
                else 0.0
                for options in of_variant
            ]
            for of_variant, price in zip(tmpcs, price_s, strict=True)
        ]
        return np.ascontiguousarray(np.array(rows, np.float64).reshape(r, n).T)

    work_s, weights_bytes, least_a, least_b, least_shared = tables(least)
    _, _, fast_a, fast_b, fast_shared = tables(fast)
    missing = [[int(not of_variant[v]) for of_variant in tmpcs] for v in range(n)]
    return VertexCosts(
        work_s=work_s,
        weights_bytes=weights_bytes,
        least_a=least_a,
        least_b=least_b,
        fast_a=fast_a,
        fast_b=fast_b,
        least_shared=least_shared,
        fast_shared=fast_shared,
        many_s=priced(0.0),
        one_s=priced(1.0),
        missing=np.array(missing, np.int64).reshape(n, r),
        in_bytes=by_edge(in_bytes),
        out_bytes=by_edge(out_bytes),
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
