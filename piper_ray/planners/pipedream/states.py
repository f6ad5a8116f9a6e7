"""Where PipeDream may cut: states, their sums, and the pairs between which a stage can lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper_ray.engine.lattice.bits import bit_rows, members, offsets
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import build_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.planners.order import topological_order
from piper_ray.planners.pipedream.kernel import PairArrays, count_subsets, list_subsets
from piper_ray.planners.pipedream.parameters import States

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]

STATE_LIMIT = 100_000
PAIR_LIMIT = 40_000_000
"""Pairs take 12 bytes each, and some 5 ns in each of some twenty passes."""


@dataclass(frozen=True)
class TailTables:
    """A state is told by its tail, the layers that are left: number 0 leaves none, the last one all.

    layer_ids: of each vertex, its place in the file and its layer's id. bits: uint64[m, words], the tails, each after
    its subsets. pairs: of nested tails, for any batch and memory. time_s: float64[m], the sum over the tail of p.
    entering_bytes: float64[m], the activations that enter it, each once.
    """

    layer_ids: tuple[tuple[int, int], ...]
    bits: Bits
    pairs: PairArrays
    time_s: Floats
    entering_bytes: Floats

    @property
    def size(self) -> int:
        return len(self.bits)

    def layers_between(self, front: int, rest: int) -> tuple[int, ...]:
        """Ids of the layers in tail ``front`` and not in tail ``rest``, in file order."""
        stage = members(self.bits[front] & ~self.bits[rest])
        return tuple(layer_id for _, layer_id in sorted(self.layer_ids[v] for v in stage))


def build_states(instance: Instance, tmpcs: Mapping[int, Tmpc], kind: States) -> TailTables:
    """Raises LimitError when there are more than ``STATE_LIMIT`` states or ``PAIR_LIMIT`` nested pairs."""
    graph = build_graph(instance, without_contraction())
    bits = _tails(instance, graph, kind)
    counts = count_subsets(bits, PAIR_LIMIT)
    if counts.sum() > PAIR_LIMIT:
        raise _too_many(kind)
    pair_start = offsets(counts.tolist())
    rest = np.empty(pair_start[-1], np.int32)
    list_subsets(bits, pair_start, rest)

    place = {layer.id: i for i, layer in enumerate(instance.layers)}
    inside = _membership(bits, graph.size)
    chosen = [tmpcs[layer_id] for layer_id in graph.layer_ids]
    return TailTables(
        layer_ids=tuple((place[layer_id], layer_id) for layer_id in graph.layer_ids),
        bits=bits,
        pairs=PairArrays(
            pair_start,
            rest,
            weights_bytes=_sums(inside, [tmpc.weights_bytes for tmpc in chosen]),
            activation_bytes=_sums(inside, [tmpc.activation_bytes for tmpc in chosen]),
            fixed_bytes=_sums(inside, [tmpc.fixed_bytes for tmpc in chosen]),
            shared_bytes=_sums(inside, [tmpc.shared_bytes for tmpc in chosen]),
            whole_batch=0,
            memory_bytes=math.inf,
        ),
        time_s=_sums(inside, [tmpc.time_per_sample_s for tmpc in chosen]),
        entering_bytes=_entering_bytes(instance, graph, inside),
    )


def _tails(instance: Instance, graph: LayerGraph, kind: States) -> Bits:
    """uint64[m, words], vertices of ``graph`` as bits, tails after their subsets."""
    if kind is States.DOWNSETS:
        try:
            return build_lattice(graph, STATE_LIMIT).arrays.bits
        except LimitError:
            raise _too_many(kind) from None
    everything = (1 << graph.size) - 1
    vertex = {layer_id: v for v, layer_id in enumerate(graph.layer_ids)}
    if kind is States.ORDER:
        tails = [everything]
        for layer_id in topological_order(instance):
            tails.append(tails[-1] ^ 1 << vertex[layer_id])
    else:
        source = next(vertex[layer.id] for layer in instance.layers if not graph.predecessors[vertex[layer.id]])
        heads = _grown(graph, source)
        tails = sorted({everything, 0, *(everything ^ head for head in heads)})
    tails.sort(key=int.bit_count)
    return bit_rows([_bits(tail) for tail in tails], graph.size)


def _grown(graph: LayerGraph, source: int) -> Iterable[int]:
    """The states of PipeDream: the source's; from a state, each layer behind it with all that the layer needs."""
    needed = [0] * graph.size
    for v in reversed(range(graph.size)):
        needed[v] = 1 << v
        for tail in graph.predecessors[v]:
            needed[v] |= needed[tail]
    found = {needed[source]: None}
    pending = [needed[source]]
    while pending:
        state = pending.pop()
        behind = {head for v in _bits(state) for head in graph.successors[v] if not state >> head & 1}
        for v in behind:
            grown = state | needed[v]
            if grown not in found:
                found[grown] = None
                pending.append(grown)
        if len(found) > STATE_LIMIT:
            raise _too_many(States.SINGLE_SOURCE)
    return found


def _bits(mask: int) -> Sequence[int]:
    return [v for v in range(mask.bit_length()) if mask >> v & 1]


def _membership(bits: Bits, size: int) -> npt.NDArray[np.uint8]:
    """uint8[m, n]: 1 where vertex v is in tail i."""
    return np.unpackbits(bits.astype("<u8").view(np.uint8), axis=1, bitorder="little", count=size)


def _sums(inside: npt.NDArray[np.uint8], values: Sequence[float]) -> Floats:
    """Over each tail, float64[m]. einsum, unlike a matrix product, makes no float64 copy of ``inside``."""
    sums: Floats = np.einsum("mn,n->m", inside, np.array(values, np.float64))
    return sums


def _entering_bytes(instance: Instance, graph: LayerGraph, inside: npt.NDArray[np.uint8]) -> Floats:
    """A layer's activation, the most of what its edges carry, enters once if any of its successors is in the tail."""
    activation = [0.0] * graph.size
    for tail, _, index in graph.edges:
        activation[tail] = max(activation[tail], instance.edges[index].communication_bytes)
    entering = np.zeros(len(inside))
    for v, heads in enumerate(graph.successors):
        if heads:  # a tail that has v has them all
            entering += activation[v] * (inside[:, list(heads)].max(axis=1) - inside[:, v])
    for ends, index in graph.tensors:
        held = inside[:, list(ends)].sum(axis=1)
        entering += instance.tensors[index].forward_bytes * ((held > 0) & (held < len(ends)))
    return entering


def _too_many(kind: States) -> LimitError:
    return LimitError(
        f"PipeDream's planner has more than {STATE_LIMIT:,} states of kind {kind.value!r}, or {PAIR_LIMIT:,} pairs of "
        f"them, the most it takes; states={States.ORDER.value!r} cuts along one order of the layers only"
    )
