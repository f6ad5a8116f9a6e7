"""Plots as files: panels of lines and steps, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from piper_ray.errors import UsageError

FORMATS = (".png", ".svg", ".pdf")

_COLOURS = ("#1f6f8b", "#d1495b", "#66a182", "#8d6a9f", "#edae49", "#2e4057")
_PANEL_INCHES = (6.4, 4.4)
_DPI = 150


class Style(Enum):
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
    style: Style = Style.LINE


@dataclass(frozen=True)
class Panel:
    """One pair of axes; log_x is to base 2."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


def refuse_other_formats(path: Path) -> None:
    """Raises UsageError unless the name ends in .png, .svg or .pdf."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: plots are written as {', '.join(FORMATS)}")


def draw(panels: Sequence[Panel], path: Path, title: str = "") -> None:
    """Writes the panels side by side; the same panels give the same bytes. Raises UsageError if that cannot be."""
    refuse_other_formats(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    format_name = path.suffix.lower()[1:]
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    partial = path.with_name(f".{path.name}.partial")
    with rc_context({"svg.hashsalt": "piper-ray", "svg.fonttype": "none", "font.size": 10.0}):
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel)
        if title:
            figure.suptitle(title, fontsize=11)
        try:
            figure.savefig(partial, format=format_name, dpi=_DPI, metadata=dates[format_name])
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def _draw_panel(axes, panel: Panel) -> None:  # type: ignore[no-untyped-def]
    for number, series in enumerate(panel.series):
        look = {"color": _COLOURS[number % len(_COLOURS)], "label": series.label}
        if series.style is Style.STEPS:
            axes.step(series.x, series.y, where="post", linewidth=1.5, **look)
        elif series.style is Style.POINTS:
            axes.plot(series.x, series.y, linestyle="", marker="o", markersize=3.5, **look)
        else:
            dashed = series.style is Style.DASHED
            axes.plot(series.x, series.y, linestyle="--" if dashed else "-", linewidth=1.2, **look)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=True, which="major", color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(panel.series) > 1:
        axes.legend(frameon=False)
