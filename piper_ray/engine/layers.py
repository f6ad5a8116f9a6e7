"""A solve on the lattice of single layers: from the preparation to a solution, at the end or on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

from piper_ray.engine.evaluation.backend import Display
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.findings import Findings
from piper_ray.engine.forecast import downset_limit
from piper_ray.engine.preparation import Outline, PointShape, Preparation, prepare
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.expected import expected_between_s
from piper_ray.engine.search.infeasibility import explain
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.search import Search
from piper_ray.engine.search.wide import WideSearch
from piper_ray.engine.tables.problem import Problem, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.errors import ChoiceTooHard, InvalidPlan, LimitError, UsageError
from piper_ray.model.events import EvaluationAdvanced, EvaluationFinished, Event, Listener, Note, StepFinished
from piper_ray.model.figures import duration_text
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy, StopSearch

_LONG_S = 10.0
"""Of a search, after which a second for a forecast is no matter."""

_NONE_FITS = Infeasibility("no plan fits (the graph is too wide to tell the memory that would do)", None)
_UNEXPLAINED = Infeasibility("no plan fits (the search for the memory that would do was stopped)", None)


def solve_layers(request: SolveRequest, prepared: Preparation | None = None) -> Solution:
    """The plan of least time, or the best one found. prepared: shared with other solves, and no part of this one's
    time.

    Raises as ``engine.solve.solve``.
    """
    instance, restrictions = request.instance, request.restrictions
    if prepared is not None and not prepared.serves(instance, restrictions):
        raise UsageError("prepared for another graph, or under other restrictions: prepare anew, or leave it out")
    made = prepared
    if made is None:
        outline = Outline.of(instance, restrictions)
        try:
            made = prepare(instance, restrictions, request.options.memory_limit_bytes, request.listener, outline)
        except LimitError as refusal:
            return _solve_wide(request, outline, refusal)
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


def _solve_wide(request: SolveRequest, outline: Outline, refusal: LimitError) -> Solution:
    """Where not all downsets can be listed: on those that plans as good as the best one known can use.

    Raises ``refusal`` where there is neither a plan nor such a list.
    """
    instance, restrictions = request.instance, request.restrictions
    if request.options.resume is not None:
        request.note("nothing is kept for later of a graph whose downsets are too many to list")
    planning, options = (
        Planning(instance, outline.contraction),
        build_options(instance, outline.graph, outline.variants),
    )
    degrees = restrictions.data_parallel_degrees(instance)
    began_s = time.perf_counter()
    most = downset_limit(outline.graph, len(outline.variants), None, request.options.memory_limit_bytes)
    if most <= outline.graph.size:
        raise refusal  # not even the downsets of one chain fit
    with request.open_backend() as backend, closing(Evaluations(backend)) as evaluations:
        backend.listen(request.listener)
        wide = WideSearch(
            planning, outline.graph, options, degrees, backend, request.limits, request.listener, request.started_s
        )
        answers = _WideAnswers(wide, outline, backend)
        request.stop.offer(answers.so_far)
        try:
            workload = wide.live(most)
        except (StopSearch, KeyboardInterrupt) as stop:
            return answers.stopped(stop.reason if isinstance(stop, StopSearch) else StoppedBy.INTERRUPT)
        except ChoiceTooHard:
            if wide.incumbent is None:
                raise
            return answers.stopped(StoppedBy.CHOICE_TOO_HARD)
        if workload is None:
            if wide.bracket.exhausted:
                return _without_plan(_NONE_FITS, answers.stats())
            if wide.incumbent is None:
                raise refusal
            return answers.at_the_end()
        lattice_s = time.perf_counter() - began_s
        lattice = workload.lattice
        of_all = "" if outline.contracted.downsets is None else f" of {outline.contracted.downsets:,}"
        request.listener(
            StepFinished("lattice", lattice_s, f"{lattice.size:,}{of_all} downsets, which plans as good can use")
        )
        shape = PointShape.of(instance, restrictions)
        made = Preparation(instance.layers, instance.edges, shape, outline, workload, None, lattice_s, 0.0)
        problem = build_problem(workload, instance, degrees)
        search = Search(planning, problem, evaluations, request.limits, request.listener, request.started_s)
        search.begin_with(wide.incumbent, wide.bracket.lower)
        found = _Answers(search, made, backend, lattice_s, 0.0)
        request.stop.offer(found.so_far)
        search.run()
        return found.at_the_end()


@dataclass(frozen=True)
class _WideAnswers:
    """What is known of a wide graph, at whatever moment."""

    search: WideSearch
    outline: Outline
    display: Display
    began_s: float = field(default_factory=time.perf_counter)

    def so_far(self) -> Solution:
        """For other threads too."""
        return self.stopped(StoppedBy.INTERRUPT)

    def at_the_end(self) -> Solution:
        """Where no lattice was made for it."""
        gap = self.search.limits.gap
        within = gap > 0.0 and self.search.bracket.is_done(gap)
        return self.stopped(StoppedBy.GAP if within else StoppedBy.TOO_MANY_DOWNSETS)

    def stopped(self, reason: StoppedBy) -> Solution:
        """``reason``: unless the plan is proved to be the best by then."""
        incumbent, bracket = self.search.incumbent, self.search.bracket
        if incumbent is None:
            return Solution(Status.UNKNOWN, None, bracket.lower, None, self.stats(), stopped_by=reason)
        time_s = incumbent.time_per_sample_s
        return Solution(
            status=Status.OPTIMAL if bracket.closed else Status.FEASIBLE,
            time_per_sample_s=time_s,
            lower_bound_s=min(bracket.lower, time_s),
            plan=incumbent.plan,
            stats=self.stats(),
            stopped_by=None if bracket.closed else reason,
        )

    def stats(self) -> SolveStats:
        """Of a search without a lattice."""
        return SolveStats(
            layers=len(self.search.planning.instance.layers),
            contracted_layers=self.outline.graph.size,
            downsets=self.outline.contracted.downsets or 0,
            levels=self.outline.graph.size + 1,
            pairs=None,
            threads=self.display.threads,
            lattice_s=0.0,
            stage_costs_s=0.0,
            search_s=time.perf_counter() - self.began_s,
            evaluations=(),
            cluster=self.display.stats(),
        )


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
