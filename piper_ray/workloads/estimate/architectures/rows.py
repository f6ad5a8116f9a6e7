"""Configs that rows of the table of families (``families.toml``) describe; the table says what a row may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from inspect import signature
from math import prod
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from pydantic import AliasChoices, ConfigDict, Field, create_model

from piper_ray.model.fields import when_asked
from piper_ray.workloads.estimate.architectures import rules
from piper_ray.workloads.estimate.families import KINDS, Config
from piper_ray.workloads.formats.documents import package_table

TABLES = ("keys", "paths", "defaults")
"""The entries of a row that are tables. All others, except ``like``, are facts."""

_NUMBERS: Mapping[str, Callable[[Iterable[float]], float]] = {"product": prod, "sum": sum}
"""What a fact may compute from several numbers."""

Row = Mapping[str, Any]
Made = TypeVar("Made")
Read = TypeVar("Read", bound=Config)
Rowed = TypeVar("Rowed", bound="RowConfig")


class RowConfig(Config):
    """A config that a row describes."""

    model_config = ConfigDict(defer_build=True)  # most are never read in one run

    row: ClassVar[Row] = {}

    def named(self, name: str, layer: int | None = None) -> Any:
        """The value of the key, or else of the fact, with this name; for a layer if it depends on layers."""
        if name == "layer":
            return layer
        if name in self.row and name not in type(self).model_fields:
            return self.value(self.row[name], layer)
        return attrgetter(name)(self)

    def value(self, fact: Any, layer: int | None = None) -> Any:
        """The value of a row's fact."""
        if isinstance(fact, str):
            return self.named(fact, layer)
        if isinstance(fact, list):
            values = (self.value(one, layer) for one in fact)
            return next((value for value in values if value is not None), None)
        if not isinstance(fact, Mapping):
            return fact
        if "if" in fact:
            return self.value(fact.get("then" if self.named(fact["if"], layer) else "else"), layer)
        for kind, taken in _NUMBERS.items():
            if kind in fact:
                return int(taken(self.value(one, layer) for one in fact[kind]))
        if "by" not in fact:
            return fact.get("text")
        rule = getattr(rules, fact["by"])
        return rule(**{name: self.named(name, layer) for name in _parameters(rule)})

    def rules_of(self, kind: Callable[..., Made], **others: Any) -> Made:
        """The rules of a kind: those of the row, each with the type of its default, and the defaults of others."""
        usual: Any = kind()
        said = {
            field.name: type(getattr(usual, field.name))(self.named(field.name))
            for field in fields(usual)
            if field.name in self.row and field.name not in TABLES
        }
        return kind(**said, **others)


@cache
def _parameters(rule: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(signature(rule).parameters)


def table() -> Mapping[str, Mapping[str, Any]]:
    """The whole table."""
    return package_table("piper_ray.workloads.estimate", "families.toml")


def config_of(base: type[Rowed], section: str, name: str) -> type[Rowed]:
    """The class of the configs that a row describes, with what only the base has."""
    row = row_of(section, name)
    made = _with_keys(base, name, row["keys"])
    made.row, made.defaults = row, row["defaults"]
    return made


def config_when_asked(base: type[Rowed], section: str, name: str) -> type[Rowed]:
    """``config_of`` for a ``Family``, made when it is first read: a run reads one or two of more than a hundred."""
    return when_asked(partial(config_of, base, section, name))


def row_of(section: str, name: str) -> Row:
    """A row, completed by the rows that it is like, each of them once."""
    row: dict[str, Any] = {entry: {} for entry in TABLES}
    for own in dict(_line(section, name)).values():
        row |= {**own, **{entry: {**row[entry], **own.get(entry, {})} for entry in TABLES}}
    return row


def _line(section: str, name: str) -> Iterator[tuple[str, Row]]:
    """The names and contents of the rows that a row is like, and then of the row itself."""
    own = table()[section][name]
    for other in own.get("like", ()):
        yield from _line("bases" if other in table()["bases"] else section, other)
    yield name, own


def _with_keys(base: type[Read], name: str, keys: Row) -> type[Read]:
    declared: dict[str, Any] = {key: _field(key, said) for key, said in keys.items()}
    return create_model(name, __base__=base, **declared)


def _field(key: str, said: object) -> tuple[Any, Any]:
    """Type and default of a key."""
    entry: Row = said if isinstance(said, Mapping) else {"default": said}
    kind, names = entry.get("kind") or _kinds()[key], AliasChoices(*entry.get("names", [key]))
    if kind == "object":
        inner = _with_keys(Config, key, entry["keys"])
        return inner, Field(default_factory=inner, description="an object", validation_alias=names)
    optional = kind.endswith("?")
    annotation = KINDS[kind.rstrip("?")]
    otherwise = None if optional and not entry.get("required") else ...
    return annotation | None if optional else annotation, Field(entry.get("default", otherwise), validation_alias=names)


@cache
def _kinds() -> Mapping[str, str]:
    return {key: kind for kind, keys in table()["kinds"].items() for key in keys}
