"""A checkpoint keeps what it said it kept, and leaves nothing behind but the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from piper_ray.engine.checkpoint import Checkpoint, Identity
from piper_ray.engine.checkpoint.checkpoint import LEVELS_EVERY_S
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import CheckpointLost, CheckpointRefused
from piper_ray.storage.folder import LEASE, LEVELS, OUTCOMES, DriverFile, LocalFolder, StateFile, state_files
from piper_ray.storage.lease import Owner
from tests.checkpoint_support import (
    LEASE_THREAD,
    Clock,
    ObjectStore,
    ignored,
    key,
    levels,
    opened,
    outcome,
    record,
    recorded,
    same_levels,
)
from tests.instances import equal_chain


def files(folder: Path, kind: str | None = None) -> list[StateFile]:
    """Newest first."""
    found = state_files(path.name for path in folder.iterdir())
    return [file for file in found if kind in (None, file.kind)]


def record_levels(checkpoint: Checkpoint, clock: Clock, number: int, size: int) -> None:
    clock.now_s += LEVELS_EVERY_S
    assert checkpoint.record_levels(key(number), lambda: levels(size))


def test_a_new_checkpoint_has_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "new") as checkpoint:
        assert recorded(checkpoint) == set()
        assert checkpoint.levels(key(0)) is None
    assert list((tmp_path / "new").iterdir()) == []


def test_what_is_recorded_is_there_again_and_again(tmp_path: Path) -> None:
    for number in range(5):
        with opened(tmp_path) as checkpoint:
            assert recorded(checkpoint) == set(range(number))
            record(checkpoint, number)
            assert recorded(checkpoint) == set(range(number + 1))
    with opened(tmp_path):
        pass
    with opened(str(tmp_path)) as checkpoint:
        assert recorded(checkpoint) == set(range(5))


def test_levels_serve_their_own_evaluation_until_its_answer_is_there(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as checkpoint:
        record_levels(checkpoint, clock, 1, 10)
        record_levels(checkpoint, clock, 1, 20)
    with opened(tmp_path, clock=clock) as checkpoint:
        assert checkpoint.levels(key(0)) is None
        assert same_levels(checkpoint.levels(key(1)), levels(20))
        record_levels(checkpoint, clock, 1, 30)
    with opened(tmp_path) as checkpoint:
        assert same_levels(checkpoint.levels(key(1)), levels(30))
        record(checkpoint, 1)
        assert checkpoint.levels(key(1)) is None
        assert files(tmp_path, LEVELS) == []
    with opened(tmp_path) as checkpoint:
        assert checkpoint.levels(key(1)) is None


def test_levels_of_the_next_evaluation_stay_when_the_last_answer_is_written_late(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as checkpoint:
        record_levels(checkpoint, clock, 1, 10)
        checkpoint.record_outcome(key(1), outcome(1))
        record_levels(checkpoint, clock, 2, 20)
        record(checkpoint, 0)
    with opened(tmp_path) as checkpoint:
        assert recorded(checkpoint) == {0, 1}
        assert same_levels(checkpoint.levels(key(2)), levels(20))


def test_only_the_newest_file_and_the_one_before_are_kept(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as checkpoint:
        for number in range(5):
            record(checkpoint, number)
            record_levels(checkpoint, clock, 9, number)
    with opened(tmp_path, clock=clock) as checkpoint:
        record(checkpoint, 5)
        assert [file.age for file in files(tmp_path)] == [(2, 1), (1, 10), (1, 9), (1, 8)]
    (tmp_path / "notes.txt").touch()
    with opened(tmp_path, clock=clock) as checkpoint:
        record(checkpoint, 9)
    assert [file.age for file in files(tmp_path)] == [(3, 1), (2, 1)]
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:0],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
        lambda content: bytes(len(content)),
        lambda content: content + b" ",
    ],
)
def test_a_damaged_file_is_told_and_the_one_before_is_used(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as checkpoint:
        record(checkpoint, 0, 1, 2)
        record_levels(checkpoint, clock, 9, 10)
        record_levels(checkpoint, clock, 9, 20)
    newest = [files(tmp_path, OUTCOMES)[0], files(tmp_path, LEVELS)[0]]
    for file in newest:
        path = tmp_path / file.name
        path.write_bytes(damage(path.read_bytes()))
    told: list[str] = []
    with opened(tmp_path, on_warning=told.append) as checkpoint:
        assert recorded(checkpoint) == {0, 1}
        assert same_levels(checkpoint.levels(key(9)), levels(10))
        assert told == [
            f"{file.name} of the checkpoint at {tmp_path} is damaged; what was saved before it is used"
            for file in newest
        ]
        record(checkpoint, 2)
        assert not {path.name for path in tmp_path.iterdir()} & {newest[0].name, newest[1].name}
    with opened(tmp_path) as checkpoint:
        assert recorded(checkpoint) == {0, 1, 2}


def test_with_all_files_damaged_the_solve_starts_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpoint:
        record(checkpoint, 0, 1)
    for path in tmp_path.iterdir():
        path.write_bytes(b"\0")
    told: list[str] = []
    with opened(tmp_path, on_warning=told.append) as checkpoint:
        assert recorded(checkpoint) == set()
        record(checkpoint, 3)
    assert len(told) == 2
    with opened(tmp_path) as checkpoint:
        assert recorded(checkpoint) == {3}


@pytest.mark.parametrize("with_outcome", [True, False])
def test_another_input_is_refused_and_nothing_touched(tmp_path: Path, with_outcome: bool) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as checkpoint:
        if with_outcome:
            record(checkpoint, 0)
        else:
            record_levels(checkpoint, clock, 0, 5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = Identity.of(equal_chain(3, devices=1024), Restrictions())
    with pytest.raises(CheckpointRefused, match=rf"{tmp_path} is of another input: devices 4 there, 1024 here"):
        opened(tmp_path, identity=other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == LEASE_THREAD]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind_but_the_answers(tmp_path: Path, error: type[BaseException] | None) -> None:
    def solve() -> None:
        with opened(tmp_path) as checkpoint:
            assert len(threads()) == 1
            assert len(list(tmp_path.iterdir())) == 1
            record(checkpoint, 0)
            if error is not None:
                raise error

    if error is None:
        solve()
    else:
        with pytest.raises(error):
            solve()
    assert threads() == []
    assert [path.name for path in tmp_path.iterdir()] == [file.name for file in files(tmp_path, OUTCOMES)]


def test_a_refused_driver_leaves_nothing_behind(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpoint:
        record(checkpoint, 0)
        before = sorted(tmp_path.iterdir())

        def refused() -> None:
            clock = Clock(on_sleep=checkpoint._lease.beat)
            with pytest.raises(CheckpointRefused, match=f"another solve \\({Owner.current()}\\) works on this"):
                opened(tmp_path, clock=clock, on_warning=ignored)

        refused()
        assert len(threads()) == 1
        assert sorted(tmp_path.iterdir()) == before
        record(checkpoint, 1)


def test_a_driver_that_was_taken_over_writes_no_more(tmp_path: Path) -> None:
    """It gave no sign of life while the other one waited."""
    first = opened(tmp_path)
    record(first, 0, 1)
    told: list[str] = []
    second = opened(tmp_path, on_warning=told.append)
    assert "may still be working" in told[0]
    assert recorded(second) == {0, 1}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointLost, match=f"another solve \\({Owner.current()}\\) has taken over"):
        first.record_outcome(key(2), outcome(2))
    assert sorted(tmp_path.iterdir()) == before
    first.close()
    assert sorted(tmp_path.iterdir()) == before
    record(second, 3)
    second.close()
    with opened(tmp_path) as checkpoint:
        assert recorded(checkpoint) == {0, 1, 3}


def test_levels_too_are_not_written_after_another_driver_took_over(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as checkpoint:
        owner = replace(Owner.current(), host="elsewhere")
        LocalFolder(str(tmp_path)).put(DriverFile(LEASE, 2, "0" * 32).name, owner.encode(1), durable=False)
        with pytest.raises(CheckpointLost, match="elsewhere"):
            record_levels(checkpoint, clock, 0, 5)
    assert [path.name for path in tmp_path.iterdir()] == [DriverFile(LEASE, 2, "0" * 32).name]


def test_answers_written_between_the_look_and_the_lease_are_read(tmp_path: Path) -> None:
    """The first driver's last write comes while the second waits for it to end."""
    first = opened(tmp_path)
    record(first, 0)

    def finish() -> None:
        record(first, 1)
        first.close()

    with opened(tmp_path, clock=Clock(on_sleep=finish), on_warning=ignored) as second:
        assert recorded(second) == {0, 1}


def test_files_that_vanish_while_they_are_read_are_looked_for_anew() -> None:
    """A driver at work deletes old files. The reader is another one, which has not got the lease yet."""
    store = ObjectStore()
    first = opened("bucket", filesystem=store.filesystem)
    record(first, 0, 1)

    def overtaken(operation: str, key_: str) -> None:
        if operation == "get" and OUTCOMES in key_:
            store.before = ObjectStore.before
            record(first, 2, 3)
            first.close()

    store.before = overtaken
    with opened("bucket", filesystem=store.filesystem) as second:
        assert recorded(second) == {0, 1, 2, 3}
