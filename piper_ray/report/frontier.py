"""A frontier for people: its log, its steps as a table, its plot; and the table over the devices of two kinds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from piper_ray.engine.frontier.kinds import Counts, KindPoint
from piper_ray.engine.frontier.result import CurveAdvanced, Frontier, FrontierPoint, PointClosed
from piper_ray.model.events import Event
from piper_ray.model.figures import (
    NEAR_DIGITS,
    PROOF_DIGITS,
    percent_text,
    plural,
    printable,
    range_text,
    rounded,
    time_text,
)
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Status
from piper_ray.model.stop import StoppedBy
from piper_ray.report.log import SolverLog
from piper_ray.report.summary import Throughput
from piper_ray.report.terminal import Column, csv_text, print_lines, print_table
from piper_ray.workloads.formats.plans import Document

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST_ROWS = 24
_POINT_HEAD = (
    f"{'point':>10}  {'microbatch':>11}  {'lower bound':>11}  {'gap':>9}  {'evaluations':>11}  {'proved':>14}  "
    f"{'time':>8}"
)
_STYLES = {Status.OPTIMAL: "bold green", Status.FEASIBLE: "bold yellow", Status.INFEASIBLE: "bold red"}


class FrontierLog(SolverLog):
    """Adds a row for each point of a large lattice, and on a terminal how many points are proved."""

    def __init__(self, console: Console, time_limit_s: float | None = None) -> None:
        super().__init__(console, time_limit_s)
        self._curve: CurveAdvanced | None = None
        self._point: PointClosed | None = None

    def __call__(self, event: Event | CurveAdvanced | PointClosed) -> None:
        if self._ended:
            return
        if isinstance(event, PointClosed):
            self._point = event
        elif isinstance(event, CurveAdvanced):
            self._curve = event
            if self._point is not None:
                self._print_point(self._point, event)
                self._point = None
        else:
            super().__call__(event)

    def live_line(self) -> Text:
        line = super().live_line()
        if self._curve is None:
            return line
        done = f"{self._curve.closed:,} of {self._curve.points:,} points, {self._curve.evaluations:,} evaluations; "
        return Text(done, style="dim").append_text(line)

    def _print_point(self, point: PointClosed, curve: CurveAdvanced) -> None:
        self._begin_rows(_POINT_HEAD)
        name = f"{'s' if point.by_sum else 'K'} = {point.position:,}"
        without = math.isinf(point.lower_s)
        known = "-" if math.isinf(point.upper_s) else time_text(point.upper_s, PROOF_DIGITS)
        time_s = "infeasible" if without else known
        lower = "-" if without else time_text(point.lower_s, PROOF_DIGITS)
        gap = "-" if math.isinf(point.upper_s) else percent_text(max(0.0, 1.0 - point.lower_s / point.upper_s))
        proved = f"{curve.closed:,} of {curve.points:,}"
        self.line(
            f"{name:>10}  {time_s:>11}  {lower:>11}  {gap:>9}  {point.evaluations:>11}  {proved:>14}  "
            f"{point.elapsed_s:6.2f} s"
        )


def print_frontier(console: Console, found: Frontier, budgets: Sequence[FrontierPoint]) -> None:
    """The steps of both curves, what is proved, and what it took."""
    throughput = Throughput.of(found.instance.batch)
    for points, by_budget in ((found.points(), False), (budgets, True)):
        if any(point.time_per_sample_s is not None for point in points):
            console.print()
            print_table(console, *_steps_table(points, by_budget, throughput))
            steps = sum(point.is_step for point in points)
            if steps > _MOST_ROWS:
                console.print(f"some of {steps:,} steps; --out writes all", soft_wrap=True)
    console.print()
    curves = ((found.points(), "numbers of devices"), (budgets, "bounds on the sum of d"))
    print_lines(console, [_status_line(points, what, found.stopped_by) for points, what in curves if points])
    stats = found.stats
    looked_at = plural(stats.evaluations, "solve" if found.by_solves else "evaluation")
    work = (
        f"{stats.preparation_s + stats.search_s:.2f} s: lattice and stage costs {stats.preparation_s:.2f} s, search "
        f"{stats.search_s:.2f} s in {looked_at}"
    )
    print_lines(console, [work] if found.reason is None else [printable(found.reason), work])


def _steps_table(
    points: Sequence[FrontierPoint], by_budget: bool, throughput: Throughput
) -> tuple[list[Column], list[list[str]]]:
    """Each stretch of equal time: where it begins and ends. A long table keeps steps evenly spaced on a log scale."""
    steps: list[tuple[FrontierPoint, int]] = []
    for point in points:
        position = point.data_parallel_budget if by_budget else point.devices
        if point.is_step:
            steps.append((point, position))
        elif steps and point.time_per_sample_s is not None:
            steps[-1] = (steps[-1][0], position)
    shown = _spread([point.data_parallel_budget if by_budget else point.devices for point, _ in steps])
    rows = []
    for index in shown:
        point, last = steps[index]
        time_s = point.time_per_sample_s
        assert time_s is not None
        rate = throughput.per_s(time_s) if time_s > 0 else math.inf
        first = point.data_parallel_budget if by_budget else point.devices
        rates = [rounded(figure, NEAR_DIGITS) for figure in (rate, rate / point.devices)]
        rows.append([f"{first:,}", f"{last:,}", time_text(time_s, NEAR_DIGITS), *rates, percent_text(point.gap or 0.0)])
    heads = [
        "sum of d" if by_budget else "devices",
        "up to",
        "time/microbatch",
        f"{throughput.unit}/s",
        "per device",
        "gap",
    ]
    return [Column(head, right=True) for head in heads], rows


def _spread(positions: Sequence[int]) -> list[int]:
    """Indices of all, or of the first, the last and some between, evenly spaced in the logarithm."""
    if len(positions) <= _MOST_ROWS:
        return list(range(len(positions)))
    logs = np.log(positions)
    wanted = np.linspace(logs[0], logs[-1], _MOST_ROWS)
    return sorted({int(np.argmin(np.abs(logs - at))) for at in wanted})


def _status_line(points: Sequence[FrontierPoint], what: str, stopped_by: StoppedBy | None) -> Text:
    counts = Counter(point.status for point in points)
    steps = sum(point.is_step for point in points)
    line = Text()
    for status in Status:
        if counts[status]:
            line.append(", " if line else "").append(
                f"{status.value} {counts[status]:,}", style=_STYLES.get(status, "")
            )
    line.append(f" of {len(points):,} {what}" + (f" ({stopped_by})" if stopped_by else ""))
    if counts[Status.INFEASIBLE] and counts[Status.INFEASIBLE] < len(points):
        without = range_text(point.devices for point in points if point.status is Status.INFEASIBLE)
        if what == "numbers of devices":
            line.append(f", without a plan: {without}")
    return line.append(f"; {plural(steps, 'step')}")


def print_kind_table(screen: Console, kinds: Sequence[str], points: Sequence[KindPoint]) -> None:
    """Times of a microbatch, with the gap of those that are not proved; then how many are proved."""
    first, second = map(printable, kinds)
    of_pair = {one.devices: _cell(one) for one in points}
    others = sorted({one.devices[1] for one in points})
    columns = [Column(f"{first} \\ {second}", right=True), *(Column(f"{count:,}", right=True) for count in others)]
    rows = [
        [f"{count:,}", *(of_pair.get((count, other), "?" if count or other else "") for other in others)]
        for count in sorted({one.devices[0] for one in points})
    ]
    print_table(screen, columns, rows)
    proved = sum(one.solution.status in (Status.OPTIMAL, Status.INFEASIBLE) for one in points)
    solved = sum(one.solved for one in points)
    print_lines(screen, ["", f"{proved:,} of {plural(len(points), 'point')} proved, by {plural(solved, 'solve')}"])


def _cell(point: KindPoint) -> str:
    found = point.solution
    if found.time_per_sample_s is None:
        return "none fits" if found.status is Status.INFEASIBLE else "?"
    gap = "" if found.gap is None or found.status is Status.OPTIMAL else f" (gap {percent_text(found.gap)})"
    return f"{time_text(found.time_per_sample_s, NEAR_DIGITS)}{gap}"


def kind_rows(kinds: Sequence[str], points: Sequence[KindPoint], plans: Mapping[Counts, str]) -> list[Document]:
    """A row for each point, with the name of its plan's file, if one was written."""
    return [
        {
            **dict(zip(kinds, one.devices, strict=True)),
            "time_per_sample_s": one.solution.time_per_sample_s,
            "lower_bound_s": None if one.solution.status is Status.INFEASIBLE else one.solution.lower_bound_s,
            "status": one.solution.status.value,
            "plan_file": plans.get(one.devices),
        }
        for one in points
    ]


def kind_csv(rows: Sequence[Document]) -> str:
    """The table as a CSV file."""
    return csv_text(rows[0], (row.values() for row in rows))


def kind_figure(instance: Instance, kinds: Sequence[str], points: Sequence[KindPoint]) -> Figure | None:
    """Time against the devices of the second kind, a curve for each number of the first. None where no plan is."""
    from piper_ray.report.plots import style
    from piper_ray.report.plots.curves import TIME, Look, draw_curves, finish

    known = [one.solution.time_per_sample_s for one in points if one.solution.time_per_sample_s is not None]
    if not known:
        return None
    figure, (axes,) = style.panels(instance.name, [f"N = {instance.microbatches:,}"])
    counts = sorted({one.devices[0] for one in points})
    looks = [Look(f"{count:,} {kinds[0]}", at, len(counts), ordered=True) for at, count in enumerate(counts)]
    lines = [
        (look, [(float(x.devices[1]), x.solution.time_per_sample_s) for x in points if x.devices[0] == count])
        for look, count in zip(looks, counts, strict=True)
    ]
    draw_curves(axes, lines)
    style.devices_axis(axes, [one.devices[1] for one in points])
    axes.set_xlabel(f"devices of {kinds[1]}")
    finish(figure, [axes], TIME, known)
    return figure
