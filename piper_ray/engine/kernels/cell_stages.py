"""Kernels: what any stage between two amounts of work costs at least, and the cheapest ways over such stages.

The work in front of a border falls into a *cell* of a grid. A *cell stage* stands for all stages whose two borders are
in two given cells. Vertices are labelled one after the other, as in front of a stage, inside or behind it
(``lattice.labelling``), and for each state of labels and each two cells the least cost is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.cover import LabelMoves
from piper_ray.engine.kernels.types import FloatArray, IndexArray

NO_BORDER = -1
"""The cell in front of a first stage."""


class CellStages(NamedTuple):
    """Cell stages at positions, by position, then by the cell behind. A stage with all that is left is there twice: as
    the first stage of a plan, and with stages of no work in front of it.
    """

    behind: IndexArray  # int64[k]: the position, which is the number of stages behind
    back: IndexArray  # int64[k]: the cell of the border behind it: the work in front of that border
    front: IndexArray  # int64[k]: the cell of the border in front of it, or NO_BORDER
    time_s: FloatArray  # float64[k]: the least time of such a stage, forward and backward
    forward_s: FloatArray  # float64[k]: the least forward seconds
    backward_s: FloatArray  # float64[k]: the least backward seconds
    sync_s: FloatArray  # float64[k]: the least synchronisation


class CellFigures(NamedTuple):
    """The least figures of cell stages. Sizes: c cells in front of a stage, w cells inside it, y numbers of
    microbatches in flight. The last column has all stages of w - 1 cells or more; if w - 1 are not all cells, these
    take too long to be listed.
    """

    time_s: FloatArray  # float64[y, c, w]
    forward_s: FloatArray  # float64[c, w]
    backward_s: FloatArray  # float64[c, w]
    sync_s: FloatArray  # float64[c, w]
    in_flight: IndexArray  # int64[q]: which y a position has


@kernel
def least_of_stages(
    moves: LabelMoves, in_front: IndexArray, cells_of: IndexArray, cost: FloatArray, most: int
) -> tuple[FloatArray, int]:
    """Returns the least cost of a stage, float64[c, most + 1], by the cells in front of it and those inside it, where
    the last column has stages of ``most`` cells and more; inf if there is none. Also returns the steps taken.

    moves: of the labels of stages. in_front: int64[moves], 1 if the vertex is in front. cells_of: int64[n]. cost:
    float64[moves].
    """
    n, cells, states = moves.order.size, int(cells_of.sum()) + 1, int(moves.states.max())
    # Before a vertex and after it, by state: ranges of the cells in front, and of those in front and inside together.
    front, front_end = np.zeros((2, states), np.int64), np.zeros((2, states), np.int64)
    both, both_end = np.zeros((2, states), np.int64), np.zeros((2, states), np.int64)
    # By state, cells in front, and cells inside and one more; 0: no vertex is inside. Set where there are any.
    kept = np.empty((2, states, cells, most + 2))
    kept[0, 0, 0, :] = np.inf
    kept[0, 0, 0, 0] = 0.0
    front_end[0, 0], both_end[0, 0], steps = 1, 1, 0
    for k in range(n):
        old, new, size = k & 1, 1 - (k & 1), cells_of[moves.order[k]]
        for state in range(moves.states[k + 1]):
            front[new, state], front_end[new, state] = cells, 0
            both[new, state], both_end[new, state] = cells, 0
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target = moves.source[move], moves.target[move]
            if front[old, source] < front_end[old, source]:
                more = in_front[move] * size
                front[new, target] = min(front[new, target], front[old, source] + more)
                front_end[new, target] = max(front_end[new, target], front_end[old, source] + more)
                more += moves.inside[move] * size
                both[new, target] = min(both[new, target], both[old, source] + more)
                both_end[new, target] = max(both_end[new, target], both_end[old, source] + more)
        for state in range(moves.states[k + 1]):
            for cell in range(front[new, state], front_end[new, state]):
                kept[new, state, cell, 0] = np.inf
                first = min(most, max(0, both[new, state] - cell))
                for inside in range(first, min(most, both_end[new, state] - 1 - cell) + 1):
                    kept[new, state, cell, inside + 1] = np.inf
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target, more_s = moves.source[move], moves.target[move], cost[move]
            joins = moves.inside[move] * size
            for cell in range(front[old, source], front_end[old, source]):
                before, after = kept[old, source, cell], kept[new, target, cell + in_front[move] * size]
                at = min(most, joins) + 1 if moves.inside[move] == 1 else 0
                after[at] = min(after[at], before[0] + more_s)
                first = min(most, max(0, both[old, source] - cell)) + 1
                end = min(most, both_end[old, source] - 1 - cell) + 2
                within = min(end, most + 2 - joins)
                for inside in range(first, within):
                    after[inside + joins] = min(after[inside + joins], before[inside] + more_s)
                for inside in range(max(first, within), end):
                    after[most + 1] = min(after[most + 1], before[inside] + more_s)
                steps += max(0, end - first) + 1
    found = np.full((cells, most + 1), np.inf)
    last = n & 1
    for cell in range(front[last, 0], front_end[last, 0]):
        first = min(most, max(0, both[last, 0] - cell))
        for inside in range(first, min(most, both_end[last, 0] - 1 - cell) + 1):
            found[cell, inside] = kept[last, 0, cell, inside + 1]
    return found, steps


@kernel
def stages_within(figures: CellFigures, most_s: float, only: int) -> CellStages:
    """Returns the cell stages that take at most ``most_s``. only: the number of stages of a plan; 0: any."""
    positions, cells, sizes = figures.in_flight.size, figures.forward_s.shape[0], figures.forward_s.shape[1]
    behind = np.empty(0, np.int64)
    back, front, inside = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    for is_counted in (False, True):
        found = 0
        for q in range(positions):
            times_s = figures.time_s[figures.in_flight[q]]
            for cell in range(cells):
                for size in range(min(sizes, cell + 1)):
                    if times_s[cell - size, size] > most_s:
                        continue
                    for at in (cell - size, NO_BORDER):
                        if at == NO_BORDER and (size < cell or (only > 0 and q + 1 != only)):
                            continue
                        if at != NO_BORDER and q + 1 == positions:
                            continue
                        if is_counted:
                            behind[found], back[found], front[found], inside[found] = q, cell, at, size
                        found += 1
        if not is_counted:
            behind, back = np.empty(found, np.int64), np.empty(found, np.int64)
            front, inside = np.empty(found, np.int64), np.empty(found, np.int64)
    count = behind.size
    time_s, forward_s, backward_s, sync_s = np.empty(count), np.empty(count), np.empty(count), np.empty(count)
    for k in range(count):
        cell, size = back[k] - inside[k], inside[k]
        time_s[k] = figures.time_s[figures.in_flight[behind[k]], cell, size]
        forward_s[k], backward_s[k] = figures.forward_s[cell, size], figures.backward_s[cell, size]
        sync_s[k] = figures.sync_s[cell, size]
    return CellStages(behind, back, front, time_s, forward_s, backward_s, sync_s)


@kernel
def cheapest_cell_ways(
    stages: CellStages, cost: FloatArray, positions: int, cells: int
) -> tuple[FloatArray, FloatArray, IndexArray]:
    """Returns for each stage the least cost of the stages behind it and of those in front of it, float64[k] each; inf
    if no way leads there; and the stages of the cheapest way, from the back, int64[..], none if there is no way."""
    count = stages.behind.size
    behind_s, ahead_s = np.full(count, np.inf), np.full(count, np.inf)
    reached, came_from = np.full((positions + 1, cells), np.inf), np.full((positions + 1, cells), -1, np.int64)
    reached[0, cells - 1] = 0.0
    last, least = -1, np.inf
    for k in range(count):
        q, to_here = stages.behind[k], reached[stages.behind[k], stages.back[k]]
        behind_s[k] = to_here
        whole = to_here + cost[k]
        if stages.front[k] == NO_BORDER:
            if whole < least:
                last, least = k, whole
        elif whole < reached[q + 1, stages.front[k]]:
            reached[q + 1, stages.front[k]], came_from[q + 1, stages.front[k]] = whole, k
    left = np.full((positions + 1, cells), np.inf)
    for k in range(count - 1, -1, -1):
        q, front = stages.behind[k], stages.front[k]
        ahead_s[k] = 0.0 if front == NO_BORDER else left[q + 1, front]
        left[q, stages.back[k]] = min(left[q, stages.back[k]], cost[k] + ahead_s[k])
    way = np.empty(0 if last < 0 else stages.behind[last] + 1, np.int64)
    for position in range(way.size - 1, -1, -1):
        way[position] = last
        last = came_from[position, stages.back[last]]
    return behind_s, ahead_s, way
