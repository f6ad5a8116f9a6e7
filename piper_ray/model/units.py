"""Sizes and rates as people write them: ``8GiB``, ``80GB``, ``25GB/s``, or a plain number of bytes. Also the conversion
of other libraries' numbers to Python's own, so that equal figures are equal to the last bit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from numbers import Real

from piper_ray.model.errors import UsageError

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_WITH_UNIT = re.compile(r"\s*(?P<number>\d+\.?\d*|\.\d+)\s*(?P<unit>[A-Za-z]+)\s*")
_GIGABIT_OR_GIGABYTE = re.compile(r"[KMGTPE]i?b")
_PER_SECOND = re.compile(r"\s*/\s*s(ec)?\s*$|ps\s*$")
_COUNT = re.compile(r"\s*(?P<number>[+-]?\d+(\.\d+)?([eE]\+?\d{1,2})?)\s*(?P<unit>|k|K|Ki|M|Mi|B|T)\s*")
_COUNT_UNITS = {"": 1, "k": 1000, "K": 1000, "Ki": 1024, "M": 1000**2, "Mi": 1024**2, "B": 1000**3, "T": 1000**4}
_DURATION = re.compile(r"\s*(?P<number>[+-]?\d+(\.\d*)?([eE][+-]?\d+)?)\s*(?P<unit>|ms|s|m|min|h|d)\s*")
_DURATION_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LARGE_UNITS = {"GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20, "MB": 1e6}


OnNote = Callable[[str], None]
"""Called with a remark for the user about an input that is valid but unusual."""

LEAST_LIKELY_BYTES = 1e6
"""A memory below this, or a bandwidth below this per second, most likely lacks its unit."""


def parse_bytes(value: str | float, *, unit_required: bool = False) -> float:
    """A size in bytes, from a number or from text with a unit (kB, MB, GB, KiB, MiB, GiB, Gbit, ...).

    Text without a unit counts bytes, or is refused if ``unit_required``. Raises UsageError for that and for anything
    that is not a finite size >= 0.
    """
    expected = "a size such as 8GiB or 80GB" if unit_required else "a size such as 8GiB, 80GB or a number of bytes"
    return _parse(value, value, expected, "", unit_required)


def parse_bytes_per_s(value: str | float, *, unit_required: bool = False) -> float:
    """A rate in bytes/s, from the same values as ``parse_bytes``, with or without "/s". Raises UsageError."""
    bare = _PER_SECOND.sub("", value) if isinstance(value, str) else value
    expected = "a rate such as 25GB/s" + (
        " or 200Gbit/s" if unit_required else ", 200Gbit/s or a number of bytes per second"
    )
    return _parse(bare, value, expected, "/s", unit_required)


def parse_count(text: str) -> int:
    """Reads ``512``, ``1k`` (1,000), ``1Ki`` (1,024), ``1.5M``, ``300B``, ``15e12``.

    Raises UsageError for text that is not a whole number.
    """
    match = _COUNT.fullmatch(text)
    number = None if match is None else Decimal(match["number"]) * _COUNT_UNITS[match["unit"]]
    if number is None or number != number.to_integral_value():
        raise UsageError(f"{_shown(text)} is no whole number; expected one such as 512, 1k (1,000) or 1Ki (1,024)")
    return int(number)


def parse_tokens(text: str) -> int:
    """Reads ``8192``, or ``128k``, which is 131,072: lengths of sequences are counted in units of 1,024 tokens.

    Raises UsageError for text that is not a whole number above 0.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([kK]i?)?\s*", text)
    tokens = 0 if match is None else int(match[1]) * (1024 if match[2] else 1)
    if tokens < 1:
        raise UsageError(f"{_shown(text)} is no length of a sequence; expected one such as 8192 or 128k (131,072)")
    return tokens


def parse_seconds(text: str) -> float:
    """Seconds from ``600``, ``90s``, ``10m``, ``1.5h`` or ``1d``; a number without a unit is seconds. Raises
    UsageError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"{_shown(text)} is no length of time; expected one such as 90, 90s, 10m, 1.5h or 1d")
    return float(match["number"]) * _DURATION_UNITS_S[match["unit"]]


def likely_text(size: float, per_second: str) -> str:
    """The probable meaning of a number without a unit: devices have gigabytes, and a large number counts bytes."""
    if size < 1000.0:
        return f"{size:g}GB{per_second}"
    if size < LEAST_LIKELY_BYTES:
        return f"{size:.12g}MB{per_second}" if size % 1000.0 else f"{size / 1000.0:g}GB{per_second}"
    exact = next((unit for unit, factor in _LARGE_UNITS.items() if size % factor == 0.0), None)
    return f"{size:.0f}B{per_second}" if exact is None else f"{size / _LARGE_UNITS[exact]:.0f}{exact}{per_second}"


def doubtful(size: float, per_second: str, *, with_units: bool) -> str | None:
    """A remark on a memory (or, with "/s", a bandwidth) in a file that most likely lacks its unit; None for other
    sizes.

    with_units: the file may hold texts with units; otherwise it holds numbers of bytes.
    """
    if size >= LEAST_LIKELY_BYTES:
        return None
    meant = likely_text(size, per_second)
    if not with_units:
        meant = f"{size * (1e9 if size < 1000.0 else 1e6):.15g}, {meant},"
    words = ("byte" if size == 1.0 else "bytes") + (" per second" if per_second else "")
    return f"{size:g} {words}, less than 1 MB{per_second}; was {meant} meant?"


def _parse(bare: object, given: object, expected: str, per_second: str, unit_required: bool) -> float:
    if isinstance(bare, str):
        number = float(bare) if _NUMBER.fullmatch(bare) else _with_unit(bare, given, expected)
    elif isinstance(bare, bool) or not isinstance(bare, (int, float)):
        raise UsageError(f"{_shown(given)} is not a size; expected {expected}")
    else:
        try:
            number = float(bare)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{_shown(given)} is not finite; expected {expected}")
    if number < 0:
        raise UsageError(f"{_shown(given)} is negative; expected {expected}")
    if unit_required and number and isinstance(bare, str) and _NUMBER.fullmatch(bare):
        raise UsageError(f"{bare.strip()} has no unit; did you mean {likely_text(number, per_second)}?")
    return number + 0.0  # -0.0 becomes 0.0


def _with_unit(text: str, given: object, expected: str) -> float:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    match = _WITH_UNIT.fullmatch(text)
    if match is None:  # ByteSize reads "1,5GB" as 1 byte, so the whole text is matched first
        raise UsageError(f"{_shown(given)} is not understood; expected {expected}")
    if _GIGABIT_OR_GIGABYTE.fullmatch(match["unit"]):
        bytes_unit, bits_unit = match["unit"][:-1] + "B", match["unit"][:-1] + "bit"
        raise UsageError(f"{_shown(given)} is ambiguous; write {bytes_unit} for bytes or {bits_unit} for bits")
    try:
        return float(TypeAdapter(ByteSize).validate_python(text.strip()))
    except (ValidationError, OverflowError, ValueError):
        raise UsageError(f"{_shown(given)} has an unknown unit or is too large; expected {expected}") from None


def _shown(value: object) -> str:
    text = "a huge number" if isinstance(value, int) and abs(value) >= 10**20 else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def plain(value: object) -> object:
    """A scalar of numpy or torch as Python's own; any other value unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def figure(value: object) -> object:
    """A number as a float; any other value, and a number too large for a float, unchanged."""
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
    """The result of ``figure``, or the number of bytes of a text such as "8GiB". A text that is not a size stays
    unchanged."""
    return _read_unit(value, parse_bytes) if isinstance(value, str) else figure(value)


def rate(value: object) -> object:
    """The same as ``size`` for bytes per second: "25GB/s"."""
    return _read_unit(value, parse_bytes_per_s) if isinstance(value, str) else figure(value)


def _read_unit(text: str, parse: Callable[..., float]) -> object:
    try:
        return parse(text, unit_required=True)
    except UsageError:
        return text  # the check of the instance reports what is wrong


def count(value: object) -> object:
    """A whole number as an int, also 8.0, since some programs write every number with a point; other values
    unchanged."""
    if type(value) is int:
        return value
    value = plain(value)
    whole = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )
    return int(value) if whole else value  # type: ignore[call-overload]


def counts(values: object) -> object:
    """Whole numbers as a tuple of ints; a value that is not iterable unchanged."""
    listed = as_tuple(values)
    return tuple(map(count, listed)) if isinstance(listed, tuple) else listed


def as_tuple(value: object) -> object:
    """An iterable as a tuple; texts, mappings and all other values unchanged."""
    value = plain(value)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)) else value


def convert_fields(instance: object, convert: Callable[[object], object], *names: str) -> None:
    """Converts these fields of a frozen dataclass, in its ``__post_init__``."""
    for name in names:
        value = getattr(instance, name)
        converted = convert(value)
        if converted is not value:
            object.__setattr__(instance, name, converted)
