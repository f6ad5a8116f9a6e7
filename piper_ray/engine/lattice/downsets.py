"""The lattice of downsets of a layer graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper_ray.engine.kernels import downsets
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, LatticeArrays, frozen
from piper_ray.engine.lattice.layer_graph import LayerGraph, bit_rows, descendants, offsets, runs
from piper_ray.model.errors import LimitError

_FIRST_ROOM = 4096


@dataclass(frozen=True)
class Lattice:
    """Downsets, with ids in (size, lexicographic) order: 0 is the empty set, the last one is V. The listed downsets of
    one size form a level.
    """

    graph: LayerGraph
    arrays: LatticeArrays

    @property
    def size(self) -> int:
        return int(self.arrays.bits.shape[0])

    @property
    def levels(self) -> int:
        return int(self.arrays.level_start.size) - 1

    def sums(self, values: FloatArray) -> FloatArray:
        """Returns float64[m, columns]: for each downset the sum of ``values`` (float64[n, columns]) over its vertices.
        They are added in ascending order, so a sum does not depend on which other downsets are listed, to the last bit.
        """
        found: FloatArray = downsets.member_sums(self.arrays.bits, np.ascontiguousarray(values, np.float64))
        return found


@dataclass(frozen=True)
class GrownLattice(Lattice):
    """A lattice in which each downset is another listed one plus a vertex: all downsets, or those of a chain.

    parent, added: int64[m]; downset i is parent[i] with vertex added[i] (-1 for the empty set).
    """

    parent: IndexArray
    added: IndexArray

    def sums(self, values: FloatArray) -> FloatArray:
        """Returns the same as ``Lattice.sums``, each sum computed from its parent's."""
        found: FloatArray = downsets.downset_sums(self.parent, self.added, np.ascontiguousarray(values, np.float64))
        return found


def build_lattice(graph: LayerGraph, limit: int, expected: int | None = None) -> GrownLattice:
    """Enumerates the downsets, ``expected`` of them if known. Raises LimitError if there are more than ``limit``."""
    words = max(1, (graph.size + 63) // 64)
    room = min(limit, expected or _FIRST_ROOM)
    neighbours = downsets.VertexNeighbours(bit_rows(graph.successors, graph.size), *runs(graph.predecessors))
    while True:
        found = downsets.Downsets(
            bits=np.zeros((room, words), np.uint64),
            addable=np.zeros((room, words), np.uint64),
            parent=np.zeros(room, np.int64),
            added=np.zeros(room, np.int64),
            level_start=np.zeros(graph.size + 2, np.int64),
        )
        count = downsets.enumerate_downsets(neighbours, found)
        if count > 0:
            parent, added = found.parent[:count].copy(), found.added[:count].copy()
            return _grown_lattice(graph, parent, added, found.bits[:count].copy(), found.level_start)
        if room == limit:
            raise LimitError(f"the lattice has more than {limit:,} downsets")
        room = min(limit, 8 * room)


def listed_pairs(lattice: Lattice) -> int:
    """Returns the number of nested pairs J < I. It tests all pairs, so it suits lattices of about a thousand
    downsets."""
    bits = lattice.arrays.bits
    return sum(int(np.count_nonzero(~(bits[:i] & ~bits[i]).any(axis=1))) for i in range(lattice.size))


def chain_lattice(graph: LayerGraph, order: Sequence[int]) -> GrownLattice:
    """Returns the n + 1 downsets along one order of the vertices, each after its successors. It gives upper bounds."""
    bits = np.zeros((graph.size + 1, max(1, (graph.size + 63) // 64)), np.uint64)
    for i, v in enumerate(order):
        bits[i + 1] = bits[i]
        bits[i + 1, v >> 6] |= np.uint64(1 << (v & 63))
    count = graph.size + 1
    return _grown_lattice(
        graph,
        np.arange(-1, count - 1, dtype=np.int64),
        np.array([-1, *order], np.int64),
        bits,
        np.arange(count + 1, dtype=np.int64),
    )


def _grown_lattice(
    graph: LayerGraph, parent: IndexArray, added: IndexArray, bits: BitArray, level_start: IndexArray
) -> GrownLattice:
    def across(sets: _Sets) -> _Runs:
        of_vertex: list[list[int]] = [[] for _ in range(graph.size)]
        for index, ends in enumerate(sets):
            for v in ends:
                of_vertex[v].append(index)
        return downsets.sets_across(parent, added, bits, bit_rows(sets, graph.size), *runs(of_vertex))

    return GrownLattice(graph, frozen(_arrays(graph, bits, level_start, across)), parent, added)


def listed_lattice(graph: LayerGraph, bits: BitArray) -> Lattice:
    """Returns a lattice of some downsets. bits: uint64[m, words], in any order, each once, with the empty set and V."""
    bits = np.ascontiguousarray(bits[downset_order(bits)])
    level_size, first = np.unique(np.bitwise_count(bits).sum(axis=1, dtype=np.int64), return_index=True)
    columns = np.ascontiguousarray(bits.T)

    def across(sets: _Sets) -> _Runs:
        """Returns the sets across each downset, ordered by their first end."""
        order = sorted(range(len(sets)), key=lambda index: (min(sets[index]), index))
        ends = bit_rows([sets[index] for index in order], graph.size)
        found = [np.flatnonzero(_is_cut(columns, of_set)) for of_set in ends]
        by_set = np.concatenate([np.zeros(0, np.int64), *found])
        which = np.repeat(np.array(order, np.int64), [one.size for one in found])
        return offsets(np.bincount(by_set, minlength=bits.shape[0])), which[np.argsort(by_set, kind="stable")]

    arrays = _arrays(graph, bits, np.append(first, bits.shape[0]).astype(np.int64), across)
    vertex_level = np.searchsorted(level_size, arrays.vertex_level).astype(np.int64)
    return Lattice(graph, frozen(arrays._replace(vertex_level=vertex_level)))


def downset_order(bits: BitArray) -> IndexArray:
    """Returns the order by size. Of two sets of one size, the one with the least vertex not in both comes first."""
    inside = np.unpackbits(bits.astype("<u8").view(np.uint8).reshape(bits.shape[0], -1), axis=1, bitorder="little")
    ranks = ~np.packbits(inside, axis=1).view(">u8").astype(np.uint64)
    return np.lexsort((*ranks.T[::-1], inside.sum(axis=1, dtype=np.int64))).astype(np.int64)


def _is_cut(columns: BitArray, ends: BitArray) -> npt.NDArray[np.bool_]:
    """Returns bool[m]: whether some of the ends are in a downset and some are not. columns: uint64[words, m]. ends:
    uint64[words]."""
    words = np.flatnonzero(ends)
    wanted = ends[words, None]
    inside = columns[words] & wanted
    is_cut: npt.NDArray[np.bool_] = inside.any(axis=0) & (inside != wanted).any(axis=0)
    return is_cut


_Sets = Sequence[Sequence[int]]
"""The ends of edges or of tensors, as vertices."""

_Runs = tuple[IndexArray, IndexArray]
"""Starts, int64[m + 1], and values, for each downset."""


def _arrays(
    graph: LayerGraph, bits: BitArray, level_start: IndexArray, across: Callable[[_Sets], _Runs]
) -> LatticeArrays:
    """Returns the arrays of downsets in order, with every size among them. across: returns the sets with ends both
    inside and outside each downset."""
    edges, tensors = [(tail, head) for tail, head, _ in graph.edges], [ends for ends, _ in graph.tensors]
    ends = np.array(edges, np.int64).reshape(-1, 2)
    crossing_start, crossing = across(edges)
    cut_start, cut = across(tensors) if tensors else (np.zeros(1, np.int64), np.zeros(0, np.int64))
    return LatticeArrays(
        bits=bits,
        level_start=level_start,
        crossing_start=crossing_start,
        crossing=crossing,
        edge_tail=ends[:, 0].copy(),
        edge_head=ends[:, 1].copy(),
        vertex_level=np.array([mask.bit_count() + 1 for mask in descendants(graph.successors)], np.int64),
        tensor_bits=bit_rows(tensors, graph.size),
        cut_start=cut_start,
        cut=cut,
    )
