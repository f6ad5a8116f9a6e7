"""The rate at which work is done: what it learns from, and what is done before it has learned anything."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.tables.problem import Rate


@given(st.lists(st.tuples(st.integers(0, 10**15), st.floats(0.0, 1e6)), max_size=50))
def test_rate_stays_finite_and_positive_whatever_is_recorded(work: list[tuple[int, float]]) -> None:
    rate = Rate()
    for bounds, seconds in work:
        rate.record(bounds, seconds)
        assert 0.0 < rate.s_per_bound < math.inf
        assert rate.bounds_within(0.1) > 0


def test_first_figure_counts_whole_and_later_ones_in_part() -> None:
    rate = Rate()
    rate.record(10**6, 4.0)
    assert rate.s_per_bound == 4e-6
    for _ in range(60):
        rate.record(10**6, 1.0)
    assert math.isclose(rate.s_per_bound, 1e-6, rel_tol=1e-3)
    assert math.isclose(rate.bounds_within(0.5), 5e5, rel_tol=1e-3)


def test_a_call_too_short_to_tell_teaches_nothing() -> None:
    rate = Rate()
    rate.record(100, 1e-4)
    assert rate == Rate()
    assert rate.bounds_within(100.0) == 10_000
    rate.record(100, 1e-3)
    assert rate.s_per_bound == 1e-5
