"""SolveOptions refuses what makes no sense."""

from __future__ import annotations

import math
from typing import Any

import pytest

from piper_ray import SolveOptions, UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gap": -0.1}, "gap must be at least 0"),
        ({"gap": 1.0}, "gap must be at least 0 and below 1"),
        ({"gap": math.nan}, "gap"),
        ({"time_limit_s": 0.0}, "positive number of seconds"),
        ({"time_limit_s": math.inf}, "positive number of seconds"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"memory_limit_bytes": 0.0}, "positive number of bytes"),
        ({"memory_limit_bytes": math.nan}, "positive number of bytes"),
    ],
)
def test_figures_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SolveOptions(**options)


def test_the_defaults_ask_for_a_proof_without_limits() -> None:
    assert SolveOptions() == SolveOptions(gap=0.0, time_limit_s=None, threads=None, memory_limit_bytes=None)
