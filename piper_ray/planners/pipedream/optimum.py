"""PipeDream's optimum: a table for each level but the top one, and for the top a search over thresholds.

The value is a bottleneck, so "how few machines if no stage takes longer than this?" finds it in some twenty passes over
the pairs of states, where a table would have a row for every number of machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_ray.evaluate import MEMORY_TOLERANCE
from piper_ray.model.errors import LimitError
from piper_ray.planners.pipedream.kernel import (
    LevelArrays,
    PairArrays,
    best_first_stage,
    fill_segments,
    fill_segments_from,
    least_machines,
    make_segments,
    stage_seconds,
)
from piper_ray.planners.pipedream.states import Integers, TailTables

_TOLERANCE = 1e-10
"""Relative: nothing below (1 - this) of the value found exists."""

_FITS = 1.0 + MEMORY_TOLERANCE / 2
"""Half of what ``evaluate`` allows: differences of sums round otherwise than sums over a stage."""

_FIRST_SLACK = 2.0**-10

_SEGMENT_WORK_LIMIT = 2e10
"""Steps of the table of a lower level: about half a minute."""


@dataclass(frozen=True)
class LevelTask:
    """machines: of this level. degrees: the replications allowed, ascending from 1.

    sync_s_per_byte: 4 / B. transfer_s_per_byte: 2 / (B r), 0 where activations do not count.
    """

    machines: int
    degrees: Sequence[int]
    sync_s_per_byte: float
    transfer_s_per_byte: float


@dataclass(frozen=True)
class StageCut:
    """A stage: the layers of tail ``front`` that are not in tail ``rest``, ``degree`` times."""

    front: int
    rest: int
    degree: int


def best_partition(
    states: TailTables, tasks: Sequence[LevelTask], microbatches: int | None, memory_bytes: float
) -> tuple[float, list[StageCut]] | None:
    """The recurrence's value in s, and its stages front to back; None if nothing fits.

    tasks: lowest level first. microbatches: N, that a stage's replication over all levels must divide; None: any.
    memory_bytes: M; counts with one level only. Raises LimitError if the tables of lower levels are too much work.
    """
    limit_bytes = memory_bytes * _FITS if len(tasks) == 1 else math.inf
    pairs = states.pairs._replace(whole_batch=microbatches or 0, memory_bytes=limit_bytes)
    front = np.repeat(np.arange(states.size), np.diff(pairs.pair_start))
    time_s = states.time_s[front] - states.time_s[pairs.rest]
    group = np.ones(0, np.int64)
    levels: list[LevelArrays] = []
    below = 1
    for number, task in enumerate(tasks):
        level = LevelArrays(
            time_s=time_s,
            group=group,
            transfer_s=states.entering_bytes * task.transfer_s_per_byte,
            sync_s_per_byte=task.sync_s_per_byte,
            front_sync_s_per_byte=task.sync_s_per_byte / below,
            machines=task.machines,
            degrees=np.array(task.degrees, np.int64),
        )
        levels.append(level)
        below = task.machines
        if number < len(tasks) - 1:
            _check_work(states, task)
            time_s, group = np.empty(pairs.rest.size), np.empty(pairs.rest.size, np.int64)
            fill_segments(pairs, level, time_s, group)
    found = _search(pairs, levels[-1])
    if found is None:
        return None
    value, cuts = found
    for level in reversed(levels[:-1]):
        cuts = [part for cut in cuts for part in _expand(pairs, level, cut)]
    return value, cuts


def _check_work(states: TailTables, task: LevelTask) -> None:
    inside = np.diff(states.pairs.pair_start).astype(np.float64)
    around = np.bincount(states.pairs.rest, minlength=states.size)
    if float(inside @ (around + 1)) * task.machines * len(task.degrees) > _SEGMENT_WORK_LIMIT:
        raise LimitError(
            f"PipeDream's planner with levels of machines has too many states, {states.size:,}; "
            "take fewer machines in the lower levels, or states='order', along one order of the layers"
        )


def _search(pairs: PairArrays, level: LevelArrays) -> tuple[float, list[StageCut]] | None:
    """The least bottleneck, with what is proved below it closing in on the best partition seen.

    Passes are cheap where few machines may be wasted, so from below in doubling steps. Then by bisection, every second
    threshold lying just below the best partition: often the proof.
    """
    machines = np.empty(len(pairs.pair_start) - 1, np.int64)
    found = _partition_within(pairs, level, math.inf, machines)
    whole_to_end = pairs.pair_start[len(machines) - 1]
    step_s = float(level.time_s[whole_to_end]) / level.machines
    lower, slack = 0.0, _FIRST_SLACK
    from_below, challenge = step_s > 0.0, False
    while found is not None and lower < (below_best := found[0] * (1.0 - _TOLERANCE)) < found[0]:
        if from_below:
            threshold = min(step_s * (1.0 + slack), below_best)
            slack *= 2.0
        else:
            challenge = not challenge
            threshold = below_best if challenge else min((lower + found[0]) / 2.0, below_best)
        better = _partition_within(pairs, level, threshold, machines)
        if better is None:
            lower = threshold
        else:
            found, from_below = better, False
    return found


def _partition_within(
    pairs: PairArrays, level: LevelArrays, threshold_s: float, machines: Integers
) -> tuple[float, list[StageCut]] | None:
    """The partition on the fewest machines with every stage at most ``threshold_s``, and its slowest stage's time."""
    if least_machines(pairs, level, threshold_s, machines) > level.machines:
        return None
    cuts: list[StageCut] = []
    slowest_s = 0.0
    whole = tail = len(machines) - 1
    while tail > 0:
        pair, degree = best_first_stage(pairs, level, tail, threshold_s, machines)
        rest = int(pairs.rest[pair])
        cuts.append(StageCut(tail, rest, degree))
        slowest_s = max(slowest_s, stage_seconds(pairs, level, tail, pair, degree, tail == whole))
        tail = rest
    return slowest_s, cuts


def _expand(pairs: PairArrays, level: LevelArrays, cut: StageCut) -> list[StageCut]:
    """A stage of the level above as the stages of this level, replicated as often."""
    segments = make_segments(len(pairs.pair_start) - 1, level.machines)
    fill_segments_from(pairs, level, cut.front, segments)
    parts: list[StageCut] = []
    tail, machines = cut.rest, level.machines
    while tail != cut.front:
        front = int(segments.came_from[tail, machines])
        parts.append(StageCut(front, tail, int(segments.degree[tail, machines]) * cut.degree))
        tail, machines = front, int(segments.left[tail, machines])
    return parts[::-1]
