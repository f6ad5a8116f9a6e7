"""Kernels: buckets of live downsets of a finished level, and groups of these, with bounds over their members. They also
mark downsets at which no stage needs to end, because a downset with a vertex more is as good.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.arrays import stable_order
from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.front import add_bound
from piper_ray.engine.kernels.types import (
    BitArray,
    BucketArrays,
    CostArrays,
    FrontArrays,
    GroupArrays,
    LatticeArrays,
    MemberArrays,
    OptionArrays,
    StateArrays,
)

BUCKET_SIZE = 32
FRONT_SIZE = 8
GROUP_SIZE = 16

_COARSE = 1024.0


@kernel
def add_level(level: int, arrays: StateArrays) -> None:
    """Puts the live downsets of a level into buckets of up to 32, by least tally and with similar states next to each
    other, and the buckets into groups of up to 16. Levels must be added in order; some may be empty.
    """
    tables, target, fronts, members, buckets, groups = arrays
    lattice, costs = tables.lattice, tables.costs
    first, last = lattice.level_start[level], lattice.level_start[level + 1]
    live = np.empty(last - first, np.int64)
    key = np.empty(last - first)
    count = 0
    for i in range(first, last):
        if fronts.states[i] > 0:
            live[count] = i
            key[count] = _place_among(i, tables.cluster.data_parallel_limit, fronts)
            count += 1
    first_bucket = buckets.used[0]
    buckets.level_first[level] = first_bucket
    order = stable_order(key, count)
    bucket = buckets.used[0] - 1
    at = buckets.member_start[buckets.used[0]]
    for position in range(count):
        i = live[order[position]]
        tally = fronts.tally[fronts.start[i] + fronts.states[i] - 1]
        if position == 0 or tally != buckets.least_tally[bucket] or at - buckets.member_start[bucket] == BUCKET_SIZE:
            bucket += 1
            _open(bucket, tally, target.device_weight, lattice, buckets)
        _place(i, at, lattice, costs, members)
        at += 1
        buckets.member_start[bucket + 1] = at
        _widen(bucket, i, lattice, costs, fronts, buckets)
    for opened in range(first_bucket, bucket + 1):
        _bound_states(opened, fronts, members, buckets)
    buckets.used[0] = bucket + 1
    groups.level_first[level] = groups.used[0]
    for begin in range(first_bucket, bucket + 1, GROUP_SIZE):
        _add_group(begin, min(begin + GROUP_SIZE, bucket + 1), buckets, groups)
    if level > 0:
        find_dominated(level, arrays)


@leaf_kernel
def _place_among(i: int, sum_limit: int, fronts: FrontArrays) -> float:
    """Returns a key: the least tally, then roughly the other states. It is a whole number, so equal single states stay
    in order of ids."""
    first, last = fronts.start[i], fronts.start[i] + fronts.states[i] - 1
    place = float(fronts.tally[last])
    for figure in (fronts.data_parallel_sum[last], fronts.data_parallel_sum[first], fronts.states[i]):
        place = place * _COARSE + np.floor((_COARSE - 1) * figure / sum_limit)
    return place


@leaf_kernel
def _add_group(begin: int, end: int, buckets: BucketArrays, groups: GroupArrays) -> None:
    """Makes a group of buckets begin .. end - 1."""
    group = groups.used[0]
    groups.bucket_start[group], groups.bucket_start[group + 1] = begin, end
    groups.least_tally[group] = buckets.least_tally[begin]
    groups.least_devices[group] = buckets.least_devices[begin]
    groups.least_sum[group] = buckets.least_sum[begin]
    for bucket in range(begin + 1, end):
        groups.least_sum[group] = min(groups.least_sum[group], buckets.least_sum[bucket])
    for r in range(buckets.cap_s.shape[0]):
        groups.cap_s[r, group] = buckets.cap_s[r, begin]
        for bucket in range(begin + 1, end):
            groups.cap_s[r, group] = max(groups.cap_s[r, group], buckets.cap_s[r, bucket])
    groups.used[0] = group + 1


@leaf_kernel
def _place(i: int, at: int, lattice: LatticeArrays, costs: CostArrays, members: MemberArrays) -> None:
    members.downset[at], members.place[i] = i, at
    for word in range(lattice.bits.shape[1]):
        members.bits[at, word] = lattice.bits[i, word]
        members.dominated_by[at, word] = 0
    for r in range(costs.cap_s.shape[1]):
        members.cap_s[at, r] = costs.cap_s[i, r]


@leaf_kernel
def _open(bucket: int, tally: int, device_weight: int, lattice: LatticeArrays, buckets: BucketArrays) -> None:
    buckets.least_tally[bucket] = tally
    buckets.least_devices[bucket] = tally // device_weight
    buckets.least_sum[bucket] = np.int64(2**62)
    for word in range(lattice.bits.shape[1]):
        buckets.meet[bucket, word] = ~np.uint64(0)
        buckets.join[bucket, word] = 0
    for r in range(buckets.cap_s.shape[0]):
        buckets.cap_s[r, bucket] = -np.inf
        buckets.resync_s[bucket, r] = -np.inf
        buckets.least_a[bucket, r] = -np.inf
        buckets.least_b[bucket, r] = -np.inf
        if buckets.least_shared.shape[0] > 0:
            buckets.least_shared[bucket, r] = -np.inf
        buckets.missing[bucket, r] = 0
        buckets.many_s[bucket, r] = -np.inf
        buckets.one_s[bucket, r] = -np.inf


@leaf_kernel
def _widen(
    bucket: int, i: int, lattice: LatticeArrays, costs: CostArrays, fronts: FrontArrays, buckets: BucketArrays
) -> None:
    buckets.least_sum[bucket] = min(buckets.least_sum[bucket], fronts.data_parallel_sum[fronts.start[i]])
    for word in range(lattice.bits.shape[1]):
        buckets.meet[bucket, word] &= lattice.bits[i, word]
        buckets.join[bucket, word] |= lattice.bits[i, word]
    for r in range(costs.need_s.shape[1]):
        buckets.cap_s[r, bucket] = max(buckets.cap_s[r, bucket], costs.cap_s[i, r])
        buckets.resync_s[bucket, r] = max(buckets.resync_s[bucket, r], costs.resync_s[i, r])
        buckets.least_a[bucket, r] = max(buckets.least_a[bucket, r], costs.least_a[i, r])
        buckets.least_b[bucket, r] = max(buckets.least_b[bucket, r], costs.least_b[i, r])
        if buckets.least_shared.shape[0] > 0:
            buckets.least_shared[bucket, r] = max(buckets.least_shared[bucket, r], costs.least_shared[i, r])
        buckets.missing[bucket, r] = max(buckets.missing[bucket, r], costs.missing[i, r])
        buckets.many_s[bucket, r] = max(buckets.many_s[bucket, r], costs.cap_s[i, r] + costs.many_s[i, r])
        buckets.one_s[bucket, r] = max(buckets.one_s[bucket, r], costs.cap_s[i, r] + costs.one_s[i, r])


@leaf_kernel
def _bound_states(bucket: int, fronts: FrontArrays, members: MemberArrays, buckets: BucketArrays) -> None:
    """Bounds the states of a bucket with several members. The states of a single member are used directly."""
    begin, end = buckets.member_start[bucket], buckets.member_start[bucket + 1]
    size = 0
    if end - begin > 1:
        for k in range(begin, end):
            i = members.downset[k]
            for state in range(fronts.start[i], fronts.start[i] + fronts.states[i]):
                size = add_bound(
                    buckets.front_tally[bucket],
                    buckets.front_sum[bucket],
                    size,
                    fronts.tally[state],
                    fronts.data_parallel_sum[state],
                )
    buckets.front_size[bucket] = size


def no_members(lattice: LatticeArrays, costs: CostArrays) -> MemberArrays:
    """Returns arrays with room for all downsets."""
    downsets, words = lattice.bits.shape
    return MemberArrays(
        downset=np.empty(downsets, np.int64),
        place=np.empty(downsets, np.int64),
        bits=np.empty((downsets, words), np.uint64),
        cap_s=np.empty((downsets, costs.cap_s.shape[1])),
        dominated_by=np.empty((downsets, words), np.uint64),
    )


def empty_buckets(capacity: int, lattice: LatticeArrays, costs: CostArrays) -> BucketArrays:
    """Returns arrays with room for ``capacity`` buckets."""
    words = lattice.bits.shape[1]
    levels, variants = lattice.level_start.size - 1, costs.missing.shape[1]
    sharing = costs.least_shared.shape[0] > 0
    return BucketArrays(
        used=np.zeros(1, np.int64),
        level_first=np.full(levels, 2**62, np.int64),
        member_start=np.zeros(capacity + 1, np.int64),
        least_tally=np.empty(capacity, np.int64),
        least_devices=np.empty(capacity, np.int64),
        least_sum=np.empty(capacity, np.int64),
        meet=np.empty((capacity, words), np.uint64),
        join=np.empty((capacity, words), np.uint64),
        cap_s=np.empty((variants, capacity)),
        resync_s=np.empty((capacity, variants)),
        least_a=np.empty((capacity, variants)),
        least_b=np.empty((capacity, variants)),
        least_shared=np.empty((capacity if sharing else 0, variants)),
        missing=np.empty((capacity, variants), np.int64),
        many_s=np.empty((capacity, variants)),
        one_s=np.empty((capacity, variants)),
        front_size=np.zeros(capacity, np.int64),
        front_tally=np.empty((capacity, FRONT_SIZE), np.int64),
        front_sum=np.empty((capacity, FRONT_SIZE), np.int64),
        all_dominated_by=np.zeros((capacity, words), np.uint64),
    )


def empty_groups(capacity: int, lattice: LatticeArrays, costs: CostArrays) -> GroupArrays:
    """Returns arrays with room for ``capacity`` groups."""
    levels, variants = lattice.level_start.size - 1, costs.missing.shape[1]
    return GroupArrays(
        used=np.zeros(1, np.int64),
        level_first=np.full(levels, 2**62, np.int64),
        bucket_start=np.zeros(capacity + 1, np.int64),
        least_tally=np.empty(capacity, np.int64),
        least_devices=np.empty(capacity, np.int64),
        least_sum=np.empty(capacity, np.int64),
        cap_s=np.empty((variants, capacity)),
        all_dominated_by=np.zeros((capacity, lattice.bits.shape[1]), np.uint64),
    )


_MARGIN = 1e-12
"""Share of all work: more than the rounding error of times that are summed in different orders."""


@inner_kernel
def find_dominated(level: int, arrays: StateArrays) -> None:
    """Marks the downsets below a finished level that are dominated by one in it; then their buckets and groups.

    J + v dominates J for every larger I that has v if each state of J has one of J + v that is as good, and v adds at
    least as much work to J as communication. Then I \\ (J + v) takes no longer than I \\ J and no more memory, in every
    variant and with every choice of options: the choices of the other vertices stay the same, and charges do not depend
    on them.
    """
    tables, _, fronts, members, buckets, groups = arrays
    lattice, costs = tables.lattice, tables.costs
    if not _charges_are_fixed(tables.options):
        return
    level_start, bits = lattice.level_start, lattice.bits
    removable = np.empty(bits.shape[1], np.uint64)
    for outer in range(level_start[level], level_start[level + 1]):
        if fronts.states[outer] == 0:
            continue
        _find_removable(outer, lattice, removable)
        for word in range(bits.shape[1]):
            rest = removable[word]
            while rest != 0:
                vertex = rest & (~rest + np.uint64(1))
                rest ^= vertex
                inner = _find_without(outer, word, vertex, level_start[level - 1], level_start[level], bits)
                if inner >= 0 and _is_covered(inner, outer, fronts) and _adds_work(inner, outer, costs):
                    members.dominated_by[members.place[inner], word] |= vertex
    first_bucket, last_bucket = buckets.level_first[level - 1], buckets.level_first[level]
    for bucket in range(first_bucket, last_bucket):
        for word in range(bits.shape[1]):
            common = ~np.uint64(0)
            for k in range(buckets.member_start[bucket], buckets.member_start[bucket + 1]):
                common &= members.dominated_by[k, word]
            buckets.all_dominated_by[bucket, word] = common
    for group in range(groups.level_first[level - 1], groups.level_first[level]):
        for word in range(bits.shape[1]):
            common = ~np.uint64(0)
            for bucket in range(groups.bucket_start[group], groups.bucket_start[group + 1]):
                common &= buckets.all_dominated_by[bucket, word]
            groups.all_dominated_by[group, word] = common


@leaf_kernel
def _charges_are_fixed(options: OptionArrays) -> bool:
    """Whether communication costs are the same for all choices of options."""
    for r in range(options.uniform.size):
        if options.uniform[r] == 0:
            return False
    return True


@leaf_kernel
def _find_removable(i: int, lattice: LatticeArrays, removable: BitArray) -> None:
    """Finds the vertices of downset i that have no predecessor in it."""
    bits = lattice.bits
    for word in range(bits.shape[1]):
        removable[word] = bits[i, word]
    for e in range(lattice.edge_tail.size):
        tail, head = lattice.edge_tail[e], lattice.edge_head[e]
        if (bits[i, tail >> 6] >> np.uint64(tail & 63)) & np.uint64(1) != 0:
            removable[head >> 6] &= ~(np.uint64(1) << np.uint64(head & 63))


@leaf_kernel
def _find_without(i: int, word: int, vertex: np.uint64, first: int, last: int, bits: BitArray) -> int:
    """Returns the number of downset i without one vertex, among first .. last - 1; -1 if it is not listed.

    They are in lexicographic order of their vertices.
    """
    low, high = first, last
    while low < high:
        middle = (low + high) >> 1
        order = 0
        for at in range(bits.shape[1]):
            wanted = bits[i, at]
            if at == word:
                wanted ^= vertex
            differs = wanted ^ bits[middle, at]
            if differs != 0:
                order = -1 if wanted & differs & (~differs + np.uint64(1)) != 0 else 1
                break
        if order == 0:
            return int(middle)
        if order < 0:
            high = middle
        else:
            low = middle + 1
    return -1


@leaf_kernel
def _is_covered(inner: int, outer: int, fronts: FrontArrays) -> bool:
    """Whether ``inner`` has states, and for each of them ``outer`` has one with at most its tally and sum."""
    if fronts.states[inner] == 0:
        return False
    at, end = fronts.start[outer], fronts.start[outer] + fronts.states[outer]
    for state in range(fronts.start[inner], fronts.start[inner] + fronts.states[inner]):
        # States are in order of rising sums and falling tallies.
        while at + 1 < end and fronts.data_parallel_sum[at + 1] <= fronts.data_parallel_sum[state]:
            at += 1
        if fronts.data_parallel_sum[at] > fronts.data_parallel_sum[state] or fronts.tally[at] > fronts.tally[state]:
            return False
    return True


@leaf_kernel
def _adds_work(inner: int, outer: int, costs: CostArrays) -> bool:
    """Whether a stage takes longer with the vertex that only ``outer`` has, in each variant that can run it."""
    last = costs.need_s.shape[0] - 1
    for r in range(costs.need_s.shape[1]):
        if costs.missing[outer, r] > costs.missing[inner, r]:
            continue
        if costs.cap_s[outer, r] < costs.cap_s[inner, r] + _MARGIN * costs.need_s[last, r]:
            return False
    return True
