"""Levels in one call or in several, where tables are small, and the first stage of a state."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest

from piper_ray.engine.evaluation.state_tables import StateTables, joined, no_states, without_first
from piper_ray.engine.kernels.level import Runs, evaluate_runs, find_first_stage, trace_stages
from piper_ray.engine.kernels.scan import COUNTERS, make_scratch
from piper_ray.engine.kernels.types import Earlier, LevelStates
from tests.kernel_support import Case, random_case, some_threshold_s, target_of
from tests.lengths import long_after


def evaluated(made: Case, threshold_s: float, device_weight: int = 1) -> StateTables:
    """All levels."""
    target = target_of(made, threshold_s, device_weight=device_weight, stage_weight=int(device_weight > 1))
    states = StateTables(made.problem.tables, target)
    states.evaluate(made.problem.lattice.level_start.size - 1, made.problem.scratch)
    return states


def fronts_of(states: StateTables) -> list[list[tuple[int, int]]]:
    """Of the downsets of all finished levels, in order."""
    fronts, found = states.fronts, []
    for start, count in zip(fronts.start.tolist(), fronts.states.tolist(), strict=True):
        span = slice(start, start + count)
        found.append(list(zip(fronts.tally[span].tolist(), fronts.data_parallel_sum[span].tolist(), strict=True)))
    return found


@pytest.mark.long
def test_levels_are_taken_in_behind_those_that_are_finished() -> None:
    for seed in range(4):
        made = random_case(seed, most_layers=5)
        whole = evaluated(made, some_threshold_s(made, 2.0))
        taken = StateTables(made.problem.tables, whole.target)
        levels = made.problem.lattice.level_start.size - 1
        for begin, end in ((1, 2), (2, levels)):
            taken.take(whole.finished(begin, end))
            assert (taken.level, taken.used) == (end, states_before(whole, int(made.problem.lattice.level_start[end])))
        assert fronts_of(taken) == fronts_of(whole)


@pytest.mark.parametrize("seed", long_after(2, range(4)))
def test_levels_in_one_call_or_in_several(seed: int) -> None:
    made = random_case(seed, most_layers=5)
    threshold_s = some_threshold_s(made, 2.0)
    levels = made.problem.lattice.level_start.size - 1
    whole = evaluated(made, threshold_s)
    rng = Random(seed)
    parts = StateTables(made.problem.tables, target_of(made, threshold_s))
    while parts.level < levels:
        parts.evaluate(rng.randint(parts.level + 1, levels), made.problem.scratch)
    assert fronts_of(parts) == fronts_of(whole)
    assert parts.used == whole.used == sum(map(len, fronts_of(whole)))
    assert parts.tested.tolist() == whole.tested.tolist()
    # Taken in as what somebody else has found, too.
    taken = StateTables(made.problem.tables, target_of(made, threshold_s))
    taken.take(joined([whole.finished(level, level + 1) for level in range(1, levels)]))
    assert fronts_of(taken) == fronts_of(whole)
    assert taken.level == levels
    assert taken.buckets_used == whole.buckets_used


@pytest.mark.parametrize("seed", long_after(2, range(4)))
def test_stops_before_a_level_that_has_no_room(seed: int) -> None:
    """It goes on from there with more room, and with what is left of the fronts that are known already."""
    made = random_case(seed, most_layers=5)
    threshold_s = some_threshold_s(made, 3.0)
    whole = evaluated(made, threshold_s)
    levels = made.problem.lattice.level_start.size - 1
    target, level_start = target_of(made, threshold_s), made.problem.lattice.level_start
    for room in range(1, whole.used + 1):
        states = StateTables(made.problem.tables, target)
        states.fronts = states.fronts._replace(
            tally=np.zeros(room, np.int64), data_parallel_sum=np.zeros(room, np.int64)
        )
        tested = np.zeros(COUNTERS, np.int64)
        downsets = int(level_start[levels] - level_start[1])
        scratch = make_scratch(states.tables, states.buckets.least_tally.size, made.problem.scratch)
        earlier, runs = Earlier(0, no_states(downsets)), Runs(level_start, 0, True)
        level, used = evaluate_runs(runs, 1, states.arrays, earlier, scratch, states.fronts, 1, tested)
        fitting = [k for k in range(1, levels + 1) if states_before(whole, int(level_start[k])) <= room]
        assert level == max(fitting)
        assert used == states_before(whole, int(level_start[level]))
        assert fronts_of(states)[: level_start[level]] == fronts_of(whole)[: level_start[level]]
    small = StateTables(made.problem.tables, target)
    small.fronts = small.fronts._replace(tally=np.zeros(1, np.int64), data_parallel_sum=np.zeros(1, np.int64))
    small.evaluate(levels, made.problem.scratch)
    assert fronts_of(small) == fronts_of(whole)


def states_before(states: StateTables, downset: int) -> int:
    return sum(len(front) for front in fronts_of(states)[:downset])


def test_without_the_first_downsets() -> None:
    tested = np.zeros(COUNTERS, np.int64)
    states = LevelStates(np.array([2, 0, 1]), np.array([7, 5, 9]), np.array([1, 3, 2]), tested)
    rest = without_first(states, 1)
    assert (rest.counts.tolist(), rest.tallies.tolist(), rest.sums.tolist()) == ([0, 1], [9], [2])
    both = joined([states, rest])
    assert both.counts.tolist() == [2, 0, 1, 0, 1]
    assert both.tallies.tolist() == [7, 5, 9, 9]


@pytest.mark.parametrize("device_weight", [1, 10])
@pytest.mark.parametrize("seed", long_after(1, range(5)))
def test_first_stage_of_every_state(seed: int, device_weight: int) -> None:
    """The first of all stages that lead to the state: by J, variant, and data-parallel sum behind it."""
    made = random_case(seed)
    threshold_s = some_threshold_s(made, 1.5) * (1 + 1e-10)
    states = evaluated(made, threshold_s, device_weight)
    fronts = fronts_of(states)
    assert sum(map(len, fronts)) > 1
    for i in range(1, len(fronts)):
        for tally, total in fronts[i]:
            found = find_first_stage(i, tally, total, states.arrays, made.problem.scratch)
            assert found == first_stage_plainly(made, states, i, tally, total)
    last = len(fronts) - 1
    assert find_first_stage(last, 10**6, 1, states.arrays, made.problem.scratch) == (-1, -1, -1, -1)


@pytest.mark.parametrize("device_weight", [1, 10])
@pytest.mark.parametrize("seed", long_after(3, range(10)))
def test_trace_goes_from_first_stage_to_first_stage(seed: int, device_weight: int) -> None:
    made = random_case(seed)
    states = evaluated(made, some_threshold_s(made, 1.5) * (1 + 1e-10), device_weight)
    fronts, rows = states.fronts, np.zeros((len(made.sets), 5), np.int64)
    of_state = [(i, fronts.start[i] + k) for i in range(1, len(made.sets)) for k in range(fronts.states[i])]
    assert of_state
    for whole, state in of_state:
        expected, i, at = [], whole, state
        while i != 0:
            tally, total = int(fronts.tally[at]), int(fronts.data_parallel_sum[at])
            j, variant, d, at = first_stage_plainly(made, states, i, tally, total)
            expected.append([i, j, variant, d, int(fronts.data_parallel_sum[at])])
            i = j
        count = trace_stages(whole, state, states.arrays, made.problem.scratch, rows)
        assert rows[:count].tolist() == expected
    whole, state = of_state[0]
    fronts.tally[state] = 10**6
    assert trace_stages(whole, state, states.arrays, made.problem.scratch, rows) == -1


def first_stage_plainly(made: Case, states: StateTables, i: int, tally: int, total: int) -> tuple[int, int, int, int]:
    target, fronts = states.target, fronts_of(states)
    found = []
    for j in range(i):
        if not made.sets[j] < made.sets[i]:
            continue
        layers = made.layers(i, j)
        for r in made.variants(layers):
            t = int(made.problem.options.degree[r])
            for state, (behind, later_sum) in enumerate(fronts[j]):
                for _, d in made.degrees(r):
                    whole = behind + target.stage_weight + t * d * target.device_weight
                    if (whole, later_sum + d) == (tally, total):
                        time = made.time_s(layers, r, d, -(-total // d))
                        if time is not None and time <= Fraction(target.threshold_s):
                            found.append((j, r, later_sum, d, int(states.fronts.start[j]) + state))
    j, r, _, d, state = min(found)
    return j, r, d, state
