"""Kernels: what any set of vertices costs at least by its number of cells, and what several sets cost together."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.cover import LabelMoves
from piper_ray.engine.kernels.types import FloatArray, IndexArray


@kernel
def least_of_sets(moves: LabelMoves, cells_of: IndexArray, cost: FloatArray) -> FloatArray:
    """Returns float64[cells + 1]: the least sum of costs of the moves that label a set of vertices, by the number of
    cells inside the set; inf if there is no such set. cells_of: int64[n]. cost: float64[moves]."""
    n, states, all_cells = moves.order.size, int(moves.states.max()), int(cells_of.sum())
    kept = np.full((2, states, all_cells + 1), np.inf)
    kept[0, 0, 0] = 0.0
    most = 0  # cells so far
    for k in range(n):
        old, new, size = k & 1, 1 - (k & 1), cells_of[moves.order[k]]
        for state in range(moves.states[k + 1]):
            for inside in range(most + size + 1):
                kept[new, state, inside] = np.inf
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            before, after, more = kept[old, moves.source[move]], kept[new, moves.target[move]], cost[move]
            joins = moves.inside[move] * size
            for inside in range(most + 1):
                after[inside + joins] = min(after[inside + joins], before[inside] + more)
        most += size
    found: FloatArray = kept[n & 1, 0].copy()
    return found


@kernel
def least_of_parts(cost: FloatArray, parts: int) -> float:
    """Returns the least that this many sets cost together if they have all cells. cost: float64[cells + 1], of a set,
    by its cells."""
    size = cost.size
    found, power = np.full(size, np.inf), cost.copy()
    found[0] = 0.0
    left = parts
    while left > 0:
        for is_square in (False, True):  # of the sets whose number is a power of two
            if not is_square and left & 1 == 0:
                continue
            one = power if is_square else found
            both = np.full(size, np.inf)
            for a in range(size):
                for b in range(size - a):
                    both[a + b] = min(both[a + b], one[a] + power[b])
            if is_square:
                power = both
            else:
                found = both
        left >>= 1
    return float(found[size - 1])
