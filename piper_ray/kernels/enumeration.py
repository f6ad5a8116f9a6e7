"""Kernel: all downsets of a DAG, level by level, each once and already in order."""

from __future__ import annotations

import numpy as np

from piper_ray.kernels.jit import kernel
from piper_ray.kernels.types import BitArray, IndexArray


@kernel
def enumerate_downsets(
    successor_bits: BitArray,
    predecessor_start: IndexArray,
    predecessor: IndexArray,
    limit: int,
) -> tuple[BitArray, IndexArray, IndexArray, IndexArray]:
    """All successor-closed vertex sets, or the first ``limit`` + 1 of them.

    Vertices are numbered successors first, so J without its largest vertex is a downset too: J is made from that
    parent alone. Parents in lexicographic order with children added in ascending order give each level in
    lexicographic order of the ascending vertex lists: ids are (level, lexicographic) without sorting or hashing.

    successor_bits: uint64[n, words]. Returns bits uint64[m, words], parent int64[m], added int64[m] (the largest
    vertex; -1 for the empty set) and level_start int64[levels + 1]. m > limit means the limit was hit.
    """
    n, words = successor_bits.shape
    capacity = 1024
    bits = np.zeros((capacity, words), np.uint64)
    parent = np.full(capacity, -1, np.int64)
    added = np.full(capacity, -1, np.int64)
    # addable[i]: the vertices larger than added[i] whose successors are all in downset i.
    addable = np.zeros((capacity, words), np.uint64)
    for v in range(n):
        if not successor_bits[v].any():
            addable[0, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
    level_start = np.zeros(n + 2, np.int64)
    level_start[1] = 1
    count = 1
    for level in range(n):
        for i in range(level_start[level], level_start[level + 1]):
            for word in range(words):
                rest = addable[i, word]
                while rest != 0:
                    low = rest & (~rest + np.uint64(1))
                    rest ^= low
                    v = word * 64 + _bit_position(low)
                    if count == capacity:
                        capacity *= 2
                        bits = _grown(bits, capacity)
                        addable = _grown(addable, capacity)
                        parent = _grown(parent, capacity)
                        added = _grown(added, capacity)
                    bits[count] = bits[i]
                    bits[count, word] |= low
                    parent[count] = i
                    added[count] = v
                    addable[count, word] = rest
                    for later in range(word + 1, words):
                        addable[count, later] = addable[i, later]
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
                    if count > limit:
                        return bits[:count], parent[:count], added[:count], level_start[: level + 2]
        level_start[level + 2] = count
    return bits[:count].copy(), parent[:count].copy(), added[:count].copy(), level_start


@kernel
def _bit_position(power_of_two: np.uint64) -> int:
    """log2 of a power of two, by binary search over the halves."""
    position = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if power_of_two >> np.uint64(shift):
            power_of_two >>= np.uint64(shift)
            position += shift
    return position


@kernel
def _grown(array: np.ndarray, capacity: int) -> np.ndarray:
    larger = np.zeros((capacity, *array.shape[1:]), array.dtype)
    larger[: array.shape[0]] = array
    return larger
