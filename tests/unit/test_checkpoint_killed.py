"""A driver that is killed loses nothing it confirmed, and of two drivers that start together one gets the lease."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import current_thread, main_thread

import pytest

from piper_ray.engine.checkpoint import Checkpoint
from piper_ray.engine.checkpoint.checkpoint import LEVELS_EVERY_S
from piper_ray.model.errors import CheckpointRefused
from piper_ray.storage.folder import state_files
from tests.checkpoint_support import (
    Clock,
    ObjectStore,
    ignored,
    key,
    levels,
    opened,
    outcome,
    same_levels,
    same_outcome,
    unexpected,
)

ROOT = Path(__file__).resolve().parents[2]
BATCHES = 3
"""Of each evaluation."""


def size(number: int, batch: int) -> int:
    """Of the levels of evaluation ``number`` after a batch: no other has as many."""
    return number * BATCHES + batch


def solve(checkpoint: Checkpoint, clock: Clock, evaluations: int) -> Iterator[tuple[int, int]]:
    """Goes on where the checkpoint is, and yields what is durable: evaluations, and batches of the one under way."""
    for number in range(evaluations):
        if checkpoint.outcome(key(number)) is not None:
            continue
        for batch in range(BATCHES):
            clock.now_s += LEVELS_EVERY_S
            assert checkpoint.record_levels(key(number), lambda: levels(size(number, batch)))  # noqa: B023
            yield number, batch + 1
        assert checkpoint.record_outcome(key(number), outcome(number))
        yield number + 1, 0


def found(checkpoint: Checkpoint, evaluations: int) -> tuple[int, int]:
    """As ``solve`` yields it, each figure as it was given."""
    number = 0
    while checkpoint.outcome(key(number)) is not None:
        assert same_outcome(checkpoint.outcome(key(number)), outcome(number))
        number += 1
    assert all(checkpoint.outcome(key(later)) is None for later in range(number, evaluations + 1))
    saved = checkpoint.levels(key(number))
    batches = [batch for batch in range(BATCHES) if same_levels(saved, levels(size(number, batch)))]
    assert len(batches) == (saved is not None)
    return number, batches[0] + 1 if batches else 0


class Killed(BaseException):
    """As by SIGKILL: nothing the driver does from here on has any effect."""


@dataclass
class Countdown:
    """Lets a driver do a number of operations on the storage."""

    left: int
    done: list[str] = field(default_factory=list)

    def __call__(self, operation: str, key: str) -> None:
        if current_thread() is not main_thread():
            return
        self.done.append(f"{operation} {key}")
        if len(self.done) > self.left:
            raise Killed


def killed_after(operations: int, store: ObjectStore) -> tuple[tuple[int, int], list[str]]:
    """What the driver had confirmed, and the operations it got to, the last of which failed."""
    clock, confirmed = Clock(), (0, 0)
    store.before = countdown = Countdown(operations)
    checkpoint = None
    try:
        checkpoint = opened("bucket", clock=clock, filesystem=store.filesystem, on_warning=unexpected)
        for state in solve(checkpoint, clock, 3):
            confirmed = state
        checkpoint.close()
    except Killed:
        before = dict(store.objects)
        if checkpoint is not None:
            with pytest.raises(Killed):
                checkpoint._lease.release()  # the thread, which a killed process does not leave behind
        assert store.objects == before
    store.before = ObjectStore.before
    return confirmed, countdown.done


def test_killed_at_any_operation_a_driver_loses_nothing_it_confirmed() -> None:
    operations = 0
    while True:
        store = ObjectStore()
        confirmed, done = killed_after(operations, store)
        clock = Clock()
        with opened("bucket", clock=clock, filesystem=store.filesystem, on_warning=ignored) as checkpoint:
            assert found(checkpoint, 3) >= confirmed, done
            list(solve(checkpoint, clock, 3))
        with opened("bucket", filesystem=store.filesystem) as checkpoint:
            assert found(checkpoint, 3) == (3, 0)
        assert len(store.objects) == 2
        if len(done) <= operations:
            break
        operations += 1
    assert operations > 40


def test_half_an_object_is_never_taken_for_a_whole_one() -> None:
    """A store without atomic PUTs, which keeps half of what was being written."""
    damaged = 0
    for operations in range(60):
        store = ObjectStore(torn=True)
        confirmed, _ = killed_after(operations, store)
        told: list[str] = []
        with opened("bucket", filesystem=store.filesystem, on_warning=told.append) as checkpoint:
            assert found(checkpoint, 3) >= confirmed
        damaged += sum("damaged" in text for text in told)
    assert damaged > 5


# --- Real processes, told by their output

_DRIVER = """
import sys
from piper_ray.storage import lease
from tests.checkpoint_support import Clock, ignored, opened
from tests.unit.test_checkpoint_killed import solve

lease.BEAT_S = 0.01
clock = Clock()
with opened(sys.argv[1], clock=clock, on_warning=ignored) as checkpoint:
    for number, batch in solve(checkpoint, clock, 10_000):
        print(number, batch, flush=True)
"""

_RIVAL = """
import sys
import time

from piper_ray.model.errors import CheckpointRefused
from piper_ray.storage import lease
from tests.checkpoint_support import ignored, opened

lease._POLL_S, lease.BEAT_S = 0.02, 0.01
print("ready", flush=True)
for folder in map(str.strip, sys.stdin):
    try:
        checkpoint = opened(folder, clock=time, on_warning=ignored)
    except CheckpointRefused as refused:
        print("refused", refused, flush=True)
        sys.stdin.readline()
    else:
        print("works", flush=True)
        sys.stdin.readline()
        checkpoint.close()
    print("ready", flush=True)
"""


@contextmanager
def process(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Killed at the end."""
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def tell(child: subprocess.Popen[str], text: str) -> None:
    assert child.stdin is not None
    child.stdin.write(text + "\n")
    child.stdin.flush()


@pytest.mark.long
def test_killed_at_any_moment_a_driver_loses_nothing_it_confirmed(tmp_path: Path) -> None:
    """Killed after a number of confirmations, at whatever it was doing, and succeeded at once."""
    rng = random.Random(1)
    there = (0, 0)
    for _ in range(4):
        with process(_DRIVER, str(tmp_path)) as child:
            lines = [line_of(child) for _ in range(rng.randint(5, 60))]
            child.send_signal(signal.SIGKILL)
            assert child.stdout is not None
            lines += [line for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        number, batch = map(int, lines[-1].split())
        assert (number, batch) > there
        clock = Clock()
        with opened(tmp_path, clock=clock) as checkpoint:
            there = found(checkpoint, number + 3)
            assert there >= (number, batch)
        assert clock.slept_s == 0.0
    assert {path.name for path in tmp_path.iterdir()} == {
        f.name for f in state_files(p.name for p in tmp_path.iterdir())
    }


def test_of_two_processes_that_start_together_one_works(tmp_path: Path) -> None:
    with process(_RIVAL) as one, process(_RIVAL) as other:
        for round_ in range(10):
            assert [line_of(child) for child in (one, other)] == ["ready", "ready"]
            for child in (one, other):
                tell(child, str(tmp_path / str(round_ // 2)))
            answers = [line_of(child) for child in (one, other)]
            worker, refused = (one, 1) if answers[0] == "works" else (other, 0)
            assert answers[1 - refused] == "works"
            assert answers[refused].startswith("refused another solve (")
            assert f"pid {worker.pid})" in answers[refused]
            for child in (one, other):
                tell(child, "go on")
        assert [line_of(child) for child in (one, other)] == ["ready", "ready"]
    assert [path.name for folder in tmp_path.iterdir() for path in folder.iterdir()] == []


@pytest.mark.long
def test_a_living_process_is_refused_by_name(tmp_path: Path) -> None:
    with process(_DRIVER, str(tmp_path)) as child:
        line_of(child)
        with pytest.raises(CheckpointRefused, match=f"pid {child.pid}"):
            opened(tmp_path, clock=Clock(on_sleep=lambda: _until_changed(tmp_path)), on_warning=ignored)


def _until_changed(folder: Path) -> None:
    """Returns after the next sign of life."""
    (lease,) = folder.glob("lease.*.json")
    before = lease.read_bytes()
    while lease.read_bytes() == before:
        os.sched_yield()
