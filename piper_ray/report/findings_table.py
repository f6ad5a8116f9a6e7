"""Tables of findings: for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass

from piper_ray.report.terminal import Column


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
