"""``solve_flush``: from an instance to a proved plan under a schedule with a flush. Only puts the parts together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.engine.backends.calls import ThreadWorkers, Workers
from piper_ray.engine.flush.least_memory import least_memory_bytes
from piper_ray.engine.flush.plans import ChosenStages, build_flush_plan
from piper_ray.engine.flush.preparation import FlushPreparation, prepare_flush
from piper_ray.engine.flush.search import Degrees, FlushSearch, Memo
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.ledger import Bounded, Ledger, Limits, no_plan
from piper_ray.model.cores import usable_cores
from piper_ray.model.divided import can_use_all, reason_against_all
from piper_ray.model.events import Listener, silent
from piper_ray.model.figures import memory_text, plural
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats, Status
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
    workers: Workers | None = None,
    memo: Memo | None = None,
    explain: bool = False,
) -> Solution:
    """The plan whose simulated batch takes the least under the schedule, with proof; or the best one found when a limit
    or a wish to stop comes first.

    Of ``options`` gap, time_limit_s, threads and memory_limit_bytes count. workers: who does the work; None: threads.
    memo: knows what was searched before. explain: where there is no plan, look for the memory that would do. Of
    ``restrictions`` those on the plan as a whole that are not kept by one d and one t for all stages are the caller's.

    Raises LimitError if the lattice does not fit.
    """
    started_s = time.perf_counter()
    stop = stop or Stop()
    prepared = prepare_flush(instance, restrictions, options.memory_limit_bytes, listener)
    if not isinstance(prepared, FlushPreparation):
        return without_plan(instance, schedule, step, prepared)
    problem = FlushProblem(prepared, schedule, step)
    with opened_workers(workers, options.threads) as opened:
        limits = Limits.of(options, started_s, stop)
        search = problem.search(instance.devices, opened, limits, listener, started_s, memo=memo)
        stop.offer(lambda: problem.solution(search))
        problem.improve(search, instance.devices)
        search.ledger.run(search)
        found = problem.solution(search)
        if found.status is not Status.INFEASIBLE or not explain:
            return found
        any_plan = replace(limits, gap=_ANY_PLAN)
        least = least_memory_bytes(instance, lambda memory_bytes: problem.fits(memory_bytes, opened, any_plan))
        return explained(found, instance, restrictions, least)


@contextmanager
def opened_workers(workers: Workers | None, threads: int | None) -> Iterator[Workers]:
    """The caller's, which stays, or threads of our own, which end with the solve."""
    if workers is not None:
        yield workers
        return
    with closing(ThreadWorkers(threads or usable_cores())) as own:
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
        workers: Workers,
        limits: Limits,
        listener: Listener,
        started_s: float,
        proved_s: Mapping[Degrees, float] = MappingProxyType({}),
        memo: Memo | None = None,
    ) -> FlushSearch:
        """One on so many devices, before its start. proved_s, memo: see ``FlushSearch``."""
        workload = self.prepared.workload
        ledger = self._ledger(limits, listener, started_s)
        return FlushSearch(workload.arrays, self._tasks(workload, devices), workers, ledger, proved_s, memo)

    def improve(self, search: FlushSearch, devices: int) -> None:
        """Gives the search a plan to begin with, where its lattice is large."""
        chain = self.prepared.chain
        if chain is not None:
            search.improve(chain.arrays, self._tasks(chain, devices))

    def fits(self, memory_bytes: float, workers: Workers, limits: Limits) -> bool | None:
        """Whether there is a plan with so much memory on each device; None: a limit came first."""
        roomy = replace(self.prepared, instance=self.prepared.instance.replace(memory_bytes=memory_bytes))
        problem, devices = replace(self, prepared=roomy), roomy.instance.devices
        search = problem.search(devices, workers, limits, silent, time.perf_counter())
        problem.improve(search, devices)
        search.ledger.run(search)
        if search.ledger.best is not None:
            return True
        return None if search.ledger.stopped_by is not None or search.ledger.lower_s < float("inf") else False

    def solution(self, search: FlushSearch) -> Solution:
        """What the search has found, at whatever moment."""
        return self._answer(search.ledger, self._stats(search))

    def without_proof(self, chosen: ChosenStages | None) -> Solution:
        """A plan that is known, if any, before there is a search."""
        ledger = self._ledger(Limits(), silent, time.perf_counter())
        ledger.best, ledger.cases = chosen, {0: Bounded()}
        return self._answer(ledger, self._lattice_stats())

    def _answer(self, ledger: Ledger[ChosenStages], stats: SolveStats) -> Solution:
        instance, workload = self.prepared.instance, self.prepared.workload
        return ledger.answer(
            lambda chosen: build_flush_plan(instance, workload, chosen),
            lambda _: named_schedule(self.schedule),
            stats,
            self.step,
        )

    def _ledger(self, limits: Limits, listener: Listener, started_s: float) -> Ledger[ChosenStages]:
        return Ledger(self.prepared.instance.microbatches, limits, listener, started_s, self.step.optimizer_s)

    def _tasks(self, workload: FlushWorkload, devices: int) -> list[DegreePair]:
        instance = self.prepared.instance
        if devices != instance.devices:
            instance = instance.replace(devices=devices)
        return list_tasks(instance, workload, self.schedule, self.prepared.restrictions, self.step)

    def _lattice_stats(self) -> SolveStats:
        prepared, lattice = self.prepared, self.prepared.workload.lattice
        return replace(
            stats_of(prepared.instance),
            downsets=lattice.size,
            levels=lattice.levels,
            lattice_s=prepared.lattice_s,
            stage_costs_s=prepared.stage_costs_s,
        )

    def _stats(self, search: FlushSearch) -> SolveStats:
        degrees = DegreeStats(len(search.tasks), search.searched, search.looked_through, search.states)
        return replace(self._lattice_stats(), threads=search.workers.width, search_s=search.seconds, degrees=degrees)


def stats_of(instance: Instance) -> SolveStats:
    """Of a solve that has done nothing yet."""
    layers = len(instance.layers)
    return SolveStats(layers, layers, 0, 0, None, 0, 0.0, 0.0, 0.0, (), degrees=DegreeStats(0, 0, 0, 0))


def named_schedule(schedule: FlushSchedule) -> Schedule:
    """As plans know it."""
    return Schedule(ScheduleName(schedule.value))


def explained(found: Solution, instance: Instance, restrictions: Restrictions, least_bytes: float | None) -> Solution:
    """Why there is no plan. least_bytes: with which there is one; None: not known, or none would do."""
    if restrictions.all_devices and not can_use_all(instance, restrictions):
        return replace(found, infeasibility=Infeasibility(reason_against_all(instance, restrictions), None))
    every = "all " if restrictions.all_devices else ""
    stages = "" if restrictions.stage_count is None else f" of {plural(restrictions.stage_count, 'stage')}"
    reason = (
        f"no plan{stages} with one d and one t fits on {every}{instance.devices:,} "
        f"devices of {memory_text(instance.memory_bytes)} with {instance.microbatches:,} microbatches"
    )
    return replace(found, infeasibility=Infeasibility(reason, least_bytes))


def without_plan(instance: Instance, schedule: FlushSchedule, step: StepTerms, why: Infeasibility) -> Solution:
    """That there is none is proved."""
    return no_plan(why, stats_of(instance), named_schedule(schedule), step)
