"""Kernels: the sets of layers that can be the tail of a pipeline, and sums over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel

Bits = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class DownsetRoom(NamedTuple):
    """Room for downsets, all zeros at first. addable: the vertices after added[i] whose successors are all in set i."""

    bits: Bits  # uint64[room, words]
    addable: Bits
    parent: Ints  # int64[room]
    added: Ints


@inlined_kernel
def holds(bits: Bits, row: int, v: int) -> bool:
    """Whether a set has the vertex."""
    return bool((bits[row, v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0)


@inlined_kernel
def is_inside(bits: Bits, j: int, i: int) -> bool:
    """Whether set j is a subset of set i."""
    inside = True
    for word in range(bits.shape[1]):
        if bits[j, word] & ~bits[i, word] != 0:
            inside = False
            break
    return inside


@inlined_kernel
def is_cut(tensors: Bits, tensor: int, bits: Bits, i: int, j: int) -> bool:
    """Whether some ends of a tensor are in the stage of set i without set j, and some are not."""
    inside, outside = False, False
    for word in range(bits.shape[1]):
        ends = tensors[tensor, word]
        of_stage = ends & bits[i, word] & ~bits[j, word]
        inside = inside or of_stage != 0
        outside = outside or of_stage != ends
    return inside and outside


@leaf_kernel
def first_above(values: Floats, limit: float) -> int:
    """Returns the first place whose value exceeds the limit; the values rise."""
    low, high = 0, values.size
    while low < high:
        middle = (low + high) >> 1
        if values[middle] > limit:
            high = middle
        else:
            low = middle + 1
    return low


@leaf_kernel
def list_downsets(successors: Bits, before_start: Ints, before: Ints, room: DownsetRoom) -> int:
    """Lists all sets that have the successors of their members. Returns their number, or -1 if there is not enough
    room.

    successors: uint64[n, words], of vertices that come after their successors. before_start, before: the vertices of
    which each is a successor. A set without its last vertex is such a set too, and the set is made from that one alone.
    """
    bits, addable, parent, added = room
    vertices, words = successors.shape
    for v in range(vertices):
        free = True
        for word in range(words):
            if successors[v, word] != 0:
                free = False
        if free:
            addable[0, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
    parent[0], added[0] = -1, -1
    at, count = 0, 1
    while at < count:
        for v in range(added[at] + 1, vertices):
            if (addable[at, v >> 6] >> np.uint64(v & 63)) & np.uint64(1) == 0:
                continue
            if count == added.size:
                return -1
            for word in range(words):
                bits[count, word] = bits[at, word]
                first = v + 1 - 64 * word
                later = np.uint64(0)
                if first <= 0:
                    later = ~later
                elif first < 64:
                    later = ~later << np.uint64(first)
                addable[count, word] = addable[at, word] & later
            bits[count, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
            for n in range(before_start[v], before_start[v + 1]):
                u = before[n]
                closed = True
                for word in range(words):
                    if successors[u, word] & ~bits[count, word] != 0:
                        closed = False
                if closed:
                    addable[count, u >> 6] |= np.uint64(1) << np.uint64(u & 63)
            parent[count] = at
            added[count] = v
            count += 1
        at += 1
    return count


@kernel
def sums_over(parent: Ints, added: Ints, values: Floats) -> Floats:
    """Returns float64[m]: for each set the sum of its vertices' values, float64[n]."""
    found = np.zeros(parent.size)
    for at in range(1, parent.size):
        found[at] = found[parent[at]] + values[added[at]]
    return found
