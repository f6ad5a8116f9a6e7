"""Kernel: the least data-parallel degree with which a stage can keep the threshold and the memory limit."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, inner_kernel, leaf_kernel
from piper_ray.cost.stage import held_bytes, in_flight
from piper_ray.engine.kernels.types import BitArray, ClusterArrays, IndexArray

_GUARD = 1e-9


@leaf_kernel
def first_divisor_by_time(
    work_s: float, resync_s: float, threshold_s: float, divisor_at_least: IndexArray, divisors: int
) -> int:
    """Returns the index of the first divisor d that is not ruled out by work + (d - 1) * resync <= threshold * d.

    Returns ``divisors``, their number, if all are ruled out. Errs towards the smaller.
    """
    if work_s <= threshold_s:
        return 0
    room_s = threshold_s - resync_s
    if room_s <= 0.0:
        return divisors
    least = np.ceil((work_s - resync_s) / room_s - _GUARD)
    if least >= divisor_at_least.size:
        return divisors
    return int(divisor_at_least[np.int64(least)])


@inlined_kernel
def first_divisor_by_memory(
    a_bytes: float, b_bytes: float, shared_bytes: float, later_sum: int, cluster: ClusterArrays
) -> int:
    """Returns the index of the first divisor d with a * y + b + shared / d <= M, where y = ceil((later_sum + d) / d),
    which is 1 + ceil(later_sum / d).

    ``later_sum`` is the sum of d of the stages behind. Returns the number of divisors if there is none. Errs towards
    the smaller.
    """
    first = _first_divisor_by_activations(
        a_bytes, b_bytes, cluster.memory_bytes, later_sum, cluster.divisor_at_least, cluster.divisors.size
    )
    if shared_bytes > 0.0:
        first = _first_divisor_by_shares(
            first, a_bytes, b_bytes, shared_bytes, cluster.memory_bytes, later_sum, cluster.divisors
        )
    return first


@leaf_kernel
def _first_divisor_by_shares(
    first: int,
    a_bytes: float,
    b_bytes: float,
    shared_bytes: float,
    memory_bytes: float,
    later_sum: int,
    divisors: IndexArray,
) -> int:
    """Searches from ``first`` on, by bisection: neither y nor the share of each replica grows with d."""
    low, high = first, divisors.size
    while low < high:
        middle = (low + high) >> 1
        d = divisors[middle]
        needed_bytes = held_bytes(a_bytes, b_bytes, shared_bytes, in_flight(later_sum, d), d)
        if needed_bytes <= memory_bytes * (1.0 + _GUARD):
            high = middle
        else:
            low = middle + 1
    return low


@leaf_kernel
def _first_divisor_by_activations(
    a_bytes: float, b_bytes: float, memory_bytes: float, later_sum: int, divisor_at_least: IndexArray, divisors: int
) -> int:
    """Returns the same without shared bytes, by a formula."""
    room_bytes = memory_bytes - b_bytes
    if room_bytes < a_bytes * (1.0 + later_sum) or a_bytes <= 0.0:
        if room_bytes < a_bytes or room_bytes < 0.0:
            return divisors
        if a_bytes <= 0.0 or later_sum == 0:
            return 0
        waiting = np.floor(room_bytes / a_bytes + _GUARD) - 1.0
        if waiting < 1.0:
            return divisors
        least = np.ceil(later_sum / waiting - _GUARD)
        if least >= divisor_at_least.size:
            return divisors
        return int(divisor_at_least[np.int64(least)])
    return 0


@leaf_kernel
def meets(one: BitArray, other: BitArray) -> bool:
    """Whether two bit sets have a member in common."""
    for word in range(one.size):
        if one[word] & other[word] != 0:
            return True
    return False


@leaf_kernel
def is_subset(small: BitArray, large: BitArray) -> bool:
    """Whether bit set ``small`` is a subset of ``large``."""
    for word in range(small.size):
        if small[word] & ~large[word] != 0:
            return False
    return True


@leaf_kernel
def has(row: BitArray, member: int) -> bool:
    """Whether a bit set has the member."""
    return bool((row[member >> 6] >> np.uint64(member & 63)) & np.uint64(1) != 0)


@leaf_kernel
def crosses_border(ends: BitArray, outer: BitArray, inner: BitArray) -> bool:
    """Whether a tensor has ends in the stage ``outer`` without ``inner``, and others elsewhere."""
    inside, outside = False, False
    for word in range(ends.size):
        of_stage = ends[word] & outer[word] & ~inner[word]
        inside = inside or of_stage != 0
        outside = outside or of_stage != ends[word]
    return inside and outside


@leaf_kernel
def lowest_position(bits: np.uint64) -> int:
    """Returns the position of the lowest bit; ``bits`` is not 0. Compilers turn the loop, which counts bits, into one
    instruction."""
    below = ~bits & (bits - np.uint64(1))
    position = 0
    while below != 0:
        below &= below - np.uint64(1)
        position += 1
    return position


@leaf_kernel
def bit_position(bits: np.uint64) -> int:
    """Returns the position of the highest bit, by binary search over halves; ``bits`` is not 0."""
    position = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if bits >> np.uint64(shift):
            bits >>= np.uint64(shift)
            position += shift
    return position


@inner_kernel
def members(outer: BitArray, inner: BitArray) -> IndexArray:
    """Returns int64[..]: the members of bit set ``outer`` that are not in ``inner``, ascending."""
    found = np.empty(64 * outer.size, np.int64)
    count = 0
    for word in range(outer.size):
        rest = outer[word] & ~inner[word]
        while rest != 0:
            low = rest & (~rest + np.uint64(1))
            rest ^= low
            found[count] = 64 * word + lowest_position(low)
            count += 1
    return found[:count]
