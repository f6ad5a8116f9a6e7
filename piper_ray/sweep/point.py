"""A point of a sweep: one workload on one cluster, under restrictions, for one planner, or a plan (``plan_point``); and
what a sweep tells while it goes on, and at its end."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from piper_ray.model.constraints import Restrictions
from piper_ray.model.fields import plain_fields
from piper_ray.model.figures import PROOF_TOLERANCE
from piper_ray.model.instance import Instance
from piper_ray.model.options import EXACT, SolveOptions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.sweep.plan_point import REFUSED, PlannedModel, PlanPoint


@dataclass(frozen=True)
class Point:
    """One solve of a sweep.

    workload: its label. devices, microbatches: K, N. memory_bytes, bandwidth_bytes_per_s: M, B. schedule: the schedule
    that its plan is for, and is valued under.

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
        """The workload's graph on this point's cluster, under its schedule; layers and edges are shared, not copied.

        Devices of several kinds are as the workload has them.
        """
        if graph.cluster.kinds:
            return graph.replace(microbatches=self.microbatches, schedule=self.schedule)
        return graph.replace(
            devices=self.devices,
            microbatches=self.microbatches,
            memory_bytes=self.memory_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            schedule=self.schedule,
        )

    def identity(self, graph_hash: str, options: SolveOptions) -> dict[str, object]:
        """What tells which point a row of the dataset is of, as ``Sweep.identity`` has it."""
        facts = {
            "graph_hash": graph_hash,
            **plain_fields(self, ("workload", "planner", "devices", "microbatches")),
            "memory_bytes": float(self.memory_bytes),
            "bandwidth_bytes_per_s": float(self.bandwidth_bytes_per_s),
            **plain_fields(self.restrictions, ("tensor_parallelism", "data_parallelism", "recompute")),
            "gap_limit": float(options.gap),
            "time_limit_s": options.time_limit_s,
        }
        # Of the schedule only where it is another, so that points under Piper's keep their hashes.
        of_schedule = [] if self.schedule == PAPERS_SCHEDULE else [*self.schedule.to_dict().values()]
        input_hash = hashlib.sha256(json.dumps([*facts.values(), *of_schedule]).encode()).hexdigest()
        return {"input_hash": input_hash, "schedule": self.schedule.name.value, "chunks": self.schedule.v, **facts}


AnyPoint = Point | PlanPoint


@dataclass(frozen=True)
class Sweep:
    """Points with what they are about, by the labels that they name: graphs, and models of plans. hashes: of each
    graph's figures, whatever its cluster, and of each model and the hardware.
    """

    name: str
    points: tuple[AnyPoint, ...]
    subjects: Mapping[str, Instance | PlannedModel]
    hashes: Mapping[str, str]
    options: SolveOptions

    def identity(self, point: AnyPoint) -> dict[str, object]:
        """What tells which point a row of the dataset is of. input_hash: SHA-256 of all that decides its answer: of
        equal hashes rows are equal, figures of time and host aside.
        """
        of_subject = self.hashes[point.workload]
        return point.identity(of_subject, self.options) if isinstance(point, Point) else point.identity(of_subject)

    def graph(self, point: Point) -> Instance:
        """What the point is about."""
        found = self.subjects[point.workload]
        assert isinstance(found, Instance)
        return found


def schedule_text(name: str, chunks: int) -> str:
    """``1f1b``, ``interleaved:4``: as a sweep's file has it."""
    return name if chunks == 1 else f"{name}:{chunks}"


def scene_name(workload: str, schedule: str) -> str:
    """The workload's label, and the schedule, a ``schedule_text``, where it is not Piper's: times of several schedules
    are no match for each other.
    """
    return workload if schedule == PAPERS_SCHEDULE.name.value else f"{workload}, {schedule}"


def graph_hash(instance: Instance) -> str:
    """A hash of layers and edges, and of links within groups of devices; of several kinds of devices all of them."""
    if instance.cluster.kinds:
        return instance.replace(microbatches=1).digest
    bare = instance.replace(devices=1, microbatches=1, memory_bytes=1.0, bandwidth_bytes_per_s=1.0)
    links = (*instance.cluster.links[:-1], bare.cluster.links[-1])
    return bare.replace(cluster=replace(bare.cluster, links=links)).digest


@dataclass(frozen=True)
class Best:
    """The fastest plan so far of a workload under a schedule, or of a model. Of ``alike`` points that are as fast, to
    what proofs leave, that on the fewest devices, then with the least memory, then of the exact planner.

    time_per_sample_s: of a microbatch; of a plan of a model, of a sample of its batch.

    >>> from piper_ray import Restrictions
    >>> Best(Point("bert", "piper", 64, 512, 80e9, 25e9, Restrictions()), 0.0125).time_per_sample_s
    0.0125
    """

    point: Point | PlanPoint
    time_per_sample_s: float
    alike: int = 1


@dataclass
class Progress:
    """How far a sweep is.

    points: the points of the sweep. recorded: those that were recorded before it started. done: those done since then.
    infeasible: those of them without a plan. refused: those that a runtime or a GPU cannot do.

    solving_s, cpu_s: the time that all points took on their workers, and the processors' time. run_s: the time since
    the first was handed out. start_s: the time before, of reading and of starting Ray. workers: the workers at the
    moment. worker_s: the time of all workers that there were, each from when it joined to when it was lost. best: the
    best plans by workload and schedule, see ``point.scene_name``. errors: how many points failed, by kind.

    >>> Progress(points=12, recorded=3, done=4).left
    5
    """

    points: int
    recorded: int
    done: int = 0
    infeasible: int = 0
    refused: int = 0
    solving_s: float = 0.0
    cpu_s: float = 0.0
    run_s: float = 0.0
    start_s: float = 0.0
    workers: int = 0
    worker_s: float = 0.0
    best: dict[str, Best] = field(default_factory=dict)
    latest_best: str | None = None
    errors: Counter[str] = field(default_factory=Counter)
    _fastest: dict[str, list[Best]] = field(default_factory=dict, init=False, repr=False)
    """For each label all points that are as fast as the best."""

    @property
    def failed(self) -> int:
        """Points that ended in an error."""
        return self.errors.total()

    @property
    def left(self) -> int:
        """Points that are neither on record nor done in this run."""
        return self.points - self.recorded - self.done

    @property
    def eta_s(self) -> float | None:
        """The time that is left by the pace so far; None before there is any."""
        return self.run_s / self.done * self.left if self.done else None

    def begin(self, start_s: float) -> None:
        """The first points are handed out. start_s: what came before."""
        self.start_s = start_s

    def advance(self, run_s: float, workers: int) -> None:
        """Notes how the sweep stands now."""
        self.worker_s += workers * (run_s - self.run_s)
        self.run_s, self.workers = run_s, workers

    def note(self, point: Point | PlanPoint, row: Mapping[str, object]) -> None:
        """A point is finished."""
        self.done += 1
        if row["status"] == "error":
            self.errors[str(row["error_kind"])] += 1
        self.infeasible += row["status"] == "infeasible"
        self.refused += row["status"] == REFUSED
        self.solving_s += float(str(row["seconds"]))
        self.cpu_s += float(str(row["cpu_s"]))
        if isinstance(point, PlanPoint):
            label, found_s = point.workload, row.get("step_s")
            found_s = found_s / point.batch if isinstance(found_s, float) else None
        else:
            label = scene_name(point.workload, schedule_text(point.schedule.name.value, point.schedule.v))
            found_s = row.get("time_per_sample_s")
        if isinstance(found_s, float):
            self._rank(label, Best(point, found_s))

    def _rank(self, label: str, found: Best) -> None:
        """Ranks a point among the fastest. In whatever order points are done, the best is the same."""
        known = [*self._fastest.get(label, ()), found]
        limit_s = min(one.time_per_sample_s for one in known) * (1.0 + PROOF_TOLERANCE)
        self._fastest[label] = fastest = [one for one in known if one.time_per_sample_s <= limit_s]
        best = replace(min(fastest, key=_order), alike=len(fastest))
        if best != self.best.get(label):
            self.best[label] = best
            self.latest_best = label


def _order(best: Best) -> tuple[object, ...]:
    """The first is the best of equally fast ones."""
    point = best.point
    if isinstance(point, PlanPoint):
        return point.devices, repr(point)
    of_cluster = point.devices, point.memory_bytes, point.planner != EXACT, point.planner, point.microbatches
    return *of_cluster, point.bandwidth_bytes_per_s, repr(point.restrictions)


SweepListener = Callable[[Progress], None]
