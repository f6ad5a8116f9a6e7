"""Numbers as text for readers: few digits, a unit, and one unit for all numbers of a column. Also the small HTML tables
that notebooks show for objects; their text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

SHOWN_DIGITS = 3
"""Significant digits of times, rates and sizes in answers. Files have all digits."""

NEAR_DIGITS = 4
"""Significant digits in a column whose figures are close to each other, or far smaller than their sum."""

PROOF_DIGITS = 6
"""Significant digits of thresholds and bounds in the record of a proof."""

PROOF_TOLERANCE = 2e-9
"""Relative. A proof states that no plan is faster by more than 1e-9, and its own arithmetic rounds."""


@dataclass(frozen=True)
class Scale:
    """A unit and the number of decimals for all figures of a column."""

    unit: str
    size: float
    decimals: int

    def text(self, value: float) -> str:
        """The figure without its unit."""
        return f"{value / self.size:.{self.decimals}f}"

    def change_text(self, value: float) -> str:
        """A difference without its unit: ``+0.12``, ``-3.40``, ``0.00``."""
        text = f"{value / self.size:+.{self.decimals}f}"
        return text if float(text) else text[1:]

    def with_unit(self, value: float) -> str:
        """The figure with its unit: ``703.591 us``."""
        return f"{self.text(value)} {self.unit}"


_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SIZES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_DECIMAL_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def time_scale(largest_s: float, digits: int = SHOWN_DIGITS) -> Scale:
    """The unit of time that gives the largest figure of a column ``digits`` significant digits."""
    return _scale(_TIMES, largest_s, digits)


def size_scale(largest_bytes: float, digits: int = 4) -> Scale:
    """The unit of size, a power of 1024 bytes, that gives the largest figure ``digits`` significant digits."""
    return _scale(_SIZES, largest_bytes, digits)


def time_text(seconds: float, digits: int = SHOWN_DIGITS) -> str:
    """``704 us``, ``8.67 s``."""
    scale = time_scale(seconds, digits)
    return scale.with_unit(seconds) if math.isfinite(seconds) else "inf"


def duration_text(seconds: float) -> str:
    """``12 s``, ``7 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3600:.1f} h"


def size_text(size_bytes: float, digits: int = 4) -> str:
    """``8 GiB``, ``7.451 GiB``: in powers of 1024, without trailing zeros."""
    return _size_text(_SIZES, size_bytes, digits)


_LARGER = {"B": "KiB", "KiB": "MiB", "MiB": "GiB", "GiB": "TiB"}


def held_text(size_bytes: float) -> str:
    """``72.2 GiB``, ``0.995 GiB``: memory in three digits."""
    number, unit = size_text(size_bytes, 3).split(" ")
    if float(number) < 1000.0:
        return f"{number} {unit}"
    return f"{float(number) / 1024.0:.3g} {_LARGER[unit]}"


def _size_text(units: tuple[tuple[str, float], ...], size_bytes: float, digits: int) -> str:
    scale = _scale(units, size_bytes, digits)
    number = scale.text(size_bytes)
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {scale.unit}"


def given_size_text(size_bytes: float) -> str:
    """The size as it was probably written, in powers of 1000 or 1024, whichever is shorter (``80 GB``, ``8 GiB``)."""
    return min((_size_text(units, size_bytes, 4) for units in (_SIZES, _DECIMAL_SIZES)), key=len)


def memory_text(size_bytes: float) -> str:
    """``73.81 GiB``, ``74.51 GiB (80 GB)``: in powers of 1024, and also in powers of 1000 where that is a round
    figure."""
    binary, decimal = (_size_text(units, size_bytes, 4) for units in (_SIZES, _DECIMAL_SIZES))
    is_round = size_bytes == float(f"{size_bytes:.3g}")
    return f"{binary} ({decimal})" if is_round and len(decimal) + 1 < len(binary) else binary


def rounded(number: float, digits: int = SHOWN_DIGITS) -> str:
    """``73,000``, ``1,140``, ``8.9``: without an exponent."""
    text = f"{number:.{digits}g}"
    return f"{float(text):,.0f}" if number >= 999.5 else text


def rounded_down(number: float) -> float:
    """To three digits: what is true of a bound is true of less. A bound is infinite where there is no plan."""
    if number <= 0.0 or math.isinf(number):
        return max(number, 0.0)
    last = 10.0 ** (math.floor(math.log10(number)) - 2)
    return math.floor(number / last * (1.0 + 1e-12)) * last


def least_text(bound_s: float) -> str:
    """A lower bound of a time, rounded down."""
    return time_text(rounded_down(bound_s))


def bytes_text(size_bytes: float) -> str:
    """``13 bytes``, ``7.451 GiB``: a size within a sentence."""
    if size_bytes < 2**20:
        return f"{size_bytes:,.0f} bytes" if size_bytes >= 1000.0 else f"{size_bytes:g} bytes"
    return size_text(size_bytes)


def size_option(size_bytes: float) -> str:
    """``80GB``, ``8GiB``: the exact size in bytes, as options accept it."""
    for units in (_SIZES, _DECIMAL_SIZES):
        for unit, size in units:
            if size_bytes % size == 0.0 and size > 1.0:
                return f"{size_bytes / size:.0f}{unit}"
    return f"{size_bytes:.0f}B"


def size_above(size_bytes: float) -> str:
    """``149.64GiB``: the size rounded up to few digits, as options accept it."""
    scale = size_scale(size_bytes, 5)
    return f"{math.ceil(size_bytes / scale.size * 10**scale.decimals) / 10**scale.decimals:g}{scale.unit}"


def percent_text(ratio: float) -> str:
    """``0.8746 %``. A gap within the proof's tolerance is ``0 %``; a larger gap that would round to zero has an
    exponent."""
    percent = 100.0 * ratio
    if ratio <= PROOF_TOLERANCE:
        return "0 %"
    return f"{percent:.4f} %" if percent >= 5e-5 else f"{percent:.0e} %"


def share_text(share: float) -> str:
    """``12.3 %``: a share of a whole."""
    return f"{100.0 * share:.1f} %"


def plural(count: int, word: str) -> str:
    """``1 stage``, ``12 stages``, with commas between thousands."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Replaces characters that could move the cursor or change colours by ``?``, since names come from files."""
    return "".join(character if character.isprintable() else "?" for character in text)


def range_text(ids: Iterable[int]) -> str:
    """``3-12,14``, from ids in any order."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(str(end) for end in run) for run in runs)


def _scale(units: tuple[tuple[str, float], ...], largest: float, digits: int) -> Scale:
    if not math.isfinite(largest) or largest <= 0:
        return Scale(*(units[0] if units is _TIMES else units[-1]), 0)
    # Rounding must not carry a figure into one digit more: 999.9996 is 1.00000 of the next unit.
    rounded = float(f"{largest:.{digits - 1}e}")
    unit, size = next(((unit, size) for unit, size in units if rounded >= size), units[-1])
    whole = math.floor(math.log10(rounded / size) + 1e-12) + 1
    return Scale(unit, size, 0 if size == 1.0 and unit == "B" else max(0, digits - max(whole, 1)))


def flop_text(flop: float) -> str:
    """``1.234 PFLOP``: four digits, in the largest unit that is not larger than the figure."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP")
    power = min(len(units) - 1, max(0, math.floor(math.log10(flop) / 3))) if flop > 0 else 0
    return f"{flop / 1000.0**power:.4g} {units[power]}"


def relative_gap(time_s: float, lower_bound_s: float) -> float:
    """(time - lower bound) / time, in 0 .. 1; 0 for a plan that takes no time."""
    return max(0.0, (time_s - lower_bound_s) / time_s) if time_s > 0.0 else 0.0


MOST_ROWS = 12
"""The most rows that a small table shows. A longer one shows its first and last rows."""


def html_table(caption: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """An HTML table without styles. Without a head, the first cell of each row is its heading."""
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
    """At most ``MOST_ROWS`` rows, with one None in place of the rows left out."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    last = MOST_ROWS // 3
    return [*rows[: MOST_ROWS - 1 - last], None, *rows[-last:]]


def _text(cell: str) -> str:
    return escape(printable(cell))
