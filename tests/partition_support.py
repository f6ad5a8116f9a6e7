"""Partitions in this process, one after the other: the plain twin of those on machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.partition.partition import Partition
from piper_ray.engine.partition.setting import PartitionSetting


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
