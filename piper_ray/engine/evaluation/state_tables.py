"""Fronts and buckets of one evaluation, which grow as levels are finished."""

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
from piper_ray.engine.tables.rate import Rates


def no_states(downsets: int) -> LevelStates:
    """Empty fronts."""
    empty = np.zeros(0, np.int64)
    return LevelStates(np.zeros(downsets, np.int64), empty, empty, np.zeros(COUNTERS, np.int64))


def has_one_degree(tables: Tables) -> bool:
    """Whether devices and data-parallel sum go together, as with one tensor-parallel degree: a front is a state."""
    return len(set(tables.options.degree.tolist())) <= 1


class StateTables:
    """Starts with the empty downset finished. The arrays are replaced as they grow: take them anew for each use.

    used: states in use. level: the first that is not finished. tested: counters over all levels. rates: learn from what
    is evaluated here.
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
        """All of it, as the kernels take it."""
        return StateArrays(self.tables, self.target, self.fronts, self.members, self.buckets, self.groups)

    def arrays_over(self, buckets: int) -> StateArrays:
        """With the first so many buckets alone, of finished levels: they stay as they are when further ones are."""
        groups = np.searchsorted(self.groups.bucket_start[: int(self.groups.used[0])], buckets)
        return self.arrays._replace(
            buckets=self.buckets._replace(used=np.array([buckets])),
            groups=self.groups._replace(used=np.array([groups])),
        )

    @property
    def buckets_used(self) -> int:
        return int(self.buckets.used[0])

    def downsets(self, end_level: int) -> tuple[int, int]:
        """The ids of the levels from the first unfinished one to ``end_level`` - 1, as a range."""
        level_start = self.tables.lattice.level_start
        return int(level_start[self.level]), int(level_start[end_level])

    def evaluate(self, end_level: int, steps: StepCache, earlier: Earlier | None = None) -> None:
        """Evaluates and finishes the levels up to ``end_level`` - 1 here, in one kernel call or a few as tables grow.

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
        """Takes in finished levels; their downsets are the first unfinished ones."""
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
        """The states of finished levels ``from_level`` .. to_level - 1."""
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
        """Groups take as much room as buckets at worst."""
        lattice, costs = self.tables.lattice, self.tables.costs
        return empty_buckets(capacity, lattice, costs), empty_groups(capacity, lattice, costs)


def evaluate_downsets(first: int, last: int, arrays: StateArrays, earlier: Earlier, steps: StepCache) -> LevelStates:
    """Fronts of the downsets first .. last - 1 over all J, of which ``earlier`` holds a part: so one front can be found
    in several steps.

    steps: scratch of the calling thread. Pure: the same input gives the same states, whoever computes them and in
    however many steps.
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
    """The states of all but the first downsets."""
    skipped = int(states.counts[:downsets].sum())
    return LevelStates(states.counts[downsets:], states.tallies[skipped:], states.sums[skipped:], states.tested)


def between(states: LevelStates, begin: int, end: int) -> LevelStates:
    """The states of downsets ``begin`` .. end - 1 of these, with none of what was tested."""
    first, last = int(states.counts[:begin].sum()), int(states.counts[:end].sum())
    tested = np.zeros(COUNTERS, np.int64)
    return LevelStates(states.counts[begin:end], states.tallies[first:last], states.sums[first:last], tested)


def joined(parts: Sequence[LevelStates]) -> LevelStates:
    """The states of consecutive ranges of downsets as those of one."""
    return LevelStates(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.tallies for part in parts]),
        np.concatenate([part.sums for part in parts]),
        np.sum([part.tested for part in parts], axis=0, dtype=np.int64),
    )


def narrow(states: LevelStates) -> LevelStates:
    """The same figures, none negative, in the narrowest integers that hold them: as states travel, and are kept."""
    return LevelStates(*(array.astype(np.min_scalar_type(array.max(initial=0))) for array in states))


def wide(states: LevelStates) -> LevelStates:
    """As the kernels take them."""
    return LevelStates(*(array.astype(np.int64) for array in states))
