"""Kernels: the plans of one (d, t) in the order of their bounds, until the bound meets the best one's time.

A tail's figures leave out what stages in front of it add to its warm-up, so the best state's time may be too low. Here
the stages are fixed from the front, where all is known, and the tails bound the rest: those of the highest level that
some stage in front reaches.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import twice, twice_rows
from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.bounds import is_subset
from piper_ray.engine.kernels.flush_choices import EXACT, MANY
from piper_ray.engine.kernels.flush_mixes import ends_of, mix_behind
from piper_ray.engine.kernels.flush_paths import Figures, StageSeconds, batch_s, step_s, with_stage
from piper_ray.engine.kernels.flush_stages import (
    NO_ROW,
    front_rows,
    in_flight,
    least_figures,
    least_memory_bytes,
    priced_time_s,
    quickest_row,
)
from piper_ray.engine.kernels.flush_states import FINISHED, STOPPED, TOO_MANY, figures_of, level_of
from piper_ray.engine.kernels.flush_types import (
    NO_CHOICE,
    ON_FRONT,
    ONE_F_ONE_B,
    ORIGIN,
    SUM,
    FlushTables,
    FlushTask,
    TailArrays,
)
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey

TOO_LONG = 3

_MOST_CHOICES = 5_000_000
"""Partial choices of all fronts: some seconds. What takes longer than that hardly moves the bound."""

_ENOUGH = 1e-10
"""Relative: plans that are faster than the best one by no more than this are not sought."""


class StageList(NamedTuple):
    """The stages of one plan, front to back."""

    outer: IndexArray  # int64[p]: stage k is downset outer[k] without inner[k]
    inner: IndexArray
    variant: IndexArray
    choice: IndexArray
    seconds: FloatArray  # float64[p, 3]: forward, backward, synchronisation


@kernel
def best_stages(states: TailArrays, state: int) -> StageList:
    """Returns the stages of the plan of a state of all layers."""
    origin = states.origin
    p = origin[state, ORIGIN.stages]
    stages = _empty_list(p)
    for k in range(p):
        below = origin[state, ORIGIN.below]
        stages.outer[k], stages.inner[k] = origin[state, ORIGIN.downset], origin[below, ORIGIN.downset]
        stages.variant[k], stages.choice[k] = origin[state, ORIGIN.variant], origin[state, ORIGIN.choice]
        for column in range(3):
            stages.seconds[k, column] = states.stage[state, column]
        state = below
    return stages


@kernel
def best_state(task: FlushTask, states: TailArrays, downsets: int) -> tuple[int, float]:
    """Returns the state of all layers with the least figures, and the batch by these; -1 and inf if there is none."""
    top = downsets - 1
    best, least_s = -1, np.inf
    for cell in range(top, task.ends * downsets, downsets):
        for s in range(states.start[cell], states.start[cell] + states.kept[cell]):
            found_s = batch_s(task.schedule, task.microbatches, figures_of(states.figures, s))
            if found_s < least_s:
                best, least_s = s, found_s
    return best, least_s


@inner_kernel
def _empty_list(p: int) -> StageList:
    return StageList(
        np.zeros(p, np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64), np.zeros((p, 3))
    )


@kernel
def close_gap(
    tables: FlushTables,
    task: FlushTask,
    levels: FloatArray,
    states: TailArrays,
    most_nodes: int,
    control: FloatArray,
) -> tuple[int, float, bool, StageList]:
    """Searches for a plan that takes less than control[0], which it lowers when it finds one.

    Returns FINISHED, STOPPED because control[1] is not zero, TOO_MANY for ``most_nodes``, or TOO_LONG; a lower bound
    on plans of these degrees that take less than control[0] (inf: there is none); whether a plan was found, and the
    best one.
    """
    m = tables.bits.shape[0]
    schedule, microbatches = task.schedule, task.microbatches
    room = 4096
    # A node is a plan's first stages, of which the last one is the node's own. Its origin: ORIGIN.stages are those
    # behind it, ORIGIN.downset theirs, ORIGIN.below the node before it.
    bounds, seconds = np.empty(room), np.empty((room, 4))  # forward, backward, synchronisation, both passes
    origin = np.empty((room, len(ORIGIN)), np.int64)
    known = np.empty(room, np.bool_)  # whether all choices so far are real ones
    open_nodes = [(np.inf, 0)]  # by bound; among equal bounds the latest node first: numbers are negative
    open_nodes.clear()
    nodes = 0
    unresolved = np.inf
    found, best_node = False, -1
    status = FINISHED
    path = np.empty((task.most_stages + 1, 6))
    one = np.empty(4)
    choices = 0

    top = m - 1
    for cell in range(top, task.ends * m, m):
        for s in range(states.start[cell], states.start[cell] + states.kept[cell]):
            bound = batch_s(schedule, microbatches, figures_of(states.figures, s))
            p = states.origin[s, ORIGIN.stages]
            if nodes > 0 and origin[nodes - 1, ORIGIN.mix] == states.origin[s, ORIGIN.mix]:
                bounds[nodes - 1] = min(bounds[nodes - 1], bound)
                continue
            if nodes == room:
                bounds, known = twice(bounds), twice(known)
                seconds, origin = twice_rows(seconds), twice_rows(origin)
                room *= 2
            bounds[nodes], known[nodes] = bound, True
            _set_origin(origin, nodes, p, top, -1, -1, NO_CHOICE, states.origin[s, ORIGIN.mix])
            nodes += 1
    for node in range(nodes):
        heappush(open_nodes, (bounds[node], -node))

    while len(open_nodes) > 0:
        bound, number = open_nodes[0]
        node = -number
        if bound >= control[0] * (1.0 - _ENOUGH):
            open_nodes.clear()
            break
        if control[1] != 0.0:
            status = STOPPED
            break
        if nodes > most_nodes:
            status = TOO_MANY
            break
        if choices > _MOST_CHOICES:
            status = TOO_LONG
            break
        heappop(open_nodes)
        depth = _path_to(node, origin, seconds, path)
        if origin[node, ORIGIN.stages] == 0:
            exact_s = step_s(schedule, microbatches, path[:depth, 0], path[:depth, 1], path[:depth, 2])
            if not known[node]:
                unresolved = min(unresolved, max(bound, exact_s))
            elif exact_s < control[0] * (1.0 - _ENOUGH):
                control[0] = exact_s
                found, best_node = True, node
            continue
        i, q = origin[node, ORIGIN.downset], origin[node, ORIGIN.stages] - 1
        y = in_flight(schedule, microbatches, q)
        for j in range(i):
            if control[1] != 0.0:
                heappush(open_nodes, (bound, number))  # not all of its stages are there
                break
            if not is_subset(tables.bits[j], tables.bits[i]):
                continue
            for r in task.variants:
                if tables.sums[r, i, SUM.missing] != tables.sums[r, j, SUM.missing]:
                    continue
                stage = StageKey(i, j, r)
                mix = mix_behind(origin[node, ORIGIN.mix], r, task)
                if mix < 0 or states.kept[ends_of(mix, task) * m + j] == 0:  # then also none with a promise
                    continue
                if least_memory_bytes(stage, y, tables, task) > task.memory_bytes[r]:
                    continue
                least = least_figures(stage, tables, task)
                if microbatches * least.time_s >= control[0]:
                    continue
                time_s = priced_time_s(stage, y, least, tables, task)
                _put(path, depth, np.array([least.forward_s, least.backward_s, least.sync_s, time_s]))
                if _with_tail_s(task, levels, states, path, depth, (j, mix, q, m)) >= control[0] * (1.0 - _ENOUGH):
                    continue
                most_s = control[0] / microbatches
                if quickest_row(stage, y, most_s, True, least, tables, task, one) == NO_ROW:
                    continue
                _put(path, depth, np.array([least.forward_s, least.backward_s, least.sync_s, one[3]]))
                if _with_tail_s(task, levels, states, path, depth, (j, mix, q, m)) >= control[0] * (1.0 - _ENOUGH):
                    continue
                exact, rows, partial = front_rows(stage, y, most_s, MANY, least, one, tables, task)
                choices += partial
                for row in range(rows.shape[0]):
                    _put(path, depth, rows[row])
                    child = max(bound, _with_tail_s(task, levels, states, path, depth, (j, mix, q, m)))
                    if child >= control[0] * (1.0 - _ENOUGH):
                        continue
                    if nodes == room:
                        bounds, known = twice(bounds), twice(known)
                        seconds, origin = twice_rows(seconds), twice_rows(origin)
                        room *= 2
                    bounds[nodes], known[nodes] = child, known[node] and exact == EXACT
                    _set_origin(origin, nodes, q, j, node, r, ON_FRONT, mix)
                    for column in range(4):
                        seconds[nodes, column] = rows[row, column]
                    heappush(open_nodes, (child, -nodes))
                    nodes += 1
    lower = unresolved
    if len(open_nodes) > 0:
        lower = min(lower, open_nodes[0][0])
    stages = _empty_list(0)
    if found:
        depth = _path_to(best_node, origin, seconds, path)
        stages = _empty_list(depth)
        node = best_node
        for k in range(depth - 1, -1, -1):
            before = origin[node, ORIGIN.below]
            stages.inner[k], stages.outer[k] = origin[node, ORIGIN.downset], origin[before, ORIGIN.downset]
            stages.variant[k], stages.choice[k] = origin[node, ORIGIN.variant], origin[node, ORIGIN.choice]
            for column in range(3):
                stages.seconds[k, column] = seconds[node, column]
            node = before
    return status, lower, found, stages


@leaf_kernel
def _set_origin(
    origin: IndexArray, node: int, stages: int, downset: int, below: int, variant: int, choice: int, mix: int
) -> None:
    origin[node, ORIGIN.stages], origin[node, ORIGIN.downset], origin[node, ORIGIN.below] = stages, downset, below
    origin[node, ORIGIN.variant], origin[node, ORIGIN.choice] = variant, choice
    origin[node, ORIGIN.mix] = mix


@inner_kernel
def _with_tail_s(
    task: FlushTask,
    levels: FloatArray,
    states: TailArrays,
    path: FloatArray,
    depth: int,
    tail: tuple[int, int, int, int],
) -> float:
    """Returns a bound on the batch with stages 0 .. depth as in ``path``, and any tail behind them. tail: its downset,
    its mix, its number of stages, and the number of downsets."""
    j, mix, stages, m = tail
    found = np.inf
    cell = (level_of(levels, path[depth, 4], path[depth, 5]) * task.ends + ends_of(mix, task)) * m + j
    for s in range(states.start[cell], states.start[cell] + states.kept[cell]):
        if states.origin[s, ORIGIN.mix] == mix:
            found = min(found, _completed_s(task, path, depth + 1, figures_of(states.figures, s), stages))
    return found


@inner_kernel
def _completed_s(task: FlushTask, path: FloatArray, depth: int, tail: Figures, stages: int) -> float:
    """Returns a bound on the batch with stages 0 .. depth - 1 as in ``path``, and a tail of ``tail`` behind them."""
    for k in range(depth - 1, -1, -1):
        f, b, sync, both, slowest_f, slowest_b = path[k, 0], path[k, 1], path[k, 2], path[k, 3], path[k, 4], path[k, 5]
        behind = stages + depth - 1 - k
        seconds = StageSeconds(both, f, b, sync, slowest_f, slowest_b)
        tail = with_stage(task.schedule, task.microbatches, behind, seconds, tail)
    least = batch_s(task.schedule, task.microbatches, tail)
    return max(least, tail[2] + path[0, 2]) if task.schedule == ONE_F_ONE_B else least


@inner_kernel
def _path_to(node: int, origin: IndexArray, seconds: FloatArray, path: FloatArray) -> int:
    """Writes the stages up to the node, front to back. Returns their number."""
    depth, at = 0, node
    while origin[at, ORIGIN.below] >= 0:
        depth += 1
        at = origin[at, ORIGIN.below]
    at = node
    for k in range(depth - 1, -1, -1):
        for column in range(4):
            path[k, column] = seconds[at, column]
        at = origin[at, ORIGIN.below]
    for k in range(depth):
        _put(path, k, path[k, :4])
    return depth


@inner_kernel
def _put(path: FloatArray, k: int, seconds: FloatArray) -> None:
    """Writes stage k, with the largest forward and backward seconds of stages 0 .. k."""
    for column in range(4):
        path[k, column] = seconds[column]
    path[k, 4] = max(seconds[0], path[k - 1, 4]) if k > 0 else seconds[0]
    path[k, 5] = max(seconds[1], path[k - 1, 5]) if k > 0 else seconds[1]
