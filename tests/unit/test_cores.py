"""How many threads a solve starts with."""

from __future__ import annotations

import os

import pytest

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.model.cores import usable_cores


def test_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: {1, 5, 6}}[pid], raising=False)
    assert usable_cores() == 3
    backend = LocalBackend()
    backend.close()
    assert backend.threads == 3


@pytest.mark.parametrize(("count", "expected"), [(8, 8), (None, 1)])
def test_all_cores_where_processes_are_not_bound_to_any(
    monkeypatch: pytest.MonkeyPatch, count: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores() == expected
