"""The simulation against recorded optima under gpipe and 1f1b: the best of all plans, each of them simulated."""

from __future__ import annotations

from itertools import cycle

import pytest

from piper_ray.workloads.formats.load import load
from tests.data import goldens
from tests.lengths import long_after
from tests.simulate_brute_force import candidates, least_simulated_s

MOST_PLANS = 40
"""Records with more plans than that take longer; all of up to 4,000 were checked once: 271 of the 300."""


@pytest.mark.parametrize(("part", "schedule"), long_after(1, zip(range(3), cycle(["gpipe", "1f1b"]))))
def test_recorded_optima(part: int, schedule: str, few: bool) -> None:
    feasible = 0
    for number, golden in enumerate(goldens("schedules")[part :: 6 if few else 3]):
        instance = load(golden["instance"])
        plans = 0
        for count, _ in candidates(instance, schedule):
            plans += count
            if plans > MOST_PLANS:
                break
        expected = golden["value_s"][schedule]
        if plans <= MOST_PLANS:
            found = least_simulated_s(instance, schedule)
            assert (found is None) == (expected is None), number
            if expected is not None:
                assert found == pytest.approx(expected, rel=1e-9), number
                feasible += 1
    assert feasible > 6
