"""Plots of a sweep: throughput against devices and against memory, and planners beside the exact one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from piper_ray.plots import style
from piper_ray.report.figures import given_size_text
from piper_ray.sweep.findings import Method, Record, Scene, exact_times, method_order, slower
from piper_ray.sweep.schema import PIPER

_FEWEST_SIZES = 3
_MOST_PANELS = 9
_MOST_CURVES = 6


def figures(records: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    """Each with a name for its file. A figure is of one workload, N and B; one of a single point is left out."""
    scenes: defaultdict[Scene, list[Record]] = defaultdict(list)
    for record in records:
        scenes[record.scene].append(record)
    exact_s = exact_times(records)
    for scene, of_scene in scenes.items():
        memories = sorted({record.memory_bytes for record in of_scene})
        methods = sorted({record.method for record in of_scene}, key=method_order)
        devices = sorted({record.devices for record in of_scene})
        if len(devices) > 1:
            yield _file_name("throughput", scene), _against_devices(scene, of_scene, methods, memories)
        if len(memories) >= _FEWEST_SIZES:
            yield _file_name("memory", scene), _against_memory(scene, of_scene, methods, devices)
        others = [m for m in methods if m.planner != PIPER]
        if len(devices) > 1 and any(slower(r, exact_s) for r in of_scene if r.method in others):
            yield _file_name("planners", scene), _against_exact(scene, of_scene, others, memories, exact_s)


def _against_devices(
    scene: Scene, records: Sequence[Record], methods: Sequence[Method], memories: Sequence[float]
) -> Figure:
    """A panel for each memory size; with one method, a curve for each size instead."""
    title = f"{_scene_text(scene)}: throughput"
    if len(methods) == 1:
        figure, (axes,) = style.panels(1, f"{title}, {methods[0]}", width_in=6.0, height_in=4.0)
        for index, memory in enumerate(memories):
            of_curve = [record for record in records if record.memory_bytes == memory]
            _curve(axes, of_curve, given_size_text(memory), index, len(memories))
        every = [axes]
    else:
        shown = _spread(memories, _MOST_PANELS)
        figure, every = style.panels(len(shown), title)
        for axes, memory in zip(every, shown, strict=True):
            axes.set_title(f"M = {given_size_text(memory)}")
            for index, method in enumerate(methods):
                of_curve = [r for r in records if r.memory_bytes == memory and r.method == method]
                _curve(axes, of_curve, str(method), index, len(methods))
    for axes in every:
        style.devices_axis(axes, [record.devices for record in records])
    _finish(figure, every, "samples per second", [record.throughput or 0.0 for record in records])
    return figure


def _against_memory(
    scene: Scene, records: Sequence[Record], methods: Sequence[Method], devices: Sequence[int]
) -> Figure:
    """A panel for each method, a curve for some numbers of devices."""
    shown = _spread(devices, _MOST_CURVES)
    figure, every = style.panels(min(len(methods), _MOST_PANELS), f"{_scene_text(scene)}: throughput by memory")
    for axes, method in zip(every, methods, strict=False):
        axes.set_title(str(method))
        axes.set_xlabel("GiB of memory per device")
        for index, number in enumerate(shown):
            of_curve = sorted(
                (r for r in records if r.method == method and r.devices == number), key=lambda r: r.memory_bytes
            )
            points = [(r.memory_bytes / 2**30, r.throughput) for r in of_curve]
            _line(axes, points, f"{number:,} devices", index, len(shown))
    of_shown = [record.throughput or 0.0 for record in records if record.devices in shown]
    _finish(figure, every, "samples per second", of_shown)
    return figure


def _against_exact(
    scene: Scene,
    records: Sequence[Record],
    methods: Sequence[Method],
    memories: Sequence[float],
    exact_s: dict[tuple[Scene, int, float, str], float],
) -> Figure:
    """A panel for each memory size: 1 is as fast as the exact plan."""
    shown = _spread(memories, _MOST_PANELS)
    figure, every = style.panels(len(shown), f"{_scene_text(scene)}: time per sample over the exact plan's")
    ratios: list[float] = []
    for axes, memory in zip(every, shown, strict=True):
        axes.set_title(f"M = {given_size_text(memory)}")
        axes.axhline(1.0, color=style.COLOURS[0], linewidth=1.0)
        for index, method in enumerate(methods):
            of_curve = [r for r in records if r.memory_bytes == memory and r.method == method]
            points = [(float(r.devices), slower(r, exact_s)) for r in of_curve]
            ratios += [ratio for _, ratio in points if ratio is not None]
            _line(axes, points, str(method), index + 1, len(methods) + 1)
        style.devices_axis(axes, [record.devices for record in records])
    _finish(figure, every, "times the exact plan's time", [1.0, *ratios])
    return figure


def _curve(axes: Axes, records: Sequence[Record], label: str, index: int, count: int) -> None:
    """Throughput by devices. A cross at the bottom: no plan; hollow: a plan of the exact solver without proof."""
    _line(axes, [(float(r.devices), r.throughput) for r in records], label, index, count)
    colour = style.colour(index, count)
    none = [r.devices for r in records if r.throughput is None]
    height = 0.02 + 0.03 * index
    axes.plot(none, [height] * len(none), "x", color=colour, transform=axes.get_xaxis_transform(), clip_on=False)
    unproved = [r for r in records if r.method.planner == PIPER and r.status == "feasible" and r.throughput]
    axes.plot(
        [r.devices for r in unproved],
        [r.throughput or 0.0 for r in unproved],
        "o",
        color=colour,
        markerfacecolor="white",
    )


def _line(axes: Axes, points: Sequence[tuple[float, float | None]], label: str, index: int, count: int) -> None:
    """Points without a figure leave a hole."""
    axes.plot(
        [x for x, _ in points],
        [float("nan") if y is None else y for _, y in points],
        color=style.colour(index, count),
        marker=style.MARKERS[index % len(style.MARKERS)] if len(points) <= 40 else "",
        label=label,
    )


def _finish(figure: Figure, every: Sequence[Axes], quantity: str, values: Sequence[float]) -> None:
    for axes in every:
        style.wide_axis(axes, values)
    figure.supylabel(quantity, fontsize=9)
    style.legend(figure, every[0])


def _spread(values: Sequence[float], most: int) -> list[float]:
    """At most so many of them, the first and the last included, evenly."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _scene_text(scene: Scene) -> str:
    return f"{scene.workload}, N = {scene.microbatches:,}, B = {given_size_text(scene.bandwidth_bytes_per_s)}/s"


def _file_name(kind: str, scene: Scene) -> str:
    bandwidth = re.sub(r"\s", "", given_size_text(scene.bandwidth_bytes_per_s))
    return f"{kind}-{scene.workload}-N{scene.microbatches}-B{bandwidth}"
