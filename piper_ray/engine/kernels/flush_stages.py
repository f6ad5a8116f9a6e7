"""Kernels: lower bounds on one stage's time and memory, and its choices of TMPCs; and the least that is left to do in
front of each downset. For one (d, t).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import stable_order
from piper_ray.compiled.jit import inlined_kernel, inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import crosses_border, has
from piper_ray.engine.kernels.flush_choices import MERGED, choice_front, least_time_choice, stage_items
from piper_ray.engine.kernels.flush_paths import Figures
from piper_ray.engine.kernels.flush_types import (
    FASTEST,
    GPIPE,
    LEAST_TIME,
    NO_CHOICE,
    SLACK,
    SUM,
    TWO_BW,
    FlushTables,
    FlushTask,
)
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, StageKey

_CLOSE = 1.005
"""Least figures of a stage are close where the choice of least t exceeds each by no more than this factor."""

NO_ROW = -4
"""Marks a stage that does not fit, where a choice would stand."""


class LeastFigures(NamedTuple):
    """The least seconds of a stage, each figure by itself."""

    time_s: float
    forward_s: float
    backward_s: float
    sync_s: float
    crossing_s: float  # of the edges that cross its border, in each direction
    tensor_forward_s: float
    tensor_backward_s: float


@inlined_kernel
def least_figures(stage: StageKey, tables: FlushTables, task: FlushTask) -> LeastFigures:
    """Returns the least figures of a stage."""
    i, j, r = stage
    crossing_s, tensor_forward_s, tensor_backward_s = 0.0, 0.0, 0.0
    inner, outer = tables.bits[j], tables.bits[i]
    for k in range(tables.crossing_start[i], tables.crossing_start[i + 1]):
        e = tables.crossing[k]
        if not has(inner, tables.edge_head[e]):
            crossing_s += tables.edge_in_s[r, e]
    for k in range(tables.crossing_start[j], tables.crossing_start[j + 1]):
        e = tables.crossing[k]
        if has(outer, tables.edge_tail[e]):
            crossing_s += tables.edge_out_s[r, e]
    for h in range(tables.tensor_bits.shape[0]):
        if crosses_border(tables.tensor_bits[h], outer, inner):
            tensor_forward_s += tables.tensor_forward_s[h]
            tensor_backward_s += tables.tensor_backward_s[h]
    above, below = tables.sums[r, i], tables.sums[r, j]
    return LeastFigures(
        above[SUM.least_s] - below[SUM.least_s] + 2.0 * crossing_s + tensor_forward_s + tensor_backward_s,
        above[SUM.least_forward_s] - below[SUM.least_forward_s] + crossing_s + tensor_forward_s,
        above[SUM.least_backward_s] - below[SUM.least_backward_s] + crossing_s + tensor_backward_s,
        (above[SUM.least_weights] - below[SUM.least_weights]) * task.sync_s_per_byte[r],
        crossing_s,
        tensor_forward_s,
        tensor_backward_s,
    )


@inlined_kernel
def in_flight(schedule: int, microbatches: int, behind: int) -> int:
    """Returns y of a stage with ``behind`` stages behind it."""
    if schedule == TWO_BW:
        return behind + 1
    return microbatches if schedule == GPIPE else min(microbatches, behind + 1)


@inlined_kernel
def least_memory_bytes(stage: StageKey, y: int, tables: FlushTables, task: FlushTask) -> float:
    """Returns the least bytes of any choice of the stage with y microbatches in flight."""
    above, below = tables.sums[stage.variant, stage.outer], tables.sums[stage.variant, stage.inner]
    held = (above[SUM.least_activation] - below[SUM.least_activation]) * y
    held += above[SUM.least_fixed]
    held -= below[SUM.least_fixed]
    return float(held + (above[SUM.least_shared] - below[SUM.least_shared]) / task.data_parallel_degree)


@inlined_kernel
def priced_time_s(stage: StageKey, y: int, least: LeastFigures, tables: FlushTables, task: FlushTask) -> float:
    """Returns a lower bound on the time of choices that fit with y microbatches in flight: memory beyond the limit is
    priced."""
    i, j, r = stage
    at = 0
    while at + 1 < tables.in_flight.size and tables.in_flight[at + 1] <= y:
        at += 1
    prices = tables.memory_s.shape[1] // tables.in_flight.size
    shared = tables.sums[r, i, SUM.least_shared] - tables.sums[r, j, SUM.least_shared]
    found_s = 0.0
    for column in range(at * prices, (at + 1) * prices):
        price, above_s = tables.memory_s[r, column], tables.priced_s[r, i, column]
        room_s = price * (task.memory_bytes[r] - shared / task.data_parallel_degree)
        priced_s = above_s - tables.priced_s[r, j, column] - room_s
        found_s = max(found_s, priced_s - SLACK * (above_s + abs(room_s)))
    return max(least.time_s, found_s + 2.0 * least.crossing_s + least.tensor_forward_s + least.tensor_backward_s)


@inlined_kernel
def fastest_fits(stage: StageKey, y: int, tables: FlushTables, task: FlushTask) -> bool:
    """Whether the stage's fastest choice fits, and also has the least cost of borders and synchronisation."""
    above, below = tables.sums[stage.variant, stage.outer], tables.sums[stage.variant, stage.inner]
    if above[SUM.mixed] != below[SUM.mixed]:
        return False
    held = (above[SUM.fast_activation] - below[SUM.fast_activation]) * y + above[SUM.fast_fixed] - below[SUM.fast_fixed]
    held += (above[SUM.fast_shared] - below[SUM.fast_shared]) / task.data_parallel_degree
    return bool(held <= task.memory_bytes[stage.variant])


@inlined_kernel
def one_choice_is_best(
    task: FlushTask, behind: int, seconds: FloatArray, f_and_b_decide: bool, least: LeastFigures, tail: Figures
) -> bool:
    """Whether a choice of least t (and R) gives the least figures with this tail, for any f and b of other choices.

    It does if f and b are also the least, or are hidden by the tail's time. seconds: the choice's forward, backward and
    synchronisation. f_and_b_decide: whether they affect the tail's figures too.
    """
    schedule, microbatches = task.schedule, task.microbatches
    forward_s, backward_s, sync_s = float(seconds[0]), float(seconds[1]), float(seconds[2])
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
    stage: StageKey,
    y: int,
    most_s: float,
    is_exact: bool,
    least: LeastFigures,
    tables: FlushTables,
    task: FlushTask,
    row: FloatArray,
) -> int:
    """Writes the choice of least t to ``row``; if it need not be exact, one that may take a little more. Returns
    FASTEST, LEAST_TIME, NO_CHOICE if only a bound is known, or NO_ROW if none of at most ``most_s`` fits."""
    if fastest_fits(stage, y, tables, task):
        i, j, r = stage
        forward_s = tables.sums[r, i, SUM.fast_forward_s] - tables.sums[r, j, SUM.fast_forward_s]
        row[0] = forward_s + least.crossing_s + least.tensor_forward_s
        row[1] = least.time_s - row[0]
        row[2], row[3] = least.sync_s, least.time_s
        return FASTEST
    _, start, items = stage_items(stage, y, tables, task)
    chosen = np.empty(start.size - 1, np.int64)
    most_s -= least.tensor_forward_s + least.tensor_backward_s
    found_s = least_time_choice(start, items, task.memory_bytes[stage.variant], most_s, is_exact, chosen)
    if found_s == np.inf:
        return NO_ROW
    if found_s < 0.0:
        row[0], row[1], row[2], row[3] = least.forward_s, least.backward_s, least.sync_s, least.time_s
        return NO_CHOICE
    row[0], row[1], row[2] = least.tensor_forward_s, least.tensor_backward_s, 0.0
    for o in chosen:
        row[0] += items[o, 0]
        row[1] += items[o, 1]
        row[2] += items[o, 2] * task.sync_s_per_byte[stage.variant]
    row[3] = row[0] + row[1]
    return LEAST_TIME


@inner_kernel
def front_rows(
    stage: StageKey,
    y: int,
    most_s: float,
    most: int,
    least: LeastFigures,
    one: FloatArray,
    tables: FlushTables,
    task: FlushTask,
) -> tuple[int, FloatArray, int]:
    """Returns the undominated choices of at most ``most_s``: EXACT, MERGED or NONE_FITS; float64[rows, 4]; and about
    how many partial choices were made. one: float64[4], the choice of least t (``quickest_row``).

    If there are more than ``most``, and the choice of least t is within ``_CLOSE`` of the least of each figure, one row
    of these least figures stands for all. No choice takes less than the least t, so neither do merged rows, and none
    has a shorter backward pass than that without the longest forward pass.
    """
    _, start, items = stage_items(stage, y, tables, task)
    longest_forward_s, longest_backward_s = least.tensor_forward_s, least.tensor_backward_s
    for k in range(start.size - 1):
        most_forward_s, most_backward_s = 0.0, 0.0
        for o in range(start[k], start[k + 1]):
            most_forward_s, most_backward_s = max(most_forward_s, items[o, 0]), max(most_backward_s, items[o, 1])
        longest_forward_s += most_forward_s
        longest_backward_s += most_backward_s
    least_s = one[3] * (1.0 - SLACK)
    forward_s = max(least.forward_s, least_s - longest_backward_s)
    backward_s = max(least.backward_s, least_s - longest_forward_s)
    is_close = one[0] <= forward_s * _CLOSE and one[1] <= backward_s * _CLOSE and one[2] <= least.sync_s * _CLOSE
    most_s -= least.tensor_forward_s + least.tensor_backward_s
    memory_bytes = task.memory_bytes[stage.variant]
    status, rows, _, _, taken = choice_front(start, items, memory_bytes, most_s, most, not is_close)
    if status == MERGED and is_close:
        rows = np.empty((1, 4))
        rows[0, 0], rows[0, 1], rows[0, 2], rows[0, 3] = forward_s, backward_s, least.sync_s, least_s
        return status, rows, taken.size
    for row in range(rows.shape[0]):
        rows[row, 0] += least.tensor_forward_s
        rows[row, 1] += least.tensor_backward_s
        rows[row, 2] *= task.sync_s_per_byte[stage.variant]
        rows[row, 3] += least.tensor_forward_s + least.tensor_backward_s
        if status == MERGED:
            rows[row, 3] = max(rows[row, 3], least_s)
    return status, rows, taken.size


class AheadArrays(NamedTuple):
    """The least that is left to do in front of each downset, and the downsets by their own least time."""

    own_s: FloatArray  # float64[m]: least forward and backward seconds of the layers
    ahead_s: FloatArray  # float64[m]: of the layers outside, and of what crosses into the downset
    ahead_forward_s: FloatArray  # float64[m]
    ahead_activation: FloatArray  # float64[m], bytes: least of the layers outside, for each microbatch in flight
    ahead_fixed: FloatArray  # float64[m], bytes
    ahead_shared: FloatArray  # float64[m], bytes
    order: IndexArray  # int64[m]: downsets by own_s
    ordered_s: FloatArray  # float64[m]: own_s in that order
    ordered_bits: BitArray  # uint64[m, words]
    rank: IndexArray  # int64[m]: the place of a downset in that order
    # float64[m]: with several kinds of devices, what the layers outside take at least, where a second on each kind
    # counts as a share of what all layers take on it: stages of one length can take no more than their number of these.
    ahead_share: FloatArray


@kernel
def look_ahead(tables: FlushTables, task: FlushTask) -> AheadArrays:
    """Sums over the layers outside of each downset."""
    m = tables.bits.shape[0]
    own, ahead, ahead_forward = np.full(m, np.inf), np.full(m, np.inf), np.full(m, np.inf)
    activation, fixed, shared = np.zeros(m), np.zeros(m), np.zeros(m)
    for r in task.bounding:
        sums = tables.sums[r]
        for i in range(m):
            own[i] = min(own[i], sums[i, SUM.least_s])
            crossing_s = 0.0
            for k in range(tables.crossing_start[i], tables.crossing_start[i + 1]):
                crossing_s += tables.edge_out_s[r, tables.crossing[k]]
            ahead[i] = min(ahead[i], sums[m - 1, SUM.least_s] - sums[i, SUM.least_s] + 2.0 * crossing_s)
            forward_s = sums[m - 1, SUM.least_forward_s] - sums[i, SUM.least_forward_s] + crossing_s
            ahead_forward[i] = min(ahead_forward[i], forward_s)
            activation[i] = sums[m - 1, SUM.least_activation] - sums[i, SUM.least_activation]
            fixed[i] = sums[m - 1, SUM.least_fixed] - sums[i, SUM.least_fixed]
            shared[i] = sums[m - 1, SUM.least_shared] - sums[i, SUM.least_shared]
    if tables.tensor_bits.shape[0] > 0:
        for i in range(m):
            for k in range(tables.cut_start[i], tables.cut_start[i + 1]):
                ahead[i] += tables.tensor_forward_s[tables.cut[k]] + tables.tensor_backward_s[tables.cut[k]]
                ahead_forward[i] += tables.tensor_forward_s[tables.cut[k]]
    # With several variants each layer may be in a stage of its best one; then nothing is known of their memory.
    if task.bounding.size > 1:
        for i in range(m):
            own[i], ahead[i], ahead_forward[i] = _mixed_sums(i, tables, task)
            activation[i], fixed[i], shared[i] = 0.0, 0.0, 0.0
    share = np.zeros(m if task.share_of_s.size > 0 else 0)
    if share.size > 0:
        of_layer = _shares(tables, task)
        for i in range(m):
            for v in range(of_layer.size):
                if not has(tables.bits[i], v):
                    share[i] += of_layer[v]
            share[i] *= 1.0 - SLACK
    for i in range(m):  # corrects for rounding of sums
        ahead[i] = max(0.0, ahead[i] * (1.0 - SLACK))
        ahead_forward[i] = max(0.0, ahead_forward[i] * (1.0 - SLACK))
    ahead[m - 1], ahead_forward[m - 1] = 0.0, 0.0
    order = stable_order(own, m)
    rank = np.empty(m, np.int64)
    for k in range(m):
        rank[order[k]] = k
    return AheadArrays(
        own, ahead, ahead_forward, activation, fixed, shared, order, own[order], tables.bits[order], rank, share
    )


@leaf_kernel
def _mixed_sums(i: int, tables: FlushTables, task: FlushTask) -> tuple[float, float, float]:
    """Returns own, ahead and ahead_forward if each layer may be in a stage of another variant."""
    own, ahead, ahead_forward = 0.0, 0.0, 0.0
    bits = tables.bits[i]
    for v in range(tables.option_start.shape[1] - 1):
        least, least_forward = np.inf, np.inf
        for r in task.bounding:
            for o in range(tables.option_start[r, v], tables.option_start[r, v + 1]):
                least = min(least, tables.option_forward_s[o] + tables.option_backward_s[o])
                least_forward = min(least_forward, tables.option_forward_s[o])
        if not np.isfinite(least):
            continue
        if has(bits, v):
            own += least
        else:
            ahead += least
            ahead_forward += least_forward
    return own, ahead, ahead_forward


@inner_kernel
def _shares(tables: FlushTables, task: FlushTask) -> FloatArray:
    """Returns float64[n]: the least share of each layer."""
    found = np.zeros(tables.option_start.shape[1] - 1)
    for v in range(found.size):
        least = np.inf
        for r in task.bounding:
            for o in range(tables.option_start[r, v], tables.option_start[r, v + 1]):
                time_s = tables.option_forward_s[o] + tables.option_backward_s[o]
                least = min(least, time_s * task.share_of_s[r])
        if np.isfinite(least):
            found[v] = least
    return found


@leaf_kernel
def most_behind(i: int, task: FlushTask, ahead: AheadArrays) -> int:
    """Returns the most stages that a tail of downset i can have if the memory of those in front may suffice for the
    rest; 0 if not even one.

    The more stages are behind, the fewer are left, and the more microbatches they have in flight.
    """
    low, high = 0, task.most_stages
    while low < high:
        middle = (low + high + 1) >> 1
        if _rest_fits(i, middle, task, ahead):
            low = middle
        else:
            high = middle - 1
    return low


@leaf_kernel
def _rest_fits(i: int, behind: int, task: FlushTask, ahead: AheadArrays) -> bool:
    """Whether the layers outside may fit in the remaining stages if layers could be cut into pieces.

    The total memory is least if the stages with the fewest microbatches in flight hold as many activations as fit.
    """
    left = task.most_stages - behind
    needed = ahead.ahead_fixed[i] + ahead.ahead_shared[i] / task.data_parallel_degree
    rest = ahead.ahead_activation[i]
    room = left * task.most_memory_bytes * (1.0 + 1e-9)
    for k in range(left):
        if rest <= 0.0 or needed > room:
            break
        y = in_flight(task.schedule, task.microbatches, behind + k)
        part = min(rest, task.most_memory_bytes / y)
        needed += part * y
        rest -= part
    return bool(needed <= room and rest <= ahead.ahead_activation[i] * 1e-9)
