"""The search for the least threshold with a plan, with a lower bound that is proved at every moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_ray.cost.tolerances import RESOLUTION
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.outcome import Outcome, TracedStage
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.level import BLOCKS_TESTED, CANDIDATES_TESTED, STAGES_COSTED
from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.search.bracket import Bracket
from piper_ray.engine.search.planning import build_plan, chain_through
from piper_ray.engine.tables.problem import Problem, Workload, build_problem
from piper_ray.evaluate import evaluate
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Bounds, EvaluationAdvanced, EvaluationFinished, IncumbentFound, Listener, silent
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.solution import EvaluationStats
from piper_ray.model.stop import INTERRUPT, Stop, StopSearch

_CHAIN_SHARE = 4
"""A chain pays when the lattice has this many times as many downsets."""


@dataclass
class Search:
    """One search on one problem. ``run`` may end early; ``incumbent`` and ``bracket`` are valid at every moment, for
    other threads too."""

    instance: Instance
    contraction: Contraction
    problem: Problem
    executor: Evaluations
    gap: float = 0.0
    deadline: float | None = None
    stop: Stop[Any] = field(default_factory=Stop)
    listener: Listener = silent
    started: float = field(default_factory=time.perf_counter)
    incumbent: tuple[Plan, float] | None = None  # the best plan and its time per sample, in s
    proved: bool = False  # the plan is optimal
    stopped_by: str | None = None
    evaluations: list[EvaluationStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bracket = Bracket(lower=lower_bound_s(self.problem), ceiling=ceiling_s(self.instance))

    def run(self) -> None:
        """Closes the bracket, or stops at the gap, the deadline or an interrupt; then picks the preferred plan.

        A TMPC choice that is too hard to make exactly ends the search too. Raises LimitError if no plan is known then.
        """
        try:
            self._improve_on_chain(list(range(self.problem.workload.lattice.graph.size)))
            while not (self.bracket.closed or self.bracket.exhausted):
                if self.bracket.gap() <= self.gap:
                    self.stopped_by = "gap"
                    return
                self._try(self.bracket.propose())
            if self.bracket.closed:
                self.proved = True
                self._prefer_small()
        except StopSearch as stop:
            self.stopped_by = stop.reason
        except KeyboardInterrupt:
            self.stopped_by = INTERRUPT
        except LimitError:
            if self.incumbent is None:
                raise
            self.stopped_by = "TMPC choice too hard"

    def _try(self, threshold_s: float) -> None:
        outcome, stats = self._evaluate(threshold_s)
        if not outcome.feasible:
            self.bracket.record_infeasible(threshold_s)
            self._report(stats)
            return
        self._report(stats)
        value = self._take(self.problem, outcome.stages, "evaluation")
        self.bracket.record_feasible(threshold_s, value, outcome.devices / self.instance.devices)
        self._improve_on_chain(chain_through(self.problem, outcome.stages))

    def _prefer_small(self) -> None:
        """Of the plans of least time the one of fewest devices, then stages, then first in the tables' order.

        Its time may differ from the best one found by as much as a threshold's tolerance.
        """
        assert self.bracket.upper is not None
        outcome, stats = self._evaluate(self.bracket.upper, fewest_stages=True)
        plan = build_plan(self.instance, self.problem, self.contraction, outcome.stages)
        self.incumbent = plan, evaluate(self.instance, plan).time_per_sample_s
        self._report(stats)

    def _improve_on_chain(self, order: list[int]) -> None:
        """The best plan whose stages are runs of ``order``: n + 1 downsets, so it costs next to nothing."""
        lattice = self.problem.workload.lattice
        if lattice.size < _CHAIN_SHARE * lattice.graph.size:
            return
        workload = Workload.build(chain_lattice(lattice.graph, order), self.problem.workload.options)
        data_parallelism = self.problem.cluster.divisors.size > 1
        chain = build_problem(workload, self.instance, data_parallelism)
        bracket = Bracket(self.bracket.lower, self.bracket.ceiling, self.bracket.upper)
        while not (bracket.closed or bracket.exhausted) and bracket.gap() > max(self.gap, 1e-6):
            threshold_s = bracket.propose()
            outcome = evaluate_threshold(chain, self.executor.backend, threshold_s, on_progress=self.check)
            if outcome.feasible:
                bracket.record_feasible(threshold_s, self._take(chain, outcome.stages, "chain"))
            else:
                bracket.record_infeasible(threshold_s)
        self.bracket.doubtful = bracket.upper is None

    def _take(self, problem: Problem, stages: tuple[TracedStage, ...], origin: str) -> float:
        """Values the plan and keeps it if it is the best so far."""
        plan = build_plan(self.instance, problem, self.contraction, stages)
        value = evaluate(self.instance, plan).time_per_sample_s
        if self.incumbent is None or value < self.incumbent[1]:
            self.incumbent = plan, value
            self.bracket.record_plan(value)
            self.listener(IncumbentFound(origin, value, len(plan.stages), plan.devices, self._bounds()))
        return value

    def _evaluate(self, threshold_s: float, *, fewest_stages: bool = False) -> tuple[Outcome, EvaluationStats]:
        index = len(self.evaluations) + 1
        level_start = self.problem.lattice.level_start
        began = time.perf_counter()

        def on_progress(done: int, total: int) -> None:
            self.check(done, total)
            level = int(np.searchsorted(level_start, done, side="right")) - 1
            activity = self.executor.backend.activity()
            self.listener(
                EvaluationAdvanced(
                    index,
                    threshold_s,
                    done,
                    total,
                    self._bounds(),
                    time.perf_counter() - began,
                    level,
                    level_start.size - 1,
                    *activity,
                )
            )

        outcome = self.executor.evaluate(
            self.problem,
            threshold_s,
            fewest_stages=fewest_stages,
            next_s=None if fewest_stages else self.bracket.next_if_infeasible(threshold_s),
            on_progress=on_progress,
        )
        stats = EvaluationStats(
            threshold_s=threshold_s,
            feasible=outcome.feasible,
            seconds=time.perf_counter() - began,
            live_downsets=outcome.live_downsets,
            cells=outcome.cells,
            blocks_tested=int(outcome.tested[BLOCKS_TESTED]),
            candidates_tested=int(outcome.tested[CANDIDATES_TESTED]),
            stages_costed=int(outcome.tested[STAGES_COSTED]),
        )
        self.evaluations.append(stats)
        return outcome, stats

    def _report(self, stats: EvaluationStats) -> None:
        """Tells of the last evaluation, once its answer is on record."""
        self.listener(
            EvaluationFinished(
                len(self.evaluations),
                stats.threshold_s,
                stats.feasible,
                stats.seconds,
                stats.live_downsets,
                self._bounds(),
            )
        )

    def check(self, done: int, total: int) -> None:  # noqa: ARG002 - a progress callback
        """Raises StopSearch after the deadline, and when it is asked to stop."""
        self.stop.check()
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise StopSearch("time limit")

    def _bounds(self) -> Bounds:
        return Bounds(self.bracket.lower, self.bracket.upper, time.perf_counter() - self.started)


def lower_bound_s(problem: Problem) -> float:
    """max of: all work over all devices; all replicas' work over the data-parallel limit; the largest single layer."""
    sums, options, cluster = problem.workload.sums, problem.workload.options, problem.cluster
    least = options.least
    # Each layer alone, at each variant and divisor that the devices allow: no stage with it is faster.
    d = cluster.divisors.astype(np.float64)
    resync_s = least.weights_bytes * problem.resync_s_per_byte
    alone = (least.work_s[:, :, None] + (d - 1.0) * resync_s[:, :, None]) / d
    index = np.arange(cluster.divisors.size)
    in_range = (cluster.first_divisor[:, None] <= index) & (index < cluster.end_divisor[:, None])
    within = in_range & (problem.options.degree[:, None] * cluster.divisors <= cluster.devices)
    allowed = (least.missing[:, :, None] == 0) & within
    layer_s = np.where(allowed, alone, np.inf).min(axis=(1, 2), initial=np.inf)
    bounds = [
        float(sums.device_work_s[-1]) / cluster.devices,
        float(sums.replica_work_s[-1]) / cluster.data_parallel_limit,
        *(float(value) for value in layer_s),
    ]
    finite = [bound for bound in bounds if np.isfinite(bound)]
    return max(finite) * (1.0 - 1e-12)


def ceiling_s(instance: Instance) -> float:
    """No plan is slower: every layer's slowest TMPC, every edge crossing twice, and all weights synchronised."""
    total_s = 0.0
    for layer in instance.layers:
        tmpcs = [tmpc for of_degree in layer.tmpcs.values() for tmpc in of_degree]
        charges = [sum(tmpc.forward_sync_bytes.values()) + sum(tmpc.backward_sync_bytes.values()) for tmpc in tmpcs]
        total_s += max(tmpc.time_per_sample_s for tmpc in tmpcs)
        total_s += 2.0 * max(charges) / instance.bandwidth_bytes_per_s
        weights_bytes = max(tmpc.weights_bytes for tmpc in tmpcs)
        total_s += 4.0 * weights_bytes / (instance.microbatches * instance.bandwidth_bytes_per_s)
    crossing_bytes = 4.0 * sum(edge.communication_bytes for edge in instance.edges)
    crossing_bytes += sum(tensor.forward_bytes + tensor.backward_bytes for tensor in instance.tensors)
    ceiling = (total_s + crossing_bytes / instance.bandwidth_bytes_per_s) * (1.0 + 1e-9)
    return max(ceiling, RESOLUTION)  # above the lower bound of 0 where nothing takes any time
