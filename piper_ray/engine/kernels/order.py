"""Kernel: indices in the order of keys."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inner_kernel
from piper_ray.engine.kernels.types import FloatArray, IndexArray


@inner_kernel
def stable_order(keys: FloatArray, count: int) -> IndexArray:
    """int64[count]: the first ``count`` indices by rising key; of equal keys the first comes first. No key is NaN.

    Runs of two, four and so on are merged: numba's own sort takes ten times as long to compile.
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
