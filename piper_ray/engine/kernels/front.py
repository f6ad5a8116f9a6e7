"""Kernels: the states of one downset as a Pareto front over (cost, sum of data-parallel degrees).

A front of ``size`` states lies in two arrays: sums strictly rising, costs strictly falling.
"""

from __future__ import annotations

from piper_ray.compiled.jit import leaf_kernel
from piper_ray.engine.kernels.types import IndexArray


@leaf_kernel
def _first_above(sums: IndexArray, size: int, value: int) -> int:
    """Index of the first state whose sum exceeds ``value``."""
    low, high = 0, size
    while low < high:
        middle = (low + high) >> 1
        if sums[middle] > value:
            high = middle
        else:
            low = middle + 1
    return low


@leaf_kernel
def is_dominated(costs: IndexArray, sums: IndexArray, size: int, cost: int, total: int) -> bool:
    """Whether some state is at most (cost, total) in both."""
    at = _first_above(sums, size, total)
    return at > 0 and costs[at - 1] <= cost


@leaf_kernel
def insert(costs: IndexArray, sums: IndexArray, size: int, cost: int, total: int) -> int:
    """Inserts a state that is not dominated, drops those it dominates, and returns the new size."""
    at = _first_above(sums, size, total)
    if at > 0 and sums[at - 1] == total:
        at -= 1
    end = at
    while end < size and costs[end] >= cost:
        end += 1
    # States at .. end - 1 have sums >= total and costs >= cost: the new one takes their place.
    shift = 1 - (end - at)
    if shift > 0:
        for k in range(size, end, -1):
            costs[k] = costs[k - 1]
            sums[k] = sums[k - 1]
    elif shift < 0:
        for k in range(end, size):
            costs[k + shift] = costs[k]
            sums[k + shift] = sums[k]
    costs[at] = cost
    sums[at] = total
    return size + shift
