"""Where reports are printed, and plain columns: the same text on a terminal, in a pipe and in a file."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

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


def print_lines(target: Console, lines: Iterable[str]) -> None:
    """A line that is too long for the terminal is left for it to wrap."""
    for line in lines:
        target.print(Text(line), soft_wrap=True)


def print_table(target: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """``table_lines``, the head bold."""
    head, *lines = table_lines(columns, rows)
    target.print(Text(head, style="bold"), soft_wrap=True)
    print_lines(target, lines)


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
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
            lines.append("  ".join(parts).rstrip())
    return lines


def _wrapped(text: str, width: int | None) -> list[str]:
    return (textwrap.wrap(text, width) if width is not None else [text]) or [""]


def _padded(text: str, width: int, right: bool) -> str:
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding
