"""Bounds on the data-parallel degree rule out no degree that would do; against trying every divisor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.cost.stage import in_flight
from piper_ray.engine.kernels.bounds import (
    bit_position,
    first_divisor_by_memory,
    first_divisor_by_time,
    is_subset,
    lowest_position,
)
from piper_ray.engine.kernels.types import ClusterArrays
from piper_ray.engine.lattice.layer_graph import bit_rows
from piper_ray.model.instance import divisors
from tests.lengths import long_after

BATCHES = (1, 2, 7, 12, 64, 97, 360, 1024, 1920)
batches = st.sampled_from(BATCHES)
small = st.integers(0, 40)


def divisor_at_least(allowed: Sequence[int]) -> np.ndarray:
    """As a problem has it: the index of the first divisor >= x, for each x up to the largest."""
    return np.array([next(k for k, d in enumerate(allowed) if d >= x) for x in range(allowed[-1] + 1)], np.int64)


def by_time(work: float, resync: float, threshold: float, allowed: Sequence[int]) -> int:
    return first_divisor_by_time(work, resync, threshold, divisor_at_least(allowed), len(allowed))


def by_memory(a: float, b: float, memory: float, later_sum: int, allowed: Sequence[int], shared: float = 0.0) -> int:
    cluster = ClusterArrays(
        devices=allowed[-1],
        data_parallel_limit=allowed[-1],
        memory_bytes=memory,
        divisors=np.array(allowed, np.int64),
        divisor_at_least=divisor_at_least(allowed),
        first_divisor=np.zeros(1, np.int64),
        end_divisor=np.full(1, len(allowed), np.int64),
    )
    return first_divisor_by_memory(a, b, shared, later_sum, cluster)


def first_that(allowed: Sequence[int], fits: Callable[[int], bool]) -> int:
    return next((k for k, d in enumerate(allowed) if fits(d)), len(allowed))


def keeps_time(work: float, resync: float, threshold: float) -> Callable[[int], bool]:
    return lambda d: Fraction(work) + (d - 1) * Fraction(resync) <= Fraction(threshold) * d


def keeps_memory(a: float, b: float, memory: float, later_sum: int, shared: float = 0.0) -> Callable[[int], bool]:
    def keeps(d: int) -> bool:
        y = -(-(later_sum + d) // d)
        return Fraction(a) * y + Fraction(b) + Fraction(shared) / d <= Fraction(memory)

    return keeps


@given(small, small, st.integers(1, 40), batches)
def test_time_with_integers(work: int, resync: int, threshold: int, batch: int) -> None:
    """Exactly the first that fits, also where it fits to the last bit."""
    allowed = divisors(batch)
    expected = first_that(allowed, keeps_time(work, resync, threshold))
    assert by_time(float(work), float(resync), float(threshold), allowed) == expected


@given(small, small, small, st.integers(0, 3000), batches)
def test_memory_with_integers(a: int, b: int, memory: int, later_sum: int, batch: int) -> None:
    allowed = divisors(batch)
    expected = first_that(allowed, keeps_memory(a, b, memory, later_sum))
    assert by_memory(float(a), float(b), float(memory), later_sum, allowed) == expected


@given(small, small, st.integers(1, 40), st.integers(0, 3000), batches, st.integers(1, 400))
def test_memory_with_what_replicas_share_out(
    a: int, b: int, memory: int, later_sum: int, batch: int, shared: int
) -> None:
    """Rules out no degree that fits, and none but the guard's hair before the first that does."""
    allowed = divisors(batch)
    found = by_memory(float(a), float(b), float(memory), later_sum, allowed, float(shared))
    assert found <= first_that(allowed, keeps_memory(a, b, memory, later_sum, shared))
    hair = memory * (1 + 2e-9)
    assert found >= first_that(allowed, keeps_memory(a, b, hair, later_sum, shared))


@pytest.mark.parametrize("seed", long_after(3, range(6)))
def test_arbitrary_figures_rule_out_nothing_that_fits(seed: int) -> None:
    rng = Random(seed)
    for _ in range(100):
        allowed = divisors(rng.choice(BATCHES))
        scale = 10.0 ** rng.randint(-9, 12)
        work, resync = rng.random() * scale * rng.choice([1, 100]), rng.random() * scale * rng.choice([0, 1e-3, 1])
        d = rng.choice(allowed)
        # By turns a threshold that d keeps exactly, or any.
        threshold = (work + (d - 1) * resync) / d if rng.random() < 0.7 else rng.random() * scale
        found = by_time(work, resync, threshold * (1 + 1e-12), allowed)
        assert found <= first_that(allowed, keeps_time(work, resync, threshold))
        if found < len(allowed):
            assert keeps_time(work, resync, threshold * (1 + 1e-6) + work * 1e-6)(allowed[found])

        a, b, later_sum = rng.random() * scale, rng.random() * scale, rng.randint(0, 4000)
        memory = a * -(-(later_sum + d) // d) + b if rng.random() < 0.7 else rng.random() * 5 * scale
        found = by_memory(a, b, memory * (1 + 1e-12), later_sum, allowed)
        assert found <= first_that(allowed, keeps_memory(a, b, memory, later_sum))
        if found < len(allowed):
            assert keeps_memory(a, b, memory * (1 + 1e-6), later_sum)(allowed[found])


def test_divisors_up_to_a_limit_only() -> None:
    allowed = [1, 2, 3, 4]  # of 12, on 5 devices
    assert by_time(40.0, 0.0, 10.0, allowed) == 3
    assert by_time(40.1, 0.0, 10.0, allowed) == 4
    assert by_memory(1.0, 0.0, 2.0, 4, allowed) == 3
    assert by_memory(1.0, 0.0, 2.0, 5, allowed) == 4


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_in_flight(later_sum: int, d: int) -> None:
    assert in_flight(later_sum, d) == -(-(later_sum + d) // d)


@given(st.sets(st.integers(0, 149)), st.sets(st.integers(0, 149)))
def test_is_subset(small_set: set[int], large_set: set[int]) -> None:
    rows = bit_rows([small_set, large_set, small_set & large_set], 150)
    assert is_subset(rows[0], rows[1]) == (small_set <= large_set)
    assert is_subset(rows[2], rows[1])


def test_positions_of_bits() -> None:
    rng = Random(3)
    for lowest in range(64):
        bits = np.uint64((rng.getrandbits(63 - lowest) << (lowest + 1) | 1 << lowest) & 2**64 - 1)
        assert lowest_position(bits) == lowest
        assert bit_position(bits) == int(bits).bit_length() - 1
