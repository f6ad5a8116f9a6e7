"""Who answers "is there a plan within a threshold and limits?": listed stages, or an evaluation by a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.search.chain import order_through
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.tables.problem import Problem


class FoundPlan(NamedTuple):
    """A plan's devices or sum of d, whichever the curve runs along, and its time per sample, in s.

    least: no plan within the threshold needs less.
    """

    position: int
    value_s: float
    least: bool


class Oracle(Protocol):
    """Answers for one problem, at any limits up to the problem's own."""

    def ask(self, threshold_s: float, devices: int, data_parallel_sum: int, by_sum: bool) -> FoundPlan | None:
        """A plan with every stage at most ``threshold_s``, or None if there is none. Raises ChoiceTooHard."""
        ...


class LatticeOracle:
    """Evaluates the whole lattice by a backend: for lattices of any size.

    order: of the vertices, through the last plan's stages. asked: thresholds so far. on_progress: of each, as
    ``evaluate_threshold`` takes it.
    """

    def __init__(
        self,
        planning: Planning,
        problem: Problem,
        evaluations: Evaluations,
        on_progress: Callable[[float], OnProgress],
    ) -> None:
        self._planning, self._problem = planning, problem
        self._evaluations, self._on_progress = evaluations, on_progress
        self.asked = 0
        self.order: list[int] | None = None

    def ask(self, threshold_s: float, devices: int, data_parallel_sum: int, by_sum: bool) -> FoundPlan | None:
        cluster = self._problem.cluster._replace(devices=devices, data_parallel_limit=data_parallel_sum)
        problem = self._problem.with_cluster(cluster)
        self.asked += 1
        outcome = self._evaluations.evaluate(problem, threshold_s, on_progress=self._on_progress(threshold_s))
        if not outcome.feasible:
            return None
        plan, value_s = self._planning.valued(problem, outcome.stages)
        self.order = order_through(problem, outcome.stages)
        # Its plan is one of fewest devices, not of least sum.
        return FoundPlan(plan.data_parallel_sum if by_sum else plan.devices, value_s, not by_sum)
