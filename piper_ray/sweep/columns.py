"""The columns of a sweep's dataset: its schema (``columns.toml``), the order of its rows, and its version.

A dataset is a folder of Parquet files, ``workload=LABEL/part-*.parquet``, partitioned as Hive does; any reader of such
folders takes it, the label being a column there. A row is a finished point. For a baseline ``infeasible`` means that it
finds no plan, not that there is none.

Rows of ``[[plan]]`` have planner ``plan`` and a model's label as the workload. In them N, M, schedule and chunks are
those of the plan that was found; restrictions, B, limits and time_per_sample_s are null. Their status ``refused`` says
that the runtime or the GPU cannot do what is asked, and ``note`` why. Columns that they alone have are null in all
other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.workloads.formats.documents import package_table

SCHEMA_VERSION = 2
"""Raised when a column changes its meaning or goes; new columns do not raise it. 2: times and bounds are of a point's
``schedule``."""

BEFORE: Mapping[str, object] = MappingProxyType({"schedule": PAPERS_SCHEDULE.name.value, "chunks": PAPERS_SCHEDULE.v})
"""What rows of datasets say that were written before there were these columns; of others null."""

PARTITION = pa.field("workload", pa.string())

_TYPES = {
    "text": pa.string(),
    "number": pa.float64(),
    "count": pa.int64(),
    "flag": pa.bool_(),
    "moment": pa.timestamp("ms", tz="UTC"),
}

COLUMNS: Mapping[str, Mapping[str, str]] = package_table("piper_ray.sweep", "columns.toml")
"""What each column holds, in the order of the schema."""

SCHEMA = pa.schema(
    [pa.field(name, _TYPES[said["type"]], nullable="always" not in said) for name, said in COLUMNS.items()],
    metadata={"piper_ray.sweep.schema_version": str(SCHEMA_VERSION)},
)

ORDER = (
    "planner",
    "tensor_parallelism",
    "data_parallelism",
    "recompute",
    "schedule",
    "chunks",
    "microbatches",
    "memory_bytes",
    "bandwidth_bytes_per_s",
    "gpu",
    "precision",
    "trained_by",
    "batch",
    "devices",
    "input_hash",
)
"""The order of rows within a workload, once files have been merged."""


def completed(table: pa.Table) -> pa.Table:
    """The table with what rows of earlier versions leave unsaid, in the order of the schema."""
    for field in SCHEMA:
        if field.name not in table.column_names:
            value = pa.scalar(BEFORE.get(field.name), field.type)
            table = table.append_column(field, pa.repeat(value, table.num_rows))
    return table.select(SCHEMA.names)


def table_of(rows: list[dict[str, object]]) -> pa.Table:
    """Rows as a table in the schema; what a row does not have is null."""
    return pa.Table.from_pylist(rows, schema=SCHEMA)
