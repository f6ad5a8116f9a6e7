"""The search along one curve: a walk over listed stages, or point by point over a lattice too large for that."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.threshold import OnProgress
from piper_ray.engine.frontier.curve import Curve
from piper_ray.engine.frontier.listed import ListedStages
from piper_ray.engine.frontier.oracles import LatticeOracle
from piper_ray.engine.frontier.points import FrontierStats
from piper_ray.engine.frontier.preparation import CurvePreparation
from piper_ray.engine.frontier.progress import CurveAdvanced, FrontierListener, PointClosed
from piper_ray.engine.frontier.search import close_point, is_dense, walk_curve
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.search.search import ceiling_s
from piper_ray.engine.tables.problem import Workload, build_problem
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Bounds, EvaluationAdvanced
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.stop import INTERRUPT, Stop, StopSearch

_CHAIN_SHARE = 4
"""A chain pays when the lattice has this many times as many downsets."""
_CHAIN_GAP = 1e-6
_PASSES = (0.1, 0.03, 0.01)
"""Gaps of the first passes over a large lattice: where a proof takes minutes, all points should have bounds soon."""


@dataclass
class CurveSearch:
    """``run`` closes a curve. started: what the time limit counts from. stop: ends it as an interrupt does."""

    instance: Instance
    preparation: CurvePreparation
    options: SolveOptions
    listener: FrontierListener
    started: float
    stats: FrontierStats
    stop: Stop[Any]

    def __post_init__(self) -> None:
        self._problem = self.preparation.problem(self.instance)
        self._ceiling_s = ceiling_s(self.instance)

    def run(self, curve: Curve) -> str | None:
        """Closes the brackets, or returns what stopped it; the curve keeps what is proved until then."""
        began = time.perf_counter()
        try:
            listed = ListedStages.of(self._problem, self.check)
            with closing(LocalBackend(self.options.threads)) as backend:
                self.stats.threads = backend.threads
                if listed is not None:
                    self._close_listed(curve, listed)
                else:
                    self._close_by_backend(curve, backend)
        except StopSearch as stop:
            return stop.reason
        except KeyboardInterrupt:
            return INTERRUPT
        except LimitError:
            return "TMPC choice too hard"
        finally:
            curve.share_bounds()
            self.stats.search_s += time.perf_counter() - began
        return None

    def _close_listed(self, curve: Curve, listed: ListedStages) -> None:
        before = self.stats.evaluations

        def advanced(closed: int) -> None:
            self.stats.evaluations = before + listed.evaluations
            self._tell(curve, closed)
            self.check()

        self._close(curve, listed, advanced)

    def _close(self, curve: Curve, listed: ListedStages, advanced: Callable[[int], None]) -> None:
        if is_dense(curve):
            walk_curve(curve, listed, self._ceiling_s, self.stats.threads, advanced)
            return
        for index in reversed(range(curve.positions.size)):
            close_point(curve, index, listed, self._ceiling_s)
            curve.share_bounds()
            advanced(int(curve.closed().sum()))

    def _close_by_backend(self, curve: Curve, backend: LocalBackend) -> None:
        with closing(Evaluations(backend)) as evaluations:
            oracle = LatticeOracle(
                self.instance,
                self.preparation.contraction,
                self._problem,
                evaluations,
                lambda threshold_s: self._on_progress(backend, threshold_s),
            )
            self._bound_by_chain(curve, list(range(self._problem.workload.lattice.graph.size)))
            for gap in (*(gap for gap in _PASSES if gap > curve.gap), curve.gap):
                self._pass(replace(curve, gap=gap), oracle)

    def _pass(self, curve: Curve, oracle: LatticeOracle) -> None:
        """Downwards: a proof at the end of a stretch of equal time holds for all of it."""
        for index in reversed(range(curve.positions.size)):
            if curve.is_closed(index):
                continue
            before = oracle.evaluations
            try:
                close_point(curve, index, oracle, self._ceiling_s, doubtful=True)
            finally:
                curve.share_bounds()
                self.stats.evaluations += oracle.evaluations - before
            self.listener(
                PointClosed(
                    curve.by_sum,
                    int(curve.positions[index]),
                    float(curve.lower_s[index]),
                    float(curve.upper_s[index]),
                    oracle.evaluations - before,
                    self._elapsed_s(),
                )
            )
            self._tell(curve, int(curve.proved().sum()))
            if oracle.order is not None:
                self._bound_by_chain(curve, oracle.order)

    def _bound_by_chain(self, curve: Curve, order: list[int]) -> None:
        """Plans whose stages are runs of ``order``: upper bounds all along the curve, for next to nothing."""
        lattice = self._problem.workload.lattice
        if lattice.size < _CHAIN_SHARE * lattice.graph.size:
            return
        workload = Workload.build(chain_lattice(lattice.graph, order), self._problem.workload.options)
        chain = build_problem(workload, self.instance, self.preparation.restrictions.data_parallelism)
        listed = ListedStages.of(chain, self.check)
        if listed is None:
            return
        left = np.flatnonzero(~curve.closed())
        if left.size == 0:
            return
        bounds = curve.part(left, max(curve.gap, _CHAIN_GAP))
        self._close(bounds, listed, lambda _: self.check())
        curve.upper_s[left] = np.minimum(curve.upper_s[left], bounds.upper_s)
        curve.share_bounds()

    def _tell(self, curve: Curve, closed: int) -> None:
        self.listener(
            CurveAdvanced(curve.by_sum, closed, curve.positions.size, self.stats.evaluations, self._elapsed_s())
        )

    def _on_progress(self, backend: LocalBackend, threshold_s: float) -> OnProgress:
        level_start, began = self._problem.lattice.level_start, time.perf_counter()

        def on_progress(done: int, total: int) -> None:
            self.check()
            self.listener(
                EvaluationAdvanced(
                    index=self.stats.evaluations + 1,
                    threshold_s=threshold_s,
                    done=done,
                    total=total,
                    bounds=Bounds(0.0, None, self._elapsed_s()),
                    seconds=time.perf_counter() - began,
                    level=int(np.searchsorted(level_start, done, side="right")) - 1,
                    levels=level_start.size - 1,
                    workers=backend.activity().workers,
                    blocks_in_flight=0,
                )
            )

        return on_progress

    def check(self) -> None:
        """Raises StopSearch after the time limit, and when it is asked to stop."""
        self.stop.check()
        limit_s = self.options.time_limit_s
        if limit_s is not None and self._elapsed_s() > limit_s:
            raise StopSearch("time limit")

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.started
