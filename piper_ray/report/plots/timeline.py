"""A Gantt chart of a simulation: a lane for each rank, what it does in colours, what it loses in grey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axes._secondary_axes import SecondaryAxis
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from piper_ray.model.figures import share_text, size_scale, time_scale, time_text
from piper_ray.model.schedule import V_SHAPED
from piper_ray.report.plots.style import COLOURS, panels, refuse_other_formats, save, svg_element
from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.kernels.events import Floats
from piper_ray.simulate.result import Simulation

MOST_LANES = 64
"""Beyond it several ranks share a lane, as thin lines one above the other."""

_MOST_THIN_LANES = 1024
"""Beyond it only every n-th rank is drawn."""

_BLUE, _VERMILION, _GREEN, _PURPLE, _YELLOW, _SKY, _, _GREY = COLOURS
_PASS_COLOURS = {ActionKind.F: _BLUE, ActionKind.B: _VERMILION, ActionKind.I: _YELLOW, ActionKind.W: _GREEN}
_PASS_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward, inputs",
    ActionKind.W: "backward, weights",
}
_IDLE = "#e3e3e3"
_DARK = "#111111"
"""The colour of numbers on pale boxes, which stay pale on a dark page."""

_LATER_CHUNK = 0.45
"""How much white is mixed into the colour of the last chunk of a rank."""

_WAYS_SHOWN = 4.0
"""An asynchronous pipeline is drawn for this multiple of the first microbatch's way there and back."""

_PASSES_SHOWN = 100
"""Number of passes of a rank that are drawn at each end of a long step."""

_LEAST_S = 1e-30
"""The least length of a picture: there is one even where all takes no time at all."""

_SHORTEST_LABEL_IN = 0.16
_RASTER_FROM = 20_000
"""Passes from which an SVG holds the lanes as an image."""

_WIDTH_IN = 12.0
_LANES_WIDTH_IN = 9.6


def plot_timeline(simulation: Simulation, path: Path) -> None:
    """Writes the chart, by the path's ending. Raises UsageError."""
    refuse_other_formats(path)
    save(timeline_figure(simulation), path)


def timeline_element(simulation: Simulation) -> str:
    """The chart as an SVG element for a page, which sets ``--idle``, the colour of what is lost, and ``--ground``."""
    return svg_element(timeline_figure(simulation), {_IDLE: "var(--idle)"})


def timeline_figure(simulation: Simulation) -> Figure:
    """Lanes over time, and next to them each rank's idle share and peak memory.

    Of a step too long to tell its passes apart the start and the end are drawn.
    """
    ranks = len(simulation.ranks)
    step = -(-ranks // _MOST_THIN_LANES)
    drawn = list(range(0, ranks, step))
    group = -(-len(drawn) // MOST_LANES)
    lanes = [drawn[first : first + group] for first in range(0, len(drawn), group)]
    windows = _windows_s(simulation)
    head = _subtitle(simulation, group * step)
    heads = [head] if len(windows) == 1 else [f"start; {head}", "end"]
    step_text = f"{time_text(simulation.step_s)} a batch of {simulation.microbatches:,} microbatches"
    figure, panes = panels(f"{simulation.schedule.text}: {step_text}", heads, alike=False)
    figure.set_size_inches(_WIDTH_IN, 1.7 + max(1.2, min(14.0, len(lanes) * (0.42 if len(lanes) <= 16 else 0.2))))
    scale = time_scale(windows[-1][1])
    for axes, (from_s, until_s) in zip(panes, windows, strict=True):
        axes.grid(visible=False)
        axes.set_xlim(from_s, until_s)
        axes.set_ylim(len(lanes), 0.0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / scale.size:.6g}")
        axes.set_xlabel(f"time ({scale.unit})")
        _lanes(axes, simulation, drawn, group, (from_s, until_s), _LANES_WIDTH_IN / len(windows))
        axes.set_yticks([])
    _names(panes[0], simulation, lanes, step)
    _figures_beside(panes[-1], simulation, lanes, step)
    if not simulation.schedule.asynchronous:
        panes[-1].axvline(simulation.step_s, color="black", linewidth=0.8)
    with mpl.rc_context({"legend.frameon": False, "legend.fontsize": 8.0}):
        handles = _handles(simulation)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _subtitle(simulation: Simulation, ranks_in_lane: int) -> str:
    idle = f"{share_text(simulation.bubble_share)} of the devices' time is idle"
    of = f"; one of {simulation.pipelines:,} equal pipelines" if simulation.pipelines > 1 else ""
    thin = f"; {ranks_in_lane} ranks in a lane" if ranks_in_lane > 1 else ""
    return idle + of + thin


def _windows_s(simulation: Simulation) -> list[tuple[float, float]]:
    """What is drawn of the time, from and until; the last of several ends with the step."""
    ends_s = simulation.timeline.ends_s(ActionKind.B, 0)[:1]
    first_out_s = float(ends_s[0]) if len(ends_s) and ends_s[0] > 0 else 0.0
    if simulation.schedule.asynchronous:
        return [(0.0, max(min(_WAYS_SHOWN * first_out_s, simulation.window_s[1]), _LEAST_S))]
    step_s = max(simulation.step_s, _LEAST_S)
    passes = len(simulation.timeline) / len(simulation.ranks)
    shown_s = max(step_s * _PASSES_SHOWN / passes, 1.5 * first_out_s)
    return [(0.0, step_s)] if 3.0 * shown_s > step_s else [(0.0, shown_s), (step_s - shown_s, step_s)]


def _lanes(
    axes: Axes,
    simulation: Simulation,
    drawn: Sequence[int],
    group: int,
    window_s: tuple[float, float],
    width_in: float,
) -> None:
    from_s, until_s = window_s
    timeline = simulation.timeline
    height = 1.0 / group
    top = np.full(len(simulation.ranks), np.nan)
    top[drawn] = np.arange(len(drawn)) / group
    padding = 0.08 if group == 1 else 0.0

    def boxes(
        start_s: Floats, end_s: Floats, ranks: Any, colour: str, *, raster: bool = False, edges: bool = False
    ) -> None:
        """Draws boxes in the lanes of these ranks."""
        low, high = top[ranks] + padding, top[ranks] + height - padding
        corners = np.array([[start_s, low], [end_s, low], [end_s, high], [start_s, high]]).transpose(2, 0, 1)
        axes.add_collection(
            PolyCollection(
                list(corners),
                facecolors=colour,
                edgecolors="white" if edges else "none",
                linewidths=0.4 if edges else 0.0,
                antialiaseds=edges,
                rasterized=raster,
            ),
            autolim=False,
        )

    boxes(np.full(len(drawn), from_s), np.full(len(drawn), until_s), drawn, _IDLE)
    rank = timeline.rank_of_action
    shown = ~np.isnan(top[rank]) & (timeline.start_s < until_s) & (timeline.end_s > from_s)
    shown &= timeline.end_s > timeline.start_s
    raster = int(shown.sum()) > _RASTER_FROM
    chunk = _chunk_of_action(simulation)
    for kind in ActionKind:
        for number in range(simulation.schedule.v):
            mine = shown & (timeline.kind == kind) & (chunk == number)
            if mine.any():
                colour = _tinted(_PASS_COLOURS[kind], number, simulation.schedule.v)
                edges = group == 1 and not raster
                boxes(timeline.start_s[mine], timeline.end_s[mine], rank[mine], colour, raster=raster, edges=edges)
    for intervals, colour in ((simulation.all_reduces, _PURPLE), (simulation.optimizer_steps, _SKY)):
        there = [x for x in intervals if x.end_s > x.start_s and not np.isnan(top[x.rank])]
        if there:
            starts_s, ends_s = (np.array([getattr(x, end) for x in there]) for end in ("start_s", "end_s"))
            boxes(starts_s, ends_s, [x.rank for x in there], colour)
    if group == 1:
        _microbatch_numbers(axes, simulation, shown, top, window_s, width_in / (until_s - from_s))


def _chunk_of_action(simulation: Simulation) -> npt.NDArray[np.int64]:
    stages = len(simulation.stages)
    places = stages // simulation.schedule.v
    stage = simulation.timeline.stage
    if simulation.schedule.name in V_SHAPED:
        return np.where(stage < places, 0, 1)
    return stage // places


def _tinted(colour: str, chunk: int, chunks: int) -> str:
    white = _LATER_CHUNK * chunk / max(1, chunks - 1)
    red, green, blue = (part + (1.0 - part) * white for part in mpl.colors.to_rgb(colour))
    return mpl.colors.to_hex((red, green, blue))


def _microbatch_numbers(
    axes: Axes,
    simulation: Simulation,
    shown: npt.NDArray[np.bool_],
    top: Floats,
    window_s: tuple[float, float],
    in_per_s: float,
) -> None:
    """Writes numbers in the boxes that are wide enough, and only if most are."""
    timeline = simulation.timeline
    duration_s = timeline.end_s - timeline.start_s
    wide = shown & (duration_s * in_per_s >= _SHORTEST_LABEL_IN)
    if wide.sum() * 2 < shown.sum():
        return
    size = 7.0 if len(simulation.ranks) <= 16 else 5.0
    chunk = _chunk_of_action(simulation)
    whole = (timeline.start_s >= window_s[0]) & (timeline.end_s <= window_s[1])
    for action in np.flatnonzero(wide & whole):
        middle_s = (timeline.start_s[action] + timeline.end_s[action]) / 2
        dark = ActionKind(timeline.kind[action]) in (ActionKind.F, ActionKind.B) and chunk[action] == 0
        axes.text(
            middle_s,
            top[timeline.rank_of_action[action]] + 0.5,
            str(int(timeline.microbatch[action])),
            ha="center",
            va="center",
            fontsize=size,
            color="white" if dark else _DARK,
        )


def _names(axes: Axes, simulation: Simulation, lanes: Sequence[Sequence[int]], step: int) -> None:
    names = []
    replicas = max(simulation.timeline.layout.replicas) > 1
    for members in lanes:
        last = min(members[-1] + step - 1, len(simulation.ranks) - 1)
        rank = simulation.ranks[members[0]]
        replica = f"/{rank.replica}" if replicas else ""
        names.append(f"{members[0]}: {rank.name}{replica}" if last == members[0] else f"{members[0]}-{last}")
    _label_lanes(axes, names, "rank: stage" + ("/replica" if replicas else ""))


def _figures_beside(axes: Axes, simulation: Simulation, lanes: Sequence[Sequence[int]], step: int) -> None:
    """Writes the idle share and the peak memory at the right of each lane: of several ranks the largest."""
    length_s = simulation.length_s
    scale = size_scale(simulation.peak_memory_bytes, 3)
    texts = []
    for lane in lanes:
        members = simulation.ranks[lane[0] : lane[-1] + step]
        idle = max((rank.bubble_s + rank.waiting_s) / length_s if length_s > 0 else 0.0 for rank in members)
        memory_bytes = max(rank.peak_memory_bytes for rank in members)
        over = " !" if memory_bytes > simulation.memory_limit_bytes * (1 + 1e-9) else ""
        texts.append(f"{100 * idle:4.1f} %  {scale.with_unit(memory_bytes)}{over}")
    beside = axes.secondary_yaxis("right")
    too_much = " (!: too much)" if any(text.endswith("!") for text in texts) else ""
    _label_lanes(beside, texts, f"idle, peak memory{too_much}")
    beside.spines["right"].set_visible(False)


def _label_lanes(axes: Axes | SecondaryAxis, texts: Sequence[str], what: str) -> None:
    ticks = [lane + 0.5 for lane in range(len(texts))]
    axes.set_yticks(ticks, texts, fontsize=8.0 if len(ticks) <= 32 else 6.0)
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(what)


def _handles(simulation: Simulation) -> list[Patch]:
    kinds = sorted(set(simulation.timeline.kind.tolist()))
    handles = [Patch(color=_PASS_COLOURS[ActionKind(kind)], label=_PASS_NAMES[ActionKind(kind)]) for kind in kinds]
    if simulation.schedule.v > 1:
        handles.append(Patch(color=_tinted(_BLUE, 1, 2), label="paler: later chunks"))
    for name, intervals, colour in (
        ("all-reduce", simulation.all_reduces, _PURPLE),
        ("optimizer", simulation.optimizer_steps, _SKY),
    ):
        if any(interval.end_s > interval.start_s for interval in intervals):
            handles.append(Patch(color=colour, label=name))
    return [*handles, Patch(color=_IDLE, label="idle (bubble)")]
