"""Closes all brackets of a curve: point by point, or stretch by stretch where stages can be listed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.frontier.curve import Curve
from piper_ray.engine.frontier.listed import ListedStages
from piper_ray.engine.frontier.oracles import Oracle
from piper_ray.engine.search.bracket import Bracket, Phase

_STRETCHES = 8
"""Into how many a walk is divided for threads, whatever their number: the same work, so the same bytes."""
_LEAST_STRETCH = 32
_SPARSE = 16
"""Positions further apart than this on average are searched one by one: a walk passes every step between them."""
_HEARTBEAT_S = 0.1


def close_point(curve: Curve, index: int, oracle: Oracle, ceiling_s: float, phase: Phase = Phase.STEPPING) -> None:
    """The search of ``solve`` at one position, from what is known there; what it learns goes to the whole curve.

    phase: to begin with.
    """
    if curve.is_closed(index):
        return
    upper_s = float(curve.upper_s[index])
    known = upper_s if math.isfinite(upper_s) else None
    bracket = Bracket(float(curve.lower_s[index]), ceiling_s, known, phase)
    devices, data_parallel_sum = curve.limits(index)
    # A neighbour's plan is often the best here too: it is challenged before anything else.
    threshold_s = bracket.propose() if known is None else known * (1.0 - max(PROOF, curve.gap))
    while True:
        found = oracle.ask(threshold_s, devices, data_parallel_sum, curve.by_sum)
        if found is None:
            curve.record_infeasible(index, threshold_s)
            bracket.record_infeasible(threshold_s)
        else:
            curve.record_plan(found.position, found.value_s)
            before = int(np.searchsorted(curve.positions, found.position)) - 1
            if found.least and before >= 0:
                curve.record_infeasible(before, threshold_s)
            bracket.record_feasible(threshold_s, found.value_s, found.position / int(curve.positions[index]))
        if bracket.is_done(curve.gap):
            break
        threshold_s = bracket.propose()
    if bracket.exhausted:
        curve.record_without_plan(index)


def is_dense(curve: Curve) -> bool:
    """Whether a walk along the curve passes few steps that nobody asked for."""
    span = int(curve.positions[-1] - curve.positions[0]) + 1
    return span <= _SPARSE * curve.positions.size


def walk_curve(curve: Curve, listed: ListedStages, ceiling_s: float, threads: int, on_progress: OnProgress) -> None:
    """Walks the curve in a few stretches at a time.

    on_progress: gets the number of positions passed, on this thread; what it raises ends the walk, and the curve keeps
    what is proved until then.
    """
    points = curve.positions.size
    count = max(1, min(_STRETCHES, points // _LEAST_STRETCH))
    edges = np.linspace(0, points, count + 1).astype(np.int64).tolist()
    stretches = [_Stretch(curve, listed, ceiling_s, *ends) for ends in pairwise(edges)]
    try:
        if threads == 1 or count == 1:
            for stretch in stretches:
                stretch.walk(lambda: on_progress(sum(stretch.passed for stretch in stretches)))
        else:
            _walk_together(stretches, threads, on_progress)
    finally:
        curve.share_bounds()


def _walk_together(stretches: Sequence[_Stretch], threads: int, on_progress: OnProgress) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise _Stopped

    with ThreadPoolExecutor(threads, thread_name_prefix="piper-ray") as pool:
        left = {pool.submit(stretch.walk, check) for stretch in stretches}
        try:
            while left:
                done, left = wait(left, _HEARTBEAT_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                on_progress(sum(stretch.passed for stretch in stretches))
        finally:
            stop.set()


class _Stopped(Exception):
    """Ends a stretch: another one failed, or the user has had enough."""


@dataclass
class _Stretch:
    """Positions begin .. end - 1 of a curve. passed: of these, so far."""

    curve: Curve
    listed: ListedStages
    ceiling_s: float
    begin: int
    end: int
    passed: int = 0

    def walk(self, check: Callable[[], None]) -> None:
        """One solve at its first position that has a plan, and on from there. check: called as it passes positions;
        what it raises ends the walk.
        """
        with suppress(_Stopped):
            first = self._first_with_a_plan(check)
            if first is not None:
                self.listed.walk(self.curve, self.begin + first, self.end, partial(self._advance, check))

    def _advance(self, check: Callable[[], None], at: int) -> None:
        self.passed = at - self.begin
        check()

    def _first_with_a_plan(self, check: Callable[[], None]) -> int | None:
        """Within the stretch, closed; None if there is none."""
        curve, listed, span = self.curve, self.listed, slice(self.begin, self.end)
        stretch = Curve(
            curve.by_sum,
            curve.positions[span],
            curve.other_limit,
            curve.lower_s[span],
            curve.upper_s[span],
            curve.gap,
        )
        last = self.end - self.begin - 1
        self._advance(check, self.begin)
        listed.forget_choices()
        close_point(stretch, 0, listed, self.ceiling_s)
        if stretch.lower_s[0] != np.inf:
            return 0
        found = listed.ask(self.ceiling_s, *stretch.limits(last), curve.by_sum)
        if found is None:
            stretch.record_without_plan(last)
            self._advance(check, self.end)
            return None
        first = int(np.searchsorted(stretch.positions, found.position))
        stretch.record_without_plan(first - 1)
        self._advance(check, self.begin + first)
        close_point(stretch, first, listed, self.ceiling_s)
        return first
