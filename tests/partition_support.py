"""Partitions in this process, one after the other: the plain twin of those on machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from piper_ray.engine import preparation, wide_layers
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.partition.partition import Partition
from piper_ray.engine.partition.setting import PartitionSetting
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Event, Note
from piper_ray.model.solution import Solution


class HereCrew:
    """As ``Crew``: what is asked for is done at once, and stands for itself."""

    def __init__(self, setting: PartitionSetting, partitions: int, room: int = 10**6, threads: int = 1) -> None:
        self.partitions, self.room = partitions, partitions * room
        self.work = LocalBackend(threads)
        self.members = [Partition(setting, number, partitions, room, self.work) for number in range(partitions)]
        self.asked: list[tuple[int, str]] = []

    def ask(self, partition: int, method: str, *arguments: object, answers: int = 1) -> Any:
        self.asked.append((partition, method))
        found = getattr(self.members[partition], method)(*arguments)
        if answers > 1:
            assert len(found) == answers
        return found

    def get(self, answers: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        check()
        return list(answers)

    def close(self) -> None:
        self.work.close()


class Log:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)


@contextmanager
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if only the downsets of a chain fitted here."""

    def refused(*_: object, **__: object) -> None:
        raise LimitError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "lattice_within", refused)
        patch.setattr(wide_layers, "_room", lambda _, outline: outline.graph.size + 1)
        yield


def same_result(one: Solution, other: Solution) -> bool:
    """But for what it took."""
    return (one.status, one.time_per_sample_s, one.lower_bound_s, one.plan, one.stopped_by) == (
        other.status,
        other.time_per_sample_s,
        other.lower_bound_s,
        other.plan,
        other.stopped_by,
    )
