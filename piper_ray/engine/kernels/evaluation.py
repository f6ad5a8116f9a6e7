"""Kernels around a level: runs of small levels in one call, and the way back from V to a plan."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.cost.stage import in_flight
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.buckets import add_level
from piper_ray.engine.kernels.level import evaluate_downsets, stage_fits
from piper_ray.engine.kernels.scan import jumping_s
from piper_ray.engine.kernels.selection import YES, StepCache, make_step_cache
from piper_ray.engine.kernels.types import (
    Earlier,
    FrontArrays,
    IndexArray,
    LevelStates,
    StageKey,
    StageWork,
    StateArrays,
)


@kernel
def store_states(first: int, states: LevelStates, used: int, fronts: FrontArrays) -> int:
    """Appends the fronts of the downsets from ``first`` on; returns the number of states in use."""
    for k in range(states.counts.size):
        fronts.start[first + k] = used
        fronts.states[first + k] = states.counts[k]
        used += states.counts[k]
    start = used - states.tallies.size
    fronts.tally[start:used] = states.tallies
    fronts.data_parallel_sum[start:used] = states.sums
    return used


@kernel
def evaluate_levels(
    level: int, end_level: int, arrays: StateArrays, earlier: Earlier, steps: StepCache, used: int, tested: IndexArray
) -> tuple[int, int]:
    """Levels ``level`` .. end_level - 1 in turn, stopping before one whose states do not fit.

    earlier: what is known of their downsets. used: states in use. There must be room for a bucket for each downset.
    Returns the next level and the number of states in use; ``tested`` gets what the levels took.
    """
    level_start, before = arrays.tables.lattice.level_start, earlier.states
    done, read = 0, 0
    while level < end_level:
        first, last = level_start[level], level_start[level + 1]
        counts = before.counts[done : done + last - first]
        size = counts.sum()
        of_level = LevelStates(
            counts, before.tallies[read : read + size], before.sums[read : read + size], before.tested
        )
        states = evaluate_downsets(first, last, arrays, Earlier(earlier.buckets, of_level), steps)
        if used + states.tallies.size > arrays.fronts.tally.size:
            break
        done += last - first
        read += size
        used = store_states(first, states, used, arrays.fronts)
        add_level(first, last, arrays)
        tested += states.tested
        level += 1
    return level, used


@kernel
def find_first_stage(i: int, tally: int, total: int, arrays: StateArrays) -> tuple[int, int, int, int]:
    """The stage that heads state (tally, total) of downset i: (j, variant, d, state of j), or j = -1.

    Of several the one with the least j (so the most layers), then variant, then data-parallel sum behind it.
    """
    tables, target, fronts, _ = arrays
    lattice, costs, options, cluster = tables
    steps = make_step_cache(options)
    for j in range(i):
        if fronts.states[j] == 0 or not is_subset(lattice.bits[j], lattice.bits[i]):
            continue
        for r in range(options.degree.size):
            if costs.missing[i, r] > costs.missing[j, r]:
                continue
            work_s = costs.need_s[i, r] - costs.cap_s[j, r] - jumping_s(i, r, lattice.bits, j, lattice, costs)
            work = StageWork(work_s, max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r]))
            for state in range(fronts.start[j], fronts.start[j] + fronts.states[j]):
                d = total - fronts.data_parallel_sum[state]
                stage_tally = target.stage_weight + options.degree[r] * d * target.device_weight
                if d < 1 or fronts.tally[state] + stage_tally != tally:
                    continue
                if not np.any(cluster.divisors[cluster.first_divisor[r] : cluster.end_divisor[r]] == d):
                    continue
                y = in_flight(fronts.data_parallel_sum[state], d)
                if stage_fits(StageKey(i, j, r), d, y, work, tables, target.threshold_s, steps) == YES:
                    return j, r, d, state
    return -1, -1, -1, -1
