"""Kernels: which mixes of stages on several kinds of devices tails may have, and how they follow from each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.types import BitArray, IndexArray


class MixTables(NamedTuple):
    """The fields of ``FlushTask`` with the same names."""

    next_mix: IndexArray
    previous_mix: IndexArray
    is_whole: BitArray


@kernel
def mix_tables(grown: IndexArray, ends_here: npt.NDArray[np.bool_]) -> MixTables:
    """Makes the tables. grown: int64[counts, kinds], for each combination of numbers of stages the one with one more of
    a kind; -1: too many. The first has none. ends_here: bool[counts], whether a plan may have these numbers.
    """
    counts, kinds = grown.shape
    mixes = 1 + kinds * kinds * (counts - 1)
    next_mix = np.full((mixes, kinds**3), -1, np.int64)
    previous_mix = np.full((mixes, kinds**3), -1, np.int64)
    is_whole = np.zeros(mixes, np.uint8)
    for first in range(kinds):
        for promised in range(kinds):
            start = (first * kinds + promised) * (counts - 1)
            for cell in range(counts):
                mix = 0
                if cell > 0:
                    mix = start + cell
                    is_whole[mix] = first == promised and ends_here[cell]
                elif first != promised:
                    continue  # nothing is behind: it counts as being of the same kind
                more = grown[cell, promised]
                if more < 0:
                    continue
                for ahead in range(kinds):
                    move = (promised * kinds + first) * kinds + ahead
                    found = (promised * kinds + ahead) * (counts - 1) + more
                    next_mix[mix, move] = found
                    previous_mix[found, move] = mix
    return MixTables(next_mix, previous_mix, is_whole)
