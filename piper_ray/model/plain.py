"""Numbers as Python's own, whatever library they come from, so that equal figures are equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real

from piper_ray.model.errors import UsageError
from piper_ray.model.units import parse_bytes, parse_bytes_per_s


def plain(value: object) -> object:
    """A scalar of numpy or torch as Python's own; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def figure(value: object) -> object:
    """A number as a float; what is no number, or too large for a float, as it is."""
    if type(value) is float:
        return value
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def size(value: object) -> object:
    """As ``figure``, and a text such as "8GiB" as its number of bytes; a text that is none as it is."""
    return _with_unit(value, parse_bytes) if isinstance(value, str) else figure(value)


def rate(value: object) -> object:
    """As ``size``, of bytes per second: "25GB/s"."""
    return _with_unit(value, parse_bytes_per_s) if isinstance(value, str) else figure(value)


def _with_unit(text: str, parse: Callable[..., float]) -> object:
    try:
        return parse(text, unit_required=True)
    except UsageError:
        return text  # what is wrong is told when the instance is looked through


def count(value: object) -> object:
    """A whole number as an int, 8.0 too as some programs write every number with a point; anything else as it is."""
    if type(value) is int:
        return value
    value = plain(value)
    whole = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )
    return int(value) if whole else value  # type: ignore[call-overload]


def counts(values: object) -> object:
    """Whole numbers as a tuple of ints; what cannot be gone through as it is."""
    listed = as_tuple(values)
    return tuple(map(count, listed)) if isinstance(listed, tuple) else listed


def as_tuple(value: object) -> object:
    """What can be gone through as a tuple; texts, mappings and all else as they are."""
    value = plain(value)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)) else value


def convert_fields(instance: object, convert: Callable[[object], object], *names: str) -> None:
    """These fields of a frozen dataclass, in its ``__post_init__``, converted."""
    for name in names:
        value = getattr(instance, name)
        converted = convert(value)
        if converted is not value:
            object.__setattr__(instance, name, converted)
