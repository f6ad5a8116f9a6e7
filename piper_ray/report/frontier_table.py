"""A frontier's points as a table for other programs: Parquet or CSV, one row for each point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from piper_ray.engine.frontier.result import FrontierPoint
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.storage.files import written_whole
from piper_ray.version import __version__

SCHEMA_NAME = "piper-ray/frontier"
SCHEMA_VERSION = 1
"""Raised when a column changes its meaning or goes; new columns at the end do not raise it."""

DEVICES, BUDGETS = "devices", "data_parallel_budget"

FORMATS = (".parquet", ".csv")


@dataclass(frozen=True)
class PlanEntry:
    """A plan that was written, and the name of its file."""

    plan: Plan
    file: str


@dataclass(frozen=True)
class _PointFacts:
    """What the columns of one point are read from. entry: its plan; None where no plan was written."""

    instance: Instance
    schedule: Schedule
    curve: str
    point: FrontierPoint
    entry: PlanEntry | None


_COLUMNS: tuple[tuple[pa.Field, Callable[[_PointFacts], object]], ...] = (
    (pa.field("curve", pa.string(), False), lambda row: row.curve),
    (pa.field("devices", pa.int64(), False), lambda row: row.point.devices),
    (pa.field("data_parallel_budget", pa.int64(), False), lambda row: row.point.data_parallel_budget),
    (pa.field("status", pa.string(), False), lambda row: row.point.status.value),
    (pa.field("time_per_sample_s", pa.float64()), lambda row: row.point.time_per_sample_s),
    (pa.field("lower_bound_s", pa.float64()), lambda row: _finite(row.point.lower_bound_s)),
    (pa.field("gap", pa.float64()), lambda row: row.point.gap),
    (pa.field("throughput_samples_per_s", pa.float64()), lambda row: _throughput(row.instance, row.point)),
    (pa.field("is_step", pa.bool_(), False), lambda row: row.point.is_step),
    (pa.field("plan_devices", pa.int64()), lambda row: row.entry and row.entry.plan.devices),
    (pa.field("plan_data_parallel_sum", pa.int64()), lambda row: row.entry and row.entry.plan.data_parallel_sum),
    (pa.field("plan_stages", pa.int64()), lambda row: row.entry and len(row.entry.plan.stages)),
    (pa.field("plan_file", pa.string()), lambda row: row.entry and row.entry.file),
    (pa.field("schedule", pa.string(), False), lambda row: row.schedule.name.value),
)
COLUMNS = pa.schema([field for field, _ in _COLUMNS])


def frontier_table(
    instance: Instance,
    points: Mapping[str, Sequence[FrontierPoint]],
    plans: Mapping[int, PlanEntry] | None = None,
    schedule: Schedule = PAPERS_SCHEDULE,
) -> pa.Table:
    """points: the points of each curve, by its name. plans: those of steps along the devices, by the number of devices.
    schedule: the schedule of all points.

    Times in s, of a microbatch. The throughput is in samples where the batch says how many a microbatch holds, else in
    microbatches. lower_bound_s is null where there is no plan at all; plan columns are null where no plan was written.
    """
    rows = (
        _PointFacts(instance, schedule, curve, point, (plans or {}).get(point.devices) if curve == DEVICES else None)
        for curve, of_curve in points.items()
        for point in of_curve
    )
    metadata = {
        "schema": SCHEMA_NAME,
        "schema_version": str(SCHEMA_VERSION),
        "tool_version": __version__,
        "instance_name": instance.name,
        "instance_digest": instance.digest,
        "microbatches": str(instance.microbatches),
        "memory_bytes": repr(instance.memory_bytes),
        "bandwidth_bytes_per_s": repr(instance.bandwidth_bytes_per_s),
    }
    written = [{field.name: value_of(row) for field, value_of in _COLUMNS} for row in rows]
    return pa.Table.from_pylist(written, schema=COLUMNS.with_metadata(metadata))


def write_table(table: pa.Table, path: Path) -> None:
    """Parquet or CSV by the name's end; the whole file or none. Raises UsageError."""
    refuse_other_formats(path)
    writers: dict[str, Callable[[pa.Table, Path], object]] = {
        ".parquet": pyarrow.parquet.write_table,
        ".csv": pyarrow.csv.write_csv,
    }
    with written_whole(path) as file:
        writers[path.suffix.lower()](table, file)


def refuse_other_formats(path: Path) -> None:
    """Raises UsageError unless the name ends in .parquet or .csv."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: tables are written as {' or '.join(FORMATS)}")


def _finite(bound_s: float) -> float | None:
    return bound_s if math.isfinite(bound_s) else None


def _throughput(instance: Instance, point: FrontierPoint) -> float | None:
    time_s = point.time_per_sample_s
    return (instance.batch.samples_per_microbatch or 1) / time_s if time_s else None
