"""Kernels: how many layers of one kind all ranks have at most, who share out the others."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.types import IndexArray


@kernel
def most_of_main(most: IndexArray, chosen: IndexArray) -> int:
    """Of the main kind on all ranks together, where they have all of the other kinds; -1: there is no room for these.

    most: int64[p, choices], of a rank beside a choice of the others, below 0 where that is too much. chosen:
    int64[choices, other kinds], numbers of layers in the order of ``numpy.ndindex``, so that choice a less choice b has
    number a - b.
    """
    p, choices = most.shape
    best = np.full(choices, -1, np.int64)
    best[0] = 0
    for r in range(p):
        for a in range(choices - 1, -1, -1):
            found = -1
            for b in range(a + 1):
                if most[r, b] < 0 or best[a - b] < 0:
                    continue
                for c in range(chosen.shape[1]):
                    if chosen[b, c] > chosen[a, c]:
                        break
                else:
                    found = max(found, best[a - b] + most[r, b])
            best[a] = found
    return int(best[choices - 1])
