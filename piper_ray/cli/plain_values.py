"""Values of options that need no checking, taken without pydantic, by which typer reads all of them: the help and
completion of a command have no others, and loading it takes longer than all else that they do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_MOST_DIGITS = 18
"""Of a whole number that is taken as it is."""

_ASKS = "get_runtime_param"
"""What typer calls for what reads values; versions of it without pydantic do not."""


def take_plain_values(parameter: Any) -> None:
    """Of an option or argument, as typer has made it."""
    typers = getattr(parameter, _ASKS, None)
    if typers is not None and _ASKS not in vars(parameter):
        setattr(parameter, _ASKS, partial(_PlainFirst, typers))


class _PlainFirst(NamedTuple):
    """What reads the values of an option or argument. typers: makes typer's own."""

    typers: Callable[[], Any]

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        """What typer makes of the value. It is asked about all that it might refuse, so complaints are its own."""
        try:
            return _taken(value, param)
        except ValueError:
            return self.typers().coerce(value, param=param, ctx=ctx)


def _taken(value: Any, parameter: Any) -> Any:
    """Raises ValueError where there is something to look at."""
    asked, kind = parameter.type_descriptor.parameter_info, parameter.type_descriptor.annotation
    is_one = parameter.nargs == 1 and not parameter.multiple
    if value is None:
        return None if is_one else ()
    if is_one and asked.parser is not None:
        return asked.parser(value)
    if is_one and kind in (int, float):
        return _number(value, kind, asked)
    if is_one and kind is Path:
        return _path(value, asked)
    if not is_one or type(value) is not kind or (kind is str and not value.isascii()):
        raise ValueError
    return value


def _number(value: Any, kind: type, asked: Any) -> Any:
    if kind is int and type(value) is str and len(value) <= _MOST_DIGITS and value.isascii() and value.isdecimal():
        value = int(value)
    if type(value) is not kind:
        raise ValueError
    if (asked.min is not None and value < asked.min) or (asked.max is not None and value > asked.max):
        raise ValueError
    return value


def _path(value: Any, asked: Any) -> Path:
    is_any = asked.file_okay and asked.dir_okay and not (asked.writable or asked.resolve_path or asked.path_type)
    if not is_any or not os.access(value, os.R_OK):
        raise ValueError
    return Path(value)
