"""One (d, t) searched: pipeline tails, then plans one by one, until the bound is met."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.backends.calls import PROCESS_BYTES, Call
from piper_ray.engine.flush.plans import ChosenStages, choose
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_closing import best_stages, best_state, close_gap
from piper_ray.engine.kernels.flush_stages import AheadArrays
from piper_ray.engine.kernels.flush_states import FINISHED, STOPPED, TOO_MANY, tails
from piper_ray.engine.kernels.flush_types import ONE_F_ONE_B, FlushTables, FlushTask
from piper_ray.engine.kernels.types import FloatArray, frozen
from piper_ray.engine.ledger import TIE
from piper_ray.model.stop import StoppedBy

_FEW_NODES = 3_000
_MOST_NODES = 200_000
_MOST_STATES = 20_000_000
_STATES_BYTES = 500e6
"""Of a worker, for the states of a task's tails; few have as many."""

_LEVELS = 24
_LEAST_LEVEL = 0.4
_MOST_LEVEL = 1.1


@dataclass(frozen=True)
class TaskResult:
    """What was found in one task. lower_s: on those of its plans that take less than the best known; inf: none does.

    left_open: why the bound is not met, where it is not.
    """

    lower_s: float
    states: int
    looked_through: bool
    found: ChosenStages | None
    left_open: StoppedBy | None


def run_task(tables: FlushTables, task: DegreePair, control: FloatArray) -> TaskResult:
    """Searches one (d, t) for a plan that takes less than control[0], which it lowers when it finds one.

    A function of arrays, but for what one other thread may write to them: control[0], the best time known or asked
    for, in s, and control[1], the wish to stop (0: none).
    """
    if task.lower_s > control[0] * (1.0 + TIE):
        return TaskResult(np.inf, 0, False, None, None)
    downsets = tables.bits.shape[0]
    levels = np.zeros((1, 2))
    status, states = tails(tables, task.arrays, task.ahead, levels, _MOST_STATES, control)
    kept = len(states.origin)
    if status != FINISHED:
        return TaskResult(task.lower_s, kept, False, None, None if status == STOPPED else StoppedBy.TOO_MANY_STATES)
    state, lower_s = best_state(task.arrays, states, downsets)
    if state < 0:
        return TaskResult(np.inf, kept, False, None, None)
    found = choose(tables, task.arrays, best_stages(states, state))
    control[0] = min(control[0], found.value_s)
    looked_through = False
    for most_nodes in (_FEW_NODES, _MOST_NODES):
        if lower_s >= control[0] * (1.0 - PROOF):
            return TaskResult(np.inf, kept, looked_through, found, None)
        if looked_through and task.arrays.schedule == ONE_F_ONE_B:
            # What stages in front bring into a tail's warm-up was left out. So once more with levels of it.
            levels = _levels(found)
            status, states = tails(tables, task.arrays, task.ahead, levels, _MOST_STATES, control)
            kept += len(states.origin)
            if status != FINISHED:
                break
            state, least_s = best_state(task.arrays, states, downsets)
            lower_s = max(lower_s, least_s)
            if state >= 0:
                found = _better(found, choose(tables, task.arrays, best_stages(states, state)))
                control[0] = min(control[0], found.value_s)
        looked_through = True
        status, least_s, better, stages = close_gap(tables, task.arrays, levels, states, most_nodes, control)
        lower_s = max(lower_s, least_s)
        if better:
            found = _better(found, choose(tables, task.arrays, stages))
            control[0] = min(control[0], found.value_s)
        if status != TOO_MANY:
            break
    if lower_s >= control[0] * (1.0 - PROOF):
        return TaskResult(np.inf, kept, looked_through, found, None)
    left_open = {FINISHED: StoppedBy.CHOICES_MERGED, STOPPED: None, TOO_MANY: StoppedBy.TOO_MANY_PLANS}[status]
    return TaskResult(lower_s, kept, looked_through, found, left_open)


def call_of(tables: FlushTables, task: DegreePair, bound_s: float) -> Call:
    """``run_task`` for workers, who find the task by its key. bound_s: a time that plans must beat."""
    d, t = task.degrees
    shared_bytes = sum(array.nbytes for array in (*tables, *task.ahead))
    return Call(
        task,
        _run_sent,
        (tables, task.ahead),
        (task.arrays, task.order, task.lower_s),
        f"the search of d={d} t={t}",
        bound_s,
        PROCESS_BYTES + 2.0 * shared_bytes + _STATES_BYTES,
    )


def _run_sent(
    tables: FlushTables, ahead: AheadArrays, arrays: FlushTask, order: int, lower_s: float, control: FloatArray
) -> TaskResult:
    """``run_task``, of what is shared by many tasks and of what is not."""
    return run_task(tables, DegreePair(order, frozen(arrays), ahead, lower_s), control)


def _levels(found: ChosenStages) -> FloatArray:
    """float64[l, 2]: none, and evenly from a part of a plan's largest forward and backward seconds to a little more."""
    shares = np.linspace(_LEAST_LEVEL, _MOST_LEVEL, _LEVELS)
    return np.concatenate([np.zeros((1, 2)), shares[:, None] * found.seconds[:, :2].max(axis=0)])


def _better(one: ChosenStages, other: ChosenStages) -> ChosenStages:
    return other if other.value_s < one.value_s else one
