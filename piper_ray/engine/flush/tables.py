"""The tables of a solve under a flush: the lattice, and what layers may run on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from piper_ray.cost.variants import Variant
from piper_ray.engine.kernels.flush_stages import AheadArrays
from piper_ray.engine.kernels.flush_types import SUM, FlushTables
from piper_ray.engine.kernels.sums import crossing_edges, downset_sums
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.bits import offsets
from piper_ray.engine.lattice.downsets import GrownLattice
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.passes import passes_of


@dataclass(frozen=True)
class FlushWorkload:
    """``tmpcs[r][v]``: the options of vertex v in variant r in the order of ``arrays``, the fastest first.

    ahead_of: what is left in front of each downset, for the variants that somebody has asked for.
    """

    lattice: GrownLattice
    variants: tuple[Variant, ...]
    tmpcs: tuple[tuple[tuple[Tmpc, ...], ...], ...]
    arrays: FlushTables
    ahead_of: dict[tuple[int, ...], AheadArrays] = field(default_factory=dict)


@dataclass(frozen=True)
class _Option:
    """One TMPC of a vertex. charges_s: for each in-edge, then for each out-edge that costs something, (c + extra) /
    B.
    """

    tmpc: Tmpc
    forward_s: float
    backward_s: float
    charges_s: tuple[float, ...]

    @property
    def least_key(self) -> tuple[float, ...]:
        x = self.tmpc
        memory_bytes = x.activation_bytes + x.fixed_bytes + x.shared_bytes
        return self.forward_s + self.backward_s, x.weights_bytes, sum(self.charges_s), memory_bytes

    def never_worse(self, other: _Option) -> bool:
        """In no stage, whatever y, d and border it has."""
        x, y = self.tmpc, other.tmpc
        return (
            self.forward_s <= other.forward_s
            and self.backward_s <= other.backward_s
            and x.weights_bytes <= y.weights_bytes
            and x.activation_bytes <= y.activation_bytes
            and x.activation_bytes + x.fixed_bytes <= y.activation_bytes + y.fixed_bytes
            and _once_bytes(x) <= _once_bytes(y)
            and all(mine <= theirs for mine, theirs in zip(self.charges_s, other.charges_s, strict=True))
        )


def _once_bytes(tmpc: Tmpc) -> float:
    return tmpc.activation_bytes + tmpc.fixed_bytes + tmpc.shared_bytes


def build_workload(instance: Instance, lattice: GrownLattice, variants: Sequence[Variant]) -> FlushWorkload:
    """Options without those that another never loses to, their sums over downsets, and what crosses borders."""
    graph = lattice.graph
    edges = _Edges(instance, graph)
    bandwidth = instance.bandwidth_bytes_per_s
    options = [
        [_undominated([edges.option(v, x) for x in variant.tmpcs[layer]]) for v, layer in enumerate(graph.layer_ids)]
        for variant in variants
    ]
    flat = [option for of_variant in options for of_vertex in of_variant for option in of_vertex]
    counts = offsets(len(of_vertex) for of_variant in options for of_vertex in of_variant)
    n, tensors = graph.size, [instance.tensors[index] for _, index in graph.tensors]
    crossing_start, crossing = edges.crossings(lattice)
    edge_in_s, edge_out_s = edges.least_charges(options)
    arrays = FlushTables(
        bits=lattice.arrays.bits,
        crossing_start=crossing_start,
        crossing=crossing,
        edge_tail=edges.tail,
        edge_head=edges.head,
        tensor_bits=lattice.arrays.tensor_bits,
        cut_start=lattice.arrays.cut_start,
        cut=lattice.arrays.cut,
        tensor_forward_s=_floats([tensor.forward_bytes / bandwidth for tensor in tensors]),
        tensor_backward_s=_floats([tensor.backward_bytes / bandwidth for tensor in tensors]),
        sums=_sums(lattice, options),
        edge_in_s=edge_in_s,
        edge_out_s=edge_out_s,
        option_start=np.stack([counts[r * n : (r + 1) * n + 1] for r in range(len(variants))]),
        option_forward_s=_floats([x.forward_s for x in flat]),
        option_backward_s=_floats([x.backward_s for x in flat]),
        option_weights=_floats([x.tmpc.weights_bytes for x in flat]),
        option_activation=_floats([x.tmpc.activation_bytes for x in flat]),
        option_fixed=_floats([x.tmpc.fixed_bytes for x in flat]),
        option_shared=_floats([x.tmpc.shared_bytes for x in flat]),
        charge_start=offsets(len(x.charges_s) for x in flat)[:-1].copy(),
        charge_s=_floats([charge for x in flat for charge in x.charges_s]),
        in_start=offsets(len(into) for into in edges.into),
        in_edge=np.array([e for into in edges.into for e in into], np.int64),
        out_start=offsets(len(out) for out in edges.out),
        out_edge=np.array([e for out in edges.out for e in out], np.int64),
    )
    tmpcs = tuple(tuple(tuple(x.tmpc for x in of_vertex) for of_vertex in of_variant) for of_variant in options)
    return FlushWorkload(lattice, tuple(variants), tmpcs, frozen(arrays))


class _Edges:
    """The edges that cost something, and what they cost with each TMPC at one of their ends."""

    def __init__(self, instance: Instance, graph: LayerGraph) -> None:
        dear = set()
        for layer in instance.layers:
            for x in (x for row in layer.tmpcs.values() for x in row):
                dear |= {(u, layer.id) for u, size in x.forward_sync_bytes.items() if size > 0.0}
                dear |= {(layer.id, w) for w, size in x.backward_sync_bytes.items() if size > 0.0}
        kept = []
        for tail, head, index in graph.edges:
            edge = instance.edges[index]
            if edge.communication_bytes > 0.0 or (edge.source, edge.target) in dear:
                kept.append((tail, head, edge))
        self._bandwidth = instance.bandwidth_bytes_per_s
        self._edge = [edge for _, _, edge in kept]
        self.tail = np.array([tail for tail, _, _ in kept], np.int64)
        self.head = np.array([head for _, head, _ in kept], np.int64)
        self.into: list[list[int]] = [[] for _ in range(graph.size)]
        self.out: list[list[int]] = [[] for _ in range(graph.size)]
        for e, (tail, head, _) in enumerate(kept):
            self.into[head].append(e)
            self.out[tail].append(e)

    def option(self, v: int, tmpc: Tmpc) -> _Option:
        edges = [*self.into[v], *self.out[v]]
        extras = [tmpc.forward_sync_bytes.get(self._edge[e].source, 0.0) for e in self.into[v]]
        extras += [tmpc.backward_sync_bytes.get(self._edge[e].target, 0.0) for e in self.out[v]]
        charges = tuple(
            (self._edge[e].communication_bytes + extra) / self._bandwidth
            for e, extra in zip(edges, extras, strict=True)
        )
        passes = passes_of(tmpc)
        return _Option(tmpc, passes.forward_s, passes.backward_s, charges)

    def crossings(self, lattice: GrownLattice) -> tuple[IndexArray, IndexArray]:
        """For each downset those from outside to inside."""
        return crossing_edges(
            lattice.parent,
            lattice.added,
            self.tail,
            offsets(len(into) for into in self.into),
            np.array([e for into in self.into for e in into], np.int64),
            np.array([len(out) for out in self.out], np.int64),
        )

    def least_charges(self, options: Sequence[Sequence[Sequence[_Option]]]) -> tuple[FloatArray, FloatArray]:
        """float64[r, e]: in the stage of an edge's head, and of its tail."""
        into, out = np.zeros((len(options), self.tail.size)), np.zeros((len(options), self.tail.size))
        for r, of_variant in enumerate(options):
            for v, of_vertex in enumerate(of_variant):
                for k, e in enumerate(self.into[v]):
                    into[r, e] = min((x.charges_s[k] for x in of_vertex), default=0.0)
                for k, e in enumerate(self.out[v], start=len(self.into[v])):
                    out[r, e] = min((x.charges_s[k] for x in of_vertex), default=0.0)
        return into, out


def _undominated(options: Sequence[_Option]) -> list[_Option]:
    """In the order of ``least_key``; of equal ones the first stays."""
    kept: list[_Option] = []
    for option in sorted(options, key=lambda x: x.least_key):
        if not any(other.never_worse(option) for other in kept):
            kept = [other for other in kept if not option.never_worse(other)]
            kept.append(option)
    return kept


def _sums(lattice: GrownLattice, options: Sequence[Sequence[Sequence[_Option]]]) -> FloatArray:
    """float64[r, m, len(SUM)]: of each downset, in each variant."""
    sums = np.zeros((len(options), lattice.size, len(SUM)))
    for r, of_variant in enumerate(options):
        values = np.zeros((lattice.graph.size, len(SUM)))
        for v, of_vertex in enumerate(of_variant):
            values[v] = _vertex_figures(of_vertex)
        sums[r] = downset_sums(lattice.parent, lattice.added, values)
    return sums


def _vertex_figures(options: Sequence[_Option]) -> FloatArray:
    """float64[len(SUM)] of one vertex in one variant."""
    figures = np.zeros(len(SUM))
    if not options:
        figures[SUM.missing] = 1.0
        return figures
    fast = options[0]
    figures[SUM.least_s] = fast.forward_s + fast.backward_s
    figures[SUM.least_forward_s] = min(x.forward_s for x in options)
    figures[SUM.least_backward_s] = min(x.backward_s for x in options)
    figures[SUM.least_weights] = min(x.tmpc.weights_bytes for x in options)
    figures[SUM.least_activation] = min(x.tmpc.activation_bytes for x in options)
    figures[SUM.least_fixed] = min(x.tmpc.fixed_bytes for x in options)
    figures[SUM.least_shared] = min(x.tmpc.shared_bytes for x in options)
    figures[SUM.fast_forward_s] = fast.forward_s
    figures[SUM.fast_activation] = fast.tmpc.activation_bytes
    figures[SUM.fast_fixed] = fast.tmpc.fixed_bytes
    figures[SUM.fast_shared] = fast.tmpc.shared_bytes
    takes_least = fast.tmpc.weights_bytes == figures[SUM.least_weights] and all(
        charge == min(x.charges_s[k] for x in options) for k, charge in enumerate(fast.charges_s)
    )
    figures[SUM.mixed] = 0.0 if takes_least else 1.0
    return figures


def _floats(values: Sequence[float]) -> FloatArray:
    return np.array(values, np.float64)
