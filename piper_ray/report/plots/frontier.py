"""Plots of a frontier: time per sample and speed per device, against devices and against the bound on the sum of d."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from piper_ray.engine.frontier.result import FrontierPoint
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.report.plots import style
from piper_ray.report.speed import Throughput

_TIME = "time per microbatch (s)"


class _Panel(NamedTuple):
    """A pair of axes with the optimum as steps over ``x``. expected: a dashed curve beside it, by what it is."""

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
    """Against devices: time per sample beside a perfect speedup, and speed per device; then time against s. None where
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
        panels.append(_Panel(batch, "devices K", _TIME, devices, times_s, expected))
        throughput = Throughput.of(instance.batch)
        rates = [throughput.per_s(time_s) / k for k, time_s in known]
        panels.append(_Panel(batch, "devices K", f"{throughput.unit} per second and device", devices, rates, {}))
    known = [(point.data_parallel_budget, point.time_per_sample_s) for point in budgets if point.time_per_sample_s]
    if known:
        title, label = f"{batch}, K = {instance.devices:,}", "bound on the sum of data-parallel degrees"
        panels.append(_Panel(title, label, _TIME, [s for s, _ in known], [time_s for _, time_s in known], {}))
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
        if panel.y_label == _TIME:
            style.log_axis(axes)
        else:
            axes.set_ylim(bottom=0.0)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
    return figure
