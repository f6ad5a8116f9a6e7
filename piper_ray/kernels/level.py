"""Kernel: the states of a range of downsets, from those of all smaller ones. The heart of an evaluation.

For downset I the recurrence (ARCHITECTURE.md) asks for every J < I, variant and state of J. Here J ranges over blocks of
live downsets first: bounds on a whole block, and most blocks are gone. What a bound rejects, no member can do.

Inner loops index arrays held in local variables and call nothing that takes a record of arrays: passing one costs more
than a bound.
"""

from __future__ import annotations

import numpy as np

from piper_ray.kernels.bounds import first_divisor_by_memory, first_divisor_by_time, in_flight
from piper_ray.kernels.front import insert, is_dominated
from piper_ray.kernels.jit import kernel
from piper_ray.kernels.selection import UNKNOWN, YES, StepCache, exact_fit, fill_slot, quick_fit, slot_of
from piper_ray.kernels.types import (
    BitArray,
    BlockArrays,
    ClusterArrays,
    CostArrays,
    FloatArray,
    FrontArrays,
    IndexArray,
    LatticeArrays,
    OptionArrays,
    Target,
)

BLOCKS_TESTED, CANDIDATES_TESTED, STAGES_COSTED = 0, 1, 2
_UNREACHABLE = np.int64(2**62)
_PASSES = 8
_GUARD = 1e-9


@kernel
def jumping_s(i: int, r: int, inner: BitArray, row: int, lattice: LatticeArrays, edge_both_s: FloatArray) -> float:
    """What the edges from outside downset i into inner[row] were charged in need_s and cap_s: they touch no stage."""
    crossing, edge_head = lattice.crossing, lattice.edge_head
    total = 0.0
    for k in range(lattice.crossing_start[i], lattice.crossing_start[i + 1]):
        v = edge_head[crossing[k]]
        if (inner[row, v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0:
            total += edge_both_s[r, crossing[k]]
    return total


@kernel
def _open_blocks(
    i: int,
    lattice: LatticeArrays,
    costs: CostArrays,
    degree: IndexArray,
    target: Target,
    blocks: BlockArrays,
    stage_devices: FloatArray,
    block_list: IndexArray,
    cost_list: IndexArray,
    sum_list: IndexArray,
) -> int:
    """Lists the blocks with a J that may head a state of I within its limits, and the least cost and sum of such a state.

    Returns their number. By work alone: a stage has at least need - cap, less the edges into I that may jump over it.
    """
    least_cost, least_devices, least_sum, cap_s = (
        blocks.least_cost,
        blocks.least_devices,
        blocks.least_sum,
        blocks.cap_s,
    )
    device_limit, sum_limit = target.device_limit[i], target.data_parallel_limit[i]
    device_cost, stage_cost = target.device_cost, target.stage_cost
    count = blocks.count[0]
    per_threshold = 1.0 / target.threshold_s
    largest_degree = 1.0
    # A J that holds the head of an edge holds all behind it, so it is of that level at least; blocks come by level.
    crossing, first_crossing = lattice.crossing, lattice.crossing_start[i]
    crossings = lattice.crossing_start[i + 1] - first_crossing
    jump_from = np.empty(crossings + 1, np.int64)
    for k in range(crossings):
        jump_from[k] = blocks.level_first[lattice.vertex_level[lattice.edge_head[crossing[first_crossing + k]]]]
    order = np.argsort(jump_from[:crossings])
    for r in range(degree.size):
        t = np.float64(degree[r])
        largest_degree = max(largest_degree, t)
        work_s = costs.need_s[i, r]
        begin = 0
        for k in range(crossings + 1):
            end = min(count, jump_from[order[k]]) if k < crossings else count
            # Plain loops over whole arrays: these run as vector instructions.
            if r == 0:
                for block in range(begin, end):
                    stage_devices[block] = t * max(np.ceil((work_s - cap_s[r, block]) * per_threshold - _GUARD), 1.0)
            else:
                for block in range(begin, end):
                    devices = t * max(np.ceil((work_s - cap_s[r, block]) * per_threshold - _GUARD), 1.0)
                    stage_devices[block] = min(stage_devices[block], devices)
            begin = end
            if k < crossings:
                work_s -= costs.edge_both_s[r, crossing[first_crossing + order[k]]]
    opened = 0
    for block in range(count):
        if least_devices[block] + stage_devices[block] > device_limit:
            continue
        devices = np.int64(stage_devices[block])
        replicas = np.int64(np.ceil(stage_devices[block] / largest_degree))
        if least_sum[block] + replicas <= sum_limit:
            block_list[opened] = block
            cost_list[opened] = least_cost[block] + devices * device_cost + stage_cost
            sum_list[opened] = least_sum[block] + replicas
            opened += 1
    return opened


@kernel
def _refine(
    i: int,
    chosen: int,
    lattice: LatticeArrays,
    costs: CostArrays,
    degree: IndexArray,
    cluster: ClusterArrays,
    target: Target,
    blocks: BlockArrays,
    block_list: IndexArray,
    cost_list: IndexArray,
    sum_list: IndexArray,
    touch_list: IndexArray,
) -> int:
    """Keeps those of the first ``chosen`` listed blocks that sharper bounds leave within I's limits; returns how many.

    By nesting, work with the edges that can jump over the stage, resynchronisation, memory and divisors. Updates the
    bounds in the lists; touch_list says whether any edge can jump.
    """
    bits, meet, join = lattice.bits, blocks.meet, blocks.join
    crossing, edge_head, edge_both_s = lattice.crossing, lattice.edge_head, costs.edge_both_s
    first_crossing, last_crossing = lattice.crossing_start[i], lattice.crossing_start[i + 1]
    need_s, resync_s, least_a, least_b, missing = (
        costs.need_s,
        costs.resync_s,
        costs.least_a,
        costs.least_b,
        costs.missing,
    )
    cap_s, block_resync_s, block_a, block_b, block_missing = (
        blocks.cap_s,
        blocks.resync_s,
        blocks.least_a,
        blocks.least_b,
        blocks.missing,
    )
    least_cost, least_devices, least_sum = blocks.least_cost, blocks.least_devices, blocks.least_sum
    divisors, divisor_at_least, memory_bytes = cluster.divisors, cluster.divisor_at_least, cluster.memory_bytes
    device_limit, sum_limit = target.device_limit[i], target.data_parallel_limit[i]
    threshold_s, device_cost, stage_cost = target.threshold_s, target.device_cost, target.stage_cost
    words = bits.shape[1]
    # An edge that comes into I jumps over I \\ J only if its head is in J.
    heads = np.zeros(words, np.uint64)
    for k in range(first_crossing, last_crossing):
        v = edge_head[crossing[k]]
        heads[v >> 6] |= np.uint64(1) << np.uint64(v & 63)
    kept = 0
    for at in range(chosen):
        block = block_list[at]
        inside = True
        touches = False
        for word in range(words):
            if meet[block, word] & ~bits[i, word] != 0:
                inside = False
                break
            if heads[word] & join[block, word] != 0:
                touches = True
        if not inside:
            continue
        devices, replicas = _UNREACHABLE, _UNREACHABLE
        for r in range(degree.size):
            if missing[i, r] > block_missing[block, r]:
                continue
            work_s = need_s[i, r] - cap_s[r, block]
            if touches:
                for k in range(first_crossing, last_crossing):
                    v = edge_head[crossing[k]]
                    if (join[block, v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0:
                        work_s -= edge_both_s[r, crossing[k]]
            stage_resync_s = max(0.0, resync_s[i, r] - block_resync_s[block, r])
            by_time = first_divisor_by_time(work_s, stage_resync_s, threshold_s, divisor_at_least, divisors.size)
            by_memory = first_divisor_by_memory(
                least_a[i, r] - block_a[block, r],
                least_b[i, r] - block_b[block, r],
                memory_bytes,
                least_sum[block],
                divisor_at_least,
                divisors.size,
            )
            index = max(by_time, by_memory)
            if index < divisors.size:
                devices = min(devices, degree[r] * divisors[index])
                replicas = min(replicas, divisors[index])
        if least_devices[block] + devices <= device_limit and least_sum[block] + replicas <= sum_limit:
            block_list[kept] = block
            cost_list[kept] = least_cost[block] + devices * device_cost + stage_cost
            sum_list[kept] = least_sum[block] + replicas
            touch_list[kept] = touches
            kept += 1
    return kept


@kernel
def stage_fits(
    i: int,
    j: int,
    r: int,
    d: int,
    y: int,
    lattice: LatticeArrays,
    costs: CostArrays,
    options: OptionArrays,
    cluster: ClusterArrays,
    threshold_s: float,
    cache: StepCache,
) -> bool:
    """Whether stage I \\ J keeps threshold and memory with degree d and y microbatches in flight, for some choice."""
    work_s = costs.need_s[i, r] - costs.cap_s[j, r] - jumping_s(i, r, lattice.bits, j, lattice, costs.edge_both_s)
    resync_s = max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r])
    budget_s = threshold_s * d
    used_s = work_s + (d - 1) * resync_s
    least_bytes = (costs.least_a[i, r] - costs.least_a[j, r]) * y + costs.least_b[i, r] - costs.least_b[j, r]
    if used_s > budget_s or least_bytes > cluster.memory_bytes:
        return False
    if options.uniform[r] == 1:
        excess_bytes = (
            (costs.fast_a[i, r] - costs.fast_a[j, r]) * y
            + (costs.fast_b[i, r] - costs.fast_b[j, r])
            - cluster.memory_bytes
        )
        if excess_bytes <= 0.0:
            return True
        slot = slot_of(r, y)
        if cache.y[slot] != y:
            fill_slot(cache, options, r, y)
        fits = quick_fit(i, j, lattice.bits, options.class_bits, cache, slot, excess_bytes, budget_s - used_s)
        if fits != UNKNOWN:
            return fits == YES
    return exact_fit(lattice.bits[j], lattice.bits[i], lattice, options, r, d, y, cluster.memory_bytes, budget_s)


@kernel
def evaluate_downsets(
    first: int,
    last: int,
    lattice: LatticeArrays,
    costs: CostArrays,
    options: OptionArrays,
    cluster: ClusterArrays,
    target: Target,
    fronts: FrontArrays,
    blocks: BlockArrays,
    cache: StepCache,
    tested: IndexArray,
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Fronts of the downsets first .. last - 1, all of one level, from those in ``blocks``: all live ones of lower levels.

    Returns the number of states of each, then all costs and all data-parallel sums. ``cache`` is scratch
    of the calling thread; ``tested`` (int64[3]) is added to.
    Pure: the same input gives the same output, whoever computes it.
    """
    bits, edge_both_s = lattice.bits, costs.edge_both_s
    need_s, cap_s, all_resync_s, missing = costs.need_s, costs.cap_s, costs.resync_s, costs.missing
    least_a, least_b, fast_a, fast_b = costs.least_a, costs.least_b, costs.fast_a, costs.fast_b
    degree, uniform = options.degree, options.uniform
    divisors, divisor_at_least, memory_bytes = cluster.divisors, cluster.divisor_at_least, cluster.memory_bytes
    threshold_s, device_cost, stage_cost = target.threshold_s, target.device_cost, target.stage_cost
    state_start, state_count, state_cost, state_sum = (
        fronts.start,
        fronts.count,
        fronts.cost,
        fronts.data_parallel_sum,
    )
    member, member_start = blocks.member, blocks.member_start

    counts = np.zeros(last - first, np.int64)
    out_cost = np.empty(last - first + 64, np.int64)
    out_sum = np.empty(last - first + 64, np.int64)
    used = 0
    front_cost = np.empty(cluster.data_parallel_limit + 2, np.int64)
    front_sum = np.empty(cluster.data_parallel_limit + 2, np.int64)
    block_list = np.empty(max(1, blocks.count[0]), np.int64)
    cost_list = np.empty(block_list.size, np.int64)
    sum_list = np.empty(block_list.size, np.int64)
    stage_devices = np.empty(block_list.size)
    near_block = np.empty(block_list.size, np.int64)
    near_cost = np.empty(block_list.size, np.int64)
    near_sum = np.empty(block_list.size, np.int64)
    near_touch = np.empty(block_list.size, np.int64)
    fits_upto = np.empty(divisors.size, np.int64)
    fails_from = np.empty(divisors.size, np.int64)
    slot_y, class_bits = cache.y, options.class_bits
    candidates, stages = 0, 0
    for i in range(first, last):
        device_limit, sum_limit = target.device_limit[i], target.data_parallel_limit[i]
        if device_limit < 1 or sum_limit < 1:
            continue
        tested[BLOCKS_TESTED] += blocks.count[0]
        opened = _open_blocks(i, lattice, costs, degree, target, blocks, stage_devices, block_list, cost_list, sum_list)
        if opened == 0:
            continue
        size = 0
        # Cheapest blocks first, in a few passes: what they yield dominates most of the rest.
        lowest, highest = cost_list[:opened].min(), cost_list[:opened].max()
        width = (highest - lowest) // _PASSES + 1
        for step in range((highest - lowest) // width + 1):
            chosen = 0
            for at in range(opened):
                if (cost_list[at] - lowest) // width == step and not is_dominated(
                    front_cost, front_sum, size, cost_list[at], sum_list[at]
                ):
                    near_block[chosen] = block_list[at]
                    chosen += 1
            kept = _refine(
                i, chosen, lattice, costs, degree, cluster, target, blocks, near_block, near_cost, near_sum, near_touch
            )
            for at in range(kept):
                if is_dominated(front_cost, front_sum, size, near_cost[at], near_sum[at]):
                    continue
                block = near_block[at]
                touches = near_touch[at] != 0
                for k in range(member_start[block], member_start[block + 1]):
                    j = member[k]
                    inside = True
                    for word in range(bits.shape[1]):
                        if bits[j, word] & ~bits[i, word] != 0:
                            inside = False
                            break
                    if not inside:
                        continue
                    candidates += 1
                    for r in range(degree.size):
                        if missing[i, r] > missing[j, r]:
                            continue
                        work_s = need_s[i, r] - cap_s[j, r]
                        if touches:
                            work_s -= jumping_s(i, r, bits, j, lattice, edge_both_s)
                        resync_s = max(0.0, all_resync_s[i, r] - all_resync_s[j, r])
                        by_time = first_divisor_by_time(
                            work_s, resync_s, threshold_s, divisor_at_least, divisors.size
                        )
                        if by_time == divisors.size:
                            continue
                        a_bytes, b_bytes = least_a[i, r] - least_a[j, r], least_b[i, r] - least_b[j, r]
                        # fits_upto, fails_from: what is known of y for each divisor in this stage; memory grows with y.
                        fits_upto[:] = 0
                        fails_from[:] = _UNREACHABLE
                        # For one state of J only the least d that fits counts: fewest devices, least of the sum.
                        for state in range(state_start[j], state_start[j] + state_count[j]):
                            later_sum = state_sum[state]
                            start = max(
                                by_time,
                                first_divisor_by_memory(
                                    a_bytes, b_bytes, memory_bytes, later_sum, divisor_at_least, divisors.size
                                ),
                            )
                            for index in range(start, divisors.size):
                                d = divisors[index]
                                cost = state_cost[state] + degree[r] * d * device_cost + stage_cost
                                total = later_sum + d
                                if (
                                    cost // device_cost > device_limit
                                    or total > sum_limit
                                    or is_dominated(front_cost, front_sum, size, cost, total)
                                ):
                                    break
                                y = in_flight(later_sum, d)
                                if y >= fails_from[index]:
                                    continue
                                if y > fits_upto[index]:
                                    stages += 1
                                    used_s, budget_s = work_s + (d - 1) * resync_s, threshold_s * d
                                    if used_s > budget_s or a_bytes * y + b_bytes > memory_bytes:
                                        fails_from[index] = y
                                        continue
                                    fits = UNKNOWN
                                    if uniform[r] == 1:
                                        excess_bytes = (
                                            (fast_a[i, r] - fast_a[j, r]) * y
                                            + (fast_b[i, r] - fast_b[j, r])
                                            - memory_bytes
                                        )
                                        if excess_bytes <= 0.0:
                                            fits = YES
                                        else:
                                            slot = slot_of(r, y)
                                            if slot_y[slot] != y:
                                                fill_slot(cache, options, r, y)
                                            fits = quick_fit(
                                                i, j, bits, class_bits, cache, slot, excess_bytes, budget_s - used_s
                                            )
                                    if fits == UNKNOWN and exact_fit(
                                        bits[j], bits[i], lattice, options, r, d, y, memory_bytes, budget_s
                                    ):
                                        fits = YES
                                    if fits != YES:
                                        fails_from[index] = y
                                        continue
                                    fits_upto[index] = y
                                size = insert(front_cost, front_sum, size, cost, total)
                                break
        counts[i - first] = size
        while used + size > out_cost.size:
            out_cost = np.concatenate((out_cost, np.empty_like(out_cost)))
            out_sum = np.concatenate((out_sum, np.empty_like(out_sum)))
        out_cost[used : used + size] = front_cost[:size]
        out_sum[used : used + size] = front_sum[:size]
        used += size
    tested[CANDIDATES_TESTED] += candidates
    tested[STAGES_COSTED] += stages
    return counts, out_cost[:used].copy(), out_sum[:used].copy()
