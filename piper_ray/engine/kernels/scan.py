"""Kernel: which buckets of live downsets may hold the J of a stage I \\ J, and what such a stage takes at least."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, leaf_kernel, part_kernel
from piper_ray.engine.kernels.bounds import bit_position, first_divisor_by_memory, first_divisor_by_time
from piper_ray.engine.kernels.selection import StepCache
from piper_ray.engine.kernels.types import (
    BitArray,
    BucketArrays,
    CostArrays,
    FloatArray,
    IndexArray,
    LatticeArrays,
    StateArrays,
    Tables,
)

BUCKETS_TESTED, CANDIDATES_TESTED, STAGES_COSTED, CHOICES_ABANDONED = 0, 1, 2, 3
COUNTERS = 4

UNREACHABLE = np.int64(2**62)
_GUARD = 1e-9


class Scratch(NamedTuple):
    """Working arrays for one downset at a time."""

    front_tally: IndexArray  # int64[data-parallel limit + 2]
    front_sum: IndexArray
    stage_devices: FloatArray  # float64[buckets]
    open_bucket: IndexArray  # int64[buckets]: buckets that work alone leaves open, and their least tally and sum
    open_tally: IndexArray
    open_sum: IndexArray
    near_bucket: IndexArray  # int64[buckets]: those of one pass, with sharper bounds
    near_tally: IndexArray
    near_sum: IndexArray
    near_touch: IndexArray
    heads: BitArray  # uint64[words]: ends in the downset of what crosses into it
    jump_from: IndexArray  # int64[most edges and tensors that cross into a downset]
    jump_order: IndexArray
    fits_upto: IndexArray  # int64[divisors]
    fails_from: IndexArray
    steps: StepCache
    tested: IndexArray  # int64[COUNTERS]


def make_scratch(tables: Tables, buckets: int, steps: StepCache) -> Scratch:
    """For up to so many buckets. steps: of the calling thread."""
    lattice, cluster = tables.lattice, tables.cluster
    states = cluster.data_parallel_limit + 2
    crossings = lattice.edge_tail.size + lattice.tensor_bits.shape[0] + 1
    return Scratch(
        front_tally=np.empty(states, np.int64),
        front_sum=np.empty(states, np.int64),
        stage_devices=np.empty(buckets),
        open_bucket=np.empty(buckets, np.int64),
        open_tally=np.empty(buckets, np.int64),
        open_sum=np.empty(buckets, np.int64),
        near_bucket=np.empty(buckets, np.int64),
        near_tally=np.empty(buckets, np.int64),
        near_sum=np.empty(buckets, np.int64),
        near_touch=np.empty(buckets, np.int64),
        heads=np.empty(lattice.bits.shape[1], np.uint64),
        jump_from=np.empty(crossings, np.int64),
        jump_order=np.empty(crossings, np.int64),
        fits_upto=np.empty(cluster.divisors.size, np.int64),
        fails_from=np.empty(cluster.divisors.size, np.int64),
        steps=steps,
        tested=np.zeros(COUNTERS, np.int64),
    )


@inlined_kernel
def jumping_s(i: int, r: int, inner: BitArray, row: int, lattice: LatticeArrays, costs: CostArrays) -> float:
    """What need_s and cap_s charge too much for a stage from inner[row] to downset i.

    An edge from outside i into inner[row] is charged in both and touches no stage. A tensor that both sets cut is
    charged in both and costs the stage once, if it has an end there.
    """
    total = _jumping_edges_s(
        i, inner, row, lattice.crossing_start, lattice.crossing, lattice.edge_head, costs.both_s[r]
    )
    if lattice.tensor_bits.shape[0] > 0:
        total += _cut_twice_s(i, inner, row, lattice, costs.both_s[r])
    return total


@leaf_kernel
def _jumping_edges_s(
    i: int,
    inner: BitArray,
    row: int,
    crossing_start: IndexArray,
    crossing: IndexArray,
    edge_head: IndexArray,
    both_s: FloatArray,
) -> float:
    total = 0.0
    for k in range(crossing_start[i], crossing_start[i + 1]):
        e = crossing[k]
        v = edge_head[e]
        if (inner[row, v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0:
            total += both_s[e]
    return total


@leaf_kernel
def _cut_twice_s(i: int, inner: BitArray, row: int, lattice: LatticeArrays, both_s: FloatArray) -> float:
    total = 0.0
    for k in range(lattice.cut_start[i], lattice.cut_start[i + 1]):
        tensor = lattice.cut[k]
        behind, in_stage = False, False
        for word in range(inner.shape[1]):
            ends = lattice.tensor_bits[tensor, word] & lattice.bits[i, word]
            if ends & inner[row, word] != 0:
                behind = True
            if ends & ~inner[row, word] != 0:
                in_stage = True
        if behind:
            charged_s = both_s[lattice.edge_tail.size + tensor]
            total += 0.5 * charged_s if in_stage else charged_s
    return total


@part_kernel
def _list_jumps(i: int, lattice: LatticeArrays, buckets: BucketArrays, scratch: Scratch) -> int:
    """Lists what crosses into I by the first bucket with a J that can hold some of its ends; returns how many.

    A J that holds the head of an edge holds all behind it, so it is of that level at least; buckets come by level.
    Tensors are numbered after the edges.
    """
    first = lattice.crossing_start[i]
    edges = int(lattice.crossing_start[i + 1] - first)
    for word in range(scratch.heads.size):
        scratch.heads[word] = 0
    for k in range(edges):
        e = lattice.crossing[first + k]
        v = lattice.edge_head[e]
        scratch.heads[v >> 6] |= np.uint64(1) << np.uint64(v & 63)
        _insert_jump(k, buckets.level_first[lattice.vertex_level[v]], e, scratch.jump_from, scratch.jump_order)
    if lattice.tensor_bits.shape[0] == 0:
        return edges
    return edges + _list_cuts(i, edges, lattice, buckets, scratch)


@leaf_kernel
def _list_cuts(i: int, listed: int, lattice: LatticeArrays, buckets: BucketArrays, scratch: Scratch) -> int:
    first = lattice.cut_start[i]
    count = int(lattice.cut_start[i + 1] - first)
    for k in range(count):
        tensor = lattice.cut[first + k]
        level = lattice.level_start.size - 1
        for word in range(lattice.bits.shape[1]):
            ends = lattice.tensor_bits[tensor, word] & lattice.bits[i, word]
            scratch.heads[word] |= ends
            while ends != 0:
                low = ends & (~ends + np.uint64(1))
                level = min(level, lattice.vertex_level[64 * word + bit_position(low)])
                ends ^= low
        what = lattice.edge_tail.size + tensor
        _insert_jump(listed + k, buckets.level_first[level], what, scratch.jump_from, scratch.jump_order)
    return count


@leaf_kernel
def _insert_jump(count: int, bucket: int, what: int, jump_from: IndexArray, jump_order: IndexArray) -> None:
    """Keeps the ``count`` jumps listed so far and this one in the order of their buckets."""
    at = count
    while at > 0 and jump_from[at - 1] > bucket:
        jump_from[at] = jump_from[at - 1]
        jump_order[at] = jump_order[at - 1]
        at -= 1
    jump_from[at] = bucket
    jump_order[at] = what


@inlined_kernel
def open_buckets(i: int, arrays: StateArrays, begin_bucket: int, end_bucket: int, scratch: Scratch) -> int:
    """Lists the buckets with a J for a state of I within its limits, and the least tally and sum of such a state.

    Looks at buckets begin_bucket .. end_bucket - 1 and returns how many it lists. By work alone: a stage has at least
    need - cap, less what crosses into I and may jump over it.
    """
    tables, target, _, buckets = arrays
    lattice, costs, degree = tables.lattice, tables.costs, tables.options.degree
    stage_devices, cap_s = scratch.stage_devices, buckets.cap_s
    per_threshold = 1.0 / target.threshold_s
    largest_degree = 1.0
    jumps = _list_jumps(i, lattice, buckets, scratch)
    for r in range(degree.size):
        t = np.float64(degree[r])
        largest_degree = max(largest_degree, t)
        work_s = costs.need_s[i, r]
        begin = begin_bucket
        for k in range(jumps + 1):
            end = min(end_bucket, scratch.jump_from[k]) if k < jumps else end_bucket
            # Plain loops over whole arrays: these run as vector instructions.
            if r == 0:
                for bucket in range(begin, end):
                    stage_devices[bucket] = t * max(np.ceil((work_s - cap_s[r, bucket]) * per_threshold - _GUARD), 1.0)
            else:
                for bucket in range(begin, end):
                    devices = t * max(np.ceil((work_s - cap_s[r, bucket]) * per_threshold - _GUARD), 1.0)
                    stage_devices[bucket] = min(stage_devices[bucket], devices)
            begin = max(begin, end)
            if k < jumps:
                work_s -= costs.both_s[r, scratch.jump_order[k]]
    device_limit, sum_limit = target.device_limit[i], target.data_parallel_limit[i]
    opened = 0
    for bucket in range(begin_bucket, end_bucket):
        if buckets.least_devices[bucket] + stage_devices[bucket] > device_limit:
            continue
        total = buckets.least_sum[bucket] + np.int64(np.ceil(stage_devices[bucket] / largest_degree))
        if total <= sum_limit:
            tally = np.int64(stage_devices[bucket]) * target.device_weight + target.stage_weight
            scratch.open_bucket[opened] = bucket
            scratch.open_tally[opened] = buckets.least_tally[bucket] + tally
            scratch.open_sum[opened] = total
            opened += 1
    return opened


@inlined_kernel
def refine(i: int, chosen: int, arrays: StateArrays, scratch: Scratch) -> int:
    """Keeps those of the first ``chosen`` near buckets that sharper bounds leave within I's limits; returns how many.

    By nesting, work with what can jump over the stage, resynchronisation, memory and divisors. near_touch says whether
    anything can jump over a stage with a J of the bucket.
    """
    tables, target, _, buckets = arrays
    lattice, costs, options, cluster = tables
    bits, meet, join, heads = lattice.bits, buckets.meet, buckets.join, scratch.heads
    degree, divisors = options.degree, cluster.divisors
    kept = 0
    for at in range(chosen):
        bucket = scratch.near_bucket[at]
        inside = True
        touches = False
        for word in range(bits.shape[1]):
            if meet[bucket, word] & ~bits[i, word] != 0:
                inside = False
                break
            if heads[word] & join[bucket, word] != 0:
                touches = True
        if not inside:
            continue
        devices, replicas = UNREACHABLE, UNREACHABLE
        for r in range(degree.size):
            if costs.missing[i, r] > buckets.missing[bucket, r]:
                continue
            work_s = costs.need_s[i, r] - buckets.cap_s[r, bucket]
            if touches:
                work_s -= jumping_s(i, r, join, bucket, lattice, costs)
            resync_s = max(0.0, costs.resync_s[i, r] - buckets.resync_s[bucket, r])
            by_time = first_divisor_by_time(
                work_s, resync_s, target.threshold_s, cluster.divisor_at_least, divisors.size
            )
            by_memory = first_divisor_by_memory(
                costs.least_a[i, r] - buckets.least_a[bucket, r],
                costs.least_b[i, r] - buckets.least_b[bucket, r],
                costs.least_shared[i, r] - buckets.least_shared[bucket, r] if costs.least_shared.shape[0] > 0 else 0.0,
                buckets.least_sum[bucket],
                cluster,
            )
            index = max(by_time, by_memory, cluster.first_divisor[r])
            if index < cluster.end_divisor[r]:
                devices = min(devices, degree[r] * divisors[index])
                replicas = min(replicas, divisors[index])
        total = buckets.least_sum[bucket] + replicas
        if buckets.least_devices[bucket] + devices <= target.device_limit[i] and total <= target.data_parallel_limit[i]:
            scratch.near_bucket[kept] = bucket
            scratch.near_tally[kept] = (
                buckets.least_tally[bucket] + devices * target.device_weight + target.stage_weight
            )
            scratch.near_sum[kept] = total
            scratch.near_touch[kept] = touches
            kept += 1
    return kept
