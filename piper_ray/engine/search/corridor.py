"""Downsets near those where a plan's stages end: better plans are often among these (Sniedovich and Voss, The corridor
method, 2006).
"""

from __future__ import annotations

import numpy as np

from piper_ray.engine.kernels.cover import BoolArray
from piper_ray.engine.kernels.types import BitArray
from piper_ray.engine.lattice.downsets import Lattice


def around(lattice: Lattice, borders: BitArray, share: float) -> BoolArray:
    """bool[m]: the empty set, V, and the downsets that differ by fewest vertices from one of ``borders``,
    uint64[borders, words], as many as are this share of all at most.
    """
    bits = lattice.arrays.bits
    apart = np.full(lattice.size, lattice.graph.size, np.int64)
    for border in borders:
        np.minimum(apart, np.bitwise_count(bits ^ border).sum(axis=1, dtype=np.int64), out=apart)
    upto = np.cumsum(np.bincount(apart))
    widest = max(1, int(np.searchsorted(upto, share * lattice.size, side="right")) - 1)
    allowed: BoolArray = apart <= widest
    allowed[[0, -1]] = True
    return allowed
