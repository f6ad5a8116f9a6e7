"""Options of commands, each declared once: as a field of a dataclass. A command takes such dataclasses; ``flat`` makes
of it the function with a parameter for each option that typer wants. Where the library has a field for what an option
says, both have the same name, and ``of_options`` hands it over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import MISSING, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from piper_ray.model.errors import UsageError

Value = TypeVar("Value")
_Made = TypeVar("_Made")

REQUIRED: Any = MISSING
"""The default of an option that has to be given."""

_DECLARED = "typer"
_UNIT = re.compile("_(bytes_per_s|bytes|s)$")


def option(
    metavar: str | None,
    text: str,
    *names: str,
    default: Any = None,
    parse: Callable[[str], object] | None = None,
    **more: Any,
) -> Any:
    """A field that an option gives. metavar: None for a flag, and for a choice whose help is to list all there is.
    text: the option's help. names: those of ``option_name`` if none are given. parse: its UsageError becomes a
    complaint that names the option. more: other arguments of ``typer.Option``."""
    own = typer.Option(*names, metavar=metavar, help=text, parser=parse and option_value(parse), **more)
    return field(default=default, kw_only=True, metadata={_DECLARED: own})


def flag(text: str, *names: str, **more: Any) -> Any:
    """A field that is True where the option is given."""
    return option(None, text, *names, **{"default": False} | more)


def argument(metavar: str, text: str) -> Any:
    """A field that an argument gives."""
    own = typer.Argument(metavar=metavar, help=text, show_default=False)
    return field(default=REQUIRED, kw_only=True, metadata={_DECLARED: own})


def option_name(field_name: str) -> str:
    """``--memory-limit`` of memory_limit_bytes: a unit is the value's to say."""
    return "--" + _UNIT.sub("", field_name).replace("_", "-")


def of_options(kind: type[_Made], *groups: object, **more: object) -> _Made:
    """Makes one of the library's dataclasses. groups: groups of options, of which the options with the names of its
    fields are used. more: fields that no option gives directly."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    found = {name: value for group in groups for name, value in vars(group).items() if name in names}
    return kind(**found | more)


class Without:
    """``Annotated[Options, Without("field")]``: a command takes all of these options but some."""

    def __init__(self, *names: str) -> None:
        self.names = names


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a parameter for each field of the dataclasses that it takes, in their order. A dataclass's
    ``panel`` is the heading of its options in the help. A dataclass of such dataclasses stands for all their fields."""
    parameters: list[Parameter] = []
    groups: dict[str, _Maker] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if _is_group(hint):
            own, groups[parameter.name] = _flattened(hint)
            parameters += own
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))

    @wraps(command)
    def with_groups(**values: Any) -> None:
        made = {name: make(values) for name, make in groups.items()}
        command(**values, **made)

    with_groups.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_groups


_Maker = Callable[[dict[str, Any]], object]
"""Makes a dataclass of the values of its options, which it takes out."""


def _is_group(hint: Any) -> bool:
    return is_dataclass(get_args(hint)[0] if get_origin(hint) is Annotated else hint)


def _flattened(hint: Any) -> tuple[list[Parameter], _Maker]:
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
    within = {name: inner for name, inner in get_type_hints(kind, include_extras=True).items() if _is_group(inner)}
    if within:
        parts = {name: _flattened(inner) for name, inner in within.items()}
        parameters = [parameter for own, _ in parts.values() for parameter in own]
        return parameters, lambda values: kind(**{name: make(values) for name, (_, make) in parts.items()})
    own = _declared(kind, {name for mark in marks for name in mark.names})
    return own, lambda values: kind(**{each.name: values.pop(each.name) for each in own})


def _declared(kind: Any, left_out: Collection[str]) -> list[Parameter]:
    hints = get_type_hints(kind)
    declared = {each.name: copy(each.metadata[_DECLARED]) for each in fields(kind)}
    for each in fields(kind):
        own = declared[each.name]
        if isinstance(own, OptionInfo):
            own.rich_help_panel = own.rich_help_panel or getattr(kind, "panel", None)
        if isinstance(own, OptionInfo) and own.default is ... and not own.param_decls:
            own.default = option_name(each.name)  # else typer makes a --no- of each flag, too
    return [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is REQUIRED else each.default,
            annotation=Annotated[hints[each.name], declared[each.name]],
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
