"""Hypothesis profiles: ``fast`` by default, ``HYPOTHESIS_PROFILE=ci`` or ``nightly`` for more examples.

``fast`` and ``ci`` draw the same examples on every run; ``nightly`` looks for new ones.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.ray_support import RAY_ENVIRONMENT, local_ray

__all__ = ["local_ray"]

os.environ.update(RAY_ENVIRONMENT)  # before any test imports Ray, which reads it then

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is for a shell's background jobs, and for what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A first example may compile a kernel: no deadlines.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _COMMON, max_examples=50, derandomize=True, database=None)
settings.register_profile("ci", _COMMON, max_examples=300, derandomize=True, database=None)
settings.register_profile("nightly", _COMMON, max_examples=5000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

_FAULTS = Path(__file__).parent / "faults"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist one process has the session's Ray, and one the machines of the fault tests."""
    for item in items:
        if _FAULTS in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("machines"))
        elif "local_ray" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
