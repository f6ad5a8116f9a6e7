"""Calls on threads: each is answered once, hears of better bounds, and ends on request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from piper_ray.engine.backends.calls import Call, Finished, TakesCalls, ThreadWorkers
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.kernels.types import FloatArray


@pytest.fixture
def workers() -> Iterator[ThreadWorkers]:
    with closing(ThreadWorkers(2)) as opened:
        yield opened


def add(base: int, number: int, control: FloatArray) -> int:
    control[0] = min(control[0], float(number))
    return base + number


def until_told(limit_s: float, control: FloatArray) -> tuple[float, float]:
    """Ends at a wish to stop, or once the bound is below the limit."""
    while control[0] >= limit_s and control[1] == 0.0:
        time.sleep(0.001)
    return float(control[0]), float(control[1])


def fail(_control: FloatArray) -> None:
    raise ValueError("no good")


def call(key: object, function: Any, *arguments: object, shared: tuple[object, ...] = (), bound_s: float = 9.0) -> Call:
    return Call(key, function, shared, arguments, f"call {key}", bound_s)


def test_each_is_answered_once(workers: ThreadWorkers) -> None:
    for number in range(20):
        workers.give(call(number, add, number, shared=(100,)))
    found: list[Finished] = []
    while len(found) < 20:
        found += workers.done(1.0)
    assert sorted((finished.call.key, finished.result) for finished in found) == [(k, 100 + k) for k in range(20)]
    assert {(finished.attempts, finished.lost) for finished in found} == {(1, None)}
    assert workers.done(0.0) == []
    assert (workers.width, workers.busy) == (2, False)


def test_bounds_are_told_and_heard_of(workers: ThreadWorkers) -> None:
    assert workers.heard_s() == np.inf
    workers.give(call("waits", until_told, 5.0))
    workers.give(call("finds", until_told, 9.5))
    assert workers.busy
    assert [(one.call.key, one.result) for one in workers.done(10.0)] == [("finds", (9.0, 0.0))]
    assert workers.heard_s() == 9.0
    workers.tell(20.0)
    assert workers.heard_s() == 9.0, "bounds only fall"
    workers.tell(4.0)
    assert [(one.call.key, one.result) for one in workers.done(10.0)] == [("waits", (4.0, 0.0))]


def test_all_end_when_recalled(workers: ThreadWorkers) -> None:
    for key in range(5):
        workers.give(call(key, until_told, 0.0))
    assert sorted((one.call.key, one.result) for one in workers.recall()) == [(key, (9.0, 1.0)) for key in range(5)]
    workers.give(call("again", add, 1, shared=(0,)))
    assert [one.result for one in workers.done(10.0)] == [1], "they take calls as before"


def test_an_error_reaches_who_asks_what_is_done(workers: ThreadWorkers) -> None:
    workers.give(call("fails", fail))
    with pytest.raises(ValueError, match="no good"):
        workers.done(10.0)


def test_a_backend_of_threads_takes_calls() -> None:
    backend = LocalBackend(3)
    assert isinstance(backend, TakesCalls)
    with closing(backend), closing(backend.open_workers()) as opened:
        assert opened.width == 3
