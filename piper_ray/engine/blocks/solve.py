"""Planning by blocks of operators: exact on the blocks, then improved layer by layer, with a bound for all plans."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property

from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.blocks.answer import (
    CHAIN_GAP,
    MOST_ON_CHAIN,
    answer_of_layers,
    order_through,
    unknown_answer,
)
from piper_ray.engine.blocks.block_instance import BlockInstance, build_instance
from piper_ray.engine.blocks.blocks import find_blocks
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.layers import solve_layers
from piper_ray.engine.preparation import Outline
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.search import Search
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.events import StepFinished
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.model.plan import Plan
from piper_ray.model.solution import BlockStats, Solution, SolveStats, Status
from piper_ray.model.stop import Stop, StoppedBy

_STOPPED_EARLY = (StoppedBy.TIME_LIMIT, StoppedBy.INTERRUPT, StoppedBy.CHOICE_TOO_HARD, StoppedBy.INEXACT)


@dataclass(frozen=True)
class MergedOperators:
    """The blocks as an instance of their own, and what was given up."""

    blocks: BlockInstance
    stats: BlockStats


def merge_operators(instance: Instance, outline: Outline) -> MergedOperators | None:
    """None if the layers are few enough as they are, or one of them has no TMPC that is allowed.

    Raises LimitError if they cannot be merged into few enough blocks.
    """
    variants, contracted = outline.alike, outline.contracted
    if layer_without_choice(instance, variants) is not None:
        return None  # there is no plan, whatever is merged
    found = find_blocks(instance, variants, contracted)
    if len(found.members) == contracted.graph.size:
        return None
    blocks = build_instance(instance, variants, found.members)
    stats = BlockStats(
        layers=len(instance.layers),
        blocks=len(found.members),
        downsets_before=contracted.downsets,
        downsets=found.downsets,
        largest_share=found.largest_share,
        choices_dropped=blocks.dropped,
    )
    return MergedOperators(blocks, stats)


def solve_by_blocks(request: SolveRequest) -> Solution:
    """The best plan of whole blocks, improved on a chain of single layers that passes its stages' borders if short.

    The lower bound is that of the layers: all their work over all devices, or the dearest of them. So a plan of blocks
    is "optimal" only if it meets that, and that no plan of blocks fits proves nothing of the layers.
    Raises LimitError as ``merge_operators``.
    """
    outline = Outline.of(request.instance, request.restrictions)
    merged = merge_operators(request.instance, outline)
    exact = replace(request, options=replace(request.options, contract=Contract.SAFE))
    if merged is None:
        return solve_layers(exact)
    merging_s = time.perf_counter() - request.started_s
    request.listener(
        StepFinished("blocks", merging_s, f"{merged.stats.layers:,} layers in {merged.stats.blocks:,} blocks")
    )
    request.note("the bounds of this log are those of plans of whole blocks")
    part: Stop[Solution] = request.stop.part()
    request.stop.offer(lambda: _while_blocks_are_planned(request, outline, merged, part.answer()))
    of_blocks = solve_layers(replace(exact, instance=merged.blocks.instance, stop=part))
    return _ChainSearch(request, outline, merged, of_blocks, merging_s).run()


def _while_blocks_are_planned(
    request: SolveRequest, outline: Outline, merged: MergedOperators, of_blocks: Solution | None
) -> Solution | None:
    """The solution so far. of_blocks: that of the blocks' own solve."""
    if of_blocks is None:
        return None
    known = _expanded(request.instance, merged, of_blocks)
    bound_s = _chain_through(request, outline, None).lower_bound_s()
    return _answer(known, bound_s, request.options.gap, StoppedBy.INTERRUPT, of_blocks.stats, merged.stats)


@dataclass(frozen=True)
class _ChainSearch:
    """The second part of a solve by blocks: single layers, along an order that passes the borders of its plan."""

    request: SolveRequest
    outline: Outline
    merged: MergedOperators
    of_blocks: Solution
    merging_s: float
    began_s: float = field(default_factory=time.perf_counter)

    def run(self) -> Solution:
        """Where the blocks' solve ended early, or the chain is long, what is known is the answer."""
        request, chain = self.request, self._problem
        limits = replace(request.limits, gap=max(request.options.gap, CHAIN_GAP))
        planning = Planning(request.instance, self.outline.contraction)
        with closing(LocalBackend(request.options.threads)) as backend, closing(Evaluations(backend)) as evaluations:
            search = Search(planning, chain, evaluations, limits, started_s=request.started_s, known=self._known)
            request.stop.offer(lambda: self._answer(search, StoppedBy.INTERRUPT))
            ended_early = self.of_blocks.stopped_by in _STOPPED_EARLY
            if not ended_early and chain.workload.lattice.graph.size <= MOST_ON_CHAIN:
                search.run()
            return self._answer(search, self.of_blocks.stopped_by, search.stopped_by)

    @cached_property
    def _known(self) -> ValuedPlan | None:
        return _expanded(self.request.instance, self.merged, self.of_blocks)

    @cached_property
    def _problem(self) -> Problem:
        return _chain_through(self.request, self.outline, None if self._known is None else self._known.plan)

    def _answer(self, search: Search, *reasons: StoppedBy | None) -> Solution:
        before = self.of_blocks.stats
        stats = replace(
            before,
            layers=len(self.request.instance.layers),
            lattice_s=before.lattice_s + self.merging_s,
            search_s=before.search_s + time.perf_counter() - self.began_s,
            evaluations=(*before.evaluations, *search.stats),
        )
        proved = self.of_blocks.status is Status.OPTIMAL
        blocks = replace(self.merged.stats, time_per_sample_s=self.of_blocks.time_per_sample_s, proved=proved)
        early = next((reason for reason in reasons if reason in _STOPPED_EARLY), StoppedBy.OPERATOR_BLOCKS)
        return _answer(search.incumbent, self._problem.lower_bound_s(), self.request.options.gap, early, stats, blocks)


def _expanded(instance: Instance, merged: MergedOperators, of_blocks: Solution) -> ValuedPlan | None:
    """The plan of the blocks, in layers."""
    return None if of_blocks.plan is None else ValuedPlan.of(instance, merged.blocks.expand(of_blocks.plan, instance))


def _chain_through(request: SolveRequest, outline: Outline, plan: Plan | None) -> Problem:
    """The layers in an order that passes the borders of ``plan``, from the back; without one, in the graph's order."""
    graph = outline.graph
    options = build_options(request.instance, graph, outline.variants)
    degrees = request.restrictions.data_parallel_degrees(request.instance)
    return chain_problem(request.instance, graph, options, order_through(graph, plan), degrees)


def _answer(
    incumbent: ValuedPlan | None,
    bound_s: float,
    gap: float,
    stopped_by: StoppedBy,
    stats: SolveStats,
    blocks: BlockStats,
) -> Solution:
    if incumbent is None:
        return unknown_answer(bound_s, stopped_by, stats, blocks)
    return answer_of_layers(*incumbent, bound_s, gap, stopped_by, stats, blocks)
