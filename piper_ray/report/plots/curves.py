"""Panels of lines and steps as data, and the figure of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from piper_ray.report.plots import style


class CurveStyle(Enum):
    """STEPS: each value holds until the next x. LINE, DASHED: straight between points. POINTS: marks alone."""

    STEPS = "steps"
    LINE = "line"
    DASHED = "dashed"
    POINTS = "points"


@dataclass(frozen=True)
class Series:
    """Values ``y`` at ``x``, of one colour; ``label`` goes to the legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: CurveStyle = CurveStyle.LINE


@dataclass(frozen=True)
class Panel:
    """One pair of axes; log_x is to base 2."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


def figure_of(panels: Sequence[Panel], title: str = "") -> Figure:
    """The panels side by side."""
    figure, every = style.panels(title, [panel.title for panel in panels], alike=False)
    for axes, panel in zip(every, panels, strict=True):
        _draw(axes, panel)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    for index, series in enumerate(panel.series):
        colour = style.colour(index, len(panel.series), ordered=False)
        if series.style is CurveStyle.STEPS:
            axes.step(series.x, series.y, where="post", color=colour, label=series.label)
        elif series.style is CurveStyle.POINTS:
            axes.plot(series.x, series.y, linestyle="", marker="o", color=colour, label=series.label)
        else:
            line = "--" if series.style is CurveStyle.DASHED else "-"
            axes.plot(series.x, series.y, linestyle=line, color=colour, label=series.label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if panel.log_y:
        style.log_axis(axes)
    else:
        axes.set_ylim(bottom=0.0)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if len(panel.series) > 1:
        axes.legend(frameon=False)
