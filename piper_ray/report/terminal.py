"""Where reports are printed: consoles, plain columns that read alike on a terminal, in a pipe and in a file, and a line
at the foot of a terminal that is always taken down. Tables of findings are for a terminal, Markdown and CSV.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from piper_ray.model.figures import duration_text
from piper_ray.report.folding import folded, screen_columns

PIPE_WIDTH = 120
NO_BREAK = "\N{NO-BREAK SPACE}"
"""A space in a cell at which the cell is not wrapped; it is printed as a space."""


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


def print_lines(target: Console, lines: Iterable[str | Text]) -> None:
    """Lines that are too long for a terminal are folded; what follows the fold has no style."""
    columns = screen_columns(target.file) and target.width
    for line in lines:
        text = Text(line) if isinstance(line, str) else line
        first, *others = folded(text.plain, columns)
        for part in (text[: len(first)], *map(Text, others)):
            target.print(part, soft_wrap=True)


def print_table(
    target: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], most: int | None = None
) -> None:
    """``table_lines``, the head bold. most: see ``shortened``."""
    head, *lines = table_lines(columns, shortened(rows, [_LEFT_OUT, *[""] * (len(columns) - 1)], most))
    for line in (Text(head, style="bold"), *map(Text, lines)):  # never folded: cells stand in columns
        target.print(line, soft_wrap=True)
    if most is not None and len(rows) > most:
        print_lines(target, [left_out_text(len(rows), most)])


_LEFT_OUT = "..."
_Row = TypeVar("_Row")


def shortened(rows: Sequence[_Row], mark: _Row, most: int | None) -> Sequence[_Row]:
    """The first and the last rows with a mark between them, where there are more than ``most``; None: all rows."""
    if most is None or len(rows) <= most:
        return rows
    last = most // 2
    return [*rows[: most - last], mark, *rows[-last:]]


def left_out_text(rows: int, most: int) -> str:
    """What takes the place of a table's other rows."""
    return f"{_LEFT_OUT} {rows - most:,} rows are left out (--verbose shows all)"


def print_fitting(
    target: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None
) -> None:
    """A table whose last column is wrapped so that it fits the screen. width: the target's if not given."""
    *most, last = columns
    taken = 0
    for place, column in enumerate(most):
        longest = max(len(text) for text in (column.head, *(row[place] for row in rows)))
        taken += 2 + (longest if column.wrap is None else min(longest, column.wrap))
    print_table(target, [*most, replace(last, wrap=max(_LEAST_WRAP, (width or target.width) - taken))], rows)


_LEAST_WRAP = 14

SCREEN_LINES = 60
"""The lines of an answer on the screen."""

_Size = TypeVar("_Size")


def print_within(target: Console, draw: Callable[[_Size], None], sizes: Sequence[_Size]) -> None:
    """What ``draw`` prints with the first of the sizes that fits a screen, or else with the last."""
    for size in sizes:
        with target.capture() as drawn:
            draw(size)
        if drawn.get().count("\n") <= SCREEN_LINES:
            break
    target.file.write(drawn.get())
    target.file.flush()


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


WORTH_A_GUESS_S = 2.0
"""The time below which nobody asks of work under way what is left."""

_REFRESH_PER_S = 8
_Log = TypeVar("_Log", bound="LiveLog")  # typing has Self from Python 3.11 on


def left_texts(elapsed_s: float, done: float, what: str = "left") -> list[str]:
    """``about 12 s left``, where that is worth a guess. done: share of the work."""
    if elapsed_s <= WORTH_A_GUESS_S or not done > 0.0:
        return []
    return [f"about {duration_text(elapsed_s * (1.0 / done - 1.0))} {what}"]


class LiveLog(ABC):
    """A log on ``console`` with such a line, shown while the context lasts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._ended = False
        """Work that was given up reports too late."""

    @abstractmethod
    def live_line(self) -> Text:
        """What the line says; asked for often, so that a clock in it runs while nothing happens."""

    def _one_line(self) -> Text:
        """Cut off where the terminal ends: what a line says first matters most."""
        line = self.live_line()
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def __enter__(self: _Log) -> _Log:  # noqa: PYI019 - the same reason
        self._ended = False
        if self._console.is_interactive:
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=_REFRESH_PER_S,
                redirect_stdout=sys.stdout.isatty(),  # what goes elsewhere is not to come up here
                get_renderable=self._one_line,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        if self._live is not None:
            self._live.stop()
            self._live = None


class Working(LiveLog):
    """A phase of a command that prints nothing meanwhile: what is done, how far it is and for how long it goes on.

    Called with the steps that are done, all steps, and the name of the next one, where these are known.
    target: stderr if not given, so that what a command answers is left alone.
    """

    def __init__(self, what: str, target: Console | None = None) -> None:
        super().__init__(target or console(stderr=True))
        self._what = what
        self._done, self._total, self._name = 0, 0, ""
        self._began_s = time.perf_counter()

    def __call__(self, done: int, total: int, name: str = "") -> None:
        self._done, self._total, self._name = done, total, name

    def live_line(self) -> Text:
        elapsed_s = time.perf_counter() - self._began_s
        counted = f", {self._done:,} of {self._total:,}" if self._total else ""
        parts = [f"{self._what}{counted}", f"{elapsed_s:.1f} s"]
        if self._done < self._total:
            parts += left_texts(elapsed_s, self._done / self._total)
        return Text(", ".join([*parts, self._name] if self._name else parts), style="dim")


def csv_text(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Full figures as CSV; None is nothing."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()


@dataclass(frozen=True)
class FindingsTable:
    """A title, and cells as text. left: how many columns hold words; the others hold figures."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int

    @property
    def columns(self) -> list[Column]:
        """The columns for a terminal."""
        return [Column(head, right=index >= self.left) for index, head in enumerate(self.heads)]

    def markdown(self, level: int = 2) -> str:
        """level: of the heading."""
        marks = ["---" if index < self.left else "---:" for index in range(len(self.heads))]
        rows = [self.heads, tuple(marks), *self.rows]
        cells = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
        return f"{level * '#'} {self.title}\n\n" + "\n".join(cells) + "\n"
