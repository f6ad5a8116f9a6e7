"""Kernels: the sets of layers that can be the tail of a pipeline, and sums over them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.jit import kernel

Bits = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@kernel
def list_downsets(successors: Bits, count: int, bits: Bits, parent: Ints, added: Ints) -> int:
    """All sets that hold the successors of their members, from the first ``count`` on; returns how many, or -1 if there
    are more than room for.

    successors: uint64[n, words], of vertices that come after their successors. bits, parent, added: room, the first of
    them the empty set with added = -1. A set without its last vertex is such a set too: it is made from that one alone.
    """
    vertices, words = successors.shape
    at = 0
    while at < count:
        for v in range(added[at] + 1, vertices):
            closed = True
            for word in range(words):
                if successors[v, word] & ~bits[at, word] != 0:
                    closed = False
            if not closed:
                continue
            if count == added.size:
                return -1
            for word in range(words):
                bits[count, word] = bits[at, word]
            bits[count, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
            parent[count] = at
            added[count] = v
            count += 1
        at += 1
    return count


@kernel
def sums_over(parent: Ints, added: Ints, values: Floats) -> Floats:
    """float64[m]: for each set the sum of its vertices' values, float64[n]."""
    found = np.zeros(parent.size)
    for at in range(1, parent.size):
        found[at] = found[parent[at]] + values[added[at]]
    return found


@kernel
def sums_into(bits: Bits, tail: Ints, head: Ints, charge: Floats) -> Floats:
    """float64[m]: for each set the charges of the edges that come into it from outside."""
    found = np.zeros(bits.shape[0])
    for at in range(found.size):
        for e in range(tail.size):
            into = (bits[at, head[e] >> 6] >> np.uint64(head[e] & 63)) & np.uint64(1)
            if into != 0 and (bits[at, tail[e] >> 6] >> np.uint64(tail[e] & 63)) & np.uint64(1) == 0:
                found[at] += charge[e]
    return found
