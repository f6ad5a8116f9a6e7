"""The bracket closes on the optimum, whatever plans the evaluations come up with, and in a bounded number of steps."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.search.bracket import Bracket, Phase
from tests.bracket_by_flags import FlaggedBracket


def drive(bracket: Bracket, plans: list[float], rng: Random) -> list[float]:
    """Answers each threshold as an evaluation would, from the values of all plans there are; returns the thresholds.

    A feasible answer comes with any plan that keeps the threshold: not always the best one.
    """
    asked: list[float] = []
    while not (bracket.closed or bracket.exhausted):
        threshold = bracket.propose()
        assert bracket.lower <= threshold <= bracket.ceiling
        assert bracket.upper is None or threshold < bracket.upper
        asked.append(threshold)
        keep = [value for value in plans if value <= threshold]
        lower, upper = bracket.lower, bracket.upper
        if keep:
            bracket.record_feasible(threshold, rng.choice(keep), rng.choice([1.0, 0.995, rng.random()]))
            assert bracket.lower == lower
        else:
            bracket.record_infeasible(threshold)
            assert bracket.lower == max(lower, threshold)
            assert bracket.upper == upper
        if plans:
            assert bracket.lower <= min(plans)
            assert bracket.upper is None or bracket.upper in plans
        assert len(asked) <= 150
    return asked


positive = st.floats(1e-6, 1e6)


@given(positive, st.lists(st.floats(1.0, 1e4), min_size=1, max_size=20), st.integers(0, 2**32))
def test_closes_on_the_optimum(lower: float, factors: list[float], seed: int) -> None:
    plans = [lower * factor for factor in factors]
    bracket = Bracket(lower, max(plans) * 1.5)
    drive(bracket, plans, Random(seed))
    assert bracket.closed
    assert not bracket.exhausted
    assert bracket.upper is not None
    assert min(plans) <= bracket.upper <= min(plans) * (1 + 2 * PROOF)
    assert bracket.gap() <= PROOF * (1 + 1e-6)


@given(positive, st.lists(st.floats(1.0, 1e4), min_size=1, max_size=20), st.integers(0, 2**32))
def test_closes_from_above(lower: float, factors: list[float], seed: int) -> None:
    plans = [lower * factor for factor in factors]
    bracket = Bracket(lower, max(plans) * 1.5, Random(seed).choice(plans), phase=Phase.DESCENDING)
    drive(bracket, plans, Random(seed))
    assert bracket.upper is not None
    assert min(plans) <= bracket.upper <= min(plans) * (1 + 2 * PROOF)


@given(positive, st.lists(st.floats(1.0, 1e4), min_size=1, max_size=20), st.floats(1e-4, 0.5), st.integers(0, 2**32))
def test_closes_in_strides(lower: float, factors: list[float], stride: float, seed: int) -> None:
    plans = [lower * factor for factor in factors]
    bracket = Bracket(lower, max(plans) * 1.5, Random(seed).choice(plans))
    bracket.descend(stride)
    drive(bracket, plans, Random(seed))
    assert bracket.upper is not None
    assert min(plans) <= bracket.upper <= min(plans) * (1 + 2 * PROOF)


def test_strides_are_as_long_and_end_halfway_back() -> None:
    """Not just below the best plan, where an evaluation takes longest."""
    bracket = Bracket(1.0, 9.0, 4.0)
    bracket.descend(0.008)
    assert bracket.propose() == pytest.approx(4.0 * 0.992)
    bracket.record_feasible(bracket.propose(), 3.95)
    assert bracket.propose() == pytest.approx(3.95 * 0.992)
    bracket.record_feasible(bracket.propose(), 3.9)
    infeasible = bracket.propose()
    assert infeasible == pytest.approx(3.9 * 0.992)
    bracket.record_infeasible(infeasible)
    assert bracket.propose() == pytest.approx((infeasible * 3.9) ** 0.5)


def test_a_good_plan_is_proved_by_few_evaluations() -> None:
    """The best but one, a little above: just below it, a step down, and what lies between."""
    asked = drive(Bracket(1.0, 9.0, 3.0003, phase=Phase.DESCENDING), [3.0, 3.0003, 4.0], Random(1))
    assert asked[0] == pytest.approx(3.0003)
    assert asked[1] < 3.0
    assert len(asked) <= 4


@given(positive, st.floats(1.0, 1e12), st.booleans())
def test_tells_when_there_is_no_plan(lower: float, factor: float, doubtful: bool) -> None:
    bracket = Bracket(lower, lower * factor, phase=Phase.DOUBTING if doubtful else Phase.STEPPING)
    asked = drive(bracket, [], Random(0))
    assert bracket.exhausted
    assert not bracket.closed
    assert bracket.upper is None
    assert bracket.gap() == float("inf")
    assert len(asked) <= (1 if doubtful else 15)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=10), st.integers(0, 2**32))
def test_a_bound_of_zero(plans: list[float], seed: int) -> None:
    """Nothing is known from below, as when only communication takes time; the optimum itself may be zero."""
    plans = [value if value > 1e-3 else 0.0 for value in plans]
    bracket = Bracket(0.0, 200.0)
    drive(bracket, plans, Random(seed))
    assert bracket.closed
    assert bracket.upper is not None
    assert min(plans) <= bracket.upper <= min(plans) * (1 + 2 * PROOF)


@given(positive, st.floats(1.0, 2.0), st.floats(1.0, 100.0), st.integers(0, 2**32))
def test_a_plan_from_elsewhere(lower: float, best: float, known: float, seed: int) -> None:
    plans = [lower * best, lower * best * known]
    bracket = Bracket(lower, lower * 1000, upper=plans[1])
    if seed % 2:
        bracket.challenge()
        assert bracket.propose() == plans[1] * (1.0 - PROOF)
    drive(bracket, plans, Random(seed))
    assert bracket.closed
    assert bracket.upper == pytest.approx(plans[0], rel=2 * PROOF)


def test_the_same_answers_ask_the_same_thresholds() -> None:
    plans = [1.37, 1.9, 2.5, 7.0]
    assert drive(Bracket(1.0, 100.0), plans, Random(3)) == drive(Bracket(1.0, 100.0), plans, Random(3))


def test_a_tight_bound_is_proved_at_once() -> None:
    """The optimum is the lower bound: one feasible evaluation, and no proof is needed."""
    assert len(drive(Bracket(1.0, 100.0), [1.0], Random(0))) == 1


def test_a_worse_plan_changes_nothing() -> None:
    bracket = Bracket(1.0, 10.0)
    bracket.record_plan(3.0)
    bracket.record_plan(4.0)
    assert bracket.upper == 3.0
    bracket.record_feasible(5.0, 3.5)
    assert bracket.upper == 3.0
    assert bracket.gap() == pytest.approx(2 / 3)
    bracket.record_infeasible(0.5)
    assert bracket.lower == 1.0


def test_closed_within_the_proof() -> None:
    assert Bracket(1.0, 9.0, upper=1.0).closed
    assert Bracket(1.0, 9.0, upper=1.0 + 0.9 * PROOF).closed
    assert not Bracket(1.0, 9.0, upper=1.0 + 1.1 * PROOF).closed
    assert Bracket(0.0, 9.0, upper=0.0).closed
    assert Bracket(0.0, 9.0, upper=0.0).gap() == 0.0
    assert Bracket(2.0, 9.0, upper=1.0).gap() == 0.0


@given(
    st.floats(0.0, 1e3),
    st.lists(st.floats(0.5, 1e3), max_size=8),
    st.booleans(),
    st.floats(1e-3, 1.0) | st.none(),
    st.integers(0, 2**32),
)
def test_phases_propose_what_four_flags_did(
    lower: float, factors: list[float], doubtful: bool, known: float | None, seed: int
) -> None:
    """Whatever is recorded meanwhile: answers of evaluations, plans from elsewhere, doubts."""
    ceiling, rng = max(lower, 1e-3) * 1e4, Random(seed)
    upper = None if known is None else ceiling * known
    phase = Phase.DOUBTING if doubtful else Phase.STEPPING
    bracket = Bracket(lower, ceiling, upper, phase=phase)
    flagged = FlaggedBracket(lower, ceiling, upper, doubtful=doubtful)
    plans = [max(lower, 1e-3) * factor for factor in factors]
    for _ in range(60):
        assert (bracket.closed, bracket.exhausted, bracket.gap()) == (flagged.closed, flagged.exhausted, flagged.gap())
        if bracket.is_done():
            break
        threshold = bracket.propose()
        assert threshold == flagged.propose()
        keep = [value for value in plans if value <= threshold]
        value, share = rng.choice(keep or [threshold]), rng.choice([1.0, 0.995, 0.5, rng.random()])
        for one in (bracket, flagged):
            if keep:
                one.record_feasible(threshold, value, share)
            else:
                one.record_infeasible(threshold)
        if rng.random() < 0.2 and plans:  # a chain's plan
            for one in (bracket, flagged):
                one.record_plan(plans[0])
        if rng.random() < 0.2:  # a chain without one
            bracket.doubt()
            flagged.doubtful = flagged.upper is None


@given(
    positive,
    st.floats(1.0, 5.0),
    st.lists(st.floats(1.0, 1e4), min_size=1, max_size=20),
    st.integers(0, 2**32),
)
def test_closes_wherever_states_reach(lower: float, bound: float, factors: list[float], seed: int) -> None:
    """Any share of the work may be reached, and the lower bound may be far above what all work takes."""
    plans = [lower * bound * factor for factor in factors]
    bracket, rng = Bracket(lower * bound, max(plans) * 1.5, work=lower), Random(seed)
    while not bracket.closed:
        threshold = bracket.propose()
        assert bracket.lower < threshold <= bracket.ceiling
        keep = [value for value in plans if value <= threshold]
        if keep:
            bracket.record_feasible(threshold, rng.choice(keep), rng.random())
        else:
            bracket.record_infeasible(threshold, rng.choice([0.0, rng.random(), 1.0]))
            assert bracket.lower == threshold
    assert bracket.upper is not None
    assert min(plans) <= bracket.upper <= min(plans) * (1 + 2 * PROOF)


@given(st.floats(1.05, 6.0))
def test_even_waste_points_to_the_first_plan(best: float) -> None:
    """Each layer wastes the same share: so what is reached tells where all is, and the first plan is near it."""
    bracket, asked = Bracket(1.0, 1e4, work=1.0), []
    while bracket.upper is None:
        threshold = bracket.propose()
        asked.append(threshold)
        if threshold >= best:
            bracket.record_feasible(threshold, best)
        else:
            bracket.record_infeasible(threshold, (1.0 - 1.0 / threshold) / (1.0 - 1.0 / best))
    assert asked[-1] <= best * 1.051
    assert len(asked) <= 7


def test_steps_go_further_each_time_they_fall_short() -> None:
    """All but a last layer is reached at any threshold: it takes more than the others told."""
    bracket, asked = Bracket(1.0, 1e4, work=1.0), []
    for _ in range(9):
        asked.append(bracket.propose())
        bracket.record_infeasible(asked[-1], 1.0)
    grown = [after / before for before, after in pairwise(asked)]
    by_steps, by_reach = [1.01, 1.04, 1.16], [1.0 + 0.05 * 1.5**times for times in range(5)]
    assert grown == pytest.approx(sorted(by_steps + by_reach))
