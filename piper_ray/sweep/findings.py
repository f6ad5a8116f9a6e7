"""What a dataset shows: its points as records, each planner with the exact one, and the best of each memory size."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from statistics import geometric_mean, median
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from piper_ray.model.options import EXACT
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.sweep.plan_point import PLAN
from piper_ray.sweep.point import scene_name, schedule_text


class Method(NamedTuple):
    """A planner with what it may not use, in words; "" if it may use all."""

    planner: str
    without: str

    @property
    def is_exact(self) -> bool:
        return self.planner == EXACT

    def __str__(self) -> str:
        return f"{self.planner}, {self.without}" if self.without else self.planner


class Scene(NamedTuple):
    """What is the same for all points of a figure: the workload, N, B and the schedule, as a sweep's file has it."""

    workload: str
    microbatches: int
    bandwidth_bytes_per_s: float
    schedule: str = PAPERS_SCHEDULE.name.value

    @property
    def name(self) -> str:
        """The workload, and the schedule where it is not Piper's."""
        return scene_name(self.workload, self.schedule)


@dataclass(frozen=True)
class Record:
    """A point as reports need it. status and the figures are the dataset's."""

    scene: Scene
    method: Method
    devices: int
    memory_bytes: float
    status: str
    time_per_sample_s: float | None
    lower_bound_s: float | None
    devices_used: int | None
    stages: int | None
    error_kind: str | None
    error: str | None
    seconds: float

    @property
    def throughput(self) -> float | None:
        """Samples per second; None without a plan, or for one that takes no time."""
        return 1.0 / self.time_per_sample_s if self.time_per_sample_s else None

    @property
    def cluster(self) -> tuple[Scene, int, float, str]:
        """What planners are compared on: the workload, the cluster and the restrictions."""
        return self.scene, self.devices, self.memory_bytes, self.method.without


COLUMNS = [
    "input_hash",
    "planner",
    "microbatches",
    "bandwidth_bytes_per_s",
    "tensor_parallelism",
    "data_parallelism",
    "recompute",
    "schedule",
    "chunks",
    *(field.name for field in fields(Record) if field.name not in ("scene", "method")),
]
"""The columns of a dataset that the findings need."""


def records_of(table: pa.Table) -> list[Record]:
    """The rows of the dataset that are solves, sorted by workload, N, B, schedule, planner (the exact one first), M and
    K."""
    found = [
        Record(
            scene=Scene(
                row["workload"],
                row["microbatches"],
                row["bandwidth_bytes_per_s"],
                schedule_text(row["schedule"], row["chunks"]),
            ),
            method=Method(row["planner"], _without(row)),
            **{field.name: row[field.name] for field in fields(Record) if field.name in row},
        )
        for row in table.filter(pc.not_equal(table["planner"], PLAN)).to_pylist()
    ]
    return sorted(found, key=lambda r: (r.scene, method_order(r.method), r.memory_bytes, r.devices))


def method_order(method: Method) -> tuple[bool, str, str]:
    """The exact solver first."""
    return not method.is_exact, method.planner, method.without


def _without(row: dict[str, object]) -> str:
    parts = [
        "" if row["tensor_parallelism"] else "no TP",
        "" if row["data_parallelism"] else "no DP",
        "" if row["recompute"] == "auto" else f"recompute {row['recompute']}",
    ]
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Comparison:
    """One method on one workload, by its scene's name. slower: times per sample over the exact solver's where both have
    a plan.
    """

    workload: str
    method: Method
    points: int
    proved: int
    unproved: int
    infeasible: int
    failed: int
    mean_slower: float | None
    most_slower: float | None
    median_s: float


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """The comparisons of planners by workload, the exact solver first. mean_slower: the geometric mean."""
    records = list(records)
    exact_s = exact_times(records)
    groups: defaultdict[tuple[str, Method], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.scene.name, record.method].append(record)
    found = []
    for (workload, method), of_group in groups.items():
        statuses = [record.status for record in of_group]
        ratios = [] if method.is_exact else [r for record in of_group if (r := slower(record, exact_s))]
        found.append(
            Comparison(
                workload,
                method,
                points=len(of_group),
                proved=statuses.count("optimal"),
                unproved=statuses.count("feasible"),
                infeasible=statuses.count("infeasible"),
                failed=statuses.count("error"),
                mean_slower=geometric_mean(ratios) if ratios else None,
                most_slower=max(ratios, default=None),
                median_s=median(record.seconds for record in of_group),
            )
        )
    return sorted(found, key=lambda c: (c.workload, method_order(c.method)))


def exact_times(records: Iterable[Record]) -> dict[tuple[Scene, int, float, str], float]:
    """The times of the exact solver's plans, by the cluster they are for."""
    return {r.cluster: r.time_per_sample_s for r in records if r.method.is_exact and r.time_per_sample_s}


def slower(record: Record, exact_s: dict[tuple[Scene, int, float, str], float]) -> float | None:
    """How many times as long as the exact solver's plan; None where either is missing."""
    exact = exact_s.get(record.cluster)
    return None if exact is None or record.time_per_sample_s is None else record.time_per_sample_s / exact


def best_of_each(records: Iterable[Record]) -> list[Record]:
    """The fastest plan of each workload, method and memory size; the fewest devices among equals."""
    best: dict[tuple[Scene, Method, float], Record] = {}
    for record in records:
        key = record.scene, record.method, record.memory_bytes
        if record.time_per_sample_s is None:
            continue
        if key not in best or _rank(record) < _rank(best[key]):
            best[key] = record
    return list(best.values())


def _rank(record: Record) -> tuple[float, int]:
    return record.time_per_sample_s or math.inf, record.devices
