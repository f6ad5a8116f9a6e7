"""Kernels: by prices of positions, the least cost of the stages in front of each tail, if these are stages of the
lattice.

A plan is a way from the empty set to V, stage by stage. With prices, the cost of a stage depends only on its position;
so the least remaining cost is found from the end of the way, over all stages that may be part of a plan below a cutoff.
Unlike sums over layers alone, it includes what crosses borders, and only stages that fit.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.arrays import twice
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.flush_stages import (
    AheadArrays,
    in_flight,
    least_figures,
    least_memory_bytes,
    priced_time_s,
)
from piper_ray.engine.kernels.flush_states import (
    least_priced_s,
    next_alive,
    ranks_within,
    set_alive,
    tail_limits_at,
)
from piper_ray.engine.kernels.flush_types import SLACK, SUM, FlushTables, FlushTask, PathBounds
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey

_TOO_MUCH = 1e-9
"""Relative rounding error of sums of costs."""

_MOST_KEPT = 2**23
"""Largest number of pairs of a stage and a position: 24 bytes each."""

_PRICING = 8
"""How many times as long as testing a pair of downsets it takes to price a stage at a position."""


@kernel
def least_ahead_s(
    tables: FlushTables,
    task: FlushTask,
    ahead: AheadArrays,
    most_tails: IndexArray,
    bounds: PathBounds,
    most_work: int,
    control: FloatArray,
) -> FloatArray:
    """Returns float64[m, most_stages + 1]: a lower bound on the cost in front of a tail of each number of stages, in
    plans whose batch takes at most control[0]; inf if there is no such plan. Returns ``bounds.ahead_s`` if control[1]
    is not zero, if there is no room for all stages of such plans, or if it takes more than ``most_work``, which counts
    pairs of downsets, and ``_PRICING`` for each price of a stage.
    """
    m, positions = tables.bits.shape[0], task.most_stages
    limit = control[0] * (1.0 + SLACK)
    least_s = np.full((m, positions + 1), np.inf)
    least_s[0, 0] = 0.0
    alive = np.zeros((positions, m // 64 + 2), np.uint64)
    for few in range(positions):
        set_alive(alive[few], ahead.rank[0])
        set_alive(alive[few], 64 * alive.shape[1] - 1)
    # Stages kept, by outer downset: the inner one, the number of stages behind, and the cost.
    start = np.zeros(m + 1, np.int64)
    inner_of, behind_of, cost_of = np.empty(4096, np.int64), np.empty(4096, np.int64), np.empty(4096)
    used, work = 0, 0
    for i in range(1, m):
        start[i] = used
        if control[1] != 0.0 or work > most_work or used > _MOST_KEPT:
            return bounds.ahead_s
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
                    cost_s = least_priced_s(key, behind, time_s, least, bounds)
                    if is_first:
                        cost_s += bounds.first_sync[behind] * least.sync_s
                    behind_s = least_s[j, behind] + cost_s
                    if behind_s + bounds.ahead_s[i, behind + 1] > limit * (1.0 + _TOO_MUCH):
                        continue
                    least_s[i, behind + 1] = min(least_s[i, behind + 1], behind_s)
                    if used == cost_of.size:
                        inner_of, behind_of, cost_of = twice(inner_of), twice(behind_of), twice(cost_of)
                    inner_of[used], behind_of[used], cost_of[used] = j, behind, cost_s
                    used += 1
        fewest = positions
        for stages in range(positions, 0, -1):
            if least_s[i, stages] < np.inf:
                fewest = stages
        for few in range(fewest, positions):
            set_alive(alive[few], ahead.rank[i])
    start[m] = used
    found = np.full((m, positions + 1), np.inf)
    found[m - 1] = 0.0
    for i in range(m - 1, 0, -1):
        for at in range(start[i], start[i + 1]):
            j, behind = inner_of[at], behind_of[at]
            found[j, behind] = min(found[j, behind], cost_of[at] + found[i, behind + 1])
    closer: FloatArray = np.maximum(found - _TOO_MUCH * limit, bounds.ahead_s)
    return closer
