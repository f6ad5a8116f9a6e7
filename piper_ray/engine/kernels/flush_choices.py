"""Kernels: the seconds that a stage may take: undominated (forward, backward, synchronisation) of its TMPC choices."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.arrays import stable_order, twice
from piper_ray.compiled.jit import inner_kernel, kernel
from piper_ray.engine.kernels.bounds import has, members
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask
from piper_ray.engine.kernels.knapsack import TOO_HARD, least_cost
from piper_ray.engine.kernels.types import FloatArray, IndexArray, Items, StageKey

FEW = 128
MANY = 4096
"""Largest numbers of partial choices: while tails are grown, and while plans are enumerated. If there are more,
neighbours by time are merged into one that is as good as either in every figure. The sum of both passes is a figure of
its own, since it counts once for each microbatch, and each pass alone hardly more than once.
"""

_MANY_LAYERS = 100
"""From this number of layers of a stage on, an early plan has choices that may take a little more than the least: the
least ones of hundreds of layers that all differ take tenths of a second."""

EXACT = 0
MERGED = 1
NONE_FITS = 2

StageItems = tuple[IndexArray, IndexArray, FloatArray]


@kernel
def stage_items(stage: StageKey, in_flight: int, tables: FlushTables, task: FlushTask) -> StageItems:
    """Returns the layers of a stage, ascending, and their options in the stage.

    Vertices int64[k]; the first option of each, int64[k + 1], into float64[options, 4]: forward and backward seconds
    including what crosses the border, weights and memory bytes on each device.
    """
    d, r = task.data_parallel_degree, stage.variant
    outer, inner = tables.bits[stage.outer], tables.bits[stage.inner]
    vertices = members(outer, inner)
    start = np.zeros(vertices.size + 1, np.int64)
    for k in range(vertices.size):
        v = vertices[k]
        start[k + 1] = start[k] + tables.option_start[r, v + 1] - tables.option_start[r, v]
    figures = np.empty((start[-1], 4))
    at = 0
    for v in vertices:
        for o in range(tables.option_start[r, v], tables.option_start[r, v + 1]):
            charge = tables.charge_start[o]
            crossing_s = 0.0
            for e in range(tables.in_start[v], tables.in_start[v + 1]):
                if not has(outer, tables.edge_tail[tables.in_edge[e]]):
                    crossing_s += tables.charge_s[charge]
                charge += 1
            for e in range(tables.out_start[v], tables.out_start[v + 1]):
                if has(inner, tables.edge_head[tables.out_edge[e]]):
                    crossing_s += tables.charge_s[charge]
                charge += 1
            figures[at, 0] = tables.option_forward_s[o] + crossing_s
            figures[at, 1] = tables.option_backward_s[o] + crossing_s
            figures[at, 2] = tables.option_weights[o]
            figures[at, 3] = tables.option_activation[o] * in_flight + tables.option_fixed[o]
            figures[at, 3] += tables.option_shared[o] / d
            at += 1
    return vertices, start, figures


@kernel
def least_time_choice(
    start: IndexArray, figures: FloatArray, memory_bytes: float, most_s: float, is_exact: bool, choice: IndexArray
) -> float:
    """Returns the least forward and backward seconds, in sum, of a choice that fits, with the choice in ``choice``; inf
    if none of at most ``most_s`` fits, -1 if that is too hard to decide.

    If it need not be exact, the greedy choice along the layers' hulls is taken where there are many layers. It takes at
    most its last step more than the linear relaxation.
    """
    time_s = figures[:, 0] + figures[:, 1]
    memory = figures[:, 3].copy()
    items = Items(start, time_s, memory)
    if not is_exact and start.size > _MANY_LAYERS:
        found = least_cost(items, memory_bytes, np.inf, True, choice)
        return found if found <= most_s else np.inf
    found = least_cost(items, memory_bytes, most_s, False, choice)
    if found == TOO_HARD:
        return -1.0
    return found


@kernel
def choice_front(
    start: IndexArray, figures: FloatArray, memory_bytes: float, most_s: float, most: int, merges: bool
) -> tuple[int, FloatArray, IndexArray, IndexArray, IndexArray]:
    """Returns the undominated choices that fit and take at most ``most_s`` forward and backward together, by ascending
    sum. At most ``most`` partial choices are kept; if there are more, they are merged, or if not ``merges`` the result
    is MERGED without rows.

    The result is EXACT, MERGED (then some rows are better than any choice) or NONE_FITS; float64[rows, 4] of forward
    and backward seconds, weights, and seconds of both passes, which exceed the sum where rows were merged; and, to read
    off the choices, the last partial choice of each row, then for all partial choices the previous one and the option
    taken (-1 at the beginning).
    """
    layers = start.size - 1
    least_rest, least_rest_s = np.zeros(layers + 1), np.zeros(layers + 1)
    for k in range(layers - 1, -1, -1):
        least, least_s = np.inf, np.inf
        for o in range(start[k], start[k + 1]):
            least = min(least, figures[o, 3])
            least_s = min(least_s, figures[o, 0] + figures[o, 1])
        least_rest[k] = least_rest[k + 1] + least
        least_rest_s[k] = least_rest_s[k + 1] + least_s
    status = EXACT
    before, taken = np.full(1024, -1, np.int64), np.full(1024, -1, np.int64)
    used = 1
    states = np.zeros((1, 5))
    ids = np.zeros(1, np.int64)
    for k in range(layers):
        width = start[k + 1] - start[k]
        grown = np.empty((states.shape[0] * width, 5))
        source, option = np.empty(grown.shape[0], np.int64), np.empty(grown.shape[0], np.int64)
        count = 0
        last = k == layers - 1
        for s in range(states.shape[0]):
            for o in range(start[k], start[k + 1]):
                if states[s, 3] + figures[o, 3] + least_rest[k + 1] > memory_bytes:
                    continue
                taken_s = states[s, 4] + figures[o, 0] + figures[o, 1]
                if taken_s + least_rest_s[k + 1] > most_s:
                    continue
                for column in range(4):
                    grown[count, column] = states[s, column] + figures[o, column]
                grown[count, 4] = taken_s
                if last:
                    grown[count, 3] = 0.0
                source[count] = ids[s]
                option[count] = o
                count += 1
        if count == 0:
            return NONE_FITS, np.empty((0, 4)), np.empty(0, np.int64), before, taken
        kept = _undominated(grown, count)
        if kept.size > most:
            status = MERGED
            if not merges:
                return status, np.empty((0, 4)), np.empty(0, np.int64), before[:used], taken[:used]
        while kept.size > most:
            kept = _merge_neighbours(grown, kept)
        while used + kept.size > before.size:
            before = twice(before)
            taken = twice(taken)
        states = np.empty((kept.size, 5))
        ids = np.empty(kept.size, np.int64)
        for n in range(kept.size):
            for column in range(5):
                states[n, column] = grown[kept[n], column]
            before[used] = source[kept[n]]
            taken[used] = option[kept[n]]
            ids[n] = used
            used += 1
    rows = np.empty((ids.size, 4))
    for n in range(ids.size):
        rows[n, 0], rows[n, 1], rows[n, 2], rows[n, 3] = states[n, 0], states[n, 1], states[n, 2], states[n, 4]
    return status, rows, ids, before, taken


@inner_kernel
def _undominated(rows: FloatArray, count_of_rows: int) -> IndexArray:
    """Returns the indices of rows that no other dominates in all five figures, by the last figure. The first of equal
    ones stays; rows that differ only by rounding are equal."""
    sums = np.empty(count_of_rows)
    for x in range(count_of_rows):
        sums[x] = rows[x, 4]
    order = stable_order(sums, count_of_rows)
    kept = np.empty(order.size, np.int64)
    count = 0
    for x in order:
        beaten = False
        for n in range(count):
            y = kept[n]
            if (
                rows[y, 0] <= rows[x, 0] * (1.0 + 1e-14)
                and rows[y, 1] <= rows[x, 1] * (1.0 + 1e-14)
                and rows[y, 2] <= rows[x, 2] * (1.0 + 1e-14)
                and rows[y, 3] <= rows[x, 3] * (1.0 + 1e-14)
            ):
                beaten = True
                break
        if not beaten:
            kept[count] = x
            count += 1
    return kept[:count].copy()


@inner_kernel
def _merge_neighbours(rows: FloatArray, kept: IndexArray) -> IndexArray:
    """Merges each two rows into the one of less memory, with the better of both figures."""
    merged = np.empty((kept.size + 1) // 2, np.int64)
    for n in range(merged.size):
        one = kept[2 * n]
        if 2 * n + 1 < kept.size:
            other = kept[2 * n + 1]
            if rows[other, 3] < rows[one, 3]:
                one, other = other, one
            for column in range(5):
                rows[one, column] = min(rows[one, column], rows[other, column])
        merged[n] = one
    return merged
