"""Kernels: the cheapest borders at each amount of work, and the least cost of a way through them by prices of
positions.

If all downsets are too many, there is no lattice. But the work in front of a downset falls into a cell of a grid, and
the cheapest border of all downsets of a cell can be found without listing them: vertices are labelled one after the
other, as in front or behind (``lattice.labelling``), and for each state of labels and each cell the least of all
labellings that lead there is kept. A way from cell to cell costs no more than any plan whose borders are in these
cells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.cover import LabelMoves
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray

_ROUNDING = 4e-9
"""Relative rounding error of sums of seconds."""


class BorderCells(NamedTuple):
    """Downsets by the work in front of them. Sizes: c cells, ascending; l lengths of edges; g groups of cells.

    An edge is short if no stage beyond a limit lies between its ends; the others are long. Charges are for each
    direction.
    """

    from_s: FloatArray  # float64[c]: the least seconds in front of downsets of a cell; inf: it has none
    to_s: FloatArray  # float64[c]: the most
    in_s: FloatArray  # float64[c, l]: the least that the stage behind a border pays for short edges that cross it
    out_s: FloatArray  # float64[c, l]: the same for the stage in front
    short_s: FloatArray  # float64[l]: limits of short edges, ascending
    group: IndexArray  # int64[c]: of each cell
    # float64[l + 1, g + 1, g + 1]: what a stage surely pays for long edges, by the border in front of it and the one
    # behind it, where the last one is none; [0]: for all edges.
    long_s: FloatArray
    # float64[g + 1, g + 1]: the least that any stage between such borders pays, 0 if that is not known; inf: there is
    # no stage between them.
    stage_s: FloatArray


class WayPrices(NamedTuple):
    """Prices and limits of ways at their positions. Sizes: q positions, c cells."""

    passes: FloatArray  # float64[q]: of a second in each direction
    room_s: FloatArray  # float64[q]: of a device's memory
    begin_s: float  # of all layers at the last position
    border_s: FloatArray  # float64[q, c]: the least extra cost of the layers in front of a border behind it
    first_s: FloatArray  # float64[q, c]: the additional price of a first stage's synchronisation
    held: FloatArray  # float64[q, c, 2]: the least and the most held in front, as parts of a device's memory
    held_at_all: FloatArray  # float64[q]: of all layers
    often: FloatArray  # float64[q]: how often a stage counts in addition to the work of all
    microbatches: int
    stages: int  # the only number of stages; 0: any


@kernel
def cheapest_borders(
    moves: LabelMoves, in_front: IndexArray, cells_of: IndexArray, work_s: FloatArray, charge_s: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns for each cell the least and the most work in front, float64[c] each, and the least charges, float64[c,
    k].

    in_front: int64[moves], 1 if the vertex is in front. cells_of: int64[n], the number of cells that a vertex counts
    there; work_s: float64[n], its seconds. charge_s: float64[moves, k].
    """
    n, kinds = moves.order.size, charge_s.shape[1]
    cells, states = int(cells_of.sum()) + 1, int(moves.states.max())
    # Before a vertex and after it, by state: a range of cells, and in each the least and most work, and charges.
    first, end = np.zeros((2, states), np.int64), np.zeros((2, states), np.int64)
    kept = np.full((2, states, cells, kinds + 2), np.inf)
    for column in range(kinds + 2):
        kept[0, 0, 0, column] = 0.0
    end[0, 0] = 1
    for k in range(n):
        old, new = k & 1, 1 - (k & 1)
        v = moves.order[k]
        for state in range(states):
            first[new, state], end[new, state] = cells, 0
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target, shift = moves.source[move], moves.target[move], in_front[move] * cells_of[v]
            if end[old, source] > first[old, source]:
                first[new, target] = min(first[new, target], first[old, source] + shift)
                end[new, target] = max(end[new, target], end[old, source] + shift)
        for state in range(moves.states[k + 1]):
            for cell in range(first[new, state], end[new, state]):
                for column in range(kinds + 2):
                    kept[new, state, cell, column] = -np.inf if column == 1 else np.inf
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target, shift = moves.source[move], moves.target[move], in_front[move] * cells_of[v]
            more_s = in_front[move] * work_s[v]
            for cell in range(first[old, source], end[old, source]):
                before, after = kept[old, source, cell], kept[new, target, cell + shift]
                if before[0] == np.inf:
                    continue
                after[0] = min(after[0], before[0] + more_s)
                after[1] = max(after[1], before[1] + more_s)
                for kind in range(kinds):
                    after[kind + 2] = min(after[kind + 2], before[kind + 2] + charge_s[move, kind])
    least_s, most_s, found = np.full(cells, np.inf), np.full(cells, np.inf), np.full((cells, kinds), np.inf)
    last = n & 1
    for cell in range(first[last, 0], end[last, 0]):
        least_s[cell], most_s[cell] = kept[last, 0, cell, 0], kept[last, 0, cell, 1]
        for kind in range(kinds):
            found[cell, kind] = kept[last, 0, cell, kind + 2]
    return least_s, most_s, found


@kernel
def cheapest_border_way(cells: BorderCells, prices: WayPrices, limit: float) -> tuple[float, IndexArray, FloatArray]:
    """Returns a lower bound on the cost of plans whose batch takes at most ``limit``, inf if there are none, and the
    way that costs it: int64[k + 1], the border behind the last stage, which is the number of cells, the cells of the
    borders in front of it, and -1; and float64[k], what each stage pays for what crosses its borders, in each
    direction."""
    count, none = cells.from_s.size, cells.long_s.shape[1] - 1
    all_s, limit = cells.to_s[count - 1] * (1.0 - _ROUNDING), limit * (1.0 + _ROUNDING)
    most_s = np.empty(count)  # in front of any border up to a cell
    so_far_s = -np.inf
    for cell in range(count):
        if cells.from_s[cell] < np.inf:
            so_far_s = max(so_far_s, cells.to_s[cell])
        most_s[cell] = so_far_s
    # By the border: the cost of the stages behind it, including their borders. The last border is behind all layers.
    cost_s, paid_s = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
    cost_s[count], paid_s[count] = prices.begin_s, 0.0
    came_from = np.zeros((prices.passes.size, count), np.int32)
    crossed_s = np.zeros((prices.passes.size, count))
    best_s, first, first_back, first_crossing_s = np.inf, -1, -1, 0.0
    for behind in range(prices.passes.size):
        next_s, next_paid_s = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
        for back in range(count + 1):
            if cost_s[back] == np.inf:
                continue
            is_last, at = back == count, min(back, count - 1)
            from_s = all_s if is_last else cells.from_s[back]
            held = prices.held_at_all[behind] if is_last else prices.held[behind, back, 0]
            group, length = none if is_last else cells.group[back], 0
            for front in range(at, -2, -1):  # -1: no border is in front
                if front >= 0:
                    if prices.microbatches * (from_s - most_s[front]) > limit:
                        break
                    if cells.from_s[front] == np.inf or held - prices.held[behind, front, 1] > 1.0:
                        continue
                elif held > 1.0 or (prices.stages > 0 and prices.stages != behind + 1):
                    continue
                whole_s = max(0.0, from_s - cells.to_s[front]) if front >= 0 else from_s
                while length < cells.short_s.size and whole_s > cells.short_s[length]:
                    length += 1
                while length > 0 and whole_s <= cells.short_s[length - 1]:
                    length -= 1
                crossing_s = cells.long_s[length, cells.group[front] if front >= 0 else none, group]
                if length > 0 and front >= 0:
                    crossing_s += cells.in_s[front, length - 1]
                if length > 0 and not is_last:
                    crossing_s += cells.out_s[back, length - 1]
                crossing_s = max(crossing_s, cells.stage_s[cells.group[front] if front >= 0 else none, group])
                stage_s = whole_s + 2.0 * crossing_s
                among_s = paid_s[back] + 2.0 * crossing_s
                left_s = cells.from_s[front] if front >= 0 else 0.0
                if prices.microbatches * stage_s + left_s > limit:
                    continue
                if all_s + among_s + prices.often[behind] * stage_s > limit:
                    continue
                reached_s = cost_s[back] + prices.passes[behind] * crossing_s - prices.room_s[behind]
                if front < 0:
                    if reached_s + prices.first_s[behind, at] < best_s:
                        best_s = reached_s + prices.first_s[behind, at]
                        first, first_back, first_crossing_s = behind, back, crossing_s
                else:
                    if reached_s < next_s[front]:
                        next_s[front], came_from[behind, front], crossed_s[behind, front] = reached_s, back, crossing_s
                    next_paid_s[front] = min(next_paid_s[front], among_s)
        if behind + 1 < prices.passes.size:
            next_s[:count] += prices.border_s[behind + 1]
        cost_s, paid_s = next_s, next_paid_s
    way, paid = np.full(first + 2, -1, np.int64), np.empty(first + 1)
    if first >= 0:
        way[first], paid[first] = first_back, first_crossing_s
    for behind in range(first - 1, -1, -1):
        way[behind], paid[behind] = came_from[behind, way[behind + 1]], crossed_s[behind, way[behind + 1]]
    return best_s, way, paid


@kernel
def cheapest_downsets(
    moves: LabelMoves, in_front: IndexArray, cells_of: IndexArray, charge_s: FloatArray
) -> tuple[FloatArray, BitArray]:
    """Returns for each cell the least charge of a border, float64[c], inf if it has none, and a downset with that
    border, uint64[c, words]. charge_s: float64[moves]; the others as in ``cheapest_borders``.
    """
    n, words = moves.order.size, (moves.order.size + 63) // 64
    cells, states = int(cells_of.sum()) + 1, int(moves.states.max())
    least_s = np.full((states, cells), np.inf)
    least_s[0, 0] = 0.0
    chosen = np.full((n, states, cells), -1, np.int32)
    for k in range(n):
        next_s = np.full((states, cells), np.inf)
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target, shift = moves.source[move], moves.target[move], in_front[move] * cells_of[moves.order[k]]
            for cell in range(cells - shift):
                reached_s = least_s[source, cell] + charge_s[move]
                if reached_s < next_s[target, cell + shift]:
                    next_s[target, cell + shift] = reached_s
                    chosen[k, target, cell + shift] = move
        least_s = next_s
    bits = np.zeros((cells, words), np.uint64)
    for cell in range(cells):
        if least_s[0, cell] == np.inf:
            continue
        state, at = 0, cell
        for k in range(n - 1, -1, -1):
            move, v = chosen[k, state, at], moves.order[k]
            if in_front[move] == 0:
                bits[cell, v >> 6] |= np.uint64(1) << np.uint64(v & 63)
            state, at = moves.source[move], at - in_front[move] * cells_of[v]
    return least_s[0].copy(), bits
