"""A solve on the lattice of single layers: from the preparation to a solution, at the end or on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

from piper_ray.engine.evaluation.backend import Display
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.findings import Findings
from piper_ray.engine.preparation import Preparation, prepare
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.expected import expected_between_s
from piper_ray.engine.search.infeasibility import explain
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.search import Search
from piper_ray.engine.tables.problem import Problem, build_problem
from piper_ray.model.errors import ChoiceTooHard, InvalidPlan, UsageError
from piper_ray.model.events import EvaluationAdvanced, EvaluationFinished, Event, Listener, Note
from piper_ray.model.figures import duration_text
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy, StopSearch

_LONG_S = 10.0
"""Of a search, after which a second for a forecast is no matter."""

_UNEXPLAINED = Infeasibility("no plan fits (the search for the memory that would do was stopped)", None)


def solve_layers(request: SolveRequest, prepared: Preparation | None = None) -> Solution:
    """The plan of least time, or the best one found. prepared: shared with other solves, and no part of this one's
    time.

    Raises as ``engine.solve.solve``.
    """
    instance, restrictions = request.instance, request.restrictions
    if prepared is not None and not prepared.serves(instance, restrictions):
        raise UsageError("prepared for another graph, or under other restrictions: prepare anew, or leave it out")
    made = prepared or prepare(instance, restrictions, request.options.memory_limit_bytes, request.listener)
    if made.workload is None:
        return _impossible(request, made)
    request.stop.check()
    began_s = time.perf_counter()
    problem = build_problem(made.workload, instance, restrictions.data_parallel_degrees(instance))
    stage_costs_s = time.perf_counter() - began_s
    if prepared is None:
        stage_costs_s += made.stage_costs_s
    with (
        request.open_checkpoint() as checkpoint,
        request.open_backend() as backend,
        closing(Evaluations(backend, checkpoint)) as evaluations,
    ):
        backend.listen(request.listener)
        planning = Planning(instance, made.outline.contraction)
        told = _Foretold(problem, request.listener)
        search = Search(planning, problem, evaluations, request.limits, told, request.started_s)
        # With several links more devices may be a slower way between them.
        shared = prepared is not None and len(instance.cluster.links) == 1
        if prepared is not None and shared and checkpoint is None and request.limits.are_none:
            _begin_with(prepared.findings, search, restrictions)
        answers = _Answers(search, made, backend, 0.0 if prepared is not None else made.lattice_s, stage_costs_s)
        request.stop.offer(answers.so_far)
        search.run()
        solution = answers.at_the_end()
        if shared and solution.plan is not None and solution.time_per_sample_s is not None:
            made.findings.record(
                instance, restrictions, solution.lower_bound_s, solution.time_per_sample_s, solution.plan
            )
        return solution


@dataclass
class _Foretold:
    """A listener that passes events on, and says once how long a search that has taken long is likely to go on."""

    problem: Problem
    listener: Listener
    told: bool = False

    def __call__(self, event: Event) -> None:
        self.listener(event)
        if self.told or not isinstance(event, (EvaluationAdvanced, EvaluationFinished)):
            return
        if event.bounds.elapsed_s >= _LONG_S:
            self.told = True
            more_s = expected_between_s(self.problem, event.bounds.lower_s, event.bounds.upper_s)
            if more_s is not None:
                self.listener(Note(f"about {duration_text(more_s)} more of one thread's time, by a rough forecast"))


def _begin_with(findings: Findings, search: Search, restrictions: Restrictions) -> None:
    """What other points of the graph tell of this one; its answer is the same without."""
    instance = search.planning.instance
    known = findings.about(instance, restrictions)
    search.begin_with(next(_valid(instance, known.plans), None), known.lower_s)


def _valid(instance: Instance, plans: Iterable[Plan]) -> Iterator[ValuedPlan]:
    for plan in plans:
        with suppress(InvalidPlan):
            yield ValuedPlan.of(instance, plan)


@dataclass(frozen=True)
class _Answers:
    """What a search has found, at whatever moment. lattice_s, stage_costs_s: what came before it, in this solve."""

    search: Search
    prepared: Preparation
    display: Display
    lattice_s: float
    stage_costs_s: float
    began_s: float = field(default_factory=time.perf_counter)

    def so_far(self) -> Solution:
        """For other threads too."""
        return self._solution(StoppedBy.INTERRUPT, _UNEXPLAINED, pairs=None)

    def at_the_end(self) -> Solution:
        infeasibility = self._explained() if self.search.bracket.exhausted else _UNEXPLAINED
        return self._solution(self.search.stopped_by, infeasibility, self.prepared.pairs)

    def _explained(self) -> Infeasibility:
        """An interrupt, the time limit or a TMPC choice too hard costs the figure here, not the answer."""
        search = self.search
        try:
            return explain(search.planning.instance, search.problem, search.evaluations, search.check)
        except (KeyboardInterrupt, StopSearch, ChoiceTooHard):
            return _UNEXPLAINED

    def _solution(self, stopped_by: StoppedBy | None, infeasibility: Infeasibility, pairs: int | None) -> Solution:
        """infeasibility: for the case that there is no plan."""
        search, stats = self.search, self._stats(pairs)
        incumbent, lower_s = search.incumbent, search.bracket.lower
        if incumbent is None:
            if search.bracket.exhausted:
                return _without_plan(infeasibility, stats)
            return Solution(Status.UNKNOWN, None, lower_s, None, stats, stopped_by=stopped_by)
        return Solution(
            status=Status.OPTIMAL if search.proved else Status.FEASIBLE,
            time_per_sample_s=incumbent.time_per_sample_s,
            lower_bound_s=search.proved_s(incumbent) if search.proved else min(lower_s, incumbent.time_per_sample_s),
            plan=incumbent.plan,
            stats=stats,
            stopped_by=stopped_by,
        )

    def _stats(self, pairs: int | None) -> SolveStats:
        lattice = self.search.problem.workload.lattice
        return SolveStats(
            layers=len(self.search.planning.instance.layers),
            contracted_layers=lattice.graph.size,
            downsets=lattice.size,
            levels=lattice.levels,
            pairs=pairs,
            threads=self.display.threads,
            lattice_s=self.lattice_s,
            stage_costs_s=self.stage_costs_s,
            search_s=time.perf_counter() - self.began_s,
            evaluations=tuple(self.search.stats),
            cluster=self.display.stats(),
        )


def _impossible(request: SolveRequest, made: Preparation) -> Solution:
    """Some layer has no TMPC that is allowed: there is no lattice, and nothing to search."""
    stats = SolveStats(
        layers=len(request.instance.layers),
        contracted_layers=made.outline.graph.size,
        downsets=0,
        levels=0,
        pairs=None,
        threads=0,
        lattice_s=0.0,
        stage_costs_s=0.0,
        search_s=0.0,
        evaluations=(),
    )
    return _without_plan(made.impossible, stats)


def _without_plan(infeasibility: Infeasibility | None, stats: SolveStats) -> Solution:
    return Solution(Status.INFEASIBLE, None, float("inf"), None, stats, infeasibility)
