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


class MixRules(NamedTuple):
    """What decides which mixes there are, for c combinations of numbers of stages on each of g kinds; the first has
    none. borders, last, move_of: see ``flush.mixes.MixLimits``."""

    grown: IndexArray  # int64[c, g]: the combination with one more of a kind; -1: too many
    ends_here: npt.NDArray[np.bool_]  # bool[c]: whether a plan may have these numbers
    counts: IndexArray  # int64[c, g]
    borders: IndexArray  # int64[g, most + 1]
    last: IndexArray  # int64[g]
    move_of: IndexArray  # int64[g, numbers, numbers]: by a stage's kind, behind it and in front; -1: none


@kernel
def mix_tables(rules: MixRules, moves: int) -> MixTables:
    """Makes the tables."""
    cells, kinds = rules.grown.shape
    mixes = 1 + kinds * kinds * (cells - 1)
    next_mix = np.full((mixes, moves), -1, np.int64)
    previous_mix = np.full((mixes, moves), -1, np.int64)
    is_whole = np.zeros(mixes, np.uint8)
    for first in range(kinds):
        for promised in range(kinds):
            start = (first * kinds + promised) * (cells - 1)
            for cell in range(cells):
                mix = 0
                if cell > 0:
                    mix = start + cell
                    is_whole[mix] = first == promised and rules.ends_here[cell]
                elif first != promised:
                    continue  # nothing is behind: it counts as being of the same kind
                more, count = rules.grown[cell, promised], rules.counts[cell, promised]
                if more < 0:
                    continue
                behind = rules.borders[promised, count] if first == promised else rules.last[first]
                for ahead in range(kinds):
                    in_front = rules.borders[promised, count + 1] if ahead == promised else rules.last[ahead]
                    move = rules.move_of[promised, behind, in_front]
                    if move >= 0:
                        found = (promised * kinds + ahead) * (cells - 1) + more
                        next_mix[mix, move] = found
                        previous_mix[found, move] = mix
    return MixTables(next_mix, previous_mix, is_whole)
