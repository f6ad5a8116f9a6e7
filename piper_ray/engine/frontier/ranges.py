"""Lists of numbers as a user writes them: ``8..2048``, ``8..2048:8``, ``8,16,32``."""

from __future__ import annotations

import re

from piper_ray.model.errors import UsageError

_PART = re.compile(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?")
_MOST = 1_000_000


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """The numbers, each once and rising. A..B:STEP holds A, A + STEP, ... up to B. Raises UsageError."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option} {text!r}: {part!r} is not a number or a range; expected 8,16,32 or 8..2048:8")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if first < 1 or last < first or step < 1:
            raise UsageError(f"{option} {text!r}: {part!r} holds no numbers of 1 or more")
        if (last - first) // step >= _MOST:
            raise UsageError(f"{option} {text!r}: {part!r} holds more than a million numbers")
        numbers.update(range(first, last + 1, step))
    return tuple(sorted(numbers))
