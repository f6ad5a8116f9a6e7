"""Kernel: the longest paths through the passes of a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.compiled.jit import kernel


class Events(NamedTuple):
    """Passes, rank after rank in the order of their lists: those of rank r are start[r] .. start[r + 1] - 1.

    stage, kind: of each. onward: the same microbatch's next pass, at the next stage; -1: none.
    """

    start: Ints
    stage: Ints
    kind: Ints
    onward: Ints


@kernel
def longest_through(events: Events, seconds: Floats, sync_s: Floats) -> tuple[Floats, Ints, Ints, Floats, Ints]:
    """For each pass when it ends, its place in an order in which each comes after what it waits for, what it waited for
    (-1: nothing), how long it is from its end to the end of all, and what comes next on that way (-1: nothing).

    seconds: float64[stages, kinds]. sync_s: float64[ranks], after a rank's last pass.
    """
    start, stage, kind, onward = events
    count, ranks = stage.size, start.size - 1
    waits_on = np.full(count, -1, np.int64)
    for at in range(count):
        if onward[at] >= 0:
            waits_on[onward[at]] = at
    end_s, before, order = np.full(count, -1.0), np.full(count, -1, np.int64), np.empty(count, np.int64)
    turn = start[:-1].copy()
    done = 0
    while done < count:
        stuck = True
        for rank in range(ranks):
            while turn[rank] < start[rank + 1]:
                at = turn[rank]
                other = waits_on[at]
                if other >= 0 and end_s[other] < 0.0:
                    break
                begin_s = 0.0
                if at > start[rank]:
                    begin_s, before[at] = end_s[at - 1], at - 1
                if other >= 0 and end_s[other] >= begin_s:
                    begin_s, before[at] = end_s[other], other
                end_s[at] = begin_s + seconds[stage[at], kind[at]]
                order[done] = at
                done += 1
                turn[rank] += 1
                stuck = False
        if stuck:
            break
    left_s, after = np.zeros(count), np.full(count, -1, np.int64)
    rank_of_last = np.full(count, -1, np.int64)
    for rank in range(ranks):
        rank_of_last[start[rank + 1] - 1] = rank
    for n in range(done - 1, -1, -1):
        at = order[n]
        if rank_of_last[at] >= 0:
            left_s[at] = sync_s[rank_of_last[at]]
        else:
            following = at + 1
            left_s[at] = left_s[following] + seconds[stage[following], kind[following]]
            after[at] = following
        if onward[at] >= 0:
            following = onward[at]
            through_s = left_s[following] + seconds[stage[following], kind[following]]
            if through_s > left_s[at]:
                left_s[at], after[at] = through_s, following
    return end_s, order, before, left_s, after
