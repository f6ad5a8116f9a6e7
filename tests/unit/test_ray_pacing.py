"""Batches and chunks of every size: never none, never more than there is, and growing with the work."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.backends.ray.pacing import Pacing
from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.tables.problem import Rate

SECONDS = st.one_of(st.just(0.0), st.floats(1e-12, 1e9))
WORKERS = st.integers(1, 5000)
DOWNSETS = st.integers(1, 10**9)
LEVELS = st.lists(st.integers(1, 10**6), min_size=1, max_size=30)


@given(SECONDS, WORKERS, DOWNSETS)
def test_at_least_one_chunk_and_none_without_a_downset(seconds: float, workers: int, downsets: int) -> None:
    assert 1 <= Pacing().chunks(seconds, workers, 4 * workers, downsets) <= downsets


@given(st.lists(SECONDS, min_size=2, max_size=6), WORKERS, DOWNSETS)
def test_more_work_makes_no_fewer_chunks(work: list[float], workers: int, downsets: int) -> None:
    counts = [Pacing().chunks(seconds, workers, workers, downsets) for seconds in sorted(work)]
    assert counts == sorted(counts)


@given(SECONDS, st.lists(st.integers(1, 16), min_size=2, max_size=6), DOWNSETS)
def test_more_workers_get_no_fewer_chunks(seconds: float, workers: list[int], downsets: int) -> None:
    """While they are few: of many each gets one chunk instead of two."""
    counts = [Pacing().chunks(seconds, count, count, downsets) for count in sorted(workers)]
    assert counts == sorted(counts)


def test_chunks_by_hand() -> None:
    pacing = Pacing()
    assert pacing.chunks(0.0, 8, 8, 1000) == 1
    assert pacing.chunks(0.010, 8, 8, 1000) == 2, "of 5 ms each, though there are more workers"
    assert pacing.chunks(0.5, 8, 8, 1000) == 16, "two for each worker"
    assert pacing.chunks(7.5, 8, 8, 1000) == 100, "none longer than 75 ms"
    assert pacing.chunks(7.5, 8, 8, 30) == 30, "no more than downsets"
    assert pacing.chunks(7.5, 8, 64, 1000) == 16, "eight threads each do as much in an eighth of the time"
    assert pacing.chunks(7.5, 64, 640, 1000) == 64, "one for each of many"


@given(LEVELS, st.data(), st.floats(1e-15, 1.0), st.floats(0.0, 10.0))
def test_batch_has_a_level_and_all_its_bounds(
    sizes: list[int], data: st.DataObject, s_per_bound: float, round_trip_s: float
) -> None:
    level_start = np.cumsum([0, *sizes])
    level = data.draw(st.integers(0, len(sizes) - 1))
    used = data.draw(st.integers(1, 10**6))
    span = Pacing(round_trip_s=round_trip_s, call_s=0.0).batch(Rate(s_per_bound), level_start, level, used)
    assert level < span.end_level <= len(sizes)
    assert span.far == used * sum(sizes[level : span.end_level])
    extra = near = 0
    for size in sizes[level : span.end_level]:
        near += size * extra
        extra += 1 + size // BUCKET_SIZE
    assert span.near == near
    if span.end_level > level + 1:
        assert near * s_per_bound <= round_trip_s * (1 + 1e-12)


@given(LEVELS, st.lists(st.floats(0.0, 10.0), min_size=2, max_size=5))
def test_dearer_round_trips_make_no_shorter_batches(sizes: list[int], round_trips_s: list[float]) -> None:
    level_start = np.cumsum([0, *sizes])
    ends = [
        Pacing(round_trip_s=seconds, call_s=0.0).batch(Rate(3e-8), level_start, 0, 10).end_level
        for seconds in sorted(round_trips_s)
    ]
    assert ends == sorted(ends)


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.integers(0, 5000)), max_size=50))
def test_round_trip_stays_in_its_limits_whatever_is_recorded(batches: list[tuple[float, float, int]]) -> None:
    pacing = Pacing()
    for batch in batches:
        pacing.record(*batch)
        assert 0.0005 <= pacing.round_trip_s <= 0.05


def test_figures_approach_what_batches_take() -> None:
    pacing = Pacing(round_trip_s=0.05)
    for _ in range(60):
        pacing.record(worked_s=0.02, elapsed_s=0.012, threads=2)
    assert math.isclose(pacing.round_trip_s, 0.002, rel_tol=1e-3)


def test_batch_that_the_driver_did_alone_teaches_nothing() -> None:
    pacing = Pacing()
    pacing.record(worked_s=0.0, elapsed_s=1.0, threads=0)
    assert pacing == Pacing()


def test_what_is_sent_gains() -> None:
    pacing = Pacing(round_trip_s=0.003)
    assert pacing.pays(1.0, 0.0, threads_here=2, threads_there=16)
    assert not pacing.pays(1.0, 0.0, threads_here=2, threads_there=2), "no more threads than here"
    assert not pacing.pays(1.0, 0.0, threads_here=2, threads_there=0), "nobody is there"
    assert not pacing.pays(0.004, 0.0, threads_here=2, threads_there=1000), "it takes less than a round trip here"
    assert not pacing.pays(1.0, 30.0, threads_here=2, threads_there=2.5), "what stays here takes as long either way"


def test_workers_that_take_longer_than_they_should_get_less() -> None:
    pacing = Pacing(round_trip_s=0.003)
    for _ in range(20):
        pacing.record(worked_s=1.0, elapsed_s=2.0, threads=4)
    assert not pacing.pays(1.0, 0.0, threads_here=2, threads_there=4)
    waits = 0
    while not pacing.pays(1.0, 0.0, threads_here=2, threads_there=4):
        waits += 1
        assert waits < 1000, "they are never tried again"


def test_many_calls_make_longer_batches() -> None:
    level_start, near = np.arange(0, 100_000, 1000), Rate(1e-7)
    one, many = (Pacing().batch(near, level_start, 1, 100, workers, 8) for workers in (1, 64))
    assert many.end_level > one.end_level


def test_the_next_batch_goes_out_early_where_the_part_between_is_short() -> None:
    pacing = Pacing(round_trip_s=0.003)
    assert pacing.pays_ahead(1.0, 0.0, 0.001, threads_here=2, threads_there=16)
    assert not pacing.pays_ahead(1.0, 0.0, 0.1, threads_here=2, threads_there=16)
