"""Closes all brackets of a curve: point by point, or stretch by stretch where stages can be listed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.frontier.curve import Curve
from piper_ray.engine.frontier.listed import ListedStages
from piper_ray.engine.frontier.oracles import Oracle
from piper_ray.engine.search.bracket import Bracket

_STRETCHES = 8
"""Into how many a walk is divided for threads, whatever their number: the same work, so the same bytes."""
_LEAST_STRETCH = 32
_SPARSE = 16
"""Positions further apart than this on average are searched one by one: a walk passes every step between them."""
_HEARTBEAT_S = 0.1

Check = Callable[[], None]


def close_point(curve: Curve, index: int, oracle: Oracle, ceiling_s: float, *, doubtful: bool = False) -> None:
    """The search of ``solve`` at one position, from what is known there; what it learns goes to the whole curve."""
    if curve.is_closed(index):
        return
    upper_s = float(curve.upper_s[index])
    known = upper_s if math.isfinite(upper_s) else None
    bracket = Bracket(float(curve.lower_s[index]), ceiling_s, known, doubtful=doubtful and known is None)
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
        if bracket.closed or bracket.exhausted or bracket.gap() <= curve.gap:
            break
        threshold_s = bracket.propose()
    if bracket.exhausted:
        curve.record_without_plan(index)


def is_dense(curve: Curve) -> bool:
    """Whether a walk along the curve passes few steps that nobody asked for."""
    span = int(curve.positions[-1] - curve.positions[0]) + 1
    return span <= _SPARSE * curve.positions.size


def walk_curve(
    curve: Curve, listed: ListedStages, ceiling_s: float, threads: int, advanced: Callable[[int], None]
) -> None:
    """Walks the curve in a few stretches at a time.

    Calls ``advanced`` with the number of positions passed, on this thread; what it raises ends the walk, and the curve
    keeps what is proved until then.
    """
    points = curve.positions.size
    stretches = max(1, min(_STRETCHES, points // _LEAST_STRETCH))
    edges = np.linspace(0, points, stretches + 1).astype(np.int64).tolist()
    passed = [0] * stretches
    stop = threading.Event()

    def run(number: int, begin: int, end: int) -> None:
        def check(at: int) -> None:
            passed[number] = at - begin
            if stop.is_set():
                raise _Stopped

        with suppress(_Stopped):
            _walk_stretch(curve, listed, begin, end, ceiling_s, check)

    try:
        if threads == 1 or stretches == 1:
            _in_turn(curve, listed, edges, ceiling_s, passed, advanced)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="piper-ray") as pool:
            left = {pool.submit(run, number, *ends) for number, ends in enumerate(pairwise(edges))}
            try:
                while left:
                    done, left = wait(left, _HEARTBEAT_S, FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    advanced(sum(passed))
            finally:
                stop.set()
    finally:
        curve.share_bounds()


def _in_turn(
    curve: Curve,
    listed: ListedStages,
    edges: list[int],
    ceiling_s: float,
    passed: list[int],
    advanced: Callable[[int], None],
) -> None:
    for number, (begin, end) in enumerate(pairwise(edges)):

        def check(at: int, number: int = number, begin: int = begin) -> None:
            passed[number] = at - begin
            advanced(sum(passed))

        _walk_stretch(curve, listed, begin, end, ceiling_s, check)


class _Stopped(Exception):
    """Ends a stretch: another one failed, or the user has had enough."""


def _walk_stretch(
    curve: Curve, listed: ListedStages, begin: int, end: int, ceiling_s: float, check: Callable[[int], None]
) -> None:
    """One solve at its first position that has a plan, and on from there."""
    stretch = Curve(
        curve.by_sum,
        curve.positions[begin:end],
        curve.other_limit,
        curve.lower_s[begin:end],
        curve.upper_s[begin:end],
        curve.gap,
    )
    check(begin)
    listed.forget_choices()
    close_point(stretch, 0, listed, ceiling_s)
    first = 0
    if stretch.lower_s[0] == np.inf:
        found = listed.ask(ceiling_s, *stretch.limits(end - begin - 1), curve.by_sum)
        if found is None:
            stretch.record_without_plan(end - begin - 1)
            check(end)
            return
        first = int(np.searchsorted(stretch.positions, found.position))
        stretch.record_without_plan(first - 1)
        check(begin + first)
        close_point(stretch, first, listed, ceiling_s)
    listed.walk(curve, begin + first, end, check)
