"""The rest of a wide search whose downsets outgrow one machine: each threshold is evaluated on partitions of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.evaluation.backend import Display
from piper_ray.engine.evaluation.outcome import TracedStage
from piper_ray.engine.evaluation.potentials import Potentials, StageCover, kept_s
from piper_ray.engine.kernels.scan import BUCKETS_TESTED, CANDIDATES_TESTED, STAGES_COSTED
from piper_ray.engine.partition.evaluation import (
    Border,
    OpenCrew,
    PartitionedEvaluation,
    PartitionedListing,
    PartitionedOutcome,
    PartitionLost,
)
from piper_ray.engine.partition.partition import Evaluation
from piper_ray.engine.search.watch import EvaluationWatch
from piper_ray.engine.search.wide import WideSearch
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.errors import ClusterError
from piper_ray.model.events import Bounds, EvaluationFinished, Note
from piper_ray.model.figures import plural
from piper_ray.model.solution import EvaluationStats

_MOST_LOSSES = 3
"""Of processes on machines that live: what they are asked for ends them."""

_TOO_MANY = "more downsets count than fit on all machines together"


class Outgrown(Exception):
    """Downsets that count are more than all partitions have room for. The message says so."""


@dataclass
class PartitionedSearch:
    """Goes on where ``wide`` ended; its bracket and incumbent stay valid at every moment.

    open_crew: as often as one is lost. room_here: downsets that fit on one machine; a crew needs more. downsets: the
    most that were listed at a time.
    """

    wide: WideSearch
    open_crew: OpenCrew
    room_here: int
    display: Display
    stats: list[EvaluationStats] = field(default_factory=list)
    downsets: int = 0

    def run(self) -> None:
        """Until the bracket is as narrow as the gap asked for; then the plan preferred among those as good.

        Raises Outgrown, NoMachine, ClusterError, ChoiceTooHard, and what ``WideSearch.check`` raises.
        """
        wide, bracket = self.wide, self.wide.bracket
        cover = wide.cover
        assert cover is not None
        with ExitStack() as opened:
            self._opened = opened
            self._evaluation: PartitionedEvaluation | None = None
            while not bracket.is_done(wide.limits.gap):
                wide.check()
                threshold_s = bracket.propose()
                potentials = wide.potentials(cover, threshold_s)
                if potentials.devices > wide.planning.instance.devices * (1.0 + PROOF):
                    bracket.record_infeasible(threshold_s)
                    continue
                outcome = self._evaluate(threshold_s, potentials)
                if not outcome.feasible:
                    bracket.record_infeasible(threshold_s)
                    self._report()
                    continue
                problem, stages = self._traced(outcome.stages, threshold_s)
                value_s = wide.take(problem, stages, "evaluation")
                bracket.record_feasible(threshold_s, value_s, outcome.devices / wide.planning.instance.devices)
                self._report()
                wide.improve_along(problem, stages)
            if bracket.closed:
                self._prefer_small(cover)

    def _prefer_small(self, cover: StageCover) -> None:
        """As ``Search._prefer_small``."""
        upper_s = self.wide.bracket.upper
        assert upper_s is not None
        potentials = self.wide.potentials(cover, upper_s)
        outcome = self._evaluate(upper_s, potentials, fewest_stages=True)
        problem, stages = self._traced(outcome.stages, upper_s)
        self.wide.incumbent = self.wide.planning.valued(problem, stages, self.wide.incumbent)
        self._report()

    def _evaluate(
        self, threshold_s: float, potentials: Potentials, *, fewest_stages: bool = False
    ) -> PartitionedOutcome:
        """Its figures become the last of ``stats``. With a crew anew as long as machines are lost on the way."""
        began_s = time.perf_counter()
        size = self.wide.graph.size
        weights = (size + 1, 1) if fewest_stages else (1, 0)
        losses = 0
        while True:
            try:
                outcome = self._on_crew(self._on_machines(size), Evaluation(threshold_s, *weights, potentials), began_s)
                break
            except PartitionLost as lost:
                losses += not lost.with_machine
                if losses == _MOST_LOSSES:
                    raise ClusterError(f"{losses} times in turn {lost}") from lost
                self.wide.listener(Note(f"{lost}; all downsets are listed anew on the machines that are left"))
                self._evaluation = None
                self._opened.close()
        self.stats.append(
            EvaluationStats(
                threshold_s=threshold_s,
                feasible=outcome.feasible,
                seconds=time.perf_counter() - began_s,
                live_downsets=outcome.live_downsets,
                cells=outcome.cells,
                buckets_tested=int(outcome.tested[BUCKETS_TESTED]),
                candidates_tested=int(outcome.tested[CANDIDATES_TESTED]),
                stages_costed=int(outcome.tested[STAGES_COSTED]),
            )
        )
        return outcome

    def _on_machines(self, size: int) -> PartitionedEvaluation:
        """By a crew that there is, or a new one."""
        if self._evaluation is None:
            crew = self._opened.enter_context(self.open_crew())
            if crew.room <= self.room_here:
                raise Outgrown(_TOO_MANY)
            have = "have a part each" if crew.partitions > 1 else "of the cluster has them"
            machines = plural(crew.partitions, "machine")
            self.wide.listener(Note(f"more downsets count than fit here: {machines} {have}"))
            self._evaluation = PartitionedEvaluation(crew, size)
        return self._evaluation

    def _on_crew(self, partitions: PartitionedEvaluation, evaluation: Evaluation, began_s: float) -> PartitionedOutcome:
        listing = partitions.list_downsets(evaluation.potentials, self.wide.check)
        if listing is None:
            raise Outgrown(_TOO_MANY)
        self.downsets = max(self.downsets, listing.total)
        partitions.prepare(listing, self.wide.check)
        return partitions.evaluate(listing, evaluation, self._watch(listing, evaluation.threshold_s, began_s))

    def _watch(self, listing: PartitionedListing, threshold_s: float, began_s: float) -> Callable[[int], None]:
        of_level = listing.downsets[:, 1:].sum(axis=0)
        return EvaluationWatch(
            index=len(self.stats) + 1,
            threshold_s=threshold_s,
            level_start=np.concatenate(([0, 1], 1 + np.cumsum(of_level))),
            limits=self.wide.limits,
            listener=self.wide.listener,
            bounds=self._bounds,
            display=self.display,
            began_s=began_s,
        )

    def _traced(self, borders: tuple[Border, ...], threshold_s: float) -> tuple[Problem, tuple[TracedStage, ...]]:
        """The stages, and the few downsets that they lie between."""
        outer = [border.outer for border in reversed(borders)]
        problem = self.wide.problem_of(np.stack([np.zeros_like(outer[0]), *outer]))
        last, budget_s = len(borders), kept_s(threshold_s)
        return problem, tuple(
            TracedStage(
                outer=last - place,
                inner=last - place - 1,
                variant=border.variant,
                data_parallel_degree=border.data_parallel_degree,
                later_sum=border.later_sum,
                budget_s=budget_s * border.data_parallel_degree,
            )
            for place, border in enumerate(borders)
        )

    def _report(self) -> None:
        last = self.stats[-1]
        self.wide.listener(
            EvaluationFinished(
                len(self.stats), last.threshold_s, last.feasible, last.seconds, last.live_downsets, self._bounds()
            )
        )

    def _bounds(self) -> Bounds:
        bracket = self.wide.bracket
        return Bounds(bracket.lower, bracket.upper, time.perf_counter() - self.wide.started_s)
