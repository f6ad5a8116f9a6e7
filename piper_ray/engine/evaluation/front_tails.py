"""Tails by front (``kernels/tails.py``) of a threshold, listed downset by downset in one thread, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.kernels.tails import TOO_HARD, FrontTails, OpenTails, keep_tails
from piper_ray.engine.kernels.types import IndexArray
from piper_ray.model.errors import ChoiceTooHard


def list_tails(
    start: IndexArray,
    shape: tuple[int, int],
    find: Callable[[int, FrontTails, OpenTails], int],
    check: Callable[[], None],
) -> tuple[FrontTails, int, int]:
    """Returns the tails of all downsets, their number, and that of downsets which have some.

    start: int64[m, fronts + 1], in which the empty downset has its tails. shape: the numbers of fronts and cells. find:
    finds the tails of a downset, and returns their number or TOO_HARD. check: called again and again; what it raises is
    passed on. Raises ChoiceTooHard.
    """
    used, live = int(start[0, -1]), 1
    tails, found = FrontTails(start, *_zeros(used)), OpenTails(*(np.empty(shape, np.int64) for _ in OpenTails._fields))
    for i in range(1, len(start)):
        check()
        count = find(i, tails, found)
        if count == TOO_HARD:
            raise ChoiceTooHard
        if used + count > tails.sums.size:
            more = _zeros(max(used, count))
            tails = FrontTails(start, *map(np.concatenate, zip(tails[1:], more, strict=True)))
        used, live = int(keep_tails(i, used, found, tails)), live + (count > 0)
    return tails, used, live


def _zeros(count: int) -> list[IndexArray]:
    return [np.zeros(count, np.int64) for _ in FrontTails._fields[1:]]


def trace_tail(tails: FrontTails, state: int, threshold_s: float) -> Iterator[tuple[TracedStage, int]]:
    """Yields the stages of a tail, front to back, each with the cell of the tail that it begins."""
    ends = tails.start[:, -1]
    i = int(np.searchsorted(ends, state, side="right"))
    while i > 0:
        behind = int(tails.behind[state])
        j, later_sum = int(np.searchsorted(ends, behind, side="right")), int(tails.sums[behind])
        d = int(tails.sums[state]) - later_sum
        yield TracedStage(i, j, int(tails.variant[state]), d, later_sum, threshold_s * d), int(tails.cell[state])
        i, state = j, behind
