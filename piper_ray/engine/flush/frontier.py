"""A frontier with one d and one t for all stages: one lattice and its tables for all numbers of devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.engine.first_run import compiling_told, of_flush
from piper_ray.engine.flush.answer import flush_schedule, instance_under
from piper_ray.engine.flush.crew import Crew
from piper_ray.engine.flush.plans import ChosenStages
from piper_ray.engine.flush.preparation import FlushPreparation, prepare_flush
from piper_ray.engine.flush.search import Degrees, FlushSearch
from piper_ray.engine.flush.solve import FlushProblem, opened_crew, without_plan
from piper_ray.engine.frontier.curve_events import FrontierListener
from piper_ray.engine.frontier.points import FrontierStats
from piper_ray.engine.frontier.result import Frontier
from piper_ray.engine.frontier.walk import WalkedFrontier
from piper_ray.engine.ledger import preference
from piper_ray.engine.search.limits import Limits
from piper_ray.model.events import DegreesSearched, Event, IncumbentFound, Listener, Note
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution
from piper_ray.model.step import StepTerms
from piper_ray.model.stop import Stop


def frontier_by_degrees(
    instance: Instance,
    devices: Sequence[int],
    restrictions: Restrictions,
    options: SolveOptions,
    schedule: Schedule,
    listener: FrontierListener,
    stop: Stop[Frontier],
) -> Frontier:
    """instance: at the most of ``devices``, which rise. Raises LimitError if the lattice does not fit, UsageError for
    constraints that such a search does not know.
    """
    started_s = time.perf_counter()
    instance = instance_under(schedule, instance, lambda text: listener(Note(text)))

    def tell(event: Event) -> None:
        """Points have rows, not the rounds and plans of each."""
        if not isinstance(event, (DegreesSearched, IncumbentFound)):
            listener(event)

    with compiling_told(listener, options.threads, of_flush):
        prepared = prepare_flush(instance, restrictions, options.memory_limit_bytes, tell)
        if not isinstance(prepared, FlushPreparation):
            nothing = without_plan(instance, flush_schedule(schedule), StepTerms(), prepared)
            impossible = _Impossible(nothing, FrontierStats())
            found = WalkedFrontier(instance, devices, restrictions, options, schedule, impossible)
            found.reason = prepared.reason
            return found
        problem = FlushProblem(prepared, flush_schedule(schedule), StepTerms())
        limits = Limits.of(options, started_s, stop)
        with opened_crew(None, options.threads) as crew:
            solver = _DegreesSolver(problem, crew, limits, tell, started_s)
            found = WalkedFrontier(instance, devices, restrictions, options, schedule, solver)
            found.walk(listener, stop)
        return found


@dataclass(frozen=True)
class _Impossible:
    """Some layer has no TMPC that is allowed."""

    solution: Solution
    stats: FrontierStats

    def solve(self, devices: int) -> Solution:  # noqa: ARG002 - none is needed
        return self.solution

    def so_far(self, devices: int) -> Solution:
        return self.solve(devices)


@dataclass
class _DegreesSolver:
    """Bounds of tasks and plans found are carried from one number of devices to the next."""

    problem: FlushProblem
    crew: Crew
    limits: Limits
    listener: Listener
    started_s: float

    def __post_init__(self) -> None:
        lattice, prepared = self.problem.prepared.workload.lattice, self.problem.prepared
        self.stats = FrontierStats(
            contracted_layers=lattice.graph.size,
            downsets=lattice.size,
            levels=lattice.levels,
            threads=self.crew.width,
            preparation_s=prepared.lattice_s + prepared.stage_costs_s,
        )
        self._proved_s: dict[Degrees, float] = {}
        self._found: dict[int, ChosenStages] = {}  # the best one known of each number of devices
        self._under_way: tuple[int, FlushSearch] | None = None

    def solve(self, devices: int) -> Solution:
        every = self.problem.prepared.restrictions.all_devices  # then plans for fewer devices are none for these
        proved_s = {} if every else self._proved_s
        search = self.problem.search(devices, self.crew, self.limits, self.listener, self.started_s, proved_s)
        search.ledger.best = self._best_known(devices)
        self._under_way = devices, search
        self.problem.improve(search, devices)
        search.run()
        found = dict(self._found)
        for plan in search.ledger.found:
            found[plan.devices] = min(found.get(plan.devices, plan), plan, key=preference)
        self._found, self._proved_s, self._under_way = found, search.proved_of_tasks(), None
        self.stats = replace(
            self.stats, evaluations=self.stats.evaluations + 1, search_s=self.stats.search_s + search.seconds
        )
        return self.problem.solution(search)

    def so_far(self, devices: int) -> Solution:
        under_way = self._under_way
        if under_way is not None and under_way[0] == devices:
            return self.problem.solution(under_way[1])
        known = self._best_known(devices)
        return self.problem.without_proof(known)

    def _best_known(self, devices: int) -> ChosenStages | None:
        """Of those found on any number of devices that may be used on so many."""
        if self.problem.prepared.restrictions.all_devices:
            return self._found.get(devices)
        return min((x for k, x in self._found.items() if k <= devices), key=preference, default=None)
