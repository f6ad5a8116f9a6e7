"""Objects that a configuration in Python makes, as far as its text describes them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from piper_ray.launches.unseen import unseen


@dataclass
class Made:
    """The result of a call, or a name defined elsewhere. name: with its dots, as written.

    fields: keyword arguments, and attributes that are set afterwards.
    """

    name: str
    arguments: tuple[object, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)
    is_called: bool = True

    def under(self, name: str) -> object:
        """A field; a field that is not set becomes an object on which fields can be set."""
        if name not in self.fields:
            if not self.is_called:
                return Made(f"{self.name}.{name}", is_called=False)
            self.fields[name] = Made(f"{self.name}.{name}", is_called=False)
        return self.fields[name]


def as_document(value: object) -> object:
    """The value as a document of plain tables. A name defined elsewhere becomes its text."""
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
    """A value after one of two branches, when it is unknown which one ran. line: of the condition."""
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
    """A deep copy of variables, which can change independently."""
    return deepcopy(dict(variables))
