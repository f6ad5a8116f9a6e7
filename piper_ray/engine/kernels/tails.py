"""Kernels: tails of the pipeline by *front*: what the stages in front need to know of a tail, besides its devices.

On several kinds of devices (``mixed``) a front is the kind of the first stage and of the one in front, and a *cell* a
mix of devices. On nodes (``placed``) a front is the rate at the border in front, and a cell a place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import stable_order
from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.types import IndexArray

NO_TAIL = np.int64(2**62)
TOO_HARD = -1


class FrontTails(NamedTuple):
    """Tails of finished downsets, each front by rising sums."""

    start: IndexArray  # int64[m, fronts + 1]
    sums: IndexArray  # int64[..]: of data-parallel degrees
    cell: IndexArray  # int64[..]
    behind: IndexArray  # int64[..]: the tail behind the first stage
    variant: IndexArray  # int64[..]: of the first stage


class OpenTails(NamedTuple):
    """Tails of the current downset: int64[fronts, cells] each."""

    sums: IndexArray
    behind: IndexArray
    variant: IndexArray
    least: IndexArray  # the least sum of a cell and of those that dominate it


@kernel
def keep_tails(i: int, used: int, found: OpenTails, tails: FrontTails) -> int:
    """Appends the tails of downset i after the first ``used``. Returns their number then. There must be room for
    them."""
    fronts, cells = found.sums.shape
    for front in range(fronts):
        tails.start[i, front] = used
        count = 0
        of_cell, sums = np.empty(cells, np.int64), np.empty(cells)
        for cell in range(cells):
            if found.sums[front, cell] != NO_TAIL:
                of_cell[count], sums[count] = cell, found.sums[front, cell]
                count += 1
        for at in stable_order(sums, count):
            cell = of_cell[at]
            tails.sums[used], tails.cell[used] = found.sums[front, cell], cell
            tails.behind[used], tails.variant[used] = found.behind[front, cell], found.variant[front, cell]
            used += 1
    tails.start[i, fronts] = used
    return used
