"""The walk along a staircase, and its evaluations, against a recurrence that tries everything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.kernels import staircase
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.stages import count_stages, list_stages, make_choice_cache
from piper_ray.engine.kernels.staircase import (
    FEASIBLE,
    INFEASIBLE,
    NO_ROOM,
    TOO_HARD,
    CurveArrays,
    Exactness,
    StageTables,
    ValuedFronts,
    WorkBounds,
    best_state,
    evaluate_all,
    make_fronts,
    walk,
)
from tests.brute_force import brute_force
from tests.instances import equal_chain, two_towers
from tests.kernel_support import Case, case, random_case, some_threshold_s

State = tuple[int, int]
PROOF, LEAST_S = 1e-9, 1e-30
EXACTNESS = Exactness(PROOF, 1e-10, LEAST_S)


def known_of(made: Case, room: int = 4096) -> StageTables:
    tables, sums = made.problem.tables, made.problem.workload.sums
    return StageTables(
        tables,
        list_stages(tables, count_stages(tables.lattice.bits)),
        WorkBounds(sums.device_work_s, sums.replica_work_s),
        make_step_cache(tables),
        make_choice_cache(2**14),
        make_fronts(len(made.sets), room, tables.cluster.data_parallel_limit),
    )


def fronts_of(known: StageTables, i: int) -> dict[State, float]:
    fronts = known.fronts
    span = range(fronts.start[i], fronts.start[i] + fronts.states[i])
    found = {(int(fronts.devices[k]), int(fronts.data_parallel_sum[k])): float(fronts.value_s[k]) for k in span}
    assert len(found) == len(span)
    return found


@dataclass
class Plain:
    """f[I] for a threshold, no downset limited but by all there is: states and the least time of their slowest stage.

    whole: of those the ones that some plan of all layers has.
    """

    states: list[dict[State, Fraction]]
    whole: list[set[State]]


def plainly(made: Case, threshold: Fraction, devices: int, limit: int) -> Plain:
    states: list[dict[State, Fraction]] = [{(0, 0): Fraction(0)}]
    origins: dict[tuple[int, State], list[tuple[int, State]]] = {}
    for i in range(1, len(made.sets)):
        reached: dict[State, Fraction] = {}
        came: dict[State, list[tuple[int, State]]] = {}
        for j in range(i):
            if not made.sets[j] < made.sets[i]:
                continue
            layers = made.layers(i, j)
            for r in made.variants(layers):
                t = int(made.problem.options.degree[r])
                for _, d in made.degrees(r):
                    for (k, s), value in states[j].items():
                        if k + d * t > devices or s + d > limit:
                            continue
                        time = made.time_s(layers, r, d, -(-(s + d) // d))
                        if time is not None and time <= threshold:
                            state, slowest = (k + d * t, s + d), max(value, time)
                            reached[state] = min(reached.get(state, slowest), slowest)
                            came.setdefault(state, []).append((j, (k, s)))
        front = {x: v for x, v in reached.items() if not any(o != x and o[0] <= x[0] and o[1] <= x[1] for o in reached)}
        states.append(front)
        origins |= {(i, state): came[state] for state in front}
    whole: list[set[State]] = [set() for _ in states]
    whole[-1] = set(states[-1])
    for i in range(len(states) - 1, 0, -1):
        for state in whole[i]:
            for j, behind in origins[i, state]:
                whole[j].add(behind)
    return Plain(states, whole)


@pytest.mark.parametrize("seed", range(20))
def test_an_evaluation_against_the_plain_recurrence(seed: int) -> None:
    """All states that a plan needs, none that is dominated or does not exist; and the time of their slowest stage."""
    made, rng = random_case(seed, most_tmpcs=1 + seed % 3), Random(seed)
    known, last = known_of(made), len(made.sets) - 1
    exact = all(len(row) == 1 for layer in made.instance.layers for row in layer.tmpcs.values())
    for factor in (0.7, 1.0, 1.3, 4.0):
        threshold_s = some_threshold_s(made, factor) * (1 + 1e-10)
        devices, limit = rng.choice([2, 5, 8]), made.problem.cluster.data_parallel_limit
        limit = rng.choice([limit, max(1, limit // 2)])
        expected = plainly(made, Fraction(threshold_s), devices, limit)
        status = evaluate_all(threshold_s, devices, limit, known)
        assert status == (FEASIBLE if expected.states[last] else INFEASIBLE)
        for i in range(last + 1):
            found = fronts_of(known, i)
            assert expected.whole[i] <= found.keys() <= expected.states[i].keys()
            assert list(found) == sorted(found, key=lambda state: state[1])
            for state, value_s in found.items():
                least_s = float(expected.states[i][state])
                assert least_s * (1 - 1e-9) <= value_s <= threshold_s * (1 + 1e-9)
                if exact:
                    assert value_s == pytest.approx(least_s, rel=1e-9, abs=1e-12)
        if status == FEASIBLE:
            fewest, least_sum = min(expected.states[last]), min(expected.states[last], key=lambda x: x[1])
            fronts = known.fronts
            for by_sum, state in ((False, fewest), (True, least_sum)):
                at = best_state(known, by_sum)
                assert (fronts.devices[at], fronts.data_parallel_sum[at]) == state


def test_fronts_that_do_not_fit() -> None:
    made = case(two_towers(2, devices=8, microbatches=8))
    room = known_of(made)
    assert evaluate_all(20.0, 8, 8, room) == FEASIBLE
    used = int(room.fronts.states.sum())
    assert evaluate_all(20.0, 8, 8, known_of(made, used)) == FEASIBLE
    for less in (1, used // 2, used - 1):
        assert evaluate_all(20.0, 8, 8, known_of(made, less)) == NO_ROOM


class Staircase:
    """Brackets of all numbers of devices, or bounds on the sum, for a walk to close; and what it should find."""

    def __init__(self, made: Case, by_sum: bool) -> None:
        self.made, self.by_sum = made, by_sum
        cluster = made.problem.cluster
        most = cluster.data_parallel_limit if by_sum else cluster.devices
        self.positions = np.arange(1, most + 1)
        self.other = cluster.devices if by_sum else cluster.data_parallel_limit
        self.truth = [
            least_time_s(made, self.other, at) if by_sum else least_time_s(made, at, self.other)
            for at in range(1, most + 1)
        ]

    @property
    def begin(self) -> int | None:
        """The first position with a plan."""
        return next((at for at, value in enumerate(self.truth) if value < math.inf), None)

    def walk(self, most: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Lower and upper bounds at the end, and the number of evaluations; at most ``most`` in a call."""
        begin, end = self.begin, self.positions.size
        assert begin is not None
        lower_s = np.zeros(end)
        upper_s = np.full(end, np.inf)
        upper_s[begin] = 2 * self.truth[begin]  # that of some plan, say
        known, at, reach, done = known_of(self.made), begin, 1, 0
        curve = CurveArrays(self.positions, lower_s, upper_s, self.by_sum, self.other)
        while at < end:
            at, status, evaluations, reach = walk(curve, at, end, known, EXACTNESS, reach, most)
            assert status in (FEASIBLE, INFEASIBLE)
            assert 0 < evaluations <= most or at == end
            done += evaluations
        return lower_s, upper_s, done


def least_time_s(made: Case, devices: int, limit: int) -> float:
    """By the plain recurrence without a threshold: all states count, not the undominated ones alone."""
    states: list[dict[State, Fraction]] = [{(0, 0): Fraction(0)}]
    for i in range(1, len(made.sets)):
        reached: dict[State, Fraction] = {}
        for j in range(i):
            if made.sets[j] < made.sets[i]:
                layers = made.layers(i, j)
                for r in made.variants(layers):
                    t = int(made.problem.options.degree[r])
                    for _, d in made.degrees(r):
                        for (k, s), value in states[j].items():
                            if k + d * t <= devices and s + d <= limit:
                                time = made.time_s(layers, r, d, -(-(s + d) // d))
                                if time is not None:
                                    state, slowest = (k + d * t, s + d), max(value, time)
                                    reached[state] = min(reached.get(state, slowest), slowest)
        states.append(reached)
    return float(min(states[-1].values(), default=math.inf))


@pytest.mark.parametrize("by_sum", [False, True], ids=["devices", "sums"])
@pytest.mark.parametrize("seed", range(16))
def test_a_walk_finds_every_step(seed: int, by_sum: bool) -> None:
    made = random_case(seed, most_tmpcs=2)
    stairs = Staircase(made, by_sum)
    begin = stairs.begin
    if begin is None:
        return
    lower_s, upper_s, done = stairs.walk(most=10**6)
    for at in range(begin, stairs.positions.size):
        truth = stairs.truth[at]
        assert upper_s[at] == pytest.approx(truth, rel=2 * PROOF, abs=1e-29)
        assert lower_s[at] <= truth * (1 + PROOF)
        assert lower_s[at] >= upper_s[at] * (1 - 2 * PROOF) or upper_s[at] <= LEAST_S
    # Calls of any length take the same way.
    for most in (1, 3):
        other_lower, other_upper, other_done = stairs.walk(most)
        assert other_done == done
        assert other_lower.tolist() == lower_s.tolist()
        assert other_upper.tolist() == upper_s.tolist()


def test_the_truth_is_that_of_brute_force() -> None:
    """The twin's own twin."""
    for seed in range(6):
        made = random_case(seed, most_layers=3, most_devices=5)
        best = brute_force(made.instance)
        value = least_time_s(made, 5, made.problem.cluster.data_parallel_limit)
        assert value == (math.inf if best is None else float(best.time_per_sample_s))


def test_a_plateau_takes_one_evaluation_and_what_looks_ahead() -> None:
    """One layer and one microbatch: as fast on two devices as on a thousand. The reach doubles along the way."""
    made = case(equal_chain(1, devices=1000, microbatches=1, memory_bytes=1e3))
    known = known_of(made)
    positions = np.arange(1, 1001)
    lower_s, upper_s = np.zeros(1000), np.full(1000, np.inf)
    upper_s[0] = 6.0
    curve = CurveArrays(positions, lower_s, upper_s, False, 1)
    at, status, done, _ = walk(curve, 0, 1000, known, EXACTNESS, 1, 10**6)
    assert (at, status) == (1000, INFEASIBLE)
    assert (upper_s[0], upper_s[1], upper_s[-1]) == (6.0, 4.0, 4.0)
    assert done <= 2 + math.ceil(math.log2(1000)) + 1


def in_plain_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as it is written: what it calls can be replaced."""
    return getattr(function, "py_func", function)


@pytest.mark.parametrize("status", [NO_ROOM, TOO_HARD])
def test_a_walk_stops_where_an_evaluation_cannot_tell(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    made = case(two_towers(1, devices=4))
    monkeypatch.setattr(staircase, "evaluate_all", lambda *_: status)
    lower_s, upper_s = np.zeros(4), np.array([np.inf, 50.0, np.inf, np.inf])
    curve = CurveArrays(np.arange(1, 5), lower_s, upper_s, False, 4)
    found = in_plain_python(walk)(curve, 1, 4, known_of(made), EXACTNESS, 1, 10)
    assert found == (1, status, 1, 1)
    assert lower_s.tolist() == [0.0] * 4
    assert upper_s.tolist() == [np.inf, 50.0, np.inf, np.inf]


def test_an_evaluation_with_a_choice_that_is_too_hard(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[bool] = Counter()

    def too_hard(*_: object) -> bool:
        seen[False] += 1
        return False

    monkeypatch.setattr(staircase, "settle_choice", too_hard)
    monkeypatch.setattr(staircase, "_extend", in_plain_python(staircase._extend))
    for seed in range(40):
        made = random_case(seed)
        before = seen[False]
        status = in_plain_python(evaluate_all)(some_threshold_s(made, 1.0) * 0.999, 8, 8, known_of(made))
        assert (status == TOO_HARD) == (seen[False] > before)
    assert seen[False] > 3


Valued = tuple[int, int, float]


class Front:
    """Of one downset while it grows."""

    def __init__(self, room: int) -> None:
        self.fronts: ValuedFronts = make_fronts(1, 1, room)
        for array in (self.fronts.new_devices, self.fronts.new_sum):
            array[:] = -(10**9)
        self.size = 0

    def is_beaten(self, state: Valued) -> bool:
        return bool(staircase._is_beaten(self.fronts, self.size, staircase.State(*state)))

    def insert(self, state: Valued) -> None:
        self.size = staircase._insert(self.fronts, self.size, staircase.State(*state))

    @property
    def states(self) -> list[Valued]:
        arrays = self.fronts.new_devices, self.fronts.new_sum, self.fronts.new_value_s
        return list(zip(*(array[: self.size].tolist() for array in arrays), strict=True))


def beats(one: Valued, other: Valued) -> bool:
    """As small in both and smaller in one, or the same and as fast."""
    if one[:2] == other[:2]:
        return one[2] <= other[2]
    return one[0] <= other[0] and one[1] <= other[1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([1.0, 2.0, 3.0])), max_size=40))
def test_valued_states_against_a_list_of_all(states: list[Valued]) -> None:
    front = Front(len(states) + 1)
    seen: list[Valued] = []
    for state in states:
        beaten = any(beats(other, state) for other in seen)
        assert front.is_beaten(state) == beaten
        if not beaten:
            front.insert(state)
            seen = [other for other in seen if not beats(state, other)] + [state]
        assert front.states == sorted(seen, key=lambda s: s[1])


@pytest.mark.parametrize(
    ("available", "whole_s", "own_s", "threshold_s", "expected"),
    [
        (8, 10.0, 10.0, 2.0, 8),  # nothing is left outside
        (8, 10.0, 4.0, 2.0, 5),  # 6 s outside take three devices
        (8, 10.0, 4.0, 3.0, 6),
        (8, 16.0, 4.0, 2.0, 2),  # its own 4 s take just what is left
        (8, 16.0, 5.0, 2.0, 0),  # these do not
        (4, 16.0, 0.0, 2.0, 0),
        (4, 16.0, 0.0, 1e-300, 0),
    ],
)
def test_what_a_downset_may_take(
    available: int, whole_s: float, own_s: float, threshold_s: float, expected: int
) -> None:
    found = staircase._limit(available, whole_s, own_s, threshold_s)
    assert max(0, found) == expected
