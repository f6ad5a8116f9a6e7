"""Searches one (d, t): stages with their choices made, the call that workers get, and the record of its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from piper_ray.cost.plan import places, stage_of
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.backends.calls import PROCESS_BYTES, Call
from piper_ray.engine.checkpoint import Checkpoint
from piper_ray.engine.flush.border_bound import BorderBound
from piper_ray.engine.flush.mixes import MixLimits
from piper_ray.engine.flush.path_prices import PathPrices, even_prices
from piper_ray.engine.flush.space import (
    LITTLE_WORK,
    MUCH_WORK,
    RAISING_WORK,
    ListedTables,
    SearchSpace,
    TooManyDownsets,
)
from piper_ray.engine.flush.stand_in_bound import StandInBound
from piper_ray.engine.flush.stand_ins import StandIns
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_choices import MANY, NONE_FITS, choice_front, least_time_choice, stage_items
from piper_ray.engine.kernels.flush_closing import TOO_LONG, StageList, best_stages, best_state, close_gap
from piper_ray.engine.kernels.flush_paths import simulate_step, step_s, times_in_batch
from piper_ray.engine.kernels.flush_room import fitting_stages, least_held_bytes, tails_with_room
from piper_ray.engine.kernels.flush_stages import AheadArrays, in_flight, least_figures
from piper_ray.engine.kernels.flush_states import FINISHED, STOPPED, TOO_MANY, tails
from piper_ray.engine.kernels.flush_types import (
    FASTEST,
    FIGURES,
    GPIPE,
    LEAST_TIME,
    NO_FREE_STAGES,
    ON_FRONT,
    ONE_F_ONE_B,
    TWO_BW,
    FlushTables,
    FlushTask,
    FreeStages,
    TailArrays,
)
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey, frozen
from piper_ray.engine.ledger import TIE
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.stop import StoppedBy

_MOST_PASSES = 10_000_000
"""A step of up to this many forward passes is simulated pass by pass; for longer ones a formula gives the same time."""


@dataclass(frozen=True)
class ChosenStages:
    """The stages of a plan, with all choices made.

    value_s: the time of a batch, simulated. seconds: float64[p, 3], front to back: each stage's forward and backward
    seconds for a microbatch, and those of its synchronisation. options: for each stage int64[k, 2], its vertices,
    ascending, each with the number of its option.
    """

    task: FlushTask
    variant: IndexArray
    options: tuple[IndexArray, ...]
    seconds: FloatArray
    value_s: float

    @property
    def stages(self) -> int:
        return len(self.options)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Prefers, among equally fast plans, fewest devices, then fewest stages, then the least d."""
        return self.devices, self.stages, self.task.data_parallel_degree

    @property
    def devices(self) -> int:
        return self.task.data_parallel_degree * int(self.task.tensor_parallel_degrees[self.variant].sum())


def choose(tables: FlushTables, task: FlushTask, stages: StageList, *, is_exact: bool = True) -> ChosenStages:
    """Makes the TMPC choices that the stages name; for stages that name none, makes quick choices that fit. is_exact:
    whether those of least time are exact (``least_time_choice``)."""
    p = stages.outer.size
    seconds = np.zeros((p, 3))
    options = []
    for k in range(p):
        stage = StageKey(int(stages.outer[k]), int(stages.inner[k]), int(stages.variant[k]))
        y = in_flight(task.schedule, task.microbatches, p - 1 - k)
        vertices, start, items = stage_items(stage, y, tables, task)
        least = least_figures(stage, tables, task)
        items[:, 2] *= task.sync_s_per_byte[stage.variant]
        wanted = stages.seconds[k] - np.array([least.tensor_forward_s, least.tensor_backward_s, 0.0])
        chosen = _chosen(int(stages.choice[k]), wanted, start, items, task.memory_bytes[stage.variant], is_exact)
        totals = items[chosen].sum(axis=0)
        seconds[k, 0] = totals[0] + least.tensor_forward_s
        seconds[k, 1] = totals[1] + least.tensor_backward_s
        seconds[k, 2] = totals[2]
        options.append(np.stack([vertices, chosen - start[:-1]], axis=1))
    return ChosenStages(task, stages.variant, tuple(options), seconds, of_batch_s(task, seconds))


def _chosen_well(tables: FlushTables, task: FlushTask, stages: StageList, *, is_exact: bool = True) -> ChosenStages:
    """Makes the choices that the stages name or those of least time, whichever gives the faster batch. Merged choices
    name none that is there, so those of least time may be better."""
    found = choose(tables, task, stages, is_exact=is_exact)
    if not (stages.choice == ON_FRONT).any():
        return found
    return _better(found, choose(tables, task, stages._replace(choice=np.full_like(stages.choice, LEAST_TIME))))


def of_batch_s(task: FlushTask, seconds: FloatArray) -> float:
    """Returns the time of a batch. seconds: as in ``ChosenStages``."""
    columns = [seconds[:, column].copy() for column in range(3)]
    quick = task.schedule != TWO_BW and len(seconds) * task.microbatches <= _MOST_PASSES
    return float((simulate_step if quick else step_s)(task.schedule, task.microbatches, *columns))


def build_flush_plan(instance: Instance, workload: FlushWorkload, chosen: ChosenStages) -> Plan:
    """Makes a plan, with layers in the order of the file."""
    place, graph, d = places(instance), workload.lattice.graph, chosen.task.data_parallel_degree
    built = []
    for r, options in zip(chosen.variant.tolist(), chosen.options, strict=True):
        tmpc_ids = {graph.layer_ids[v]: workload.tmpcs[r][v][o].id for v, o in options.tolist()}
        variant = workload.placed[r].variant
        built.append(stage_of(place, tmpc_ids, d, variant.degree, variant.kind))
    return Plan(tuple(built))


def _chosen(
    choice: int, wanted: FloatArray, start: IndexArray, items: FloatArray, memory_bytes: float, is_exact: bool
) -> IndexArray:
    """Returns the option of each layer, as an index into ``items``. wanted: the seconds to take or to come close to."""
    chosen = start[:-1].copy()
    if choice == FASTEST:
        return chosen
    if choice == LEAST_TIME:
        least_time_choice(start, items, memory_bytes, np.inf, is_exact, chosen)
        return chosen
    most_s = (wanted[0] + wanted[1]) * (1.0 + 1e-9)
    status, rows, ids, before, taken = choice_front(start, items, memory_bytes, most_s, MANY, True)
    if status == NONE_FITS:  # the wanted seconds are only a bound
        least_time_choice(start, items, memory_bytes, np.inf, is_exact, chosen)
        return chosen
    at = int(ids[np.argmin(np.abs(rows[:, :3] - wanted).sum(axis=1))])
    for k in range(chosen.size - 1, -1, -1):
        chosen[k] = taken[at]
        at = int(before[at])
    return chosen


_MOST_FITTED = 30_000
"""Whether a plan fits is found out on at most this many downsets: each pair of them is looked at, which takes up to a
second."""
_FEW_NODES = 3_000
_MOST_NODES = 200_000
_MOST_MIXES = 5_000_000
"""Largest number of mixes for a task: each takes space in several arrays, some hundred megabytes together."""
_MOST_STATES = 20_000_000
_FEW_STATES = 3_000
"""From this number of states on, prices of positions and of layers are worth their time."""
_SOME_STATES, _SOME_ROUNDED_STATES = 50_000, 1_000_000
"""From the first number of states on, a bound by rounded ones is sought, by at most the second number of these."""
_ROUNDED_SHARES = (0.016, 0.008)
"""How much rounding takes off each figure of a pipeline of most stages, as a share of the cutoff, at most; about half
of that on average."""
_SHARES_OF_TIME = (1.0, 0.99, 0.97, 0.94)
"""Times for which a bound by stand-ins is sought, as shares of the best plan's."""
_STATES_BYTES = 500e6
"""Memory of a worker for the states of a task's tails; few have as many."""

_BY_LEVELS = {GPIPE: False, ONE_F_ONE_B: True, TWO_BW: False}
"""Whether slower stages in front lengthen a tail's warm-up: then tails are found for several levels of their time."""

_NO_TIE = 4.0 * TIE
"""Relative. A plan that takes longer by this is no tie of the best one."""
_NO_LEVELS: FloatArray = np.zeros((1, 2))
_UNROUNDED: FloatArray = np.zeros(0)
_FAR = 1.08
"""Bounds are raised if a plan's time is further from them by this factor; the rest is left to the search."""
_LEVELS = 24
_LEAST_LEVEL = 0.4
_MOST_LEVEL = 1.1


@dataclass(frozen=True)
class TaskResult:
    """The result of a task. lower_s: a bound for its plans that are faster than the best known; inf: there is none.

    left_open: why the bound is not met, if so. proved_s: a bound for all of its plans. prices: of the task, if they
    were computed. is_rounded: whether it is left open with a bound by rounded states, which others may raise.
    """

    lower_s: float
    states: int = 0
    looked_through: bool = False
    found: ChosenStages | None = None
    left_open: StoppedBy | None = None
    proved_s: float = 0.0
    prices: PathPrices | None = None
    is_rounded: bool = False


class _Stopped(Exception):
    """Raised if control[1] asks to stop."""


class TaskEffort(Enum):
    """How much is done for a task: any plan that fits in memory, or the proof that none does; a quick bound; a bound by
    good prices; a plan; a plan and the proof that none is better, or a bound by rounded states where there are many; or
    the proof, however many states it takes."""

    FIT = "fit"
    QUICK_BOUND = "quick bound"
    BOUND = "bound"
    PLAN = "plan"
    ROUNDED = "rounded"
    PROOF = "proof"


PROOFS = (TaskEffort.ROUNDED, TaskEffort.PROOF)
"""The efforts that prove, in their order: the second one is for tasks that the first one left with rounded states."""


def run_task(
    space: SearchSpace,
    task: DegreePair,
    control: FloatArray,
    effort: TaskEffort = TaskEffort.PROOF,
    known_s: float = np.inf,
) -> TaskResult:
    """Searches one (d, t) for a plan that takes less than control[0], which it lowers when it finds one.

    The result depends on the arguments alone; another thread may write only to ``control``: control[0] is the best time
    known or asked for, in s, and control[1] a request to stop (0: none). known_s: the time of the best plan, if a lower
    one is asked for.
    """
    if task.lower_s > control[0] * (1.0 + TIE):
        return TaskResult(np.inf)
    if effort is TaskEffort.FIT:
        return _fitted(space, task)
    if effort is TaskEffort.QUICK_BOUND:
        return _quickly_bounded(space, task, control)
    if effort is TaskEffort.BOUND:
        return _bounded(space, task, control)
    if task.mixes.most_mixes > _MOST_MIXES:
        return TaskResult(task.lower_s, left_open=StoppedBy.TOO_MANY_STATES)
    task = task.with_mixes()
    kept, whole, proves = 0, space.whole(task) if task.prices is None else None, effort in PROOFS
    if whole is not None:
        by_even_s = _least_by_even_s(space, task, control) if space.is_large and not task.has_kinds else 0.0
        if by_even_s == np.inf:
            return TaskResult(np.inf)
        most_states = _MOST_STATES
        if space.is_large and control[0] < np.inf and not task.has_kinds:
            most_states = _FEW_STATES
        status, states = _tails(whole, task, _NO_LEVELS, most_states, control, follows_all=proves)
        if status != TOO_MANY or most_states == _MOST_STATES:
            return _completed(whole, task, status, states, control, proves)
        kept = len(states.origin)
    prices, proved_s = task.prices or _find_prices(space, task), 0.0
    if kept > 0 and proves and control[0] < known_s < np.inf:
        proved_s = min(_least_by_prices_s(space, task, prices, np.array([known_s, 0.0])), known_s)
    if proved_s > control[0] * (1.0 + TIE):
        return TaskResult(np.inf, kept, proved_s=proved_s, prices=prices)
    found = _run_priced(space, replace(task, prices=prices), control, effort)
    return replace(
        found, states=kept + found.states, proved_s=max(found.proved_s, proved_s), prices=found.prices or prices
    )


def _fitted(space: SearchSpace, task: DegreePair) -> TaskResult:
    """Seeks a plan that fits in memory, whatever its time. Nothing is found out about many downsets, several kinds of
    devices, or a fixed number of stages."""
    whole, unknown = space.whole(task), TaskResult(task.lower_s)
    if whole is None or task.has_kinds or task.arrays.stages > 0 or len(whole.tables.bits) > _MOST_FITTED:
        return unknown
    tables, arrays = whole.tables, task.arrays
    held_bytes = least_held_bytes(tables, arrays)
    most = tails_with_room(tables, arrays, held_bytes)
    if most[0] < 0:
        return TaskResult(np.inf)
    stages = fitting_stages(tables, arrays, whole.ahead, held_bytes, most)
    if stages.outer.size == 0:
        return unknown
    return replace(unknown, found=choose(tables, arrays, stages, is_exact=False))


def _bounded(space: SearchSpace, task: DegreePair, control: FloatArray) -> TaskResult:
    """Bounds a task at the best plan's time. On listed downsets what takes least comes first: even prices, for graphs
    of many layers; good prices; the cheapest borders by these; then prices for ever fewer stages. Shortest ways over
    the cheapest borders, which take longest, come last, and only if the stages of plans are not listed. Where the bound
    is near, only graphs of many layers need them."""
    borders, is_listed = task.borders, space.graph is None and np.isfinite(control[0]) and not task.has_kinds
    if not is_listed:
        found = TaskResult(task.lower_s, prices=task.prices)
        return found if borders is None else _bounded_by_borders(space, task, borders, control)
    upper_s = float(control[0])
    least_s = max(task.lower_s, _least_by_even_s(space, task, control))
    if least_s == np.inf:
        return TaskResult(np.inf)
    prices = task.prices or _find_prices(space, task, upper_s * (1.0 + TIE))
    least_s = max(least_s, _least_by_prices_s(space, task, prices, control, LITTLE_WORK))
    if prices is None or least_s == np.inf or not space.is_large:
        return TaskResult(least_s, prices=prices)
    if borders is not None:
        least_s = max(least_s, borders.quick_s(space.tables, task.arrays, prices, least_s, upper_s))
        if least_s == np.inf:
            return TaskResult(np.inf, prices=prices, proved_s=_proved_s(np.inf, upper_s))
    priced = replace(task, prices=prices, lower_s=least_s)
    if task.stand_ins is not None and (by_few_s := _least_by_stand_ins_s(space, priced, task.stand_ins, control)) > 0.0:
        least_s = max(least_s, by_few_s)
        return TaskResult(least_s, prices=prices, proved_s=min(least_s, upper_s))
    raised_s, prices = _raised(space, priced, least_s, control)
    is_near = upper_s <= least_s * _FAR and not space.has_many_layers
    if borders is not None and raised_s == least_s and not is_near:
        return _bounded_by_borders(space, priced, borders, control)
    return TaskResult(raised_s, prices=prices)


def _raised(
    space: SearchSpace, task: DegreePair, lower_s: float, control: FloatArray
) -> tuple[float, PathPrices | None]:
    """Raises a bound that is far from the best plan's time: halves the range between them, by good prices for plans up
    to a time in the middle, until the bound is near or such plans may have too many stages. Also returns the last
    prices."""
    low_s, high_s, whole = lower_s, float(control[0]), space.whole(task)
    while whole is not None and high_s > low_s * _FAR:
        middle_s = 0.5 * (low_s + high_s)
        left = space.tightened(whole, task, np.array([middle_s, control[1]]), RAISING_WORK)
        if left is None:
            break
        low_s, high_s = (middle_s, high_s) if left.is_empty else (max(low_s, left.least_s), middle_s)
        task = replace(task, prices=left.prices)
    return low_s, task.prices


def _least_by_stand_ins_s(space: SearchSpace, task: DegreePair, stand_ins: StandIns, control: FloatArray) -> float:
    """Returns a bound by borders that stand in for others; inf if no plan takes at most control[0], 0 if it would take
    too long. Where plans of that time have too many tails, lower times are tried."""
    bound = StandInBound.of(stand_ins, space.tables, task.arrays, task.ahead)
    for share in _SHARES_OF_TIME:
        most_s = share * float(control[0])
        found = bound.within(task.prices, most_s, MUCH_WORK, control)
        if found is None:
            return 0.0
        listed, free = found
        least_s = np.inf
        if not listed.is_empty:
            within = np.array([most_s, control[1]])
            least_s, _ = _least_rounded_s(listed, replace(task, arrays=bound.task, lower_s=0.0), within, free)
        if least_s > 0.0:
            return min(least_s, most_s) if share < 1.0 else least_s
    return 0.0


def _quickly_bounded(space: SearchSpace, task: DegreePair, control: FloatArray) -> TaskResult:
    """Bounds all plans of the task, whichever downsets the space has, from even prices on, which are there at once."""
    borders, upper_s, even = task.borders, float(control[0]), even_prices(task.arrays)
    if borders is None or even is None:
        return TaskResult(task.lower_s)
    least_s = borders.quick_s(space.tables, task.arrays, even, task.lower_s, upper_s)
    return TaskResult(least_s, proved_s=_proved_s(least_s, upper_s))


def _proved_s(least_s: float, upper_s: float) -> float:
    """Returns the bound that is proved for all plans of a task. least_s: one for plans of at most ``upper_s``. If it is
    above that by more than rounding, the task has no plan as fast as the best one, either."""
    return upper_s * (1.0 + _NO_TIE) if least_s > upper_s * (1.0 + PROOF) else min(least_s, upper_s)


def _bounded_by_borders(space: SearchSpace, task: DegreePair, borders: BorderBound, control: FloatArray) -> TaskResult:
    """Bounds all plans of the task, whichever downsets the space has, from good prices on."""
    upper_s = float(control[0])
    prices = task.prices or _find_prices(space, task) or even_prices(task.arrays)
    if prices is None:
        return TaskResult(task.lower_s)
    least_s = prices.bound_s
    if least_s <= upper_s * (1.0 + TIE):
        least_s = max(
            least_s,
            borders.least_s(
                space.tables, task.arrays, prices, task.lower_s, upper_s, partial(_is_asked_to_stop, control)
            ),
        )
    lower_s = np.inf if least_s > upper_s else least_s
    return TaskResult(lower_s, prices=prices, proved_s=_proved_s(least_s, upper_s))


def _least_by_even_s(space: SearchSpace, task: DegreePair, control: FloatArray) -> float:
    """Returns a bound by even prices; 0 if it would take longer than the first states."""
    if not space.is_soon_bounded(task):
        return 0.0
    return space.least_s(task, even_prices(task.arrays), control, LITTLE_WORK)


def _least_by_prices_s(
    space: SearchSpace, task: DegreePair, prices: PathPrices | None, control: FloatArray, most_work: int = MUCH_WORK
) -> float:
    """Returns a bound by prices; inf if no plan takes at most control[0]."""
    if prices is not None and prices.bound_s > control[0] * (1.0 + TIE):
        return np.inf
    return space.least_s(task, prices, control, most_work)


def _find_prices(space: SearchSpace, task: DegreePair, most_s: float = np.inf) -> PathPrices | None:
    from piper_ray.engine.flush.position_program import path_prices  # HiGHS is loaded where it is needed

    return path_prices(space.tables, task.arrays, most_s)


def _run_priced(space: SearchSpace, task: DegreePair, control: FloatArray, effort: TaskEffort) -> TaskResult:
    """Searches a task on the downsets that prices leave."""
    proves = effort in PROOFS
    if task.prices is not None and task.prices.bound_s > control[0] * (1.0 + TIE):
        return TaskResult(np.inf, proved_s=task.prices.bound_s)
    try:
        listed, proved_s = space.within(task, control, partial(_check, control))
    except TooManyDownsets:
        return TaskResult(task.lower_s, left_open=StoppedBy.TOO_MANY_DOWNSETS)
    except _Stopped:
        return TaskResult(task.lower_s)
    if listed is None:
        return TaskResult(np.inf, proved_s=proved_s)
    if listed.is_empty:
        return TaskResult(np.inf, prices=listed.prices)
    may_round = effort is TaskEffort.ROUNDED and 0.0 < control[0] < np.inf
    most_states = _SOME_STATES if may_round else _MOST_STATES
    status, states = _tails(listed, task, _NO_LEVELS, most_states, control, follows_all=proves)
    if status == TOO_MANY and may_round:
        least_s, rounded = _least_rounded_s(listed, task, control)
        left_open = None if least_s == np.inf else StoppedBy.TOO_MANY_STATES
        kept = len(states.origin) + rounded
        return TaskResult(least_s, kept, left_open=left_open, prices=listed.prices, is_rounded=left_open is not None)
    return replace(_completed(listed, task, status, states, control, proves), prices=listed.prices)


def _least_rounded_s(
    listed: ListedTables, task: DegreePair, control: FloatArray, free: FreeStages = NO_FREE_STAGES
) -> tuple[float, int]:
    """Returns a bound on plans that take less than control[0], by tails whose figures are rounded down, on ever finer
    grids; inf: there is no such plan. Also returns the number of their states. free: as in ``tails``."""
    arrays, least_s, kept = task.arrays, task.lower_s, 0
    often = [times_in_batch(arrays.schedule, arrays.microbatches, figure) for figure in range(FIGURES)]
    counted = arrays.most_stages * np.array([*often, 1.0])
    for share in _ROUNDED_SHARES:
        grid_s = share * float(control[0]) / counted
        status, states = _tails(listed, task, _NO_LEVELS, _SOME_ROUNDED_STATES, control, grid_s=grid_s, free=free)
        kept += len(states.origin)
        if status != FINISHED:
            break
        least_s = max(least_s, best_state(arrays, states, listed.tables.bits.shape[0])[1])
        if least_s == np.inf:
            break
    return least_s, kept


def _completed(
    listed: ListedTables, task: DegreePair, status: int, states: TailArrays, control: FloatArray, proves: bool
) -> TaskResult:
    """Makes a plan from the task's tails, and the proof that none is better. status, states: the result of
    ``_tails``."""
    kept, levels = len(states.origin), _NO_LEVELS
    if status != FINISHED:
        return TaskResult(task.lower_s, kept, left_open=None if status == STOPPED else StoppedBy.TOO_MANY_STATES)
    tables, downsets = listed.tables, listed.tables.bits.shape[0]
    state, lower_s = best_state(task.arrays, states, downsets)
    if state < 0:
        return TaskResult(np.inf, kept)
    found = _chosen_well(tables, task.arrays, best_stages(states, state), is_exact=proves)
    control[0] = min(control[0], found.value_s)
    looked_through, by_levels = False, _BY_LEVELS[task.arrays.schedule]
    for most_nodes in (_FEW_NODES, _MOST_NODES):
        if lower_s >= control[0] * (1.0 - PROOF):
            return TaskResult(np.inf, kept, looked_through, found)
        if not proves:
            return TaskResult(lower_s, kept, found=found)
        if looked_through and by_levels:
            # The tails did not include what stages in front add to the warm-up. So they are made again, with levels of
            # that.
            levels = _levels(found)
            status, states = _tails(listed, task, levels, _MOST_STATES, control)
            kept += len(states.origin)
            if status != FINISHED:
                break
            state, least_s = best_state(task.arrays, states, downsets)
            lower_s = max(lower_s, least_s)
            if state >= 0:
                found = _better(found, _chosen_well(tables, task.arrays, best_stages(states, state)))
                control[0] = min(control[0], found.value_s)
        looked_through = True
        status, least_s, better, stages = close_gap(tables, task.arrays, levels, states, most_nodes, control)
        lower_s = max(lower_s, least_s)
        if better:
            found = _better(found, choose(tables, task.arrays, stages))
            control[0] = min(control[0], found.value_s)
        if status != TOO_MANY and not (status == TOO_LONG and by_levels):
            break
    if lower_s >= control[0] * (1.0 - PROOF):
        return TaskResult(np.inf, kept, looked_through, found)
    left_open = {FINISHED: StoppedBy.CHOICES_MERGED, STOPPED: None}.get(status, StoppedBy.TOO_MANY_PLANS)
    return TaskResult(lower_s, kept, looked_through, found, left_open)


def _tails(
    listed: ListedTables,
    task: DegreePair,
    levels: FloatArray,
    most_states: int,
    control: FloatArray,
    *,
    follows_all: bool = True,
    grid_s: FloatArray = _UNROUNDED,
    free: FreeStages = NO_FREE_STAGES,
) -> tuple[int, TailArrays]:
    tables, ahead, most_tails, bounds, _ = listed
    found: tuple[int, TailArrays] = tails(
        tables, task.arrays, ahead, most_tails, levels, grid_s, bounds, free, most_states, follows_all, control
    )
    return found


def _is_asked_to_stop(control: FloatArray) -> bool:
    return bool(control[1] != 0.0)


def _check(control: FloatArray) -> None:
    if _is_asked_to_stop(control):
        raise _Stopped


def call_of(
    space: SearchSpace, task: DegreePair, bound_s: float, effort: TaskEffort = TaskEffort.PROOF, known_s: float = np.inf
) -> Call:
    """Returns the call of ``run_task`` for a worker, with the task as its key. bound_s: a time that plans must beat."""
    d, *degrees = task.degrees
    cells = () if task.borders is None else task.borders.cells
    shared_bytes = sum(array.nbytes for array in (*space.tables, *task.ahead, *cells))
    return Call(
        task,
        _run_sent,
        (space, task.ahead, task.borders, task.stand_ins),
        (
            _Sent(task.order, task.tensor_parallel_degrees, task.mixes, task.arrays, task.lower_s, task.prices),
            effort,
            known_s,
        ),
        f"the search of d={d} t={','.join(map(str, degrees))}",
        bound_s,
        PROCESS_BYTES + 2.0 * shared_bytes + _STATES_BYTES,
    )


class _Sent(NamedTuple):
    """The fields of a ``DegreePair`` that it does not share with others."""

    order: int
    degrees: tuple[int, ...]
    mixes: MixLimits
    arrays: FlushTask
    lower_s: float
    prices: PathPrices | None


def _run_sent(
    space: SearchSpace,
    ahead: AheadArrays,
    borders: BorderBound | None,
    stand_ins: StandIns | None,
    sent: _Sent,
    effort: TaskEffort,
    known_s: float,
    control: FloatArray,
) -> TaskResult:
    """Calls ``run_task`` with a task put together from its shared and its own fields."""
    task = DegreePair(
        sent.order, sent.degrees, sent.mixes, frozen(sent.arrays), ahead, sent.lower_s, sent.prices, borders, stand_ins
    )
    return run_task(space, task, control, effort, known_s)


def _levels(found: ChosenStages) -> FloatArray:
    """Returns float64[l, 2]: zero, then even levels from 0.4 to 1.1 of a plan's largest forward and backward
    seconds."""
    shares = np.linspace(_LEAST_LEVEL, _MOST_LEVEL, _LEVELS)
    return np.concatenate([np.zeros((1, 2)), shares[:, None] * found.seconds[:, :2].max(axis=0)])


def _better(one: ChosenStages, other: ChosenStages) -> ChosenStages:
    return other if other.value_s < one.value_s else one


@dataclass(frozen=True)
class TaskMemo:
    """Results of tasks kept in one solve's checkpoint, whose identity names the solve."""

    checkpoint: Checkpoint

    def result(self, task: DegreePair, cutoff_s: float) -> TaskResult | None:
        """Returns the recorded result of a search for plans of at most ``cutoff_s`` seconds a batch, or None."""
        found: Any = self.checkpoint.result(_key(task, cutoff_s))
        return None if found is None else _result(task.arrays, found)

    def record(self, task: DegreePair, cutoff_s: float, result: TaskResult) -> None:
        """Records a result. Raises CheckpointLost if another solve has taken the checkpoint over."""
        self.checkpoint.record_result(_key(task, cutoff_s), _row(result))


def _key(task: DegreePair, cutoff_s: float) -> str:
    d, *degrees = task.degrees
    fewest = [found.start for found in task.mixes.of_kinds]
    from_stages = f" p={','.join(map(str, fewest))}" if any(fewest) else ""
    return f"d={d} t={','.join(map(str, degrees))}{from_stages} {float(cutoff_s).hex()}"


def _row(result: TaskResult) -> dict[str, object]:
    found = result.found
    return {
        "lower_s": float(result.lower_s).hex(),
        "states": int(result.states),
        "looked_through": bool(result.looked_through),
        "left_open": None if result.left_open is None else result.left_open.value,
        "found": None if found is None else _stages_row(found),
        "proved_s": float(result.proved_s).hex(),
    }


def _stages_row(found: ChosenStages) -> dict[str, object]:
    return {
        "batch_s": float(found.value_s).hex(),
        "variant": found.variant.tolist(),
        "options": [of_stage.tolist() for of_stage in found.options],
        "seconds": [[value.hex() for value in row] for row in found.seconds.tolist()],
    }


def _result(task: FlushTask, row: Any) -> TaskResult:
    left_open, found = row["left_open"], row["found"]
    return TaskResult(
        float.fromhex(row["lower_s"]),
        row["states"],
        row["looked_through"],
        None if found is None else _chosen_stages(task, found),
        None if left_open is None else StoppedBy(left_open),
        float.fromhex(row["proved_s"]),
    )


def _chosen_stages(task: FlushTask, row: Any) -> ChosenStages:
    return ChosenStages(
        task,
        np.array(row["variant"], np.int64),
        tuple(np.array(of_stage, np.int64).reshape(-1, 2) for of_stage in row["options"]),
        np.array([[float.fromhex(value) for value in values] for values in row["seconds"]]),
        float.fromhex(row["batch_s"]),
    )
