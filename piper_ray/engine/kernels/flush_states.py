"""Kernels: for one (d, t) the undominated pipeline tails of every downset, by mix.

Under 1F1B a tail's figures depend on the largest f and b of the stages in front of it. So there are several tables:
table g promises that some stage in front takes at least level g; a stage that does keeps the promise. The tail behind a
stage comes from the table of the highest level that its f and b, or the promise, reach. Level 0 promises nothing;
without further levels all figures are lower bounds, and mostly exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import stable_order, twice, twice_rows
from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import is_subset, lowest_position
from piper_ray.engine.kernels.flush_choices import FEW
from piper_ray.engine.kernels.flush_mixes import is_shared_out, may_be_first, spent_s
from piper_ray.engine.kernels.flush_paths import Figures, StageSeconds, empty_tail, least_batch_s, with_stage
from piper_ray.engine.kernels.flush_stages import (
    NO_ROW,
    AheadArrays,
    LeastFigures,
    front_rows,
    in_flight,
    least_figures,
    least_memory_bytes,
    most_behind,
    one_choice_is_best,
    priced_time_s,
    quickest_row,
)
from piper_ray.engine.kernels.flush_types import (
    FIGURES,
    NO_CHOICE,
    ON_FRONT,
    ONE_F_ONE_B,
    ORIGIN,
    PRICED,
    SLACK,
    SUM,
    TWO_BW,
    FlushTables,
    FlushTask,
    FreeStages,
    PathBounds,
    TailArrays,
)
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, StageKey

FINISHED = 0
STOPPED = 1
TOO_MANY = 2


@kernel
def tails(
    tables: FlushTables,
    task: FlushTask,
    ahead: AheadArrays,
    most_tails: IndexArray,
    levels: FloatArray,
    grid_s: FloatArray,
    bounds: PathBounds,
    free: FreeStages,
    most_states: int,
    follows_all: bool,
    control: FloatArray,
) -> tuple[int, TailArrays]:
    """Finds the states of all downsets from which a batch of at most control[0] seconds may result. Returns FINISHED,
    STOPPED because control[1] is not zero, or TOO_MANY for ``most_states``. Other threads may lower control[0] during
    the call.

    most_tails: int64[m], the most stages that a tail of each downset may have. levels: float64[l, 2], ascending forward
    and backward seconds, the first 0 and 0. grid_s: float64[FIGURES + 1], of each figure the seconds to whose multiples
    it is rounded down, so that fewer states differ, and all bound those that are left out; float64[0]: none is rounded.
    bounds: of the task. follows_all: whether choices other than that of least time are followed; for an early plan they
    are not, and nothing is proved.
    """
    m = tables.bits.shape[0]
    schedule, microbatches, most_stages = task.schedule, task.microbatches, task.most_stages
    ends, of_one = task.ends, task.next_cell.shape[0] - 1
    mixes = 1 + ends * of_one
    start, kept = np.zeros(levels.shape[0] * ends * m, np.int64), np.zeros(levels.shape[0] * ends * m, np.int64)
    room = 4096
    figures, stage = np.empty((room, FIGURES + 1)), np.empty((room, 3))
    origin = np.zeros((room, len(ORIGIN)), np.int64)
    is_priced, is_shared = bounds.forward.size > 0, task.share_left.size > 0
    origin[0, ORIGIN.below], origin[0, ORIGIN.variant], origin[0, ORIGIN.choice] = -1, -1, NO_CHOICE
    kept[::m] = 1
    empty = empty_tail(schedule)
    for column in range(FIGURES):
        figures[0, column] = empty[column]
    figures[0, PRICED] = 0.0
    used = 1
    # alive[k]: bit ``rank`` of each downset with states of at most k stages; the last bit ends each search.
    alive = np.zeros((most_stages, m // 64 + 2), np.uint64)
    for few in range(most_stages):
        set_alive(alive[few], ahead.rank[0])
        set_alive(alive[few], 64 * alive.shape[1] - 1)

    # Of the current downset: candidates, linked by level and mix.
    new_room = 1024
    new_figures, new_stage = np.empty((new_room, FIGURES + 1)), np.empty((new_room, 3))
    new_origin, link = np.empty((new_room, len(ORIGIN)), np.int64), np.empty(new_room, np.int64)
    first = np.full((levels.shape[0], mixes), -1, np.int64)
    touched = np.empty(1024)  # the levels and mixes that have candidates, as level * mixes + mix
    # Of the current stage, by the number of stages behind it: a bound on its time, its choice of least time, its front.
    stage_id = 0
    priced_of, priced = np.full(most_stages + 1, -1, np.int64), np.zeros(most_stages + 1)
    one_of, front_of = np.full(most_stages + 1, -1, np.int64), np.full(most_stages + 1, -1, np.int64)
    one_choice = np.zeros(most_stages + 1, np.int64)
    one = np.zeros((most_stages + 1, 4))
    front_begin, front_end = np.zeros(most_stages + 1, np.int64), np.zeros(most_stages + 1, np.int64)
    fronts = np.empty((1024, 4))

    status = FINISHED
    for i in range(1, m):
        if control[1] != 0.0:
            status = STOPPED
            break
        limit = control[0] * (1.0 + SLACK)
        ahead_s, ahead_forward_s = ahead.ahead_s[i], ahead.ahead_forward_s[i]
        there = tail_limits_at(i, limit, most_tails[i], task, ahead)
        most_tail, fewest_tail, spare_s, fill_s = there.most, there.fewest, there.spare_s, there.fill_s
        if most_tail < fewest_tail:
            continue
        new, touched_count = 0, 0
        outer = tables.bits[i]
        most_s = there.slowest_s * (1.0 + SLACK)
        share_ahead = ahead.ahead_share[i] * (1.0 - SLACK) if is_shared else 0.0
        top_level = levels.shape[0] - 1 if i < m - 1 else 0  # nothing is in front of all layers
        from_rank, to_rank = ranks_within(i, there.slowest_s, ahead)
        behind_it = alive[most_tail - 1]
        rank = next_alive(behind_it, from_rank)
        while rank < to_rank:
            inner = rank
            rank = next_alive(behind_it, rank + 1)
            j = ahead.order[inner]
            if j >= i or not is_subset(ahead.ordered_bits[inner], outer):
                continue
            for r in task.variants:
                if tables.sums[r, i, SUM.missing] != tables.sums[r, j, SUM.missing]:
                    continue
                if i == m - 1 and not may_be_first(r, task):
                    continue
                key = StageKey(i, j, r)
                least = least_figures(key, tables, task)
                if microbatches * least.time_s + fill_s > limit:
                    continue
                stage_id += 1
                before, after = task.ends_behind[r] * of_one, task.ends_ahead[r] * of_one
                twice_s = 2.0 * least.time_s if schedule == ONE_F_ONE_B else least.time_s
                used_rows = 0
                # The levels that the stage may reach.
                low = level_of(levels, least.forward_s, least.backward_s)
                high = level_of(levels, most_s - least.backward_s, most_s - least.forward_s)
                for level in range(top_level + 1):
                    promised_f, promised_b = levels[level, 0], levels[level, 1]
                    for source in range(max(level, low), max(level, high) + 1):
                        cell = (source * ends + task.ends_behind[r]) * m + j
                        for s in range(start[cell], start[cell] + kept[cell]):
                            behind = origin[s, ORIGIN.stages]
                            if behind >= most_tail:
                                break
                            if behind + 1 < fewest_tail:
                                continue
                            next_cell = task.next_cell[max(0, origin[s, ORIGIN.mix] - before), task.move[r]]
                            if next_cell < 0 or (i == m - 1 and task.is_whole[next_cell] == 0):
                                continue
                            if is_shared:
                                left_s = limit - spent_s(schedule, figures_of(figures, s)) - twice_s
                                if share_ahead > limit * task.share_left[next_cell, 0]:
                                    continue
                                if is_shared_out(share_ahead, left_s, task.share_left[next_cell, 1]):
                                    continue
                            mix = after + next_cell
                            if task.stages > 0 and i == m - 1 and behind + 1 != task.stages:
                                continue
                            y = in_flight(schedule, microbatches, behind)
                            if least_memory_bytes(key, y, tables, task) > task.memory_bytes[r]:
                                break
                            if priced_of[behind] != stage_id:
                                priced_of[behind] = stage_id
                                priced[behind] = priced_time_s(key, y, least, tables, task)
                            time_s = priced[behind]
                            room_s = most_s
                            if task.room.size > 0:
                                room_s = min(most_s, spare_s * (task.room[behind + 1] - task.room[behind]))
                            if time_s > room_s:
                                continue
                            if microbatches * time_s + fill_s > limit:
                                break
                            priced_s = 0.0
                            if is_priced:
                                priced_s = figures[s, PRICED] + least_priced_s(key, behind, time_s, least, bounds)
                                if i == m - 1:
                                    priced_s += bounds.first_sync[behind] * least.sync_s
                                if priced_s + bounds.ahead_s[i, behind + 1] > limit * (1.0 + 1e-9):
                                    continue
                            tail = figures_of(figures, s)
                            # First with the least of every figure.
                            seconds = StageSeconds(
                                time_s,
                                least.forward_s,
                                least.backward_s,
                                least.sync_s,
                                max(least.forward_s, promised_f),
                                max(least.backward_s, promised_b),
                            )
                            grown = with_stage(schedule, microbatches, behind, seconds, tail)
                            bound = least_batch_s(
                                schedule, microbatches, behind + 1, most_stages, ahead_s, ahead_forward_s, grown
                            )
                            if bound > limit:
                                continue
                            if is_shared:
                                left_s = limit - spent_s(schedule, grown)
                                if is_shared_out(share_ahead, left_s, task.share_left[next_cell, 1]):
                                    continue
                            if _has_as_good(grown, priced_s, new_figures, first[level, mix], link):
                                continue
                            if one_of[behind] != stage_id:
                                one_of[behind] = stage_id
                                one_choice[behind] = quickest_row(
                                    key, y, room_s, follows_all, least, tables, task, one[behind]
                                )
                            if one_choice[behind] == NO_ROW:
                                continue
                            alone = not follows_all or one_choice[behind] == NO_CHOICE
                            alone = alone or one_choice_is_best(
                                task, behind, one[behind], levels.shape[0] > 1, least, tail
                            )
                            if not alone and front_of[behind] != stage_id:
                                front_of[behind] = stage_id
                                rows = front_rows(key, y, room_s, FEW, least, one[behind], tables, task)[1]
                                while used_rows + rows.shape[0] > fronts.shape[0]:
                                    fronts = twice_rows(fronts)
                                front_begin[behind] = used_rows
                                for row in range(rows.shape[0]):
                                    for column in range(4):
                                        fronts[used_rows, column] = rows[row, column]
                                    used_rows += 1
                                front_end[behind] = used_rows
                            rows_here = 1 if alone else front_end[behind] - front_begin[behind]
                            for row in range(rows_here):
                                taken = one[behind] if alone else fronts[front_begin[behind] + row]
                                f, b, sync, both_s = taken[0], taken[1], taken[2], taken[3]
                                if levels.shape[0] > 1 and max(level, level_of(levels, f, b)) != source:
                                    continue
                                # A choice that stands for all others counts as the cheapest of them.
                                if is_priced and not alone:
                                    row_s = bounds.forward[behind] * f + bounds.backward[behind] * b
                                    row_s += min(bounds.forward[behind], bounds.backward[behind]) * (both_s - f - b)
                                    of_sync = bounds.sync[behind] + (bounds.first_sync[behind] if i == m - 1 else 0.0)
                                    priced_s = figures[s, PRICED] + row_s + of_sync * sync
                                    if priced_s + bounds.ahead_s[i, behind + 1] > limit * (1.0 + 1e-9):
                                        continue
                                seconds = StageSeconds(both_s, f, b, sync, max(f, promised_f), max(b, promised_b))
                                grown = with_stage(schedule, microbatches, behind, seconds, tail)
                                bound = least_batch_s(
                                    schedule, microbatches, behind + 1, most_stages, ahead_s, ahead_forward_s, grown
                                )
                                if bound > limit:
                                    continue
                                if grid_s.size > 0:
                                    grown = _rounded_down(grown, grid_s)
                                    priced_s = _multiple_below(priced_s, grid_s[PRICED])
                                if _is_beaten(grown, priced_s, new_figures, first[level], mix, link):
                                    continue
                                if new == new_room:
                                    new_figures, new_stage = twice_rows(new_figures), twice_rows(new_stage)
                                    new_origin, link = twice_rows(new_origin), twice(link)
                                    new_room *= 2
                                for column in range(FIGURES):
                                    new_figures[new, column] = grown[column]
                                new_figures[new, PRICED] = priced_s
                                new_stage[new, 0], new_stage[new, 1], new_stage[new, 2] = f, b, sync
                                new_origin[new, ORIGIN.stages], new_origin[new, ORIGIN.downset] = behind + 1, i
                                new_origin[new, ORIGIN.below], new_origin[new, ORIGIN.variant] = s, r
                                new_origin[new, ORIGIN.choice] = one_choice[behind] if alone else ON_FRONT
                                new_origin[new, ORIGIN.mix] = mix
                                if first[level, mix] < 0:
                                    if touched_count == touched.size:
                                        touched = twice(touched)
                                    touched[touched_count] = level * mixes + mix
                                    touched_count += 1
                                link[new] = first[level, mix]
                                first[level, mix] = new
                                new += 1
        first_free, end_free = (free.start[i], free.start[i + 1]) if free.start.size > 1 else (0, 0)
        for at in range(first_free, end_free):
            j, r = free.inner[at], task.variants[0]
            # Those of the same downset are among the candidates, which grow in number.
            s = 0 if j == i else start[j]
            while s < (new if j == i else start[j] + kept[j]):
                tail = figures_of(new_figures if j == i else figures, s)
                priced_s = new_figures[s, PRICED] if j == i else figures[s, PRICED]
                behind = new_origin[s, ORIGIN.stages] if j == i else origin[s, ORIGIN.stages]
                mix_behind = new_origin[s, ORIGIN.mix] if j == i else origin[s, ORIGIN.mix]
                s += 1
                if behind >= most_tail or behind + 1 < fewest_tail:
                    continue
                next_cell = task.next_cell[max(0, mix_behind - task.ends_behind[r] * of_one), task.move[r]]
                if next_cell < 0:
                    continue
                mix = task.ends_ahead[r] * of_one + next_cell
                if is_priced and priced_s + bounds.ahead_s[i, behind + 1] > limit * (1.0 + 1e-9):
                    continue
                grown = with_stage(schedule, microbatches, behind, StageSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), tail)
                bound = least_batch_s(schedule, microbatches, behind + 1, most_stages, ahead_s, ahead_forward_s, grown)
                if bound > limit:
                    continue
                if grid_s.size > 0:
                    grown = _rounded_down(grown, grid_s)
                    priced_s = _multiple_below(priced_s, grid_s[PRICED])
                if _is_beaten(grown, priced_s, new_figures, first[0], mix, link):
                    continue
                if new == new_room:
                    new_figures, new_stage = twice_rows(new_figures), twice_rows(new_stage)
                    new_origin, link = twice_rows(new_origin), twice(link)
                    new_room *= 2
                for column in range(FIGURES):
                    new_figures[new, column] = grown[column]
                new_figures[new, PRICED] = priced_s
                new_stage[new] = 0.0
                new_origin[new, ORIGIN.stages], new_origin[new, ORIGIN.downset] = behind + 1, i
                new_origin[new, ORIGIN.below], new_origin[new, ORIGIN.variant] = 0, r
                new_origin[new, ORIGIN.choice], new_origin[new, ORIGIN.mix] = NO_CHOICE, mix
                if first[0, mix] < 0:
                    if touched_count == touched.size:
                        touched = twice(touched)
                    touched[touched_count] = mix
                    touched_count += 1
                link[new] = first[0, mix]
                first[0, mix] = new
                new += 1
        if new == 0:
            continue
        fewest = most_stages
        for x in stable_order(touched, touched_count):
            level, mix = divmod(int(touched[x]), mixes)
            at = first[level, mix]
            first[level, mix] = -1
            cell = (level * ends + (mix - 1) // of_one) * m + i
            if kept[cell] == 0:
                start[cell] = used
            if at >= 0:
                fewest = min(fewest, new_origin[at, ORIGIN.stages])
            while at >= 0:
                if used == room:
                    figures, stage, origin = twice_rows(figures), twice_rows(stage), twice_rows(origin)
                    room *= 2
                for column in range(FIGURES + 1):
                    figures[used, column] = new_figures[at, column]
                for column in range(3):
                    stage[used, column] = new_stage[at, column]
                for column in range(len(ORIGIN)):
                    origin[used, column] = new_origin[at, column]
                used += 1
                at = link[at]
            kept[cell] = used - start[cell]
        for few in range(fewest, most_stages):
            set_alive(alive[few], ahead.rank[i])
        if used > most_states:
            status = TOO_MANY
            break
    return status, TailArrays(start, kept, figures[:used].copy(), stage[:used].copy(), origin[:used].copy())


class TailLimits(NamedTuple):
    """Limits of the tails of one downset. fewest, most: stages; fewest > most if there is no tail. slowest_s: the most
    that its first stage takes; fill_s: what comes in addition. spare_s: see ``FlushTask.room``.
    """

    fewest: int
    most: int
    slowest_s: float
    fill_s: float
    spare_s: float


@leaf_kernel
def tail_limits_at(i: int, limit: float, most: int, task: FlushTask, ahead: AheadArrays) -> TailLimits:
    """Returns the limits of downset i in batches of at most ``limit``. most: as in ``tails``."""
    ahead_s, own_s = ahead.ahead_s[i], ahead.own_s[i]
    # m t + ahead <= limit for the stage that is put in front; without a flush nothing waits for what is ahead.
    fill_s = 0.0 if task.schedule == TWO_BW else ahead_s
    slowest_s = (limit - fill_s) / task.microbatches
    nothing = TailLimits(1, 0, slowest_s, fill_s, 0.0)
    if slowest_s < 0.0:
        return nothing
    if limit < np.inf and limit > 0.0:
        even_s = limit / task.microbatches
        if _stages_for(own_s, even_s) + _stages_for(ahead_s, even_s) > task.most_stages:
            return nothing
    most, fewest = min(most, most_behind(i, task, ahead)), 1
    spare_s = limit - max(task.work_s, own_s + ahead_s)
    if task.room.size > 0 and limit < np.inf:
        if spare_s < -SLACK * limit:
            return nothing
        spare_s = spare_s * (1.0 + SLACK) + 2.0 * SLACK * limit
        while fewest <= most and own_s > spare_s * task.room[fewest]:
            fewest += 1
        while most > 0 and ahead_s > spare_s * (task.room[task.most_stages] - task.room[most]):
            most -= 1
    return TailLimits(fewest, most, slowest_s, fill_s, spare_s)


@inlined_kernel
def ranks_within(i: int, slowest_s: float, ahead: AheadArrays) -> tuple[int, int]:
    """Returns, in ``AheadArrays.order``, the first downset from which a stage of at most ``slowest_s`` may lead to i,
    and the end of these."""
    from_rank = 0
    if np.isfinite(slowest_s):
        from_rank = np.searchsorted(ahead.ordered_s, ahead.own_s[i] * (1.0 - SLACK) - slowest_s * (1.0 + 1e-9))
    return from_rank, np.searchsorted(ahead.ordered_s, ahead.own_s[i] * (1.0 + SLACK) + 1e-300, side="right")


@inlined_kernel
def least_priced_s(stage: StageKey, behind: int, time_s: float, least: LeastFigures, bounds: PathBounds) -> float:
    """Returns a lower bound on the cost of the stage by the prices of its position: by the best choice of each layer
    minus the price of the memory, or by the least of its passes. time_s: the least of both passes.
    """
    forward, backward = bounds.forward[behind], bounds.backward[behind]
    of_layers_s = bounds.of_stage_s[stage.outer, behind] - bounds.of_stage_s[stage.inner, behind]
    of_layers_s += (forward + backward) * least.crossing_s - bounds.room_s[behind]
    of_layers_s += forward * least.tensor_forward_s + backward * least.tensor_backward_s
    of_passes_s = forward * least.forward_s + backward * least.backward_s + bounds.sync[behind] * least.sync_s
    of_passes_s += min(forward, backward) * max(0.0, time_s - least.forward_s - least.backward_s)
    return float(max(of_layers_s, of_passes_s))


@leaf_kernel
def level_of(levels: FloatArray, forward_s: float, backward_s: float) -> int:
    """Returns the highest level that a stage of these seconds reaches."""
    level = 0
    while level + 1 < levels.shape[0] and levels[level + 1, 0] <= forward_s and levels[level + 1, 1] <= backward_s:
        level += 1
    return level


@inlined_kernel
def figures_of(figures: FloatArray, s: int) -> Figures:
    """Returns the figures of one state."""
    row = figures[s]
    return row[0], row[1], row[2], row[3], row[4], row[5], row[6]


@inlined_kernel
def _rounded_down(figures: Figures, grid_s: FloatArray) -> Figures:
    return (
        _multiple_below(figures[0], grid_s[0]),
        _multiple_below(figures[1], grid_s[1]),
        _multiple_below(figures[2], grid_s[2]),
        _multiple_below(figures[3], grid_s[3]),
        _multiple_below(figures[4], grid_s[4]),
        _multiple_below(figures[5], grid_s[5]),
        _multiple_below(figures[6], grid_s[6]),
    )


@inlined_kernel
def _multiple_below(value_s: float, step_s: float) -> float:
    return float(np.floor(value_s / step_s) * step_s)


@inlined_kernel
def set_alive(alive: BitArray, rank: int) -> None:
    """Sets the bit of a downset, by its rank."""
    alive[rank >> 6] |= np.uint64(1) << np.uint64(rank & 63)


@inlined_kernel
def next_alive(alive: BitArray, rank: int) -> int:
    """Returns the first set bit from ``rank`` on; the last bit of all is set."""
    word = rank >> 6
    rest = alive[word] & (~np.uint64(0) << np.uint64(rank & 63))
    while rest == 0:
        word += 1
        rest = alive[word]
    return word * 64 + lowest_position(rest)


@inlined_kernel
def _stages_for(work_s: float, slowest_s: float) -> float:
    """Returns the least number of stages for this work, none of them slower; 0 for no work."""
    return float(np.ceil(work_s * (1.0 - 1e-9) / slowest_s)) if work_s > 0.0 else 0.0


@inlined_kernel
def _has_as_good(grown: Figures, priced_s: float, figures: FloatArray, at: int, link: IndexArray) -> bool:
    """Whether one of the candidates from ``at`` on is as good in all figures."""
    while at >= 0:
        if _as_good(figures[at], grown, priced_s):
            return True
        at = link[at]
    return False


@inlined_kernel
def _is_beaten(
    grown: Figures, priced_s: float, figures: FloatArray, first: IndexArray, mix: int, link: IndexArray
) -> bool:
    """Whether a candidate of the same mix is as good in all figures. If not, those that are no better are dropped."""
    previous, at = -1, first[mix]
    while at >= 0:
        if _as_good(figures[at], grown, priced_s):
            return True
        following = link[at]
        if _no_better(figures[at], grown, priced_s):
            if previous < 0:
                first[mix] = following
            else:
                link[previous] = following
        else:
            previous = at
        at = following
    return False


@inlined_kernel
def _as_good(kept: FloatArray, other: Figures, priced_s: float) -> bool:
    if kept[PRICED] > priced_s * (1.0 + 1e-14):
        return False
    for column in range(FIGURES):
        if kept[column] > other[column] * (1.0 + 1e-14):
            return False
    return True


@inlined_kernel
def _no_better(kept: FloatArray, other: Figures, priced_s: float) -> bool:
    if priced_s > kept[PRICED]:
        return False
    for column in range(FIGURES):
        if other[column] > kept[column]:
            return False
    return True
