"""The best plans of different shapes, told apart where they are as good as each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from piper_ray.cost.schedules import chunk_schedules
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import DataParallelDegrees, Restrictions, StageCount, TensorParallelDegrees
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import Stop
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, simulate

CHUNKED_SHAPE_PASSES = 2_500_000_000
"""The passes that the search of one shape may simulate under a schedule with chunks, whose search ends with a gap: some
5 s."""

CHUNKED_TOTAL_PASSES = 30_000_000_000
"""The passes that the searches of all shapes may simulate."""


@dataclass(frozen=True)
class PlanShape:
    """d and t of a plan, and its schedule. lower_s: no microbatch of such a plan takes less, in s."""

    data_parallel_degree: int
    tensor_parallel_degree: int
    schedule: Schedule
    work_s: float
    lower_s: float

    def holds(self, plan: Plan, schedule: Schedule) -> bool:
        """Whether the plan, under that schedule, is of this shape."""
        first = plan.stages[0]
        degrees = first.data_parallel_degree, first.tensor_parallel_degree
        return (self.data_parallel_degree, self.tensor_parallel_degree) == degrees and self.schedule.v == schedule.v

    def lower_of_s(self, pipeline_ranks: int) -> float:
        """No microbatch of such a plan on ``pipeline_ranks`` ranks takes less, in s."""
        return self.work_s / (pipeline_ranks * self.data_parallel_degree)


@dataclass(frozen=True)
class Alternative:
    """The best plan found of a shape, simulated."""

    solution: Solution
    plan: Plan
    simulation: Simulation

    @property
    def time_s(self) -> float:
        """The simulated time of a microbatch."""
        return self.simulation.time_per_sample_s

    @property
    def devices(self) -> int:
        """The number of devices that the plan uses."""
        return self.simulation.devices

    @property
    def layout_runs(self) -> int:
        """The number of runs of neighbouring stages with equally many layers: the fewer, the simpler the layout."""
        return len(list(groupby(len(stage.layers) for stage in self.plan.stages)))

    @property
    def spare_bytes(self) -> float:
        """What the fullest rank leaves of a device's memory."""
        return self.simulation.memory_limit_bytes - self.simulation.peak_memory_bytes


@dataclass(frozen=True)
class Alternatives:
    """found: the best first. tied: how many of these, from the first on, are within the tolerance of the fastest, and
    in the order of fewest devices, simplest layout, most memory to spare. looked_at: solves that it took.
    left_from_s: if the search ended early, no shape that was left is faster, in s for a microbatch.
    """

    found: tuple[Alternative, ...]
    tied: int
    looked_at: int
    left_from_s: float | None


def plan_shapes(
    instance: Instance, restrictions: Restrictions, schedule: Schedule | ScheduleName
) -> Iterator[PlanShape]:
    """The shapes that fit the cluster and may hold the model."""
    schedules = chunk_schedules(schedule) if _name(schedule) in CHUNKED else (Schedule.of(schedule),)
    for t in instance.degrees:
        if not restrictions.admits_tensor_parallel_degree(t) or any(not x.tmpcs.get(t) for x in instance.layers):
            continue
        rows = [layer.tmpcs[t] for layer in instance.layers]
        work_s = sum(min(tmpc.time_per_sample_s for tmpc in row) for row in rows)
        for d in restrictions.data_parallel_degrees(instance):
            held_bytes = sum(min(tmpc.fixed_bytes + tmpc.shared_bytes / d for tmpc in row) for row in rows)
            most = restrictions.stage_count or instance.devices // (d * t)
            if not 1 <= most <= instance.devices // (d * t) or held_bytes > most * instance.memory_bytes:
                continue
            for one in schedules:
                if one.v <= len(rows):
                    ranks = min(most, len(rows) // one.v)
                    yield PlanShape(d, t, one, work_s, max(work_s / (ranks * d), work_s / instance.microbatches))


def best_plans(
    instance: Instance,
    restrictions: Restrictions,
    schedule: Schedule | ScheduleName,
    known: Solution,
    *,
    count: int,
    tolerance: float = 1e-3,
    options: SolveOptions = SolveOptions(),
    stop: Stop[Any] | None = None,
) -> Alternatives:
    """The best plan of each of the ``count`` best shapes (d, t and chunks), under a schedule with a flush.

    tolerance: relative; plans within it of the fastest count as equally fast, and so do those of a shape on fewer
    ranks. Each is found to within half of it. Of ``options`` the time limit holds for all shapes together; schedules
    with chunks end after ``CHUNKED_TOTAL_PASSES``. known: of a solve of all shapes together.
    """
    search = _Search(instance, restrictions, known.step, replace(options, gap=max(options.gap, tolerance / 2.0)), stop)
    search.chunked = _name(schedule) in CHUNKED
    shapes = sorted(
        plan_shapes(instance, restrictions, schedule),
        key=lambda x: (x.lower_s, x.tensor_parallel_degree, x.data_parallel_degree, x.schedule.v),
    )
    found: dict[PlanShape, Alternative] = {}
    if known.plan is not None:
        for shape in shapes:
            if shape.holds(known.plan, known.schedule):
                found[shape] = search.alternative(known, known.plan)
    left_from_s = None
    for shape in shapes:
        if shape in found and known.status is Status.OPTIMAL:
            continue
        times_s = sorted(one.time_s for one in found.values())
        if len(times_s) >= count and shape.lower_s > max(times_s[count - 1], times_s[0] * (1.0 + tolerance)):
            break
        if search.ended:
            left_from_s = shape.lower_s
            break
        best = search.solve(shape, restrictions.stage_count)
        if best is not None and (shape not in found or best.time_s < found[shape].time_s):
            found[shape] = best
    by_time = sorted(found.items(), key=lambda x: x[1].time_s)
    equal_s = by_time[0][1].time_s * (1.0 + tolerance) if by_time else 0.0
    kept = [x for index, x in enumerate(by_time) if index < count or x[1].time_s <= equal_s]
    fewest = [search.on_fewer_ranks(shape, best, tolerance) for shape, best in kept]
    return _ranked(fewest, count, tolerance, search.looked_at, left_from_s)


@dataclass
class _Search:
    """A search over shapes. looked_at: the solves so far. passes: what they have simulated."""

    instance: Instance
    restrictions: Restrictions
    step: StepTerms
    options: SolveOptions
    stop: Stop[Any] | None
    chunked: bool = False
    looked_at: int = 0
    passes: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float | None:
        """What is left of the time for all; None: no limit."""
        limit_s = self.options.time_limit_s
        return None if limit_s is None else limit_s - (time.perf_counter() - self.started_s)

    @property
    def ended(self) -> bool:
        late = (left_s := self.left_s) is not None and left_s <= 0.0
        return late or self.passes >= CHUNKED_TOTAL_PASSES or (self.stop is not None and self.stop.requested)

    def solve(self, shape: PlanShape, pipeline_ranks: int | None) -> Alternative | None:
        """The best plan of the shape. pipeline_ranks: None allows any number. None if no plan fits."""
        self.looked_at += 1
        passes_limit = min(CHUNKED_SHAPE_PASSES, CHUNKED_TOTAL_PASSES - self.passes) if self.chunked else None
        asked = [
            DataParallelDegrees((shape.data_parallel_degree,)),
            TensorParallelDegrees((shape.tensor_parallel_degree,)),
        ]
        kept = self.restrictions.without(TensorParallelDegrees).without(DataParallelDegrees).without(StageCount)
        ranks = [] if pipeline_ranks is None else [StageCount(pipeline_ranks)]
        solution = solve(
            self.instance,
            restrictions=kept.adding(*asked, *ranks),
            schedule=shape.schedule,
            step=self.step,
            options=replace(self.options, time_limit_s=self.left_s, passes_limit=passes_limit),
            stop=None if self.stop is None else self.stop.part(),
        )
        self.passes += 0 if solution.stats.degrees is None else solution.stats.degrees.passes
        return None if solution.plan is None else self.alternative(solution, solution.plan)

    def alternative(self, solution: Solution, plan: Plan) -> Alternative:
        """A solution with its plan, simulated."""
        options = SimulationOptions.of(self.step)
        return Alternative(solution, plan, simulate(self.instance, plan, solution.schedule, options=options))

    def on_fewer_ranks(self, shape: PlanShape, best: Alternative, tolerance: float) -> Alternative:
        """The plan on the fewest ranks that is as good within the tolerance."""
        if self.chunked or self.restrictions.all_devices or self.restrictions.stage_count is not None:
            return best
        equal_s = best.time_s * (1.0 + tolerance)
        for ranks in range(1, len(best.plan.stages)):
            if self.ended:
                break
            if shape.lower_of_s(ranks) <= equal_s:
                found = self.solve(shape, ranks)
                if found is not None and found.time_s <= equal_s:
                    return found
        return best


def _ranked(
    found: list[Alternative], count: int, tolerance: float, looked_at: int, left_from_s: float | None
) -> Alternatives:
    by_time = sorted(found, key=lambda one: (one.time_s, one.devices))
    if not by_time:
        return Alternatives((), 0, looked_at, left_from_s)
    equal_s = by_time[0].time_s * (1.0 + tolerance)
    tied = [one for one in by_time if one.time_s <= equal_s]
    tied.sort(key=lambda one: (one.devices, one.layout_runs, -one.spare_bytes))
    rest = by_time[len(tied) :]
    return Alternatives(tuple([*tied, *rest][:count]), min(count, len(tied)), looked_at, left_from_s)


def _name(schedule: Schedule | ScheduleName) -> ScheduleName:
    return schedule.name if isinstance(schedule, Schedule) else schedule
