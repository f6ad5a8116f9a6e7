"""Kernel: the states of a range of downsets, from those of all smaller ones. The heart of an evaluation.

For downset I the recurrence (ARCHITECTURE.md) asks for every J < I, variant and state of J. Here J ranges over blocks
of live downsets first: bounds on a whole block, and most blocks are gone. What a bound rejects, no member can do.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel
from piper_ray.cost.stage import in_flight, one_device_s
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time
from piper_ray.engine.kernels.front import insert, is_dominated
from piper_ray.engine.kernels.scan import UNREACHABLE, Scratch, jumping_s, make_scratch, open_blocks, refine
from piper_ray.engine.kernels.selection import NO, UNKNOWN, YES, StepCache, exact_fit, quick_fit, steps_slot
from piper_ray.engine.kernels.types import (
    BlockArrays,
    FrontArrays,
    IndexArray,
    LevelStates,
    Tables,
    Target,
)

BLOCKS_TESTED, CANDIDATES_TESTED, STAGES_COSTED, CHOICES_ABANDONED = 0, 1, 2, 3
COUNTERS = 4
_PASSES = 8


@inlined_kernel
def stage_fits(
    i: int,
    j: int,
    r: int,
    d: int,
    y: int,
    work_s: float,
    resync_s: float,
    tables: Tables,
    threshold_s: float,
    cache: StepCache,
) -> int:
    """Whether stage I \\ J keeps threshold and memory with degree d and y microbatches in flight, for some choice.

    YES, NO, or UNKNOWN where the exact choice is too hard. work_s, resync_s: of the stage, least over all choices.
    """
    lattice, costs, options, cluster = tables
    budget_s = threshold_s * d
    used_s = one_device_s(work_s, resync_s, d)
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
    fits = YES
    if fast_bytes > cluster.memory_bytes:
        slot = steps_slot(cache, options, r, d, y)
        excess_bytes = fast_bytes - cluster.memory_bytes
        fits = quick_fit(i, j, lattice.bits, options.class_bits, cache, slot, excess_bytes, budget_s - used_s)
    if fits == NO or (fits == YES and options.uniform[r] == 1):
        return fits
    return exact_fit(i, j, tables, r, d, y, budget_s)


@inlined_kernel
def _extend(
    i: int,
    j: int,
    r: int,
    size: int,
    work_s: float,
    tables: Tables,
    target: Target,
    fronts: FrontArrays,
    cache: StepCache,
    scratch: Scratch,
    tested: IndexArray,
) -> int:
    """Adds the states of I with first stage I \\ J in variant r to the front; returns its new size.

    For one state of J only the least d that fits counts: it takes the fewest devices and the least of the sum.
    """
    _, costs, options, cluster = tables
    divisors, fits_upto, fails_from = cluster.divisors, scratch.fits_upto, scratch.fails_from
    resync_s = max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r])
    end = cluster.end_divisor[r]
    by_time = first_divisor_by_time(work_s, resync_s, target.threshold_s, cluster.divisor_at_least, divisors.size)
    by_time = max(by_time, cluster.first_divisor[r])
    if by_time >= end:
        return size
    a_bytes, b_bytes = costs.least_a[i, r] - costs.least_a[j, r], costs.least_b[i, r] - costs.least_b[j, r]
    shared_bytes = costs.least_shared[i, r] - costs.least_shared[j, r] if costs.least_shared.shape[0] > 0 else 0.0
    sum_limit = target.data_parallel_limit[i]
    # The largest cost within the device limit, whatever its stages.
    cost_limit = (target.device_limit[i] + 1) * target.device_cost - 1
    per_replica = options.degree[r] * target.device_cost
    fresh = True
    # States come with rising sums, so the place in the front where a state with the least d belongs only moves up.
    above = 0
    d_by_time = divisors[by_time]
    for state in range(fronts.start[j], fronts.start[j] + fronts.states[j]):
        later_sum = fronts.data_parallel_sum[state]
        base_cost = fronts.cost[state] + target.stage_cost
        if later_sum + d_by_time > sum_limit:
            break
        cost = base_cost + per_replica * d_by_time
        if cost > cost_limit:
            continue
        while above < size and scratch.front_sum[above] <= later_sum + d_by_time:
            above += 1
        if above > 0 and scratch.front_cost[above - 1] <= cost:
            continue
        start = first_divisor_by_memory(a_bytes, b_bytes, shared_bytes, later_sum, cluster)
        if fresh:
            # What is known of y for each divisor in this stage: memory grows with y.
            fits_upto[:] = 0
            fails_from[:] = UNREACHABLE
            fresh = False
        for index in range(max(by_time, start), end):
            d = divisors[index]
            cost = base_cost + per_replica * d
            total = later_sum + d
            if index > by_time and (
                cost > cost_limit
                or total > sum_limit
                or is_dominated(scratch.front_cost, scratch.front_sum, size, cost, total)
            ):
                break
            y = in_flight(later_sum, d)
            if y >= fails_from[index]:
                continue
            if y > fits_upto[index]:
                tested[STAGES_COSTED] += 1
                fits = stage_fits(i, j, r, d, y, work_s, resync_s, tables, target.threshold_s, cache)
                if fits == UNKNOWN:
                    tested[CHOICES_ABANDONED] += 1
                if fits != YES:
                    fails_from[index] = y
                    continue
                fits_upto[index] = y
            size = insert(scratch.front_cost, scratch.front_sum, size, cost, total)
            above = 0
            break
    return size


@inlined_kernel
def _evaluate_downset(
    i: int,
    tables: Tables,
    target: Target,
    fronts: FrontArrays,
    blocks: BlockArrays,
    begin_block: int,
    end_block: int,
    size: int,
    cache: StepCache,
    scratch: Scratch,
    tested: IndexArray,
) -> int:
    """Adds to the front of downset i, in ``scratch``, what the blocks yield; returns its new size."""
    lattice, costs, options, _ = tables
    tested[BLOCKS_TESTED] += end_block - begin_block
    opened = open_blocks(i, tables, target, blocks, begin_block, end_block, scratch)
    if opened == 0:
        return size
    bits = lattice.bits
    lowest, highest = UNREACHABLE, np.int64(0)
    for at in range(opened):
        lowest = min(lowest, scratch.open_cost[at])
        highest = max(highest, scratch.open_cost[at])
    # Cheapest blocks first, in a few passes: what they yield dominates most of the rest.
    width = (highest - lowest) // _PASSES + 1
    for floor in range(lowest, highest + 1, width):
        chosen = 0
        for at in range(opened):
            cost = scratch.open_cost[at]
            if floor <= cost < floor + width and not is_dominated(
                scratch.front_cost, scratch.front_sum, size, cost, scratch.open_sum[at]
            ):
                scratch.near_block[chosen] = scratch.open_block[at]
                chosen += 1
        if chosen == 0:
            continue
        kept = refine(i, chosen, tables, target, blocks, scratch)
        for at in range(kept):
            if is_dominated(scratch.front_cost, scratch.front_sum, size, scratch.near_cost[at], scratch.near_sum[at]):
                continue
            block = scratch.near_block[at]
            for k in range(blocks.member_start[block], blocks.member_start[block + 1]):
                j = blocks.member[k]
                inside = True
                for word in range(bits.shape[1]):
                    if bits[j, word] & ~bits[i, word] != 0:
                        inside = False
                        break
                if not inside:
                    continue
                tested[CANDIDATES_TESTED] += 1
                for r in range(options.degree.size):
                    if costs.missing[i, r] > costs.missing[j, r]:
                        continue
                    work_s = costs.need_s[i, r] - costs.cap_s[j, r]
                    if scratch.near_touch[at] != 0:
                        work_s -= jumping_s(i, r, bits, j, lattice, costs)
                    size = _extend(i, j, r, size, work_s, tables, target, fronts, cache, scratch, tested)
    return size


@kernel
def evaluate_downsets(
    first: int,
    last: int,
    tables: Tables,
    target: Target,
    fronts: FrontArrays,
    blocks: BlockArrays,
    begin_block: int,
    before: LevelStates,
    cache: StepCache,
) -> LevelStates:
    """Fronts of the downsets first .. last - 1 over all J in the blocks from ``begin_block`` on, and ``before``.

    ``before`` holds the same downsets' fronts over the earlier blocks; so one front can be found in several steps.
    ``cache`` is scratch of the calling thread. Pure: the same input gives the same states, whoever computes them and
    in however many steps.
    """
    tested = np.zeros(COUNTERS, np.int64)
    counts = np.zeros(last - first, np.int64)
    out_cost = np.empty(last - first + 64, np.int64)
    out_sum = np.empty(last - first + 64, np.int64)
    used, read = 0, 0
    end_block = blocks.used[0]
    scratch = make_scratch(tables.lattice, tables.cluster, max(1, end_block))
    for i in range(first, last):
        size = before.counts[i - first]
        for k in range(size):
            scratch.front_cost[k] = before.costs[read + k]
            scratch.front_sum[k] = before.sums[read + k]
        read += size
        if begin_block < end_block and target.device_limit[i] >= 1 and target.data_parallel_limit[i] >= 1:
            size = _evaluate_downset(
                i, tables, target, fronts, blocks, begin_block, end_block, size, cache, scratch, tested
            )
        counts[i - first] = size
        while used + size > out_cost.size:
            out_cost = np.concatenate((out_cost, np.empty_like(out_cost)))
            out_sum = np.concatenate((out_sum, np.empty_like(out_sum)))
        out_cost[used : used + size] = scratch.front_cost[:size]
        out_sum[used : used + size] = scratch.front_sum[:size]
        used += size
    return LevelStates(counts, out_cost[:used].copy(), out_sum[:used].copy(), tested)
