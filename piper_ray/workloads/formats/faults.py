"""Collects faults: pydantic's and our own, in one list with paths that a reader can look up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import isclass
from typing import Any, TypeVar, get_args, get_origin

from pydantic import AliasChoices, BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from piper_ray.model.errors import Fault

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

# Tags for values that may be one figure or a list of them; pydantic puts the tag into the path.
ONE, MANY = "<one>", "<many>"

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{,59}")
_PROBLEM = {
    "missing": "missing",
    "finite_number": "not finite",
    "float_type": "not a number",
    "int_type": "not a whole number",
    "string_type": "not a text",
    "bool_type": "neither true nor false",
    "list_type": "not a list",
    "dict_type": "not an object",
    "model_type": "not an object",
    "extra_forbidden": "unknown key",
    "too_short": "empty",
}


class Words(str):
    """The words by which faults describe the expected kind of a value. They stand in the annotation of the kind."""

    __slots__ = ()


class Faults:
    """The faults found so far. ``at`` adds one; ``model`` and ``value`` add those that pydantic finds.

    notes: remarks on valid values, such as a figure that most likely lacks its unit.
    """

    def __init__(self, found: Iterable[Fault] = ()) -> None:
        self.found: list[Fault] = list(found)
        self.notes: list[Fault] = []

    def __bool__(self) -> bool:
        return bool(self.found)

    def at(self, path: str, message: str) -> None:
        self.found.append(Fault(path, message))

    def note(self, path: str, message: str) -> None:
        self.notes.append(Fault(path, message))

    def model(self, model: type[Model], value: object, path: str) -> Model | None:
        """``value`` as a ``model``; None, with the faults noted, if it is not valid."""
        return self._read(model, lambda: model.model_validate(value), path)

    def model_of_json(self, model: type[Model], text: str) -> Model | None:
        """The same from a document's text, where lists may stand for tuples, and texts for members of enums."""
        return self._read(model, lambda: model.model_validate_json(text), "")

    def _read(self, model: type[Model], validate: Callable[[], Model], path: str) -> Model | None:
        try:
            return validate()
        except ValidationError as error:
            self._note(error, path, model, "an object")
            return None

    def value(self, adapter: TypeAdapter[T], value: object, path: str, expected: str) -> T | None:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            self._note(error, path, None, expected)
            return None

    def _note(self, error: ValidationError, path: str, model: type[BaseModel] | None, otherwise: str) -> None:
        for found in error.errors(include_url=False, include_context=False):
            where = [part for part in found["loc"] if part not in (ONE, MANY)]
            expected, known = _expected_at(model, where)
            if found["type"] == "extra_forbidden":
                expected = "one of " + ", ".join(known)
            elif found["type"] == "model_type":
                expected = "an object"
            told = found["type"] == "missing" and expected is None  # the words for a key do not describe its object
            words = "" if told else f"; expected {expected or otherwise}"
            self.at(path_of(path, *where), _problem(found) + words)


def _expected_at(model: type[BaseModel] | None, where: Sequence[int | str]) -> tuple[str | None, Iterable[str]]:
    """The words for the expected value at a path in a model, if known, and the names in the innermost model around
    it."""
    expected, fields = None, _fields_of(model)
    for part in where:
        field = fields.get(str(part))
        if field is not None:
            expected, inner = _expected(field), _model_in(field.annotation)
            fields = fields if inner is None else _fields_of(inner)
    return expected, [name for name, field in fields.items() if _expected(field)]


def _fields_of(model: type[BaseModel] | None) -> Mapping[str, FieldInfo]:
    """The fields of a model, by the names that a document may give them."""
    fields = {} if model is None else model.model_fields
    return {name: field for key, field in fields.items() for name in names_of(key, field)}


def _model_in(kind: Any) -> type[BaseModel] | None:
    """The model of a field's value, or of its items."""
    if isclass(kind) and get_origin(kind) is None:
        return kind if issubclass(kind, BaseModel) else None
    return next(filter(None, map(_model_in, get_args(kind))), None)


def names_of(key: str, field: FieldInfo) -> list[str]:
    """The names that a document may use for the field with this key."""
    choices = field.validation_alias
    return [str(name) for name in choices.choices] if isinstance(choices, AliasChoices) else [field.alias or key]


def _expected(field: FieldInfo) -> str | None:
    """A field's description, or the words of its kind, also if the field is optional."""
    kinds = [field.metadata, *(getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))]
    words = (str(item) for kind in kinds for item in kind if isinstance(item, Words))
    return field.description or next(words, None)


def path_of(path: str, *parts: int | str) -> str:
    """Appends keys and indices to a path: ``nodes`` and (3, "TMPCs", "2") give ``nodes[3].TMPCs["2"]``."""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            path += f".{part}" if path else part
        else:
            path += f"[{quoted(part)}]"
    return path


def quoted(text: str) -> str:
    """``text`` in quotes, shortened, with unprintable characters escaped."""
    clipped = text if len(text) <= 60 else text[:57] + "..."
    inner = "".join(character if character.isprintable() else repr(character)[1:-1] for character in clipped)
    return '"' + inner.replace('"', '\\"') + '"'


def shown(value: object) -> str:
    """A value as a fault shows it. Containers are only named, because printing a deep one could overflow the stack."""
    if isinstance(value, str):
        return quoted(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a huge number"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"a {type(value).__name__}"


def _problem(found: Any) -> str:
    """What is wrong with a value, in words: ``negative (-1.0)``."""
    kind, value = found["type"], found["input"]
    if kind in ("missing", "extra_forbidden", "too_short"):
        return _PROBLEM[kind]
    if kind == "value_error":
        return str(found["msg"]).removeprefix("Value error, ")
    if kind.startswith("greater_than"):
        problem = "negative" if value < 0 else "zero" if value == 0 else "too small"
    elif kind.startswith("less_than"):
        problem = "too large"
    else:
        problem = _PROBLEM.get(kind, str(found["msg"]))
    if isinstance(value, int) and not isinstance(value, bool) and kind == "float_type":
        problem = "too large"  # an integer beyond every float
    return f"{problem} ({shown(value)})"
