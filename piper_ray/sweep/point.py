"""A point of a sweep: one workload on one cluster, under restrictions, for one planner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule


@dataclass(frozen=True)
class Point:
    """One solve of a sweep.

    workload: its label. devices, microbatches: K, N; memory_bytes, bandwidth_bytes_per_s: M, B. schedule: that its
    plan is for, and is valued under.

    >>> Point("bert", "piper", 64, 512, 80e9, 25e9, Restrictions()).devices
    64
    """

    workload: str
    planner: str
    devices: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    restrictions: Restrictions
    schedule: Schedule = PAPERS_SCHEDULE

    def on(self, graph: Instance) -> Instance:
        """The workload's graph on this point's cluster, under its schedule; layers and edges are shared, not copied."""
        return graph.replace(
            devices=self.devices,
            microbatches=self.microbatches,
            memory_bytes=self.memory_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            schedule=self.schedule,
        )


@dataclass(frozen=True)
class Sweep:
    """Points with the graphs that they name. graph_hashes: of each graph's figures, whatever its cluster."""

    name: str
    points: tuple[Point, ...]
    graphs: Mapping[str, Instance]
    graph_hashes: Mapping[str, str]
    options: SolveOptions

    def identity(self, point: Point) -> dict[str, object]:
        """Which point a row of the dataset is of. input_hash: SHA-256 of all that decides its answer: of equal hashes
        rows are equal, figures of time and host aside.
        """
        restrictions = point.restrictions
        facts = {
            "graph_hash": self.graph_hashes[point.workload],
            "workload": point.workload,
            "planner": point.planner,
            "devices": point.devices,
            "microbatches": point.microbatches,
            "memory_bytes": float(point.memory_bytes),
            "bandwidth_bytes_per_s": float(point.bandwidth_bytes_per_s),
            "tensor_parallelism": restrictions.tensor_parallelism,
            "data_parallelism": restrictions.data_parallelism,
            "recompute": restrictions.recompute.value,
            "gap_limit": float(self.options.gap),
            "time_limit_s": self.options.time_limit_s,
        }
        # Of the schedule only where it is another, so that points under Piper's keep their hashes.
        of_schedule = [] if point.schedule == PAPERS_SCHEDULE else [*point.schedule.to_dict().values()]
        input_hash = hashlib.sha256(json.dumps([*facts.values(), *of_schedule]).encode()).hexdigest()
        return {"input_hash": input_hash, "schedule": point.schedule.name.value, "chunks": point.schedule.v, **facts}


def schedule_text(name: str, chunks: int) -> str:
    """``1f1b``, ``interleaved:4``: as a sweep's file has it."""
    return name if chunks == 1 else f"{name}:{chunks}"


def scene_name(workload: str, schedule: str) -> str:
    """The workload's label, and the schedule, a ``schedule_text``, where it is not Piper's: times of several schedules
    are no match for each other.
    """
    return workload if schedule == PAPERS_SCHEDULE.name.value else f"{workload}, {schedule}"


def graph_hash(instance: Instance) -> str:
    """Of layers and edges, and links within groups of devices."""
    bare = instance.replace(devices=1, microbatches=1, memory_bytes=1.0, bandwidth_bytes_per_s=1.0)
    links = (*instance.cluster.links[:-1], bare.cluster.links[-1])
    return bare.replace(cluster=replace(bare.cluster, links=links)).digest
