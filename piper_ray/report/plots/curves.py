"""Plots of a frontier and of a sweep: time and speed against devices, memory and the bound on the sum of d.

Of a sweep's plans: step and cost against the size of the cluster by GPU, and ways to train compared.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from piper_ray.engine.frontier.result import FrontierPoint
from piper_ray.model.figures import given_size_text
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.report.plots import style
from piper_ray.report.summary import Throughput
from piper_ray.report.sweep_plans import Cost, Prices
from piper_ray.sweep.findings import Method, Record, Scene, exact_times, method_order, slower
from piper_ray.sweep.plan_findings import PlanRecord, TrainedBatch, best_of_clusters

TIME = "time per microbatch (s)"


class _Panel(NamedTuple):
    """A pair of axes with the optimum as steps over ``x``. expected: a dashed curve with it, by what it is."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[int]
    y: Sequence[float]
    expected: Mapping[str, Sequence[float]]


def frontier_figure(
    instance: Instance,
    points: Sequence[FrontierPoint],
    budgets: Sequence[FrontierPoint],
    schedule: Schedule = PAPERS_SCHEDULE,
) -> Figure | None:
    """Against devices: time per sample with a perfect speedup, and speed per device; then time against s. None where
    there is no plan."""
    panels = []
    batch = f"N = {instance.microbatches:,}"
    if schedule != PAPERS_SCHEDULE:
        batch += f", {schedule.name.value}"
    known = [(point.devices, point.time_per_sample_s) for point in points if point.time_per_sample_s]
    if known:
        devices, times_s = [k for k, _ in known], [time_s for _, time_s in known]
        perfect_s = [times_s[0] * devices[0] / k for k in devices]
        expected = {f"perfect speedup over K = {devices[0]:,}": perfect_s}
        panels.append(_Panel(batch, "devices K", TIME, devices, times_s, expected))
        throughput = Throughput.of(instance.batch)
        rates = [throughput.per_s(time_s) / k for k, time_s in known]
        panels.append(_Panel(batch, "devices K", f"{throughput.unit} per second and device", devices, rates, {}))
    known = [(point.data_parallel_budget, point.time_per_sample_s) for point in budgets if point.time_per_sample_s]
    if known:
        title, label = f"{batch}, K = {instance.devices:,}", "bound on the sum of data-parallel degrees"
        panels.append(_Panel(title, label, TIME, [s for s, _ in known], [time_s for _, time_s in known], {}))
    return _figure(instance.name, panels) if panels else None


def _figure(title: str, panels: Sequence[_Panel]) -> Figure:
    figure, every = style.panels(title, [panel.title for panel in panels], alike=False)
    for axes, panel in zip(every, panels, strict=True):
        axes.step(panel.x, panel.y, where="post", color=style.COLOURS[0], label="optimum")
        for label, values in panel.expected.items():
            axes.plot(panel.x, values, linestyle="--", color=style.COLOURS[1], label=label)
            axes.legend(frameon=False)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        if panel.y_label == TIME:
            style.log_axis(axes)
        else:
            axes.set_ylim(bottom=0.0)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
    return figure


_FEWEST_SIZES = 3
_MOST_PANELS = 9
_MOST_CURVES = 6
_MOST_MARKERS = 40
NO_PLAN = "x"
"""The marker of a point without a plan."""

_HOLLOW = "white"


class _Quantity(NamedTuple):
    """What a plot against devices shows."""

    title: str
    axis: str
    of: Callable[[Record], float | None]


_THROUGHPUT = _Quantity("throughput", "microbatches per second", lambda record: record.throughput)
_PER_DEVICE = _Quantity(
    "throughput per device",
    "microbatches per second and device",
    lambda record: None if record.throughput is None else record.throughput / record.devices,
)


@dataclass(frozen=True)
class Look:
    """How a curve among ``count`` looks. ordered: the curves are steps of a quantity."""

    label: str
    index: int
    count: int
    ordered: bool = False

    @property
    def colour(self) -> str:
        return style.colour(self.index, self.count, ordered=self.ordered)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    """Each with a name for its file. A figure is of one workload, N, B and schedule; one of a single point is left
    out. A method has the same colour and marker in all of them.
    """
    methods = sorted({record.method for record in records}, key=method_order)
    looks = {method: Look(str(method), index, len(methods)) for index, method in enumerate(methods)}
    scenes: defaultdict[Scene, list[Record]] = defaultdict(list)
    for record in records:
        scenes[record.scene].append(record)
    exact_s = exact_times(records)
    for scene, of_scene in scenes.items():
        memories = sorted({record.memory_bytes for record in of_scene})
        devices = sorted({record.devices for record in of_scene})
        if len(devices) > 1:
            yield _file_name("throughput", scene), _against_devices(scene, of_scene, _THROUGHPUT, looks)
            yield _file_name("per-device", scene), _against_devices(scene, of_scene, _PER_DEVICE, looks)
        if len(memories) >= _FEWEST_SIZES:
            yield _file_name("memory", scene), _against_memory(scene, of_scene, devices)
        if len(devices) > 1 and any(slower(r, exact_s) for r in of_scene if not r.method.is_exact):
            yield _file_name("planners", scene), _against_exact(scene, of_scene, looks, memories, exact_s)


def _against_devices(
    scene: Scene, records: Sequence[Record], quantity: _Quantity, looks: Mapping[Method, Look]
) -> Figure:
    """A panel for each memory size and a curve for each method; with one method, a curve for each size instead."""
    memories = sorted({record.memory_bytes for record in records})
    methods = _methods_of(records)
    title = f"{_scene_text(scene)}: {quantity.title}"
    curves: dict[tuple[float, Method], list[Record]] = {
        (memory, method): [] for memory in memories for method in methods
    }
    for record in records:
        curves[record.memory_bytes, record.method].append(record)
    if len(methods) == 1:
        sizes = [Look(given_size_text(memory), i, len(memories), ordered=True) for i, memory in enumerate(memories)]
        panels = [("", list(zip(sizes, curves.values(), strict=True)))]
        title += f", {methods[0]}"
    else:
        panels = [
            (f"M = {given_size_text(memory)}", [(looks[method], curves[memory, method]) for method in methods])
            for memory in _spread(memories, _MOST_PANELS)
        ]
    figure, every = style.panels(title, [head for head, _ in panels])
    for axes, (_, of_panel) in zip(every, panels, strict=True):
        _curves(axes, of_panel, quantity)
    for axes in every:
        style.devices_axis(axes, [record.devices for record in records])
    finish(figure, every, quantity.axis, [value for r in records if (value := quantity.of(r)) is not None])
    return figure


def _against_memory(scene: Scene, records: Sequence[Record], devices: Sequence[int]) -> Figure:
    """A panel for each method, a curve for some numbers of devices."""
    shown = _spread(devices, _MOST_CURVES)
    methods = _methods_of(records)[:_MOST_PANELS]
    figure, every = style.panels(f"{_scene_text(scene)}: throughput by memory", [str(method) for method in methods])
    for axes, method in zip(every, methods, strict=True):
        axes.set_xlabel("GiB of memory per device")
        lines = []
        for index, number in enumerate(shown):
            of_curve = sorted(
                (r for r in records if r.method == method and r.devices == number), key=lambda r: r.memory_bytes
            )
            points = [(r.memory_bytes / 2**30, r.throughput) for r in of_curve]
            lines.append((Look(f"{number:,} devices", index, len(shown), ordered=True), points))
        draw_curves(axes, lines)
    of_shown = [record.throughput or 0.0 for record in records if record.devices in shown]
    finish(figure, every, "microbatches per second", of_shown)
    return figure


def _against_exact(
    scene: Scene,
    records: Sequence[Record],
    looks: Mapping[Method, Look],
    memories: Sequence[float],
    exact_s: dict[tuple[Scene, int, float, str], float],
) -> Figure:
    """A panel for each memory size: 1 is as fast as the exact plan."""
    shown = _spread(memories, _MOST_PANELS)
    title = f"{_scene_text(scene)}: time per microbatch over the exact plan's"
    figure, every = style.panels(title, [f"M = {given_size_text(memory)}" for memory in shown])
    ratios: list[float] = []
    for axes, memory in zip(every, shown, strict=True):
        lines = []
        for method in _methods_of(records):
            of_curve = [r for r in records if r.memory_bytes == memory and r.method == method]
            points = [(float(r.devices), slower(r, exact_s)) for r in of_curve]
            ratios += [ratio for _, ratio in points if ratio is not None]
            if not method.is_exact:
                lines.append((looks[method], points))
        width = style.LINE_WIDTH + style.WIDER * sum(
            any(y is not None and style.as_good(y, 1.0) for _, y in points) for _, points in lines
        )
        axes.axhline(1.0, color=style.COLOURS[0], linewidth=width, label="the exact plan")
        draw_curves(axes, lines)
        style.devices_axis(axes, [record.devices for record in records])
    finish(figure, every, "times the exact plan's time", [1.0, *ratios])
    return figure


def _methods_of(records: Sequence[Record]) -> list[Method]:
    return sorted({record.method for record in records}, key=method_order)


def _curves(axes: Axes, curves: Sequence[tuple[Look, Sequence[Record]]], quantity: _Quantity) -> None:
    """Draws the curves by devices."""
    draw_curves(axes, [(look, [(float(r.devices), quantity.of(r)) for r in records]) for look, records in curves])
    for look, records in curves:
        _marks(axes, records, quantity, look)


def _marks(axes: Axes, records: Sequence[Record], quantity: _Quantity, look: Look) -> None:
    """A cross at the bottom: no plan; hollow: a plan of the exact solver without proof."""
    _crosses(axes, [r.devices for r in records if quantity.of(r) is None], look)
    unproved = [r for r in records if r.method.is_exact and r.status == "feasible"]
    if unproved:
        values = [quantity.of(r) or 0.0 for r in unproved]
        axes.plot([r.devices for r in unproved], values, "o", color=look.colour, markerfacecolor=_HOLLOW)


def _crosses(axes: Axes, devices: Sequence[int], look: Look) -> None:
    """At the bottom, at these numbers of devices."""
    if devices:
        height = [0.02 + 0.03 * look.index] * len(devices)
        axes.plot(devices, height, NO_PLAN, color=look.colour, transform=axes.get_xaxis_transform())


def _explained(every: Sequence[Axes]) -> Iterator[Line2D]:
    """What ``_marks`` has drawn, for the legend: in whatever colour."""
    drawn = [line for axes in every for line in axes.get_lines() if str(line.get_label()).startswith("_")]
    if any(line.get_marker() == NO_PLAN for line in drawn):
        yield Line2D([], [], linestyle="", marker=NO_PLAN, color="#666666", label="no plan")
    if any(line.get_markerfacecolor() == _HOLLOW for line in drawn):
        yield Line2D([], [], linestyle="", marker="o", color="#666666", markerfacecolor=_HOLLOW, label="not proved")


def draw_curves(axes: Axes, lines: Sequence[tuple[Look, style.Points]]) -> None:
    """Each wide enough to be seen next to the others."""
    widths = style.widths([points for _, points in lines])
    for (look, points), of_line in zip(lines, widths, strict=True):
        axes.plot(
            [x for x, _ in points],
            [float("nan") if y is None else y for _, y in points],
            color=look.colour,
            marker=style.MARKERS[look.index % len(style.MARKERS)] if len(points) <= _MOST_MARKERS else "",
            label=look.label,
            linewidth=of_line["linewidth"],
            markersize=of_line["markersize"],
        )


def finish(figure: Figure, every: Sequence[Axes], quantity: str, values: Sequence[float]) -> None:
    """The axis of what is drawn, with its values, and the legend."""
    for axes in every:
        style.wide_axis(axes, values)
    figure.supylabel(quantity, fontsize=9)
    style.legend(figure, every[0], list(_explained(every)))


def _spread(values: Sequence[float], most: int) -> list[float]:
    """At most ``most`` of the values, the first and the last included, evenly spread."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _scene_text(scene: Scene) -> str:
    return f"{scene.name}, N = {scene.microbatches:,}, B = {given_size_text(scene.bandwidth_bytes_per_s)}/s"


def _file_name(kind: str, scene: Scene) -> str:
    bandwidth = re.sub(r"\s", "", given_size_text(scene.bandwidth_bytes_per_s))
    schedule = "" if scene.name == scene.workload else f"-{scene.schedule.replace(':', '-')}"
    return f"{kind}-{scene.workload}-N{scene.microbatches}-B{bandwidth}{schedule}"


def plan_figures(records: Sequence[PlanRecord], prices: Prices) -> Iterator[tuple[str, Figure]]:
    """Each with a name for its file; a figure is of one model and batch. One of a single cluster is left out. A GPU has
    the same colour and marker in all of them, and so has a way to train."""
    gpus = sorted({record.gpus_text for record in records})
    ways = sorted({record.way.text for record in records})
    cost = Cost(prices)
    for training, group in groupby(records, key=lambda record: record.training):
        of_training = list(group)
        if len({record.devices for record in of_training}) < 2:
            continue
        best = _of_sizes(best_of_clusters(of_training))
        name = f"{training.model}-b{training.batch}" + ("" if training.tokens is None else f"-s{training.tokens}")
        by_gpu = [(Look(gpu, index, len(gpus)), gpu) for index, gpu in enumerate(gpus)]
        curves = [(look, [one for one in best if one.gpus_text == gpu]) for look, gpu in by_gpu]
        if best:
            title = f"{training.text}: step of the best plan"
            yield f"step-{name}", _plan_figure(title, "seconds", [("", curves)], lambda one: one.step_s)
        if any(cost.of(one) for one in best):
            title = f"{training.text}: {cost.words}, best plan"
            yield f"cost-{name}", _plan_figure(title, cost.words, [("", curves)], cost.of)
        if len(ways) > 1 and best:
            yield f"ways-{name}", _ways(training, of_training, gpus, ways)


def _of_sizes(records: Iterable[PlanRecord]) -> list[PlanRecord]:
    """The plan with the shortest step of all clusters with the same kinds and the same number of GPUs."""
    best: dict[tuple[str, int], PlanRecord] = {}
    for one in records:
        key = one.gpus_text, one.devices
        if key not in best or (one.step_s or math.inf) < (best[key].step_s or math.inf):
            best[key] = one
    return list(best.values())


def _ways(training: TrainedBatch, records: Sequence[PlanRecord], gpus: Sequence[str], ways: Sequence[str]) -> Figure:
    """A panel for each GPU, a curve for each runtime and precision; a cross where there is no plan."""
    looks = [(Look(way, index, len(ways)), way) for index, way in enumerate(ways)]
    panels = [
        (
            gpu,
            [
                (look, _of_sizes([one for one in records if one.gpus_text == gpu and one.way.text == way]))
                for look, way in looks
            ],
        )
        for gpu in gpus[:_MOST_PANELS]
    ]
    title = f"{training.text}: tokens per second of each GPU"
    return _plan_figure(title, "tokens per second and GPU", panels, lambda one: one.tokens_per_s_per_device)


_Curves = Sequence[tuple[Look, Sequence[PlanRecord]]]


def _plan_figure(
    title: str,
    quantity: str,
    panels: Sequence[tuple[str, _Curves]],
    value: Callable[[PlanRecord], float | None],
) -> Figure:
    figure, every = style.panels(title, [head for head, _ in panels])
    values, devices = list[float](), list[int]()
    for axes, (_, curves) in zip(every, panels, strict=True):
        draw_curves(axes, [(look, [(float(one.devices), value(one)) for one in of_curve]) for look, of_curve in curves])
        for look, of_curve in curves:
            _crosses(axes, [one.devices for one in of_curve if value(one) is None], look)
        values += [found for _, of_curve in curves for one in of_curve if (found := value(one)) is not None]
        devices += [one.devices for _, of_curve in curves for one in of_curve]
    for axes in every:
        style.devices_axis(axes, devices)
    finish(figure, every, quantity, values)
    return figure
