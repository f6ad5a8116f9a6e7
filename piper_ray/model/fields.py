"""Fields of dataclasses: values that are computed when they are first read, and all of them as plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

T = TypeVar("T")


class _Asked(NamedTuple):
    """The function that computes a value."""

    find: Callable[[], Any]


def when_asked(find: Callable[[], T]) -> T:
    """A placeholder for the result of ``find``, in a field that is ``on_demand``."""
    return cast(T, _Asked(find))


def on_demand(*names: str) -> Callable[[type[T]], type[T]]:
    """A decorator for dataclasses: the fields ``names`` may hold ``when_asked`` placeholders. Reading, comparing or
    pickling such a field computes its value."""

    def decorate(of: type[T]) -> type[T]:
        for name in names:
            setattr(of, name, _Field(name))
        setattr(of, "__getstate__", _found)  # noqa: B010 - mypy knows of no other state
        return of

    return decorate


class _Field:
    """Keeps the value, or the function that computes it, under the field's own name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        kept = vars(instance)
        if isinstance(kept[self._name], _Asked):
            kept[self._name] = kept[self._name].find()
        return kept[self._name]

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self._name] = value


def _found(instance: object) -> dict[str, Any]:
    return {name: getattr(instance, name) for name in vars(instance)}


def plain_fields(value: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """These fields and properties of an object, ready for ``json.dump``. names: None for all fields of a dataclass."""
    listed = [field.name for field in dataclasses.fields(value)] if names is None else names
    return {name: plain_data(getattr(value, name)) for name in listed}


def plain_data(value: object) -> object:
    """Dataclasses as objects, enums as their values; JSON has no infinity, which becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_fields(value)
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
