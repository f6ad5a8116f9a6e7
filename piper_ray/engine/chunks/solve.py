"""A solve under a schedule whose ranks hold chunks of the model, as it is asked for and answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from piper_ray.cost.variants import Variant, layer_without_choice, stage_variants
from piper_ray.engine.chunks.candidates import Candidate
from piper_ray.engine.chunks.infeasibility import explain
from piper_ray.engine.chunks.memo import TurnMemo
from piper_ray.engine.chunks.search import ChunkSearch, WarmStart
from piper_ray.engine.chunks.tables import ModelOrder
from piper_ray.engine.chunks.tasks import PlanSpace, Task, list_tasks
from piper_ray.engine.ledger import NO_PLAN_FITS, Ledger
from piper_ray.engine.request import SolveRequest
from piper_ray.model.constraints import FilledPipeline, PipelinedChunks
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, StepTerms
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats, Status


def solve_with_chunks(request: SolveRequest, schedules: Sequence[Schedule]) -> Solution:
    """A plan whose simulated batch takes little, one d and one t for all, and what is proved of every plan's batch.

    schedules: of one name, with the numbers of chunks that may be. A plan's stages are its chunks, front to back, p v
    of them; ``StageCount`` is of p, the ranks. Value and bound are of a microbatch: seconds of a batch over N.

    Raises UsageError for constraints that such a search does not know, and for a backend that takes no calls.
    """
    series = ChunkSeries(request, schedules)
    return series.explained(request, series.solve(request))


class ChunkSeries:
    """Solves of one workload on several numbers of devices: they share the order of layers, and the bound and the best
    plan of each (d, t, p, v).

    first: on the most devices of all. preparation_s: what is shared took so long to make, since somebody asked. Raises
    UsageError for constraints that such a search does not know.
    """

    def __init__(self, first: SolveRequest, schedules: Sequence[Schedule]) -> None:
        how = f"under schedule {schedules[0].name.value}"
        first.restrictions.require_same_degrees(how, FilledPipeline, PipelinedChunks)
        self._schedules, self._known = schedules, WarmStart()
        self._problem = ChunkProblem.of(first.instance, first.restrictions, first.step, schedules, first.note)
        self.preparation_s = self._problem.tables_s

    def solve(self, request: SolveRequest) -> Solution:
        """On so many devices as the request has. Where there is no plan, not yet why."""
        problem = self._problem
        ledger = Ledger[Candidate](
            problem.instance.microbatches,
            request.limits,
            request.listener,
            request.started_s,
            request.step.optimizer_s,
        )

        def answer() -> Solution:
            return request.with_cluster(problem.solution(search))

        with (
            request.open_checkpoint(*self._schedules, kept="turns of a search") as checkpoint,
            request.open_workers() as workers,
        ):
            memo = None if checkpoint is None else TurnMemo(checkpoint)
            tasks = problem.tasks(request.instance.devices)
            search = ChunkSearch(tasks, workers, ledger, self._known, memo)
            request.stop.offer(answer)
            ledger.run(search)
        self._known = search.learnt
        return answer()

    def explained(self, request: SolveRequest, found: Solution) -> Solution:
        """Where there is no plan, with the reason, and the memory that would do."""
        if found.status is not Status.INFEASIBLE:
            return found
        limits = request.limits
        try:
            why = self._problem.explained(request.instance.devices, lambda: limits.reached is not None)
        except KeyboardInterrupt:  # that there is no plan is proved all the same
            return found
        return replace(found, infeasibility=why)


@dataclass(frozen=True)
class ChunkProblem:
    """impossible: why some layer can be in no plan. tables_s: what its making took."""

    instance: Instance
    restrictions: Restrictions
    step: StepTerms
    schedules: Sequence[Schedule]
    variants: Sequence[Variant]
    impossible: Infeasibility | None
    order: ModelOrder
    tables_s: float

    @classmethod
    def of(
        cls,
        instance: Instance,
        restrictions: Restrictions,
        step: StepTerms,
        schedules: Sequence[Schedule],
        tell: Callable[[str], None],
    ) -> ChunkProblem:
        """schedules: of one name, with the numbers of chunks that may be. tell: hears what is assumed of passes."""
        began_s = time.perf_counter()
        instance = with_passes(instance, tell)
        variants = tuple(x for x in stage_variants(instance, restrictions) if x.degree <= instance.devices)
        impossible, order = layer_without_choice(instance, variants), ModelOrder.of(instance)
        return cls(instance, restrictions, step, schedules, variants, impossible, order, time.perf_counter() - began_s)

    def tasks(self, devices: int) -> list[Task]:
        """All that fit so many devices, by rising bound."""
        return [] if self.impossible else list_tasks(self._on(devices), self.order, self._space(devices))

    def solution(self, search: ChunkSearch) -> Solution:
        """What the search has found, at whatever moment."""
        return search.ledger.answer(
            Candidate.plan,
            lambda found: self.schedules[0] if found is None else found.task.shape.schedule,
            self._stats(search),
            self.step,
            infeasibility=self.impossible or NO_PLAN_FITS,
        )

    def explained(self, devices: int, ends: Callable[[], bool]) -> Infeasibility:
        """Why there is no plan on so many devices. ends: whether to leave it."""
        return self.impossible or explain(self._on(devices), self.order, self._space(devices), ends)

    def _on(self, devices: int) -> Instance:
        return self.instance if devices == self.instance.devices else self.instance.replace(devices=devices)

    def _space(self, devices: int) -> PlanSpace:
        restrictions = self.restrictions
        return PlanSpace(
            self.schedules,
            self.variants,
            restrictions.data_parallel_degrees(self._on(devices)),
            ranks=restrictions.stage_count,
            all_devices=restrictions.all_devices,
            filled=restrictions.has(FilledPipeline),
            pipelined=restrictions.has(PipelinedChunks),
            step=self.step,
        )

    def _stats(self, search: ChunkSearch) -> SolveStats:
        layers = len(self.instance.layers)
        return SolveStats(
            layers=layers,
            contracted_layers=layers,
            downsets=self.order.downsets or 0,
            levels=self.order.size + 1,
            pairs=None,
            threads=search.workers.width,
            lattice_s=self.tables_s,
            stage_costs_s=0.0,
            search_s=search.seconds,
            evaluations=(),
            degrees=DegreeStats(len(search.tasks), search.bounded, search.bounded, 0),
        )
