"""What planning by blocks needs to know of plans of single layers, under each kind of schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from piper_ray.engine.backends.calls import ThreadWorkers
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.chunks.solve import ChunkProblem, solve_with_chunks
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.flush.plans import ChosenStages, build_flush_plan
from piper_ray.engine.flush.search import FlushSearch
from piper_ray.engine.flush.solve import flush_schedule, solve_under_flush
from piper_ray.engine.flush.tables import FlushWorkload, build_workload
from piper_ray.engine.flush.tasks import DegreePair, list_tasks
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.counting import count_downsets
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.engine.layers import solve_layers
from piper_ray.engine.ledger import Ledger, Limits
from piper_ray.engine.preparation import Outline
from piper_ray.engine.request import SolveRequest
from piper_ray.engine.search.planning import Planning, ValuedPlan
from piper_ray.engine.search.search import Search
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.cores import usable_cores
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import EvaluationStats, Solution
from piper_ray.model.stop import StoppedBy


@dataclass(frozen=True)
class Improved:
    """The best plan along an order of the layers, its time for a microbatch, and why the search for it ended."""

    plan: Plan
    time_per_sample_s: float
    stopped_by: StoppedBy | None = None
    evaluations: Sequence[EvaluationStats] = ()


class SingleLayers(Protocol):
    """Plans of single layers, of one request, with the passes that its schedule asks for. downsets: of their graph;
    None: too many to count."""

    @property
    def request(self) -> SolveRequest: ...

    @property
    def downsets(self) -> int | None: ...

    def solve(self, request: SolveRequest) -> Solution:
        """Of this one, or of its blocks; exactly."""
        ...

    @property
    def lower_bound_s(self) -> float:
        """No plan of the layers takes less for a microbatch, whatever its stages are; inf: there is none."""
        ...

    def valued(self, plan: Plan, of_blocks_s: float) -> Improved:
        """A plan of whole blocks, which takes so long by their figures, in layers."""
        ...

    def improved(self, known: Improved, limits: Limits) -> Improved:
        """The best plan whose stages are runs of an order that passes the borders of a plan known."""
        ...


@dataclass(frozen=True)
class Under2bw:
    """By the lattice of single layers."""

    request: SolveRequest
    outline: Outline

    @property
    def downsets(self) -> int | None:
        return self.outline.contracted.downsets

    def solve(self, request: SolveRequest) -> Solution:
        return solve_layers(request)

    @cached_property
    def lower_bound_s(self) -> float:
        return self._chain(None).lower_bound_s()

    def valued(self, plan: Plan, of_blocks_s: float) -> Improved:  # noqa: ARG002 - sums of blocks' figures round
        return Improved(*ValuedPlan.of(self.request.instance, plan))

    def improved(self, known: Improved, limits: Limits) -> Improved:
        request, chain = self.request, self._chain(known.plan)
        ledger = Ledger[ValuedPlan](
            1, limits, started_s=request.started_s, best=ValuedPlan(known.plan, known.time_per_sample_s)
        )
        with closing(LocalBackend(request.options.threads)) as backend, closing(Evaluations(backend)) as evaluations:
            search = Search(Planning(request.instance, self.outline.contraction), chain, evaluations, ledger)
            ledger.run(search)
        assert ledger.best is not None
        return Improved(*ledger.best, ledger.stopped_by, search.stats)

    def _chain(self, plan: Plan | None) -> Problem:
        request, graph = self.request, self.outline.graph
        options = build_options(request.instance, graph, self.outline.variants)
        degrees = request.restrictions.data_parallel_degrees(request.instance)
        return chain_problem(request.instance, graph, options, _order_through(graph, plan), degrees)


@dataclass(frozen=True)
class UnderFlush:
    """With one d and one t for all stages."""

    request: SolveRequest
    outline: Outline
    schedule: Schedule

    @cached_property
    def downsets(self) -> int | None:
        return count_downsets(self._graph)

    def solve(self, request: SolveRequest) -> Solution:
        return solve_under_flush(request, self.schedule)

    @cached_property
    def lower_bound_s(self) -> float:
        """The least bound of any d and t: their work, spread over p d t devices without any loss."""
        batch_s = min((task.lower_s for task in self._tasks(self._chain(None))), default=float("inf"))
        return self._sample_s(batch_s)

    def valued(self, plan: Plan, of_blocks_s: float) -> Improved:
        return Improved(plan, of_blocks_s)

    def improved(self, known: Improved, limits: Limits) -> Improved:
        request, workload = self.request, self._chain(known.plan)
        ledger = Ledger[ChosenStages](request.instance.microbatches, limits, started_s=request.started_s)
        with closing(ThreadWorkers(request.options.threads or usable_cores())) as workers:
            ledger.run(FlushSearch(workload.arrays, self._tasks(workload), workers, ledger))
        if ledger.best is None:
            return Improved(known.plan, known.time_per_sample_s, ledger.stopped_by)
        plan = build_flush_plan(request.instance, workload, ledger.best)
        return Improved(plan, self._sample_s(ledger.best.value_s), ledger.stopped_by)

    @cached_property
    def _graph(self) -> LayerGraph:
        return build_graph(self.request.instance, without_contraction())

    def _sample_s(self, batch_s: float) -> float:
        """With the optimizer's step, which every rank takes after the batch."""
        return (batch_s + self.request.step.optimizer_s) / self.request.instance.microbatches

    def _chain(self, plan: Plan | None) -> FlushWorkload:
        lattice = chain_lattice(self._graph, _order_through(self._graph, plan))
        return build_workload(self.request.instance, lattice, self.outline.alike)

    def _tasks(self, workload: FlushWorkload) -> list[DegreePair]:
        """Of all d and t."""
        request = self.request
        return list_tasks(request.instance, workload, flush_schedule(self.schedule), request.restrictions, request.step)


@dataclass(frozen=True)
class WithChunks:
    """With chunks on each rank. Plans of blocks are not improved layer by layer yet."""

    request: SolveRequest
    schedules: Sequence[Schedule]

    @cached_property
    def downsets(self) -> int | None:
        return count_downsets(build_graph(self.request.instance, without_contraction()))

    def solve(self, request: SolveRequest) -> Solution:
        return solve_with_chunks(request, self.schedules)

    @cached_property
    def lower_bound_s(self) -> float:
        request = self.request
        problem = ChunkProblem.of(request.instance, request.restrictions, request.step, self.schedules, request.note)
        tasks = problem.tasks(request.instance.devices)
        batch_s = min((task.lower_s for task in tasks), default=float("inf"))
        return (batch_s + request.step.optimizer_s) / request.instance.microbatches

    def valued(self, plan: Plan, of_blocks_s: float) -> Improved:
        return Improved(plan, of_blocks_s)

    def improved(self, known: Improved, limits: Limits) -> Improved:  # noqa: ARG002 - as the protocol has it
        return known


def _order_through(graph: LayerGraph, plan: Plan | None) -> list[int]:
    """The vertices in an order that passes the borders of ``plan``, from the back; without one, in the graph's."""
    stage_of = {layer: number for number, stage in enumerate(plan.stages if plan else ()) for layer in stage.layers}
    return sorted(range(graph.size), key=lambda v: (-stage_of.get(graph.layer_ids[v], 0), v))
