"""Simulated times against what is known in closed form (Huang et al. 2019, Narayanan et al. 2021, Qi et al. 2024)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.simulate.kernels.events import Floats
from tests.simulate_support import placed, random_seconds, run


def _end_s(schedule: Schedule, microbatches: int, seconds: Floats) -> float:
    ranks = len(seconds) // schedule.v
    where = placed(schedule, [1] * len(seconds))
    return float(run(where, flush_lists(schedule, ranks, microbatches), microbatches, seconds).end_s.max())


def test_gpipe_is_its_closed_form() -> None:
    rng = random.Random("gpipe")
    for _ in range(300):
        stages, m = rng.randint(1, 9), rng.randint(1, 40)
        seconds = random_seconds(rng, stages)
        f, b = seconds[:, ActionKind.F], seconds[:, ActionKind.B]
        expected = f.sum() + (m - 1) * f.max() + b.sum() + (m - 1) * b.max()
        assert _end_s(Schedule(ScheduleName.GPIPE), m, seconds) == pytest.approx(expected, rel=1e-12)


def _lower_bound_s(f: Floats, b: Floats, m: int) -> float:
    """The longest of some paths through one stage each: before it, at it, and behind it in between."""
    t = f + b
    p = len(t)
    bounds = []
    for j in range(p):
        w = min(m, p - j)
        head, tail = t[:j].sum(), t[j + 1 :].sum()
        if m > w:
            own = (m - w + 1) * t[j] + max(tail, (w - 1) * f[j]) + max(tail, (w - 1) * b[j])
        else:
            own = max(m * f[j] + tail + b[j], f[j] + tail + m * b[j], m * t[j])
        bounds.append(head + own)
    return float(max(bounds))


def test_1f1b_is_never_below_its_bound_and_mostly_on_it() -> None:
    rng = random.Random("1f1b")
    met, tried = 0, 600
    for _ in range(tried):
        stages, m = rng.randint(1, 9), rng.randint(1, 40)
        seconds = random_seconds(rng, stages)
        bound = _lower_bound_s(seconds[:, ActionKind.F], seconds[:, ActionKind.B], m)
        simulated = _end_s(Schedule(ScheduleName.ONE_F_ONE_B), m, seconds)
        assert simulated >= bound * (1 - 1e-12)
        met += simulated <= bound * (1 + 1e-12)
    assert met > 0.7 * tried


@pytest.mark.parametrize("name", [ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE])
def test_balanced_stages(name: ScheduleName) -> None:
    for p, m in [(1, 5), (4, 1), (4, 8), (6, 3)]:
        seconds = np.tile([1.0, 2.0, 1.0, 1.0], (p, 1))
        assert _end_s(Schedule(name), m, seconds) == pytest.approx((m + p - 1) * 3.0)


@pytest.mark.parametrize("name", [ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS])
def test_balanced_chunks_share_the_bubble(name: ScheduleName) -> None:
    for p, v, m in [(2, 2, 4), (4, 2, 8), (3, 3, 9), (4, 3, 4)]:
        seconds = np.tile([1.0, 2.0, 1.0, 1.0], (p * v, 1))
        assert _end_s(Schedule(name, v), m, seconds) == pytest.approx((m * v + p - 1) * 3.0)


def test_zb_h1_hides_part_of_the_bubble() -> None:
    """m t + (p - 1)(f + i - w) while w is no longer than f and i."""
    for p, m, f, i, w in [(4, 8, 1.0, 1.0, 1.0), (3, 9, 2.0, 1.5, 1.0), (5, 10, 1.0, 1.2, 0.7)]:
        seconds = np.tile([f, i + w, i, w], (p, 1))
        assert _end_s(Schedule(ScheduleName.ZB_H1), m, seconds) == pytest.approx(
            m * (f + i + w) + (p - 1) * (f + i - w)
        )


def test_zb_v_has_next_to_no_bubble_where_its_passes_are_equal() -> None:
    for p, m in [(2, 4), (4, 8), (4, 16), (6, 24)]:
        seconds = np.tile([1.0, 2.0, 1.0, 1.0], (2 * p, 1))
        assert _end_s(Schedule(ScheduleName.ZB_V), m, seconds) <= 6.0 * m + p - 1 + 1e-9


def test_longer_passes_never_shorten_a_step() -> None:
    rng = random.Random("monotone")
    for name in (ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1, ScheduleName.DUALPIPE_V, ScheduleName.INTERLEAVED):
        schedule = Schedule(name)
        for _ in range(30):
            ranks = rng.randint(1, 4)
            m = rng.randint(2 * ranks, 12)
            seconds = random_seconds(rng, ranks * schedule.v)
            longer = seconds + rng.random() * (np.array(random_seconds(rng, len(seconds))) > 1.0)
            assert _end_s(schedule, m, longer) >= _end_s(schedule, m, seconds) - 1e-9
