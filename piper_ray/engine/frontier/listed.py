"""Small lattices: all stages listed once, and whole stretches of a curve walked in one kernel call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from piper_ray.cost.tolerances import PROOF, RESOLUTION, THRESHOLD_TOLERANCE
from piper_ray.engine.frontier.curve import Curve
from piper_ray.engine.frontier.oracles import FoundPlan
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.stages import count_stages, list_stages, make_choice_cache
from piper_ray.engine.kernels.staircase import (
    FEASIBLE,
    NO_ROOM,
    TOO_HARD,
    CurveArrays,
    Exactness,
    StageTables,
    WorkBounds,
    best_state,
    evaluate_all,
    make_fronts,
    walk,
)
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.errors import ChoiceTooHard

MOST_DOWNSETS = 5_000
MOST_COSTS = 1_000_000
"""Stages times variants: 8 MB, and some 20 ms an evaluation. Above it blocks of downsets pay."""

_CHOICE_SLOTS = 2**19
_CALL_S = 0.05
_FIRST_ROOM = 64


def _nothing() -> None:
    pass


class ListedStages:
    """An Oracle that also walks. For use by several threads, each with scratch of its own.

    before: called before each evaluation, by any of them; what it raises ends the search.
    """

    def __init__(self, problem: Problem, stages: int, before: Callable[[], None]) -> None:
        self._problem = problem
        self._before = before
        self._stages = list_stages(problem.tables, stages)
        self._scratch = threading.local()
        self._counts: list[int] = []

    @classmethod
    def of(cls, problem: Problem, before: Callable[[], None] = _nothing) -> ListedStages | None:
        """None where there are too many stages to list."""
        bits = problem.lattice.bits
        if bits.shape[0] > MOST_DOWNSETS:
            return None
        stages = int(count_stages(bits))
        return cls(problem, stages, before) if stages * problem.options.degree.size <= MOST_COSTS else None

    @property
    def evaluations(self) -> int:
        """By all threads."""
        return sum(self._counts)

    def forget_choices(self) -> None:
        """What is known of TMPC choices decides which of equally good plans is met first. Fresh, a thread's later
        answers do not depend on its earlier ones."""
        self._known().choices.key[:] = -1

    def ask(self, threshold_s: float, devices: int, data_parallel_sum: int, by_sum: bool) -> FoundPlan | None:
        keep_s = max(threshold_s * (1.0 + THRESHOLD_TOLERANCE), RESOLUTION)
        while True:
            self._before()
            known = self._known()
            status = evaluate_all(keep_s, devices, data_parallel_sum, known)
            if not self._again(status, 1):
                break
        if status != FEASIBLE:
            return None
        state, fronts = best_state(known, by_sum), known.fronts
        position = fronts.data_parallel_sum[state] if by_sum else fronts.devices[state]
        return FoundPlan(int(position), float(fronts.value_s[state]), True)

    def walk(self, curve: Curve, begin: int, end: int, check: Callable[[int], None]) -> None:
        """Closes the brackets begin .. end - 1; upper_s[begin] must be a plan's.

        Calls ``check`` with the first position that is still open, about 20 times a second; what it raises ends it.
        """
        arrays = CurveArrays(curve.positions, curve.lower_s, curve.upper_s, curve.by_sum, curve.other_limit)
        exactness = Exactness(max(PROOF, curve.gap), THRESHOLD_TOLERANCE, RESOLUTION)
        at, reach, most = begin, 1, 4
        while at < end:
            check(at)
            self._before()
            began = time.perf_counter()
            at, status, done, reach = walk(arrays, at, end, self._known(), exactness, reach, most)
            self._again(status, done)
            if time.perf_counter() - began < _CALL_S:
                most *= 2
        check(end)

    def _again(self, status: int, evaluations: int) -> bool:
        """Counts evaluations; whether the last is to be made again, with more room. Raises ChoiceTooHard."""
        self._counts.append(evaluations)
        if status == TOO_HARD:
            raise ChoiceTooHard
        if status == NO_ROOM:
            self._scratch.known = self._make(2 * self._scratch.known.fronts.devices.size)
        return bool(status == NO_ROOM)

    def _known(self) -> StageTables:
        if not hasattr(self._scratch, "known"):
            self._scratch.known = self._make(_FIRST_ROOM * self._problem.lattice.bits.shape[0])
        known: StageTables = self._scratch.known
        return known

    def _make(self, room: int) -> StageTables:
        sums, cluster = self._problem.workload.sums, self._problem.cluster
        return StageTables(
            self._problem.tables,
            self._stages,
            WorkBounds(sums.device_work_s, sums.replica_work_s),
            make_step_cache(self._problem.tables),
            make_choice_cache(_CHOICE_SLOTS),
            make_fronts(self._problem.lattice.bits.shape[0], room, cluster.data_parallel_limit),
        )
