"""Where reports are printed, and plain columns: the same text on a terminal, in a pipe and in a file."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console

PIPE_WIDTH = 120
NO_BREAK = "\N{NO-BREAK SPACE}"
"""In a cell: a space at which it is not wrapped; printed as a space."""


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; 120 columns where there is no terminal to ask, unless COLUMNS says otherwise."""
    found = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    # FORCE_COLOR, as CI has it, makes a terminal of any file: one that takes colours, not one that takes lines back.
    found.is_interactive = found.is_interactive and found.file.isatty()
    if not found.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        found.width = PIPE_WIDTH
    return found


def draws_blocks(target: Console) -> bool:
    """Whether block characters reach the reader: not through an ASCII or Latin-1 stream."""
    return target.encoding.lower().startswith("utf")


@dataclass(frozen=True)
class Column:
    """Head and alignment of a column; ``wrap``: lines of at most this width, None for no limit."""

    head: str
    right: bool = False
    wrap: int | None = None


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, gap: int = 2) -> list[str]:
    """The head and the rows, cells aligned and long ones wrapped; no line ends in a space."""
    wrapped = [
        [_wrapped(cell, column.wrap) for cell, column in zip(row, columns, strict=True)]
        for row in [[column.head for column in columns], *rows]
    ]
    widths = [max(cell_len(line) for row in wrapped for line in row[index]) for index in range(len(columns))]
    lines = []
    for row in wrapped:
        for index in range(max(len(cell) for cell in row)):
            parts = [
                _padded(cell[index].replace(NO_BREAK, " ") if index < len(cell) else "", width, column.right)
                for cell, width, column in zip(row, widths, columns, strict=True)
            ]
            lines.append((" " * gap).join(parts).rstrip())
    return lines


def _wrapped(text: str, width: int | None) -> list[str]:
    return (textwrap.wrap(text, width) if width is not None else [text]) or [""]


def _padded(text: str, width: int, right: bool) -> str:
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding
