"""One level of an evaluation: whether a stage fits, against trying all choices; fronts in any number of steps."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from piper_ray.engine.evaluation.state_tables import StateTables, evaluate_downsets, no_states
from piper_ray.engine.kernels import scan
from piper_ray.engine.kernels.level import stage_fits
from piper_ray.engine.kernels.scan import (
    BUCKETS_TESTED,
    CANDIDATES_TESTED,
    CHOICES_ABANDONED,
    COUNTERS,
    STAGES_COSTED,
)
from piper_ray.engine.kernels.selection import NO, YES, FitCache, make_step_cache
from piper_ray.engine.kernels.types import Earlier, LevelStates, StageKey, StageWork
from piper_ray.model.instance import divisors
from tests.instances import build, parallel_branches, random_instance, tmpc, two_towers
from tests.kernel_support import Case, case, least_work_s, random_case, some_threshold_s, target_of
from tests.lengths import long_after

State = tuple[int, int]


@pytest.mark.long
def test_a_stage_fits_when_some_choice_does() -> None:
    seen: Counter[int] = Counter()
    for seed in range(60):
        made, rng = random_case(seed), Random(seed)
        cache = make_step_cache(made.problem.tables)
        costs = made.problem.costs
        for i, j in made.pairs():
            layers = made.layers(i, j)
            for r in made.variants(layers):
                resync_s = max(0.0, float(costs.resync_s[i, r] - costs.resync_s[j, r]))
                work = StageWork(least_work_s(made, i, j, r), resync_s)
                for _, d in made.degrees(r):
                    y = rng.randint(1, 4)
                    time = made.time_s(layers, r, d, y)
                    if time is None:
                        threshold_s = rng.choice([1.0, 1e6])
                    else:
                        threshold_s = float(time) * rng.choice([1 - 1e-6, 1 + 1e-9, 2.0]) + rng.choice([0.0, 1e-9])
                    found = stage_fits(StageKey(i, j, r), d, y, work, made.problem.tables, threshold_s, cache)
                    assert found == (YES if time is not None and time <= Fraction(threshold_s) else NO)
                    seen[int(found)] += 1
    assert seen[YES] > 300
    assert seen[NO] > 300


@pytest.mark.long
def test_no_answer_depends_on_what_was_asked_before() -> None:
    """A cache that has seen all thresholds answers as a new one does, for stages at the very time that they take; also
    one so small that stages take each other's slots."""
    asked, repeated = 0, 0
    for seed in range(25):
        made, rng = random_case(seed), Random(seed)
        tables, costs = made.problem.tables, made.problem.costs
        used, small = make_step_cache(tables), make_step_cache(tables)
        fits = small.fits
        fits = FitCache(fits.key[:5], fits.more_s[:5])
        small = small._replace(fits=fits)
        questions = []
        for i, j in made.pairs():
            layers = made.layers(i, j)
            for r in made.variants(layers):
                work = StageWork(
                    least_work_s(made, i, j, r), max(0.0, float(costs.resync_s[i, r] - costs.resync_s[j, r]))
                )
                for _, d in made.degrees(r):
                    y = rng.randint(1, 4)
                    time = made.time_s(layers, r, d, y)
                    questions += [
                        (StageKey(i, j, r), d, y, work, float(time or 1) * factor)
                        for factor in (0.5, 1 - 1e-15, 1.0, 1 + 1e-15, 2.0)
                    ]
        for _ in range(2):
            rng.shuffle(questions)
            for stage, d, y, work, threshold_s in questions:
                new = stage_fits(stage, d, y, work, tables, threshold_s, make_step_cache(tables))
                assert stage_fits(stage, d, y, work, tables, threshold_s, used) == new
                assert stage_fits(stage, d, y, work, tables, threshold_s, small) == new
                asked += 1
        repeated += int(np.count_nonzero(np.isfinite(used.fits.more_s).all(axis=1)))
    assert asked > 1000
    assert repeated > 10


def plain_fronts(made: Case, threshold_s: float) -> dict[int, set[State]]:
    """All undominated (devices, sum) of each downset, from all J < I, variants, degrees and choices."""
    threshold, cluster = Fraction(threshold_s), made.problem.cluster
    fronts: dict[int, set[State]] = {0: {(0, 0)}}
    for i in range(1, len(made.sets)):
        reached: set[State] = set()
        for j in range(i):
            if not made.sets[j] < made.sets[i]:
                continue
            layers = made.layers(i, j)
            for r in made.variants(layers):
                t = int(made.problem.options.degree[r])
                for _, d in made.degrees(r):
                    for devices, later_sum in fronts[j]:
                        k, s = devices + d * t, later_sum + d
                        if k <= cluster.devices and s <= cluster.data_parallel_limit:
                            time = made.time_s(layers, r, d, -(-s // d))
                            if time is not None and time <= threshold:
                                reached.add((k, s))
        fronts[i] = {s for s in reached if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in reached)}
    return fronts


def states_of(states: LevelStates) -> list[set[State]]:
    """By downset."""
    pairs = list(zip(states.tallies.tolist(), states.sums.tolist(), strict=True))
    found = []
    for count in states.counts.tolist():
        found.append(set(pairs[:count]))
        assert len(found[-1]) == count
        pairs = pairs[count:]
    assert not pairs
    return found


@pytest.mark.parametrize("blocks", [2, 128])
@pytest.mark.parametrize("seed", long_after(4, range(8)))
def test_fronts_against_the_plain_recurrence(seed: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no downset is limited: exactly the same states, level by level, and also in steps over the buckets. blocks:
    of sums, each of one sum or of several."""
    monkeypatch.setattr(scan, "_BLOCKS", blocks)
    made, rng = random_case(seed, most_tmpcs=2), Random(seed)
    for factor in (0.8, 1.0, 3.0):
        threshold_s = some_threshold_s(made, factor) * (1 + 1e-10)  # clear of the stages that take just as long
        expected = plain_fronts(made, threshold_s)
        tables = made.problem.tables
        target = target_of(made, threshold_s)
        states = StateTables(tables, target)
        cache, level_start = made.problem.scratch, made.problem.lattice.level_start.tolist()
        while states.level < len(level_start) - 1:
            first, last = level_start[states.level : states.level + 2]
            whole = evaluate_downsets(first, last, states.arrays, Earlier(0, no_states(last - first)), cache)
            assert states_of(whole) == [expected[i] for i in range(first, last)]
            assert whole.tested[CHOICES_ABANDONED] == 0
            in_steps = over_buckets_in_steps(states, first, last, rng)
            assert states_of(in_steps) == states_of(whole)
            some = rng.randint(first, last)
            parts = [
                evaluate_downsets(a, b, states.arrays, Earlier(0, no_states(b - a)), cache)
                for a, b in ((first, some), (some, last))
            ]
            assert [s for part in parts for s in states_of(part)] == states_of(whole)
            states.take(whole)


def over_buckets_in_steps(states: StateTables, first: int, last: int, rng: Random) -> LevelStates:
    """Each step sees a few more of the buckets than the one before, and what that one found."""
    found, done, all_buckets = no_states(last - first), 0, states.buckets_used
    cache = make_step_cache(states.tables)
    while done < all_buckets:
        upto = rng.randint(done + 1, all_buckets)
        seen = states.buckets._replace(used=np.array([upto], np.int64))
        found = evaluate_downsets(first, last, states.arrays._replace(buckets=seen), Earlier(done, found), cache)
        done = upto
    return found


def test_groups_of_buckets_leave_nothing_out() -> None:
    """Where there are many buckets, whole groups of them are not looked at: the states are those over all of them."""
    made = case(parallel_branches(2, 13, devices=40, microbatches=16, memory_bytes=4000.0))
    problem = made.problem
    work_s = float(problem.workload.sums.replica_work_s[-1])
    states = StateTables(problem.tables, target_of(made, 3.0 * work_s / 40))
    level_start, looked_at = problem.lattice.level_start.tolist(), 0
    while states.level < len(level_start) - 1:
        first, last = level_start[states.level : states.level + 2]
        whole = evaluate_downsets(first, last, states.arrays, Earlier(0, no_states(last - first)), problem.scratch)
        if states.buckets_used >= 256:
            sample = range(first, last, max(1, (last - first) // 10))
            for i in sample:
                in_steps, done = no_states(1), 0
                for upto in [*range(200, states.buckets_used, 200), states.buckets_used]:
                    seen = states.arrays_over(upto)
                    in_steps = evaluate_downsets(i, i + 1, seen, Earlier(done, in_steps), problem.scratch)
                    done = upto
                assert states_of(in_steps)[0] == states_of(whole)[i - first]
                looked_at += len(states_of(in_steps)[0])
        states.take(whole)
    assert looked_at > 50


@pytest.mark.long
def test_more_states_than_there_is_room_for_at_first() -> None:
    """Room is made for 64 states and one for each downset; 24 layers of eight degrees have more than twice that."""
    degrees = range(1, 9)
    row = {t: [tmpc(64.0 / t**0.8)] for t in degrees}
    edges = {(v, v + 1): 0.0 for v in range(23)}
    made = case(build(dict.fromkeys(range(24), row), edges, devices=4096, microbatches=5040))
    target = target_of(made, 1.0)
    states = StateTables(made.problem.tables, target)
    expected = fronts_of_a_chain(24, {t: row[t][0].time_per_sample_s for t in degrees}, list(divisors(5040)))
    assert max(map(len, expected)) > 2 * 65
    for length in range(1, 25):
        found = evaluate_downsets(length, length + 1, states.arrays, Earlier(0, no_states(1)), made.problem.scratch)
        assert states_of(found) == [expected[length]]
        states.take(found)


def fronts_of_a_chain(length: int, time_s: dict[int, float], degrees: list[int]) -> list[set[State]]:
    """Of equal layers at a threshold of one second: a stage takes as many times a layer's as it has layers."""
    fronts: list[set[State]] = [{(0, 0)}]
    for end in range(1, length + 1):
        reached = set()
        for run in range(1, end + 1):
            for t, of_layer_s in time_s.items():
                d = next((d for d in degrees if run * of_layer_s <= d), None)
                if d is not None:
                    reached |= {(k + d * t, s + d) for k, s in fronts[end - run] if k + d * t <= 4096 and s + d <= 4096}
        fronts.append({s for s in reached if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in reached)})
    return fronts


def test_limits_of_a_downset_are_kept() -> None:
    made = case(two_towers(3, devices=12, microbatches=12, memory_bytes=90.0))
    threshold_s = 6.0
    free = StateTables(made.problem.tables, target_of(made, threshold_s))
    levels = made.problem.lattice.level_start.size - 1
    free.evaluate(levels, made.problem.scratch)
    by_downset = states_of(free.finished(0, levels))
    rng = Random(1)
    device_limit = np.array([rng.randint(0, 12) for _ in made.sets], np.int64)
    sum_limit = np.array([rng.randint(0, 12) for _ in made.sets], np.int64)
    for array in (device_limit, sum_limit):
        array.setflags(write=False)
    target = target_of(made, threshold_s)._replace(device_limit=device_limit, data_parallel_limit=sum_limit)
    seen = 0
    for level in range(1, levels):
        first, last = made.problem.lattice.level_start[level : level + 2].tolist()
        below = StateTables(made.problem.tables, target_of(made, threshold_s))
        below.evaluate(level, made.problem.scratch)
        found = evaluate_downsets(
            first, last, below.arrays._replace(target=target), Earlier(0, no_states(last - first)), made.problem.scratch
        )
        for i, front in enumerate(states_of(found), start=first):
            expected = {s for s in by_downset[i] if s[0] <= device_limit[i] and s[1] <= sum_limit[i]}
            assert front == expected
            seen += len(by_downset[i]) - len(expected)
    assert seen > 0


def test_counters() -> None:
    """Every bucket is looked at for each downset; members and stages only where the bounds do not tell."""
    made = case(random_instance(2, most_layers=5).replace(devices=9))
    states = StateTables(made.problem.tables, target_of(made, some_threshold_s(made, 1.2)))
    level_start = made.problem.lattice.level_start
    buckets = 0
    for level in range(1, level_start.size - 1):
        buckets += states.buckets_used * int(level_start[level + 1] - level_start[level])
        states.evaluate(level + 1, made.problem.scratch)
    assert states.tested.shape == (COUNTERS,)
    assert states.tested[BUCKETS_TESTED] == buckets
    nested = sum(1 for _ in made.pairs())
    assert 0 < states.tested[CANDIDATES_TESTED] <= nested
    assert states.tested[STAGES_COSTED] > 0
    assert states.tested[CHOICES_ABANDONED] == 0
