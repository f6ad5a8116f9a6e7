"""What the plans of a dataset show: each as a record, the best of each cluster, and which runtime and precision win."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import geometric_mean
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from piper_ray.sweep.plan_point import PLAN

_BILLION = 1e9
_S_PER_HOUR = 3600.0
_AS_FAST = 1e-3
"""Relative: what differs by less is as fast."""


class TrainedBatch(NamedTuple):
    """What is the same for all curves of a figure."""

    model: str
    batch: int
    tokens: int | None

    @property
    def text(self) -> str:
        """``llama3-8b, batch 512``."""
        return f"{self.model}, batch {self.batch:,}" + ("" if self.tokens is None else f" of {self.tokens:,} tokens")


class TrainingWay(NamedTuple):
    """How a model is trained on a cluster. schedule: None where the plan chooses it."""

    trained_by: str
    precision: str
    schedule: str | None

    @property
    def text(self) -> str:
        """``megatron, bf16``."""
        return ", ".join(filter(None, self))


@dataclass(frozen=True)
class PlanRecord:
    """A plan of a sweep as reports need it. The figures are the dataset's."""

    training: TrainedBatch
    way: TrainingWay
    gpu: str
    nodes: int
    devices: int
    status: str
    step_s: float | None
    step_lower_bound_s: float | None
    gap: float | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    devices_used: int | None
    microbatch_samples: int | None
    peak_memory_bytes: float | None
    layout: str | None
    devices_of_kinds: str | None
    kinds_of_stages: str | None
    combinations: int | None
    combinations_closed: int | None
    note: str | None
    error: str | None
    cpu_s: float | None

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The GPU of the cluster; of several kinds each."""
        return tuple(part.rpartition(":")[0] or part for part in self.gpu.split())

    @property
    def gpus_text(self) -> str:
        """``A100-80 + H100-SXM``: what clusters of different sizes have in common."""
        return " + ".join(self.gpu_names)

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of a billion tokens, with idle GPUs; None without a plan or tokens."""
        rate = self.tokens_per_s_per_device
        return None if not rate else _BILLION / rate / _S_PER_HOUR

    @property
    def gpu_hours_of(self) -> dict[str, float]:
        """The same for each kind of GPU; empty without a plan or tokens."""
        if (hours := self.gpu_hours) is None:
            return {}
        counts = {self.gpu: self.devices} if self.devices_of_kinds is None else json.loads(self.devices_of_kinds)
        return {gpu: hours * count / self.devices for gpu, count in counts.items()}

    @property
    def cluster(self) -> tuple[TrainedBatch, str, int]:
        """What is trained where."""
        return self.training, self.gpu, self.devices


_OWN = [field.name for field in fields(PlanRecord) if field.name not in ("training", "way")]
_KEYS = ["planner", "batch", "tokens", "trained_by", "precision", "asked_schedule"]
COLUMNS = [*_KEYS, *_OWN]
"""The columns of a dataset that these findings need."""


def plan_records_of(table: pa.Table) -> list[PlanRecord]:
    """The rows of the dataset that are plans, sorted by model, batch, GPU, devices and way."""
    found = [
        PlanRecord(
            training=TrainedBatch(row["workload"], row["batch"], row["tokens"]),
            way=TrainingWay(row["trained_by"], row["precision"], row["asked_schedule"]),
            **{name: row[name] for name in _OWN},
        )
        for row in table.filter(pc.equal(table["planner"], PLAN)).to_pylist()
    ]
    return sorted(found, key=lambda r: (r.training[:2], r.training.tokens or 0, r.gpu, r.devices, r.way.text))


def best_of_clusters(records: Iterable[PlanRecord]) -> list[PlanRecord]:
    """The plan of the shortest step for each model, batch and cluster, in whatever way."""
    best: dict[tuple[TrainedBatch, str, int], PlanRecord] = {}
    for record in records:
        known = best.get(record.cluster)
        if record.step_s is not None and (known is None or known.step_s is None or record.step_s < known.step_s):
            best[record.cluster] = record
    return list(best.values())


@dataclass(frozen=True)
class WayFindings:
    """One way to train a model. wins: clusters on which no other way is faster; mean_slower: of steps over the best
    way's, the geometric mean over clusters with a plan."""

    model: str
    way: TrainingWay
    plans: int
    without: int
    wins: int
    mean_slower: float | None


def ways_of(records: Sequence[PlanRecord]) -> list[WayFindings]:
    """The findings by model, the fastest way first."""
    least_s = {one.cluster: one.step_s for one in best_of_clusters(records)}
    groups: defaultdict[tuple[str, TrainingWay], list[PlanRecord]] = defaultdict(list)
    for record in records:
        groups[record.training.model, record.way].append(record)
    found = []
    for (model, way), of_way in groups.items():
        ratios = [one.step_s / (least_s[one.cluster] or 1.0) for one in of_way if one.step_s is not None]
        wins = sum(ratio <= 1.0 + _AS_FAST for ratio in ratios)
        mean = geometric_mean(ratios) if ratios else None
        found.append(WayFindings(model, way, len(ratios), len(of_way) - len(ratios), wins, mean))
    return sorted(found, key=lambda one: (one.model, one.mean_slower or math.inf, one.way.text))
