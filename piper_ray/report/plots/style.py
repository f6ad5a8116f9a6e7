"""How all plots look: figures without a display, colours that the colour-blind tell apart, axes of devices."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from piper_ray.model.errors import UsageError
from piper_ray.storage.files import written_whole

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""The colours after Okabe and Ito; the first is the exact solver's."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

Points = Sequence[tuple[float, float | None]]
"""The points of a curve; None leaves a hole."""

_STYLE: Any = mpl.rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)
LINE_WIDTH, MARKER_SIZE = _STYLE["lines.linewidth"], _STYLE["lines.markersize"]
WIDER = 1.2
"""Points of width for each curve upon another."""

_MARKER_WIDER = 1.8

_AS_GOOD = 5e-3
"""Relative: what differs less is one line to the eye."""

_WIDE = 8.0
"""Largest over smallest figure from which an axis is logarithmic."""

_TICKS = 9
_INK, _PAPER = "#000000", "#ffffff"
_METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""The metadata of files by their ending: what would differ between two runs is left out."""


def panels(title: str, heads: Sequence[str], *, alike: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with an axes for each head, in rows of three at most. alike: they share what they measure."""
    with mpl.rc_context(_STYLE):
        count = len(heads)
        columns = 2 if count == 4 else min(count, 3)
        rows = -(-count // columns)
        width_in, height_in = (4.2, 3.4) if count > 1 else (6.4, 4.4)
        figure = Figure(figsize=(width_in * columns + 0.6, height_in * rows + 0.4), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=alike, sharey=alike)
        figure.suptitle(title, fontsize=11)
        axes = [axis for row in grid for axis in row]
        for unused in axes[count:]:
            unused.remove()
        for used, head in zip(axes, heads, strict=False):
            used.set_title(head)
    return figure, axes[:count]


def colour(index: int, count: int, *, ordered: bool) -> str:
    """The colour of a series: its own, or (for series that are steps of a quantity, or many) one of a scale from dark
    to light."""
    if not ordered and count <= len(COLOURS):
        return COLOURS[index]
    red, green, blue, _ = mpl.colormaps["viridis"](0.9 * index / max(1, count - 1))
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def widths(curves: Sequence[Points]) -> list[dict[str, float]]:
    """The widths of lines and markers, in the order in which the curves are drawn: a curve that others lie upon is
    wider than these, so that all are seen."""
    found = []
    for number, points in enumerate(curves):
        upon = sum(_coincide(points, others) for others in curves[number + 1 :])
        found.append({"linewidth": LINE_WIDTH + WIDER * upon, "markersize": MARKER_SIZE + _MARKER_WIDER * upon})
    return found


def _coincide(one: Points, other: Points) -> bool:
    """Whether both have a stretch in common, or their only point, to a width's precision: curves that cross can be
    told apart without help."""
    values = {x: y for x, y in other if y is not None}
    common = [y is not None and x in values and as_good(y, values[x]) for x, y in one]
    return any(map(all, pairwise(common))) if len(common) > 1 else any(common)


def as_good(one: float, other: float) -> bool:
    """Whether they lie in one place, to the eye."""
    return abs(one - other) <= _AS_GOOD * abs(other)


def devices_axis(axes: Axes, devices: Sequence[int]) -> None:
    """Ticks at the numbers of devices that there are, or at powers of two where those are many."""
    values = sorted(set(devices))
    axes.set_xlabel("devices")
    if values and values[0] > 0 and values[-1] >= _WIDE * values[0]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    if len(values) <= _TICKS:
        axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(axis="x", labelrotation=45 if values and values[-1] >= 1000 else 0, labelbottom=True)


def wide_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis if the figures differ much."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) >= _WIDE * min(positive):
        log_axis(axes)


def log_axis(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"))


def _by_itself(handle: Any) -> Any:
    """The handle as wide as where nothing lies upon it."""
    if isinstance(handle, Line2D):
        handle = copy.copy(handle)
        handle.set(linewidth=LINE_WIDTH, markersize=MARKER_SIZE)
    return handle


def legend(figure: Figure, axes: Axes, marks: Sequence[Line2D] = ()) -> None:
    """One for all axes, below them. marks: others with labels of their own, that are on no curve."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1 or marks:
        handles = [_by_itself(handle) for handle in handles] + list(marks)
        labels += [str(mark.get_label()) for mark in marks]
        with mpl.rc_context(_STYLE):
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))


def refuse_other_formats(path: Path) -> None:
    """Raises UsageError unless the name ends in .png, .svg or .pdf."""
    if path.suffix.lower() not in _METADATA:
        raise UsageError(f"{path}: plots are written as {', '.join(_METADATA)}")


def save(figure: Figure, path: Path) -> None:
    """Writes the figure by the path's ending, whole or not at all, with the same bytes for the same figure. Raises
    UsageError."""
    refuse_other_formats(path)
    ending = path.suffix.lower()
    with written_whole(path) as file, mpl.rc_context(_STYLE):
        figure.savefig(file, format=ending[1:], dpi=150, metadata=_METADATA[ending])


def svg_element(figure: Figure, colours: Mapping[str, str]) -> str:
    """The figure as an element to stand in a page, in the page's text colour and without a ground of its own.

    colours: others (as #rrggbb) that the page sets, with what stands there in their place. Lines that part what is
    drawn from each other have the colour of the page's ground, ``var(--ground)``.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    file = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(file, format="svg", dpi=150, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :].rstrip()
    text = (
        re.sub(r' (xmlns(:xlink)?|version|width|height)="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]
    )
    text = re.sub(r' id="(?!' + "|".join(_referenced(text)) + r')[^"]*"', "", text)
    text = text.replace(f"stroke: {_PAPER}", "stroke: var(--ground)")
    for before, after in {_INK: "currentColor", **colours}.items():
        text = text.replace(before, after)
    return text


def _referenced(text: str) -> list[str]:
    """Ids that something in the picture points to. Others would stand twice in a page of two pictures."""
    return sorted({re.escape(found) + '"' for found in re.findall(r'(?:url\(|href=")#([^")]+)', text)}) or ["$^"]
