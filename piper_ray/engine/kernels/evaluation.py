"""Kernels around a level: runs of small levels in one call, and the way back from V to a plan."""

from __future__ import annotations

from typing import NamedTuple

from piper_ray.compiled.jit import leaf_kernel
from piper_ray.cost.stage import in_flight
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.buckets import add_level
from piper_ray.engine.kernels.level import front_of, stage_fits
from piper_ray.engine.kernels.scan import COUNTERS, Scratch, jumping_s
from piper_ray.engine.kernels.selection import YES, StepCache
from piper_ray.engine.kernels.types import (
    ClusterArrays,
    Earlier,
    FrontArrays,
    IndexArray,
    StageKey,
    StageWork,
    StateArrays,
)


class Runs(NamedTuple):
    """Runs of consecutive downsets, and where the front of the first one goes.

    are_levels: run k is level k, finished when its fronts are there, with a bucket for each downset at most.
    """

    start: IndexArray  # int64[runs + 1]; run k holds downsets start[k] .. start[k + 1] - 1
    base: int  # the front of downset i goes to place i - base
    are_levels: bool


@leaf_kernel
def evaluate_runs(
    runs: Runs,
    run: int,
    arrays: StateArrays,
    earlier: Earlier,
    scratch: Scratch,
    found: FrontArrays,
    used: int,
    tested: IndexArray,
) -> tuple[int, int]:
    """Fronts of downsets, run after run from ``run`` on, stopping before one whose states do not fit.

    earlier: of the downsets from the first run on. scratch: of the calling thread, with room for all buckets. found:
    gets the fronts, behind ``used`` states. Returns the next run and the number of states in use; ``tested`` gets what
    the runs took.
    """
    run_start, base, are_levels = runs
    known = earlier.states.counts
    before, read = run_start[run], 0
    while run < run_start.size - 1:
        first, last = run_start[run], run_start[run + 1]
        for counter in range(COUNTERS):
            scratch.tested[counter] = 0
        end = used
        for i in range(first, last):
            size = front_of(i, arrays, earlier, read, known[i - before], scratch)
            read += known[i - before]
            if end + size > found.tally.size:
                return run, used
            found.start[i - base], found.states[i - base] = end, size
            for k in range(size):
                found.tally[end + k] = scratch.front_tally[k]
                found.data_parallel_sum[end + k] = scratch.front_sum[k]
            end += size
        used = end
        if are_levels:
            add_level(run, arrays)
        for counter in range(COUNTERS):
            tested[counter] += scratch.tested[counter]
        run += 1
    return run, used


@leaf_kernel
def trace_stages(i: int, state: int, arrays: StateArrays, steps: StepCache, stages: IndexArray) -> int:
    """The stages of the plan of a state, one of downset i, from the front; returns how many, or -1 for a state that has
    no origin.

    steps: scratch of the calling thread. stages: gets int64[stages, 5], of each I, J, variant, data-parallel degree,
    and sum of these degrees behind it; has a row for each vertex.
    """
    fronts, count = arrays.fronts, 0
    while i != 0:
        tally, total = fronts.tally[state], fronts.data_parallel_sum[state]
        j, variant, d, behind = find_first_stage(i, tally, total, arrays, steps)
        if j < 0:
            return -1
        stages[count, 0], stages[count, 1], stages[count, 2] = i, j, variant
        stages[count, 3], stages[count, 4] = d, fronts.data_parallel_sum[behind]
        count += 1
        i, state = j, behind
    return count


@leaf_kernel
def find_first_stage(
    i: int, tally: int, total: int, arrays: StateArrays, steps: StepCache
) -> tuple[int, int, int, int]:
    """The stage that heads state (tally, total) of downset i: (j, variant, d, state of j), or j = -1.

    Of several the one with the least j (so the most layers), then variant, then data-parallel sum behind it.
    steps: scratch of the calling thread.
    """
    tables, target, fronts = arrays.tables, arrays.target, arrays.fronts
    lattice, costs, options, cluster = tables
    for j in range(i):
        if fronts.states[j] == 0 or not is_subset(lattice.bits[j], lattice.bits[i]):
            continue
        for r in range(options.degree.size):
            if costs.missing[i, r] > costs.missing[j, r]:
                continue
            for state in range(fronts.start[j], fronts.start[j] + fronts.states[j]):
                d = total - fronts.data_parallel_sum[state]
                stage_tally = target.stage_weight + options.degree[r] * d * target.device_weight
                if d < 1 or fronts.tally[state] + stage_tally != tally:
                    continue
                if not _may_have(cluster, r, d):
                    continue
                # Few states come so far: it is quicker to sum anew for each.
                work_s = costs.need_s[i, r] - costs.cap_s[j, r] - jumping_s(i, r, lattice.bits, j, lattice, costs)
                work = StageWork(work_s, max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r]))
                y = in_flight(fronts.data_parallel_sum[state], d)
                if stage_fits(StageKey(i, j, r), d, y, work, tables, target.threshold_s, steps) == YES:
                    return j, r, d, state
    return -1, -1, -1, -1


@leaf_kernel
def _may_have(cluster: ClusterArrays, r: int, d: int) -> bool:
    """Whether d is among the data-parallel degrees of the variant."""
    for index in range(cluster.first_divisor[r], cluster.end_divisor[r]):
        if cluster.divisors[index] == d:
            return True
    return False
