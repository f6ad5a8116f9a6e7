"""An early plan on a long chain: stages may end at few borders at first, then at those near the best plan's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.lattice.downsets import Lattice

BoolArray = npt.NDArray[np.bool_]

_LONG = 128
"""Fewer downsets are searched as fast without."""

_BORDERS = 256
"""Of the first plan to choose from, at most."""

_FINER = 2
"""Times, from one plan to the next."""

_REACH = 2
"""How far a border may move at once, in spacings of the borders before."""


def is_long_chain(lattice: Lattice) -> bool:
    """Whether every downset is the only one of its size, and there are many."""
    return lattice.levels == lattice.size > _LONG


def first_spacing(lattice: Lattice) -> int:
    """How many layers lie between two of the first plan's borders."""
    return max(2, -(-lattice.size // _BORDERS))


def finer(spacing: int) -> int:
    """The next spacing; 0 after the finest."""
    return 0 if spacing == 1 else max(1, spacing // _FINER)


def every(lattice: Lattice, spacing: int) -> BoolArray:
    """bool[m]: the first and last downset, and those at every ``spacing`` between them."""
    allowed = np.zeros(lattice.size, np.bool_)
    allowed[::spacing] = True
    allowed[-1] = True
    return allowed


def near(lattice: Lattice, stages: Sequence[TracedStage], spacing: int) -> BoolArray:
    """bool[m]: at every ``spacing``, what is near the borders of a plan; and these."""
    allowed = np.zeros(lattice.size, np.bool_)
    allowed[[0, -1]] = True
    for stage in stages:
        reach = _REACH * _FINER * spacing
        first = stage.inner - min(stage.inner // spacing * spacing, reach)
        allowed[first : stage.inner + reach + 1 : spacing] = True
        allowed[stage.inner] = True
    return allowed


def within(allowed: BoolArray, devices: int) -> Completion:
    """Of plans whose stages end at these downsets, at any threshold."""
    device_limit = np.where(allowed, devices, 0).astype(np.int64)
    device_limit.setflags(write=False)
    return Completion(np.inf, device_limit)
