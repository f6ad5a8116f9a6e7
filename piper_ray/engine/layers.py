"""A solve under 2bw on single layers: on all downsets, or where these are many on those that plans as good can use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from piper_ray.cost.plan import cost_of
from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.evaluation.evaluations import Evaluations, Memo
from piper_ray.engine.forecast import downset_limit, note_of_many
from piper_ray.engine.lattice.downsets import build_lattice
from piper_ray.engine.ledger import Ledger, no_plan, stats_of_nothing
from piper_ray.engine.preparation import Findings, FindingsPoint, Outline, PointShape, Preparation, prepare
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.infeasibility import explain
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.search import Search
from piper_ray.engine.search.wide import WideSearch
from piper_ray.engine.tables.problem import LatticeTables, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.errors import ChoiceTooHard, LimitError, UsageError
from piper_ray.model.events import StepFinished, silent
from piper_ray.model.fields import when_asked
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.model.solution import Infeasibility, Solution, SolveStats
from piper_ray.model.stop import StopSearch

_MANY, _MANY_A_LAYER = 1_000_000, 10_000
"""Downsets from which those alone that count have been measured to be sooner told than all are evaluated: in all, and
for each layer, as dual prices take longer the more layers there are."""

LISTED = 50_000
"""Downsets that are listed of a graph whose own could not be counted: well under a second's."""

_UNEXPLAINED = Infeasibility("no plan fits (the search for the memory that would do was stopped)", None)
_NONE_FITS = Infeasibility("no plan fits (the graph is too wide to find how much memory would be enough)", None)


def solve_layers(request: SolveRequest, prepared: Preparation | None = None) -> Solution:
    """The plan of least time, or the best one found. prepared: shared with other solves, and no part of this one's
    time.

    Raises as ``engine.solve.solve``.
    """
    if prepared is not None and not prepared.serves(request.instance, request.restrictions):
        raise UsageError("prepared for another graph, or under other restrictions: prepare anew, or leave it out")
    outline = Outline.of(request.instance, request.restrictions) if prepared is None else prepared.outline
    with request.open_backend() as backend:
        backend.listen(request.listener)
        found = _LayerSolve(request, outline, backend, request.ledger())
        return found.on_all_or_those_that_count() if prepared is None else found.on_shared(prepared)


def is_wide(outline: Outline) -> bool:
    """Whether there are so many downsets that it is better not to list them all, fit they or not."""
    downsets = outline.downsets
    if downsets is None:
        # Too many to count, or too entangled: traced operators have few.
        try:
            build_lattice(outline.graph, LISTED)
        except LimitError:
            return True
        return False
    return downsets > max(_MANY, _MANY_A_LAYER * outline.graph.size)


@dataclass
class _LayerSolve:
    """One solve under way: what is found, and what it took so far. tables: of the lattice, once there is one.

    lower_s: no plan is faster, by what came before the search on the lattice. began_s: the step under way, by
    ``time.perf_counter``. looked_wide: whether downsets that count were looked for.
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
        """On all downsets, or where there are many on those that count. Raises LimitError if neither fit."""
        request, options = self.request, self.request.options
        is_many = options.resume is None and is_wide(self.outline)  # a checkpoint keeps what is known of all downsets
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
        """On all downsets, with what other solves have found. Their answers are the same without."""
        request, instance, restrictions = self.request, self.request.instance, self.request.restrictions
        request.stop.check()
        # With several links more devices may be a slower way between them.
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
        """Whether the downsets of one chain fit, at least."""
        return self._room > self.outline.graph.size

    @property
    def _room(self) -> int:
        """How many downsets fit."""
        limit_bytes = self.request.options.memory_limit_bytes
        return downset_limit(self.outline.graph, len(self.outline.variants), None, limit_bytes)

    def _on_those_that_count(self) -> Solution | None:
        """The answer; or None where all downsets are wanted: where those that count are more than fit, or take too long
        to tell, and where there is no plan, to tell why.
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
        # As if there were no other downsets.
        return self._search(made, wide.workload, None, is_likely=True)

    def _on_all(self, made: Preparation, *, is_likely: bool = False) -> Solution:
        """On all downsets of a lattice. is_likely: whether the plan known is likely to be the best."""
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
        """Why there is no plan. An interrupt, the time limit or a TMPC choice too hard costs the figure, not the
        answer."""
        assert self.search is not None
        problem, evaluations = self.search.problem, self.search.evaluations
        try:
            return explain(self.request.instance, problem, evaluations, lambda _: self.request.limits.check())
        except (KeyboardInterrupt, StopSearch, ChoiceTooHard):
            return None

    def answer(self, infeasibility: Infeasibility = _UNEXPLAINED, pairs: int | None = None) -> Solution:
        """At any moment, for other threads too. infeasibility: for the case that there is no plan."""
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
    """Solves of one workload on several numbers of devices: one lattice for all points of a shape, and findings.

    preparation_s: what is shared took so long to make, since somebody asked.
    """

    def __init__(self) -> None:
        self.preparation_s = 0.0
        self._findings = Findings(thorough=True)
        self._prepared: dict[PointShape, Preparation | None] = {}

    def solve(self, request: SolveRequest) -> Solution:
        """As ``solve_layers``, with the same plan for the same request."""
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
