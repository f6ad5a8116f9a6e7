"""Kernels: for one (d, t) the undominated pipeline tails of every downset, by number of stages.

Under 1F1B a tail's figures depend on the largest f and b of the stages in front of it. So there are several tables: in
table g some stage in front takes at least as long as level g says, a promise that a stage which does keeps. Of a stage
with such f and b the tail behind it comes from the table of the highest level that it, or the promise, reaches. Level 0
promises nothing; with no further levels all figures are bounds from below, and mostly exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import bit_position, is_subset
from piper_ray.engine.kernels.flush_choices import FEW, choice_front, least_time_choice, stage_items
from piper_ray.engine.kernels.flush_paths import Figures, empty_tail, least_batch_s, with_stage
from piper_ray.engine.kernels.flush_types import (
    FAST_ACTIVATION,
    FAST_FIXED,
    FAST_FORWARD_S,
    FAST_SHARED,
    FASTEST,
    FIGURES,
    GPIPE,
    LEAST_ACTIVATION,
    LEAST_BACKWARD_S,
    LEAST_FIXED,
    LEAST_FORWARD_S,
    LEAST_S,
    LEAST_SHARED,
    LEAST_TIME,
    LEAST_WEIGHTS,
    MISSING,
    MIXED,
    NO_CHOICE,
    ON_FRONT,
    TWO_BW,
    FlushTables,
    FlushTask,
    StateArrays,
)
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray

FINISHED = 0
STOPPED = 1
TOO_MANY = 2

NO_ROW = -4


SLACK = 1e-12
"""Relative: what differs by no more than this is equal but for rounding."""


class AheadArrays(NamedTuple):
    """What is left to do in front of each downset at least, and the downsets by their own least time."""

    own_s: FloatArray  # float64[m]: least forward and backward seconds of the layers
    ahead_s: FloatArray  # float64[m]: of the layers outside, and of what crosses into the downset
    ahead_forward_s: FloatArray  # float64[m]
    ahead_activation: FloatArray  # float64[m], bytes: least of the layers outside, for each microbatch in flight
    ahead_fixed: FloatArray  # float64[m], bytes
    ahead_shared: FloatArray  # float64[m], bytes
    order: IndexArray  # int64[m]: downsets by own_s
    ordered_s: FloatArray  # float64[m]: own_s in that order
    ordered_bits: BitArray  # uint64[m, words]
    rank: IndexArray  # int64[m]: where a downset is in that order


class LeastFigures(NamedTuple):
    """What a stage takes at least, in seconds; each figure for itself."""

    time_s: float
    forward_s: float
    backward_s: float
    sync_s: float
    crossing_s: float  # of the edges that cross its border, in each direction
    tensor_forward_s: float
    tensor_backward_s: float


@kernel
def look_ahead(tables: FlushTables, task: FlushTask) -> AheadArrays:
    """Sums over the layers outside of each downset."""
    m = tables.bits.shape[0]
    own, ahead, ahead_forward = np.full(m, np.inf), np.full(m, np.inf), np.full(m, np.inf)
    activation, fixed, shared = np.zeros(m), np.zeros(m), np.zeros(m)
    for r in task.variants:
        sums = tables.sums[r]
        for i in range(m):
            own[i] = min(own[i], sums[i, LEAST_S])
            crossing_s = 0.0
            for k in range(tables.crossing_start[i], tables.crossing_start[i + 1]):
                crossing_s += tables.edge_out_s[r, tables.crossing[k]]
            ahead[i] = min(ahead[i], sums[m - 1, LEAST_S] - sums[i, LEAST_S] + 2.0 * crossing_s)
            forward_s = sums[m - 1, LEAST_FORWARD_S] - sums[i, LEAST_FORWARD_S] + crossing_s
            ahead_forward[i] = min(ahead_forward[i], forward_s)
            activation[i] = sums[m - 1, LEAST_ACTIVATION] - sums[i, LEAST_ACTIVATION]
            fixed[i] = sums[m - 1, LEAST_FIXED] - sums[i, LEAST_FIXED]
            shared[i] = sums[m - 1, LEAST_SHARED] - sums[i, LEAST_SHARED]
    if tables.tensor_bits.shape[0] > 0:
        for i in range(m):
            for k in range(tables.cut_start[i], tables.cut_start[i + 1]):
                ahead[i] += tables.tensor_forward_s[tables.cut[k]] + tables.tensor_backward_s[tables.cut[k]]
                ahead_forward[i] += tables.tensor_forward_s[tables.cut[k]]
    # With several variants each layer may be in a stage of its best one; of their memory nothing is promised then.
    if task.variants.size > 1:
        for i in range(m):
            own[i], ahead[i], ahead_forward[i] = _mixed_sums(i, tables, task)
            activation[i], fixed[i], shared[i] = 0.0, 0.0, 0.0
    for i in range(m):  # rounding of sums
        ahead[i] = max(0.0, ahead[i] * (1.0 - SLACK))
        ahead_forward[i] = max(0.0, ahead_forward[i] * (1.0 - SLACK))
    ahead[m - 1], ahead_forward[m - 1] = 0.0, 0.0
    order = np.argsort(own, kind="mergesort")
    rank = np.empty(m, np.int64)
    rank[order] = np.arange(m)
    return AheadArrays(
        own, ahead, ahead_forward, activation, fixed, shared, order, own[order], tables.bits[order], rank
    )


@leaf_kernel
def _mixed_sums(i: int, tables: FlushTables, task: FlushTask) -> tuple[float, float, float]:
    """own, ahead and ahead_forward where each layer may be in a stage of another variant."""
    own, ahead, ahead_forward = 0.0, 0.0, 0.0
    bits = tables.bits[i]
    for v in range(tables.option_start.shape[1] - 1):
        least, least_forward = np.inf, np.inf
        for r in task.variants:
            for o in range(tables.option_start[r, v], tables.option_start[r, v + 1]):
                least = min(least, tables.option_forward_s[o] + tables.option_backward_s[o])
                least_forward = min(least_forward, tables.option_forward_s[o])
        if not np.isfinite(least):
            continue
        if (bits[v >> 6] >> np.uint64(v & 63)) & np.uint64(1):
            own += least
        else:
            ahead += least
            ahead_forward += least_forward
    return own, ahead, ahead_forward


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


@kernel
def tails(
    tables: FlushTables,
    task: FlushTask,
    ahead: AheadArrays,
    levels: FloatArray,
    most_states: int,
    control: FloatArray,
) -> tuple[int, StateArrays]:
    """The states of all downsets from which a batch of at most control[0] seconds may come; FINISHED, STOPPED because
    control[1] is not zero, or TOO_MANY for ``most_states``. Others may lower control[0] meanwhile.

    levels: float64[l, 2], ascending forward and backward seconds, the first 0 and 0.
    """
    m = tables.bits.shape[0]
    schedule, microbatches, most_stages = task.schedule, task.microbatches, task.most_stages
    start, kept = np.zeros(levels.shape[0] * m, np.int64), np.zeros(levels.shape[0] * m, np.int64)
    room = 4096
    figures, stage = np.empty((room, FIGURES)), np.empty((room, 3))
    stages, downset, below = np.zeros(room, np.int64), np.zeros(room, np.int64), np.full(room, -1, np.int64)
    variant, choice = np.full(room, -1, np.int64), np.full(room, NO_CHOICE, np.int64)
    kept[::m] = 1
    empty = empty_tail(schedule)
    for column in range(FIGURES):
        figures[0, column] = empty[column]
    used = 1
    alive = np.zeros(m // 64 + 2, np.uint64)  # bit ``rank`` of a downset that has states; the last one ends each search
    _set_alive(alive, ahead.rank[0])
    _set_alive(alive, 64 * alive.size - 1)

    # Of the downset at hand: candidates, linked by level and number of stages.
    new_room = 1024
    new_figures, new_stage = np.empty((new_room, FIGURES)), np.empty((new_room, 3))
    new_below, new_variant = np.empty(new_room, np.int64), np.empty(new_room, np.int64)
    new_choice, link = np.empty(new_room, np.int64), np.empty(new_room, np.int64)
    first = np.full((levels.shape[0], most_stages + 2), -1, np.int64)
    # Of the stage at hand: its choice of least time and its front, by the number of stages behind it.
    stage_id = 0
    one_of, front_of = np.full(most_stages + 1, -1, np.int64), np.full(most_stages + 1, -1, np.int64)
    one_choice = np.zeros(most_stages + 1, np.int64)
    one = np.zeros((most_stages + 1, 3))
    front_begin, front_end = np.zeros(most_stages + 1, np.int64), np.zeros(most_stages + 1, np.int64)
    fronts = np.empty((1024, 3))

    status = FINISHED
    for i in range(1, m):
        if control[1] != 0.0:
            status = STOPPED
            break
        limit = control[0] * (1.0 + SLACK)
        ahead_s, ahead_forward_s = ahead.ahead_s[i], ahead.ahead_forward_s[i]
        # m t + ahead <= limit for the stage that is put in front; without a flush nothing waits for what is ahead.
        fill_s = 0.0 if schedule == TWO_BW else ahead_s
        slowest_s = (limit - fill_s) / microbatches
        if slowest_s < 0.0:
            continue
        if limit < np.inf and limit > 0.0:
            even_s = limit / microbatches
            if _stages_for(ahead.own_s[i], even_s) + _stages_for(ahead_s, even_s) > most_stages:
                continue
        most_behind = _most_behind(i, task, ahead)
        if most_behind == 0:
            continue
        new = 0
        outer = tables.bits[i]
        most_s = slowest_s * (1.0 + SLACK)
        top_level = levels.shape[0] - 1 if i < m - 1 else 0  # nothing is in front of all layers
        if np.isfinite(slowest_s):
            from_rank = np.searchsorted(ahead.ordered_s, ahead.own_s[i] * (1.0 - SLACK) - slowest_s * (1.0 + 1e-9))
        else:
            from_rank = 0
        to_rank = np.searchsorted(ahead.ordered_s, ahead.own_s[i] * (1.0 + SLACK) + 1e-300, side="right")
        rank = _next_alive(alive, from_rank)
        while rank < to_rank:
            inner = rank
            rank = _next_alive(alive, rank + 1)
            j = ahead.order[inner]
            if j >= i or not is_subset(ahead.ordered_bits[inner], outer):
                continue
            for r in task.variants:
                if tables.sums[r, i, MISSING] != tables.sums[r, j, MISSING]:
                    continue
                least = least_figures(i, j, r, tables, task)
                if microbatches * least.time_s + fill_s > limit:
                    continue
                stage_id += 1
                used_rows = 0
                # The levels that the stage may reach.
                low = level_of(levels, least.forward_s, least.backward_s)
                high = level_of(levels, most_s - least.backward_s, most_s - least.forward_s)
                for level in range(top_level + 1):
                    promised_f, promised_b = levels[level, 0], levels[level, 1]
                    for source in range(max(level, low), max(level, high) + 1):
                        for s in range(start[source * m + j], start[source * m + j] + kept[source * m + j]):
                            behind = stages[s]
                            if behind >= most_behind:
                                break
                            if task.stages > 0 and i == m - 1 and behind + 1 != task.stages:
                                continue
                            y = in_flight(schedule, microbatches, behind)
                            if least_memory_bytes(i, j, r, y, tables, task) > task.memory_bytes:
                                break
                            tail = figures_of(figures, s)
                            # First with the least of everything.
                            bound = least_batch_s(
                                schedule,
                                microbatches,
                                behind + 1,
                                most_stages,
                                ahead_s,
                                0.0,
                                _without_ends(
                                    schedule,
                                    with_stage(
                                        schedule,
                                        microbatches,
                                        behind,
                                        least.time_s,
                                        least.forward_s,
                                        least.backward_s,
                                        least.sync_s,
                                        max(least.forward_s, promised_f),
                                        max(least.backward_s, promised_b),
                                        tail,
                                    ),
                                ),
                            )
                            if bound > limit:
                                continue
                            if one_of[behind] != stage_id:
                                one_of[behind] = stage_id
                                if fastest_fits(i, j, r, y, tables, task):
                                    forward_s = tables.sums[r, i, FAST_FORWARD_S] - tables.sums[r, j, FAST_FORWARD_S]
                                    one[behind, 0] = forward_s + least.crossing_s + least.tensor_forward_s
                                    one[behind, 1] = least.time_s - one[behind, 0]
                                    one[behind, 2] = least.sync_s
                                    one_choice[behind] = FASTEST
                                else:
                                    one_choice[behind] = _least_time_row(i, j, r, y, least, tables, task, one[behind])
                            if one_choice[behind] == NO_ROW:
                                break
                            alone = one_choice[behind] == NO_CHOICE or one_choice_is_best(
                                schedule,
                                microbatches,
                                behind,
                                one[behind, 0],
                                one[behind, 1],
                                one[behind, 2],
                                levels.shape[0] > 1,
                                least,
                                tail,
                            )
                            if not alone and front_of[behind] != stage_id:
                                front_of[behind] = stage_id
                                _, rows = front_rows(i, j, r, y, most_s, FEW, least, tables, task)
                                while used_rows + rows.shape[0] > fronts.shape[0]:
                                    fronts = twice_rows(fronts)
                                front_begin[behind] = used_rows
                                for row in range(rows.shape[0]):
                                    for column in range(3):
                                        fronts[used_rows, column] = rows[row, column]
                                    used_rows += 1
                                front_end[behind] = used_rows
                            rows_here = 1 if alone else front_end[behind] - front_begin[behind]
                            for row in range(rows_here):
                                if alone:
                                    f, b, sync, chosen = (
                                        one[behind, 0],
                                        one[behind, 1],
                                        one[behind, 2],
                                        one_choice[behind],
                                    )
                                else:
                                    at = front_begin[behind] + row
                                    f, b, sync, chosen = fronts[at, 0], fronts[at, 1], fronts[at, 2], ON_FRONT
                                if levels.shape[0] > 1 and max(level, level_of(levels, f, b)) != source:
                                    continue
                                grown = with_stage(
                                    schedule,
                                    microbatches,
                                    behind,
                                    f + b,
                                    f,
                                    b,
                                    sync,
                                    max(f, promised_f),
                                    max(b, promised_b),
                                    tail,
                                )
                                bound = least_batch_s(
                                    schedule, microbatches, behind + 1, most_stages, ahead_s, ahead_forward_s, grown
                                )
                                if bound > limit:
                                    continue
                                # Is it dominated? If not, those that it dominates go.
                                beaten, previous, at = False, -1, first[level, behind + 1]
                                while at >= 0:
                                    if _as_good(new_figures[at], grown):
                                        beaten = True
                                        break
                                    following = link[at]
                                    if _no_better(new_figures[at], grown):
                                        if previous < 0:
                                            first[level, behind + 1] = following
                                        else:
                                            link[previous] = following
                                    else:
                                        previous = at
                                    at = following
                                if beaten:
                                    continue
                                if new == new_room:
                                    new_figures, new_stage = twice_rows(new_figures), twice_rows(new_stage)
                                    new_below, new_variant = twice(new_below), twice(new_variant)
                                    new_choice, link = twice(new_choice), twice(link)
                                    new_room *= 2
                                for column in range(FIGURES):
                                    new_figures[new, column] = grown[column]
                                new_stage[new, 0], new_stage[new, 1], new_stage[new, 2] = f, b, sync
                                new_below[new], new_variant[new], new_choice[new] = s, r, chosen
                                link[new] = first[level, behind + 1]
                                first[level, behind + 1] = new
                                new += 1
        if new == 0:
            continue
        for level in range(top_level + 1):
            start[level * m + i] = used
            for behind in range(1, most_stages + 1):
                at = first[level, behind]
                first[level, behind] = -1
                while at >= 0:
                    if used == room:
                        figures, stage = twice_rows(figures), twice_rows(stage)
                        stages, downset, below = twice(stages), twice(downset), twice(below)
                        variant, choice = twice(variant), twice(choice)
                        room *= 2
                    for column in range(FIGURES):
                        figures[used, column] = new_figures[at, column]
                    for column in range(3):
                        stage[used, column] = new_stage[at, column]
                    stages[used], downset[used], below[used] = behind, i, new_below[at]
                    variant[used], choice[used] = new_variant[at], new_choice[at]
                    used += 1
                    at = link[at]
            kept[level * m + i] = used - start[level * m + i]
        _set_alive(alive, ahead.rank[i])
        if used > most_states:
            status = TOO_MANY
            break
    states = StateArrays(
        start,
        kept,
        figures[:used].copy(),
        stage[:used].copy(),
        stages[:used].copy(),
        downset[:used].copy(),
        below[:used].copy(),
        variant[:used].copy(),
        choice[:used].copy(),
    )
    return status, states


@kernel
def twice(values: IndexArray) -> IndexArray:
    """With room for as many again."""
    grown = np.empty(2 * values.size, np.int64)
    grown[: values.size] = values
    return grown


@kernel
def twice_rows(rows: FloatArray) -> FloatArray:
    """With room for as many rows again."""
    grown = np.empty((2 * rows.shape[0], rows.shape[1]))
    grown[: rows.shape[0]] = rows
    return grown


@leaf_kernel
def level_of(levels: FloatArray, forward_s: float, backward_s: float) -> int:
    """The highest level that a stage of these seconds reaches."""
    level = 0
    while level + 1 < levels.shape[0] and levels[level + 1, 0] <= forward_s and levels[level + 1, 1] <= backward_s:
        level += 1
    return level


@inlined_kernel
def figures_of(figures: FloatArray, s: int) -> Figures:
    """Those of one state."""
    return (
        figures[s, 0],
        figures[s, 1],
        figures[s, 2],
        figures[s, 3],
        figures[s, 4],
        figures[s, 5],
        figures[s, 6],
    )


@leaf_kernel
def _most_behind(i: int, task: FlushTask, ahead: AheadArrays) -> int:
    """The most stages that a tail of downset i can have so that the memory of those in front may do for the rest; 0 if
    not even one.

    The more stages are behind, the fewer are left, and the more they have in flight.
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
    """Whether the layers outside may fit into the stages that are left, if layers could be cut to pieces.

    It takes the least memory in all to give the stages with the fewest microbatches in flight as many activations as
    they hold.
    """
    left = task.most_stages - behind
    needed = ahead.ahead_fixed[i] + ahead.ahead_shared[i] / task.data_parallel_degree
    rest = ahead.ahead_activation[i]
    room = left * task.memory_bytes * (1.0 + 1e-9)
    for k in range(left):
        if rest <= 0.0 or needed > room:
            break
        y = in_flight(task.schedule, task.microbatches, behind + k)
        part = min(rest, task.memory_bytes / y)
        needed += part * y
        rest -= part
    return bool(needed <= room and rest <= ahead.ahead_activation[i] * 1e-9)


@inlined_kernel
def _set_alive(alive: BitArray, rank: int) -> None:
    alive[rank >> 6] |= np.uint64(1) << np.uint64(rank & 63)


@inlined_kernel
def _next_alive(alive: BitArray, rank: int) -> int:
    """The first set bit from ``rank`` on; the last one of all is set."""
    word = rank >> 6
    rest = alive[word] & (~np.uint64(0) << np.uint64(rank & 63))
    while rest == 0:
        word += 1
        rest = alive[word]
    return word * 64 + bit_position(rest & (~rest + np.uint64(1)))


@inlined_kernel
def _stages_for(work_s: float, slowest_s: float) -> float:
    """How many stages it takes at least, none of them slower; 0 for no work."""
    return float(np.ceil(work_s * (1.0 - 1e-9) / slowest_s)) if work_s > 0.0 else 0.0


@inlined_kernel
def _without_ends(schedule: int, figures: Figures) -> Figures:
    """Less what depends on f and b each for itself in ways that least figures do not bound."""
    if schedule == TWO_BW:
        return figures
    if schedule == GPIPE:
        return figures[0], figures[1], figures[2], -np.inf, 0.0, 0.0, 0.0
    return figures[0], figures[1], figures[2], figures[3], figures[4], -np.inf, -np.inf


@inlined_kernel
def _as_good(kept: FloatArray, other: Figures) -> bool:
    for column in range(FIGURES):
        if kept[column] > other[column] * (1.0 + 1e-14):
            return False
    return True


@inlined_kernel
def _no_better(kept: FloatArray, other: Figures) -> bool:
    for column in range(FIGURES):
        if other[column] > kept[column]:
            return False
    return True


@kernel
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


@kernel
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
