"""Kernel: arrays with more room.

Element by element: numba compiles seconds' worth of messages for shapes that do not match, where one array is copied
into a slice of another.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inner_kernel
from piper_ray.engine.kernels.types import FloatArray


@inner_kernel
def twice(values: np.ndarray) -> np.ndarray:
    """With room for as many again."""
    grown = np.empty(2 * values.size, values.dtype)
    for k in range(values.size):
        grown[k] = values[k]
    return grown


@inner_kernel
def twice_rows(rows: FloatArray) -> FloatArray:
    """With room for as many rows again."""
    grown = np.empty((2 * rows.shape[0], rows.shape[1]))
    for k in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            grown[k, column] = rows[k, column]
    return grown
