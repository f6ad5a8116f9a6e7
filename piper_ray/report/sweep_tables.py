"""The tables of a sweep: planners compared, the best of each memory size, throughput by devices, errors."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from piper_ray.model.figures import given_size_text, time_text
from piper_ray.report.layout import Column
from piper_ray.sweep.findings import Record, best_of_each, comparisons

MOST_COLUMNS = 8
"""Of curves, in a table by devices."""


@dataclass(frozen=True)
class FindingsTable:
    """A title, and cells as text. left: how many columns hold words; the others hold figures."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int

    @property
    def columns(self) -> list[Column]:
        """For a terminal."""
        return [Column(head, right=index >= self.left) for index, head in enumerate(self.heads)]

    def markdown(self) -> str:
        marks = ["---" if index < self.left else "---:" for index in range(len(self.heads))]
        rows = [self.heads, tuple(marks), *self.rows]
        cells = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
        return f"## {self.title}\n\n" + "\n".join(cells) + "\n"


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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV)
    writer.writerows([of(record) for of in _CSV.values()] for record in records)  # None is written as nothing
    return text.getvalue()


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
            str(r.stages),
            time_text(r.time_per_sample_s or 0.0),
            _rate(r.throughput),
        )
        for r in best_of_each(records)
    ]
    title = "Best plans, of equally fast ones those on the fewest devices"
    figures = ("N", "B", "M", "K", "stages", "time per microbatch", "microbatches/s")
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
