"""What solves of one workload on several numbers of devices share: lattice, tables, bounds and plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from piper_ray.engine.chunks.problem import ChunkProblem
from piper_ray.engine.chunks.search import Known
from piper_ray.engine.findings import Findings
from piper_ray.engine.flush.answer import flush_schedule, instance_under
from piper_ray.engine.flush.plans import ChosenStages
from piper_ray.engine.flush.preparation import FlushPreparation, prepare_flush
from piper_ray.engine.flush.search import Degrees
from piper_ray.engine.flush.solve import FlushProblem, opened_workers, without_plan
from piper_ray.engine.layers import is_wide, solve_layers
from piper_ray.engine.ledger import preference
from piper_ray.engine.preparation import Outline, PointShape, Preparation, prepare
from piper_ray.engine.request import SolveRequest, is_by_degrees
from piper_ray.model.constraints import FilledPipeline, PipelinedChunks
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import LimitError
from piper_ray.model.events import silent
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.model.solution import Infeasibility, Solution, Status

_KEPT = 8
"""Of restated workloads, each of which is made anew for each number of devices."""


@dataclass
class Shared:
    """A series of solves for each workload, links and restrictions. schedules: of one name, with the numbers of chunks
    that may be. preparation_s: what is shared took so long to make.
    """

    schedules: Sequence[Schedule]
    preparation_s: float = 0.0
    _series: dict[Hashable, Series] = field(default_factory=dict)

    def solve(self, request: SolveRequest) -> Solution:
        """As ``engine.solve`` does, once restated and on one level of links."""
        instance, cluster = request.instance, request.instance.cluster
        key = id(instance.layers), id(instance.edges), cluster.links, type(cluster), request.restrictions
        if key not in self._series:
            if len(self._series) >= _KEPT:
                del self._series[next(iter(self._series))]
            self._series[key] = self._new_series(request)
        series = self._series[key]
        found = series.solve(request)
        self.preparation_s += series.preparation_s
        series.preparation_s = 0.0
        return found

    def _new_series(self, first: SolveRequest) -> Series:
        planned_for = self.schedules[0]
        if planned_for.name in CHUNKED:
            return _WithChunks(first, self.schedules)
        if is_by_degrees(planned_for, first.restrictions):
            return _ByDegrees(first, planned_for)
        first.restrictions.require_stages_alone("frontier")
        return _OnLayers(first)


class Series(ABC):
    """first: on the most devices of all. preparation_s: what is shared took so long to make, since somebody asked."""

    def __init__(self, first: SolveRequest) -> None:
        self.first, self.preparation_s = first, 0.0  # whose layers and edges stay, so that no others get their id
        self._proved: dict[Hashable, Solution] = {}

    def solve(self, request: SolveRequest) -> Solution:
        """A proved answer is given again: that on one node is asked for with each number of nodes."""
        point = request.instance.devices, request.data_parallel_limit
        if point not in self._proved:
            found = self._solve(request)
            if found.status not in (Status.OPTIMAL, Status.INFEASIBLE):
                return found
            self._proved[point] = found
        return self._proved[point]

    @abstractmethod
    def _solve(self, request: SolveRequest) -> Solution: ...


class _OnLayers(Series):
    """Under Piper's schedule: one lattice for all points of a shape, and findings."""

    def __init__(self, first: SolveRequest) -> None:
        super().__init__(first)
        self._findings = Findings(thorough=True)
        self._prepared: dict[PointShape, Preparation | None] = {}

    def _solve(self, request: SolveRequest) -> Solution:
        shape = PointShape.of(request.instance, request.restrictions)
        if shape not in self._prepared:
            self._prepared[shape] = self._prepare(request)
        return solve_layers(request, self._prepared[shape])

    def _prepare(self, request: SolveRequest) -> Preparation | None:
        """None where not all downsets are listed, or some on the way only."""
        instance, restrictions, limit_bytes = request.instance, request.restrictions, request.options.memory_limit_bytes
        outline = Outline.of(instance, restrictions)
        if request.data_parallel_limit is None and is_wide(outline):
            return None
        listener = silent if self._prepared else request.listener
        try:
            made = prepare(instance, restrictions, limit_bytes, listener, outline)
        except LimitError:
            if request.data_parallel_limit is not None:
                raise
            return None
        self.preparation_s += made.lattice_s + made.stage_costs_s
        return replace(made, findings=self._findings)


class _ByDegrees(Series):
    """With one d and one t for all stages: one lattice, bounds of (d, t), and all plans that were found."""

    def __init__(self, first: SolveRequest, schedule: Schedule) -> None:
        super().__init__(first)
        self._schedule, self._proved_s = flush_schedule(schedule), dict[Degrees, float]()
        self._found: dict[int, ChosenStages] = {}  # the best one known of each number of devices
        instance = instance_under(schedule, first.instance, first.note)
        prepared = prepare_flush(instance, first.restrictions, first.options.memory_limit_bytes, first.listener)
        self._problem: FlushProblem | Infeasibility
        if isinstance(prepared, FlushPreparation):
            self._problem = FlushProblem(prepared, self._schedule, first.step)
            self.preparation_s = prepared.lattice_s + prepared.stage_costs_s
        else:
            self._problem = prepared

    def _solve(self, request: SolveRequest) -> Solution:
        problem, devices, every = self._problem, request.instance.devices, request.restrictions.all_devices
        if isinstance(problem, Infeasibility):
            return without_plan(request.instance, self._schedule, request.step, problem)
        # With all devices in use plans for fewer are none for these.
        proved_s = {} if every else self._proved_s
        with opened_workers(None, request.options.threads) as workers:
            search = problem.search(devices, workers, request.limits, request.listener, request.started_s, proved_s)
            usable = (x for k, x in self._found.items() if k == devices or (k < devices and not every))
            best = min(usable, key=preference, default=None)
            if best is not None:
                search.ledger.begin_with(best)
            request.stop.offer(lambda: problem.solution(search))
            problem.improve(search, devices)
            search.ledger.run(search)
        for plan in search.found:
            self._found[plan.devices] = min(self._found.get(plan.devices, plan), plan, key=preference)
        self._proved_s = search.proved_of_tasks()
        return problem.solution(search)


class _WithChunks(Series):
    """Under a schedule with chunks: one order of layers, and the bound and the best plan of each (d, t, p, v)."""

    def __init__(self, first: SolveRequest, schedules: Sequence[Schedule]) -> None:
        super().__init__(first)
        first.restrictions.require_same_degrees(
            f"under schedule {schedules[0].name.value}", FilledPipeline, PipelinedChunks
        )
        self._problem = ChunkProblem.of(first.instance, first.restrictions, first.step, schedules, first.note)
        self._known, self.preparation_s = Known(), self._problem.tables_s

    def _solve(self, request: SolveRequest) -> Solution:
        problem, threads = self._problem, request.options.threads or usable_cores()
        search = problem.search(
            request.instance.devices, threads, request.limits, request.listener, request.started_s, self._known
        )
        request.stop.offer(lambda: problem.solution(search))
        search.ledger.run(search)
        self._known = search.learnt
        return problem.solution(search)
