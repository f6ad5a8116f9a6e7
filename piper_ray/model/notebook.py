"""What notebooks show of an object: a small table, with everything in it escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from piper_ray.model.figures import printable

MOST_ROWS = 12
"""Of a small table. Of more rows the first and the last few are shown."""


def html_table(caption: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table without style of its own. Without a head the first cell of each row names it."""
    shown = list(rows)
    lines = [f"<table><caption>{_text(caption)}</caption>"]
    if head:
        lines.append("<thead><tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr></thead>")
    lines.append("<tbody>")
    for row in shortened(shown):
        if row is None:
            width = len(head) or len(shown[0])
            lines.append(f'<tr><td colspan="{width}">{len(shown) - MOST_ROWS + 1:,} more</td></tr>')
            continue
        named = "" if head else f"<th>{_text(row[0])}</th>"
        lines.append(f"<tr>{named}" + "".join(f"<td>{_text(cell)}</td>" for cell in row[not head :]) + "</tr>")
    return "".join([*lines, "</tbody></table>"])


def shortened(rows: Sequence[Sequence[str]]) -> list[Sequence[str] | None]:
    """At most ``MOST_ROWS``; None in place of those left out."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    last = MOST_ROWS // 3
    return [*rows[: MOST_ROWS - 1 - last], None, *rows[-last:]]


def _text(cell: str) -> str:
    return escape(printable(cell))
