"""What was measured, and whether the answers agree. Measures nothing."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import takewhile

from piper_ray.model.solution import Solution
from scripts.ray_benchmarks.cases import TOWER_HEIGHT, RayCase
from scripts.ray_benchmarks.meter import BatchRecord
from scripts.ray_benchmarks.simulation import towers_lattice

LOCAL, ONE, TWO, CHOSEN = "local", "1 worker", "2 workers", "2, where it pays"
"""Threads of this process; workers that get all levels; workers that get what they are sooner done with."""

EXECUTORS = (LOCAL, ONE, TWO, CHOSEN)

_SAME = 0.05
"""Batches are cut by what earlier ones took: two runs never send quite the same downsets."""


@dataclass(frozen=True)
class Run:
    """One solve. bounded: the time limit came first, in the search or in the explanation why there is no plan."""

    solution: Solution
    batches: tuple[BatchRecord, ...]
    bounded: bool

    @property
    def search_s(self) -> float:
        return self.solution.stats.search_s

    @property
    def waited_s(self) -> float:
        """The seconds with at least one batch under way."""
        total_s, until_s = 0.0, float("-inf")
        for batch in sorted(self.batches, key=lambda batch: batch.began_s):
            end_s = batch.began_s + batch.seconds
            total_s += max(0.0, end_s - max(batch.began_s, until_s))
            until_s = max(until_s, end_s)
        return total_s

    @property
    def worked_s(self) -> float:
        return sum(batch.worked_s for batch in self.batches)

    @property
    def sent_downsets(self) -> int:
        return sum(batch.downsets for batch in self.batches)

    @property
    def driver_s(self) -> float:
        """The seconds of the driver alone, while no batch was under way."""
        return self.search_s - self.waited_s

    @property
    def driver_share(self) -> float:
        return self.driver_s / self.search_s

    @property
    def tables_bytes(self) -> int:
        """The bytes put before the first batch of each evaluation: the workload, its limits, and the levels that stayed
        here."""
        return sum(batch.put_bytes for batch in self.batches if batch.first)

    @property
    def levels_bytes(self) -> int:
        return sum(batch.put_bytes for batch in self.batches if not batch.first)

    @property
    def later_levels(self) -> int:
        """Levels of all batches but each evaluation's first."""
        return sum(batch.levels for batch in self.batches if not batch.first)


def s_per_bound(run: Run) -> float:
    """The seconds of a thread for a bound, in the longest evaluation of two towers, as if every downset were live."""
    lattice = towers_lattice(TOWER_HEIGHT, 1.0, 1.0)
    return max(evaluation.seconds for evaluation in run.solution.stats.evaluations) / lattice.work_s


@dataclass
class RayResult:
    """All runs of a case, those of one round one after the other."""

    case: RayCase
    runs: dict[str, list[Run]] = field(default_factory=lambda: {name: [] for name in EXECUTORS})

    @property
    def bounded(self) -> bool:
        return any(run.bounded for runs in self.runs.values() for run in runs)

    @property
    def common_evaluations(self) -> int:
        """The first evaluations that all runs share, in the same order."""
        thresholds = [
            [evaluation.threshold_s for evaluation in run.solution.stats.evaluations]
            for runs in self.runs.values()
            for run in runs
        ]
        shared = (len(set(of_all)) == 1 for of_all in zip(*thresholds, strict=False))
        return sum(takewhile(bool, shared))

    def seconds(self, name: str) -> float:
        """The median seconds over the runs: of the search, or, if one run was bounded, of the evaluations that all
        finished."""
        if not self.bounded:
            return statistics.median(run.search_s for run in self.runs[name])
        count = self.common_evaluations
        return statistics.median(
            sum(evaluation.seconds for evaluation in run.solution.stats.evaluations[:count]) for run in self.runs[name]
        )

    def middle(self, name: str) -> Run:
        """The run of median time, the faster of two."""
        runs = sorted(self.runs[name], key=lambda run: run.search_s)
        return runs[(len(runs) - 1) // 2]

    @property
    def efficiency(self) -> float:
        """One worker against one local thread."""
        return self.seconds(LOCAL) / self.seconds(ONE)

    @property
    def speed_up(self) -> float:
        """Two workers against one."""
        return self.seconds(ONE) / self.seconds(TWO)

    @property
    def chosen(self) -> float:
        """One local thread against two workers where they pay."""
        return self.seconds(LOCAL) / self.seconds(CHOSEN)

    @property
    def slower_work(self) -> float | None:
        """Time for each downset with two workers busy, against one; None if not about the same ones were sent."""
        one, two = self.middle(ONE), self.middle(TWO)
        if self.bounded or not one.batches or abs(two.sent_downsets / one.sent_downsets - 1.0) > _SAME:
            return None
        return two.worked_s / two.sent_downsets / (one.worked_s / one.sent_downsets)

    @property
    def differences(self) -> list[str]:
        """Runs whose answer is not the local one's, or any threshold's that both evaluated."""
        reference = self.runs[LOCAL][0].solution
        expected = _by_threshold(reference)
        found = []
        for name in EXECUTORS:
            for run in self.runs[name]:
                answers = _by_threshold(run.solution)
                same = all(answers[threshold_s] == expected[threshold_s] for threshold_s in answers.keys() & expected)
                if not (same and (self.bounded or _outcome(run.solution) == _outcome(reference))):
                    found.append(f"{self.case.title}: {name} does not answer as the local search does")
        return found


def _by_threshold(solution: Solution) -> dict[float, bool]:
    """Whether each threshold has a plan."""
    return {evaluation.threshold_s: evaluation.feasible for evaluation in solution.stats.evaluations}


def _outcome(solution: Solution) -> tuple[object, ...]:
    return solution.status, solution.time_per_sample_s, solution.plan
