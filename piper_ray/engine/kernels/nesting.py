"""Kernel: which downsets no stage needs to end at, as one with a vertex more does as well.

J + v dominates J for every I that has v and more, where J has no state that J + v does not have as good a one as, and
where v adds at least as much work to J as communication. For then I \\ (J + v) takes no longer than I \\ J and no more
memory, in every variant and with every choice of options: the others stay as they are, and no charge depends on them.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inner_kernel, leaf_kernel
from piper_ray.engine.kernels.types import (
    BitArray,
    CostArrays,
    FrontArrays,
    LatticeArrays,
    OptionArrays,
    StateArrays,
)

_MARGIN = 1e-12
"""Of all work: by less than that the same times differ when they are summed in another order."""


@inner_kernel
def find_dominated(level: int, arrays: StateArrays) -> None:
    """Marks the downsets below a finished level that some in it dominate; then their buckets and groups."""
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
    """Whether no choice of options changes what stages pay for communication."""
    for r in range(options.uniform.size):
        if options.uniform[r] == 0:
            return False
    return True


@leaf_kernel
def _find_removable(i: int, lattice: LatticeArrays, removable: BitArray) -> None:
    """The vertices of downset i without a predecessor in it."""
    bits = lattice.bits
    for word in range(bits.shape[1]):
        removable[word] = bits[i, word]
    for e in range(lattice.edge_tail.size):
        tail, head = lattice.edge_tail[e], lattice.edge_head[e]
        if (bits[i, tail >> 6] >> np.uint64(tail & 63)) & np.uint64(1) != 0:
            removable[head >> 6] &= ~(np.uint64(1) << np.uint64(head & 63))


@leaf_kernel
def _find_without(i: int, word: int, vertex: np.uint64, first: int, last: int, bits: BitArray) -> int:
    """The number of downset i without one vertex, among first .. last - 1; -1 if it is not there.

    They are in the lexicographic order of their vertices.
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
    """Whether each state of ``inner``, of which there is one, has one of ``outer`` with no more of tally and sum."""
    if fronts.states[inner] == 0:
        return False
    at, end = fronts.start[outer], fronts.start[outer] + fronts.states[outer]
    for state in range(fronts.start[inner], fronts.start[inner] + fronts.states[inner]):
        # States come with rising sums and falling tallies.
        while at + 1 < end and fronts.data_parallel_sum[at + 1] <= fronts.data_parallel_sum[state]:
            at += 1
        if fronts.data_parallel_sum[at] > fronts.data_parallel_sum[state] or fronts.tally[at] > fronts.tally[state]:
            return False
    return True


@leaf_kernel
def _adds_work(inner: int, outer: int, costs: CostArrays) -> bool:
    """Whether a stage takes longer with what ``outer`` has more than ``inner``, in each variant that may have it."""
    last = costs.need_s.shape[0] - 1
    for r in range(costs.need_s.shape[1]):
        if costs.missing[outer, r] > costs.missing[inner, r]:
            continue
        if costs.cap_s[outer, r] < costs.cap_s[inner, r] + _MARGIN * costs.need_s[last, r]:
            return False
    return True
