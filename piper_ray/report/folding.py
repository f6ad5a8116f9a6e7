"""Lines that are too long for the screen, folded at blanks, so that the terminal does not break words."""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO

_LABEL = re.compile(r" *(\S+( \S+)?  +)?")
"""The blanks that a line begins with, and a label that stands in a column of its own."""

_WIDEST_LABEL = 20

_WITHIN_VALUE = re.compile(r"(?<=\d) (?=(?:[KMGTP]?i?B|[mun]?s|%)(?:\W|$))|(?:(?<=\b[CDEPT]P)|(?<=\bmbs)) (?=\d)")
"""A blank before a unit, as in ``4 GiB``, or after the name of a degree, as in ``DP 4``."""

_NO_BREAK = "\N{NO-BREAK SPACE}"


def screen_columns(stream: IO[str]) -> int | None:
    """The columns of the terminal that a stream goes to, or those of COLUMNS; None for a pipe or a file."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def folded(text: str, columns: int | None) -> list[str]:
    """The lines of a text, each of at most ``columns`` where blanks allow that: what goes on is indented as far as the
    text behind a line's label, or by two more than the line. None: lines as they are."""
    found = []
    for line in text.split("\n"):
        if columns is None or len(line) <= columns:
            found.append(line)
        else:
            match = _LABEL.match(line)
            label = match[0] if match else ""
            indent = len(label) if label.strip() and len(label) <= _WIDEST_LABEL else len(line) - len(line.lstrip()) + 2
            blanks = " " * indent
            whole = _WITHIN_VALUE.sub(_NO_BREAK, line)
            wrapped = textwrap.wrap(
                whole, columns, subsequent_indent=blanks, break_long_words=False, break_on_hyphens=False
            )
            found += [part.replace(_NO_BREAK, " ") for part in wrapped]
    return found
