"""Kernel: the staircase of least times over a range of devices, or of bounds on the sum of data-parallel degrees.

One evaluation at a threshold finds the fewest devices; its states carry the time of their slowest stage too, least
among equal states, so that it also finds how fast so few devices can be. The next evaluation is just below that time:
one for each step of the staircase, as a rule. For small lattices, whose stages can be listed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel
from piper_ray.cost.stage import in_flight, one_device_s
from piper_ray.engine.kernels.bounds import first_divisor_by_memory, first_divisor_by_time
from piper_ray.engine.kernels.front import first_above, put, span_dominated
from piper_ray.engine.kernels.selection import StepCache
from piper_ray.engine.kernels.stages import Candidate, ChoiceCache, StageArrays, choice_slot, settle_choice
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey, StageWork, Tables

INFEASIBLE, FEASIBLE, NO_ROOM, TOO_HARD = 0, 1, 2, 3
_TOO_HARD = -1  # in place of a number of states
_GUARD = 1e-9


class WorkBounds(NamedTuple):
    """What each downset takes at least: devices times seconds, and sum of data-parallel degrees times seconds."""

    device_work_s: FloatArray
    replica_work_s: FloatArray


class ValuedFronts(NamedTuple):
    """As FrontArrays, and for each state the time of its slowest stage: least of all that give the state."""

    start: IndexArray  # int64[m]
    states: IndexArray  # int64[m]
    devices: IndexArray  # int64[room]
    data_parallel_sum: IndexArray
    value_s: FloatArray
    # One downset's front while it grows; one entry more than there are sums.
    new_devices: IndexArray
    new_sum: IndexArray
    new_value_s: FloatArray


class State(NamedTuple):
    """Of one downset's plans: devices, sum of data-parallel degrees, and the time of the slowest stage."""

    devices: int
    data_parallel_sum: int
    value_s: float


class Within(NamedTuple):
    """What the plans of a downset may take, so that the rest can be completed."""

    threshold_s: float
    devices: int
    data_parallel_sum: int


class StageTables(NamedTuple):
    """What an evaluation reads, and what it remembers of TMPC choices."""

    tables: Tables
    stages: StageArrays
    work: WorkBounds
    steps: StepCache
    choices: ChoiceCache
    fronts: ValuedFronts


class CurveArrays(NamedTuple):
    """Brackets at rising positions: devices, or with ``by_sum`` bounds on the sum of data-parallel degrees.

    other_limit: bounds what the positions do not.
    """

    positions: IndexArray
    lower_s: FloatArray
    upper_s: FloatArray
    by_sum: bool
    other_limit: int


class Exactness(NamedTuple):
    """proof: relative, of a challenge below the bound. tolerance: relative, of stages above the threshold.

    resolution_s: less counts as nothing.
    """

    proof: float
    tolerance: float
    resolution_s: float


@kernel
def make_fronts(downsets: int, room: int, sums: int) -> ValuedFronts:
    """Room for ``room`` states of all downsets together."""
    return ValuedFronts(
        start=np.zeros(downsets, np.int64),
        states=np.zeros(downsets, np.int64),
        devices=np.empty(room, np.int64),
        data_parallel_sum=np.empty(room, np.int64),
        value_s=np.empty(room),
        new_devices=np.empty(sums + 2, np.int64),
        new_sum=np.empty(sums + 2, np.int64),
        new_value_s=np.empty(sums + 2),
    )


@leaf_kernel
def _is_beaten(fronts: ValuedFronts, size: int, state: State) -> bool:
    """Whether a state is as small in both and smaller in one, or the same and as fast."""
    at = first_above(fronts.new_sum, size, state.data_parallel_sum) - 1
    if at < 0 or fronts.new_devices[at] > state.devices:
        return False
    if fronts.new_devices[at] == state.devices and fronts.new_sum[at] == state.data_parallel_sum:
        return bool(fronts.new_value_s[at] <= state.value_s)
    return True


@leaf_kernel
def _insert(fronts: ValuedFronts, size: int, state: State) -> int:
    """Inserts a state that is not beaten, drops those it beats, and returns the new size."""
    at, end = span_dominated(fronts.new_devices, fronts.new_sum, size, state.devices, state.data_parallel_sum)
    put(fronts.new_devices, size, at, end, state.devices)
    put(fronts.new_sum, size, at, end, state.data_parallel_sum)
    put(fronts.new_value_s, size, at, end, state.value_s)
    return size + 1 - (end - at)


@leaf_kernel
def _limit(available: int, whole_s: float, own_s: float, threshold_s: float) -> int:
    """What a downset may take of the devices, or of the sum, so that the rest can be completed; 0: it takes more."""
    room = np.floor(available - min((whole_s - own_s) / threshold_s, 2.0**40) + _GUARD)
    return 0 if room + _GUARD < min(own_s / threshold_s, 2.0**40) else int(room)


@leaf_kernel
def evaluate_all(threshold_s: float, device_limit: int, sum_limit: int, known: StageTables) -> int:
    """Fills ``known.fronts`` for one threshold and limits; returns FEASIBLE, INFEASIBLE, NO_ROOM or TOO_HARD."""
    stages, work, fronts = known.stages, known.work, known.fronts
    last = stages.start.size - 2
    fronts.start[0], fronts.states[0] = 0, 1
    fronts.devices[0], fronts.data_parallel_sum[0], fronts.value_s[0] = 0, 0, 0.0
    used = 1
    for i in range(1, last + 1):
        fronts.start[i], fronts.states[i] = used, 0
        within = Within(
            threshold_s,
            _limit(device_limit, work.device_work_s[last], work.device_work_s[i], threshold_s),
            _limit(sum_limit, work.replica_work_s[last], work.replica_work_s[i], threshold_s),
        )
        if within.devices < 1 or within.data_parallel_sum < 1:
            continue
        size = 0
        for number in range(stages.start[i], stages.start[i + 1]):
            j = stages.inner[number]
            if fronts.states[j] == 0 or fronts.devices[fronts.start[j] + fronts.states[j] - 1] >= within.devices:
                continue
            for r in range(stages.work_s.shape[1]):
                if stages.work_s[number, r] < np.inf:
                    size = _extend(number, StageKey(i, j, r), size, within, known)
                    if size < 0:
                        return TOO_HARD
        if used + size > fronts.devices.size:
            return NO_ROOM
        for k in range(size):
            fronts.devices[used + k] = fronts.new_devices[k]
            fronts.data_parallel_sum[used + k] = fronts.new_sum[k]
            fronts.value_s[used + k] = fronts.new_value_s[k]
        fronts.states[i] = size
        used += size
    return FEASIBLE if fronts.states[last] > 0 else INFEASIBLE


@inlined_kernel
def _extend(number: int, stage: StageKey, size: int, within: Within, known: StageTables) -> int:
    """Adds the states with this first stage, listed under ``number``; returns the new size, or _TOO_HARD."""
    i, j, r = stage
    tables, fronts, choices = known.tables, known.fronts, known.choices
    costs, options, cluster = tables.costs, tables.options, tables.cluster
    divisors, threshold_s = cluster.divisors, within.threshold_s
    behind = fronts.start[j] + fronts.states[j]
    work = StageWork(known.stages.work_s[number, r], max(0.0, costs.resync_s[i, r] - costs.resync_s[j, r]))
    by_time = first_divisor_by_time(work.work_s, work.resync_s, threshold_s, cluster.divisor_at_least, divisors.size)
    by_time, end = max(by_time, cluster.first_divisor[r]), cluster.end_divisor[r]
    t = options.degree[r]
    if by_time >= end or fronts.devices[behind - 1] + t * divisors[by_time] > within.devices:
        return size
    d_by_time = divisors[by_time]
    least_s = one_device_s(work.work_s, work.resync_s, d_by_time) / d_by_time
    a_bytes, b_bytes = costs.least_a[i, r] - costs.least_a[j, r], costs.least_b[i, r] - costs.least_b[j, r]
    fast_a_bytes = costs.fast_a[i, r] - costs.fast_a[j, r]
    room_bytes = cluster.memory_bytes - (costs.fast_b[i, r] - costs.fast_b[j, r])
    shared_bytes, fast_shared_bytes = 0.0, 0.0
    if costs.least_shared.shape[0] > 0:
        shared_bytes = costs.least_shared[i, r] - costs.least_shared[j, r]
        fast_shared_bytes = costs.fast_shared[i, r] - costs.fast_shared[j, r]
    for later in range(fronts.start[j], behind):
        later_sum, later_s = fronts.data_parallel_sum[later], fronts.value_s[later]
        if later_sum + d_by_time > within.data_parallel_sum:
            break
        devices = fronts.devices[later] + t * d_by_time
        least = State(devices, later_sum + d_by_time, max(later_s, least_s))
        if devices > within.devices or _is_beaten(fronts, size, least):
            continue
        first = first_divisor_by_memory(a_bytes, b_bytes, shared_bytes, later_sum, cluster)
        for index in range(max(by_time, first), end):
            d = divisors[index]
            devices, total = fronts.devices[later] + t * d, later_sum + d
            used_s, budget_s = one_device_s(work.work_s, work.resync_s, d), threshold_s * d
            if (
                devices > within.devices
                or total > within.data_parallel_sum
                or _is_beaten(fronts, size, State(devices, total, max(later_s, used_s / d)))
            ):
                break
            if used_s > budget_s:  # the bound on d leaves a hair: a walk would find the same value for ever
                continue
            y = in_flight(later_sum, d)
            extra_s = 0.0
            if options.uniform[r] == 0 or fast_a_bytes * y + fast_shared_bytes / d > room_bytes:
                candidate = Candidate(number, stage, index, y)
                slot = choice_slot(candidate, tables, known.steps, choices)
                if used_s + choices.low_s[slot] > budget_s:
                    continue
                if used_s + choices.high_s[slot] > budget_s:
                    if not settle_choice(candidate, used_s, budget_s, slot, tables, choices):
                        return _TOO_HARD
                    if used_s + choices.high_s[slot] > budget_s:
                        continue
                extra_s = choices.high_s[slot]
            state = State(devices, total, max(later_s, (used_s + extra_s) / d))
            if not _is_beaten(fronts, size, state):
                size = _insert(fronts, size, state)
            break
    return size


@leaf_kernel
def best_state(known: StageTables, by_sum: bool) -> int:
    """Of V's states after a feasible evaluation: that of the fewest devices, or of the least sum."""
    fronts = known.fronts
    last = known.stages.start.size - 2
    return int(fronts.start[last] if by_sum else fronts.start[last] + fronts.states[last] - 1)


@leaf_kernel
def walk(
    curve: CurveArrays, at: int, end: int, known: StageTables, exactness: Exactness, reach: int, most: int
) -> tuple[int, int, int, int]:
    """Closes the brackets of positions[at:end] in turn, each by a challenge just below its upper bound.

    upper_s[at] must be a plan's. reach: how many positions ahead a challenge looks, at first 1. Stops after ``most``
    evaluations. Returns the first position that is still open, the status of the last evaluation, the number of
    evaluations, and the reach to go on with: calls of any length take the same way.
    """
    positions, lower_s, upper_s, by_sum, other_limit = curve
    done, status = 0, FEASIBLE
    while at < end and done < most:
        threshold_s = upper_s[at] * (1.0 - exactness.proof)
        if lower_s[at] >= threshold_s or upper_s[at] <= exactness.resolution_s:
            if at + 1 < end:
                upper_s[at + 1] = min(upper_s[at + 1], upper_s[at])
            at += 1
            continue
        limit = min(end - 1, at + reach)
        device_limit = other_limit if by_sum else positions[limit]
        sum_limit = positions[limit] if by_sum else other_limit
        keep_s = max(threshold_s * (1.0 + exactness.tolerance), exactness.resolution_s)
        status = evaluate_all(keep_s, device_limit, sum_limit, known)
        done += 1
        if status == INFEASIBLE:
            for k in range(at, limit + 1):
                lower_s[k] = max(lower_s[k], threshold_s)
                upper_s[k] = min(upper_s[k], upper_s[at])
            reach *= 2
        elif status == FEASIBLE:
            state = best_state(known, by_sum)
            place = known.fronts.data_parallel_sum[state] if by_sum else known.fronts.devices[state]
            found = at + np.searchsorted(positions[at:end], place)
            for k in range(at, found):
                lower_s[k] = max(lower_s[k], threshold_s)
                upper_s[k] = min(upper_s[k], upper_s[at])
            upper_s[found] = min(upper_s[found], known.fronts.value_s[state])
            if found > at:
                reach = found - at
        else:
            break
    return at, status, done, reach
