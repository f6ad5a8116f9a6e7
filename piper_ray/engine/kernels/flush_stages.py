"""Kernels: what one stage takes and holds at least, and its choices of TMPCs, for one (d, t)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, inner_kernel
from piper_ray.engine.kernels.flush_choices import choice_front, least_time_choice, stage_items
from piper_ray.engine.kernels.flush_paths import Figures
from piper_ray.engine.kernels.flush_types import (
    FAST_ACTIVATION,
    FAST_FIXED,
    FAST_FORWARD_S,
    FAST_SHARED,
    FASTEST,
    GPIPE,
    LEAST_ACTIVATION,
    LEAST_BACKWARD_S,
    LEAST_FIXED,
    LEAST_FORWARD_S,
    LEAST_S,
    LEAST_SHARED,
    LEAST_TIME,
    LEAST_WEIGHTS,
    MIXED,
    NO_CHOICE,
    SLACK,
    TWO_BW,
    FlushTables,
    FlushTask,
)
from piper_ray.engine.kernels.types import FloatArray

NO_ROW = -4
"""In place of a choice: the stage does not fit."""


class LeastFigures(NamedTuple):
    """What a stage takes at least, in seconds; each figure for itself."""

    time_s: float
    forward_s: float
    backward_s: float
    sync_s: float
    crossing_s: float  # of the edges that cross its border, in each direction
    tensor_forward_s: float
    tensor_backward_s: float


@inlined_kernel
def least_figures(i: int, j: int, r: int, tables: FlushTables, task: FlushTask) -> LeastFigures:
    """Of stage i \\ j in variant r."""
    crossing_s, tensor_forward_s, tensor_backward_s = 0.0, 0.0, 0.0
    inner, outer = tables.bits[j], tables.bits[i]
    for k in range(tables.crossing_start[i], tables.crossing_start[i + 1]):
        e = tables.crossing[k]
        v = tables.edge_head[e]
        if not (inner[v >> 6] >> np.uint64(v & 63)) & np.uint64(1):
            crossing_s += tables.edge_in_s[r, e]
    for k in range(tables.crossing_start[j], tables.crossing_start[j + 1]):
        e = tables.crossing[k]
        v = tables.edge_tail[e]
        if (outer[v >> 6] >> np.uint64(v & 63)) & np.uint64(1):
            crossing_s += tables.edge_out_s[r, e]
    for h in range(tables.tensor_bits.shape[0]):
        inside, outside = False, False
        for word in range(inner.size):
            ends, stage = tables.tensor_bits[h, word], outer[word] & ~inner[word]
            inside = inside or (ends & stage) != 0
            outside = outside or (ends & ~stage) != 0
        if inside and outside:
            tensor_forward_s += tables.tensor_forward_s[h]
            tensor_backward_s += tables.tensor_backward_s[h]
    above, below = tables.sums[r, i], tables.sums[r, j]
    return LeastFigures(
        above[LEAST_S] - below[LEAST_S] + 2.0 * crossing_s + tensor_forward_s + tensor_backward_s,
        above[LEAST_FORWARD_S] - below[LEAST_FORWARD_S] + crossing_s + tensor_forward_s,
        above[LEAST_BACKWARD_S] - below[LEAST_BACKWARD_S] + crossing_s + tensor_backward_s,
        (above[LEAST_WEIGHTS] - below[LEAST_WEIGHTS]) * task.sync_s_per_byte,
        crossing_s,
        tensor_forward_s,
        tensor_backward_s,
    )


@inlined_kernel
def in_flight(schedule: int, microbatches: int, behind: int) -> int:
    """y of a stage with ``behind`` stages behind it."""
    if schedule == TWO_BW:
        return behind + 1
    return microbatches if schedule == GPIPE else min(microbatches, behind + 1)


@inlined_kernel
def least_memory_bytes(i: int, j: int, r: int, y: int, tables: FlushTables, task: FlushTask) -> float:
    """No choice of the stage holds less with y microbatches in flight."""
    above, below = tables.sums[r, i], tables.sums[r, j]
    held = (above[LEAST_ACTIVATION] - below[LEAST_ACTIVATION]) * y + above[LEAST_FIXED] - below[LEAST_FIXED]
    return float(held + (above[LEAST_SHARED] - below[LEAST_SHARED]) / task.data_parallel_degree)


@inlined_kernel
def fastest_fits(i: int, j: int, r: int, y: int, tables: FlushTables, task: FlushTask) -> bool:
    """Whether the stage's fastest choice fits and takes the least for the border and for synchronisation too."""
    above, below = tables.sums[r, i], tables.sums[r, j]
    if above[MIXED] != below[MIXED]:
        return False
    held = (above[FAST_ACTIVATION] - below[FAST_ACTIVATION]) * y + above[FAST_FIXED] - below[FAST_FIXED]
    held += (above[FAST_SHARED] - below[FAST_SHARED]) / task.data_parallel_degree
    return bool(held <= task.memory_bytes)


@inlined_kernel
def one_choice_is_best(
    schedule: int,
    microbatches: int,
    behind: int,
    forward_s: float,
    backward_s: float,
    sync_s: float,
    f_and_b_decide: bool,
    least: LeastFigures,
    tail: Figures,
) -> bool:
    """Whether a choice of least t (and R) gives the least figures with this tail, whatever f and b other choices have.

    It does where f and b are the least too, or hidden behind what the tail takes. f_and_b_decide: on the tail, too.
    """
    if sync_s > least.sync_s * (1.0 + SLACK):
        return False
    least_forward = forward_s <= least.forward_s * (1.0 + SLACK)
    least_backward = backward_s <= least.backward_s * (1.0 + SLACK)
    if schedule == GPIPE:
        total, slowest_f, slowest_b, synced, _, _, _ = tail
        final_s = total + forward_s + backward_s + (microbatches - 1) * max(slowest_b, backward_s) + sync_s
        hidden_forward = forward_s <= slowest_f and synced + forward_s <= final_s
        return (least_forward or hidden_forward) and (least_backward or backward_s <= slowest_b)
    if schedule == TWO_BW:
        return True
    down, _, _, up, whole, last, synced = tail
    w = min(microbatches, behind + 1)
    if least_forward and least_backward:
        return True
    if f_and_b_decide or (microbatches == w and w > 1):
        return False
    if not (least_forward or (w - 1) * forward_s <= down) or not (least_backward or (w - 1) * backward_s <= up):
        return False
    # (m - w + 1) t - b grows with f and b.
    return least_forward or (last <= up + backward_s + sync_s and synced <= whole + backward_s + sync_s)


@inner_kernel
def quickest_row(
    i: int, j: int, r: int, y: int, least: LeastFigures, tables: FlushTables, task: FlushTask, row: FloatArray
) -> int:
    """Writes the choice of least t to ``row``: FASTEST, LEAST_TIME; NO_CHOICE if only a bound is known; or NO_ROW."""
    if fastest_fits(i, j, r, y, tables, task):
        forward_s = tables.sums[r, i, FAST_FORWARD_S] - tables.sums[r, j, FAST_FORWARD_S]
        row[0] = forward_s + least.crossing_s + least.tensor_forward_s
        row[1] = least.time_s - row[0]
        row[2] = least.sync_s
        return FASTEST
    return _least_time_row(i, j, r, y, least, tables, task, row)


@inner_kernel
def _least_time_row(
    i: int, j: int, r: int, y: int, least: LeastFigures, tables: FlushTables, task: FlushTask, row: FloatArray
) -> int:
    """Writes the choice of least t to ``row``: LEAST_TIME; NO_CHOICE if only a bound is known; or NO_ROW."""
    _, start, items = stage_items(i, j, r, y, tables, task)
    chosen = np.empty(start.size - 1, np.int64)
    found_s = least_time_choice(start, items, task.memory_bytes, chosen)
    if found_s == np.inf:
        return NO_ROW
    if found_s < 0.0:
        row[0], row[1], row[2] = least.forward_s, least.backward_s, least.sync_s
        return NO_CHOICE
    row[0], row[1], row[2] = least.tensor_forward_s, least.tensor_backward_s, 0.0
    for o in chosen:
        row[0] += items[o, 0]
        row[1] += items[o, 1]
        row[2] += items[o, 2] * task.sync_s_per_byte
    return LEAST_TIME


@inner_kernel
def front_rows(
    i: int,
    j: int,
    r: int,
    y: int,
    most_s: float,
    most: int,
    least: LeastFigures,
    tables: FlushTables,
    task: FlushTask,
) -> tuple[int, FloatArray]:
    """The undominated choices of at most ``most_s``: EXACT, MERGED or NONE_FITS, and float64[rows, 3]."""
    _, start, items = stage_items(i, j, r, y, tables, task)
    most_s -= least.tensor_forward_s + least.tensor_backward_s
    status, rows, _, _, _ = choice_front(start, items, task.memory_bytes, most_s, most)
    for row in range(rows.shape[0]):
        rows[row, 0] += least.tensor_forward_s
        rows[row, 1] += least.tensor_backward_s
        rows[row, 2] *= task.sync_s_per_byte
    return status, rows
