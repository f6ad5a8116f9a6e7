"""Kernels: which buckets of live downsets may hold the J of a stage I \\ J, and lower bounds on such a stage."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, leaf_kernel
from piper_ray.cost.stage import in_flight
from piper_ray.engine.kernels.bounds import (
    bit_position,
    first_divisor_by_memory,
    first_divisor_by_time,
    lowest_position,
)
from piper_ray.engine.kernels.selection import StepCache
from piper_ray.engine.kernels.types import (
    BitArray,
    BucketArrays,
    CostArrays,
    FloatArray,
    GroupArrays,
    IndexArray,
    LatticeArrays,
    OptionArrays,
    StageKey,
    StageWork,
    StateArrays,
    Tables,
)

_GUARD, _HAIR = 1e-9, 1e-12
"""Tolerances, relative to the threshold and to all work: sums over downsets round differently from those of a stage's
choices."""


@inlined_kernel
def has_price(options: OptionArrays) -> bool:
    """Whether memory has a price in any variant."""
    for r in range(options.price_s.size):
        if options.price_s[r] > 0.0:
            return True
    return False


@inlined_kernel
def longest_s(r: int, threshold_s: float, costs: CostArrays) -> float:
    """Returns the longest time of a stage in variant r that keeps the threshold, with a margin for rounding."""
    last = costs.need_s.shape[0] - 1
    all_s = costs.need_s[last, r] + max(costs.many_s[last, r], costs.one_s[last, r])
    return float(threshold_s * (1.0 + _GUARD) + _HAIR * all_s)


@inlined_kernel
def is_too_long(many_s: float, one_s: float, resync_s: float, y: int, d: int, limit_s: float) -> bool:
    """Whether no choice of a stage that fits in memory keeps a threshold with degree d and y microbatches in flight.

    many_s, one_s: of the stage, including work and communication; from one_s the price of all memory M is subtracted.
    limit_s: the threshold, with a margin.
    """
    return many_s + (one_s - many_s) / y + (d - 1) * resync_s > limit_s * d


@inlined_kernel
def needs_longer(stage: StageKey, d: int, y: int, work: StageWork, tables: Tables, threshold_s: float) -> bool:
    """``is_too_long`` for one stage."""
    i, j, r = stage
    costs = tables.costs
    many_s = work.work_s + costs.many_s[i, r] - costs.many_s[j, r]
    one_s = (
        work.work_s + costs.one_s[i, r] - costs.one_s[j, r] - tables.options.price_s[r] * tables.cluster.memory_bytes
    )
    return is_too_long(many_s, one_s, work.resync_s, y, d, longest_s(r, threshold_s, costs))


BUCKETS_TESTED, CANDIDATES_TESTED, STAGES_COSTED, CHOICES_ABANDONED = 0, 1, 2, 3
COUNTERS = 4

_MUCH_CROSSING = 64
"""From this number of edges times variants on, sums over heads are quicker than single edges."""

UNREACHABLE = np.int64(2**62)
_BLOCKS = 128
"""Number of sums in ``least_upto``: few enough to start a front quickly, enough to test whether a state is undercut."""

_GUARD = 1e-9


class Listed(NamedTuple):
    """Buckets, or groups of them, that work alone does not rule out, with their least tally and sum."""

    number: IndexArray  # int64[buckets]
    tally: IndexArray
    total: IndexArray


class Scratch(NamedTuple):
    """Working arrays for one downset at a time."""

    front_tally: IndexArray  # int64[data-parallel limit + 2]
    front_sum: IndexArray
    least_upto: IndexArray  # int64[blocks]: least tally with a sum of at most b << sum_shift; see level.py
    sum_shift: int
    degrees: FloatArray  # float64[x + 1]: the least divisor >= x, infinite for the last
    stage_devices: FloatArray  # float64[buckets]
    open_groups: Listed
    open_buckets: Listed
    near_buckets: Listed  # those of the current pass
    heads: BitArray  # uint64[words]: ends, in the downset, of what crosses into it
    edge_heads: BitArray  # uint64[words]: those of edges
    head_s: FloatArray  # float64[n, r]: charges of the crossing edges of each head
    upto_head_s: FloatArray  # float64[n, r]: sum over this head and all of lower number
    jumping_s: FloatArray  # float64[r]: see find_jumping
    most_jumping_s: FloatArray  # float64[r]: the largest over stages with a J of the current bucket
    jumps: IndexArray  # int64[1]: the number of entries in the lists below
    jump_level: IndexArray  # int64[most edges and tensors that cross into a downset]
    jump_order: IndexArray
    steps: StepCache
    tested: IndexArray  # int64[COUNTERS]


def make_scratch(tables: Tables, buckets: int, steps: StepCache) -> Scratch:
    """Returns scratch for up to ``buckets`` buckets. steps: of the calling thread."""
    lattice, cluster = tables.lattice, tables.cluster
    states = cluster.data_parallel_limit + 2
    crossings = lattice.edge_tail.size + lattice.tensor_bits.shape[0] + 1
    replicas = np.append(cluster.divisors[cluster.divisor_at_least], np.inf)
    return Scratch(
        front_tally=np.empty(states, np.int64),
        front_sum=np.empty(states, np.int64),
        least_upto=np.empty(_BLOCKS, np.int64),
        sum_shift=max(0, states.bit_length() - (_BLOCKS - 1).bit_length()),
        degrees=replicas,
        stage_devices=np.empty(buckets),
        open_groups=_room_to_list(buckets),
        open_buckets=_room_to_list(buckets),
        near_buckets=_room_to_list(buckets),
        heads=np.empty(lattice.bits.shape[1], np.uint64),
        edge_heads=np.empty(lattice.bits.shape[1], np.uint64),
        head_s=np.empty((lattice.vertex_level.size, tables.options.degree.size)),
        upto_head_s=np.empty((lattice.vertex_level.size, tables.options.degree.size)),
        jumping_s=np.empty(tables.options.degree.size),
        most_jumping_s=np.empty(tables.options.degree.size),
        jumps=np.zeros(1, np.int64),
        jump_level=np.empty(crossings, np.int64),
        jump_order=np.empty(crossings, np.int64),
        steps=steps,
        tested=np.zeros(COUNTERS, np.int64),
    )


def _room_to_list(count: int) -> Listed:
    return Listed(np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64))


@inlined_kernel
def jumping_s(i: int, r: int, inner: BitArray, row: int, lattice: LatticeArrays, costs: CostArrays) -> float:
    """Returns by how much need_s and cap_s overcharge a stage from inner[row] to downset i.

    An edge from outside i into inner[row] is charged in both and touches no stage. A tensor that both sets cut is
    charged in both, but costs the stage once, if it has an end there.
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


@inlined_kernel
def crosses_much(i: int, lattice: LatticeArrays, costs: CostArrays) -> bool:
    """Whether enough edges cross into I for ``find_jumping`` to sum them for all variants at once."""
    edges = lattice.crossing_start[i + 1] - lattice.crossing_start[i]
    return bool(edges * costs.both_s.shape[0] >= _MUCH_CROSSING)


@inlined_kernel
def jumped_s(
    i: int, r: int, inner: BitArray, row: int, lattice: LatticeArrays, costs: CostArrays, scratch: Scratch
) -> float:
    """Returns ``jumping_s``. If much crosses into I, ``find_jumping`` must have been called before."""
    if crosses_much(i, lattice, costs):
        return float(scratch.jumping_s[r])
    return jumping_s(i, r, inner, row, lattice, costs)


@leaf_kernel
def sum_crossing(i: int, lattice: LatticeArrays, costs: CostArrays, scratch: Scratch) -> None:
    """Sums the charges of the edges that cross into I, by their heads."""
    variants = costs.both_s.shape[0]
    for word in range(scratch.edge_heads.size):
        scratch.edge_heads[word] = 0
    for k in range(lattice.crossing_start[i], lattice.crossing_start[i + 1]):
        e = lattice.crossing[k]
        v = lattice.edge_head[e]
        bit = np.uint64(1) << np.uint64(v & 63)
        if scratch.edge_heads[v >> 6] & bit == 0:
            scratch.edge_heads[v >> 6] |= bit
            for r in range(variants):
                scratch.head_s[v, r] = 0.0
        for r in range(variants):
            scratch.head_s[v, r] += costs.both_s[r, e]
    before = -1
    for word in range(scratch.edge_heads.size):
        heads = scratch.edge_heads[word]
        while heads != 0:
            low = heads & (~heads + np.uint64(1))
            v = 64 * word + lowest_position(low)
            for r in range(variants):
                scratch.upto_head_s[v, r] = scratch.head_s[v, r] + (
                    scratch.upto_head_s[before, r] if before >= 0 else 0.0
                )
            before = v
            heads ^= low


@leaf_kernel
def find_jumping(
    i: int, inner: BitArray, row: int, lattice: LatticeArrays, costs: CostArrays, scratch: Scratch
) -> None:
    """Computes ``jumping_s`` of a stage from inner[row] to I in all variants. ``sum_crossing`` was called for I before.

    Vertices are numbered successors first, so usually all heads up to the last one in inner[row] are in it as well.
    """
    variants = costs.both_s.shape[0]
    word = inner.shape[1] - 1
    while word >= 0 and scratch.edge_heads[word] & inner[row, word] == 0:
        word -= 1
    for r in range(variants):
        scratch.jumping_s[r] = 0.0
    if word >= 0:
        last = bit_position(scratch.edge_heads[word] & inner[row, word])
        for r in range(variants):
            scratch.jumping_s[r] = scratch.upto_head_s[64 * word + last, r]
        within = (np.uint64(1) << np.uint64(last)) - np.uint64(1)
        while word >= 0:
            left_out = scratch.edge_heads[word] & ~inner[row, word] & within
            while left_out != 0:
                low = left_out & (~left_out + np.uint64(1))
                v = 64 * word + lowest_position(low)
                for r in range(variants):
                    scratch.jumping_s[r] -= scratch.head_s[v, r]
                left_out ^= low
            within = ~np.uint64(0)
            word -= 1
    if lattice.tensor_bits.shape[0] > 0:
        for r in range(variants):
            scratch.jumping_s[r] += _cut_twice_s(i, inner, row, lattice, costs.both_s[r])


@inlined_kernel
def list_jumps(i: int, lattice: LatticeArrays, scratch: Scratch) -> None:
    """Lists what crosses into I, by the first level with a J that can hold some of its ends.

    A J that holds the head of an edge holds all vertices behind it, which determines the least level. Tensors are
    numbered after the edges.
    """
    first = lattice.crossing_start[i]
    edges = int(lattice.crossing_start[i + 1] - first)
    for word in range(scratch.heads.size):
        scratch.heads[word] = 0
    for k in range(edges):
        e = lattice.crossing[first + k]
        v = lattice.edge_head[e]
        scratch.heads[v >> 6] |= np.uint64(1) << np.uint64(v & 63)
        _insert_jump(k, lattice.vertex_level[v], e, scratch.jump_level, scratch.jump_order)
    scratch.jumps[0] = edges
    if lattice.tensor_bits.shape[0] > 0:
        _list_cuts(i, lattice, scratch)


@leaf_kernel
def _list_cuts(i: int, lattice: LatticeArrays, scratch: Scratch) -> None:
    for k in range(lattice.cut_start[i], lattice.cut_start[i + 1]):
        tensor = lattice.cut[k]
        level = lattice.level_start.size - 1
        for word in range(lattice.bits.shape[1]):
            ends = lattice.tensor_bits[tensor, word] & lattice.bits[i, word]
            scratch.heads[word] |= ends
            while ends != 0:
                low = ends & (~ends + np.uint64(1))
                level = min(level, lattice.vertex_level[64 * word + lowest_position(low)])
                ends ^= low
        what = lattice.edge_tail.size + tensor
        _insert_jump(scratch.jumps[0], level, what, scratch.jump_level, scratch.jump_order)
        scratch.jumps[0] += 1


@leaf_kernel
def _insert_jump(count: int, level: int, what: int, jump_level: IndexArray, jump_order: IndexArray) -> None:
    """Inserts a jump among the first ``count``, in order of their levels."""
    at = count
    while at > 0 and jump_level[at - 1] > level:
        jump_level[at] = jump_level[at - 1]
        jump_order[at] = jump_order[at - 1]
        at -= 1
    jump_level[at] = level
    jump_order[at] = what


@inlined_kernel
def degree_at_least(work_s: float, per_threshold: float, degrees: FloatArray) -> float:
    """Returns the least data-parallel degree with which this work keeps the threshold; infinite if there is none."""
    replicas = max(np.ceil(work_s * per_threshold - _GUARD), 1.0)
    return float(degrees[np.int64(min(replicas, np.float64(degrees.size - 1)))])


@inlined_kernel
def open_among(
    i: int,
    parts: BucketArrays | GroupArrays,
    begin: int,
    end: int,
    arrays: StateArrays,
    scratch: Scratch,
    listed: Listed,
    opened: int,
) -> int:
    """Lists the buckets, or groups, that may have a J for a state of I within its limits, with the least tally and sum
    of such a state. Tests begin .. end - 1, appends to the ``opened`` listed before, and returns their number.

    It tests by work alone: a stage has at least need - cap, minus what crosses into I and may jump over the stage,
    which ``list_jumps`` has listed.
    """
    costs, degree = arrays.tables.costs, arrays.tables.options.degree
    target, stage_devices, cap_s = arrays.target, scratch.stage_devices, parts.cap_s
    jumps = scratch.jumps[0]
    per_threshold = 1.0 / target.threshold_s
    largest_degree = 1.0
    for r in range(degree.size):
        t = np.float64(degree[r])
        largest_degree = max(largest_degree, t)
        work_s = costs.need_s[i, r]
        first = begin
        for k in range(jumps + 1):
            last = min(end, parts.level_first[scratch.jump_level[k]]) if k < jumps else end
            # Plain loops over whole arrays compile to vector instructions.
            if r == 0:
                for part in range(first, last):
                    stage_devices[part] = t * degree_at_least(work_s - cap_s[r, part], per_threshold, scratch.degrees)
            else:
                for part in range(first, last):
                    devices = t * degree_at_least(work_s - cap_s[r, part], per_threshold, scratch.degrees)
                    stage_devices[part] = min(stage_devices[part], devices)
            first = max(first, last)
            if k < jumps:
                work_s -= costs.both_s[r, scratch.jump_order[k]]
    device_limit, sum_limit = target.device_limit[i], target.data_parallel_limit[i]
    for part in range(begin, end):
        if parts.least_devices[part] + stage_devices[part] > device_limit:
            continue
        total = parts.least_sum[part] + np.int64(np.ceil(stage_devices[part] / largest_degree))
        if total <= sum_limit:
            tally = np.int64(stage_devices[part]) * target.device_weight + target.stage_weight
            listed.number[opened] = part
            listed.tally[opened] = parts.least_tally[part] + tally
            listed.total[opened] = total
            opened += 1
    return opened


@inlined_kernel
def refine(i: int, bucket: int, arrays: StateArrays, scratch: Scratch) -> tuple[int, int, bool]:
    """Returns the least tally and sum of a state of I with a J of the bucket, by sharper bounds than ``open_among``,
    and whether anything can jump over such a stage. The tally is UNREACHABLE if none is within I's limits.

    It uses nesting, work with what can jump, resynchronisation, memory and divisors. ``list_jumps`` was called for I
    before.
    """
    tables, target, buckets = arrays.tables, arrays.target, arrays.buckets
    lattice, costs, options, cluster = tables
    bits, meet, join, heads = lattice.bits, buckets.meet, buckets.join, scratch.heads
    degree, divisors = options.degree, cluster.divisors
    touches = False
    for word in range(bits.shape[1]):
        if meet[bucket, word] & ~bits[i, word] != 0:
            return int(UNREACHABLE), int(UNREACHABLE), False
        if heads[word] & join[bucket, word] != 0:
            touches = True
    if touches and crosses_much(i, lattice, costs):
        find_jumping(i, join, bucket, lattice, costs, scratch)
    devices, replicas = UNREACHABLE, UNREACHABLE
    for r in range(degree.size):
        if costs.missing[i, r] > buckets.missing[bucket, r]:
            continue
        work_s = costs.need_s[i, r] - buckets.cap_s[r, bucket]
        if touches:
            work_s -= jumped_s(i, r, join, bucket, lattice, costs, scratch)
        resync_s = max(0.0, costs.resync_s[i, r] - buckets.resync_s[bucket, r])
        by_time = first_divisor_by_time(work_s, resync_s, target.threshold_s, cluster.divisor_at_least, divisors.size)
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
    if buckets.least_devices[bucket] + devices > target.device_limit[i] or total > target.data_parallel_limit[i]:
        return int(UNREACHABLE), int(UNREACHABLE), False
    tally = buckets.least_tally[bucket] + devices * target.device_weight + target.stage_weight
    return int(tally), int(total), touches


@inlined_kernel
def priced_devices(i: int, bucket: int, touches: bool, arrays: StateArrays, scratch: Scratch) -> int:
    """Returns the fewest devices of a stage from I to a J of the bucket, by the price of the memory that it may use."""
    lattice, costs, options, cluster = arrays.tables
    buckets, divisors = arrays.buckets, cluster.divisors
    later_sum = buckets.least_sum[bucket]
    fewest = UNREACHABLE
    for r in range(options.degree.size):
        if costs.missing[i, r] > buckets.missing[bucket, r]:
            continue
        need_s = costs.need_s[i, r]
        if touches:
            need_s -= jumped_s(i, r, buckets.join, bucket, lattice, costs, scratch)
        resync_s = max(0.0, costs.resync_s[i, r] - buckets.resync_s[bucket, r])
        many_s = need_s + costs.many_s[i, r] - buckets.many_s[bucket, r]
        one_s = need_s + costs.one_s[i, r] - buckets.one_s[bucket, r] - options.price_s[r] * cluster.memory_bytes
        limit_s = longest_s(r, arrays.target.threshold_s, costs)
        for index in range(cluster.first_divisor[r], cluster.end_divisor[r]):
            d = divisors[index]
            if not is_too_long(many_s, one_s, resync_s, in_flight(later_sum, d), d, limit_s):
                fewest = min(fewest, options.degree[r] * d)
                break
    return int(fewest)
