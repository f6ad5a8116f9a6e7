"""Planning by blocks of operators with one d and one t for all stages: under a flush, or as it is asked for."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property

from piper_ray.cost.variants import layer_without_choice
from piper_ray.engine.blocks.answer import (
    CHAIN_GAP,
    MOST_ON_CHAIN,
    answer_of_layers,
    order_through,
    unknown_answer,
)
from piper_ray.engine.blocks.block_instance import BlockInstance, build_instance
from piper_ray.engine.blocks.blocks import MOST_DOWNSETS, find_blocks
from piper_ray.engine.flush.answer import flush_schedule, instance_under, solve_under_flush
from piper_ray.engine.flush.crew import ThreadCrew
from piper_ray.engine.flush.plans import ChosenStages, build_flush_plan
from piper_ray.engine.flush.search import FlushSearch
from piper_ray.engine.flush.tables import FlushWorkload, build_workload
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.counting import count_downsets
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.engine.ledger import Ledger
from piper_ray.engine.preparation import Outline
from piper_ray.engine.request import SolveRequest
from piper_ray.model.cores import usable_cores
from piper_ray.model.events import StepFinished
from piper_ray.model.options import Contract
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import BlockStats, Solution, Status
from piper_ray.model.stop import Stop, StoppedBy

_STOPPED_EARLY = (StoppedBy.TIME_LIMIT, StoppedBy.INTERRUPT)


def solve_blocks_by_degrees(request: SolveRequest, schedule: Schedule) -> Solution:
    """The best plan of whole blocks, improved on a chain of single layers that passes its stages' borders if short.

    Value and plan are of the layers, and so is the lower bound: what all their work takes, spread over p d t devices
    without any loss, for the best p, d and t. So a plan of blocks is "optimal" only if it meets that, and that no plan
    of blocks fits proves nothing of the layers. Raises as ``solve_under_flush``, and LimitError if the operators cannot
    be merged into few enough blocks.
    """
    exact = replace(request, options=replace(request.options, contract=Contract.SAFE))
    instance = instance_under(schedule, request.instance, request.note)
    outline, graph = Outline.of(instance, request.restrictions), build_graph(instance, without_contraction())
    downsets = count_downsets(graph)
    few = downsets is not None and downsets <= MOST_DOWNSETS
    if few or layer_without_choice(instance, outline.alike) is not None:
        return solve_under_flush(exact, schedule)
    found = find_blocks(instance, outline.alike, outline.contracted)
    blocks = build_instance(instance, outline.alike, found.members)
    stats = BlockStats(
        layers=len(instance.layers),
        blocks=len(found.members),
        downsets_before=downsets,
        downsets=found.downsets,
        largest_share=found.largest_share,
        choices_dropped=blocks.dropped,
    )
    merging_s = time.perf_counter() - request.started_s
    request.listener(StepFinished("blocks", merging_s, f"{stats.layers:,} layers in {stats.blocks:,} blocks"))
    request.note("the bounds of this log are those of plans of whole blocks")
    layers = _Layers(replace(request, instance=instance), schedule, outline, graph)
    part: Stop[Solution] = request.stop.part()
    run = _Run(layers, blocks, stats, merging_s)
    request.stop.offer(lambda: None if (so_far := part.answer()) is None else run.answer(so_far, StoppedBy.INTERRUPT))
    of_blocks = solve_under_flush(replace(exact, instance=blocks.instance, stop=part), schedule)
    return run.improved(of_blocks)


@dataclass(frozen=True)
class _Layers:
    """The single layers. request: with the passes that the schedule asks for."""

    request: SolveRequest
    schedule: Schedule
    outline: Outline
    graph: LayerGraph

    @cached_property
    def lower_bound_s(self) -> float:
        """No plan of the layers takes less for a microbatch: the least bound of any d and t, which holds whatever the
        stages are."""
        batch_s = min((task.lower_s for task in self.tasks(self.chain(None))), default=float("inf"))
        return self.per_microbatch_s(batch_s)

    def per_microbatch_s(self, batch_s: float) -> float:
        """With the optimizer's step, which every rank takes after the batch."""
        return (batch_s + self.request.step.optimizer_s) / self.request.instance.microbatches

    def chain(self, plan: Plan | None) -> FlushWorkload:
        """In an order that passes the borders of ``plan``, from the back; without one, in the graph's order."""
        lattice = chain_lattice(self.graph, order_through(self.graph, plan))
        return build_workload(self.request.instance, lattice, self.outline.alike)

    def tasks(self, workload: FlushWorkload) -> list[DegreePair]:
        """Of all d and t."""
        request = self.request
        return list_tasks(request.instance, workload, flush_schedule(self.schedule), request.restrictions, request.step)


@dataclass(frozen=True)
class _Run:
    """From a solution of the blocks to one of the layers."""

    layers: _Layers
    blocks: BlockInstance
    stats: BlockStats
    merging_s: float

    def improved(self, of_blocks: Solution) -> Solution:
        """Where the blocks' solve ended early, or the chain is long, what is known is the answer."""
        request = self.layers.request
        request.stop.offer(lambda: self.answer(of_blocks, StoppedBy.INTERRUPT))
        short = self.layers.graph.size <= MOST_ON_CHAIN
        if of_blocks.plan is None or of_blocks.stopped_by in _STOPPED_EARLY or not short:
            return self.answer(of_blocks, of_blocks.stopped_by)
        workload = self.layers.chain(self.blocks.expand(of_blocks.plan, request.instance))
        limits = replace(request.limits, gap=max(request.options.gap, CHAIN_GAP))
        with closing(ThreadCrew(request.options.threads or usable_cores())) as crew:
            tasks, microbatches = self.layers.tasks(workload), request.instance.microbatches
            ledger = Ledger[ChosenStages](microbatches, limits, started_s=request.started_s)
            search = FlushSearch(workload.arrays, tasks, crew, ledger)
            search.run("chain")
        stopped_by = ledger.stopped_by if ledger.stopped_by in _STOPPED_EARLY else of_blocks.stopped_by
        if ledger.best is None:
            return self.answer(of_blocks, stopped_by)
        found = build_flush_plan(request.instance, workload, ledger.best)
        return self.answer(
            of_blocks, stopped_by, found, self.layers.per_microbatch_s(ledger.best.batch_s), search.seconds
        )

    def answer(
        self,
        of_blocks: Solution,
        stopped_by: StoppedBy | None,
        plan: Plan | None = None,
        time_per_sample_s: float = float("inf"),
        search_s: float = 0.0,
    ) -> Solution:
        """The better one of the blocks' plan and ``plan``. search_s: what came after the blocks' own solve."""
        instance, lower_s = self.layers.request.instance, self.layers.lower_bound_s
        value_s = of_blocks.time_per_sample_s
        blocks = replace(self.stats, time_per_sample_s=value_s, proved=of_blocks.status is Status.OPTIMAL)
        before = of_blocks.stats
        stats = replace(
            before,
            layers=len(instance.layers),
            lattice_s=before.lattice_s + self.merging_s,
            search_s=before.search_s + search_s,
        )
        early = stopped_by if stopped_by in _STOPPED_EARLY else StoppedBy.OPERATOR_BLOCKS
        if of_blocks.plan is None or value_s is None:
            found = unknown_answer(lower_s, early, stats, blocks)
            if lower_s == float("inf"):  # whatever the stages are
                reason = of_blocks.infeasibility
                found = replace(found, status=Status.INFEASIBLE, infeasibility=reason, stopped_by=None)
        else:
            if plan is None or value_s <= time_per_sample_s:
                plan, time_per_sample_s = self.blocks.expand(of_blocks.plan, instance), value_s
            gap = self.layers.request.options.gap
            found = answer_of_layers(plan, time_per_sample_s, lower_s, gap, early, stats, blocks)
        return replace(found, schedule=self.layers.schedule, step=self.layers.request.step)
