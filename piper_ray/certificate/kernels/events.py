"""Kernels: the longest paths through the passes of a batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.compiled.jit import kernel


class PassEvents(NamedTuple):
    """Passes, rank after rank in the order of their lists: those of rank r are start[r] .. start[r + 1] - 1.

    stage, kind: of each pass. onward: the same microbatch's next pass, at the next stage; -1: none.
    """

    start: Ints
    stage: Ints
    kind: Ints
    onward: Ints


class Longest(NamedTuple):
    """The longest paths. through_s: the length of the longest path through some pass of each stage; through: that pass.
    before, after: for each pass the previous and the next one on its longest path (-1: none)."""

    through_s: Floats
    at: Ints
    before: Ints
    after: Ints


@kernel
def longest_through(events: PassEvents, seconds: Floats, sync_s: Floats) -> Longest:
    """Finds the longest paths. seconds: float64[stages, kinds]. sync_s: float64[ranks], after a rank's last pass."""
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
    best_s, best = np.full(seconds.shape[0], -1.0), np.zeros(seconds.shape[0], np.int64)
    for at in range(count):
        if end_s[at] + left_s[at] > best_s[stage[at]]:
            best_s[stage[at]], best[stage[at]] = end_s[at] + left_s[at], at
    return Longest(best_s, best, before, after)


@kernel
def steps_through(events: PassEvents, longest: Longest, through: int) -> tuple[int, Ints]:
    """Returns the first pass of the longest path through a pass, and its steps: alternately a number of steps along a
    rank's list and a number of steps onward with a microbatch."""
    start = events.start
    ends = np.zeros(events.stage.size + 1, np.bool_)
    for rank in range(start.size):
        ends[start[rank]] = True
    first, length = through, 1
    while longest.before[first] >= 0:
        first = longest.before[first]
        length += 1
    path = np.empty(length, np.int64)
    at = through
    for place in range(length - 1, -1, -1):
        path[place] = at
        at = longest.before[at]
    steps = np.zeros(2 * events.stage.size + 2, np.int64)
    turn, at, place = 0, first, 0
    while True:
        place += 1
        following = path[place] if place < length else longest.after[at]
        if following < 0:
            break
        along = following == at + 1 and not ends[following]
        if along != (turn % 2 == 0):
            turn += 1
        steps[turn] += 1
        at = following
    return first, steps[: turn + 1].copy()


@kernel
def count_passes(events: PassEvents, first: int, steps: Ints, counts: Floats) -> int:
    """Adds the passes of a path to ``counts``, float64[stages, kinds]. Returns its last pass, or -1 if there is no such
    path."""
    start, stage, kind, onward = events
    at = first
    counts[stage[at], kind[at]] += 1.0
    rank = np.searchsorted(start, at, side="right") - 1
    for turn in range(steps.size):
        if steps[turn] < 0:
            return -1
        if turn % 2 == 0:
            if steps[turn] > start[rank + 1] - 1 - at:
                return -1
            for _ in range(steps[turn]):
                at += 1
                counts[stage[at], kind[at]] += 1.0
            continue
        for _ in range(steps[turn]):
            at = onward[at]
            if at < 0:
                return -1
            counts[stage[at], kind[at]] += 1.0
        rank = np.searchsorted(start, at, side="right") - 1
    return at
