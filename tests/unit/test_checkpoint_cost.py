"""What a checkpoint costs: less than a hundredth of the run, and never the solve."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from piper_ray.engine.checkpoint import Checkpoint
from piper_ray.engine.checkpoint.checkpoint import LEVELS_EVERY_S, SHARE
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.storage.folder import LEASE, OUTCOMES
from tests.checkpoint_support import Clock, ObjectStore, key, levels, opened, outcome, record, recorded, unexpected
from tests.lengths import long_after


class Meter:
    """An object store each of whose operations takes ``cost_s`` of the clock's time."""

    def __init__(self, cost_s: float) -> None:
        self.clock = Clock()
        self.cost_s = cost_s
        self.spent_s = 0.0
        self.store = ObjectStore(before=self._pass)
        self._main = threading.current_thread()

    def _pass(self, operation: str, key: str) -> None:
        del operation, key
        if threading.current_thread() is self._main:
            self.clock.now_s += self.cost_s
            self.spent_s += self.cost_s

    def opened(self, on_warning: Callable[[str], None] = unexpected) -> Checkpoint:
        return opened("bucket", clock=self.clock, filesystem=self.store.filesystem, on_warning=on_warning)


@pytest.mark.parametrize("cost_s", long_after(1, [0.05, 1e-4, 1.0]))
@pytest.mark.parametrize("step_s", [0.003, 0.7, 40.0])
def test_less_than_a_hundredth_of_the_run_is_spent_on_writing(cost_s: float, step_s: float) -> None:
    meter = Meter(cost_s)
    checkpoint = meter.opened()
    opening_s, meter.spent_s = meter.spent_s, 0.0
    began = meter.clock.now_s
    written = 0
    for step in range(1000):
        meter.clock.now_s += step_s
        before_s = meter.spent_s
        if step % 5 == 4:
            assert checkpoint.record_outcome(key(step), outcome(1)) == (meter.spent_s > before_s)
        else:
            checkpoint.record_levels(key(step), lambda: levels(3))
        written += meter.spent_s > before_s
    run_s = meter.clock.now_s - began
    # The first write's cost is not known, only that of the listing on opening.
    assert meter.spent_s <= run_s / SHARE + 10 * opening_s
    assert written > 0 or run_s < 2 * SHARE * opening_s
    checkpoint.close()


def test_levels_are_asked_for_only_when_they_are_written() -> None:
    meter = Meter(0.01)
    asked: list[float] = []

    def states() -> LevelStates:
        asked.append(meter.clock.now_s)
        return levels(3)

    with meter.opened() as checkpoint:
        for _ in range(10_000):
            meter.clock.now_s += 0.01
            before = len(asked)
            assert checkpoint.record_levels(key(0), states) == (len(asked) > before)
    assert len(asked) in range(10, 21)
    assert all(later - earlier >= LEVELS_EVERY_S for earlier, later in pairwise(asked))


def test_gathering_the_levels_is_a_part_of_the_cost() -> None:
    meter = Meter(0.0)
    asked: list[float] = []

    def states() -> LevelStates:
        asked.append(meter.clock.now_s)
        meter.clock.now_s += 1.0
        return levels(3)

    with meter.opened() as checkpoint:
        for _ in range(1000):
            meter.clock.now_s += 1.0
            checkpoint.record_levels(key(0), states)
    assert len(asked) == 10


def test_answers_that_come_too_fast_are_written_together() -> None:
    meter = Meter(0.001)
    store = meter.store
    with meter.opened() as checkpoint:
        confirmed = [checkpoint.record_outcome(key(number), outcome(number)) for number in range(10)]
        assert not any(confirmed)
        assert recorded(checkpoint) == set(range(10))
        assert not any(OUTCOMES in name for name in store.objects)
    assert len([name for name in store.objects if OUTCOMES in name]) == 1
    with meter.opened() as checkpoint:
        assert recorded(checkpoint) == set(range(10))
        meter.clock.now_s += 1.0
        checkpoint.record_outcome(key(10), outcome(10))
        checkpoint.record_outcome(key(11), outcome(11))
        meter.clock.now_s += 1.0
        assert not checkpoint.record_levels(key(12), lambda: levels(1))  # writes the answer that was waiting
        checkpoint._lease.release()  # and dies
    with meter.opened() as checkpoint:
        assert recorded(checkpoint) == set(range(12))


def test_a_full_disk_costs_the_checkpoint_but_not_the_solve() -> None:
    def full(operation: str, key: str) -> None:
        if operation == "put" and LEASE not in key:
            raise OSError(errno.ENOSPC, "No space left on device")

    store, clock, told = ObjectStore(), Clock(), list[str]()
    checkpoint = opened("bucket", clock=clock, filesystem=store.filesystem, on_warning=told.append)
    record(checkpoint, 0)
    store.before = full
    assert not checkpoint.record_outcome(key(1), outcome(1))
    clock.now_s += LEVELS_EVERY_S
    assert not checkpoint.record_levels(key(2), lambda: levels(2))
    assert told == ["the checkpoint at bucket cannot be written: No space left on device; the solve goes on"]
    assert recorded(checkpoint) == {0, 1}
    store.before = ObjectStore.before
    record(checkpoint, 2)
    store.before = full
    assert not checkpoint.record_outcome(key(3), outcome(3))
    assert len(told) == 2
    checkpoint.close()
    store.before = ObjectStore.before
    with opened("bucket", filesystem=store.filesystem) as checkpoint:
        assert recorded(checkpoint) == {0, 1, 2}
    assert all(OUTCOMES in name for name in store.objects)
