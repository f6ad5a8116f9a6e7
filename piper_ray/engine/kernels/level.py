"""Kernel: the states of a range of downsets, from those of all smaller ones. The heart of an evaluation.

For downset I the recurrence (ARCHITECTURE.md) asks for every J < I, variant and state of J. Here J ranges over buckets
of live downsets first: bounds on a whole bucket, and most buckets are gone. What a bound rejects, no member can do.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel
from piper_ray.cost.stage import in_flight, one_device_s
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time, meets
from piper_ray.engine.kernels.front import first_above, insert, is_dominated
from piper_ray.engine.kernels.scan import (
    BUCKETS_TESTED,
    CANDIDATES_TESTED,
    CHOICES_ABANDONED,
    STAGES_COSTED,
    UNREACHABLE,
    Scratch,
    crosses_much,
    degree_at_least,
    find_jumping,
    jumped_s,
    list_jumps,
    open_among,
    refine,
    sum_crossing,
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

_PASSES = 32

_MANY_BUCKETS = 256
"""From so many on groups are looked at first."""


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
    excess_bytes, slot = fast_bytes - cluster.memory_bytes, -1
    if excess_bytes > 0.0:
        slot = steps_slot(steps, options, r, d, y)
        # As if every layer could save memory at the price of the cheapest step.
        if left_s + guard_s < excess_bytes * steps.least_price[slot]:
            return NO
    known = fit_slot(steps.fits, stage, d, y, tables)
    if left_s >= steps.fits.enough_s[known] + guard_s:
        return YES
    if left_s <= steps.fits.too_short_s[known] - guard_s:
        return NO
    fits, found_s = YES, budget_s
    if excess_bytes > 0.0:
        fits = quick_fit(lattice.bits[j], lattice.bits[i], options.class_bits, steps, slot, excess_bytes, left_s)
    if fits == UNKNOWN or (fits == YES and options.uniform[r] == 0):
        fits, found_s = exact_fit(stage, d, y, tables, budget_s)
    if fits == YES:
        steps.fits.enough_s[known] = min(steps.fits.enough_s[known], found_s - used_s)
    elif fits == NO:
        steps.fits.too_short_s[known] = max(steps.fits.too_short_s[known], left_s)
    return fits


@inlined_kernel
def _extend(stage: StageKey, size: int, work_s: float, arrays: StateArrays, scratch: Scratch) -> int:
    """Adds the states of I with the first stage I \\ J to the front, in ``scratch``; returns its new size.

    For one state of J only the least d that fits counts: it takes the fewest devices and the least of the sum.
    """
    i, j, r = stage
    tables, target, fronts = arrays.tables, arrays.target, arrays.fronts
    _, costs, options, cluster = tables
    divisors = cluster.divisors
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
    # States come with falling tallies and rising sums, and more behind a stage never takes less memory: so the least d
    # that fits only rises from state to state, with it the sum, and the place in the front where that sum belongs. What
    # is inserted leaves those before it where they are. fits_upto: a y with which d is known to fit.
    index, fits_upto, above = by_time, 0, 0
    for state in range(fronts.start[j], fronts.start[j] + fronts.states[j]):
        later_sum = fronts.data_parallel_sum[state]
        base_tally = fronts.tally[state] + target.stage_weight
        # Most states end here, before tables of bytes are read.
        d = divisors[index]
        tally, total = base_tally + per_replica * d, later_sum + d
        if total > sum_limit:
            break
        if tally > tally_limit:
            continue
        while above < size and scratch.front_sum[above] <= total:
            above += 1
        if above > 0 and scratch.front_tally[above - 1] <= tally:
            continue
        by_memory = first_divisor_by_memory(a_bytes, b_bytes, shared_bytes, later_sum, cluster)
        if by_memory > index:
            index, fits_upto = by_memory, 0
        while index < end:
            d = divisors[index]
            tally, total = base_tally + per_replica * d, later_sum + d
            if total > sum_limit:
                return size
            if tally > tally_limit:
                break
            while above < size and scratch.front_sum[above] <= total:
                above += 1
            if above > 0 and scratch.front_tally[above - 1] <= tally:
                break
            y = in_flight(later_sum, d)
            if y > fits_upto:
                scratch.tested[STAGES_COSTED] += 1
                fits = stage_fits(stage, d, y, work, tables, target.threshold_s, scratch.steps)
                if fits == UNKNOWN:
                    scratch.tested[CHOICES_ABANDONED] += 1
                if fits != YES:
                    index, fits_upto = index + 1, 0
                    continue
                fits_upto = y
            size = insert(scratch.front_tally, scratch.front_sum, size, tally, total)
            break
        if index >= end:
            break
    return size


@inlined_kernel
def _evaluate_downset(
    i: int, arrays: StateArrays, begin_bucket: int, end_bucket: int, size: int, scratch: Scratch
) -> int:
    """Adds to the front of downset i, in ``scratch``, what the buckets yield; returns its new size.

    Cheapest buckets first, in a few passes: what they yield dominates most of the rest. Of many buckets whole groups go
    unseen that way.
    """
    buckets, groups = arrays.buckets, arrays.groups
    listed, in_groups, near = scratch.open_buckets, scratch.open_groups, scratch.near_buckets
    jumps = list_jumps(i, arrays.tables.lattice, scratch)
    grouped, opened = 0, 0
    if end_bucket - begin_bucket < _MANY_BUCKETS:
        scratch.tested[BUCKETS_TESTED] += end_bucket - begin_bucket
        opened = open_among(i, buckets, begin_bucket, end_bucket, jumps, arrays, scratch, listed, opened)
    else:
        end_group = groups.used[0]
        begin_group = first_above(groups.bucket_start, end_group, begin_bucket) - 1
        scratch.tested[BUCKETS_TESTED] += end_group - begin_group
        grouped = open_among(i, groups, begin_group, end_group, jumps, arrays, scratch, in_groups, grouped)
    if grouped + opened == 0:
        return size
    if crosses_much(i, arrays.tables.lattice, arrays.tables.costs):
        sum_crossing(i, arrays.tables.lattice, arrays.tables.costs, scratch)
    lowest, highest = UNREACHABLE, np.int64(0)
    for at in range(opened):
        lowest, highest = min(lowest, listed.tally[at]), max(highest, listed.tally[at])
    for at in range(grouped):
        lowest, highest = min(lowest, in_groups.tally[at]), max(highest, in_groups.tally[at])
    width = (highest - lowest) // _PASSES + 1
    while grouped + opened > 0:
        ceiling, lowest = lowest + width, UNREACHABLE
        left = 0
        for at in range(grouped):
            group, tally, total = in_groups.number[at], in_groups.tally[at], in_groups.total[at]
            if is_dominated(scratch.front_tally, scratch.front_sum, size, tally, total):
                continue
            if tally >= ceiling:
                in_groups.number[left], in_groups.tally[left], in_groups.total[left] = group, tally, total
                lowest = min(lowest, tally)
                left += 1
            elif not meets(groups.all_dominated_by[group], arrays.tables.lattice.bits[i]):
                begin, end = groups.bucket_start[group], groups.bucket_start[group + 1]
                scratch.tested[BUCKETS_TESTED] += end - begin
                opened = open_among(i, buckets, begin, end, jumps, arrays, scratch, listed, opened)
        grouped = left
        chosen, left = 0, 0
        for at in range(opened):
            bucket, tally, total = listed.number[at], listed.tally[at], listed.total[at]
            if is_dominated(scratch.front_tally, scratch.front_sum, size, tally, total):
                continue
            if tally >= ceiling:
                listed.number[left], listed.tally[left], listed.total[left] = bucket, tally, total
                lowest = min(lowest, tally)
                left += 1
            else:
                near.number[chosen], near.tally[chosen], near.total[chosen] = bucket, tally, total
                chosen += 1
        opened = left
        for at in range(chosen):
            bucket = near.number[at]
            # What the first of them yield dominates many of the others.
            if is_dominated(scratch.front_tally, scratch.front_sum, size, near.tally[at], near.total[at]) or meets(
                buckets.all_dominated_by[bucket], arrays.tables.lattice.bits[i]
            ):
                continue
            tally, total, touches = refine(i, bucket, arrays, scratch)
            if tally != UNREACHABLE and not is_dominated(scratch.front_tally, scratch.front_sum, size, tally, total):
                size = _try_members(i, bucket, touches, size, arrays, scratch)
    return size


@inlined_kernel
def _may_add(i: int, bucket: int, r: int, work_s: float, size: int, arrays: StateArrays, scratch: Scratch) -> bool:
    """Whether a stage of so much work may, behind it the best of the bucket, be part of a state that I lacks."""
    target, buckets = arrays.target, arrays.buckets
    degree = degree_at_least(work_s, 1.0 / target.threshold_s, scratch.degrees)
    devices, total = arrays.tables.options.degree[r] * degree, buckets.least_sum[bucket] + degree
    if buckets.least_devices[bucket] + devices > target.device_limit[i] or total > target.data_parallel_limit[i]:
        return False
    tally = buckets.least_tally[bucket] + devices * target.device_weight + target.stage_weight
    return not is_dominated(scratch.front_tally, scratch.front_sum, size, int(tally), int(total))


@inlined_kernel
def _try_members(i: int, bucket: int, touches: bool, size: int, arrays: StateArrays, scratch: Scratch) -> int:
    """Every J of a bucket as the rest behind a first stage of I. touches: whether anything can jump over the stage."""
    lattice, costs, options = arrays.tables.lattice, arrays.tables.costs, arrays.tables.options
    bits, members, buckets = lattice.bits, arrays.members, arrays.buckets
    summed = touches and crosses_much(i, lattice, costs)
    if summed:
        find_jumping(i, buckets.join, bucket, lattice, costs, scratch)
    for r in range(options.degree.size):
        most_s = jumped_s(i, r, buckets.join, bucket, lattice, costs, scratch) if touches else 0.0
        scratch.most_jumping_s[r] = most_s
    for k in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
        inside = True
        for word in range(bits.shape[1]):
            if members.bits[k, word] & ~bits[i, word] != 0 or members.dominated_by[k, word] & bits[i, word] != 0:
                inside = False
                break
        if not inside:
            continue
        scratch.tested[CANDIDATES_TESTED] += 1
        j = members.downset[k]
        found = not summed
        for r in range(options.degree.size):
            least_s = costs.need_s[i, r] - members.cap_s[k, r]
            # What jumps over the stage takes time to find: only where it may matter.
            if not _may_add(i, bucket, r, least_s - scratch.most_jumping_s[r], size, arrays, scratch):
                continue
            work_s = least_s
            if touches:
                if not found:
                    find_jumping(i, members.bits, k, lattice, costs, scratch)
                    found = True
                work_s -= jumped_s(i, r, members.bits, k, lattice, costs, scratch)
            if costs.missing[i, r] <= costs.missing[j, r] and (
                not touches or _may_add(i, bucket, r, work_s, size, arrays, scratch)
            ):
                size = _extend(StageKey(i, j, r), size, work_s, arrays, scratch)
    return size


@inlined_kernel
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
