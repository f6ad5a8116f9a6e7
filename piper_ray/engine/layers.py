"""Solves under 2bw on single layers: on all downsets or, if these are many, only on the useful ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from piper_ray.cost.plan import cost_of
from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.evaluation.evaluations import Evaluations, Memo
from piper_ray.engine.ledger import Ledger, no_plan, stats_of_nothing
from piper_ray.engine.preparation import (
    Findings,
    FindingsPoint,
    Outline,
    PointShape,
    Preparation,
    downset_limit,
    is_wide,
    note_of_many,
    prepare,
)
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.planning import Planning, ValuedPlan, explain
from piper_ray.engine.search.search import Search
from piper_ray.engine.search.wide import WideSearch
from piper_ray.engine.tables.problem import LatticeTables, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.constraints import Unplaced
from piper_ray.model.errors import ChoiceTooHard, LimitError, UsageError
from piper_ray.model.events import StepFinished, silent
from piper_ray.model.fields import when_asked
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Infeasibility, Solution, SolveStats
from piper_ray.model.stop import StopSearch

_UNEXPLAINED = Infeasibility("no plan fits (the search for the memory that would do was stopped)", None)
_NONE_FITS = Infeasibility("no plan fits (the graph is too wide to find how much memory would be enough)", None)


def solve_layers(request: SolveRequest, prepared: Preparation | None = None) -> Solution:
    """Returns the plan of least time, or the best one found. prepared: tables shared with other solves, whose time does
    not count in this one's.

    Raises what ``engine.solve.solve`` raises.
    """
    instance = request.instance
    if len(instance.cluster.links) == 1 or request.restrictions.has(Unplaced):
        return solve_unplaced(request, prepared)
    from piper_ray.engine.placed import with_places

    return with_places(request, lambda one: solve_unplaced(one, prepared if one.instance is instance else None))


def solve_unplaced(request: SolveRequest, prepared: Preparation | None = None) -> Solution:
    """Returns the best plan without places."""
    if prepared is not None and not prepared.serves(request.instance, request.restrictions):
        raise UsageError("prepared for another graph, or under other restrictions: prepare anew, or leave it out")
    outline = Outline.of(request.instance, request.restrictions) if prepared is None else prepared.outline
    with request.open_backend() as backend:
        backend.listen(request.listener)
        found = _LayerSolve(request, outline, backend, request.ledger())
        return found.on_all_or_those_that_count() if prepared is None else found.on_shared(prepared)


@dataclass
class _LayerSolve:
    """A solve in progress. tables: of the lattice, once it exists.

    lower_s: a bound proved before the search on the lattice. began_s: the start of the current step, by
    ``time.perf_counter``. looked_wide: whether useful downsets were sought.
    """

    request: SolveRequest
    outline: Outline
    backend: Backend
    ledger: Ledger[ValuedPlan]
    lower_s: float = 0.0
    lattice_s: float = 0.0
    stage_costs_s: float = 0.0
    began_s: float = field(default_factory=time.perf_counter)
    tables: LatticeTables | None = None
    search: Search | None = None
    looked_wide: bool = False

    def on_all_or_those_that_count(self) -> Solution:
        """Solves on all downsets or, if these are many, on the useful ones. Raises LimitError if neither fit in
        memory."""
        request, options = self.request, self.request.options
        is_many = options.resume is None and is_wide(self.outline)  # a checkpoint records states of all downsets
        if is_many and self._has_room and layer_without_choice(request.instance, self.outline.variants) is None:
            found = self._on_those_that_count()
            if found is not None:
                return found
        try:
            made = prepare(
                request.instance, request.restrictions, options.memory_limit_bytes, request.listener, self.outline
            )
        except LimitError:
            if not self.looked_wide and self._has_room:
                found = self._on_those_that_count()
                if found is not None:
                    return found
            if self.ledger.best is None and self.ledger.lower_s < float("inf"):
                raise
            return self.answer(_NONE_FITS)
        if not self.looked_wide:
            request.stop.check()
        self.lattice_s, self.stage_costs_s = self.lattice_s + made.lattice_s, made.stage_costs_s
        return self._on_all(made)

    def on_shared(self, made: Preparation) -> Solution:
        """Solves on all downsets, beginning with the findings of other solves. The answer is the same as without
        them."""
        request, instance, restrictions = self.request, self.request.instance, self.request.restrictions
        request.stop.check()
        # If there are several links, communication between more devices may be slower.
        if made.workload is None or len(instance.cluster.links) > 1:
            return self._on_all(made)
        told = request.options.resume is None and (request.limits.are_none or made.findings.thorough)
        point = FindingsPoint.of(instance, restrictions, request.data_parallel_limit)
        if told:
            known = made.findings.about(point)
            self.lower_s = known.lower_s
            plan = next(_valid(instance, known.plans), None)
            if plan is not None:
                self.ledger.begin_with(plan)
        found = self._on_all(made, is_likely=told)
        if found.plan is not None and found.time_per_sample_s is not None:
            made.findings.record(point, found.lower_bound_s, found.time_per_sample_s, found.plan)
            for one in self.search.found if made.findings.thorough and self.search is not None else ():
                least = point._replace(devices=one.devices, data_parallel_limit=one.plan.data_parallel_sum)
                made.findings.record(least, 0.0, one.value_s, one.plan)
        return found

    @property
    def _has_room(self) -> bool:
        """Whether the downsets of a chain fit in memory."""
        return self._room > self.outline.graph.size

    @property
    def _room(self) -> int:
        """The number of downsets that fit in memory."""
        limit_bytes = self.request.options.memory_limit_bytes
        return downset_limit(self.outline.graph, len(self.outline.variants), None, limit_bytes)

    def _on_those_that_count(self) -> Solution | None:
        """Returns the answer on useful downsets. None if all downsets are needed: because the useful ones do not fit or
        take too long to find, or to explain why there is no plan.
        """
        request, instance, graph, ledger = self.request, self.request.instance, self.outline.graph, self.ledger
        count = self.outline.downsets
        request.note(note_of_many(count))
        if request.options.resume is not None:
            request.note("nothing is kept for later of a graph whose downsets are too many to list")
        options = build_options(instance, graph, self.outline.variants)
        degrees = request.restrictions.data_parallel_degrees(instance)
        planning = Planning(instance, self.outline.contraction)
        wide = WideSearch(planning, graph, options, degrees, self.backend, ledger, self._room)
        request.stop.offer(self.answer)
        self.looked_wide, self.began_s = True, time.perf_counter()
        ledger.run(wide)
        self.lower_s = wide.bracket.lower
        if wide.workload is None:
            if wide.outgrown:
                request.note("more downsets count than fit in memory")
            near = ledger.best is not None and wide.bracket.is_done(request.options.gap)
            if near or ledger.stopped_by is not None:
                return self.answer()
        self.lattice_s = time.perf_counter() - self.began_s
        if wide.workload is None:
            return None
        of_all = "" if count is None else f" of {count:,}"
        request.listener(StepFinished("lattice", self.lattice_s, f"{wide.workload.lattice.size:,}{of_all} downsets"))
        shape = PointShape.of(instance, request.restrictions)
        made = Preparation(instance.layers, instance.edges, shape, self.outline, wide.workload, None, 0.0, 0.0)
        # The useful downsets are searched as if there were no others.
        return self._search(made, wide.workload, None, is_likely=True)

    def _on_all(self, made: Preparation, *, is_likely: bool = False) -> Solution:
        """Solves on all downsets of a lattice. is_likely: whether the known plan is likely to be the best."""
        request, instance = self.request, self.request.instance
        if made.workload is None:  # some layer has no TMPC that is allowed
            return no_plan(made.impossible, stats_of_nothing(instance, self.outline.graph.size))
        with request.open_checkpoint() as checkpoint:
            return self._search(made, made.workload, checkpoint, is_likely=is_likely)

    def _search(self, made: Preparation, tables: LatticeTables, memo: Memo | None, *, is_likely: bool) -> Solution:
        request, instance = self.request, self.request.instance
        began_s = time.perf_counter()
        problem = build_problem(tables, instance, request.restrictions.data_parallel_degrees(instance))
        limit = min(instance.data_parallel_limit, request.data_parallel_limit or instance.data_parallel_limit)
        problem = problem.with_cluster(problem.cluster._replace(data_parallel_limit=limit))
        self.stage_costs_s += time.perf_counter() - began_s
        planning, evaluations = Planning(instance, self.outline.contraction), Evaluations(self.backend, memo)
        search = Search(planning, problem, evaluations, self.ledger, self.lower_s, is_likely)
        self.tables, self.search, self.began_s = tables, search, time.perf_counter()
        request.stop.offer(self.answer)
        self.ledger.run(search)
        why = self._explained() if search.bracket.exhausted else None
        return self.answer(why or _UNEXPLAINED, when_asked(made.count_pairs))

    def _explained(self) -> Infeasibility | None:
        """Explains why there is no plan. None after an interrupt, the time limit or a TMPC choice that is too hard: the
        answer then lacks only the figure."""
        assert self.search is not None
        problem, evaluations = self.search.problem, self.search.evaluations
        try:
            return explain(self.request.instance, problem, evaluations, lambda _: self.request.limits.check())
        except (KeyboardInterrupt, StopSearch, ChoiceTooHard):
            return None

    def answer(self, infeasibility: Infeasibility = _UNEXPLAINED, pairs: int | None = None) -> Solution:
        """Returns the answer at any moment, also to other threads. infeasibility: the reason if there is no plan."""
        graph, tables, stats = self.outline.graph, self.tables, () if self.search is None else self.search.stats
        downsets, levels = self.outline.downsets or 0, graph.size + 1
        if tables is not None:
            downsets, levels = tables.lattice.size, tables.lattice.levels
        return self.ledger.answer(
            lambda found: found.plan,
            lambda _: PAPERS_SCHEDULE,
            SolveStats(
                layers=len(self.request.instance.layers),
                contracted_layers=graph.size,
                downsets=downsets,
                levels=levels,
                pairs=pairs,
                threads=self.backend.threads,
                lattice_s=self.lattice_s,
                stage_costs_s=self.stage_costs_s,
                search_s=time.perf_counter() - self.began_s,
                evaluations=tuple(stats),
                cluster=self.backend.stats(),
            ),
            infeasibility=infeasibility,
        )


def _valid(instance: Instance, plans: Iterable[Plan]) -> Iterator[ValuedPlan]:
    costs = ((plan, cost_of(instance, plan)) for plan in plans)
    return (ValuedPlan(plan, cost.sample_s) for plan, cost in costs if cost.fault is None)


class LayerSeries:
    """Solves one workload on several numbers of devices. All points of a shape share one lattice, and all share
    findings.

    preparation_s: the time to make the shared tables.
    """

    def __init__(self) -> None:
        self.preparation_s = 0.0
        self._findings = Findings(thorough=True)
        self._prepared: dict[PointShape, Preparation | None] = {}

    def solve(self, request: SolveRequest) -> Solution:
        """Solves like ``solve_layers``, with the same plan for the same request."""
        shape = PointShape.of(request.instance, request.restrictions)
        if shape not in self._prepared:
            self._prepared[shape] = self._prepare(request)
        return solve_layers(request, self._prepared[shape])

    def _prepare(self, request: SolveRequest) -> Preparation | None:
        """Prepares the tables; None if not all downsets are listed or they do not fit in memory."""
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
