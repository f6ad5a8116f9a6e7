"""Rising numbers, also as texts of the command line: ``8..2048``, ``8..2048:8``, ``8,16,32``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError

Numbers = Iterable[int] | str
"""Rising numbers, or a text such as "8..64" or "8,16,32"."""

_PART = re.compile(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?")
_MOST = 1_000_000


def rising(numbers: Numbers, name: str, what: str) -> tuple[int, ...]:
    """Returns the numbers; a text is read as on the command line. Raises UsageError unless they are positive, rising
    and not empty."""
    if isinstance(numbers, str):
        return parse_numbers(numbers, name)
    found = arguments.whole_numbers(name, numbers)
    if not found:
        raise UsageError(f"expected {what} at least")
    if found[0] < 1 or any(later <= earlier for earlier, later in pairwise(found)):
        raise UsageError(f"{what} must be 1 or more and above the one before it, not {found[0]}, ...")
    return found


def parse_numbers(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """Returns the numbers, each once and rising. A..B:STEP means A, A + STEP, ... up to B. Raises UsageError."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option} {text!r}: {part!r} is not a number or a range; expected 8,16,32 or 8..2048:8")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if first < least or last < first or step < 1:
            raise UsageError(f"{option} {text!r}: {part!r} holds no numbers of {least} or more")
        if (last - first) // step >= _MOST:
            raise UsageError(f"{option} {text!r}: {part!r} holds more than a million numbers")
        numbers.update(range(first, last + 1, step))
    return tuple(sorted(numbers))
