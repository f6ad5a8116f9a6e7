"""Kernels: what any stage between two amounts of work costs at least, and the cheapest ways over such stages.

The work in front of a border falls into a *cell* of a grid. A *cell stage* stands for all stages whose two borders are
in two given cells. Vertices are labelled one after the other, as in front of a stage, inside or behind it
(``lattice.labelling``), and for each state of labels and each two cells the least cost is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel
from piper_ray.engine.kernels.cover import LabelMoves
from piper_ray.engine.kernels.types import FloatArray, IndexArray

NO_BORDER = -1
"""The cell in front of a first stage."""


class CellLimits(NamedTuple):
    """Which stages are looked at: the least and the most cells in front of their borders, and the most inside."""

    least_front: int
    most_front: int
    least_back: int
    most_back: int
    most_inside: int


class LabelRanges(NamedTuple):
    """How many cells may be labelled before each vertex and at the end, by state: ranges of those in front, and of
    those in front and inside together, for stages within limits. int64[n + 1, states] each."""

    front: IndexArray
    front_end: IndexArray
    both: IndexArray
    both_end: IndexArray
    limits: CellLimits
    figures: int  # how many are kept at once
    steps: int  # that ``least_of_stages`` takes


class CellFigures(NamedTuple):
    """The least figures of cell stages. Sizes: g groups of positions with the same limits and microbatches in flight,
    f cells in front of a stage, from the least of the group, and w cells inside it."""

    time_s: FloatArray  # float64[g, f, w]: forward and backward, of layers that fit
    quick_s: FloatArray  # float64[g, f, w]: the same, whether layers fit or not
    level_s: FloatArray  # float64[g, f, w]: as time_s, with the weight of its cells in place of that of its vertices
    sync_s: FloatArray  # float64[g, f, w]
    least_front: IndexArray  # int64[g]
    group: IndexArray  # int64[q]: which group a position is in
    cells: int  # in front of a border at most, and one more


class CellStages(NamedTuple):
    """Cell stages at positions, by position, then by the cell behind. A stage with all that is left is there twice: as
    the first stage of a plan, and with stages of no work in front of it.
    """

    behind: IndexArray  # int64[k]: the position, which is the number of stages behind
    back: IndexArray  # int64[k]: the cell of the border behind it: the work in front of that border
    front: IndexArray  # int64[k]: the cell of the border in front of it, or NO_BORDER
    time_s: FloatArray  # float64[k]: the least time of such a stage, forward and backward
    quick_s: FloatArray  # float64[k]: the same, whether layers fit or not
    level_s: FloatArray  # float64[k]: as time_s, with the weight of its cells in place of that of its vertices
    sync_s: FloatArray  # float64[k]: the least synchronisation


class KindFigures(NamedTuple):
    """Figures of cell stages by kind, cells in front and cells inside, one after the other. devices, width, start: of
    each kind, the devices of a stage, the numbers of cells inside, and where its figures begin."""

    spent_s: FloatArray
    level_s: FloatArray
    devices: FloatArray
    width: IndexArray
    start: IndexArray


class KindLimits(NamedTuple):
    """What a stage of each kind may spend, in seconds and in seconds of work, float64[kinds] each; and the price of a
    second of work."""

    budget_s: FloatArray
    work_s: FloatArray
    price: float


@kernel
def label_ranges(moves: LabelMoves, in_front: IndexArray, cells_of: IndexArray, limits: CellLimits) -> LabelRanges:
    """Returns the ranges from which stages within limits are reached. moves: of the labels of stages. in_front:
    int64[moves], 1 if the vertex is in front. cells_of: int64[n]."""
    n, all_cells, states = moves.order.size, int(cells_of.sum()), int(moves.states.max())
    # What the vertices to come add at least and at most, in front, and in front and inside together.
    least_f, most_f = np.full((n + 1, states), all_cells + 1), np.full((n + 1, states), -1)
    least_b, most_b = least_f.copy(), most_f.copy()
    least_f[n, 0], most_f[n, 0], least_b[n, 0], most_b[n, 0] = 0, 0, 0, 0
    for k in range(n - 1, -1, -1):
        size = cells_of[moves.order[k]]
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target = moves.source[move], moves.target[move]
            if most_f[k + 1, target] >= 0:
                more_f, more_b = in_front[move] * size, (in_front[move] + moves.inside[move]) * size
                least_f[k, source] = min(least_f[k, source], least_f[k + 1, target] + more_f)
                most_f[k, source] = max(most_f[k, source], most_f[k + 1, target] + more_f)
                least_b[k, source] = min(least_b[k, source], least_b[k + 1, target] + more_b)
                most_b[k, source] = max(most_b[k, source], most_b[k + 1, target] + more_b)
    front, front_end = np.full((n + 1, states), all_cells + 1), np.zeros((n + 1, states), np.int64)
    both, both_end = front.copy(), front_end.copy()
    front[0, 0], front_end[0, 0], both[0, 0], both_end[0, 0] = 0, 1, 0, 1
    most_width, steps = 1, 0
    for k in range(n):
        size = cells_of[moves.order[k]]
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target = moves.source[move], moves.target[move]
            if front[k, source] < front_end[k, source] and both[k, source] < both_end[k, source]:
                more_f, more_b = in_front[move] * size, (in_front[move] + moves.inside[move]) * size
                front[k + 1, target] = min(front[k + 1, target], front[k, source] + more_f)
                front_end[k + 1, target] = max(front_end[k + 1, target], front_end[k, source] + more_f)
                both[k + 1, target] = min(both[k + 1, target], both[k, source] + more_b)
                both_end[k + 1, target] = max(both_end[k + 1, target], both_end[k, source] + more_b)
        for state in range(moves.states[k + 1]):
            front[k + 1, state] = max(front[k + 1, state], limits.least_front - most_f[k + 1, state])
            front_end[k + 1, state] = min(front_end[k + 1, state], limits.most_front + 1 - least_f[k + 1, state])
            both[k + 1, state] = max(both[k + 1, state], limits.least_back - most_b[k + 1, state])
            both_end[k + 1, state] = min(both_end[k + 1, state], limits.most_back + 1 - least_b[k + 1, state])
            most_width = max(most_width, front_end[k + 1, state] - front[k + 1, state])
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source = moves.source[move]
            for cell in range(front[k, source], front_end[k, source]):
                first, end = max(0, both[k, source] - cell), both_end[k, source] - cell
                steps += max(0, min(end, limits.most_inside + 1) - first) + 1
    figures = 2 * states * most_width * (limits.most_inside + 3)
    return LabelRanges(front, front_end, both, both_end, limits, figures, steps)


@kernel
def least_of_stages(
    moves: LabelMoves, in_front: IndexArray, cells_of: IndexArray, cost: FloatArray, ranges: LabelRanges
) -> FloatArray:
    """Returns the least cost of a stage, float64[f, most_inside + 2], by the cells in front of it, from the least
    within the limits, and by those inside it; inf if there is none. The last column has stages of more cells than
    ``most_inside``, and their back may be beyond the limits.

    moves, in_front, cells_of: as in ``label_ranges``. cost: float64[moves].
    """
    n, most, limits = moves.order.size, ranges.limits.most_inside + 1, ranges.limits
    states, most_width = int(moves.states.max()), 1
    for k in range(n + 1):
        for state in range(states):
            most_width = max(most_width, ranges.front_end[k, state] - ranges.front[k, state])
    # Before a vertex and after it, by state, cells in front, and cells inside and one more; 0: no vertex is inside. Set
    # within the ranges.
    kept = np.empty((2, states, most_width, most + 2))
    kept[0, 0, 0, :] = np.inf
    kept[0, 0, 0, 0] = 0.0
    for k in range(n):
        old, new, size = k & 1, 1 - (k & 1), cells_of[moves.order[k]]
        for state in range(moves.states[k + 1]):
            least_f = ranges.front[k + 1, state]
            for cell in range(least_f, ranges.front_end[k + 1, state]):
                after = kept[new, state, cell - least_f]
                after[0] = np.inf
                first = min(most, max(0, ranges.both[k + 1, state] - cell))
                for inside in range(first, min(most, ranges.both_end[k + 1, state] - 1 - cell) + 1):
                    after[inside + 1] = np.inf
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            source, target, more_s = moves.source[move], moves.target[move], cost[move]
            joins, shift = moves.inside[move] * size, in_front[move] * size
            from_f, to_f = ranges.front[k, source], ranges.front[k + 1, target]
            for cell in range(
                max(from_f, to_f - shift), min(ranges.front_end[k, source], ranges.front_end[k + 1, target] - shift)
            ):
                before, after = kept[old, source, cell - from_f], kept[new, target, cell + shift - to_f]
                target_first = max(0, ranges.both[k + 1, target] - cell - shift)
                target_end = ranges.both_end[k + 1, target] - cell - shift
                if moves.inside[move] == 0:
                    after[0] = min(after[0], before[0] + more_s)
                elif target_first <= joins < target_end:
                    at = min(most, joins) + 1
                    after[at] = min(after[at], before[0] + more_s)
                first = min(most, max(0, ranges.both[k, source] - cell, target_first - joins)) + 1
                end = min(most + 1, ranges.both_end[k, source] - cell, target_end - joins) + 1
                within = min(end, most + 1 - joins)
                for inside in range(first, within):
                    after[inside + joins] = min(after[inside + joins], before[inside] + more_s)
                for inside in range(max(first, within), end):
                    after[most + 1] = min(after[most + 1], before[inside] + more_s)
    found = np.full((limits.most_front - limits.least_front + 1, most + 1), np.inf)
    least_f, last = ranges.front[n, 0], n & 1
    for cell in range(least_f, ranges.front_end[n, 0]):
        first = min(most, max(0, ranges.both[n, 0] - cell))
        for inside in range(first, min(most, ranges.both_end[n, 0] - 1 - cell) + 1):
            found[cell - limits.least_front, inside] = kept[last, 0, cell - least_f, inside + 1]
    return found


@kernel
def stages_within(figures: CellFigures, most_s: float, only: int) -> CellStages:
    """Returns the cell stages that take at most ``most_s``. only: the number of stages of a plan; 0: any."""
    positions, fronts, sizes = figures.group.size, figures.time_s.shape[1], figures.time_s.shape[2]
    behind = np.empty(0, np.int64)
    back, front, inside = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    for is_counted in (False, True):
        found = 0
        for q in range(positions):
            times_s, least_front = figures.time_s[figures.group[q]], figures.least_front[figures.group[q]]
            for cell in range(least_front, figures.cells):
                for size in range(max(0, cell - least_front - fronts + 1), min(sizes, cell - least_front + 1)):
                    if times_s[cell - size - least_front, size] > most_s:
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
    time_s, quick_s = np.empty(count), np.empty(count)
    level_s, sync_s = np.empty(count), np.empty(count)
    for k in range(count):
        group, size = figures.group[behind[k]], inside[k]
        cell = back[k] - size - figures.least_front[group]
        time_s[k], quick_s[k] = figures.time_s[group, cell, size], figures.quick_s[group, cell, size]
        level_s[k], sync_s[k] = figures.level_s[group, cell, size], figures.sync_s[group, cell, size]
    return CellStages(behind, back, front, time_s, quick_s, level_s, sync_s)


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


@inlined_kernel
def _cost_of_stage(k: int, at: int, kinds: KindFigures, limits: KindLimits) -> float:
    """Returns the devices of a stage, less the price of the work that it has beyond that of its cells at most; inf if
    it does not keep the limits."""
    if kinds.spent_s[at] > limits.budget_s[k]:
        return np.inf
    if limits.price == 0.0:
        return float(kinds.devices[k])
    return float(kinds.devices[k] - limits.price * (limits.work_s[k] - kinds.level_s[at]))


@inlined_kernel
def _gains_without_cells(cell: int, kinds: KindFigures, limits: KindLimits) -> bool:
    """Whether a stage without cells costs less than nothing. A plan may have any number of these."""
    for k in range(kinds.width.size):
        at = kinds.start[k] + cell * kinds.width[k]
        if kinds.width[k] > 0 and _cost_of_stage(k, at, kinds, limits) < 0.0:
            return True
    return False


@kernel
def cheapest_in_front(kinds: KindFigures, limits: KindLimits, size: int) -> FloatArray:
    """Returns float64[size]: the least cost of stages in front of a border, by the cells in front of it; inf if there
    are none, -inf if any number of them may cost less than nothing."""
    found = np.full(size, np.inf)
    found[0] = 0.0
    for cell in range(size):
        if found[cell] == np.inf:
            continue
        if _gains_without_cells(cell, kinds, limits):
            found[cell] = -np.inf
        for k in range(kinds.width.size):
            at = kinds.start[k] + cell * kinds.width[k]
            for inside in range(1, min(kinds.width[k], size - cell)):
                cost = _cost_of_stage(k, at + inside, kinds, limits)
                if cost < np.inf:
                    found[cell + inside] = min(found[cell + inside], found[cell] + cost)
    return found


@kernel
def cheapest_with_each_kind(kinds: KindFigures, limits: KindLimits, size: int) -> FloatArray:
    """Returns float64[kinds]: the least cost of all stages of a plan that has a stage of the kind; as above."""
    ahead, behind = cheapest_in_front(kinds, limits, size), np.full(size, np.inf)
    behind[size - 1] = 0.0
    found = np.full(kinds.width.size, np.inf)
    for cell in range(size - 1, -1, -1):
        for k in range(kinds.width.size):
            at = kinds.start[k] + cell * kinds.width[k]
            for inside in range(1, min(kinds.width[k], size - cell)):
                cost = _cost_of_stage(k, at + inside, kinds, limits)
                if cost < np.inf and behind[cell + inside] < np.inf:
                    behind[cell] = min(behind[cell], cost + behind[cell + inside])
                    if ahead[cell] < np.inf:
                        found[k] = min(found[k], ahead[cell] + cost + behind[cell + inside])
        if behind[cell] < np.inf and _gains_without_cells(cell, kinds, limits):
            behind[cell] = -np.inf
        for k in range(kinds.width.size):
            if kinds.width[k] > 0 and ahead[cell] < np.inf and behind[cell] < np.inf:
                cost = _cost_of_stage(k, kinds.start[k] + cell * kinds.width[k], kinds, limits)
                if cost < np.inf:
                    found[k] = min(found[k], ahead[cell] + cost + behind[cell])
    return found
