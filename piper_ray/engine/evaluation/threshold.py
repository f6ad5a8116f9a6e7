"""Evaluates a threshold: is there a plan with every stage within it, and with how few devices?

f[I] is the Pareto front of (devices, sum of d) of plans for downset I. f[empty] = {(0, 0)}; f[I] extends every state of
every J < I by a stage I \\ J of the least d that fits. With one tensor-parallel degree a front is a single state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from piper_ray.engine.evaluation.backend import Evaluator, OnProgress
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.dual_prices import kept_s
from piper_ray.engine.evaluation.outcome import Outcome, TracedStage
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.level import trace_stages
from piper_ray.engine.kernels.scan import CHOICES_ABANDONED
from piper_ray.engine.kernels.selection import StepCache
from piper_ray.engine.kernels.types import Earlier, FloatArray, IndexArray, LevelStates, Threshold, frozen
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.errors import ChoiceTooHard

OnFinished = Callable[[StateTables], None]

_GUARD = 1e-9


def _ignore(done: int) -> None:
    pass


def keep_nothing(states: StateTables) -> None:
    """Ignores an evaluation's states."""


def evaluate_threshold(
    problem: Problem,
    backend: Evaluator,
    threshold_s: float,
    *,
    fewest_stages: bool = False,
    on_progress: OnProgress = _ignore,
    finished: LevelStates | None = None,
    on_finished: OnFinished = keep_nothing,
    completion: Completion | None = None,
) -> Outcome:
    """Evaluates one threshold. Raises ChoiceTooHard if a TMPC choice is too hard to make exactly.

    on_progress: receives the number of downsets done; if it raises, the evaluation ends.
    fewest_stages: find a plan with the fewest stages among those with the fewest devices, not just any of these.
    finished: states of the levels from 1 on that an earlier run of this evaluation finished. on_finished: receives the
    states after each batch of levels, to keep them for a later run.
    completion: two-sided bounds; they are used if they hold for this threshold.
    """
    states = StateTables(problem.tables, _target(problem, threshold_s, fewest_stages, completion), problem.rates)
    if finished is not None:
        states.take(finished)
    level_start = problem.lattice.level_start
    levels = level_start.size - 1
    last_downset = int(level_start[-1]) - 1
    while states.level < levels:
        batch = backend.next_batch(states)
        if batch.here:
            states.evaluate(batch.end_level, problem.scratch)
        else:
            first, last = states.downsets(batch.end_level)
            found = backend.evaluate_downsets(states, first, last, partial(_advance, on_progress, first))
            if batch.end_level == states.level + 1:
                states.take(found)
            else:
                states.evaluate(batch.end_level, problem.scratch, Earlier(states.buckets_used, found))
        if states.tested[CHOICES_ABANDONED] > 0:
            raise ChoiceTooHard
        on_progress(int(level_start[states.level]))
        on_finished(states)

    fronts, target = states.fronts, states.target
    feasible = bool(fronts.states[last_downset] > 0)
    live = int(np.count_nonzero(fronts.states))
    if not feasible:
        reach = _reach(problem.workload.sums.device_work_s, fronts.states)
        return Outcome(False, 0, (), reach, live, states.used, states.tested)
    best = int(fronts.start[last_downset] + fronts.states[last_downset]) - 1
    stages = _trace(states, last_downset, best, problem.scratch)
    devices = int(fronts.tally[best]) // target.device_weight
    return Outcome(True, devices, stages, 1.0, live, states.used, states.tested)


def _reach(work_s: FloatArray, states: IndexArray) -> float:
    """The largest share of all work that a downset with states has. work_s: float64[m]."""
    all_s = float(work_s[-1])
    return float(np.max(work_s, initial=0.0, where=states > 0)) / all_s if all_s > 0.0 else 0.0


def _advance(on_progress: OnProgress, first: int, done: int) -> None:
    """What is done of a batch, as progress of the whole evaluation."""
    on_progress(first + done)


def limits_by_work(available: int, work_s: FloatArray, all_s: float, keep_s: float) -> IndexArray:
    """Returns int64[m]: how many of ``available`` devices (or replicas) may go to downsets of the given work,
    float64[m]. The rest of the work, ``all_s`` in sum, needs at least the others.
    """
    rest = np.minimum((all_s - work_s) / keep_s, 2.0**40)
    room = np.floor(available - rest + _GUARD)
    # A downset whose own work needs more than its limit has no state: 0 keeps it out of the loops.
    needed = work_s / keep_s
    return np.where(room + _GUARD < np.minimum(needed, 2.0**40), 0, room).astype(np.int64)


def _target(problem: Problem, threshold_s: float, fewest_stages: bool, completion: Completion | None) -> Threshold:
    sums, cluster = problem.workload.sums, problem.cluster
    keep = kept_s(threshold_s)

    def limit(available: int, work_s: FloatArray) -> IndexArray:
        return limits_by_work(available, work_s, float(work_s[-1]), keep)

    device_limit = limit(cluster.devices, sums.device_work_s)
    if completion is not None and completion.serves(threshold_s):
        device_limit = np.minimum(device_limit, completion.device_limit)
    return frozen(
        Threshold(
            threshold_s=keep,
            device_weight=problem.workload.lattice.graph.size + 1 if fewest_stages else 1,
            stage_weight=1 if fewest_stages else 0,
            device_limit=device_limit,
            data_parallel_limit=limit(cluster.data_parallel_limit, sums.replica_work_s),
        )
    )


def _trace(states: StateTables, i: int, state: int, steps: StepCache) -> tuple[TracedStage, ...]:
    """Returns the stages of a plan with state number ``state``, one of downset i."""
    rows = np.empty((states.tables.lattice.level_start.size, 5), np.int64)
    count = trace_stages(i, state, states.arrays, steps, rows)
    if count < 0:
        raise AssertionError(f"state {state} of downset {i} has no origin")
    threshold_s = states.target.threshold_s
    return tuple(
        TracedStage(outer, inner, variant, d, later_sum, threshold_s * d)
        for outer, inner, variant, d, later_sum in rows[:count].tolist()
    )
