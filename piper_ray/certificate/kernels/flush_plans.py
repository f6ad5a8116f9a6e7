"""Kernels: whether a plan with one d and one t takes less than a limit under a flush.

Tails of pipelines are built from the back. A state of a downset is the figures of a tail of its layers with so many
stages (``flush_tails``), and what it costs by the prices of its positions. Of two states of as many stages the one that
is nowhere larger stands for both. A state goes whose figures, or prices, with what the layers in front take at least,
exceed the limit. Each stage has the choices of its layers that fit and that no other is as good as, one by one, or, if
these are too many, the least of several at once.

What is taken as the difference of two sums over downsets is less by what such a difference may be off.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Bits, Floats, Ints
from piper_ray.certificate.kernels.flush_tails import (
    FIGURES,
    Lengths,
    batch_of,
    batch_with_ahead,
    no_stages,
    put_in_front,
    run_batch,
)
from piper_ray.compiled.jit import inlined_kernel, inner_kernel, kernel, leaf_kernel

PROVED, FOUND, TOO_MANY, ENDED = 0, 1, 2, 3
"""No plan takes less; one does; there is no telling; told to end."""

_F, _B, _T, _SYNC, _A, _H, _MIXED, _MISSING, _ONE_A, _ONE_H = range(10)
SUMS = 10
"""Of a downset's layers in a way: the least f, b, f + b, R, bytes for each microbatch and once; how many layers have no
single best choice, or none; and the bytes of the best ones."""

_MOST_ROWS = 128
_MOST_STATES = 3_000_000
_MOST_WORK = 100_000_000
"""Comparisons of figures, about: some seconds. Counted, not timed, so that who makes a certificate and who checks it
end at the same place."""

_MOST_NODES = 5_000
_PRICED = FIGURES


class FlushShape(NamedTuple):
    """Of all plans that are looked at. room: float64[most_stages + 1], of the last so many positions together: no stage
    takes more than a position's room times what the batch takes beyond the work of all stages."""

    gpipe: bool
    microbatches: int
    most_stages: int
    limit_s: float
    memory_bytes: float
    work_s: float
    room: Floats


class StageTables(NamedTuple):
    """Downsets by rising ``own_s``, their layers' least f + b, and what these may run. m downsets, n vertices, e edges.

    sums: float64[r, m, SUMS]; rounding: float64[r, SUMS]. edges: tail, head; in_s, out_s: float64[r, e] at least, in
    each direction, for the stage of the head and of the tail. choices: float64[choices, 5], f, b, R, bytes for each
    microbatch and once, of vertex v from start[r, v] on; charges as in ``types.Ways``. ahead_s, ahead_f: float64[m], of
    all layers outside.
    """

    bits: Bits
    own_s: Floats
    sums: Floats
    rounding: Floats
    tail: Ints
    head: Ints
    in_s: Floats
    out_s: Floats
    tensors: Bits
    tensor_forward_s: Floats
    tensor_backward_s: Floats
    start: Ints
    choices: Floats
    charge_start: Ints
    charge_s: Floats
    edge_start: Ints
    edge: Ints
    ahead_s: Floats
    ahead_f: Floats


class PositionPrices(NamedTuple):
    """By the number of stages behind: of a second of f, b and R, float64[q] (none: there are no prices); room_s of a
    device's memory. of_layers: float64[m, q], of a downset's layers there; ahead_s: float64[m, q + 1], of all layers
    outside, at positions from q on, less their rooms."""

    forward: Floats
    backward: Floats
    sync: Floats
    room_s: Floats
    of_layers: Floats
    ahead_s: Floats


class RowRoom(NamedTuple):
    """float64[rows, 5] each, for all choices of a layer with each of _MOST_ROWS: f, b, R, bytes, and a mark."""

    rows: Floats
    spare: Floats


class _Tails(NamedTuple):
    """start, size: int64[m]. figures: float64[states, 8], with the price. stages: int64[states]."""

    start: Ints
    size: Ints
    figures: Floats
    stages: Ints


@inlined_kernel
def _has(bits: Bits, row: int, v: int) -> bool:
    return bool((bits[row, v >> 6] >> np.uint64(v & 63)) & np.uint64(1) != 0)


@leaf_kernel
def _is_inside(bits: Bits, j: int, i: int) -> bool:
    inside = True
    for word in range(bits.shape[1]):
        inside = inside and bits[j, word] & ~bits[i, word] == 0
    return inside


@leaf_kernel
def _crossing_s(i: int, j: int, r: int, tables: StageTables) -> tuple[float, float, float]:
    """At least, of edges in each direction, and of tensors forward and backward, exactly."""
    bits, edges_s, forward_s, backward_s = tables.bits, 0.0, 0.0, 0.0
    for e in range(tables.tail.size):
        u, v = tables.tail[e], tables.head[e]
        tail_here = _has(bits, i, u) and not _has(bits, j, u)
        head_here = _has(bits, i, v) and not _has(bits, j, v)
        if head_here and not tail_here:
            edges_s += tables.in_s[r, e]
        elif tail_here and not head_here:
            edges_s += tables.out_s[r, e]
    for h in range(tables.tensors.shape[0]):
        inside, outside = False, False
        for word in range(bits.shape[1]):
            ends = tables.tensors[h, word]
            here = ends & bits[i, word] & ~bits[j, word]
            inside = inside or here != 0
            outside = outside or here != ends
        if inside and outside:
            forward_s += tables.tensor_forward_s[h]
            backward_s += tables.tensor_backward_s[h]
    return edges_s, forward_s, backward_s


@inlined_kernel
def _least(i: int, j: int, r: int, column: int, tables: StageTables) -> float:
    found: float = tables.sums[r, i, column] - tables.sums[r, j, column] - tables.rounding[r, column]
    return max(0.0, found)


@leaf_kernel
def _only_best(rows: Floats, count: int, columns: int) -> int:
    """Moves those rows to the front that no other is as good as; returns how many."""
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
        rows[k, 4] = 1.0 if beaten else 0.0
    for k in range(count):
        if rows[k, 4] == 0.0:
            for column in range(4):
                rows[kept, column] = rows[k, column]
            kept += 1
    return kept


@inner_kernel
def _merged(rows: Floats, count: int) -> int:
    """Each two rows, by rising memory, become the least of both."""
    order = np.argsort(rows[:count, 3])
    sorted_rows = rows[:count][order].copy()
    half = (count + 1) // 2
    for k in range(half):
        for column in range(4):
            rows[k, column] = sorted_rows[2 * k, column]
            if 2 * k + 1 < count:
                rows[k, column] = min(rows[k, column], sorted_rows[2 * k + 1, column])
    return half


@inner_kernel
def _stage_rows(
    stage: tuple[int, int, int],
    y: int,
    crossing: tuple[float, float, float],
    cap_s: float,
    tables: StageTables,
    shape: FlushShape,
    room: RowRoom,
) -> tuple[int, bool]:
    """Writes f, b and R of the stage's choices to ``room.rows``: how many, and whether each is one of them; 0: none
    fits. stage: its downset, that of the tail behind it, and its way. cap_s: for f + b.
    """
    i, j, r = stage
    rows, spare = room
    edges_s, forward_s, backward_s = crossing
    sums = tables.sums
    if sums[r, i, _MIXED] == sums[r, j, _MIXED]:
        held = _least(i, j, r, _ONE_A, tables) * y + _least(i, j, r, _ONE_H, tables)
        if held + 2.0 * (tables.rounding[r, _ONE_A] * y + tables.rounding[r, _ONE_H]) <= shape.memory_bytes:
            rows[0, 0] = _least(i, j, r, _F, tables) + edges_s + forward_s
            rows[0, 1] = _least(i, j, r, _B, tables) + edges_s + backward_s
            rows[0, 2] = _least(i, j, r, _SYNC, tables)
            return 1, True
    vertices = tables.edge_start.size - 1
    rest_s, rest_bytes = forward_s + backward_s, 0.0
    for v in range(vertices):
        if not _has(tables.bits, i, v) or _has(tables.bits, j, v):
            continue
        least_s, least_bytes = np.inf, np.inf
        for o in range(tables.start[r, v], tables.start[r, v + 1]):
            least_s = min(least_s, tables.choices[o, 0] + tables.choices[o, 1])
            least_bytes = min(least_bytes, tables.choices[o, 3] * y + tables.choices[o, 4])
        rest_s += least_s
        rest_bytes += least_bytes
    if rest_bytes > shape.memory_bytes or rest_s > cap_s:
        return 0, True
    count, exact = 1, True
    rows[0, 0], rows[0, 1], rows[0, 2], rows[0, 3] = forward_s, backward_s, 0.0, 0.0
    rest_s -= forward_s + backward_s
    for v in range(vertices):
        if not _has(tables.bits, i, v) or _has(tables.bits, j, v):
            continue
        first, end = tables.start[r, v], tables.start[r, v + 1]
        least_s, least_bytes = np.inf, np.inf
        for o in range(first, end):
            least_s = min(least_s, tables.choices[o, 0] + tables.choices[o, 1])
            least_bytes = min(least_bytes, tables.choices[o, 3] * y + tables.choices[o, 4])
        rest_s -= least_s
        rest_bytes -= least_bytes
        new = 0
        for o in range(first, end):
            paid_s = 0.0
            for n in range(tables.edge_start[v], tables.edge_start[v + 1]):
                e = tables.edge[n]
                if tables.head[e] == v:
                    crosses = not _has(tables.bits, i, tables.tail[e])
                else:
                    crosses = _has(tables.bits, j, tables.head[e])
                if crosses:
                    paid_s += tables.charge_s[tables.charge_start[o] + n - tables.edge_start[v]]
            held = tables.choices[o, 3] * y + tables.choices[o, 4]
            for k in range(count):
                f, b = rows[k, 0] + tables.choices[o, 0] + paid_s, rows[k, 1] + tables.choices[o, 1] + paid_s
                # By a ten-billionth more than sums can be off.
                if (rows[k, 3] + held + rest_bytes) * (1.0 - 1e-12) > shape.memory_bytes:
                    continue
                if (f + b + rest_s) * (1.0 - 1e-12) > cap_s:
                    continue
                spare[new, 0], spare[new, 1] = f, b
                spare[new, 2], spare[new, 3] = rows[k, 2] + tables.choices[o, 2], rows[k, 3] + held
                new += 1
        new = _only_best(spare, new, 4)
        while new > _MOST_ROWS:
            new, exact = _only_best(spare, _merged(spare, new), 4), False
        count = new
        for k in range(count):
            for column in range(4):
                rows[k, column] = spare[k, column]
        if count == 0:
            return 0, exact
    return _only_best(rows, count, 3), exact


@inlined_kernel
def _in_flight(shape: FlushShape, behind: int) -> int:
    return shape.microbatches if shape.gpipe else min(shape.microbatches, behind + 1)


@inlined_kernel
def _lengths(figures: Floats, s: int) -> Lengths:
    row = figures[s]
    return row[0], row[1], row[2], row[3], row[4], row[5], row[6]


@leaf_kernel
def _first_from(tables: StageTables, live: Ints, count: int, least_s: float) -> int:
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if tables.own_s[live[middle]] < least_s:
            low = middle + 1
        else:
            high = middle
    return low


@inner_kernel
def _doubled(rows: Floats) -> Floats:
    found = np.empty((2 * rows.shape[0], rows.shape[1]))
    found[: rows.shape[0]] = rows
    return found


@inner_kernel
def _doubled_numbers(numbers: Ints) -> Ints:
    found = np.empty(2 * numbers.size, np.int64)
    found[: numbers.size] = numbers
    return found


@inner_kernel
def _row_room(tables: StageTables) -> RowRoom:
    most = 1
    for r in range(tables.start.shape[0]):
        for v in range(tables.start.shape[1] - 1):
            most = max(most, tables.start[r, v + 1] - tables.start[r, v])
    size = most * _MOST_ROWS + 1
    return RowRoom(np.empty((size, 5)), np.empty((size, 5)))


@inner_kernel
def _tails(
    tables: StageTables, shape: FlushShape, prices: PositionPrices, control: Floats
) -> tuple[int, float, _Tails]:
    """The states of all downsets; PROVED or FOUND, by whether one of all layers is below the limit, and the least."""
    m, most_stages, limit_s = tables.bits.shape[0], shape.most_stages, shape.limit_s
    gpipe, microbatches = shape.gpipe, shape.microbatches
    start, size = np.zeros(m, np.int64), np.zeros(m, np.int64)
    figures, stages = np.empty((4096, FIGURES + 1)), np.zeros(4096, np.int64)
    empty = no_stages(gpipe)
    for column in range(FIGURES):
        figures[0, column] = empty[column]
    figures[0, _PRICED] = 0.0
    size[0] = used = 1
    live, live_count = np.zeros(m, np.int64), 1
    new_figures, new_stages = np.empty((1024, FIGURES + 1)), np.empty(1024, np.int64)
    room = _row_room(tables)
    rows = room.rows
    is_priced = prices.forward.size > 0
    least_batch_s = np.inf
    status, work = PROVED, 0
    for i in range(1, m):
        if control[0] != 0.0:
            status = ENDED
            break
        ahead_s, ahead_f = tables.ahead_s[i], tables.ahead_f[i]
        spare_s = limit_s - max(shape.work_s, tables.own_s[i] + ahead_s)
        if spare_s < 0.0:
            continue
        widest_s = (limit_s - ahead_s) / microbatches
        widest_s = min(widest_s, spare_s * (shape.room[most_stages] - shape.room[most_stages - 1]))
        if work > _MOST_WORK:
            status = TOO_MANY
            break
        new = 0
        at = _first_from(tables, live, live_count, tables.own_s[i] - widest_s * (1.0 + 1e-12) - 1e-12 * shape.work_s)
        for n in range(at, live_count):
            j = live[n]
            work += 1
            if not _is_inside(tables.bits, j, i):
                continue
            work += tables.tail.size
            for r in range(tables.sums.shape[0]):
                if tables.sums[r, i, _MISSING] != tables.sums[r, j, _MISSING]:
                    continue
                least_s = _least(i, j, r, _T, tables)
                if least_s > widest_s:
                    continue
                crossing = _crossing_s(i, j, r, tables)
                edges_s, forward_s, backward_s = crossing
                least_s += 2.0 * edges_s + forward_s + backward_s
                if least_s > widest_s:
                    continue
                least_f = _least(i, j, r, _F, tables) + edges_s + forward_s
                least_b = _least(i, j, r, _B, tables) + edges_s + backward_s
                least_sync = _least(i, j, r, _SYNC, tables)
                least_a, least_h = _least(i, j, r, _A, tables), _least(i, j, r, _H, tables)
                known, rows_count = -1, 0
                for s in range(start[j], start[j] + size[j]):
                    behind = stages[s]
                    if behind >= most_stages:
                        break
                    y = _in_flight(shape, behind)
                    if least_a * y + least_h > shape.memory_bytes:
                        break
                    cap_s = min(
                        (limit_s - ahead_s) / microbatches, spare_s * (shape.room[behind + 1] - shape.room[behind])
                    )
                    if least_s > cap_s:
                        continue
                    if ahead_s > 0.0 and ahead_s > spare_s * (shape.room[most_stages] - shape.room[behind + 1]):
                        continue
                    if is_priced:
                        by_layers_s = prices.of_layers[i, behind] - prices.of_layers[j, behind] - prices.room_s[behind]
                        by_layers_s += (prices.forward[behind] + prices.backward[behind]) * edges_s
                        by_layers_s += prices.forward[behind] * forward_s + prices.backward[behind] * backward_s
                        if figures[s, _PRICED] + by_layers_s + prices.ahead_s[i, behind + 1] > limit_s:
                            continue
                    if known != behind:
                        tail = _lengths(figures, s)
                        bound = put_in_front(
                            gpipe, microbatches, behind, (least_f, least_b, least_sync), (least_f, least_b), tail
                        )
                        if batch_with_ahead(gpipe, microbatches, ahead_s, ahead_f, bound) > limit_s:
                            continue
                        known = behind
                        work += 50 * tables.edge_start.size
                        rows_count, _ = _stage_rows((i, j, r), y, crossing, cap_s, tables, shape, room)
                    work += 1 + rows_count * (1 + new)
                    for row in range(rows_count):
                        f, b, sync = rows[row, 0], rows[row, 1], rows[row, 2]
                        priced_s = 0.0
                        if is_priced:
                            row_s = prices.forward[behind] * f + prices.backward[behind] * b
                            row_s += prices.sync[behind] * sync
                            priced_s = figures[s, _PRICED] + max(row_s, by_layers_s)
                            if priced_s + prices.ahead_s[i, behind + 1] > limit_s:
                                continue
                        tail = _lengths(figures, s)
                        grown = put_in_front(gpipe, microbatches, behind, (f, b, sync), (f, b), tail)
                        if batch_with_ahead(gpipe, microbatches, ahead_s, ahead_f, grown) > limit_s:
                            continue
                        beaten, kept = False, 0
                        for other in range(new):
                            keep = True
                            if new_stages[other] == behind + 1:
                                as_good, no_better = True, True
                                for column in range(FIGURES):
                                    as_good = as_good and new_figures[other, column] <= grown[column]
                                    no_better = no_better and new_figures[other, column] >= grown[column]
                                as_good = as_good and new_figures[other, _PRICED] <= priced_s
                                no_better = no_better and new_figures[other, _PRICED] >= priced_s
                                if as_good:
                                    beaten = True
                                    break
                                keep = not no_better
                            if keep:
                                if kept != other:
                                    new_figures[kept] = new_figures[other]
                                    new_stages[kept] = new_stages[other]
                                kept += 1
                        if beaten:
                            continue
                        new = kept
                        if new == new_stages.size:
                            new_figures, new_stages = _doubled(new_figures), _doubled_numbers(new_stages)
                        for column in range(FIGURES):
                            new_figures[new, column] = grown[column]
                        new_figures[new, _PRICED] = priced_s
                        new_stages[new] = behind + 1
                        new += 1
        if new == 0:
            continue
        start[i], size[i] = used, new
        live[live_count] = i
        live_count += 1
        for k in np.argsort(new_stages[:new]):
            if used == stages.size:
                figures, stages = _doubled(figures), _doubled_numbers(stages)
            figures[used] = new_figures[k]
            stages[used] = new_stages[k]
            used += 1
        if used > _MOST_STATES:
            status = TOO_MANY
            break
    if status == PROVED:
        for s in range(start[m - 1], start[m - 1] + size[m - 1]):
            least_batch_s = min(least_batch_s, batch_of(gpipe, microbatches, _lengths(figures, s)))
            status = FOUND
    return status, least_batch_s, _Tails(start, size, figures[:used].copy(), stages[:used].copy())


@leaf_kernel
def _prefix(node: int, parent: Ints, seconds: Floats, found: Floats) -> int:
    """Writes the stages in front, the innermost first, each with the largest f and b up to it; returns how many."""
    count, at = 0, node
    while parent[at] >= 0:
        for column in range(3):
            found[count, column] = seconds[at, column]
        count += 1
        at = parent[at]
    slowest_f, slowest_b = 0.0, 0.0
    for k in range(count - 1, -1, -1):
        slowest_f, slowest_b = max(slowest_f, found[k, 0]), max(slowest_b, found[k, 1])
        found[k, 3], found[k, 4] = slowest_f, slowest_b
    return count


@inner_kernel
def _plans(tables: StageTables, shape: FlushShape, tails: _Tails, control: Floats) -> int:
    """Whether the tails make a plan below the limit, front to back: a tail's figures with what is in front of it, whose
    stages are known and so what these bring into its paths, bound the plans that end with it."""
    m, limit_s, gpipe, microbatches = tables.bits.shape[0], shape.limit_s, shape.gpipe, shape.microbatches
    room = _row_room(tables)
    rows = room.rows
    downset, left, parent = np.empty(1024, np.int64), np.empty(1024, np.int64), np.empty(1024, np.int64)
    seconds = np.empty((1024, 4))
    prefix = np.empty((shape.most_stages + 1, 5))
    pending, pending_count, nodes = np.empty(1024, np.int64), 0, 0
    for s in range(tails.start[m - 1], tails.start[m - 1] + tails.size[m - 1]):
        if batch_of(gpipe, microbatches, _lengths(tails.figures, s)) > limit_s:
            continue
        if nodes > 0 and left[nodes - 1] == tails.stages[s]:
            continue
        downset[nodes], left[nodes], parent[nodes] = m - 1, tails.stages[s], -1
        seconds[nodes, 3] = 1.0
        pending[pending_count] = nodes
        nodes += 1
        pending_count += 1
    while pending_count > 0:
        if control[0] != 0.0:
            return ENDED
        pending_count -= 1
        node = pending[pending_count]
        i, behind = downset[node], left[node] - 1
        stages_in_front = _prefix(node, parent, seconds, prefix)
        front_f = prefix[0, 3] if stages_in_front > 0 else 0.0
        front_b = prefix[0, 4] if stages_in_front > 0 else 0.0
        in_front_s = 0.0
        for k in range(stages_in_front):
            in_front_s += prefix[k, 0] + prefix[k, 1]
        cap_s = (limit_s - in_front_s) / microbatches
        y = _in_flight(shape, behind)
        for j in range(i):
            has_tail = False
            for s in range(tails.start[j], tails.start[j] + tails.size[j]):
                has_tail = has_tail or tails.stages[s] == behind
            if not has_tail or not _is_inside(tables.bits, j, i):
                continue
            for r in range(tables.sums.shape[0]):
                if tables.sums[r, i, _MISSING] != tables.sums[r, j, _MISSING]:
                    continue
                if _least(i, j, r, _T, tables) > cap_s:
                    continue
                crossing = _crossing_s(i, j, r, tables)
                count, exact = _stage_rows((i, j, r), y, crossing, cap_s, tables, shape, room)
                for row in range(count):
                    stage = (rows[row, 0], rows[row, 1], rows[row, 2])
                    known = (max(front_f, stage[0]), max(front_b, stage[1]))
                    within = False
                    for s in range(tails.start[j], tails.start[j] + tails.size[j]):
                        if tails.stages[s] != behind:
                            continue
                        grown = put_in_front(gpipe, microbatches, behind, stage, known, _lengths(tails.figures, s))
                        for k in range(stages_in_front):
                            of_front = (prefix[k, 0], prefix[k, 1], prefix[k, 2])
                            grown = put_in_front(
                                gpipe, microbatches, behind + 1 + k, of_front, (prefix[k, 3], prefix[k, 4]), grown
                            )
                        if batch_of(gpipe, microbatches, grown) <= limit_s:
                            within = True
                            break
                    if not within:
                        continue
                    if nodes == left.size:
                        downset, left = _doubled_numbers(downset), _doubled_numbers(left)
                        parent, seconds = _doubled_numbers(parent), _doubled(seconds)
                    if nodes >= _MOST_NODES:
                        return TOO_MANY
                    downset[nodes], left[nodes], parent[nodes] = j, behind, node
                    seconds[nodes, 0], seconds[nodes, 1], seconds[nodes, 2] = stage
                    seconds[nodes, 3] = seconds[node, 3] if exact else 0.0
                    if behind > 0:
                        if pending_count == pending.size:
                            pending = _doubled_numbers(pending)
                        pending[pending_count] = nodes
                        pending_count += 1
                        nodes += 1
                        continue
                    whole = np.empty((stages_in_front + 1, 5))
                    placed = _prefix(nodes, parent, seconds, whole)
                    if run_batch(gpipe, microbatches, whole[:placed][::-1].copy()[:, :3].copy()) <= limit_s:
                        return FOUND if seconds[nodes, 3] == 1.0 else TOO_MANY
    return PROVED


@kernel
def look_through(
    tables: StageTables, shape: FlushShape, prices: PositionPrices, control: Floats
) -> tuple[int, float, int]:
    """PROVED, if no plan takes less; FOUND, TOO_MANY or ENDED, because control[0] is not 0. With it a bound on each
    plan that takes less (0: none is known), and the number of states."""
    status, least_s, tails = _tails(tables, shape, prices, control)
    if status in (TOO_MANY, ENDED):
        return status, 0.0, tails.stages.size
    if status == FOUND:
        status = _plans(tables, shape, tails, control)
    return status, least_s, tails.stages.size
