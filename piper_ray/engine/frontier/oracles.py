"""Who answers "is there a plan within a threshold and limits?": listed stages, or an evaluation by a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.threshold import OnProgress
from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.engine.search.planning import build_plan, chain_through
from piper_ray.engine.tables.problem import Problem
from piper_ray.evaluate import evaluate
from piper_ray.model.instance import Instance


class Found(NamedTuple):
    """A plan's devices or sum of d, whichever the curve runs along, and its time per sample, in s.

    least: no plan within the threshold needs less.
    """

    position: int
    value_s: float
    least: bool


class Oracle(Protocol):
    """Answers for one problem, at any limits up to the problem's own."""

    def ask(self, threshold_s: float, devices: int, data_parallel_sum: int, by_sum: bool) -> Found | None:
        """A plan with every stage at most ``threshold_s``, or None if there is none. Raises LimitError."""
        ...


class LatticeOracle:
    """Evaluates the whole lattice by a backend: for lattices of any size.

    order: the vertices in an order through the last plan's stages, for chains. on_progress: as ``evaluate_threshold``.
    """

    def __init__(
        self,
        instance: Instance,
        contraction: Contraction,
        problem: Problem,
        executor: Evaluations,
        on_progress: Callable[[float], OnProgress],
    ) -> None:
        self._instance, self._contraction, self._problem = instance, contraction, problem
        self._executor, self._on_progress = executor, on_progress
        self.evaluations = 0
        self.order: list[int] | None = None

    def ask(self, threshold_s: float, devices: int, data_parallel_sum: int, by_sum: bool) -> Found | None:
        cluster = self._problem.cluster._replace(devices=devices, data_parallel_limit=data_parallel_sum)
        problem = self._problem.with_cluster(cluster)
        self.evaluations += 1
        outcome = self._executor.evaluate(problem, threshold_s, on_progress=self._on_progress(threshold_s))
        if not outcome.feasible:
            return None
        plan = build_plan(self._instance, problem, self._contraction, outcome.stages)
        self.order = chain_through(problem, outcome.stages)
        value_s = evaluate(self._instance, plan).time_per_sample_s
        # Its plan is one of fewest devices, not of least sum.
        return Found(plan.data_parallel_sum if by_sum else plan.devices, value_s, not by_sum)
