"""The best of equal runs under a schedule that flushes each batch: simulated, in the order of a bound from below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from piper_ray.evaluate import MEMORY_TOLERANCE, evaluate
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.planners.run_costs import Floats, Integers, RunCosts, UniformChoice
from piper_ray.simulate.actions import ActionKind, flush_lists, stage_of_chunk

_ROUNDING = 1e-9
"""Relative. Sums of the same seconds in another order differ by less."""

_LARGEST = 2**31
"""Of a digit's place: with as many times as there are microbatches it is still an int64."""

_SPLIT = frozenset({ScheduleName.ZB_H1, ScheduleName.ZB_V, ScheduleName.DUALPIPE_V})
"""Schedules in which a rank may end with gradients of weights, after its last word to the rank before it."""


@dataclass(frozen=True)
class GridPoint:
    """A point of the grid. lower_s: no step of it takes less. starts: where in the order its stages begin."""

    lower_s: float
    devices: int
    stages: int
    starts: Integers
    degree: int
    choice: UniformChoice
    fits: Callable[[], bool]


def candidates(
    costs: RunCosts, choices: Sequence[UniformChoice], layouts: Iterable[Integers], degrees: Integers
) -> Iterator[GridPoint]:
    """All that the devices hold, in no order. layouts: of stages; degrees: int64[..], those that d may be."""
    instance = costs.instance
    schedule = Schedule.first_of(instance.schedule)
    for starts in layouts:
        ranks, over = divmod(len(starts), schedule.v)
        if over:
            continue
        stages_of = [[stage_of_chunk(schedule, ranks, rank, c) for c in range(schedule.v)] for rank in range(ranks)]
        passes_s: dict[float, tuple[Floats, Floats]] = {}
        weights, activation, fixed, shared = costs.held(starts)
        for i, choice in enumerate(choices):
            for d in map(int, degrees):
                devices = ranks * d * choice.degree
                in_range = choice.least_data_parallel_degree <= d <= choice.most_data_parallel_degree
                if devices > instance.devices or not in_range:
                    continue
                microbatches = instance.microbatches // d
                cluster = instance.cluster.holding(devices)
                between = cluster.bandwidth_bytes_per_s if schedule.v == 1 else np.inf  # chunks of a rank: free
                if between not in passes_s:
                    passes_s[between] = costs.passes_s(starts, between)
                forward_s, backward_s = passes_s[between]
                replicas = cluster.replicas_link(d, choice.degree)
                sync_s = 4.0 * (d - 1) / d * weights[i] / replicas.bandwidth_bytes_per_s
                lower_s = _lower_s(schedule, stages_of, forward_s[i], backward_s[i], sync_s, microbatches)

                def fits(
                    stages_of: list[list[int]] = stages_of,
                    microbatches: int = microbatches,
                    activation: Floats = activation[i],
                    fixed: Floats = fixed[i] + shared[i] / d,
                ) -> bool:
                    limit = instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)
                    return _peak_bytes(schedule, stages_of, microbatches, activation, fixed) <= limit

                yield GridPoint(lower_s, devices, len(starts), starts, d, choice, fits)


def best_simulated(
    instance: Instance, restrictions: Restrictions, found: Iterable[GridPoint], plan_of: Callable[[GridPoint], Plan]
) -> tuple[GridPoint | None, int]:
    """The candidate whose step is shortest, then of the fewest devices and stages; and how many candidates there were.

    One is simulated only if it keeps the restrictions and its bound is no more than the best step so far.
    """
    schedule = Schedule.first_of(instance.schedule)
    ordered = sorted(found, key=lambda x: (x.lower_s, x.devices, x.stages))
    best: GridPoint | None = None
    least: tuple[float, int, int] | None = None
    for candidate in ordered:
        if least is not None and candidate.lower_s * (1.0 - _ROUNDING) > least[0] * instance.microbatches:
            break
        try:
            if not candidate.fits():
                continue
            plan = plan_of(candidate)
            if any(restrictions.violations(instance, plan, schedule)):
                continue
            value_s = evaluate(instance, plan).time_per_sample_s
        except (InvalidPlan, UsageError):  # too much memory by a hair; too few microbatches for the schedule
            continue
        key = value_s, candidate.devices, candidate.stages
        if least is None or key < least:
            best, least = candidate, key
    return best, len(ordered)


def _lower_s(
    schedule: Schedule,
    stages_of: Sequence[Sequence[int]],
    forward_s: Floats,
    backward_s: Floats,
    sync_s: Floats,
    microbatches: int,
) -> float:
    """Each rank waits for one forward pass of all stages before its first, does all its passes, and sums gradients.

    Or its last backward pass goes back through the stages before it.
    """
    ahead_s = np.concatenate([[0.0], np.cumsum(forward_s)])
    behind_s = np.concatenate([[0.0], np.cumsum(backward_s)]) * (schedule.name not in _SPLIT)
    whole_s = forward_s + backward_s
    found = 0.0
    for held in stages_of:
        first = min(held)
        done_s = ahead_s[first] + microbatches * float(whole_s[list(held)].sum())
        found = max(found, done_s + float(sync_s[list(held)].sum()), done_s + behind_s[first])
    return found


def _peak_bytes(
    schedule: Schedule, stages_of: Sequence[Sequence[int]], microbatches: int, activation: Floats, fixed: Floats
) -> float:
    """Of the rank that holds most at a time: its list of passes alone says how much of each chunk it holds when."""
    ranks = len(stages_of)
    most = 0.0
    for rank, stages in enumerate(stages_of):
        held = held_on(schedule, ranks, rank, microbatches)
        most = max(most, float(fixed[list(stages)].sum() + (held @ activation[list(stages)]).max()))
    return most


@lru_cache(maxsize=2)
def _lists(schedule: Schedule, ranks: int, microbatches: int) -> list[Integers]:
    return flush_lists(schedule, ranks, microbatches)


@lru_cache(maxsize=10_000)
def held_on(schedule: Schedule, ranks: int, rank: int, microbatches: int) -> Integers:
    """int64[.., v]: microbatches of each chunk in flight on a rank, as far as that differs."""
    if schedule.name is ScheduleName.GPIPE:
        return np.array([[microbatches]])
    if schedule.name is ScheduleName.ONE_F_ONE_B:
        return np.array([[min(microbatches, ranks - rank)]])
    actions = _lists(schedule, ranks, microbatches)[rank]
    change = np.where(actions[:, 0] == ActionKind.F, 1, -1) * (actions[:, 0] != ActionKind.I)
    in_chunk = actions[:, 1:2] == np.arange(schedule.v)
    held = np.cumsum(change[:, None] * in_chunk, axis=0)
    place = (microbatches + 1) ** np.arange(schedule.v, dtype=object)  # of digits of a number that stands for a row
    if place[-1] > _LARGEST:
        return np.unique(held, axis=0)
    return held[np.unique(held @ place.astype(np.int64), return_index=True)[1]]
