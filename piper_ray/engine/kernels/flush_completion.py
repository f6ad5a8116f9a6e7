"""Kernels: by prices of positions, the least cost of the stages in front of each tail, if these are stages of the
lattice.

A plan is a way from the empty set to V, stage by stage. With prices, the cost of a stage depends only on its position;
so the least remaining cost is found from the end of the way, over all stages that may be part of a plan below a cutoff.
Unlike sums over layers alone, it includes what crosses borders, and only stages that fit.

A way that costs more than the cutoff is no plan below it, by any prices. So a stage is left out for good if no way with
it costs less, and the prices after these have fewer stages to choose from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.arrays import twice, twice_rows
from piper_ray.compiled.jit import inlined_kernel, kernel
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.flush_stages import (
    AheadArrays,
    LeastFigures,
    in_flight,
    least_figures,
    least_memory_bytes,
    priced_time_s,
)
from piper_ray.engine.kernels.flush_states import least_priced_s, next_alive, ranks_within, set_alive, tail_limits_at
from piper_ray.engine.kernels.flush_types import SLACK, SUM, FlushTables, FlushTask, FreeStages, PathBounds
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey

_TOO_MUCH = 1e-9
"""Relative rounding error of sums of costs."""

_MOST_BYTES = 400_000_000
"""Memory for stages and their positions."""

_STAGE_BYTES, _PLACE_BYTES = 60, 14

_PRICING = 8
"""How many times as long as testing a pair of downsets it takes to price a stage at a position."""


_FREE_S = -1.0
"""Marks free stages, where the least time of a stage would stand."""


class PlacedStages(NamedTuple):
    """Stages that plans below a cutoff may have, each at each position where it may be. Sizes: p such pairs, by outer
    downset; s stages."""

    start: IndexArray  # int64[m + 1]: the first pair of an outer downset
    stage: npt.NDArray[np.int32]  # int32[p], ascending
    behind: npt.NDArray[np.int16]  # int16[p]
    time_s: FloatArray  # float64[p]: the least of both passes that fits; -1 if the stage is free
    inner: npt.NDArray[np.int32]  # int32[s]
    figures: FloatArray  # float64[s, 7]: ``LeastFigures``


@kernel
def placed_stages(
    tables: FlushTables,
    task: FlushTask,
    ahead: AheadArrays,
    most_tails: IndexArray,
    bounds: PathBounds,
    free: FreeStages,
    most_work: int,
    control: FloatArray,
) -> tuple[bool, PlacedStages]:
    """Returns the stages of plans whose batch takes at most control[0]; and False if they are not all, because
    control[1] is not zero, there is no room for them, or it takes more than ``most_work``, which counts pairs of
    downsets, and ``_PRICING`` for each price of a stage. free: further stages, which cost nothing.
    """
    m, positions = tables.bits.shape[0], task.most_stages
    limit = control[0] * (1.0 + SLACK)
    least_s = np.full((m, positions + 1), np.inf)
    least_s[0, 0] = 0.0
    alive = np.zeros((positions, m // 64 + 2), np.uint64)
    for few in range(positions):
        set_alive(alive[few], ahead.rank[0])
        set_alive(alive[few], 64 * alive.shape[1] - 1)
    start = np.zeros(m + 1, np.int64)
    stage_of, behind_of, time_of = np.empty(4096, np.int32), np.empty(4096, np.int16), np.empty(4096)
    inner_of, figures = np.empty(4096, np.int32), np.empty((4096, 7))
    used, stages, work, has_all = 0, 0, 0, True
    for i in range(1, m):
        start[i] = used
        has_all = (
            has_all
            and control[1] == 0.0
            and work <= most_work
            and _STAGE_BYTES * stages + _PLACE_BYTES * used <= _MOST_BYTES
        )
        if not has_all:
            continue
        there = tail_limits_at(i, limit, most_tails[i], task, ahead)
        if there.most < there.fewest:
            continue
        outer, is_first = tables.bits[i], i == m - 1
        rank, to_rank = ranks_within(i, there.slowest_s, ahead)
        behind_it = alive[there.most - 1]
        rank = next_alive(behind_it, rank)
        while rank < to_rank:
            at = rank
            rank = next_alive(behind_it, rank + 1)
            work += 1
            j = ahead.order[at]
            if j >= i or not is_subset(ahead.ordered_bits[at], outer):
                continue
            for r in task.variants:
                if tables.sums[r, i, SUM.missing] != tables.sums[r, j, SUM.missing]:
                    continue
                key = StageKey(i, j, r)
                least = least_figures(key, tables, task)
                if task.microbatches * least.time_s + there.fill_s > limit:
                    continue
                if stages == inner_of.size:
                    inner_of, figures = twice(inner_of), twice_rows(figures)
                is_kept = False
                for behind in range(there.fewest - 1, there.most):
                    if task.next_cell[behind, task.move[r]] < 0 or (
                        is_first and task.stages > 0 and behind + 1 != task.stages
                    ):
                        continue
                    if least_s[j, behind] + bounds.ahead_s[j, behind] > limit * (1.0 + _TOO_MUCH):
                        continue
                    work += _PRICING
                    y = in_flight(task.schedule, task.microbatches, behind)
                    if least_memory_bytes(key, y, tables, task) > task.memory_bytes[r]:
                        break
                    time_s = priced_time_s(key, y, least, tables, task)
                    if task.microbatches * time_s + there.fill_s > limit:
                        break
                    room = task.room[behind + 1] - task.room[behind] if task.room.size > 0 else np.inf
                    if time_s > there.spare_s * room:
                        continue
                    behind_s = least_s[j, behind] + _cost_s(key, is_first, behind, time_s, least, bounds)
                    if behind_s + bounds.ahead_s[i, behind + 1] > limit * (1.0 + _TOO_MUCH):
                        continue
                    least_s[i, behind + 1] = min(least_s[i, behind + 1], behind_s)
                    if used == time_of.size:
                        stage_of, behind_of, time_of = twice(stage_of), twice(behind_of), twice(time_of)
                    stage_of[used], behind_of[used], time_of[used] = stages, behind, time_s
                    used += 1
                    is_kept = True
                if is_kept:
                    inner_of[stages] = j
                    for column in range(7):
                        figures[stages, column] = least[column]
                    stages += 1
        first_free, end_free = (free.start[i], free.start[i + 1]) if free.start.size > 1 else (0, 0)
        for at in range(first_free, end_free):
            j, is_kept = free.inner[at], False
            for behind in range(there.fewest - 1, there.most):
                behind_s = least_s[j, behind]
                if behind_s + bounds.ahead_s[i, behind + 1] > limit * (1.0 + _TOO_MUCH) or behind_s == np.inf:
                    continue
                least_s[i, behind + 1] = min(least_s[i, behind + 1], behind_s)
                if used == time_of.size:
                    stage_of, behind_of, time_of = twice(stage_of), twice(behind_of), twice(time_of)
                stage_of[used], behind_of[used], time_of[used] = stages, behind, _FREE_S
                used += 1
                is_kept = True
            if is_kept:
                if stages == inner_of.size:
                    inner_of, figures = twice(inner_of), twice_rows(figures)
                inner_of[stages], figures[stages] = j, 0.0
                stages += 1
        fewest = positions
        for count in range(positions, 0, -1):
            if least_s[i, count] < np.inf:
                fewest = count
        for few in range(fewest, positions):
            set_alive(alive[few], ahead.rank[i])
    start[m] = used
    return has_all, PlacedStages(
        start,
        stage_of[:used].copy(),
        behind_of[:used].copy(),
        time_of[:used].copy(),
        inner_of[:stages].copy(),
        figures[:stages].copy(),
    )


@kernel
def cheapest_way(stages: PlacedStages, bounds: PathBounds, limit: float) -> tuple[FloatArray, IndexArray, PlacedStages]:
    """Returns float64[m, positions + 1], a lower bound on the cost in front of a tail of each number of stages, in
    plans whose batch takes at most ``limit``, inf if there is no such plan; the downsets of the cheapest way, from the
    empty one on, int64[..]; and the stages that may be in plans of at most ``limit``.

    stages: at least those of such plans. Each plan is a way whose cost is no more than its time; so a stage on no way
    of at most ``limit`` is in no such plan, and what is left has the stages of all of them.
    """
    m, positions, used = bounds.of_stage_s.shape[0], bounds.of_stage_s.shape[1], stages.stage.size
    slack = _TOO_MUCH * (limit + bounds.of_stage_s[m - 1].max() + bounds.room_s.sum())
    cost_of = np.empty(used)
    behind_s, ahead_s = np.full((m, positions + 1), np.inf), np.full((m, positions + 1), np.inf)
    behind_s[0, 0] = 0.0
    ahead_s[m - 1] = 0.0
    for i in range(1, m):
        for at in range(stages.start[i], stages.start[i + 1]):
            s, behind = stages.stage[at], int(stages.behind[at])
            j, row = int(stages.inner[s]), stages.figures[s]
            least = LeastFigures(row[0], row[1], row[2], row[3], row[4], row[5], row[6])
            cost_of[at] = _cost_s(StageKey(i, j, 0), i == m - 1, behind, stages.time_s[at], least, bounds)
            behind_s[i, behind + 1] = min(behind_s[i, behind + 1], behind_s[j, behind] + cost_of[at])
    following = np.zeros((m, positions + 1), np.int64)
    for i in range(m - 1, 0, -1):
        # Stages without layers, which come last, lead to the same downset.
        begin, end = stages.start[i], stages.start[i + 1]
        alone = end
        while alone > begin and stages.inner[stages.stage[alone - 1]] == i:
            alone -= 1
        for number in range(end - begin):
            at = end - 1 - number if number < end - alone else begin + number - (end - alone)
            j, behind = int(stages.inner[stages.stage[at]]), int(stages.behind[at])
            whole_s = cost_of[at] + ahead_s[i, behind + 1]
            if whole_s < ahead_s[j, behind]:
                ahead_s[j, behind], following[j, behind] = whole_s, i
    start, left = np.zeros(m + 1, np.int64), np.zeros(used, np.bool_)
    count = 0
    for i in range(1, m):
        start[i] = count
        for at in range(stages.start[i], stages.start[i + 1]):
            j, behind = int(stages.inner[stages.stage[at]]), int(stages.behind[at])
            left[at] = behind_s[j, behind] + cost_of[at] + ahead_s[i, behind + 1] <= limit + slack
            count += left[at]
    start[m] = count
    way = np.zeros(positions + 1, np.int64)
    length = 1
    while ahead_s[0, 0] < np.inf and way[length - 1] < m - 1:
        way[length] = following[way[length - 1], length - 1]
        length += 1
    rest = PlacedStages(
        start, stages.stage[left], stages.behind[left], stages.time_s[left], stages.inner, stages.figures
    )
    return ahead_s - slack, way[:length], rest


@inlined_kernel
def _cost_s(
    stage: StageKey, is_first: bool, behind: int, time_s: float, least: LeastFigures, bounds: PathBounds
) -> float:
    """Returns the least cost of a stage at the prices of its position. is_first: whether none is in front of it."""
    if time_s == _FREE_S:
        return 0.0
    cost_s = least_priced_s(stage, behind, time_s, least, bounds)
    return cost_s + bounds.first_sync[behind] * least.sync_s if is_first else cost_s
