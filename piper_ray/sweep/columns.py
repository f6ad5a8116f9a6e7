"""The columns of a sweep's dataset: its schema, the order of its rows, and its version.

A dataset is a folder of Parquet files, ``workload=LABEL/part-*.parquet``, partitioned as Hive does; any reader of such
folders takes it, the label being a column there. A row is a finished point:

    input_hash              SHA-256 of all that decides the answer: graph, cluster, restrictions, planner, options
    graph_hash              SHA-256 of layers and edges, and of links within groups of devices
    planner                 piper (the exact solver), one of piper_ray.planners, or plan
    devices, microbatches, memory_bytes, bandwidth_bytes_per_s      K, N, M, B
    tensor_parallelism, data_parallelism, recompute                 restrictions: allowed or not, and the rule
    schedule, chunks        that the plan is for, and that all its figures are of; chunks on each rank
    gap_limit, time_limit_s limits of the solve; null: none
    status                  optimal, feasible (a plan without proof), infeasible, refused (see below), unknown (stopped
                            before any plan) or error
    time_per_sample_s       of the plan; null without one
    lower_bound_s           no plan is faster; null if there is none: not proved, or of a baseline
    gap                     (time_per_sample_s - lower_bound_s) / time_per_sample_s
    devices_used, stages    of the plan
    plan                    JSON as Piper writes plans; ``piper-ray verify`` takes it
    stopped_by              what ended the solve before a proof
    note                    why there is no plan, or where in its grid a baseline found it
    least_memory_bytes      of a device, with which an infeasible point has a plan; null if not known
    error_kind, error       of status error: the exception's class and message
    layers, downsets, levels, pairs     size of the problem; null for baselines
    evaluations             thresholds tried, fewer where other points of the graph were solved; of a baseline null
    tried                   candidates that a baseline looked at
    version, kernels        of piper_ray, and of its compiled kernels: equal where results are
    seconds, lattice_s, stage_costs_s, search_s     of wall time; the first all told. A lattice is paid by the first
                            point that uses it
    cpu_s                   the processor's time of all of it
    attempts                1, or more where workers died
    spread                  solved by the whole cluster, not by one worker
    host, runtime, finished_at   where, with what Python and libraries, when (UTC)

For a baseline ``infeasible`` means that it finds no plan, not that there is none.

Rows of ``[[plan]]`` have planner ``plan`` and a model's label as the workload. In them N, M, schedule and chunks are
those of the plan that was found; restrictions, B, limits and time_per_sample_s are null, as are in all other rows:

    gpu, nodes, batch, precision, trained_by, tokens        as asked; the GPU's key, samples, the runtime, tokens of a
                            sample (null: the model's own)
    asked_schedule          null: those that the runtime has of 1f1b and interleaved
    microbatch_samples      samples of a microbatch
    step_s                  of the whole batch, simulated
    step_lower_bound_s      no plan of any combination takes less; ``gap`` is to this one
    tokens_per_s, tokens_per_s_per_device, mfu      of the whole cluster, its idle GPUs too
    peak_memory_bytes       of the device that holds most
    layout                  in words that runtimes have
    combinations, combinations_closed       of microbatch size, schedule and mode; those with a proof that none of their
                            plans is faster by more than the gap

Their status ``refused`` says that the runtime or the GPU cannot do what is asked, and ``note`` why.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

from piper_ray.model.schedule import PAPERS_SCHEDULE

SCHEMA_VERSION = 2
"""Raised when a column changes its meaning or goes; new columns do not raise it. 2: times and bounds are of a point's
``schedule``."""

BEFORE: Mapping[str, object] = MappingProxyType({"schedule": PAPERS_SCHEDULE.name.value, "chunks": PAPERS_SCHEDULE.v})
"""What rows of datasets say that were written before there were these columns; of others null."""

PARTITION = pa.field("workload", pa.string())

_TEXT, _TIME, _COUNT, _FLAG = pa.string(), pa.float64(), pa.int64(), pa.bool_()

SCHEMA = pa.schema(
    [
        pa.field("input_hash", _TEXT, nullable=False),
        pa.field("graph_hash", _TEXT, nullable=False),
        pa.field("planner", _TEXT, nullable=False),
        pa.field("devices", _COUNT, nullable=False),
        pa.field("microbatches", _COUNT),
        pa.field("memory_bytes", pa.float64()),
        pa.field("bandwidth_bytes_per_s", pa.float64()),
        pa.field("tensor_parallelism", _FLAG),
        pa.field("data_parallelism", _FLAG),
        pa.field("recompute", _TEXT),
        pa.field("gap_limit", pa.float64()),
        pa.field("time_limit_s", _TIME),
        pa.field("status", _TEXT, nullable=False),
        pa.field("time_per_sample_s", _TIME),
        pa.field("lower_bound_s", _TIME),
        pa.field("gap", pa.float64()),
        pa.field("devices_used", _COUNT),
        pa.field("stages", _COUNT),
        pa.field("plan", _TEXT),
        pa.field("stopped_by", _TEXT),
        pa.field("note", _TEXT),
        pa.field("least_memory_bytes", pa.float64()),
        pa.field("error_kind", _TEXT),
        pa.field("error", _TEXT),
        pa.field("layers", _COUNT),
        pa.field("downsets", _COUNT),
        pa.field("levels", _COUNT),
        pa.field("pairs", _COUNT),
        pa.field("evaluations", _COUNT),
        pa.field("tried", _COUNT),
        pa.field("version", _TEXT, nullable=False),
        pa.field("kernels", _TEXT, nullable=False),
        pa.field("seconds", _TIME, nullable=False),
        pa.field("lattice_s", _TIME),
        pa.field("stage_costs_s", _TIME),
        pa.field("search_s", _TIME),
        pa.field("attempts", _COUNT, nullable=False),
        pa.field("spread", _FLAG, nullable=False),
        pa.field("host", _TEXT, nullable=False),
        pa.field("runtime", _TEXT, nullable=False),
        pa.field("finished_at", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("schedule", _TEXT),
        pa.field("chunks", _COUNT),
        pa.field("cpu_s", _TIME),
        pa.field("gpu", _TEXT),
        pa.field("nodes", _COUNT),
        pa.field("batch", _COUNT),
        pa.field("precision", _TEXT),
        pa.field("trained_by", _TEXT),
        pa.field("tokens", _COUNT),
        pa.field("asked_schedule", _TEXT),
        pa.field("microbatch_samples", _COUNT),
        pa.field("step_s", _TIME),
        pa.field("step_lower_bound_s", _TIME),
        pa.field("tokens_per_s", pa.float64()),
        pa.field("tokens_per_s_per_device", pa.float64()),
        pa.field("mfu", pa.float64()),
        pa.field("peak_memory_bytes", pa.float64()),
        pa.field("layout", _TEXT),
        pa.field("combinations", _COUNT),
        pa.field("combinations_closed", _COUNT),
    ],
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
