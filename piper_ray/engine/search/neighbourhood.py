"""An early plan on a long chain: stages may end at few borders at first, then at those near the best plan's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.kernels.cover import BoolArray
from piper_ray.engine.kernels.types import BitArray, IndexArray
from piper_ray.engine.lattice.downsets import Lattice

_LONG, _LONG_AND_WIDE = 128, 1024
"""Fewer downsets, of a chain and of what is nearly one, are searched as fast without."""

_WIDEST = 2.0
"""Downsets of each size on average, at most, of what is nearly a chain."""

_BORDERS = 256
"""Sizes of the first plan's downsets to choose from, at most."""

_FINER = 2
"""Times, from one plan to the next."""

_REACH = 2
"""How far a border may move at once, in spacings of the borders before."""


def is_long_chain(lattice: Lattice) -> bool:
    """Whether nearly every downset is the only one of its size, and there are many."""
    return lattice.size > (_LONG if lattice.size == lattice.levels else _LONG_AND_WIDE) and (
        lattice.size <= _WIDEST * lattice.levels
    )


def first_spacing(lattice: Lattice) -> int:
    """How many layers lie between two of the first plan's borders."""
    return max(2, -(-lattice.levels // _BORDERS))


def finer(spacing: int) -> int:
    """The next spacing; 0 after the finest."""
    return 0 if spacing == 1 else max(1, spacing // _FINER)


def every(lattice: Lattice, spacing: int) -> BoolArray:
    """bool[m]: the first and last downset, and those of every ``spacing``th size between them."""
    allowed: BoolArray = _sizes(lattice) % spacing == 0
    allowed[[0, -1]] = True
    return allowed


def near(lattice: Lattice, stages: Sequence[TracedStage], spacing: int) -> BoolArray:
    """bool[m]: of every ``spacing``th size, what is near the borders of a plan; and these."""
    sizes, allowed = _sizes(lattice), np.zeros(lattice.size, np.bool_)
    for stage in stages:
        apart = np.abs(sizes - sizes[stage.inner])
        allowed |= (apart <= _REACH * _FINER * spacing) & (apart % spacing == 0)
    allowed[[0, -1]] = True
    return allowed


def _sizes(lattice: Lattice) -> IndexArray:
    """int64[m]: of each downset."""
    return np.repeat(np.arange(lattice.levels), np.diff(lattice.arrays.level_start))


def within(allowed: BoolArray, devices: int) -> Completion:
    """Of plans whose stages end at these downsets, at any threshold."""
    device_limit = np.where(allowed, devices, 0).astype(np.int64)
    device_limit.setflags(write=False)
    return Completion(np.inf, device_limit)


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
