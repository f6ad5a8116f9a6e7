"""A solve with one d and one t for all stages: from what is asked to a proved plan. Only puts the parts together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.engine.backends.calls import Workers
from piper_ray.engine.flush.memo import TaskMemo
from piper_ray.engine.flush.plans import ChosenStages, build_flush_plan
from piper_ray.engine.flush.preparation import FlushPreparation, prepare_flush
from piper_ray.engine.flush.search import Degrees, FlushSearch
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.ledger import Ledger, Limits, no_plan, preference
from piper_ray.engine.request import SolveRequest
from piper_ray.model.events import Listener, silent
from piper_ray.model.figures import memory_text, plural
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import can_use_all, reason_against_all
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats, Status

_ANY_PLAN = 0.999
"""A gap with which a search ends at its first plan."""


def solve_under_flush(request: SolveRequest, schedule: Schedule) -> Solution:
    """The plan whose batch is fastest, one d and one t for all stages; value and bound are of a microbatch.

    Under a flush a batch is simulated; without one it takes N times what the slowest stage takes. Of the restrictions
    those on the plan as a whole that are not kept by one d and one t for all stages are the caller's.

    Raises LimitError if the lattice does not fit, UsageError for a backend of one's own that such a search cannot use.
    """
    series = FlushSeries(request, schedule)
    return series.explained(request, series.solve(request))


class FlushSeries:
    """Solves of one workload on several numbers of devices: they share the lattice, bounds of (d, t), and all plans
    that were found.

    first: on the most devices of all. preparation_s: what is shared took so long to make, since somebody asked.
    Raises LimitError if the lattice does not fit.
    """

    def __init__(self, first: SolveRequest, schedule: Schedule) -> None:
        self.preparation_s = 0.0
        self._schedule, self._proved_s = schedule, dict[Degrees, float]()
        self._found: dict[int, ChosenStages] = {}  # the best one known of each number of devices
        instance = instance_under(schedule, first.instance, first.note)
        prepared = prepare_flush(instance, first.restrictions, first.options.memory_limit_bytes, first.listener)
        self._problem: _Problem | Infeasibility
        if isinstance(prepared, FlushPreparation):
            self._problem = _Problem(prepared, flush_schedule(schedule), first.step)
            self.preparation_s = prepared.lattice_s + prepared.stage_costs_s
        else:
            self._problem = prepared

    def solve(self, request: SolveRequest) -> Solution:
        """On so many devices as the request has. Where there is no plan, not yet why."""
        problem, devices, every = self._problem, request.instance.devices, request.restrictions.all_devices
        if isinstance(problem, Infeasibility):
            return no_plan(problem, _stats_of(request.instance), self._schedule, request.step)
        # With all devices in use plans for fewer are none for these.
        proved_s = {} if every else self._proved_s
        ledger = problem.ledger(request.limits, request.listener, request.started_s)

        def answer() -> Solution:
            found = ledger.answer(problem.plan, lambda _: self._schedule, problem.stats(search), request.step)
            return request.with_cluster(found)

        with (
            request.open_checkpoint(self._schedule, kept="searches of degrees") as checkpoint,
            request.open_workers() as workers,
        ):
            memo = None if checkpoint is None else TaskMemo(checkpoint)
            search = problem.search(devices, workers, ledger, proved_s, memo)
            usable = (x for k, x in self._found.items() if k == devices or (k < devices and not every))
            best = min(usable, key=preference, default=None)
            if best is not None:
                ledger.begin_with(best)
            request.stop.offer(answer)
            problem.run(search, devices)
        for plan in search.found:
            self._found[plan.devices] = min(self._found.get(plan.devices, plan), plan, key=preference)
        self._proved_s = search.proved_of_tasks()
        return answer()

    def explained(self, request: SolveRequest, found: Solution) -> Solution:
        """Where there is no plan, with the reason, and the memory that would do."""
        problem, instance, restrictions = self._problem, request.instance, request.restrictions
        if found.status is not Status.INFEASIBLE or isinstance(problem, Infeasibility):
            return found
        if restrictions.all_devices and not can_use_all(instance, restrictions):
            return replace(found, infeasibility=Infeasibility(reason_against_all(instance, restrictions), None))
        any_plan = replace(request.limits, gap=_ANY_PLAN)
        with request.open_workers() as workers:
            least = least_memory_bytes(instance, lambda memory_bytes: problem.fits(memory_bytes, workers, any_plan))
        every = "all " if restrictions.all_devices else ""
        stages = "" if restrictions.stage_count is None else f" of {plural(restrictions.stage_count, 'stage')}"
        reason = (
            f"no plan{stages} with one d and one t fits on {every}{instance.devices:,} "
            f"devices of {memory_text(instance.memory_bytes)} with {instance.microbatches:,} microbatches"
        )
        return replace(found, infeasibility=Infeasibility(reason, least))


@dataclass(frozen=True)
class _Problem:
    """What is solved on any number of devices up to those of ``prepared``."""

    prepared: FlushPreparation
    schedule: FlushSchedule
    step: StepTerms

    def ledger(self, limits: Limits, listener: Listener, started_s: float) -> Ledger[ChosenStages]:
        """Of a search that has not begun."""
        return Ledger(self.prepared.instance.microbatches, limits, listener, started_s, self.step.optimizer_s)

    def search(
        self,
        devices: int,
        workers: Workers,
        ledger: Ledger[ChosenStages],
        proved_s: Mapping[Degrees, float] = MappingProxyType({}),
        memo: TaskMemo | None = None,
    ) -> FlushSearch:
        """One on so many devices, before its start. proved_s, memo: see ``FlushSearch``."""
        workload = self.prepared.workload
        return FlushSearch(workload.arrays, self._tasks(workload, devices), workers, ledger, proved_s, memo)

    def run(self, search: FlushSearch, devices: int) -> None:
        """To its end. Where its lattice is large, it gets a plan to begin with."""
        chain = self.prepared.chain
        if chain is not None:
            search.improve(chain.arrays, self._tasks(chain, devices))
        search.ledger.run(search)

    def fits(self, memory_bytes: float, workers: Workers, limits: Limits) -> bool | None:
        """Whether there is a plan with so much memory on each device; None: a limit came first."""
        roomy = replace(self.prepared, instance=self.prepared.instance.replace(memory_bytes=memory_bytes))
        problem, devices = replace(self, prepared=roomy), roomy.instance.devices
        ledger = problem.ledger(limits, silent, time.perf_counter())
        problem.run(problem.search(devices, workers, ledger), devices)
        if ledger.best is not None:
            return True
        return None if ledger.stopped_by is not None or ledger.lower_s < float("inf") else False

    def plan(self, chosen: ChosenStages) -> Plan:
        return build_flush_plan(self.prepared.instance, self.prepared.workload, chosen)

    def stats(self, search: FlushSearch) -> SolveStats:
        prepared, lattice = self.prepared, self.prepared.workload.lattice
        return replace(
            _stats_of(prepared.instance),
            downsets=lattice.size,
            levels=lattice.levels,
            lattice_s=prepared.lattice_s,
            stage_costs_s=prepared.stage_costs_s,
            threads=search.workers.width,
            search_s=search.seconds,
            degrees=DegreeStats(len(search.tasks), search.searched, search.looked_through, search.states),
        )

    def _tasks(self, workload: FlushWorkload, devices: int) -> list[DegreePair]:
        instance = self.prepared.instance
        if devices != instance.devices:
            instance = instance.replace(devices=devices)
        return list_tasks(instance, workload, self.schedule, self.prepared.restrictions, self.step)


def instance_under(schedule: Schedule, instance: Instance, tell: Callable[[str], None]) -> Instance:
    """With the passes that the schedule asks for. Piper's knows passes of both kinds together only."""
    return instance if schedule == PAPERS_SCHEDULE else with_passes(instance, tell)


def flush_schedule(schedule: Schedule) -> FlushSchedule:
    """As the tables know it."""
    return FlushSchedule(schedule.name.value)


def _stats_of(instance: Instance) -> SolveStats:
    """Of a solve that has done nothing yet."""
    layers = len(instance.layers)
    return SolveStats(layers, layers, 0, 0, None, 0, 0.0, 0.0, 0.0, (), degrees=DegreeStats(0, 0, 0, 0))


def least_memory_bytes(instance: Instance, fits: Callable[[float], bool | None]) -> float | None:
    """For an instance that has no plan, within 1 byte or 1e-9: the least memory of a device with which it has one.

    fits: whether there is a plan with so many bytes; None: not known, as a limit came first. None if no memory helps,
    or a limit came first.
    """
    most_bytes = sum(
        max(x.activation_bytes * instance.microbatches + x.fixed_bytes + x.shared_bytes for x in rows)
        for layer in instance.layers
        if (rows := [tmpc for row in layer.tmpcs.values() for tmpc in row])
    )
    low, high = instance.memory_bytes, max(1.0, 2.0 * instance.memory_bytes)
    while not (found := fits(high)):
        if found is None or high > most_bytes:
            return None
        low, high = high, 2.0 * high
    while high - low > max(1.0, 1e-9 * high):
        middle = (low + high) / 2.0
        found = fits(middle)
        if found is None:
            return None
        low, high = (low, middle) if found else (middle, high)
    return high
