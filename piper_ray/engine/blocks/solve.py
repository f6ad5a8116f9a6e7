"""Plans by blocks of operators: exact on the blocks, then improved layer by layer, with a bound for all plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from piper_ray.engine.blocks.block_instance import MergedOperators, merge_operators
from piper_ray.engine.chunks.tasks import ChunkProblem
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.flush.mixes import BorderRates
from piper_ray.engine.flush.search import FlushSearch
from piper_ray.engine.flush.solve import instance_under
from piper_ray.engine.flush.space import SearchSpace
from piper_ray.engine.flush.tables import FlushWorkload, build_workload
from piper_ray.engine.flush.task_search import ChosenStages, build_flush_plan
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph, count_downsets
from piper_ray.engine.ledger import Bounded, Ledger, Limits
from piper_ray.engine.preparation import Outline
from piper_ray.engine.request import SolveRequest, is_by_degrees
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.search import Search
from piper_ray.engine.subproblems import Solver
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.events import StepFinished
from piper_ray.model.options import Contract
from piper_ray.model.passes import with_passes
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import CHUNKED, Schedule
from piper_ray.model.solution import EvaluationStats, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy


@dataclass(frozen=True)
class Improved:
    """The best plan along an order of the layers, its time for a microbatch, and why its search ended."""

    plan: Plan
    time_per_sample_s: float
    stopped_by: StoppedBy | None = None
    evaluations: Sequence[EvaluationStats] = ()


@dataclass(frozen=True)
class Under2bw:
    """Plans of single layers under 2bw, on their lattice."""

    request: SolveRequest
    outline: Outline

    @property
    def downsets(self) -> int | None:
        """The number of downsets of the layers' graph; None: too many to count."""
        return self.outline.downsets

    @cached_property
    def lower_bound_s(self) -> float:
        """A bound for all plans of the layers, for a microbatch; inf: there is none."""
        return self._chain(None).lower_bound_s()

    def valued(self, plan: Plan, of_blocks_s: float) -> Improved:  # noqa: ARG002 - sums of blocks' figures round
        """Values a plan of whole blocks, now in layers. of_blocks_s: its time by the blocks' figures."""
        return Improved(*ValuedPlan.of(self.request.instance, plan))

    def improved(self, known: Improved, limits: Limits) -> Improved:
        """Returns the best plan whose stages are runs of an order that passes the borders of a known plan."""
        request, chain = self.request, self._chain(known.plan)
        ledger = Ledger[ValuedPlan](1, limits, started_s=request.started_s)
        if known.plan.places is None:  # a search for plans without places ends at the best of these
            ledger.begin_with(ValuedPlan(known.plan, known.time_per_sample_s))
        with replace(request, backend=None).open_backend() as backend:
            planning = Planning(request.instance, self.outline.contraction)
            search = Search(planning, chain, Evaluations(backend), ledger)
            ledger.run(search)
        best = ledger.best or ValuedPlan(known.plan, known.time_per_sample_s)
        return Improved(*best, ledger.stopped_by, search.stats)

    def _chain(self, plan: Plan | None) -> Problem:
        request, graph = self.request, self.outline.graph
        options = build_options(request.instance, graph, self.outline.variants)
        degrees = request.restrictions.data_parallel_degrees(request.instance)
        return chain_problem(request.instance, graph, options, _order_through(graph, plan), degrees)


@dataclass(frozen=True)
class _WithOneDegree:
    """Plans of single layers with one d and one t for all stages. For its properties and methods see ``Under2bw``."""

    request: SolveRequest

    @cached_property
    def downsets(self) -> int | None:
        return count_downsets(self._graph)

    def valued(self, plan: Plan, of_blocks_s: float) -> Improved:
        return Improved(plan, of_blocks_s)

    @cached_property
    def _graph(self) -> LayerGraph:
        return build_graph(self.request.instance, without_contraction())

    def _sample_s(self, batch_s: float) -> float:
        """Returns the time of a microbatch, with the optimizer's step, which every rank takes after the batch."""
        return (batch_s + self.request.step.optimizer_s) / self.request.instance.microbatches


@dataclass(frozen=True)
class UnderFlush(_WithOneDegree):
    """Plans of single layers under "1f1b" and "gpipe", and under 2bw with one d and one t."""

    outline: Outline
    schedule: Schedule

    @cached_property
    def lower_bound_s(self) -> float:
        """The least bound of any d and t: their work, spread over p d t devices without loss."""
        batch_s = min((task.lower_s for task in self._tasks(self._chain(None))), default=float("inf"))
        return self._sample_s(batch_s)

    def improved(self, known: Improved, limits: Limits) -> Improved:
        request, workload = self.request, self._chain(known.plan)
        ledger = Ledger[ChosenStages](request.instance.microbatches, limits, started_s=request.started_s)
        with replace(request, backend=None).open_workers() as workers:
            ledger.run(FlushSearch(SearchSpace(workload.arrays), self._tasks(workload), workers, ledger))
        if ledger.best is None:
            return Improved(known.plan, known.time_per_sample_s, ledger.stopped_by)
        plan = build_flush_plan(request.instance, workload, ledger.best)
        return Improved(plan, self._sample_s(ledger.best.value_s), ledger.stopped_by)

    def _chain(self, plan: Plan | None) -> FlushWorkload:
        lattice = chain_lattice(self._graph, _order_through(self._graph, plan))
        instance = self.request.instance
        return build_workload(
            instance, lattice, self.outline.alike, BorderRates.of(instance, self._graph, self.schedule)
        )

    def _tasks(self, workload: FlushWorkload) -> list[DegreePair]:
        """Lists the tasks of all d and t."""
        request = self.request
        return list_tasks(request.instance, workload, self.schedule, request.restrictions, request.step)


@dataclass(frozen=True)
class WithChunks(_WithOneDegree):
    """Plans of single layers with chunks on each rank. Plans of blocks are not improved layer by layer yet."""

    schedules: Sequence[Schedule]

    @cached_property
    def lower_bound_s(self) -> float:
        request = self.request
        problem = ChunkProblem.of(request.instance, request.restrictions, self.schedules, request.step, request.note)
        batch_s = min((task.lower_s for task in problem.tasks(problem.instance)), default=float("inf"))
        return self._sample_s(batch_s)

    def improved(self, known: Improved, limits: Limits) -> Improved:  # noqa: ARG002 - as the others have it
        return known


SingleLayers = Under2bw | UnderFlush | WithChunks
"""Plans of single layers of one request, with the passes that its schedule requires."""


def _order_through(graph: LayerGraph, plan: Plan | None) -> list[int]:
    """Returns the vertices in an order that passes the borders of ``plan``, from the back; without a plan, in order of
    numbers."""
    stage_of = {layer: number for number, stage in enumerate(plan.stages if plan else ()) for layer in stage.layers}
    return sorted(range(graph.size), key=lambda v: (-stage_of.get(graph.layer_ids[v], 0), v))


_CHAIN_GAP = 1e-4
"""The gap to which borders within blocks are placed: far finer than what blocks may cost."""

_MOST_ON_CHAIN = 1_000
"""Up to this number of layers, a chain of single layers is searched. It takes seconds and gains a percent or two."""


def solve_by_blocks(request: SolveRequest, schedules: Sequence[Schedule], solve: Solver) -> Solution:
    """Returns the best plan of whole blocks, improved on a chain of single layers that passes its borders, if that is
    short.

    schedules: all of one name, with the numbers of chunks tried. solve: solves exactly, for the layers or for their
    blocks. Value, plan and bound are of the layers; the bound is all their work over all devices, or the most expensive
    layer. So a plan of blocks is "optimal" only if it meets that bound, and if no plan of blocks fits, this proves
    nothing about the layers. Raises what the solve of single layers raises, and LimitError if the operators cannot be
    merged into few enough blocks.
    """
    layers = _single_layers(request, schedules)
    outline = Outline.of(layers.request.instance, request.restrictions)
    exact = replace(request, options=replace(request.options, contract=Contract.SAFE))
    merged = merge_operators(layers.request.instance, outline, layers.downsets)
    if merged is None:
        return solve(exact)
    merging_s = time.perf_counter() - request.started_s
    stats = merged.stats
    request.listener(StepFinished("blocks", merging_s, f"{stats.layers:,} layers in {stats.blocks:,} blocks"))
    request.note("the bounds of this log are those of plans of whole blocks")
    run, part = _BlockRun(layers, merged, merging_s), request.stop.part()
    request.stop.offer(lambda: None if (so_far := part.answer()) is None else run.answer(so_far, StoppedBy.INTERRUPT))
    return run.improved(solve(replace(exact, instance=merged.blocks.instance, stop=part)))


def _breaks_off(reason: StoppedBy | None) -> bool:
    return reason is not None and reason.breaks_off


def _single_layers(request: SolveRequest, schedules: Sequence[Schedule]) -> SingleLayers:
    schedule = schedules[0]
    if schedule.name in CHUNKED:
        return WithChunks(replace(request, instance=with_passes(request.instance, request.note)), schedules)
    by_degrees = is_by_degrees(schedule, request.restrictions)
    if not by_degrees:
        request.restrictions.require_stages_alone("solve")
    else:
        request = replace(request, instance=instance_under(schedule, request.instance, request.note))
    outline = Outline.of(request.instance, request.restrictions)
    return UnderFlush(request, outline, schedule) if by_degrees else Under2bw(request, outline)


@dataclass(frozen=True)
class _BlockRun:
    """Turns a solution of the blocks into one of the layers."""

    layers: SingleLayers
    merged: MergedOperators
    merging_s: float

    def improved(self, of_blocks: Solution) -> Solution:
        """Improves a plan of blocks. If the blocks' solve ended early or the chain is long, it is the answer as it
        is."""
        request = self.layers.request
        request.stop.offer(lambda: self.answer(of_blocks, StoppedBy.INTERRUPT))
        known = self._expanded(of_blocks)
        short = len(request.instance.layers) <= _MOST_ON_CHAIN
        if known is None or _breaks_off(of_blocks.stopped_by) or not short:
            return self.answer(of_blocks, of_blocks.stopped_by)
        limits = replace(request.limits, gap=max(request.options.gap, _CHAIN_GAP))
        began_s = time.perf_counter()
        return self.answer(of_blocks, None, self.layers.improved(known, limits), time.perf_counter() - began_s)

    def _expanded(self, of_blocks: Solution) -> Improved | None:
        """Returns the plan of the blocks, in layers."""
        if of_blocks.plan is None or of_blocks.time_per_sample_s is None:
            return None
        plan = self.merged.blocks.expand(of_blocks.plan, self.layers.request.instance)
        return self.layers.valued(plan, of_blocks.time_per_sample_s)

    def answer(
        self,
        of_blocks: Solution,
        stopped_by: StoppedBy | None,
        improved: Improved | None = None,
        search_s: float = 0.0,
    ) -> Solution:
        """Returns the better one of the blocks' plan and ``improved``. search_s: the time after the blocks' own
        solve."""
        request, known = self.layers.request, self._expanded(of_blocks)
        best = known
        if improved is not None and known is not None and improved.time_per_sample_s < known.time_per_sample_s:
            best = improved
        reasons = (stopped_by, of_blocks.stopped_by, None if improved is None else improved.stopped_by)
        lower_s, gap = self.layers.lower_bound_s, request.options.gap
        near = best is not None and lower_s >= best.time_per_sample_s * (1.0 - gap)
        early = StoppedBy.GAP if near else next(filter(_breaks_off, reasons), StoppedBy.OPERATOR_BLOCKS)
        ledger = Ledger[ValuedPlan](
            cases={0: Bounded(lower_s)},
            best=None if best is None else ValuedPlan(best.plan, best.time_per_sample_s),
            stopped_by=early,
        )
        found = ledger.answer(
            lambda valued: valued.plan,
            lambda _: of_blocks.schedule,
            self._stats(of_blocks.stats, search_s, improved),
            of_blocks.step,
            of_blocks.infeasibility,
        )
        proved = of_blocks.status is Status.OPTIMAL
        blocks = replace(self.merged.stats, time_per_sample_s=of_blocks.time_per_sample_s, proved=proved)
        return replace(found, blocks=blocks)

    def _stats(self, before: SolveStats, search_s: float, improved: Improved | None) -> SolveStats:
        return replace(
            before,
            layers=len(self.layers.request.instance.layers),
            lattice_s=before.lattice_s + self.merging_s,
            search_s=before.search_s + search_s,
            evaluations=(*before.evaluations, *(() if improved is None else improved.evaluations)),
        )
