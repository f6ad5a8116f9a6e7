"""Kernel: the states of a range of downsets, from those of all smaller ones. The heart of an evaluation.

For downset I the recurrence (ARCHITECTURE.md) asks for every J < I, variant and state of J. Here J ranges over buckets
of live downsets first: bounds on a whole bucket, and most buckets are gone. What a bound rejects, no member can do.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, part_kernel
from piper_ray.cost.stage import in_flight, one_device_s
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time
from piper_ray.engine.kernels.front import insert, is_dominated
from piper_ray.engine.kernels.scan import (
    BUCKETS_TESTED,
    CANDIDATES_TESTED,
    CHOICES_ABANDONED,
    STAGES_COSTED,
    UNREACHABLE,
    Scratch,
    jumping_s,
    open_buckets,
    refine,
)
from piper_ray.engine.kernels.selection import (
    GUARD,
    NO,
    UNKNOWN,
    YES,
    StepCache,
    exact_fit,
    fit_slot,
    quick_fit,
    steps_slot,
)
from piper_ray.engine.kernels.types import Earlier, StageKey, StageWork, StateArrays, Tables

_PASSES = 8


@inlined_kernel
def stage_fits(
    stage: StageKey, d: int, y: int, work: StageWork, tables: Tables, threshold_s: float, steps: StepCache
) -> int:
    """Whether the stage keeps threshold and memory with degree d and y microbatches in flight, for some choice.

    YES, NO, or UNKNOWN where the exact choice is too hard.
    """
    i, j, r = stage
    lattice, costs, options, cluster = tables
    budget_s = threshold_s * d
    used_s = one_device_s(work.work_s, work.resync_s, d)
    sharing = costs.least_shared.shape[0] > 0
    least_bytes = (costs.least_a[i, r] - costs.least_a[j, r]) * y + costs.least_b[i, r] - costs.least_b[j, r]
    if sharing:
        least_bytes += (costs.least_shared[i, r] - costs.least_shared[j, r]) / d
    if used_s > budget_s or least_bytes > cluster.memory_bytes:
        return NO
    # Where weights or charges depend on the choice, what follows takes the least of them: it may only rule out.
    fast_bytes = (costs.fast_a[i, r] - costs.fast_a[j, r]) * y + costs.fast_b[i, r] - costs.fast_b[j, r]
    if sharing:
        fast_bytes += (costs.fast_shared[i, r] - costs.fast_shared[j, r]) / d
    if fast_bytes <= cluster.memory_bytes and options.uniform[r] == 1:
        return YES
    left_s, guard_s = budget_s - used_s, GUARD * budget_s
    known = fit_slot(steps.fits, stage, d, y, tables)
    if left_s >= steps.fits.enough_s[known] + guard_s:
        return YES
    if left_s <= steps.fits.too_short_s[known] - guard_s:
        return NO
    fits, found_s = YES, budget_s
    if fast_bytes > cluster.memory_bytes:
        slot = steps_slot(steps, options, r, d, y)
        excess_bytes = fast_bytes - cluster.memory_bytes
        fits = quick_fit(lattice.bits[j], lattice.bits[i], options.class_bits, steps, slot, excess_bytes, left_s)
    if fits == UNKNOWN or (fits == YES and options.uniform[r] == 0):
        fits, found_s = exact_fit(stage, d, y, tables, budget_s)
    if fits == YES:
        steps.fits.enough_s[known] = min(steps.fits.enough_s[known], found_s - used_s)
    elif fits == NO:
        steps.fits.too_short_s[known] = max(steps.fits.too_short_s[known], left_s)
    return fits


@part_kernel
def _extend(stage: StageKey, size: int, work_s: float, arrays: StateArrays, scratch: Scratch) -> int:
    """Adds the states of I with the first stage I \\ J to the front, in ``scratch``; returns its new size.

    For one state of J only the least d that fits counts: it takes the fewest devices and the least of the sum.
    """
    i, j, r = stage
    tables, target, fronts, _ = arrays
    _, costs, options, cluster = tables
    divisors, fits_upto, fails_from = cluster.divisors, scratch.fits_upto, scratch.fails_from
    resync_s = max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r])
    work = StageWork(work_s, resync_s)
    end = cluster.end_divisor[r]
    by_time = first_divisor_by_time(work_s, resync_s, target.threshold_s, cluster.divisor_at_least, divisors.size)
    by_time = max(by_time, cluster.first_divisor[r])
    if by_time >= end:
        return size
    a_bytes, b_bytes = costs.least_a[i, r] - costs.least_a[j, r], costs.least_b[i, r] - costs.least_b[j, r]
    shared_bytes = costs.least_shared[i, r] - costs.least_shared[j, r] if costs.least_shared.shape[0] > 0 else 0.0
    sum_limit = target.data_parallel_limit[i]
    # The largest tally within the device limit, whatever its stages.
    tally_limit = (target.device_limit[i] + 1) * target.device_weight - 1
    per_replica = options.degree[r] * target.device_weight
    fresh = True
    # States come with rising sums, so the place in the front where a state with the least d belongs only moves up.
    above = 0
    d_by_time = divisors[by_time]
    for state in range(fronts.start[j], fronts.start[j] + fronts.states[j]):
        later_sum = fronts.data_parallel_sum[state]
        base_tally = fronts.tally[state] + target.stage_weight
        if later_sum + d_by_time > sum_limit:
            break
        tally = base_tally + per_replica * d_by_time
        if tally > tally_limit:
            continue
        while above < size and scratch.front_sum[above] <= later_sum + d_by_time:
            above += 1
        if above > 0 and scratch.front_tally[above - 1] <= tally:
            continue
        start = first_divisor_by_memory(a_bytes, b_bytes, shared_bytes, later_sum, cluster)
        if fresh:
            # What is known of y for each divisor in this stage: memory grows with y.
            for index in range(divisors.size):
                fits_upto[index] = 0
                fails_from[index] = UNREACHABLE
            fresh = False
        for index in range(max(by_time, start), end):
            d = divisors[index]
            tally = base_tally + per_replica * d
            total = later_sum + d
            if index > by_time and (
                tally > tally_limit
                or total > sum_limit
                or is_dominated(scratch.front_tally, scratch.front_sum, size, tally, total)
            ):
                break
            y = in_flight(later_sum, d)
            if y >= fails_from[index]:
                continue
            if y > fits_upto[index]:
                scratch.tested[STAGES_COSTED] += 1
                fits = stage_fits(stage, d, y, work, tables, target.threshold_s, scratch.steps)
                if fits == UNKNOWN:
                    scratch.tested[CHOICES_ABANDONED] += 1
                if fits != YES:
                    fails_from[index] = y
                    continue
                fits_upto[index] = y
            size = insert(scratch.front_tally, scratch.front_sum, size, tally, total)
            above = 0
            break
    return size


@part_kernel
def _evaluate_downset(
    i: int, arrays: StateArrays, begin_bucket: int, end_bucket: int, size: int, scratch: Scratch
) -> int:
    """Adds to the front of downset i, in ``scratch``, what the buckets yield; returns its new size."""
    scratch.tested[BUCKETS_TESTED] += end_bucket - begin_bucket
    opened = open_buckets(i, arrays, begin_bucket, end_bucket, scratch)
    if opened == 0:
        return size
    lowest, highest = UNREACHABLE, np.int64(0)
    for at in range(opened):
        lowest = min(lowest, scratch.open_tally[at])
        highest = max(highest, scratch.open_tally[at])
    # Cheapest buckets first, in a few passes: what they yield dominates most of the rest.
    width = (highest - lowest) // _PASSES + 1
    for floor in range(lowest, highest + 1, width):
        chosen = int(np.int64(0))  # of a literal 0 all that gets it would be compiled once more
        for at in range(opened):
            tally = scratch.open_tally[at]
            if floor <= tally < floor + width and not is_dominated(
                scratch.front_tally, scratch.front_sum, size, tally, scratch.open_sum[at]
            ):
                scratch.near_bucket[chosen] = scratch.open_bucket[at]
                chosen += 1
        if chosen == 0:
            continue
        kept = refine(i, chosen, arrays, scratch)
        for at in range(kept):
            if not is_dominated(
                scratch.front_tally, scratch.front_sum, size, scratch.near_tally[at], scratch.near_sum[at]
            ):
                size = _try_members(i, scratch.near_bucket[at], scratch.near_touch[at], size, arrays, scratch)
    return size


@part_kernel
def _try_members(i: int, bucket: int, touch: int, size: int, arrays: StateArrays, scratch: Scratch) -> int:
    """Every J of a bucket as the rest behind a first stage of I. touch: whether anything can jump over such a stage."""
    lattice, costs, options, _ = arrays.tables
    bits, buckets = lattice.bits, arrays.buckets
    for k in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
        j = buckets.member[k]
        inside = True
        for word in range(bits.shape[1]):
            if bits[j, word] & ~bits[i, word] != 0:
                inside = False
                break
        if not inside:
            continue
        scratch.tested[CANDIDATES_TESTED] += 1
        for r in range(options.degree.size):
            if costs.missing[i, r] > costs.missing[j, r]:
                continue
            work_s = costs.need_s[i, r] - costs.cap_s[j, r]
            if touch != 0:
                work_s -= jumping_s(i, r, bits, j, lattice, costs)
            size = _extend(StageKey(i, j, r), size, work_s, arrays, scratch)
    return size


@part_kernel
def front_of(i: int, arrays: StateArrays, earlier: Earlier, read: int, known: int, scratch: Scratch) -> int:
    """Puts the front of downset i into ``scratch``; returns its size.

    Of it ``earlier`` holds the ``known`` states from place ``read`` on.
    """
    target, before = arrays.target, earlier.states
    for k in range(known):
        scratch.front_tally[k] = before.tallies[read + k]
        scratch.front_sum[k] = before.sums[read + k]
    end_bucket = arrays.buckets.used[0]
    if earlier.buckets < end_bucket and target.device_limit[i] >= 1 and target.data_parallel_limit[i] >= 1:
        return _evaluate_downset(i, arrays, earlier.buckets, end_bucket, known, scratch)
    return known
