"""Kernels: arrays with more room, copied element by element, and indices in the order of keys.

If one array is copied into a slice of another, numba spends seconds on compiling messages for shapes that do not match.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inner_kernel, shared_kernel


@inner_kernel
def twice(values: np.ndarray) -> np.ndarray:
    """Returns the array with twice the room."""
    grown = np.empty(2 * values.size, values.dtype)
    for k in range(values.size):
        grown[k] = values[k]
    return grown


@inner_kernel
def twice_rows(rows: np.ndarray) -> np.ndarray:
    """Returns the array with room for twice as many rows."""
    grown = np.empty((2 * rows.shape[0], rows.shape[1]), rows.dtype)
    for k in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            grown[k, column] = rows[k, column]
    return grown


@shared_kernel
def stable_order(keys: np.ndarray, count: int) -> np.ndarray:
    """Returns int64[count]: the first ``count`` indices by rising key; equal keys stay in order. No key is NaN.

    It merges runs of two, four and so on: numba's own sort takes ten times as long to compile.
    """
    order = np.arange(count)
    merged = np.empty(count, np.int64)
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            left, right = begin, middle
            for at in range(begin, end):
                if left < middle and (right >= end or keys[order[left]] <= keys[order[right]]):
                    merged[at] = order[left]
                    left += 1
                else:
                    merged[at] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order
