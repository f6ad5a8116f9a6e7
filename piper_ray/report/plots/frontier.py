"""Plots of a frontier: time per sample and speed per device, against devices and against the bound on the sum of d."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.engine.frontier.points import FrontierPoint
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.report.plots.curves import CurveStyle, Panel, Series
from piper_ray.report.speed import Throughput


def frontier_panels(
    instance: Instance,
    points: Sequence[FrontierPoint],
    budgets: Sequence[FrontierPoint],
    schedule: Schedule = PAPERS_SCHEDULE,
) -> list[Panel]:
    """Against devices: time per sample beside a perfect speedup, and speed per device; then time against s."""
    panels = []
    batch = f"N = {instance.microbatches:,}"
    if schedule != PAPERS_SCHEDULE:
        batch += f", {schedule.name.value}"
    known = [(point.devices, point.time_per_sample_s) for point in points if point.time_per_sample_s]
    if known:
        devices, times_s = [k for k, _ in known], [time_s for _, time_s in known]
        perfect_s = [times_s[0] * devices[0] / k for k in devices]
        curves = (
            Series("optimum", devices, times_s, CurveStyle.STEPS),
            Series(f"perfect speedup over K = {devices[0]:,}", devices, perfect_s, CurveStyle.DASHED),
        )
        panels.append(Panel(batch, "devices K", "time per microbatch (s)", curves, log_x=True, log_y=True))
        throughput = Throughput.of(instance.batch)
        rates = [throughput.per_s(time_s) / k for k, time_s in known]
        shares = (Series("optimum", devices, rates, CurveStyle.STEPS),)
        panels.append(Panel(batch, "devices K", f"{throughput.unit} per second and device", shares, log_x=True))
    known = [(point.data_parallel_budget, point.time_per_sample_s) for point in budgets if point.time_per_sample_s]
    if known:
        curve = Series("optimum", [s for s, _ in known], [time_s for _, time_s in known], CurveStyle.STEPS)
        title = f"{batch}, K = {instance.devices:,}"
        label = "bound on the sum of data-parallel degrees"
        panels.append(Panel(title, label, "time per microbatch (s)", (curve,), log_x=True, log_y=True))
    return panels
