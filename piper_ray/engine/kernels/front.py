"""Kernels: the states of one downset as a Pareto front over (tally or devices, sum of d).

A front of ``size`` states is in two arrays: sums strictly rising, tallies strictly falling.
"""

from __future__ import annotations

from piper_ray.compiled.jit import leaf_kernel
from piper_ray.engine.kernels.types import FloatArray, IndexArray


@leaf_kernel
def first_above(sums: IndexArray, size: int, value: int) -> int:
    """Returns the index of the first state whose sum exceeds ``value``."""
    low, high = 0, size
    while low < high:
        middle = (low + high) >> 1
        if sums[middle] > value:
            high = middle
        else:
            low = middle + 1
    return low


@leaf_kernel
def is_dominated(tallies: IndexArray, sums: IndexArray, size: int, tally: int, total: int) -> bool:
    """Whether some state is at most (tally, total) in both figures."""
    at = first_above(sums, size, total)
    return at > 0 and tallies[at - 1] <= tally


@leaf_kernel
def span_dominated(tallies: IndexArray, sums: IndexArray, size: int, tally: int, total: int) -> tuple[int, int]:
    """Returns where a state that is not dominated belongs, and the end of the states that it dominates: at .. end -
    1."""
    at = first_above(sums, size, total)
    if at > 0 and sums[at - 1] == total:
        at -= 1
    end = at
    while end < size and tallies[end] >= tally:
        end += 1
    return at, end


@leaf_kernel
def put(values: IndexArray | FloatArray, size: int, at: int, end: int, value: float) -> None:
    """Replaces values at .. end - 1 of ``size`` by ``value``, and moves what comes after."""
    shift = 1 - (end - at)
    if shift > 0:
        for k in range(size, end, -1):
            values[k] = values[k - 1]
    elif shift < 0:
        for k in range(end, size):
            values[k + shift] = values[k]
    values[at] = value


@leaf_kernel
def insert(tallies: IndexArray, sums: IndexArray, size: int, tally: int, total: int) -> int:
    """Inserts a state that is not dominated, and drops those that it dominates. Returns the new size."""
    at, end = span_dominated(tallies, sums, size, tally, total)
    put(tallies, size, at, end, tally)
    put(sums, size, at, end, total)
    return size + 1 - (end - at)


@leaf_kernel
def add_bound(tallies: IndexArray, sums: IndexArray, size: int, tally: int, total: int) -> int:
    """Ensures that some state is at most (tally, total) in both. Returns the new size, which is within the room.

    If there is no room, a neighbouring state takes the lesser figure of each.
    """
    if is_dominated(tallies, sums, size, tally, total):
        return size
    at, end = span_dominated(tallies, sums, size, tally, total)
    if end > at or size < tallies.size:
        return insert(tallies, sums, size, tally, total)
    if at < size:
        sums[at] = total
    else:
        tallies[size - 1] = tally
    return size
