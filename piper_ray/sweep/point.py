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

    def input_hash(self, point: Point) -> str:
        """SHA-256 of all that decides a point's answer: equal hashes, equal rows (figures of time and host aside)."""
        restrictions = point.restrictions
        facts: list[object] = [
            self.graph_hashes[point.workload],
            point.workload,
            point.planner,
            point.devices,
            point.microbatches,
            float(point.memory_bytes),
            float(point.bandwidth_bytes_per_s),
            restrictions.tensor_parallelism,
            restrictions.data_parallelism,
            restrictions.recompute.value,
            float(self.options.gap),
            self.options.time_limit_s,
        ]
        if point.schedule != PAPERS_SCHEDULE:  # so that points under it keep their hashes
            facts += point.schedule.to_dict().values()
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


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
