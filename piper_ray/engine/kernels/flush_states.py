"""Kernels: for one (d, t) the undominated pipeline tails of every downset, by number of stages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.flush_choices import choice_front, least_time_choice, stage_items
from piper_ray.engine.kernels.flush_paths import Figures, empty_tail, least_batch_s, with_stage
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
    MISSING,
    MIXED,
    NO_CHOICE,
    FlushTables,
    FlushTask,
    StateArrays,
)
from piper_ray.engine.kernels.types import FloatArray, IndexArray

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
    order: IndexArray  # int64[m]: downsets by own_s
    ordered_s: FloatArray  # float64[m]: own_s in that order


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
    if tables.tensor_bits.shape[0] > 0:
        for i in range(m):
            for k in range(tables.cut_start[i], tables.cut_start[i + 1]):
                ahead[i] += tables.tensor_forward_s[tables.cut[k]] + tables.tensor_backward_s[tables.cut[k]]
                ahead_forward[i] += tables.tensor_forward_s[tables.cut[k]]
    # Layers of different variants may be the quickest: sums of the least over variants bound from below only if taken
    # for each layer; with several variants the least of the sums could be too large, so nothing is promised then.
    if task.variants.size > 1:
        for i in range(m):
            own[i], ahead[i], ahead_forward[i] = _mixed_sums(i, tables, task)
    for i in range(m):  # rounding of sums
        ahead[i] = max(0.0, ahead[i] * (1.0 - SLACK))
        ahead_forward[i] = max(0.0, ahead_forward[i] * (1.0 - SLACK))
    ahead[m - 1], ahead_forward[m - 1] = 0.0, 0.0
    order = np.argsort(own, kind="mergesort")
    return AheadArrays(own, ahead, ahead_forward, order, own[order])


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
    return microbatches if schedule == GPIPE else min(microbatches, behind + 1)


@inlined_kernel
def least_memory_bytes(i: int, j: int, r: int, y: int, tables: FlushTables, task: FlushTask) -> float:
    """No choice of the stage holds less with y microbatches in flight."""
    above, below = tables.sums[r, i], tables.sums[r, j]
    held = (above[LEAST_ACTIVATION] - below[LEAST_ACTIVATION]) * y + above[LEAST_FIXED] - below[LEAST_FIXED]
    return held + (above[LEAST_SHARED] - below[LEAST_SHARED]) / task.data_parallel_degree


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
    least: LeastFigures,
    tail: Figures,
) -> bool:
    """Whether a choice of least t (and R) gives the least figures with this tail, whatever f and b other choices have.

    It does where f and b are the least too, or hidden behind what the tail takes.
    """
    if sync_s > least.sync_s * (1.0 + SLACK):
        return False
    least_forward = forward_s <= least.forward_s * (1.0 + SLACK)
    least_backward = backward_s <= least.backward_s * (1.0 + SLACK)
    if schedule == GPIPE:
        total, slowest_f, slowest_b, synced, _ = tail
        final_s = total + forward_s + backward_s + (microbatches - 1) * max(slowest_b, backward_s) + sync_s
        hidden_forward = forward_s <= slowest_f and synced + forward_s <= final_s
        return (least_forward or hidden_forward) and (least_backward or backward_s <= slowest_b)
    down, up, whole, last, synced = tail
    w = min(microbatches, behind + 1)
    if least_forward and least_backward:
        return True
    if microbatches == w and w > 1:
        return False
    if not (least_forward or (w - 1) * forward_s <= down) or not (least_backward or (w - 1) * backward_s <= up):
        return False
    # (m - w + 1) t - b grows with f and b.
    return least_forward or (last <= up + backward_s + sync_s and synced <= whole + backward_s + sync_s)


@kernel
def tails(
    tables: FlushTables, task: FlushTask, ahead: AheadArrays, most_states: int, control: FloatArray
) -> tuple[int, StateArrays]:
    """The states of all downsets from which a batch of at most control[0] seconds may come; FINISHED, STOPPED because
    control[1] is not zero, or TOO_MANY for ``most_states``. Others may lower control[0] meanwhile.
    """
    m = tables.bits.shape[0]
    schedule, microbatches, most_stages = task.schedule, task.microbatches, task.most_stages
    start, count = np.zeros(m, np.int64), np.zeros(m, np.int64)
    room = 4096
    figures, stage = np.empty((room, 5)), np.empty((room, 3))
    stages, downset, below = np.zeros(room, np.int64), np.zeros(room, np.int64), np.full(room, -1, np.int64)
    variant, choice = np.full(room, -1, np.int64), np.full(room, NO_CHOICE, np.int64)
    count[0] = 1
    empty = empty_tail(schedule)
    for column in range(5):
        figures[0, column] = empty[column]
    used = 1

    # Of the downset at hand: candidates, linked by number of stages.
    new_room = 1024
    new_figures, new_stage = np.empty((new_room, 5)), np.empty((new_room, 3))
    new_below, new_variant = np.empty(new_room, np.int64), np.empty(new_room, np.int64)
    new_choice, link = np.empty(new_room, np.int64), np.empty(new_room, np.int64)
    first = np.full(most_stages + 2, -1, np.int64)
    rows = np.empty((1, 3))
    row_choice = np.empty(1, np.int64)

    status = FINISHED
    for i in range(1, m):
        if control[1] != 0.0:
            status = STOPPED
            break
        limit = control[0] * (1.0 + SLACK)
        ahead_s, ahead_forward_s = ahead.ahead_s[i], ahead.ahead_forward_s[i]
        # m t + ahead <= limit for the stage that is put in front.
        slowest_s = (limit - ahead_s) / microbatches
        if slowest_s < 0.0:
            continue
        new = 0
        if np.isfinite(slowest_s):
            from_rank = np.searchsorted(ahead.ordered_s, ahead.own_s[i] * (1.0 - SLACK) - slowest_s * (1.0 + 1e-9))
        else:
            from_rank = 0
        to_rank = np.searchsorted(ahead.ordered_s, ahead.own_s[i] * (1.0 + SLACK) + 1e-300, side="right")
        for rank in range(from_rank, to_rank):
            j = ahead.order[rank]
            if count[j] == 0 or j >= i or not is_subset(tables.bits[j], tables.bits[i]):
                continue
            for r in task.variants:
                if tables.sums[r, i, MISSING] != tables.sums[r, j, MISSING]:
                    continue
                least = least_figures(i, j, r, tables, task)
                if microbatches * least.time_s + ahead_s > limit:
                    continue
                known_y = -1  # for which ``rows`` are known
                with_front, fits = False, True
                for s in range(start[j], start[j] + count[j]):
                    behind = stages[s]
                    if behind >= most_stages:
                        break
                    if task.stages > 0 and i == m - 1 and behind + 1 != task.stages:
                        continue
                    y = in_flight(schedule, microbatches, behind)
                    if least_memory_bytes(i, j, r, y, tables, task) > task.memory_bytes:
                        break
                    tail = (figures[s, 0], figures[s, 1], figures[s, 2], figures[s, 3], figures[s, 4])
                    # First with the least of everything.
                    grown = with_stage(
                        schedule,
                        microbatches,
                        behind,
                        least.time_s,
                        least.forward_s,
                        least.backward_s,
                        least.sync_s,
                        least.forward_s,
                        least.backward_s,
                        tail,
                    )
                    bound = least_batch_s(
                        schedule, microbatches, behind + 1, most_stages, ahead_s, 0.0, _without_ends(schedule, grown)
                    )
                    if bound > limit:
                        continue
                    if y != known_y:
                        known_y, with_front, fits = y, False, True
                        rows = np.empty((1, 3))
                        row_choice = np.empty(1, np.int64)
                        if fastest_fits(i, j, r, y, tables, task):
                            forward_s = tables.sums[r, i, FAST_FORWARD_S] - tables.sums[r, j, FAST_FORWARD_S]
                            rows[0, 0] = forward_s + least.crossing_s + least.tensor_forward_s
                            rows[0, 1] = least.time_s - rows[0, 0]
                            rows[0, 2] = least.sync_s
                            row_choice[0] = FASTEST
                        else:
                            row_choice[0] = _least_time_row(i, j, r, y, least, tables, task, rows)
                            fits = row_choice[0] != NO_ROW
                    if not fits:
                        break
                    if not with_front and row_choice[0] != NO_CHOICE:
                        alone = one_choice_is_best(
                            schedule, microbatches, behind, rows[0, 0], rows[0, 1], rows[0, 2], least, tail
                        )
                        if not alone:
                            with_front = True
                            _, rows = front_rows(i, j, r, y, least, tables, task)
                            row_choice = np.arange(rows.shape[0])
                    for row in range(rows.shape[0]):
                        f, b, sync = rows[row, 0], rows[row, 1], rows[row, 2]
                        grown = with_stage(schedule, microbatches, behind, f + b, f, b, sync, f, b, tail)
                        bound = least_batch_s(
                            schedule, microbatches, behind + 1, most_stages, ahead_s, ahead_forward_s, grown
                        )
                        if bound > limit:
                            continue
                        # Is it dominated? If not, those that it dominates go.
                        beaten, previous, at = False, -1, first[behind + 1]
                        while at >= 0:
                            if _as_good(new_figures[at], grown):
                                beaten = True
                                break
                            following = link[at]
                            if _no_better(new_figures[at], grown):
                                if previous < 0:
                                    first[behind + 1] = following
                                else:
                                    link[previous] = following
                            else:
                                previous = at
                            at = following
                        if beaten:
                            continue
                        if new == new_room:
                            new_figures = np.concatenate((new_figures, np.empty_like(new_figures)))
                            new_stage = np.concatenate((new_stage, np.empty_like(new_stage)))
                            new_below = np.concatenate((new_below, np.empty_like(new_below)))
                            new_variant = np.concatenate((new_variant, np.empty_like(new_variant)))
                            new_choice = np.concatenate((new_choice, np.empty_like(new_choice)))
                            link = np.concatenate((link, np.empty_like(link)))
                            new_room *= 2
                        for column in range(5):
                            new_figures[new, column] = grown[column]
                        new_stage[new, 0], new_stage[new, 1], new_stage[new, 2] = f, b, sync
                        new_below[new], new_variant[new], new_choice[new] = s, r, row_choice[row]
                        link[new] = first[behind + 1]
                        first[behind + 1] = new
                        new += 1
        if new == 0:
            continue
        start[i] = used
        for behind in range(1, most_stages + 1):
            at = first[behind]
            first[behind] = -1
            while at >= 0:
                if used == room:
                    figures = np.concatenate((figures, np.empty_like(figures)))
                    stage = np.concatenate((stage, np.empty_like(stage)))
                    stages = np.concatenate((stages, np.zeros(room, np.int64)))
                    downset = np.concatenate((downset, np.zeros(room, np.int64)))
                    below = np.concatenate((below, np.zeros(room, np.int64)))
                    variant = np.concatenate((variant, np.zeros(room, np.int64)))
                    choice = np.concatenate((choice, np.zeros(room, np.int64)))
                    room *= 2
                for column in range(5):
                    figures[used, column] = new_figures[at, column]
                for column in range(3):
                    stage[used, column] = new_stage[at, column]
                stages[used], downset[used], below[used] = behind, i, new_below[at]
                variant[used], choice[used] = new_variant[at], new_choice[at]
                used += 1
                at = link[at]
        count[i] = used - start[i]
        if used > most_states:
            status = TOO_MANY
            break
    states = StateArrays(
        start,
        count,
        figures[:used].copy(),
        stage[:used].copy(),
        stages[:used].copy(),
        downset[:used].copy(),
        below[:used].copy(),
        variant[:used].copy(),
        choice[:used].copy(),
    )
    return status, states


@inlined_kernel
def _without_ends(schedule: int, figures: Figures) -> Figures:
    """Less what depends on f and b each for itself in ways that least figures do not bound."""
    if schedule == GPIPE:
        return figures[0], figures[1], figures[2], -np.inf, 0.0
    return figures[0], figures[1], figures[2], -np.inf, -np.inf


@inlined_kernel
def _as_good(kept: FloatArray, other: Figures) -> bool:
    return bool(
        kept[0] <= other[0] * (1.0 + 1e-14)
        and kept[1] <= other[1] * (1.0 + 1e-14)
        and kept[2] <= other[2] * (1.0 + 1e-14)
        and kept[3] <= other[3] * (1.0 + 1e-14)
        and kept[4] <= other[4] * (1.0 + 1e-14)
    )


@inlined_kernel
def _no_better(kept: FloatArray, other: Figures) -> bool:
    return bool(
        other[0] <= kept[0]
        and other[1] <= kept[1]
        and other[2] <= kept[2]
        and other[3] <= kept[3]
        and other[4] <= kept[4]
    )


@kernel
def _least_time_row(
    i: int, j: int, r: int, y: int, least: LeastFigures, tables: FlushTables, task: FlushTask, rows: FloatArray
) -> int:
    """Writes the choice of least t to ``rows``: LEAST_TIME; NO_CHOICE if only a bound is known; or NO_ROW."""
    _, start, items = stage_items(i, j, r, y, tables, task)
    chosen = np.empty(start.size - 1, np.int64)
    found_s = least_time_choice(start, items, task.memory_bytes, chosen)
    if found_s == np.inf:
        return NO_ROW
    if found_s < 0.0:
        rows[0, 0], rows[0, 1], rows[0, 2] = least.forward_s, least.backward_s, least.sync_s
        return NO_CHOICE
    rows[0, 0], rows[0, 1], rows[0, 2] = least.tensor_forward_s, least.tensor_backward_s, 0.0
    for o in chosen:
        rows[0, 0] += items[o, 0]
        rows[0, 1] += items[o, 1]
        rows[0, 2] += items[o, 2] * task.sync_s_per_byte
    return LEAST_TIME


@kernel
def front_rows(
    i: int, j: int, r: int, y: int, least: LeastFigures, tables: FlushTables, task: FlushTask
) -> tuple[int, FloatArray]:
    """The undominated choices: EXACT, MERGED or NONE_FITS, and float64[rows, 3], as ``choice_front`` numbers them."""
    _, start, items = stage_items(i, j, r, y, tables, task)
    status, rows, _, _, _ = choice_front(start, items, task.memory_bytes)
    for row in range(rows.shape[0]):
        rows[row, 0] += least.tensor_forward_s
        rows[row, 1] += least.tensor_backward_s
        rows[row, 2] *= task.sync_s_per_byte
    return status, rows
