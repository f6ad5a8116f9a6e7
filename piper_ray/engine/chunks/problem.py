"""What is solved under a schedule with chunks: the same on any number of devices up to the instance's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from piper_ray.cost.variants import Variant, layer_without_choice, stage_variants
from piper_ray.engine.chunks.candidates import Candidate
from piper_ray.engine.chunks.infeasibility import explain
from piper_ray.engine.chunks.search import ChunkSearch
from piper_ray.engine.chunks.tables import ModelOrder
from piper_ray.engine.chunks.tasks import PlanSpace, Task, list_tasks
from piper_ray.engine.ledger import NO_PLAN_FITS
from piper_ray.model.constraints import FilledPipeline, PipelinedChunks
from piper_ray.model.instance import Instance
from piper_ray.model.passes import with_passes
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, StepTerms
from piper_ray.model.solution import DegreeStats, Infeasibility, Solution, SolveStats


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
