"""Time against downsets, one point a subject: proved or stopped, now and before."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from piper_ray.report.plots import style
from scripts.benchmarks.compared_table import SUBJECTS
from scripts.benchmarks.paired import Comparison, Run

_BEFORE = style.COLOURS[-1]


def time_against_downsets(rows: Sequence[Comparison]) -> Figure:
    """CPU seconds over all downsets of the graph (those that were listed, where there are too many to count).

    Frontiers, many solves in one, are left out.
    """
    rows = [row for row in rows if SUBJECTS[row.subject].devices is None]
    figure, (axes,) = style.panels("CPU time of a solve against the downsets of its graph", [""])
    families = list(dict.fromkeys(SUBJECTS[row.subject].family for row in rows))
    for row in rows:
        across = row.downsets or row.this.listed
        family = families.index(SUBJECTS[row.subject].family)
        colour = style.colour(family, len(families), ordered=False)
        if row.before is not None and not row.before.refused:
            heights = [row.before.cpu_s, row.this.cpu_s]
            axes.plot([across, across], heights, color=_BEFORE, linewidth=0.7, alpha=0.6, zorder=1)
            _point(axes, across, row.before, _BEFORE, style.MARKERS[family])
        if not row.this.refused:
            _point(axes, across, row.this, colour, style.MARKERS[family])
    for number, family_name in enumerate(families):
        colour = style.colour(number, len(families), ordered=False)
        axes.plot([], [], linestyle="", marker=style.MARKERS[number], color=colour, label=family_name)
    axes.plot([], [], linestyle="", marker="o", color="black", markerfacecolor="white", label="stopped, with a gap")
    if any(row.before is not None for row in rows):
        axes.plot([], [], linestyle="", marker="o", color=_BEFORE, label="the version before")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("downsets")
    axes.set_ylabel("CPU seconds")
    style.legend(figure, axes)
    return figure


def _point(axes: Axes, downsets: int, run: Run, colour: str, marker: str) -> None:
    face = colour if run.proved else "white"
    axes.plot([downsets], [run.cpu_s], linestyle="", marker=marker, color=colour, markerfacecolor=face, zorder=2)
