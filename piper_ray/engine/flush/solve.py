"""``solve_flush``: from an instance to a proved plan under a schedule with a flush. Only puts the parts together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.engine.flush.crew import Crew, ThreadCrew
from piper_ray.engine.flush.least_memory import least_memory_bytes
from piper_ray.engine.flush.plans import ChosenStages, build_flush_plan
from piper_ray.engine.flush.preparation import FlushPreparation, prepare_flush
from piper_ray.engine.flush.records import FlushSolution, FlushStats
from piper_ray.engine.flush.search import Degrees, FlushSearch, Memo
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.ledger import Ledger
from piper_ray.engine.search.limits import Limits
from piper_ray.model.cores import usable_cores
from piper_ray.model.divided import can_use_all, reason_against_all
from piper_ray.model.events import Listener, silent
from piper_ray.model.figures import memory_text, plural
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Status
from piper_ray.model.step import StepTerms
from piper_ray.model.stop import Stop

_ANY_PLAN = 0.999
"""A gap with which a search ends at its first plan."""


def solve_flush(
    instance: Instance,
    schedule: FlushSchedule,
    *,
    restrictions: Restrictions = Restrictions(),
    step: StepTerms = StepTerms(),
    options: SolveOptions = SolveOptions(),
    stop: Stop[Any] | None = None,
    listener: Listener = silent,
    crew: Crew | None = None,
    memo: Memo | None = None,
    explain: bool = False,
) -> FlushSolution:
    """The plan whose simulated batch takes the least under the schedule, with proof; or the best one found when a limit
    or a wish to stop comes first.

    Of ``options`` gap, time_limit_s, threads and memory_limit_bytes count. crew: who does the work; None: threads.
    memo: knows what was searched before. explain: where there is no plan, look for the memory that would do. Of
    ``restrictions`` those on the plan as a whole that are not kept by one d and one t for all stages are the caller's.

    Raises LimitError if the lattice does not fit.
    """
    started_s = time.perf_counter()
    stop = stop or Stop()
    prepared = prepare_flush(instance, restrictions, options.memory_limit_bytes, listener)
    if not isinstance(prepared, FlushPreparation):
        return without_plan(instance, schedule, prepared.reason)
    problem = FlushProblem(prepared, schedule, step)
    with opened_crew(crew, options.threads) as opened:
        limits = Limits.of(options, started_s, stop)
        search = problem.search(instance.devices, opened, limits, listener, started_s, memo=memo)
        stop.offer(lambda: problem.solution(search))
        problem.improve(search, instance.devices)
        search.run()
        found = problem.solution(search)
        if found.status is not Status.INFEASIBLE or not explain:
            return found
        any_plan = replace(limits, gap=_ANY_PLAN)
        least = least_memory_bytes(instance, lambda memory_bytes: problem.fits(memory_bytes, opened, any_plan))
        return explained(found, instance, restrictions, least)


@contextmanager
def opened_crew(crew: Crew | None, threads: int | None) -> Iterator[Crew]:
    """The caller's, which stays, or threads of our own, which end with the solve."""
    if crew is not None:
        yield crew
        return
    with closing(ThreadCrew(threads or usable_cores())) as own:
        yield own


@dataclass(frozen=True)
class FlushProblem:
    """What is solved on any number of devices up to those of ``prepared``."""

    prepared: FlushPreparation
    schedule: FlushSchedule
    step: StepTerms

    def search(
        self,
        devices: int,
        crew: Crew,
        limits: Limits,
        listener: Listener,
        started_s: float,
        proved_s: Mapping[Degrees, float] = MappingProxyType({}),
        memo: Memo | None = None,
    ) -> FlushSearch:
        """One on so many devices, before its start. proved_s, memo: see ``FlushSearch``."""
        workload = self.prepared.workload
        ledger = Ledger[ChosenStages](
            self.prepared.instance.microbatches, limits, listener, started_s, self.step.optimizer_s
        )
        return FlushSearch(workload.arrays, self._tasks(workload, devices), crew, ledger, proved_s, memo)

    def improve(self, search: FlushSearch, devices: int) -> None:
        """Gives the search a plan to begin with, where its lattice is large."""
        chain = self.prepared.chain
        if chain is not None:
            search.improve(chain.arrays, self._tasks(chain, devices))

    def fits(self, memory_bytes: float, crew: Crew, limits: Limits) -> bool | None:
        """Whether there is a plan with so much memory on each device; None: a limit came first."""
        roomy = replace(self.prepared, instance=self.prepared.instance.replace(memory_bytes=memory_bytes))
        problem, devices = replace(self, prepared=roomy), roomy.instance.devices
        search = problem.search(devices, crew, limits, silent, time.perf_counter())
        problem.improve(search, devices)
        search.run()
        if search.ledger.best is not None:
            return True
        return None if search.ledger.stopped_by is not None or search.ledger.lower_s < float("inf") else False

    def solution(self, search: FlushSearch) -> FlushSolution:
        """What the search has found, at whatever moment."""
        ledger, instance = search.ledger, self.prepared.instance
        chosen, lower_s = ledger.best, ledger.lower_s
        if chosen is None:
            if ledger.stopped_by is None and lower_s == float("inf"):
                return without_plan(instance, self.schedule, "no plan fits", self._stats(search))
            stopped_by = ledger.stopped_by or search.left_open
            return FlushSolution(
                Status.UNKNOWN, self.schedule, instance.microbatches, None, lower_s, self._stats(search), stopped_by
            )
        best = build_flush_plan(instance, self.prepared.workload, chosen)
        proved = ledger.proved
        return FlushSolution(
            status=Status.OPTIMAL if proved else Status.FEASIBLE,
            schedule=self.schedule,
            microbatches=instance.microbatches,
            best=best,
            lower_bound_batch_s=min(lower_s, best.batch_s),
            stats=self._stats(search),
            stopped_by=None if proved else ledger.stopped_by or search.left_open,
        )

    def without_proof(self, chosen: ChosenStages | None) -> FlushSolution:
        """A plan that is known, if any, before there is a search."""
        instance, workload = self.prepared.instance, self.prepared.workload
        status = Status.UNKNOWN if chosen is None else Status.FEASIBLE
        best = None if chosen is None else build_flush_plan(instance, workload, chosen)
        stats = FlushStats(workload.lattice.size, workload.lattice.levels, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        return FlushSolution(status, self.schedule, instance.microbatches, best, 0.0, stats)

    def _tasks(self, workload: FlushWorkload, devices: int) -> list[DegreePair]:
        instance = self.prepared.instance
        if devices != instance.devices:
            instance = instance.replace(devices=devices)
        return list_tasks(instance, workload, self.schedule, self.prepared.restrictions, self.step)

    def _stats(self, search: FlushSearch) -> FlushStats:
        prepared, lattice = self.prepared, self.prepared.workload.lattice
        return FlushStats(
            downsets=lattice.size,
            levels=lattice.levels,
            threads=search.crew.width,
            tasks=len(search.tasks),
            searched=search.searched,
            looked_through=search.looked_through,
            states=search.states,
            lattice_s=prepared.lattice_s,
            stage_costs_s=prepared.stage_costs_s,
            search_s=search.seconds,
        )


def explained(
    found: FlushSolution, instance: Instance, restrictions: Restrictions, least_bytes: float | None
) -> FlushSolution:
    """Why there is no plan. least_bytes: with which there is one; None: not known, or none would do."""
    if restrictions.all_devices and not can_use_all(instance, restrictions):
        return replace(found, reason=reason_against_all(instance, restrictions), least_memory_bytes=None)
    every = "all " if restrictions.all_devices else ""
    stages = "" if restrictions.stage_count is None else f" of {plural(restrictions.stage_count, 'stage')}"
    reason = (
        f"no plan{stages} with one d and one t fits on {every}{instance.devices:,} "
        f"devices of {memory_text(instance.memory_bytes)} with {instance.microbatches:,} microbatches"
    )
    return replace(found, reason=reason, least_memory_bytes=least_bytes)


def without_plan(
    instance: Instance, schedule: FlushSchedule, reason: str, stats: FlushStats | None = None
) -> FlushSolution:
    """That there is none is proved."""
    stats = stats or FlushStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    return FlushSolution(Status.INFEASIBLE, schedule, instance.microbatches, None, float("inf"), stats, reason=reason)
