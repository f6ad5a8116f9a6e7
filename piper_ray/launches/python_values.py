"""Objects that a configuration in Python makes, as far as its text says what they are."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from piper_ray.launches.unseen import unseen


@dataclass
class Made:
    """What a call makes, or a name that stands for something elsewhere. name: with its dots, as it is written.

    fields: what it is given by name, and what is set on it afterwards.
    """

    name: str
    arguments: tuple[object, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)
    is_called: bool = True

    def under(self, name: str) -> object:
        """A field; one that nobody has set is an object that fields can be set on."""
        if name not in self.fields:
            if not self.is_called:
                return Made(f"{self.name}.{name}", is_called=False)
            self.fields[name] = Made(f"{self.name}.{name}", is_called=False)
        return self.fields[name]


def as_document(value: object) -> object:
    """The value as a document of plain tables. A name that stands for something elsewhere is its text."""
    if isinstance(value, Made):
        if not value.fields:
            return value.name if not value.is_called else {"made_by": value.name, "arguments": list(value.arguments)}
        named = {"made_by": value.name, "arguments": list(value.arguments)} if value.is_called else {}
        return {name: as_document(one) for name, one in value.fields.items()} | named
    if isinstance(value, Mapping):
        return {str(name): as_document(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_document(one) for one in value]
    return value


def either(one: object, other: object, line: int) -> object:
    """What a value is after one of two ways, where nobody knows which is gone. line: of the condition."""
    if isinstance(one, Made) and isinstance(other, Made) and one.name == other.name:
        names = dict.fromkeys((*one.fields, *other.fields))
        kept = {name: either(one.fields.get(name, _MISSING), other.fields.get(name, _MISSING), line) for name in names}
        one.fields = {name: value for name, value in kept.items() if value is not _MISSING}
        return one
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {name: either(value, other[name], line) for name, value in one.items()}
    if type(one) is type(other) and one == other:
        return one
    return unseen(f"a value that depends on line {line}")


_MISSING = object()


def copied(variables: Mapping[str, object]) -> dict[str, object]:
    """Variables with all that hangs on them, which can change alone."""
    return deepcopy(dict(variables))
