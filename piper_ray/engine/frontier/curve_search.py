"""The search along one curve: a walk over listed stages, or point by point over a lattice too large for that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from piper_ray.cost.bounds import ceiling_s
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.frontier.closing import close_point, is_dense, walk_curve
from piper_ray.engine.frontier.curve import Curve
from piper_ray.engine.frontier.curve_events import CurveAdvanced, FrontierListener, PointClosed
from piper_ray.engine.frontier.curve_tables import CurvePreparation
from piper_ray.engine.frontier.listed import ListedStages
from piper_ray.engine.frontier.oracles import LatticeOracle
from piper_ray.engine.frontier.points import FrontierStats
from piper_ray.engine.search.bracket import Phase
from piper_ray.engine.search.chain import is_worth_a_chain, order_of_graph
from piper_ray.engine.search.limits import Limits
from piper_ray.engine.search.planning import Planning
from piper_ray.engine.search.watch import EvaluationWatch
from piper_ray.engine.tables.problem import chain_problem
from piper_ray.model.errors import ChoiceTooHard
from piper_ray.model.events import Bounds
from piper_ray.model.instance import Instance
from piper_ray.model.stop import StoppedBy, StopSearch

_CHAIN_GAP = 1e-6
_PASSES = (0.1, 0.03, 0.01)
"""Gaps of the first passes over a large lattice: where a proof takes minutes, all points should have bounds soon."""


@dataclass
class CurveSearch:
    """``run`` closes a curve. started_s: what events count from. evaluations: of curves before too."""

    instance: Instance
    preparation: CurvePreparation
    threads: int | None
    limits: Limits
    listener: FrontierListener
    started_s: float
    evaluations: int = 0
    _began_s: float = field(default_factory=time.perf_counter)
    _ended_s: float | None = None

    def __post_init__(self) -> None:
        self._problem = self.preparation.problem(self.instance)
        self._ceiling_s = ceiling_s(self.instance)

    def run(self, curve: Curve) -> StoppedBy | None:
        """Closes the brackets, or returns what stopped it; the curve keeps what is proved until then."""
        try:
            listed = ListedStages.of(self._problem, self.limits.check)
            with closing(LocalBackend(self.threads)) as backend:
                self.threads = backend.threads
                if listed is not None:
                    self._close_listed(curve, listed, _Told(self, curve, listed, self.evaluations))
                else:
                    self._close_by_backend(curve, backend)
        except StopSearch as stop:
            return stop.reason
        except KeyboardInterrupt:
            return StoppedBy.INTERRUPT
        except ChoiceTooHard:
            return StoppedBy.CHOICE_TOO_HARD
        finally:
            curve.share_bounds()
            self._ended_s = time.perf_counter()
        return None

    def added_to(self, stats: FrontierStats) -> FrontierStats:
        """What came before with what this search took, so far or in all. For other threads too."""
        ended_s = time.perf_counter() if self._ended_s is None else self._ended_s
        search_s = stats.search_s + ended_s - self._began_s
        return replace(stats, threads=self.threads or 0, evaluations=self.evaluations, search_s=search_s)

    def advance(self, curve: Curve, closed: int, evaluations: int) -> None:
        """So many positions are closed, after so many evaluations of all curves; what ends the search is raised."""
        self.evaluations = evaluations
        self._tell(curve, closed)
        self.limits.check()

    def _close_listed(self, curve: Curve, listed: ListedStages, on_progress: OnProgress) -> None:
        if is_dense(curve):
            walk_curve(curve, listed, self._ceiling_s, self.threads or 1, on_progress)
            return
        for index in reversed(range(curve.positions.size)):
            close_point(curve, index, listed, self._ceiling_s)
            curve.share_bounds()
            on_progress(int(curve.closed().sum()))

    def _close_by_backend(self, curve: Curve, backend: LocalBackend) -> None:
        planning = Planning(self.instance, self.preparation.contraction)
        with closing(Evaluations(backend)) as evaluations:
            oracle = LatticeOracle(planning, self._problem, evaluations, lambda s: self._watch(backend, s))
            self._bound_by_chain(curve, order_of_graph(self._problem))
            for gap in (*(gap for gap in _PASSES if gap > curve.gap), curve.gap):
                self._pass(replace(curve, gap=gap), oracle)

    def _pass(self, curve: Curve, oracle: LatticeOracle) -> None:
        """Downwards: a proof at the end of a stretch of equal time holds for all of it."""
        for index in reversed(range(curve.positions.size)):
            if curve.is_closed(index):
                continue
            before = oracle.asked
            try:
                close_point(curve, index, oracle, self._ceiling_s, Phase.DOUBTING)
            finally:
                curve.share_bounds()
                self.evaluations += oracle.asked - before
            self.listener(
                PointClosed(
                    curve.by_sum,
                    int(curve.positions[index]),
                    float(curve.lower_s[index]),
                    float(curve.upper_s[index]),
                    oracle.asked - before,
                    self._elapsed_s(),
                )
            )
            self._tell(curve, int(curve.proved().sum()))
            if oracle.order is not None:
                self._bound_by_chain(curve, oracle.order)

    def _bound_by_chain(self, curve: Curve, order: Sequence[int]) -> None:
        """Plans whose stages are runs of ``order``: upper bounds all along the curve."""
        workload = self._problem.workload
        if not is_worth_a_chain(workload.lattice):
            return
        degrees = self.preparation.restrictions.data_parallel_degrees(self.instance)
        chain = chain_problem(self.instance, workload.lattice.graph, workload.options, order, degrees)
        listed = ListedStages.of(chain, self.limits.check)
        if listed is None:
            return
        left = np.flatnonzero(~curve.closed())
        if left.size == 0:
            return
        bounds = curve.part(left, max(curve.gap, _CHAIN_GAP))
        self._close_listed(bounds, listed, self._check)
        curve.upper_s[left] = np.minimum(curve.upper_s[left], bounds.upper_s)
        curve.share_bounds()

    def _tell(self, curve: Curve, closed: int) -> None:
        elapsed_s = self._elapsed_s()
        self.listener(CurveAdvanced(curve.by_sum, closed, curve.positions.size, self.evaluations, elapsed_s))

    def _watch(self, backend: LocalBackend, threshold_s: float) -> EvaluationWatch:
        return EvaluationWatch(
            index=self.evaluations + 1,
            threshold_s=threshold_s,
            level_start=self._problem.lattice.level_start,
            limits=self.limits,
            listener=self.listener,
            bounds=self._bounds,
            display=backend,
        )

    def _check(self, done: int) -> None:  # noqa: ARG002 - as progress that nobody is told of
        self.limits.check()

    def _bounds(self) -> Bounds:
        """A curve has none of its own: each point has."""
        return Bounds(0.0, None, self._elapsed_s())

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s


@dataclass(frozen=True)
class _Told:
    """The progress of a walk: positions that are closed."""

    search: CurveSearch
    curve: Curve
    listed: ListedStages
    before: int  # evaluations of other curves

    def __call__(self, done: int) -> None:
        self.search.advance(self.curve, done, self.before + self.listed.evaluations)
