"""A solve on the lattice of single layers: from the preparation to a solution, at the end or on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.findings import Findings
from piper_ray.engine.layer_answers import Answers, without_plan
from piper_ray.engine.preparation import Outline, Preparation, prepare
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.expected import expected_between_s
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.search import Search
from piper_ray.engine.tables.problem import Problem, build_problem
from piper_ray.engine.wide_layers import WideFindings, has_room, pays, solve_wide_layers
from piper_ray.model.errors import InvalidPlan, LimitError, UsageError
from piper_ray.model.events import EvaluationAdvanced, EvaluationFinished, Event, Listener, Note, silent
from piper_ray.model.figures import duration_text
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Solution, SolveStats

_LONG_S = 10.0
"""Of a search, after which a second for a forecast is no matter."""


def solve_layers(request: SolveRequest, prepared: Preparation | None = None) -> Solution:
    """The plan of least time, or the best one found. prepared: shared with other solves, and no part of this one's
    time.

    Raises as ``engine.solve.solve``.
    """
    instance, restrictions = request.instance, request.restrictions
    if prepared is not None:
        if not prepared.serves(instance, restrictions):
            raise UsageError("prepared for another graph, or under other restrictions: prepare anew, or leave it out")
        return _solve_on_all(request, prepared, is_shared=True)
    outline, known = Outline.of(instance, restrictions), None
    if pays(request, outline):
        found = solve_wide_layers(request, outline)
        if isinstance(found, Solution):
            return found
        known = found
    try:
        made = prepare(instance, restrictions, request.options.memory_limit_bytes, request.listener, outline)
    except LimitError:
        if known is None:
            if not has_room(request, outline):
                raise
            found = solve_wide_layers(request, outline)
            if isinstance(found, Solution):
                return found
            known = found
        best = known.at_the_end()
        if best is None:
            raise
        return best
    return _solve_on_all(request, made, known=known)


def _solve_on_all(
    request: SolveRequest, made: Preparation, *, is_shared: bool = False, known: WideFindings | None = None
) -> Solution:
    """On all downsets. is_shared: with other solves. known: what looking for those that count has found."""
    instance, restrictions = request.instance, request.restrictions
    if made.workload is None:
        return _impossible(request, made)
    if known is None:
        request.stop.check()
    began_s = time.perf_counter()
    problem = build_problem(made.workload, instance, restrictions.data_parallel_degrees(instance))
    lattice_s, stage_costs_s = 0.0, time.perf_counter() - began_s
    if not is_shared:
        lattice_s, stage_costs_s = made.lattice_s, stage_costs_s + made.stage_costs_s
    with (
        request.open_checkpoint() as checkpoint,
        request.open_backend() as backend,
        closing(Evaluations(backend, checkpoint)) as evaluations,
    ):
        backend.listen(request.listener)
        planning = Planning(instance, made.outline.contraction)
        told = silent if request.listener is silent else _Foretold(problem, request.listener)
        search = Search(planning, problem, evaluations, request.limits, told, request.started_s)
        if known is not None:
            lattice_s += known.seconds
            search.begin_within(known.search.incumbent, known.search.bracket.lower)
        # With several links more devices may be a slower way between them.
        has_findings = is_shared and len(instance.cluster.links) == 1
        if has_findings and checkpoint is None and request.limits.are_none:
            _begin_with(made.findings, search, restrictions)
        answers = Answers(search, made, backend, lattice_s, stage_costs_s)
        request.stop.offer(answers.so_far)
        search.run()
        solution = answers.at_the_end()
        if has_findings and solution.plan is not None and solution.time_per_sample_s is not None:
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
    return without_plan(made.impossible, stats)
