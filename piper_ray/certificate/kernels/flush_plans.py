"""Kernels: whether a plan with one d and one t takes less than a limit under a flush.

First come the tails that such plans can have (``flush_states``). If these make up plans, the plans are enumerated front
to back. The stages in front of a tail are then known, and so is what they add to its paths: the tail's figures with
them are a closer bound. A plan that remains at its end is simulated pass by pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints, is_inside
from piper_ray.certificate.kernels.flush_mixes import ends_whole, stages_of, taken_off
from piper_ray.certificate.kernels.flush_stages import RowRoom, in_flight, least_stage, row_room, stage_rows
from piper_ray.certificate.kernels.flush_states import (
    ENDED,
    FOUND,
    PRICED,
    PROVED,
    TOO_MANY,
    Lookup,
    TailStates,
    batch_of,
    lengths_of,
    priced_row_s,
    priced_stage_s,
    put_in_front,
    run_batch,
    tail_states,
)
from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel

_MOST_ROWS = 1024
_MOST_NODES = 20_000


class _Nodes(NamedTuple):
    """Beginnings of plans, front to back.

    downset: int64[nodes], the layers still to come. mix: int64[nodes], of the stages still to come. parent:
    int64[nodes], the node without the last stage. stage: float64[nodes, 4], f, b and R of the last stage, and 1 if all
    stages have figures of actual choices, 0 if one has less than any. priced_s: float64[nodes]. open: int64[nodes],
    those to be continued. counts: int64[2], the number of nodes, and of open ones.
    """

    downset: Ints
    mix: Ints
    parent: Ints
    stage: Floats
    priced_s: Floats
    open: Ints
    counts: Ints


@inner_kernel
def _no_nodes() -> _Nodes:
    return _Nodes(
        np.empty(_MOST_NODES, np.int64),
        np.empty(_MOST_NODES, np.int64),
        np.empty(_MOST_NODES, np.int64),
        np.empty((_MOST_NODES, 4)),
        np.empty(_MOST_NODES),
        np.empty(_MOST_NODES, np.int64),
        np.zeros(2, np.int64),
    )


@leaf_kernel
def _add(nodes: _Nodes, downset: int, mix: int, parent: int, priced_s: float) -> int:
    """Adds an open node, and returns its number. The caller writes the stage's figures."""
    node = nodes.counts[0]
    nodes.downset[node], nodes.mix[node], nodes.parent[node] = downset, mix, parent
    nodes.priced_s[node] = priced_s
    nodes.open[nodes.counts[1]] = node
    nodes.counts[0] += 1
    nodes.counts[1] += 1
    return int(node)


@leaf_kernel
def _write_front(node: int, nodes: _Nodes, front: Floats) -> int:
    """Writes the stages in front, the innermost first, each with the largest f and b up to it. Returns their number."""
    count, at = 0, node
    while nodes.parent[at] >= 0:
        for column in range(3):
            front[count, column] = nodes.stage[at, column]
        count += 1
        at = nodes.parent[at]
    slowest_f, slowest_b = 0.0, 0.0
    for k in range(count - 1, -1, -1):
        slowest_f, slowest_b = max(slowest_f, front[k, 0]), max(slowest_b, front[k, 1])
        front[k, 3], front[k, 4] = slowest_f, slowest_b
    return count


@leaf_kernel
def _whole_batch_s(
    s: int, stage: tuple[float, float, float], front: Floats, search: Lookup, tails: TailStates
) -> float:
    """Returns a lower bound on the batch of a plan with these stages in front of one, and that one in front of a tail
    in state s."""
    gpipe, m = search.shape.gpipe, search.shape.microbatches
    f, b, _ = stage
    if front.shape[0] > 0:
        f, b = max(f, front[0, 3]), max(b, front[0, 4])
    behind = stages_of(tails.mix[s], search.shape)
    grown = put_in_front(gpipe, m, behind, stage, (f, b), lengths_of(tails.figures, s))
    for k in range(front.shape[0]):
        of_front = (front[k, 0], front[k, 1], front[k, 2])
        grown = put_in_front(gpipe, m, behind + 1 + k, of_front, (front[k, 3], front[k, 4]), grown)
    return batch_of(gpipe, m, grown)


@leaf_kernel
def _may_take_s(node: int, front: Floats, nodes: _Nodes, search: Lookup) -> float:
    """Returns the most that the next stage may take: see ``FlushShape``. The times of the stages in front are known."""
    tables, shape, _ = search
    in_front_s = 0.0
    for k in range(front.shape[0]):
        in_front_s += front[k, 0] + front[k, 1]
    behind = stages_of(nodes.mix[node], shape) - 1
    work_s = max(shape.work_s, (in_front_s + tables.own_s[nodes.downset[node]]) * (1.0 - 1e-12))
    at_position_s = (shape.limit_s - work_s) * (shape.room[behind + 1] - shape.room[behind])
    return float(min((shape.limit_s - in_front_s) / shape.microbatches, at_position_s))


@leaf_kernel
def _states_with(tails: TailStates, j: int, mix: int) -> tuple[int, int]:
    """Returns the first state of a downset with this mix of stages, and the one after the last."""
    first = tails.start[j]
    end = tails.start[j] + tails.size[j]
    while first < end and tails.mix[first] < mix:
        first += 1
    last = first
    while last < end and tails.mix[last] == mix:
        last += 1
    return first, last


@leaf_kernel
def _is_within(
    stage: tuple[float, float, float],
    priced_s: float,
    states: tuple[int, int],
    front: Floats,
    search: Lookup,
    tails: TailStates,
) -> bool:
    """Whether a stage may lead to a plan that keeps the limit, by the figures and prices of some of these states."""
    limit_s = search.shape.limit_s
    for s in range(states[0], states[1]):
        if priced_s + tails.figures[s, PRICED] > limit_s:
            continue
        if _whole_batch_s(s, stage, front, search, tails) <= limit_s:
            return True
    return False


@inner_kernel
def _continue(node: int, j: int, front: Floats, search: Lookup, tails: TailStates, nodes: _Nodes, room: RowRoom) -> int:
    """Adds nodes with one more stage, with J behind it. Returns PROVED, FOUND or TOO_MANY."""
    tables, shape, prices = search
    i, behind = nodes.downset[node], stages_of(nodes.mix[node], shape) - 1
    if tails.size[j] == 0 or not is_inside(tables.bits, j, i):
        return PROVED
    cap_s = _may_take_s(node, front, nodes, search)
    for r in range(tables.sums.shape[0]):
        mix = taken_off(nodes.mix[node], r, tables, shape)
        states = _states_with(tails, j, mix)
        if mix < 0 or states[0] == states[1]:
            continue
        least = least_stage((i, j, r), cap_s, tables)
        if least.t > cap_s:
            continue
        by_layers_s = priced_stage_s(i, j, behind, least, prices)
        of_least = (least.f, least.b, least.sync)
        if not _is_within(of_least, nodes.priced_s[node] + by_layers_s, states, front, search, tails):
            continue
        y = in_flight(shape, behind)
        rows, exact = stage_rows((i, j, r), least, y, cap_s, tables, room)
        for row in range(rows):
            stage = (room.rows[row, 0], room.rows[row, 1], room.rows[row, 2])
            priced_s = nodes.priced_s[node] + max(by_layers_s, priced_row_s(behind, stage, prices))
            if not _is_within(stage, priced_s, states, front, search, tails):
                continue
            if behind == 0:
                if _run(front, stage, search) <= shape.limit_s:
                    return FOUND if exact and nodes.stage[node, 3] == 1.0 else TOO_MANY
                continue
            if nodes.counts[0] == _MOST_NODES:
                return TOO_MANY
            new = _add(nodes, j, mix, node, priced_s)
            nodes.stage[new, 0], nodes.stage[new, 1], nodes.stage[new, 2] = stage
            nodes.stage[new, 3] = nodes.stage[node, 3] if exact else 0.0
    return PROVED


@inner_kernel
def _run(front: Floats, last: tuple[float, float, float], search: Lookup) -> float:
    """Returns the batch of a plan of these stages and one more."""
    count = front.shape[0]
    seconds = np.empty((count + 1, 3))
    for k in range(count):
        seconds[count - 1 - k] = front[k, :3]
    seconds[count, 0], seconds[count, 1], seconds[count, 2] = last
    return run_batch(search.shape.gpipe, search.shape.microbatches, seconds)


@inner_kernel
def _plans(search: Lookup, tails: TailStates, control: Floats) -> int:
    """Whether the tails make a plan below the limit."""
    tables, shape, prices = search
    m = tables.bits.shape[0]
    room, nodes = row_room(_MOST_ROWS, tables), _no_nodes()
    for s in range(tails.start[m - 1], tails.start[m - 1] + tails.size[m - 1]):
        mix = tails.mix[s]
        if ends_whole(mix, shape) and (nodes.counts[0] == 0 or nodes.mix[nodes.counts[0] - 1] != mix):
            node = _add(nodes, m - 1, mix, -1, prices.ahead_s[m - 1, stages_of(mix, shape)])
            nodes.stage[node, 3] = 1.0
    front = np.empty((shape.most_stages + 1, 5))
    while nodes.counts[1] > 0:
        nodes.counts[1] -= 1
        node = nodes.open[nodes.counts[1]]
        stages = _write_front(node, nodes, front)
        for j in range(nodes.downset[node]):
            if control[0] != 0.0:
                return ENDED
            status = _continue(node, j, front[:stages], search, tails, nodes, room)
            if status != PROVED:
                return status
    return PROVED


@kernel
def look_through(search: Lookup, control: Floats) -> tuple[int, float, int]:
    """Returns PROVED if no plan takes less, else FOUND, TOO_MANY, or ENDED because control[0] is not 0; also a bound on
    all plans that take less (0: none is known), and the number of states."""
    status, least_s, tails = tail_states(search, control)
    if status == FOUND:
        status = _plans(search, tails, control)
    return status, least_s, tails.mix.size
