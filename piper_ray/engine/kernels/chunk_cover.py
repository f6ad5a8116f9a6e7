"""Kernels: the most layers of one kind that all ranks together have room for, besides all layers of the others; rows
that no other one beats."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.types import FloatArray, IndexArray


@kernel
def most_of_main(most: IndexArray, chosen: IndexArray) -> int:
    """Returns the most layers of the main kind that all ranks together have room for if they also hold all layers of
    the other kinds; -1 if they cannot hold these.

    A choice is a number of layers of each other kind. chosen: int64[choices, other kinds], the choices in the order of
    ``numpy.ndindex``, so that choice a minus choice b has the number a - b. most: int64[p, choices], the layers of the
    main kind for which a rank with that choice still has room; negative if the choice alone exceeds the rank's room.
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


@kernel
def undominated_rows(rows: FloatArray, order: IndexArray, most: int) -> IndexArray:
    """Returns int64[..]: the rows, in this order, that no row before them is at most as large as in every column; after
    ``most`` of them it ends.

    order: int64[rows], so that no row is larger everywhere than one behind it. A row is compared with those kept only.
    """
    kept, count = np.empty(most, np.int64), 0
    for row in order:
        beaten = False
        for n in range(count):
            column = 0
            while column < rows.shape[1] and rows[kept[n], column] <= rows[row, column]:
                column += 1
            if column == rows.shape[1]:
                beaten = True
                break
        if not beaten:
            kept[count] = row
            count += 1
            if count == most:
                break
    return kept[:count].copy()
