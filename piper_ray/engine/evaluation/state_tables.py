"""Fronts and buckets of one evaluation. They grow as levels are finished."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from piper_ray.compiled.jit import is_loaded
from piper_ray.engine.kernels.buckets import add_level, empty_buckets, empty_groups, no_members
from piper_ray.engine.kernels.level import Runs, evaluate_runs
from piper_ray.engine.kernels.scan import COUNTERS, make_scratch
from piper_ray.engine.kernels.selection import StepCache
from piper_ray.engine.kernels.types import (
    BucketArrays,
    Earlier,
    FrontArrays,
    GroupArrays,
    IndexArray,
    LevelStates,
    StateArrays,
    Tables,
    Threshold,
)
from piper_ray.engine.tables.problem import Rates


def no_states(downsets: int) -> LevelStates:
    """Returns empty fronts."""
    empty = np.zeros(0, np.int64)
    return LevelStates(np.zeros(downsets, np.int64), empty, empty, np.zeros(COUNTERS, np.int64))


def has_one_degree(tables: Tables) -> bool:
    """Whether all stages have the same tensor-parallel degree. Then devices determine the sum of d: a front is one
    state."""
    return len(set(tables.options.degree.tolist())) <= 1


class StateTables:
    """The states of an evaluation. It starts with the empty downset finished. The arrays are replaced as they grow, so
    read them anew for each use.

    used: the number of states. level: the first unfinished one. tested: counters over all levels. rates: learn from the
    evaluations made here.
    """

    def __init__(self, tables: Tables, target: Threshold, rates: Rates | None = None) -> None:
        self.tables = tables
        self.target = target
        self._downsets = int(tables.lattice.level_start[-1])
        room = self._downsets * (1 if has_one_degree(tables) else 64) + 1024
        self.fronts = FrontArrays(
            start=np.zeros(self._downsets, np.int64),
            states=np.zeros(self._downsets, np.int64),
            tally=np.zeros(room, np.int64),
            data_parallel_sum=np.zeros(room, np.int64),
        )
        self.members = no_members(tables.lattice, tables.costs)
        self.buckets, self.groups = self._empty(min(1024, self._downsets))
        self.used = 1
        self.level = 1
        self.tested: IndexArray = np.zeros(COUNTERS, np.int64)
        self.rates = rates or Rates()
        self.fronts.states[0] = 1
        add_level(0, self.arrays)

    @property
    def arrays(self) -> StateArrays:
        """All arrays in the form that the kernels take."""
        return StateArrays(self.tables, self.target, self.fronts, self.members, self.buckets, self.groups)

    def arrays_over(self, buckets: int) -> StateArrays:
        """Returns arrays with only the first ``buckets`` buckets, of finished levels: they do not change as others
        finish."""
        groups = np.searchsorted(self.groups.bucket_start[: int(self.groups.used[0])], buckets)
        return self.arrays._replace(
            buckets=self.buckets._replace(used=np.array([buckets])),
            groups=self.groups._replace(used=np.array([groups])),
        )

    @property
    def buckets_used(self) -> int:
        return int(self.buckets.used[0])

    def downsets(self, end_level: int) -> tuple[int, int]:
        """Returns, as a range, the ids of downsets in the levels from the first unfinished one to ``end_level`` - 1."""
        level_start = self.tables.lattice.level_start
        return int(level_start[self.level]), int(level_start[end_level])

    def evaluate(self, end_level: int, steps: StepCache, earlier: Earlier | None = None) -> None:
        """Evaluates and finishes the levels up to ``end_level`` - 1 on this thread, in one kernel call or, as tables
        grow, a few.

        steps: scratch of the calling thread. earlier: what is known of these levels.
        """
        first, last = self.downsets(end_level)
        downsets = last - first
        known = Earlier(0, no_states(downsets)) if earlier is None else earlier
        began, loaded = time.thread_time(), is_loaded(evaluate_runs)
        buckets = self.buckets_used - known.buckets
        self._reserve_buckets(downsets)
        self.tested += known.states.tested
        scratch = make_scratch(self.tables, self.buckets.least_tally.size, steps)
        runs = Runs(self.tables.lattice.level_start[: end_level + 1], 0, True)
        while self.level < end_level:
            first = self.downsets(end_level)[0]
            level, used = evaluate_runs(
                runs, self.level, self.arrays, known, scratch, self.fronts, self.used, self.tested
            )
            self.level, self.used = int(level), int(used)
            if self.level < end_level:
                self._reserve_states(self.fronts.tally.size)
                done = self.downsets(end_level)[0] - first
                known = Earlier(known.buckets, without_first(known.states, done))
        mean_buckets = (buckets + self.buckets_used - known.buckets) / 2
        rate = self.rates.far if earlier is None else self.rates.near
        if loaded:
            rate.record(int(downsets * mean_buckets), time.thread_time() - began)

    def take(self, states: LevelStates) -> None:
        """Adds the states of finished levels. Their downsets are the first unfinished ones."""
        first = int(self.tables.lattice.level_start[self.level])
        last = first + states.counts.size
        self._reserve_states(states.tallies.size)
        self._reserve_buckets(states.counts.size)
        end = self.used + states.tallies.size
        self.fronts.start[first:last] = self.used + np.cumsum(states.counts) - states.counts
        self.fronts.states[first:last] = states.counts
        self.fronts.tally[self.used : end] = states.tallies
        self.fronts.data_parallel_sum[self.used : end] = states.sums
        self.used = end
        level_start = self.tables.lattice.level_start
        while self.level < level_start.size - 1 and level_start[self.level] < last:
            add_level(self.level, self.arrays)
            self.level += 1
        self.tested += states.tested

    def finished(self, from_level: int, to_level: int) -> LevelStates:
        """Returns the states of the finished levels ``from_level`` .. to_level - 1."""
        first, last = (int(self.tables.lattice.level_start[level]) for level in (from_level, to_level))
        start = int(self.fronts.start[first]) if first < last else self.used
        counts = self.fronts.states[first:last]
        end = start + int(counts.sum())
        return LevelStates(
            counts,
            self.fronts.tally[start:end],
            self.fronts.data_parallel_sum[start:end],
            np.zeros(COUNTERS, np.int64),
        )

    def _reserve_states(self, more: int) -> None:
        size = self.fronts.tally.size
        if self.used + more > size:
            extra = np.zeros(max(more, size), np.int64)
            self.fronts = self.fronts._replace(
                tally=np.concatenate((self.fronts.tally, extra)),
                data_parallel_sum=np.concatenate((self.fronts.data_parallel_sum, extra)),
            )

    def _reserve_buckets(self, more: int) -> None:
        have, used = self.buckets.least_tally.size, self.buckets_used
        if used + more <= have:
            return
        buckets, groups = self._empty(max(used + more, 2 * have))
        for old, new in zip((*self.buckets, *self.groups), (*buckets, *groups), strict=True):
            new[tuple(slice(length) for length in old.shape)] = old
        self.buckets, self.groups = buckets, groups

    def _empty(self, capacity: int) -> tuple[BucketArrays, GroupArrays]:
        """Returns empty tables. At worst there are as many groups as buckets."""
        lattice, costs = self.tables.lattice, self.tables.costs
        return empty_buckets(capacity, lattice, costs), empty_groups(capacity, lattice, costs)


def evaluate_downsets(first: int, last: int, arrays: StateArrays, earlier: Earlier, steps: StepCache) -> LevelStates:
    """Returns the fronts of the downsets first .. last - 1 over all J. ``earlier`` holds a part of them, so that one
    front can be found in several steps.

    steps: scratch of the calling thread. The result depends only on the input, and not on the number of steps or who
    makes them.
    """
    downsets, room, done, used = last - first, last - first + 64, 0, 0
    scratch = make_scratch(arrays.tables, max(1, int(arrays.buckets.used[0])), steps)
    found = FrontArrays(*(np.empty(size, np.int64) for size in (downsets, downsets, room, room)))
    each = np.arange(first, last + 1)
    each.setflags(write=False)
    tested = np.zeros(COUNTERS, np.int64)
    while True:
        known = earlier._replace(states=without_first(earlier.states, done))
        done, used = evaluate_runs(Runs(each, first, False), done, arrays, known, scratch, found, used, tested)
        if done == downsets:
            return LevelStates(found.states, found.tally[:used].copy(), found.data_parallel_sum[:used].copy(), tested)
        found = found._replace(tally=_doubled(found.tally), data_parallel_sum=_doubled(found.data_parallel_sum))


def _doubled(values: IndexArray) -> IndexArray:
    return np.concatenate((values, np.empty_like(values)))


def without_first(states: LevelStates, downsets: int) -> LevelStates:
    """Returns the states without those of the first ``downsets`` downsets."""
    skipped = int(states.counts[:downsets].sum())
    return LevelStates(states.counts[downsets:], states.tallies[skipped:], states.sums[skipped:], states.tested)


def between(states: LevelStates, begin: int, end: int) -> LevelStates:
    """Returns the states of the downsets ``begin`` .. end - 1 among these. Its counters are zero."""
    first, last = int(states.counts[:begin].sum()), int(states.counts[:end].sum())
    tested = np.zeros(COUNTERS, np.int64)
    return LevelStates(states.counts[begin:end], states.tallies[first:last], states.sums[first:last], tested)


def joined(parts: Sequence[LevelStates]) -> LevelStates:
    """Joins the states of consecutive ranges of downsets."""
    return LevelStates(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.tallies for part in parts]),
        np.concatenate([part.sums for part in parts]),
        np.sum([part.tested for part in parts], axis=0, dtype=np.int64),
    )


def narrow(states: LevelStates) -> LevelStates:
    """Returns the same figures in the narrowest integers that hold them, to be sent or recorded. None is negative."""
    return LevelStates(*(array.astype(np.min_scalar_type(array.max(initial=0))) for array in states))


def wide(states: LevelStates) -> LevelStates:
    """Returns the figures as int64, which the kernels take."""
    return LevelStates(*(array.astype(np.int64) for array in states))
