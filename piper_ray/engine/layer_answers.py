"""What a search on single layers has found, as a solution: at the end, or at whatever moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from piper_ray.engine.evaluation.backend import Display
from piper_ray.engine.preparation import Preparation
from piper_ray.engine.search.infeasibility import explain
from piper_ray.engine.search.search import Search
from piper_ray.model.errors import ChoiceTooHard
from piper_ray.model.on_demand import when_asked
from piper_ray.model.solution import Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy, StopSearch

_UNEXPLAINED = Infeasibility("no plan fits (the search for the memory that would do was stopped)", None)


@dataclass(frozen=True)
class Answers:
    """What a search has found, at whatever moment. lattice_s, stage_costs_s: what came before it, in this solve."""

    search: Search
    prepared: Preparation
    display: Display
    lattice_s: float
    stage_costs_s: float
    began_s: float = field(default_factory=time.perf_counter)

    def so_far(self) -> Solution:
        """For other threads too."""
        return self._solution(StoppedBy.INTERRUPT, _UNEXPLAINED, pairs=None)

    def at_the_end(self) -> Solution:
        infeasibility = self._explained() if self.search.bracket.exhausted else _UNEXPLAINED
        return self._solution(self.search.stopped_by, infeasibility, when_asked(self.prepared.count_pairs))

    def _explained(self) -> Infeasibility:
        """An interrupt, the time limit or a TMPC choice too hard costs the figure here, not the answer."""
        search = self.search
        try:
            return explain(search.planning.instance, search.problem, search.evaluations, search.check)
        except (KeyboardInterrupt, StopSearch, ChoiceTooHard):
            return _UNEXPLAINED

    def _solution(self, stopped_by: StoppedBy | None, infeasibility: Infeasibility, pairs: int | None) -> Solution:
        """infeasibility: for the case that there is no plan."""
        search, stats = self.search, self._stats(pairs)
        incumbent, lower_s = search.incumbent, search.bracket.lower
        if incumbent is None:
            if search.bracket.exhausted:
                return without_plan(infeasibility, stats)
            return Solution(Status.UNKNOWN, None, lower_s, None, stats, stopped_by=stopped_by)
        return Solution(
            status=Status.OPTIMAL if search.proved else Status.FEASIBLE,
            time_per_sample_s=incumbent.time_per_sample_s,
            lower_bound_s=search.proved_s(incumbent) if search.proved else min(lower_s, incumbent.time_per_sample_s),
            plan=incumbent.plan,
            stats=stats,
            stopped_by=stopped_by,
        )

    def _stats(self, pairs: int | None) -> SolveStats:
        lattice = self.search.problem.workload.lattice
        return SolveStats(
            layers=len(self.search.planning.instance.layers),
            contracted_layers=lattice.graph.size,
            downsets=lattice.size,
            levels=lattice.levels,
            pairs=pairs,
            threads=self.display.threads,
            lattice_s=self.lattice_s,
            stage_costs_s=self.stage_costs_s,
            search_s=time.perf_counter() - self.began_s,
            evaluations=tuple(self.search.stats),
            cluster=self.display.stats(),
        )


def without_plan(infeasibility: Infeasibility | None, stats: SolveStats) -> Solution:
    """Proved to have none; infeasibility: why."""
    return Solution(Status.INFEASIBLE, None, float("inf"), None, stats, infeasibility)
