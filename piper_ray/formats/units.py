"""Sizes and rates as people write them: ``8GiB``, ``80GB``, ``25GB/s``, or a plain number of bytes."""

from __future__ import annotations

import math
import re

from piper_ray.errors import UsageError

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_WITH_UNIT = re.compile(r"\s*(?P<number>\d+\.?\d*|\.\d+)\s*(?P<unit>[A-Za-z]+)\s*")
_GIGABIT_OR_GIGABYTE = re.compile(r"[KMGTPE]i?b")
_PER_SECOND = re.compile(r"\s*/\s*s(ec)?\s*$|ps\s*$")


def parse_bytes(value: str | float) -> float:
    """A size in bytes, from a number or from text with a unit (kB, MB, GB, KiB, MiB, GiB, Gbit, ...).

    Text without a unit is bytes. Raises UsageError for anything that is not a finite size >= 0.
    """
    return _parse(value, value, "a size such as 8GiB, 80GB or a number of bytes")


def parse_bytes_per_s(value: str | float) -> float:
    """A rate in bytes/s: what ``parse_bytes`` takes, with or without "/s". Raises UsageError."""
    bare = _PER_SECOND.sub("", value) if isinstance(value, str) else value
    return _parse(bare, value, "a rate such as 25GB/s, 200Gbit/s or a number of bytes per second")


def _parse(bare: object, given: object, expected: str) -> float:
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
