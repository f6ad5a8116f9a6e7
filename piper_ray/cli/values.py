"""What options are given as: texts read as sizes, rates, times and degrees, and a command's options as texts again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection
from enum import Enum
from functools import partial
from typing import Any

import typer

from piper_ray.model.errors import UsageError
from piper_ray.model.units import parse_bytes, parse_bytes_per_s, parse_count


class _Given(float):
    """A number with the text that it was given as."""

    text: str


class NamedNumber(int):
    """A whole number that options call by a name."""

    name: str

    @classmethod
    def of(cls, number: int, name: str) -> NamedNumber:
        found = cls(number)
        found.name = name
        return found


class Several(tuple[Any, ...]):  # noqa: SLOT001 - tuples take no slots with values
    """The values of an option that takes several, with commas between, and the text that they were given as."""

    text: str


def several(parse: Callable[[str], Any], text: str) -> Several:
    """``bf16,fp8``. Raises UsageError."""
    found = Several(parse(part.strip()) for part in text.split(","))
    found.text = text.strip()
    return found


def _given(parse: Callable[[str], float], text: str) -> float:
    number = _Given(parse(text))
    number.text = text.strip()
    return number


parse_size = partial(_given, partial(parse_bytes, unit_required=True))
parse_rate = partial(_given, partial(parse_bytes_per_s, unit_required=True))

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"\s*(?P<number>\d+(\.\d*)?)\s*(?P<unit>ns|us|ms|s)\s*")


def parse_time(text: str) -> float:
    """``5us``, ``1.5ms``, ``2s``. Raises UsageError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no time; expected one such as 5us, 1.5ms or 2s")
    return float(match["number"]) * _UNITS_S[match["unit"]]


_COUNT_IN_TEXT = re.compile(r"\d+(\.\d+)?(Ki?|ki?|Mi?)")


def counts_text(text: str) -> str:
    """A list or range of numbers without the units in it: ``8..2k`` as ``8..2000``. Raises UsageError."""
    return _COUNT_IN_TEXT.sub(lambda match: str(parse_count(match[0])), text)


def parse_gap(text: str) -> float:
    """``0.01`` or ``1%`` as 0.01. Raises UsageError."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100.0 if number.endswith("%") else float(number)
    except ValueError:
        raise UsageError(f"{text!r} is not a gap; expected a share such as 0.01 or 1%") from None


def parse_degrees(option: str, text: str) -> tuple[int, ...]:
    """``1,2,4,8``, the value of ``option``. Raises UsageError."""
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise UsageError(f"{option}: {text!r} are not degrees; expected numbers such as 1,2,4,8") from None


def given(context: typer.Context) -> dict[str, object]:
    """The command's arguments and options that are not at their defaults, in the order of its help."""
    values = context.params
    return {
        str(parameter.name): values[str(parameter.name)]
        for parameter in context.command.params
        if values.get(str(parameter.name)) is not None
        and parameter.default not in (values[str(parameter.name)], _word(values[str(parameter.name)]))
    }


def command_text(context: typer.Context, hidden: Collection[str] = ()) -> str:
    """The command as it was given, options in the order of the help and without those at their defaults."""
    words = ["piper-ray", context.info_name or ""]
    parameters = {parameter.name: parameter for parameter in context.command.params}
    for name, value in given(context).items():
        if name in hidden:
            continue
        for one in (value,) if isinstance(value, Several) or not isinstance(value, (list, tuple)) else value:
            if parameters[name].param_type_name != "argument":
                words.append(parameters[name].opts[-1])
            if one is not True:
                words.append(_word(one))
    return shlex.join(words)


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (_Given, Several)):
        return value.text
    if isinstance(value, NamedNumber):
        return value.name
    return f"{value:.17g}" if isinstance(value, float) else str(value)
