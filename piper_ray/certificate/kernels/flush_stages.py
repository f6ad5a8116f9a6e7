"""Kernels: what a stage takes at one d and one t under a flush: at least, and choice by choice.

A stage is a downset without the downset of the tail behind it, in a way. Its choices are the undominated ones of its
layers that fit, one by one or, if these are too many, the least of several at once. A difference of two sums over
downsets is reduced by its possible rounding error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Bits, Floats, Ints, holds, is_cut
from piper_ray.compiled.arrays import stable_order
from piper_ray.compiled.jit import inlined_kernel, inner_kernel, leaf_kernel

_SUMS_OFF = 1e-12
"""Relative: more than the error of sums of choices."""

_HELD = 3
_MARK = 4


class LeastColumns(NamedTuple):
    """Columns of sums over a downset's layers in a way: the least f, b, f + b, R, bytes for each microbatch and once;
    the number of layers that have no single best choice, or none; and the bytes of the best ones."""

    f: int = 0
    b: int = 1
    t: int = 2
    sync: int = 3
    a: int = 4
    h: int = 5
    mixed: int = 6
    missing: int = 7
    one_a: int = 8
    one_h: int = 9


SUM = LeastColumns()

StageKey = tuple[int, int, int]
"""The downset that begins with the stage, that of the tail behind it, and the way in which the stage runs."""


class FlushShape(NamedTuple):
    """What the enumerated plans have in common. room: float64[most_stages + 1], for the last positions together, by
    their number: no stage takes more than a position's room times what the batch takes beyond the work of all stages.
    most_of_kind, fewest_of_kind, share: for each kind of devices, the limits on the stages on it, and the weight of a
    second there. mix_unit: see ``flush_mixes``. borders: int64[kinds, stages + 1], see ``flush_kinds.AlikeRanks``."""

    gpipe: bool
    microbatches: int
    most_stages: int
    most_of_kind: Ints
    fewest_of_kind: Ints
    limit_s: float
    work_s: float
    room: Floats
    share: Floats
    mix_unit: Ints
    borders: Ints


class StageTables(NamedTuple):
    """Downsets by rising ``own_s``, their layers' least f + b, and the choices of their layers. m downsets, n vertices,
    e edges.

    kind, behind, ahead: int64[r], the kind of a way's devices, and the numbers of its neighbours.
    memory_bytes: float64[r]. sums: float64[r, m, columns]; rounding: float64[r, columns]. edges: tail, head; in_rate,
    out_rate: float64[r, e], in bytes per second, for the stage of the head and of the tail; in_s, out_s: their least
    cost, in each direction. choices: float64[choices, 5], f, b, R, bytes for each microbatch and once, of vertex v from
    start[r, v] on; charges as in ``types.Ways``, in bytes. ahead_s, ahead_f, ahead_share: float64[m], of all layers
    outside.
    """

    bits: Bits
    own_s: Floats
    kind: Ints
    behind: Ints
    ahead: Ints
    memory_bytes: Floats
    sums: Floats
    rounding: Floats
    tail: Ints
    head: Ints
    in_rate: Floats
    out_rate: Floats
    in_s: Floats
    out_s: Floats
    tensors: Bits
    tensor_forward_s: Floats
    tensor_backward_s: Floats
    start: Ints
    choices: Floats
    charge_start: Ints
    charge_bytes: Floats
    edge_start: Ints
    edge: Ints
    ahead_s: Floats
    ahead_f: Floats
    ahead_share: Floats


class RowRoom(NamedTuple):
    """float64[rows, 5] each, for all choices of a layer with each of ``most`` rows: f, b, R, bytes, and a mark."""

    most: int
    rows: Floats
    spare: Floats


class LeastStage(NamedTuple):
    """Lower bounds on a stage. edges_s: cost of edges in each direction. forward_s, backward_s: cost of shared tensors,
    exactly. f, b, t, sync, a, h: as in ``LeastColumns``; f, b and t include what crosses."""

    edges_s: float
    forward_s: float
    backward_s: float
    f: float
    b: float
    t: float
    sync: float
    a: float
    h: float


@inlined_kernel
def in_flight(shape: FlushShape, behind: int) -> int:
    """Returns the microbatches in flight in a stage with ``behind`` stages behind it."""
    return shape.microbatches if shape.gpipe else min(shape.microbatches, behind + 1)


@leaf_kernel
def _crossing_s(i: int, j: int, r: int, tables: StageTables) -> tuple[float, float, float]:
    """Returns the least cost of edges in each direction, and the exact cost of tensors forward and backward."""
    bits, edges_s, forward_s, backward_s = tables.bits, 0.0, 0.0, 0.0
    for e in range(tables.tail.size):
        u, v = tables.tail[e], tables.head[e]
        tail_here = holds(bits, i, u) and not holds(bits, j, u)
        head_here = holds(bits, i, v) and not holds(bits, j, v)
        if head_here and not tail_here:
            edges_s += tables.in_s[r, e]
        elif tail_here and not head_here:
            edges_s += tables.out_s[r, e]
    for tensor in range(tables.tensors.shape[0]):
        if is_cut(tables.tensors, tensor, bits, i, j):
            forward_s += tables.tensor_forward_s[tensor]
            backward_s += tables.tensor_backward_s[tensor]
    return edges_s, forward_s, backward_s


@inlined_kernel
def _least(i: int, j: int, r: int, column: int, tables: StageTables) -> float:
    found: float = tables.sums[r, i, column] - tables.sums[r, j, column] - tables.rounding[r, column]
    return max(0.0, found)


@leaf_kernel
def least_stage(stage: StageKey, widest_s: float, tables: StageTables) -> LeastStage:
    """Returns the bounds, with t of inf if the way cannot run all layers. If t is more than ``widest_s``, the rest is
    invalid."""
    i, j, r = stage
    t = _least(i, j, r, SUM.t, tables)
    if tables.sums[r, i, SUM.missing] != tables.sums[r, j, SUM.missing]:
        t = np.inf
    if t > widest_s:
        return LeastStage(0.0, 0.0, 0.0, 0.0, 0.0, t, 0.0, 0.0, 0.0)
    edges_s, forward_s, backward_s = _crossing_s(i, j, r, tables)
    return LeastStage(
        edges_s,
        forward_s,
        backward_s,
        _least(i, j, r, SUM.f, tables) + edges_s + forward_s,
        _least(i, j, r, SUM.b, tables) + edges_s + backward_s,
        t + 2.0 * edges_s + forward_s + backward_s,
        _least(i, j, r, SUM.sync, tables),
        _least(i, j, r, SUM.a, tables),
        _least(i, j, r, SUM.h, tables),
    )


@leaf_kernel
def _only_best(rows: Floats, count: int, columns: int) -> int:
    """Moves the undominated rows to the front. Returns their number."""
    kept = 0
    for k in range(count):
        beaten = False
        for other in range(count):
            if other == k:
                continue
            as_good, better = True, False
            for column in range(columns):
                if rows[other, column] > rows[k, column]:
                    as_good = False
                    break
                if rows[other, column] < rows[k, column]:
                    better = True
            if as_good and (better or other < k):
                beaten = True
                break
        rows[k, _MARK] = 1.0 if beaten else 0.0
    for k in range(count):
        if rows[k, _MARK] == 0.0:
            for column in range(4):
                rows[kept, column] = rows[k, column]
            kept += 1
    return kept


@inner_kernel
def _merged(rows: Floats, count: int) -> int:
    """Merges each two rows, by rising memory, into the least of both."""
    held, sorted_rows = np.empty(count), np.empty((count, 4))
    for k in range(count):
        held[k] = rows[k, _HELD]
    order = stable_order(held, count)
    for k in range(count):
        for column in range(4):
            sorted_rows[k, column] = rows[order[k], column]
    half = (count + 1) // 2
    for k in range(half):
        for column in range(4):
            rows[k, column] = sorted_rows[2 * k, column]
            if 2 * k + 1 < count:
                rows[k, column] = min(rows[k, column], sorted_rows[2 * k + 1, column])
    return half


@inner_kernel
def row_room(most_rows: int, tables: StageTables) -> RowRoom:
    """Returns room for any stage."""
    most = 1
    for r in range(tables.start.shape[0]):
        for v in range(tables.start.shape[1] - 1):
            most = max(most, tables.start[r, v + 1] - tables.start[r, v])
    size = most * most_rows + 1
    return RowRoom(most_rows, np.empty((size, 5)), np.empty((size, 5)))


@inlined_kernel
def _least_of_layer(r: int, v: int, y: int, tables: StageTables) -> tuple[float, float]:
    """Returns the least seconds and bytes over all choices."""
    least_s, least_bytes = np.inf, np.inf
    for o in range(tables.start[r, v], tables.start[r, v + 1]):
        least_s = min(least_s, tables.choices[o, 0] + tables.choices[o, 1])
        least_bytes = min(least_bytes, tables.choices[o, 3] * y + tables.choices[o, 4])
    return least_s, least_bytes


@inlined_kernel
def _paid_s(stage: StageKey, v: int, choice: int, tables: StageTables) -> float:
    """Returns what a layer's choice pays, in each direction, for the layer's edges that cross the stage's borders."""
    i, j, r = stage
    paid_s = 0.0
    for n in range(tables.edge_start[v], tables.edge_start[v + 1]):
        e = tables.edge[n]
        if tables.head[e] == v:
            crosses, rate = not holds(tables.bits, i, tables.tail[e]), tables.in_rate[r, e]
        else:
            crosses, rate = holds(tables.bits, j, tables.head[e]), tables.out_rate[r, e]
        if crosses:
            paid_s += tables.charge_bytes[tables.charge_start[choice] + n - tables.edge_start[v]] / rate
    return paid_s


@leaf_kernel
def _with_layer(
    stage: StageKey,
    v: int,
    count: int,
    y: int,
    most: tuple[float, float],
    tables: StageTables,
    room: RowRoom,
) -> int:
    """Combines each of ``count`` rows with each choice of one more layer, and writes those within ``most``, seconds and
    bytes, to ``room.spare``. Returns their number."""
    _, rows, spare = room
    most_s, most_bytes = most
    new = 0
    for o in range(tables.start[stage[2], v], tables.start[stage[2], v + 1]):
        paid_s = _paid_s(stage, v, o, tables)
        held = tables.choices[o, 3] * y + tables.choices[o, 4]
        for k in range(count):
            f, b = rows[k, 0] + tables.choices[o, 0] + paid_s, rows[k, 1] + tables.choices[o, 1] + paid_s
            if rows[k, _HELD] + held > most_bytes or f + b > most_s:
                continue
            spare[new, 0], spare[new, 1] = f, b
            spare[new, 2], spare[new, _HELD] = rows[k, 2] + tables.choices[o, 2], rows[k, _HELD] + held
            new += 1
    return new


@leaf_kernel
def _has_one_best(stage: StageKey, y: int, tables: StageTables) -> bool:
    """Whether each layer has a choice that is best in time, and these together fit in memory."""
    i, j, r = stage
    if tables.sums[r, i, SUM.mixed] != tables.sums[r, j, SUM.mixed]:
        return False
    held = _least(i, j, r, SUM.one_a, tables) * y + _least(i, j, r, SUM.one_h, tables)
    off = tables.rounding[r, SUM.one_a] * y + tables.rounding[r, SUM.one_h]
    return bool(held + 2.0 * off <= tables.memory_bytes[r])


@inner_kernel
def stage_rows(
    stage: StageKey, least: LeastStage, y: int, cap_s: float, tables: StageTables, room: RowRoom
) -> tuple[int, bool]:
    """Writes f, b and R of the stage's choices to ``room.rows``. Returns their number (0: none fits), and whether each
    row is one choice. y: microbatches in flight. cap_s: limit on f + b.
    """
    i, j, r = stage
    _, rows, spare = room
    if _has_one_best(stage, y, tables):
        rows[0, 0], rows[0, 1], rows[0, 2] = least.f, least.b, least.sync
        return 1, True
    rest_s, rest_bytes = 0.0, 0.0
    for v in range(tables.edge_start.size - 1):
        if holds(tables.bits, i, v) and not holds(tables.bits, j, v):
            least_s, least_bytes = _least_of_layer(r, v, y, tables)
            rest_s += least_s
            rest_bytes += least_bytes
    most_s, most_bytes = cap_s * (1.0 + _SUMS_OFF), tables.memory_bytes[r] * (1.0 + _SUMS_OFF)
    if rest_s > most_s or rest_bytes > most_bytes:
        return 0, True
    rows[0, 0], rows[0, 1], rows[0, 2], rows[0, _HELD] = least.forward_s, least.backward_s, 0.0, 0.0
    count, exact = 1, True
    for v in range(tables.edge_start.size - 1):
        if not holds(tables.bits, i, v) or holds(tables.bits, j, v):
            continue
        least_s, least_bytes = _least_of_layer(r, v, y, tables)
        rest_s -= least_s
        rest_bytes -= least_bytes
        count = _with_layer(stage, v, count, y, (most_s - rest_s, most_bytes - rest_bytes), tables, room)
        count = _only_best(spare, count, 4)
        while count > room.most:
            count, exact = _only_best(spare, _merged(spare, count), 4), False
        for k in range(count):
            for column in range(4):
                rows[k, column] = spare[k, column]
        if count == 0:
            break
    return _only_best(rows, count, 3), exact
