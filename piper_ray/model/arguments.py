"""Checks of the values that callers pass to public functions and dataclasses. A wrong value raises a UsageError that
says what to pass."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from enum import Enum
from reprlib import Repr
from typing import TypedDict, TypeVar, cast

from piper_ray.model import limits
from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.units import as_tuple, figure, parse_bytes, parse_bytes_per_s, parse_seconds, plain

Choice = TypeVar("Choice", bound=Enum)

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A value as an error shows it, clipped."""
    return _SHORT.repr(value)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """``; did you mean megatron?`` if ``given`` resembles a known name or begins some of them; otherwise an empty
    text."""
    by_lower = {name.lower(): name for name in known}
    lower = given.lower()
    begun = [name for name in by_lower if len(lower) > 1 and name.startswith(lower)]
    found = begun or get_close_matches(lower, by_lower, n=1)
    *others, last = [by_lower[name] for name in found] or [""]
    return f"; did you mean {' or '.join(filter(None, (', '.join(others), last)))}?" if last else ""


def whole(value: object) -> int | None:
    """A whole number, also one of numpy, as an int; None for any other value. 8.0 and True are not whole numbers."""
    value = plain(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """A number, also one of numpy, as a float; None for any other value and for a number too large for a float."""
    found = figure(value)
    return found if isinstance(found, float) else None


def positive(name: str, value: object) -> int:
    """A whole number of at least 1. Raises UsageError."""
    found = whole(value)
    if found is None:
        raise UsageError(f"{name} must be a whole number of at least 1, not {shown(value)}")
    if found < 1:
        raise UsageError(f"{name} must be at least 1, not {found}")
    return found


def positive_or_none(name: str, value: object) -> int | None:
    """The same as ``positive``, but None is allowed. Raises UsageError."""
    return None if value is None else positive(name, value)


def number_from(name: str, value: object, least: float, expected: str) -> float:
    """A finite number of at least ``least``. expected: the error's words for such a number. Raises UsageError."""
    found = number(value)
    if found is None or not least <= found < math.inf:
        raise UsageError(f"{name} must be {expected}, not {shown(value)}")
    return found


def whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """Whole numbers, also those of numpy, as a tuple. Raises UsageError for anything else."""
    given = as_tuple(values)
    found = tuple(value for value in map(whole, given if isinstance(given, tuple) else ()) if value is not None)
    if not isinstance(given, tuple) or len(found) < len(given):
        raise UsageError(f"{name} must be whole numbers, such as [8, 16, 32], not {shown(values)}")
    return found


def degrees(name: str, values: object) -> tuple[int, ...]:
    """Whole numbers of at least 1 in ascending order, without repetition. Raises UsageError."""
    return tuple(sorted({positive(name, value) for value in whole_numbers(name, values)}))


def flag(name: str, value: object) -> bool:
    """Raises UsageError unless the value is True or False."""
    value = plain(value)
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {shown(value)}")
    return value


def choice(name: str, value: object, kind: type[Choice]) -> Choice:
    """A member of ``kind``, passed as a member or as its text. Raises UsageError."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        meant = did_you_mean(value, known.split(", ")) if isinstance(value, str) else ""
        raise UsageError(f"{name} {shown(value)} is unknown; expected one of {known}{meant}") from None


def location(name: str, value: object, expected: str = "a path") -> str:
    """A path, or a URI, as text. Raises UsageError."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise UsageError(f"{name} must be {expected}, not {shown(value)}")
    return os.fsdecode(value)


def of_kind(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises UsageError unless the value is of that kind."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} must be {expected}, not {shown(value)}")


def function(name: str, value: object) -> None:
    """Raises UsageError unless the value can be called."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, not {shown(value)}")


def seconds(name: str, value: object) -> float:
    """A length of time: a number of seconds, or a text such as "10m". Raises UsageError."""
    found = parse_seconds(value) if isinstance(value, str) else number(value)
    if found is None or not (math.isfinite(found) and found > 0):
        raise UsageError(f"{name} must be a positive number of seconds, not {shown(value)}")
    return found


def size(name: str, value: object) -> float:
    """A number of bytes, or a text such as "8GiB". Raises UsageError."""
    found = parse_bytes(value, unit_required=True) if isinstance(value, str) else number(value)
    if found is None or not found > 0:
        raise UsageError(f"{name} must be a positive number of bytes, not {shown(value)}")
    return found


class ClusterFigures(TypedDict, total=False):
    """The figures K, N, M and B that the caller gave; the others are absent."""

    devices: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float


_COUNTS = {"devices": limits.DEVICES, "microbatches": limits.MICROBATCHES}


def cluster_figures(
    devices: object, microbatches: object, memory_bytes: object, bandwidth_bytes_per_s: object
) -> ClusterFigures:
    """K, N, M and B that replace an instance's own. Sizes are numbers or texts such as "8GiB"; None keeps the
    instance's.

    Raises UsageError with all that is wrong.
    """
    given = {
        "devices": devices,
        "microbatches": microbatches,
        "memory_bytes": memory_bytes,
        "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
    }
    found: dict[str, int | float] = {}
    wrong = []
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, str) and name not in _COUNTS:
            parse = parse_bytes if name == "memory_bytes" else parse_bytes_per_s
            try:
                value = parse(value, unit_required=True)
            except UsageError as error:
                wrong.append(f"{name}: {error}")
                continue
        read = whole(value) if name in _COUNTS else number(value)
        least, most = (1, _COUNTS[name]) if name in _COUNTS else (limits.LEAST_RATE, limits.FIGURE)
        if read is not None and least <= read <= most:
            found[name] = read
            continue
        expected = f"a whole number from 1 to {most}" if name in _COUNTS else "a finite number > 0, or a text as 8GiB"
        if read is None:
            wrong.append(f"{name} must be {expected}, not {shown(value)}")
        else:
            wrong.append(f"{name} {shown(value)} is out of range; expected {expected}")
    if wrong:
        raise UsageError("; ".join(wrong))
    return cast(ClusterFigures, found)


_OPTION = re.compile(r"(?<![\w-])(?<!estimate )(?<!solve )--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
"""Matches the command's own options. An option of another command is written after that command's name, and is
skipped."""


_RENAMED = {"batch": "global_batch", "microbatch": "microbatch_size", "micro_batch_size": "microbatch_size"}
"""Names of parameters by their former names, and by Megatron's."""

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


@contextmanager
def named_as_parameters(others: Mapping[str, str]) -> Iterator[None]:
    """A context for functions that share their work with a command. Errors name the command's options; inside this
    context they name the parameters instead. It raises UsageError and LimitError anew, and a TypeError with advice for
    a parameter's former name.

    others: parameters by options that have another name, such as ``{"reserve": "reserve_bytes"}``.
    """
    try:
        yield
    except (UsageError, LimitError) as error:
        if type(error) not in (UsageError, LimitError):
            raise
        text = _OPTION.sub(lambda found: others.get(found[1], found[1].replace("-", "_")), str(error))
        raise type(error)(text) from error.__cause__
    except TypeError as error:
        former = _UNEXPECTED.search(str(error))
        if former is None or former[1] not in _RENAMED:
            raise
        raise TypeError(f"{error}; did you mean {_RENAMED[former[1]]!r}?") from None
