"""Options of commands, each declared once: as a field of a dataclass. A command takes such dataclasses; ``flat`` makes
of it the function with a parameter for each option that typer wants.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import MISSING, field, fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from piper_ray.model.errors import UsageError
from piper_ray.model.units import parse_bytes, parse_bytes_per_s, parse_count

Value = TypeVar("Value")

REQUIRED: Any = MISSING
"""As the default of an option that has to be given."""

_DECLARED = "typer"


def option(
    metavar: str | None,
    text: str,
    *names: str,
    default: Any = None,
    parse: Callable[[str], object] | None = None,
    **more: Any,
) -> Any:
    """A field that an option gives. metavar: None for a flag, and for a choice whose help is to list all there is.
    text: its help. names: ``--the-field`` if none are given. parse: its UsageError becomes a complaint that names the
    option. more: of ``typer.Option``."""
    own = typer.Option(*names, metavar=metavar, help=text, parser=parse and option_value(parse), **more)
    return field(default=default, kw_only=True, metadata={_DECLARED: own})


def flag(text: str, *names: str, **more: Any) -> Any:
    """A field that is True where the option is given."""
    return option(None, text, *names, **{"default": False} | more)


def argument(metavar: str, text: str, default: Any = REQUIRED) -> Any:
    """A field that an argument gives."""
    own = typer.Argument(metavar=metavar, help=text, show_default=False)
    return field(default=default, kw_only=True, metadata={_DECLARED: own})


class Without:
    """``Annotated[Options, Without("field")]``: a command takes all of these options but some."""

    def __init__(self, *names: str) -> None:
        self.names = names


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a parameter for each field of the dataclasses that it takes, in their order."""
    parameters: list[Parameter] = []
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        kind, *marks = (
            get_args(hints[parameter.name]) if _is_annotated(hints[parameter.name]) else [hints[parameter.name]]
        )
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        left_out = {name for mark in marks for name in mark.names}
        own = _declared(kind, left_out)
        parameters += own
        groups[parameter.name] = kind, [each.name for each in own]  # type: ignore[assignment]

    @wraps(command)
    def with_groups(**values: Any) -> None:
        made = {name: kind(**{each: values.pop(each) for each in own}) for name, (kind, own) in groups.items()}
        command(**values, **made)

    with_groups.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_groups


def _is_annotated(kind: object) -> bool:
    return get_origin(kind) is Annotated


def _declared(kind: Any, left_out: Collection[str]) -> list[Parameter]:
    hints = get_type_hints(kind)
    for each in fields(kind):
        own = each.metadata[_DECLARED]
        if isinstance(own, OptionInfo) and own.default is ... and not own.param_decls:
            own.default = f"--{each.name.replace('_', '-')}"  # else typer makes a --no- of each flag, too
    return [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is REQUIRED else each.default,
            annotation=Annotated[hints[each.name], each.metadata[_DECLARED]],
        )
        for each in fields(kind)
        if each.name not in left_out
    ]


def option_value(parse: Callable[[str], Value]) -> Callable[[object], Value]:
    """``parse`` as an option's parser: its UsageError becomes a complaint that names the option."""

    def parsed(value: object) -> Value:
        try:
            return parse(str(value))  # defaults come as numbers
        except UsageError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


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
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if parameters[name].param_type_name != "argument":
                words.append(parameters[name].opts[-1])
            if one is not True:
                words.append(_word(one))
    return shlex.join(words)


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, _Given):
        return value.text
    if isinstance(value, NamedNumber):
        return value.name
    return f"{value:.17g}" if isinstance(value, float) else str(value)
