"""A sweep in words: how it goes on and what it came to; its tables of planners, best plans, throughput and errors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from piper_ray.model.figures import duration_text, given_size_text, plural, printable, size_text, time_text
from piper_ray.report.terminal import Column, FindingsTable, LiveLog, csv_text, print_table
from piper_ray.sweep.demand import Demand, PointKind, kind_of
from piper_ray.sweep.findings import Record, best_of_each, comparisons
from piper_ray.sweep.plan_point import PlanPoint
from piper_ray.sweep.point import Best, Point, Progress, Sweep

_LINE_EVERY_S = 10.0


class SweepLog(LiveLog):
    """A ``SweepListener`` that prints to ``console``; a context manager, so that the live line goes away."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress: Progress | None = None
        self._printed_at = time.monotonic()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._ended:
            return
        self._console.print(f"note  {printable(text)}", soft_wrap=True)

    def __call__(self, progress: Progress) -> None:
        self._progress = progress
        if not self._ended and self._live is None and time.monotonic() - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = time.monotonic()
            self._console.print(progress_text(progress), soft_wrap=True)

    def live_line(self) -> Text:
        text = "starting" if self._progress is None else progress_text(self._progress)
        return Text(text, style="dim")


def progress_text(progress: Progress) -> str:
    """``412 of 1,000 points, 3 failed, 588 left, about 12 s, bert32 best 703.591 us at K = 2,048 ...``."""
    parts = [
        f"{progress.recorded + progress.done:,} of {progress.points:,} points",
        f"{progress.failed:,} failed",
        f"{progress.left:,} left",
    ]
    if progress.eta_s is not None and progress.left:
        parts.append(f"about {duration_text(progress.eta_s)}")
    label = progress.latest_best
    if label is not None:
        parts.append(f"best of {label} {best_text(progress.best[label])}")
    return ", ".join(parts)


def best_text(best: Best) -> str:
    """What was found, where, and why that one of several that are as fast."""
    point = best.point
    if isinstance(point, PlanPoint):
        of_gpu = point.gpu if len(point.kinds) > 1 else f"{plural(point.nodes, 'node')} of {point.gpu}"
        where = f"{of_gpu}, batch {point.batch:,}, {point.precision}"
        return f"{time_text(best.time_per_sample_s)}/sample on {where} ({point.trained_by})"
    why = f", of {best.alike:,} as fast with the fewest devices, then the least memory" if best.alike > 1 else ""
    return (
        f"{time_text(best.time_per_sample_s)}/microbatch at K = {point.devices:,}, N = {point.microbatches:,}, "
        f"M = {given_size_text(point.memory_bytes)} ({point.planner}{why})"
    )


def print_forecast(console: Console, sweep: Sweep, demand: Demand) -> None:
    """What a sweep will take: a row for each kind of point."""
    solved = [point for point in sweep.points if isinstance(point, Point)]
    if solved:
        _print_solves(console, solved, demand)
        console.print()
    plans = Counter(kind_of(point) for point in sweep.points if isinstance(point, PlanPoint))
    if plans:
        rows = [[*map(str, kind), f"{points:,}"] for kind, points in plans.items()]
        names = [Column(head) for head in ("model", "runtime", "precision")]
        print_table(console, [*names, Column("nodes", right=True), Column("plans", right=True)], rows)
        console.print()
    seconds = sum(demand.seconds(point) for point in sweep.points)
    subjects = {point.workload for point in solved}
    models = {point.workload for point in sweep.points} - subjects
    of = [plural(len(found), word) for found, word in ((subjects, "workload"), (models, "model")) if found]
    console.print(
        f"{plural(len(sweep.points), 'point')} of {' and '.join(of)}, about {duration_text(seconds)} on one core by a "
        "rough forecast",
        soft_wrap=True,
    )


def _print_solves(console: Console, points: Sequence[Point], demand: Demand) -> None:
    counts = Counter(PointKind.of(point) for point in points)
    rows = []
    for kind, count in counts.items():
        sample = next(point for point in points if PointKind.of(point) == kind)
        forecast = demand.lattice(sample)
        need = demand.memory_bytes(sample)
        rows.append(
            [
                kind.workload,
                kind.planner,
                "yes" if kind.tensor_parallelism else "no",
                kind.recompute,
                kind.schedule,
                f"{count:,}",
                "?" if forecast.downsets is None else f"{forecast.downsets:,}",
                "?" if need is None else size_text(need, 2),
                duration_text(count * demand.seconds(sample)),
            ]
        )
    heads = ("points", "downsets", "memory of a worker", "about, on one core")
    columns = [Column("workload"), Column("planner"), Column("t > 1"), Column("recompute"), Column("schedule")]
    print_table(console, [*columns, *(Column(head, right=True) for head in heads)], rows)


def outcome_lines(progress: Progress) -> list[str]:
    """The lines that follow the last point, or an interrupt."""
    before = f" ({progress.recorded:,} of them before)" if progress.recorded else ""
    counts = [f"{plural(progress.recorded + progress.done, 'point')} of {progress.points:,} on record{before}"]
    if progress.infeasible:
        counts.append(f"{progress.infeasible:,} infeasible")
    if progress.refused:
        counts.append(f"{progress.refused:,} refused")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in progress.errors.most_common())
    counts.append(f"{progress.failed:,} failed" + (f" ({kinds})" if kinds else ""))
    lines = [", ".join(counts)]
    of_run = " in this run" if progress.recorded else ""
    lines += [f"best of {label}{of_run}: {best_text(best)}" for label, best in sorted(progress.best.items())]
    if progress.done:
        capacity_s = max(progress.worker_s, 1e-9)
        lines.append(
            f"{progress.start_s + progress.run_s:.1f} s: {progress.start_s:.1f} s to start, {progress.run_s:.1f} s on "
            f"{plural(progress.workers, 'worker')}, which solved for {progress.solving_s:.1f} s, "
            f"{100 * min(1.0, progress.solving_s / capacity_s):.0f} % of their time; {progress.cpu_s:.1f} s of CPU, "
            f"{100 * progress.cpu_s / capacity_s:.0f} %, {time_text(progress.cpu_s / progress.done, 3)} a point"
        )
    return lines


MOST_COLUMNS = 8
"""The most curves of a table by devices."""


def tables(records: Sequence[Record]) -> list[FindingsTable]:
    """All tables that have rows."""
    found = [_planners(records), _best(records), *_by_devices(records), _errors(records)]
    return [table for table in found if table.rows]


_CSV: Mapping[str, Callable[[Record], object]] = {
    "workload": lambda r: r.scene.workload,
    "planner": lambda r: r.method.planner,
    "restrictions": lambda r: r.method.without,
    "devices": lambda r: r.devices,
    "microbatches": lambda r: r.scene.microbatches,
    "memory_bytes": lambda r: r.memory_bytes,
    "bandwidth_bytes_per_s": lambda r: r.scene.bandwidth_bytes_per_s,
    "status": lambda r: r.status,
    "time_per_sample_s": lambda r: r.time_per_sample_s,
    "lower_bound_s": lambda r: r.lower_bound_s,
    "devices_used": lambda r: r.devices_used,
    "stages": lambda r: r.stages,
    "seconds": lambda r: r.seconds,
    "error_kind": lambda r: r.error_kind,
    "error": lambda r: r.error,
    "schedule": lambda r: r.scene.schedule,
}


def points_csv(records: Sequence[Record]) -> str:
    """Every point, in full figures, without its plan."""
    return csv_text(_CSV, ([of(record) for of in _CSV.values()] for record in records))


def _planners(records: Sequence[Record]) -> FindingsTable:
    rows = [
        (
            c.workload,
            str(c.method),
            f"{c.points:,}",
            f"{c.proved:,}",
            f"{c.unproved:,}",
            f"{c.infeasible:,}",
            f"{c.failed:,}",
            _times(c.mean_slower),
            _times(c.most_slower),
            time_text(c.median_s, 3),
        )
        for c in comparisons(records)
    ]
    figures = ("points", "proved", "plans", "none", "failed", "slower, mean", "at most", "solve, median")
    return FindingsTable("Planners", ("workload", "planner", *figures), tuple(rows), 2)


def _best(records: Sequence[Record]) -> FindingsTable:
    rows = [
        (
            r.scene.name,
            str(r.method),
            f"{r.scene.microbatches:,}",
            given_size_text(r.scene.bandwidth_bytes_per_s) + "/s",
            given_size_text(r.memory_bytes),
            f"{r.devices:,}",
            "" if r.devices_used is None else f"{r.devices_used:,}",
            str(r.stages),
            time_text(r.time_per_sample_s or 0.0),
            _rate(r.throughput),
        )
        for r in best_of_each(records)
    ]
    title = "Best plans, of equally fast ones those on the fewest devices"
    figures = ("N", "B", "M", "K", "used", "stages", "time per microbatch", "microbatches/s")
    return FindingsTable(title, ("workload", "planner", *figures), tuple(rows), 2)


def _by_devices(records: Sequence[Record]) -> list[FindingsTable]:
    """For each workload, N and B; columns are planners and memory sizes."""
    found = []
    for scene in dict.fromkeys(record.scene for record in records):
        of_scene = [record for record in records if record.scene == scene]
        devices = sorted({record.devices for record in of_scene})
        curves = list(dict.fromkeys((record.method, record.memory_bytes) for record in of_scene))
        cells = {(r.method, r.memory_bytes, r.devices): _cell(r) for r in of_scene}
        for start in range(0, len(curves) if len(devices) > 1 else 0, MOST_COLUMNS):
            shown = curves[start : start + MOST_COLUMNS]
            heads = ("K", *(f"{method} {given_size_text(memory)}" for method, memory in shown))
            rows = [
                (f"{number:,}", *(cells.get((method, memory, number), "") for method, memory in shown))
                for number in devices
            ]
            bandwidth = given_size_text(scene.bandwidth_bytes_per_s)
            title = f"Microbatches per second: {scene.name}, N = {scene.microbatches:,}, B = {bandwidth}/s"
            found.append(FindingsTable(title, heads, tuple(rows), 0))
    return found


def _errors(records: Sequence[Record]) -> FindingsTable:
    counts = Counter((r.scene.name, str(r.method), r.error_kind, r.error) for r in records if r.status == "error")
    rows = [
        (workload, method, kind or "", " ".join((text or "").split())[:100], f"{count:,}")
        for (workload, method, kind, text), count in counts.most_common()
    ]
    return FindingsTable("Errors", ("workload", "planner", "kind", "first words", "points"), tuple(rows), 4)


def _cell(record: Record) -> str:
    if record.throughput is not None:
        return _rate(record.throughput)
    return "none" if record.status == "infeasible" else record.status


def _rate(microbatches_per_s: float | None) -> str:
    return "-" if microbatches_per_s is None else f"{microbatches_per_s:,.5g}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f} x"
