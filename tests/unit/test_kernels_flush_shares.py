"""The room for shares of a second: no simulated pipeline has more, whatever its order and times."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from piper_ray.engine.kernels.flush_mixes import share_room
from piper_ray.engine.kernels.flush_types import GPIPE, ONE_F_ONE_B, TWO_BW
from tests.flush_brute_force import simulated_batch_s

CODES = {"1f1b": ONE_F_ONE_B, "gpipe": GPIPE}


@pytest.mark.parametrize("schedule", list(CODES))
def test_no_pipeline_has_a_larger_share(schedule: str) -> None:
    rng, nearest, known = Random(f"shares {schedule}"), 0.0, 0
    for _ in range(400):
        most = [rng.randint(0, 4) for _ in range(rng.choice([1, 2, 3]))]
        share = np.array([rng.choice([1.0, rng.uniform(0.05, 1.0), rng.uniform(0.6, 1.0)]) for _ in most])
        kinds = [kind for kind, count in enumerate(most) for _ in range(rng.randint(count - (count > 0), count))]
        rng.shuffle(kinds)
        behind, m = rng.randint(0, len(kinds)), rng.randint(1, 40)
        even = rng.choice([0.0, 0.02, 1.0])
        both_s = [1.0 + even * rng.uniform(-0.9, 0.9) for _ in kinds]
        if rng.random() < 0.3:  # work moved to the front, or to the back
            both_s = [x * rng.choice([1.0, 1.05, 0.3]) for x in both_s]
        parts = [rng.choice([1 / 3, rng.random()]) for _ in kinds]
        stages = [(x * part, x * (1.0 - part), 0.0) for x, part in zip(both_s, parts, strict=True)]
        if not kinds:
            continue
        batch_s = simulated_batch_s(schedule, stages, m)
        front = len(kinds) - behind
        left = np.array(most) - np.bincount(kinds[front:], minlength=len(most))
        room = share_room(CODES[schedule], m, behind, sum(most) - behind, left, share)
        spent_s = sum(both_s[front:]) * (2.0 if schedule == "1f1b" else 1.0)
        had = sum(share[kind] * x for kind, x in zip(kinds[:front], both_s[:front], strict=True))
        assert had <= batch_s * room.slowest * (1.0 + 1e-9)
        if room.filled < np.inf:
            known += 1
            limit = (batch_s - spent_s) * room.filled
            assert had <= limit * (1.0 + 1e-9) + 1e-12
            nearest = max(nearest, had / limit if limit > 0.0 else 0.0)
    assert known > 100
    assert nearest > 0.999  # equal stages have all of it


def test_slow_stages_are_counted_as_slow_while_there_are_many_microbatches() -> None:
    """By hand: 2 stages with a share of 1, 1 with 0.5, 61 microbatches, none behind."""
    room = share_room(ONE_F_ONE_B, 61, 0, 3, np.array([1, 2]), np.array([0.5, 1.0]))
    assert room == pytest.approx((2.5 / 61, 2.5 / 63))
    assert share_room(ONE_F_ONE_B, 61, 0, 2, np.array([1, 2]), np.array([0.5, 1.0])) == pytest.approx((2 / 61, 2 / 62))
    assert share_room(ONE_F_ONE_B, 3, 0, 3, np.array([1, 2]), np.array([0.5, 1.0])).filled == np.inf
    assert share_room(TWO_BW, 61, 0, 3, np.array([1, 2]), np.array([0.5, 1.0])) == pytest.approx((2.5 / 61, np.inf))
