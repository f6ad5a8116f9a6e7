"""Kernels: all downsets of a DAG, level by level, each once and already in order; sums over downsets and what crosses
into them, each computed from its parent's or by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import twice
from piper_ray.compiled.jit import kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import is_subset, lowest_position, meets
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray


@kernel
def downset_sums(parent: IndexArray, added: IndexArray, values: FloatArray) -> FloatArray:
    """Returns float64[m, columns]: for each downset the sum of ``values`` (float64[n, columns]) over its vertices."""
    sums = np.zeros((parent.size, values.shape[1]))
    for i in range(1, parent.size):
        for column in range(values.shape[1]):
            sums[i, column] = sums[parent[i], column] + values[added[i], column]
    return sums


@kernel
def sets_across(
    parent: IndexArray, added: IndexArray, bits: BitArray, ends: BitArray, start_of: IndexArray, of_vertex: IndexArray
) -> tuple[IndexArray, IndexArray]:
    """Returns for each downset the sets of vertices with ends inside and outside, as int64[m + 1] starts and int64[..]
    sets.

    ends: uint64[sets, words], of edges or tensors. start_of: int64[n + 1]; of_vertex: int64[..], the sets of each
    vertex. Adding v drops the sets that are then wholly inside, and adds those whose first end is v.
    """
    m = parent.size
    start = np.zeros(m + 1, np.int64)
    found = np.empty(1024, np.int64)
    for i in range(1, m):
        at = start[i]
        before = start[parent[i]], start[parent[i] + 1]
        v = added[i]
        most = at + before[1] - before[0] + start_of[v + 1] - start_of[v]
        while most > found.size:
            found = twice(found)
        for k in range(before[0], before[1]):
            if not is_subset(ends[found[k]], bits[i]):
                found[at] = found[k]
                at += 1
        for k in range(start_of[v], start_of[v + 1]):
            one = ends[of_vertex[k]]
            if not meets(one, bits[parent[i]]) and not is_subset(one, bits[i]):
                found[at] = of_vertex[k]
                at += 1
        start[i + 1] = at
    return start, found[: start[m]].copy()


@kernel
def crossing_sums(start: IndexArray, edges: IndexArray, values: FloatArray) -> FloatArray:
    """Returns float64[m, columns]: for each downset the sum of ``values`` (float64[e, columns]) over its crossing
    edges."""
    m = start.size - 1
    sums = np.zeros((m, values.shape[1]))
    for i in range(m):
        for k in range(start[i], start[i + 1]):
            for column in range(values.shape[1]):
                sums[i, column] += values[edges[k], column]
    return sums


@kernel
def member_sums(bits: BitArray, values: FloatArray) -> FloatArray:
    """Returns float64[m, columns]: for each downset the sum of ``values`` (float64[n, columns]) over its vertices,
    added in ascending order as in ``downset_sums``."""
    n, columns = values.shape
    sums = np.zeros((bits.shape[0], columns))
    for i in range(bits.shape[0]):
        for v in range(n):
            if (bits[i, v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0:
                for column in range(columns):
                    sums[i, column] += values[v, column]
    return sums


class VertexNeighbours(NamedTuple):
    """A graph's edges. Vertices are numbered successors first."""

    successor_bits: BitArray  # uint64[n, words]
    predecessor_start: IndexArray  # int64[n + 1], into predecessor
    predecessor: IndexArray


class Downsets(NamedTuple):
    """Room for downsets; all zeros at first."""

    bits: BitArray  # uint64[room, words]
    addable: BitArray  # uint64[room, words], scratch: vertices larger than added[i] whose successors are all in i
    parent: IndexArray  # int64[room]: the downset without its largest vertex
    added: IndexArray  # int64[room]: that vertex; -1 for the empty set
    level_start: IndexArray  # int64[n + 2]


@leaf_kernel
def enumerate_downsets(graph: VertexNeighbours, room: Downsets) -> int:
    """Finds all successor-closed vertex sets. Returns their number, or -1 if there are more than ``room`` has space
    for.

    Vertices are numbered successors first, so J without its largest vertex is a downset too, and J is made only from
    that parent. Parents in lexicographic order with children added in ascending order give each level in lexicographic
    order of the ascending vertex lists: ids are (level, lexicographic) without sorting or hashing.
    """
    successor_bits, predecessor_start, predecessor = graph
    bits, addable, parent, added, level_start = room
    n, words = successor_bits.shape
    for v in range(n):
        has_successor = False
        for word in range(words):
            if successor_bits[v, word] != 0:
                has_successor = True
        if not has_successor:
            addable[0, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
    parent[0] = -1
    added[0] = -1
    level_start[1] = 1
    count = 1
    for level in range(n):
        for i in range(level_start[level], level_start[level + 1]):
            for word in range(words):
                rest = addable[i, word]
                while rest != 0:
                    low = rest & (~rest + np.uint64(1))
                    rest ^= low
                    v = word * 64 + lowest_position(low)
                    if count == parent.size:
                        return -1
                    for w in range(words):
                        bits[count, w] = bits[i, w]
                        addable[count, w] = addable[i, w] if w > word else np.uint64(0)
                    bits[count, word] |= low
                    addable[count, word] = rest
                    parent[count] = i
                    added[count] = v
                    for e in range(predecessor_start[v], predecessor_start[v + 1]):
                        u = predecessor[e]
                        ready = True
                        for w in range(words):
                            if successor_bits[u, w] & ~bits[count, w] != 0:
                                ready = False
                                break
                        if ready:
                            addable[count, u >> 6] |= np.uint64(1) << np.uint64(u & 63)
                    count += 1
        level_start[level + 2] = count
    return count
