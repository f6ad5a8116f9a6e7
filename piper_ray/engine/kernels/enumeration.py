"""Kernel: all downsets of a DAG, level by level, each once and already in order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import leaf_kernel
from piper_ray.engine.kernels.bounds import lowest_position
from piper_ray.engine.kernels.types import BitArray, IndexArray


class VertexNeighbours(NamedTuple):
    """A graph's edges, vertices numbered successors first."""

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
    """All successor-closed vertex sets; returns their number, or -1 if there are more than ``room`` takes.

    Vertices are numbered successors first, so J without its largest vertex is a downset too: J is made from that
    parent alone. Parents in lexicographic order with children added in ascending order give each level in
    lexicographic order of the ascending vertex lists: ids are (level, lexicographic) without sorting or hashing.
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
