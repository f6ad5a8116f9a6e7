"""Reads files: bytes, text, and the JSON and TOML documents in them. Every failure becomes a fault.

``advice`` recognises documents of other kinds than the expected one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from piper_ray.model import limits
from piper_ray.model.errors import Fault, InputError
from piper_ray.storage.files import kind_unless_file
from piper_ray.workloads.formats.faults import path_of, quoted, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DEEPEST = 100  # levels; no workload has ten
_DEEP_KEY = re.compile(
    r"""(?<![\w.-])(?:(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')[ \t]*\.[ \t]*){%d}""" % _DEEPEST  # noqa: UP031 - braces
)
_LONGEST_INTEGER = 400  # digits; beyond every float, and below the limit at which Python refuses to convert


class _RepeatedKeys(dict[str, object]):
    """A JSON object with duplicate keys. The last value counts, and the keys are noted."""

    keys_given_twice: tuple[str, ...] = ()


def read_text(path: str) -> str:
    """The text of a file, without its byte order mark. Raises InputError, also for paths whose reading might never
    end."""
    try:
        kind = kind_unless_file(path)
        if kind is not None:
            refuse(path, "", f"is {kind}: reading it could wait for ever; expected a file")
        with Path(path).open("rb") as file:
            data = file.read(limits.FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        refuse(path, "", f"cannot be read: {reason}; expected a readable file")
    if len(data) > limits.FILE_BYTES:
        refuse(path, "", f"larger than {limits.FILE_BYTES // 2**20} MiB; expected a smaller file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(path, f"byte {error.start}", f"not UTF-8 ({error.reason}); expected UTF-8 text")
    if not text.strip():
        refuse(path, "", "empty; expected a workload")
    return text


def parse_json(source: str, text: str) -> Mapping[str, object]:
    """The object that a JSON text holds. Raises InputError, also for keys given twice."""
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        end = "; the text ends there, is the file truncated?" if error.pos >= len(text.rstrip()) else ""
        refuse(source, f"line {error.lineno}, column {error.colno}", f"not JSON: {error.msg}{end}")
    except RecursionError:
        refuse(source, "", "nested too deeply; expected a workload or plan")
    return as_document(source, document)


def parse_toml(source: str, text: str) -> Mapping[str, object]:
    """The table that a TOML text holds. Raises InputError."""
    for number, line in enumerate(text.splitlines(), 1):
        # The time of Python's parser for a key is the product of its levels and those of all keys before it.
        if line.count(".") > _DEEPEST and _DEEP_KEY.search(line) is not None:
            refuse(
                source,
                f"line {number}",
                f"nested too deeply: a key of more than {_DEEPEST} levels; expected a workload",
            )
    try:
        document = tomllib.loads(text)
    except RecursionError:
        refuse(source, "", "nested too deeply; expected a workload")
    except ValueError as error:  # a TOMLDecodeError, or an integer too long to convert
        refuse(source, "", f"not TOML: {error}")
    return as_document(source, document)


@cache
def package_table(package: str, name: str) -> Mapping[str, Any]:
    """The TOML table of a file that is part of a package."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def with_bases(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows by their keys, each with what the row that it names as its ``base`` says besides."""
    return {key: {**rows.get(str(row.get("base")), {}), **row} for key, row in rows.items()}


def as_document(source: str, document: object) -> Mapping[str, object]:
    """``document`` if it is an object whose keys and values are printable texts. Raises InputError."""
    if not isinstance(document, Mapping):
        refuse(source, "", f"holds {shown(document)}; expected an object")
    faults = []
    for place, container in _containers(document):
        if place.depth > _DEEPEST:
            refuse(source, "", "nested too deeply; expected a workload or plan")
        if isinstance(container, Mapping):
            faults += [
                Fault(place.path(), f"key {shown(key)} is no printable text; expected a text")
                for key in container
                if not is_printable(key)
            ]
        values = container.values() if isinstance(container, Mapping) else container
        faults += [
            Fault(place.path(), f"{quoted(value)} holds half a surrogate pair; expected Unicode text")
            for value in values
            if isinstance(value, str) and not is_printable(value)
        ]
    if faults:
        raise InputError(source, faults)
    return document


def merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """``below`` with entries replaced by those of ``above``; tables are merged entry by entry."""
    entries = dict(below)
    for key, value in above.items():
        old = below.get(key)
        entries[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return entries


def repeated_keys(document: Mapping[str, object]) -> list[Fault]:
    """A fault for each duplicate key of an object in a parsed JSON document."""
    return [
        Fault(path_of(place.path(), key), "duplicate key; expected each key once")
        for place, container in _containers(document)
        if isinstance(container, _RepeatedKeys)
        for key in container.keys_given_twice
    ]


class _Place(NamedTuple):
    """The position of a container. Its path is only put together for a fault, because large documents have a million
    positions."""

    outer: _Place | None
    key: object
    depth: int

    def path(self) -> str:
        parts: list[int | str] = []
        place = self
        while place.outer is not None:
            parts.append(place.key if isinstance(place.key, int) else str(place.key))
            place = place.outer
        return path_of("", *reversed(parts))


def _containers(document: Mapping[str, object]) -> Iterator[tuple[_Place, Mapping[str, object] | Sequence[object]]]:
    """Every object and list of ``document``, without recursion, because documents may be deep."""
    visited: set[int] = set()  # a caller's dict may contain itself
    waiting: list[tuple[_Place, Mapping[str, object] | Sequence[object]]] = [(_Place(None, "", 0), document)]
    while waiting:
        place, container = waiting.pop()
        if id(container) in visited:
            continue
        visited.add(id(container))
        yield place, container
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        inner = [(key, item) for key, item in items if isinstance(item, (dict, list, tuple, Mapping))]
        waiting += [(_Place(place, key, place.depth + 1), item) for key, item in reversed(inner)]


def is_printable(text: object) -> bool:
    """Whether the value is a text that can be encoded as UTF-8: without lone surrogates."""
    try:
        return isinstance(text, str) and text.encode() is not None
    except UnicodeEncodeError:
        return False


def refuse(source: str, path: str, message: str) -> NoReturn:
    """Raises InputError with a single fault, at ``path`` of ``source``."""
    raise InputError(source, [Fault(path, message)])


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    repeated = _RepeatedKeys(plain)
    seen: set[str] = set()
    twice = [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
    repeated.keys_given_twice = tuple(dict.fromkeys(twice))
    return repeated


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)


HUGGING_FACE = "a Hugging Face config: `piper-ray estimate FILE --gpu NAME --nodes COUNT` makes a workload of it"

_SWEEP = frozenset({"workloads", "grid", "points"})
_WORKLOAD = frozenset({"types", "layers", "nodes", "edges"})
_CONFIG = frozenset({"model_type", "architectures", "num_hidden_layers", "transformers_version"})


def advice(document: Mapping[str, object]) -> str | None:
    """What the document is, such as "a plan: `piper-ray verify INPUT PLAN` checks it"; None if it is not recognised."""
    if _CONFIG & document.keys():
        return HUGGING_FACE
    if "stages" in document or document.get("schema") == "piper-ray/solution":
        return "a plan: `piper-ray verify INPUT PLAN` checks one, `simulate` and `report` show what it does"
    if _SWEEP & document.keys():
        return "a sweep: `piper-ray sweep FILE --storage DIR` solves its points"
    if _WORKLOAD & document.keys():
        return "a workload: `piper-ray solve FILE` plans it"
    schema = document.get("schema")
    if isinstance(schema, str) and schema.startswith("piper-ray/"):
        return f"what piper-ray {schema.removeprefix('piper-ray/')} wrote"
    return None
