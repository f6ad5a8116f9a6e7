"""Kernels: the states of a range of downsets from those of all smaller ones, which is most of an evaluation's work, and
the way back from the states of V to a plan.

For downset I the recurrence (ARCHITECTURE.md) runs over every J < I, variant and state of J. Here whole buckets of live
downsets are bounded first, which rules out most of them. A bound that rules out a bucket rules out each of its members.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, leaf_kernel
from piper_ray.cost.stage import in_flight, one_device_s
from piper_ray.engine.kernels import scan, selection
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time, is_subset, meets
from piper_ray.engine.kernels.buckets import add_level
from piper_ray.engine.kernels.front import first_above, insert, is_dominated
from piper_ray.engine.kernels.types import (
    ClusterArrays,
    Earlier,
    FrontArrays,
    IndexArray,
    StageKey,
    StageWork,
    StateArrays,
    Tables,
    Threshold,
)

_PASSES = 32

_MANY_BUCKETS = 256
"""From this number of buckets on, groups are tested first."""


@inlined_kernel
def stage_fits(
    stage: StageKey, d: int, y: int, work: StageWork, tables: Tables, threshold_s: float, steps: selection.StepCache
) -> int:
    """Whether some choice of the stage keeps threshold and memory with degree d and y microbatches in flight.

    Returns YES, NO, or UNKNOWN if the exact choice is too hard.
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
        return selection.NO
    # If weights or charges depend on the choice, the following uses the least of them: it can only rule out.
    fast_bytes = (costs.fast_a[i, r] - costs.fast_a[j, r]) * y + costs.fast_b[i, r] - costs.fast_b[j, r]
    if sharing:
        fast_bytes += (costs.fast_shared[i, r] - costs.fast_shared[j, r]) / d
    if fast_bytes <= cluster.memory_bytes and options.uniform[r] == 1:
        return selection.YES
    left_s, guard_s = budget_s - used_s, selection.GUARD * budget_s
    excess_bytes = fast_bytes - cluster.memory_bytes
    if excess_bytes > 0.0:
        slot = selection.steps_slot(steps, options, r, d, y)
        # This assumes that every layer can save memory at the price of the cheapest step.
        if left_s + guard_s < excess_bytes * steps.least_price[slot]:
            return selection.NO
        if scan.needs_longer(stage, d, y, work, tables, threshold_s):
            return selection.NO
        least_s, rounded_s = selection.relaxed_extra(
            lattice.bits[j], lattice.bits[i], r, slot, excess_bytes, options, steps
        )
        if least_s > left_s:
            return selection.NO
        if rounded_s <= left_s and options.uniform[r] == 1:
            return selection.YES
    known = selection.fit_slot(steps.fits, stage, d, y, tables)
    more_s = steps.fits.more_s
    if left_s >= more_s[known, selection.ENOUGH] + guard_s:
        return selection.YES
    if left_s <= more_s[known, selection.TOO_SHORT] - guard_s:
        return selection.NO
    fits, found_s = selection.exact_fit(stage, d, y, tables, budget_s)
    if fits == selection.YES:
        more_s[known, selection.ENOUGH] = min(more_s[known, selection.ENOUGH], found_s - used_s)
    elif fits == selection.NO:
        more_s[known, selection.TOO_SHORT] = max(more_s[known, selection.TOO_SHORT], left_s)
    return fits


@inlined_kernel
def _begin_front(i: int, target: Threshold, scratch: scan.Scratch) -> None:
    """Starts an empty front. Tallies past the device limit count as dominated."""
    beyond = (target.device_limit[i] + 1) * target.device_weight
    for block in range((target.data_parallel_limit[i] >> scratch.sum_shift) + 1):
        scratch.least_upto[block] = beyond


@inlined_kernel
def _undercuts(tally: int, total: int, size: int, scratch: scan.Scratch) -> bool:
    """Whether no state of the front is at most (tally, total) in both, and the device limit is kept. The caller has
    checked the limit on the sum."""
    if scratch.least_upto[total >> scratch.sum_shift] <= tally:
        return False
    return scratch.sum_shift == 0 or not is_dominated(scratch.front_tally, scratch.front_sum, size, tally, total)


@inlined_kernel
def _add(tally: int, total: int, size: int, sum_limit: int, scratch: scan.Scratch) -> int:
    """Puts a state that undercuts all others into the front. Returns the new size."""
    block = (total + (1 << scratch.sum_shift) - 1) >> scratch.sum_shift
    while block <= sum_limit >> scratch.sum_shift and scratch.least_upto[block] > tally:
        scratch.least_upto[block] = tally
        block += 1
    return insert(scratch.front_tally, scratch.front_sum, size, tally, total)


@inlined_kernel
def _extend(stage: StageKey, size: int, work_s: float, arrays: StateArrays, scratch: scan.Scratch) -> int:
    """Adds the states of I with the first stage I \\ J to the front in ``scratch``. Returns the new size.

    For each state of J only the least d that fits is needed: it gives the fewest devices and the least sum.
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
    per_replica = options.degree[r] * target.device_weight
    # States are in order of falling tallies and rising sums, and more stages behind never need less memory. So the
    # least d that fits only rises from state to state. fits_upto: a y with which d is known to fit.
    index, fits_upto = by_time, 0
    for state in range(fronts.start[j], fronts.start[j] + fronts.states[j]):
        later_sum = fronts.data_parallel_sum[state]
        base_tally = fronts.tally[state] + target.stage_weight
        # Most states are rejected here, before tables of bytes are read.
        d = divisors[index]
        tally, total = base_tally + per_replica * d, later_sum + d
        if total > sum_limit:
            break
        if not _undercuts(tally, total, size, scratch):
            continue
        by_memory = first_divisor_by_memory(a_bytes, b_bytes, shared_bytes, later_sum, cluster)
        if by_memory > index:
            index, fits_upto = by_memory, 0
        while index < end:
            d = divisors[index]
            tally, total = base_tally + per_replica * d, later_sum + d
            if total > sum_limit:
                return size
            if not _undercuts(tally, total, size, scratch):
                break
            y = in_flight(later_sum, d)
            if y > fits_upto:
                scratch.tested[scan.STAGES_COSTED] += 1
                fits = stage_fits(stage, d, y, work, tables, target.threshold_s, scratch.steps)
                if fits == selection.UNKNOWN:
                    scratch.tested[scan.CHOICES_ABANDONED] += 1
                if fits != selection.YES:
                    index, fits_upto = index + 1, 0
                    continue
                fits_upto = y
            size = _add(tally, total, size, sum_limit, scratch)
            break
        if index >= end:
            break
    return size


@inlined_kernel
def _evaluate_downset(
    i: int, arrays: StateArrays, begin_bucket: int, end_bucket: int, size: int, scratch: scan.Scratch
) -> int:
    """Adds to the front of downset i, in ``scratch``, the states that the buckets give. Returns the new size.

    It takes the cheapest buckets first, in a few passes: their states dominate most of the others. If there are many
    buckets, whole groups are skipped in this way.
    """
    target, buckets, groups = arrays.target, arrays.buckets, arrays.groups
    priced = scan.has_price(arrays.tables.options)
    listed, in_groups, near = scratch.open_buckets, scratch.open_groups, scratch.near_buckets
    scan.list_jumps(i, arrays.tables.lattice, scratch)
    grouped, opened = 0, 0
    if end_bucket - begin_bucket < _MANY_BUCKETS:
        scratch.tested[scan.BUCKETS_TESTED] += end_bucket - begin_bucket
        opened = scan.open_among(i, buckets, begin_bucket, end_bucket, arrays, scratch, listed, opened)
    else:
        end_group = groups.used[0]
        begin_group = first_above(groups.bucket_start, end_group, begin_bucket) - 1
        scratch.tested[scan.BUCKETS_TESTED] += end_group - begin_group
        grouped = scan.open_among(i, groups, begin_group, end_group, arrays, scratch, in_groups, grouped)
    if grouped + opened == 0:
        return size
    if scan.crosses_much(i, arrays.tables.lattice, arrays.tables.costs):
        scan.sum_crossing(i, arrays.tables.lattice, arrays.tables.costs, scratch)
    lowest, highest = scan.UNREACHABLE, np.int64(0)
    for at in range(opened):
        lowest, highest = min(lowest, listed.tally[at]), max(highest, listed.tally[at])
    for at in range(grouped):
        lowest, highest = min(lowest, in_groups.tally[at]), max(highest, in_groups.tally[at])
    width = (highest - lowest) // _PASSES + 1
    while grouped + opened > 0:
        ceiling, lowest = lowest + width, scan.UNREACHABLE
        left = 0
        for at in range(grouped):
            group, tally, total = in_groups.number[at], in_groups.tally[at], in_groups.total[at]
            if not _undercuts(tally, total, size, scratch):
                continue
            if tally >= ceiling:
                in_groups.number[left], in_groups.tally[left], in_groups.total[left] = group, tally, total
                lowest = min(lowest, tally)
                left += 1
            elif not meets(groups.all_dominated_by[group], arrays.tables.lattice.bits[i]):
                begin, end = groups.bucket_start[group], groups.bucket_start[group + 1]
                scratch.tested[scan.BUCKETS_TESTED] += end - begin
                opened = scan.open_among(i, buckets, begin, end, arrays, scratch, listed, opened)
        grouped = left
        chosen, left = 0, 0
        for at in range(opened):
            bucket, tally, total = listed.number[at], listed.tally[at], listed.total[at]
            if not _undercuts(tally, total, size, scratch):
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
            # States from the first buckets dominate many of the others.
            if not _undercuts(near.tally[at], near.total[at], size, scratch) or meets(
                buckets.all_dominated_by[bucket], arrays.tables.lattice.bits[i]
            ):
                continue
            tally, total, touches = scan.refine(i, bucket, arrays, scratch)
            if tally == scan.UNREACHABLE or not _undercuts(tally, total, size, scratch):
                continue
            if priced and buckets.front_size[bucket] == 0:
                devices = scan.priced_devices(i, bucket, touches, arrays, scratch)
                if devices > target.device_limit[i]:
                    continue
                tally = buckets.least_tally[bucket] + devices * target.device_weight + target.stage_weight
                if not _undercuts(tally, total, size, scratch):
                    continue
                if tally >= ceiling:
                    listed.number[opened], listed.tally[opened], listed.total[opened] = bucket, tally, total
                    lowest = min(lowest, tally)
                    opened += 1
                    continue
            elif not _may_yield(i, bucket, touches, size, arrays, scratch):
                continue
            size = _try_members(i, bucket, touches, size, arrays, scratch)
    return size


@inlined_kernel
def _may_yield(i: int, bucket: int, touches: bool, size: int, arrays: StateArrays, scratch: scan.Scratch) -> bool:
    """Whether a stage from I to a bucket that passed ``refine``, with a state of the bucket behind it, may give a state
    that I lacks.

    It tests the states one by one, as ``_extend`` does, since the memory that a stage needs depends on the state behind
    it.
    """
    target, buckets = arrays.target, arrays.buckets
    lattice, costs, options, cluster = arrays.tables
    if buckets.front_size[bucket] == 0:
        return True
    for r in range(options.degree.size):
        if costs.missing[i, r] > buckets.missing[bucket, r]:
            continue
        need_s = costs.need_s[i, r]
        if touches:
            need_s -= scan.jumped_s(i, r, buckets.join, bucket, lattice, costs, scratch)
        resync_s = max(0.0, costs.resync_s[i, r] - buckets.resync_s[bucket, r])
        work_s = need_s - buckets.cap_s[r, bucket]
        by_time = first_divisor_by_time(
            work_s, resync_s, target.threshold_s, cluster.divisor_at_least, cluster.divisors.size
        )
        index, end = max(by_time, cluster.first_divisor[r]), cluster.end_divisor[r]
        many_s = need_s + costs.many_s[i, r] - buckets.many_s[bucket, r]
        one_s = need_s + costs.one_s[i, r] - buckets.one_s[bucket, r] - options.price_s[r] * cluster.memory_bytes
        limit_s = scan.longest_s(r, target.threshold_s, costs)
        per_replica = options.degree[r] * target.device_weight
        for state in range(buckets.front_size[bucket]):
            later_sum = buckets.front_sum[bucket, state]
            while index < end:
                d = cluster.divisors[index]
                tally = buckets.front_tally[bucket, state] + target.stage_weight + per_replica * d
                if later_sum + d > target.data_parallel_limit[i]:
                    index = end
                elif not _undercuts(tally, later_sum + d, size, scratch):
                    break
                elif scan.is_too_long(many_s, one_s, resync_s, in_flight(later_sum, d), d, limit_s):
                    # More stages behind never need less memory, so this d is too small for the following states too.
                    index += 1
                else:
                    return True
    return False


@inlined_kernel
def _may_add(i: int, bucket: int, r: int, work_s: float, size: int, arrays: StateArrays, scratch: scan.Scratch) -> bool:
    """Whether a stage of this work, with the best state of the bucket behind it, may give a state that I lacks."""
    target, buckets = arrays.target, arrays.buckets
    degree = scan.degree_at_least(work_s, 1.0 / target.threshold_s, scratch.degrees)
    total = buckets.least_sum[bucket] + degree
    if total > target.data_parallel_limit[i]:
        return False
    devices = int(arrays.tables.options.degree[r] * degree)
    tally = buckets.least_tally[bucket] + devices * target.device_weight + target.stage_weight
    return _undercuts(int(tally), int(total), size, scratch)


@inlined_kernel
def _try_members(i: int, bucket: int, touches: bool, size: int, arrays: StateArrays, scratch: scan.Scratch) -> int:
    """Tries every J of a bucket behind a first stage of I. touches: whether anything can jump over the stage."""
    lattice, costs, options = arrays.tables.lattice, arrays.tables.costs, arrays.tables.options
    bits, members, buckets = lattice.bits, arrays.members, arrays.buckets
    summed = touches and scan.crosses_much(i, lattice, costs)
    if summed:
        scan.find_jumping(i, buckets.join, bucket, lattice, costs, scratch)
    for r in range(options.degree.size):
        most_s = scan.jumped_s(i, r, buckets.join, bucket, lattice, costs, scratch) if touches else 0.0
        scratch.most_jumping_s[r] = most_s
    for k in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
        inside = True
        for word in range(bits.shape[1]):
            if members.bits[k, word] & ~bits[i, word] != 0 or members.dominated_by[k, word] & bits[i, word] != 0:
                inside = False
                break
        if not inside:
            continue
        scratch.tested[scan.CANDIDATES_TESTED] += 1
        j = members.downset[k]
        found = not summed
        for r in range(options.degree.size):
            least_s = costs.need_s[i, r] - members.cap_s[k, r]
            # What jumps over the stage takes time to find, so it is found only if it may matter.
            if not _may_add(i, bucket, r, least_s - scratch.most_jumping_s[r], size, arrays, scratch):
                continue
            work_s = least_s
            if touches:
                if not found:
                    scan.find_jumping(i, members.bits, k, lattice, costs, scratch)
                    found = True
                work_s -= scan.jumped_s(i, r, members.bits, k, lattice, costs, scratch)
            if costs.missing[i, r] <= costs.missing[j, r] and (
                not touches or _may_add(i, bucket, r, work_s, size, arrays, scratch)
            ):
                size = _extend(StageKey(i, j, r), size, work_s, arrays, scratch)
    return size


@inlined_kernel
def front_of(i: int, arrays: StateArrays, earlier: Earlier, read: int, known: int, scratch: scan.Scratch) -> int:
    """Puts the front of downset i into ``scratch``, and returns its size.

    ``earlier`` has ``known`` of its states, from place ``read`` on.
    """
    target, before = arrays.target, earlier.states
    _begin_front(i, target, scratch)
    for k in range(known):
        _add(before.tallies[read + k], before.sums[read + k], k, target.data_parallel_limit[i], scratch)
    end_bucket = arrays.buckets.used[0]
    if earlier.buckets < end_bucket and target.device_limit[i] >= 1 and target.data_parallel_limit[i] >= 1:
        return _evaluate_downset(i, arrays, earlier.buckets, end_bucket, known, scratch)
    return known


class Runs(NamedTuple):
    """Runs of consecutive downsets, and where the front of the first one is stored.

    are_levels: run k is level k; it is finished when its fronts are found, and has room for a bucket per downset.
    """

    start: IndexArray  # int64[runs + 1]; run k holds downsets start[k] .. start[k + 1] - 1
    base: int  # the front of downset i is stored at place i - base
    are_levels: bool


@leaf_kernel
def evaluate_runs(
    runs: Runs,
    run: int,
    arrays: StateArrays,
    earlier: Earlier,
    scratch: scan.Scratch,
    found: FrontArrays,
    used: int,
    tested: IndexArray,
) -> tuple[int, int]:
    """Finds the fronts of downsets, run by run from ``run`` on. Stops before a run whose states do not fit in
    ``found``.

    earlier: of the downsets from the first run on. scratch: of the calling thread, with room for all buckets. found:
    receives the fronts, after ``used`` states. tested: the work of the runs is added. Returns the next run and the
    number of states in use.
    """
    run_start, base, are_levels = runs
    known = earlier.states.counts
    before, read = run_start[run], 0
    while run < run_start.size - 1:
        first, last = run_start[run], run_start[run + 1]
        for counter in range(scan.COUNTERS):
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
        for counter in range(scan.COUNTERS):
            tested[counter] += scratch.tested[counter]
        run += 1
    return run, used


@leaf_kernel
def trace_stages(i: int, state: int, arrays: StateArrays, steps: selection.StepCache, stages: IndexArray) -> int:
    """Finds the stages of the plan of a state of downset i, from the front. Returns their number, or -1 if a state has
    no origin.

    steps: scratch of the calling thread. stages: receives int64[stages, 5], for each stage I, J, variant, d, and the
    sum of d behind it; it has a row for each vertex.
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
    i: int, tally: int, total: int, arrays: StateArrays, steps: selection.StepCache
) -> tuple[int, int, int, int]:
    """Returns the first stage of state (tally, total) of downset i: (j, variant, d, state of j), or j = -1.

    Among several it takes the one of least j (so with most layers), then variant, then sum of d behind it. steps:
    scratch of the calling thread.
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
                # Few states come this far, so it is quicker to sum anew for each.
                work_s = costs.need_s[i, r] - costs.cap_s[j, r] - scan.jumping_s(i, r, lattice.bits, j, lattice, costs)
                work = StageWork(work_s, max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r]))
                y = in_flight(fronts.data_parallel_sum[state], d)
                if stage_fits(StageKey(i, j, r), d, y, work, tables, target.threshold_s, steps) == selection.YES:
                    return j, r, d, state
    return -1, -1, -1, -1


@leaf_kernel
def _may_have(cluster: ClusterArrays, r: int, d: int) -> bool:
    """Whether d is among the data-parallel degrees of the variant."""
    for index in range(cluster.first_divisor[r], cluster.end_divisor[r]):
        if cluster.divisors[index] == d:
            return True
    return False
