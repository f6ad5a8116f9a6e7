"""A sweep as it goes on: a live line on a terminal, a line now and then in a pipe; and what it came to."""

from __future__ import annotations

import time
from collections import Counter

from rich.console import Console
from rich.text import Text

from piper_ray.model.figures import duration_text, given_size_text, plural, printable, size_text, time_text
from piper_ray.report.layout import Column, print_table
from piper_ray.report.live import LiveLog
from piper_ray.sweep.demand import Demand, PointKind
from piper_ray.sweep.point import Best, Progress, Sweep

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
    why = f", of {best.alike:,} as fast with the fewest devices, then the least memory" if best.alike > 1 else ""
    return (
        f"{time_text(best.time_per_sample_s)}/microbatch at K = {point.devices:,}, N = {point.microbatches:,}, "
        f"M = {given_size_text(point.memory_bytes)} ({point.planner}{why})"
    )


def print_forecast(console: Console, sweep: Sweep, demand: Demand) -> None:
    """What a sweep will take: a row for each kind of point."""
    counts = Counter(PointKind.of(point) for point in sweep.points)
    rows = []
    for kind, points in counts.items():
        sample = next(point for point in sweep.points if PointKind.of(point) == kind)
        forecast = demand.lattice(sample)
        need = demand.memory_bytes(sample)
        rows.append(
            [
                kind.workload,
                kind.planner,
                "yes" if kind.tensor_parallelism else "no",
                kind.recompute,
                kind.schedule,
                f"{points:,}",
                "?" if forecast.downsets is None else f"{forecast.downsets:,}",
                "?" if need is None else size_text(need, 2),
                duration_text(points * demand.seconds(sample)),
            ]
        )
    heads = ("points", "downsets", "memory of a worker", "about, on one core")
    columns = [Column("workload"), Column("planner"), Column("t > 1"), Column("recompute"), Column("schedule")]
    print_table(console, [*columns, *(Column(head, right=True) for head in heads)], rows)
    console.print()
    seconds = sum(demand.seconds(point) for point in sweep.points)
    console.print(
        f"{plural(len(sweep.points), 'point')} of {plural(len(sweep.graphs), 'workload')}, about "
        f"{duration_text(seconds)} on one core by a rough forecast",
        soft_wrap=True,
    )


def outcome_lines(progress: Progress) -> list[str]:
    """After the last point, or an interrupt."""
    before = f" ({progress.recorded:,} of them before)" if progress.recorded else ""
    counts = [f"{plural(progress.recorded + progress.done, 'point')} of {progress.points:,} on record{before}"]
    if progress.infeasible:
        counts.append(f"{progress.infeasible:,} infeasible")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in progress.errors.most_common())
    counts.append(f"{progress.failed:,} failed" + (f" ({kinds})" if kinds else ""))
    lines = [", ".join(counts)]
    of_run = " in this run" if progress.recorded else ""
    lines += [f"best of {label}{of_run}: {best_text(best)}" for label, best in sorted(progress.best.items())]
    if progress.done:
        capacity_s = progress.run_s * max(1, progress.workers)
        lines.append(
            f"{progress.start_s + progress.run_s:.1f} s: {progress.start_s:.1f} s to start, {progress.run_s:.1f} s on "
            f"{plural(progress.workers, 'worker')}, which solved for {progress.solving_s:.1f} s, "
            f"{100 * min(1.0, progress.solving_s / capacity_s):.0f} % of their time"
        )
    return lines
