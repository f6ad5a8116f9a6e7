"""What travels with a call of one task, and comes back: without what all calls of a search share."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from piper_ray.engine.chunks.tasks import Task, TaskKey

V = TypeVar("V")

Tasks = Mapping[TaskKey, Task]


@dataclass(frozen=True, eq=False)
class Parcel(Generic[V]):
    """Of ``task``. Within a process it is the value itself; pickled, it leaves out what is the task's."""

    task: Task
    value: V

    def open(self, tasks: Tasks) -> V:  # noqa: ARG002 - as a parcel that has travelled
        return self.value

    def __reduce__(self) -> tuple[Any, ...]:
        content = io.BytesIO()
        _Pickler(content, self.task).dump(self.value)
        return Travelled, (self.task.key, content.getvalue())


@dataclass(frozen=True)
class Travelled:
    """A parcel in another process. content: pickled."""

    key: TaskKey
    content: bytes

    def open(self, tasks: Tasks) -> Any:
        """tasks: those of this process."""
        return _Unpickler(io.BytesIO(self.content), tasks[self.key]).load()


def _parts(task: Task) -> list[object]:
    """What values of a task refer to, in the same order everywhere."""
    return [task, task.shape, task.tables, task.mixed, task.mixed.tables, *task.choices, task.tables.order]


class _Pickler(pickle.Pickler):
    def __init__(self, content: io.BytesIO, task: Task) -> None:
        super().__init__(content, pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(part): number for number, part in enumerate(_parts(task))}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, task: Task) -> None:
        super().__init__(content)
        self._parts = _parts(task)

    def persistent_load(self, number: Any) -> object:
        return self._parts[number]
