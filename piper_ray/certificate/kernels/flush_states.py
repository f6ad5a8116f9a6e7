"""Kernels: the tails that plans below a limit can have under a flush, built from the back.

A state of a downset has the figures of a tail of its layers with a mix of stages (``flush_mixes``), and its cost by the
prices of its positions. Of two states of one mix, one that is nowhere larger replaces the other. A state is dropped if
its figures or prices, with the least that the layers in front take, exceed the limit.

No stage takes more than its position's room times what the limit leaves beyond the work of all stages; so the layers in
front need enough positions with room for their work. On several kinds of devices, a second on each kind counts as a
share: each layer in front has at least its least share, on whichever kind, and the remaining stages together have at
most as many shares as if all took as long as the longest.

Also lower bounds on the tails of pipelines under a flush, from the order of passes; and a pipeline's batch.

Stage j takes f_j forward and b_j backward seconds for each of m microbatches, t_j = f_j + b_j, and R_j at the end. It
has q stages behind it. Each figure below is the length of a path through the passes: from pass to pass of one rank's
list, or from a pass to the same microbatch's next one. A batch takes no less than any path. These paths are used:

*gpipe*. Forward passes of the first microbatch up to stage i, there those of all microbatches, and of the last one to
the end: sum f + (m - 1) f_i. Then the same way back, to the end of stage e: sum b_(e..) + (m - 1) max b_(e..) + R_e. No
path is longer, as each path has this form.

*1f1b*. Stage j begins with w_j = min(m, q + 1) forward passes. A path may go down from it to a stage k, and come up
again: sum t_(j+1..k). Before k it may take all w_k - 1 further forward passes of k's beginning at any one stage i up to
k: the first w_k microbatches enter k one after the other, each after its forward pass at i. It may take the last w_k -
1 backward passes at i in the same way on the way out. Between these stage j runs its list: m - w_j + 1 times t_j if m >
w_j; otherwise its warm-up and its end share the one microbatch, and one of the two has to go down to the turning point.
A path that ends with R_e leaves the passes at e: backward passes in front of e are not on it.

The figures of a tail are seven such lengths: down, up, whole, up and whole with further backward passes in the tail
alone, the last microbatch's way to the end of a synchronisation, and the whole batch's way there. A stage in front only
adds to them or takes the larger of two: so a tail that is nowhere larger than another remains so. What stages in front
add to the choice of i is given if it is known; if it is not, the lengths are maxima over fewer paths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints, first_above, is_inside
from piper_ray.certificate.kernels.flush_mixes import ends_whole, put_on, share_left, stages_of
from piper_ray.certificate.kernels.flush_stages import (
    FlushShape,
    LeastStage,
    RowRoom,
    StageTables,
    in_flight,
    least_stage,
    row_room,
    stage_rows,
)
from piper_ray.compiled.arrays import stable_order, twice, twice_rows
from piper_ray.compiled.jit import inlined_kernel, inner_kernel

Lengths = tuple[float, float, float, float, float, float, float]

FIGURES = 7


@inlined_kernel
def no_stages(gpipe: bool) -> Lengths:
    """Returns the figures of the empty tail."""
    if gpipe:
        return 0.0, 0.0, 0.0, -np.inf, 0.0, 0.0, 0.0
    return 0.0, 0.0, 0.0, 0.0, 0.0, -np.inf, -np.inf


@inlined_kernel
def put_in_front(
    gpipe: bool, m: int, behind: int, stage: tuple[float, float, float], known: tuple[float, float], tail: Lengths
) -> Lengths:
    """Returns the figures of a tail with a further stage in front. stage: f, b and R. known: the largest f and b of it
    and of stages in front of it."""
    f, b, sync = stage
    t = f + b
    if gpipe:
        total, slowest_f, slowest_b, synced, _, _, _ = tail
        longest_b = max(slowest_b, b)
        ended = max(synced + f, total + t + (m - 1) * longest_b + sync)
        return total + t, max(slowest_f, f), longest_b, ended, 0.0, 0.0, 0.0
    down, up, whole, up_own, whole_own, last, synced = tail
    known_f, known_b = known
    more = min(m, behind + 1) - 1
    into = max(down, more * known_f)
    out = max(up, more * known_b)
    out_own = max(up_own, more * b)
    if m > more + 1:
        between = (m - more) * t + into
        own, own_own = between + out, between + out_own
        ended = (m - more - 1) * t + f + into + last
    else:
        own = t + max(more * known_f + out, into + more * known_b)
        own_own = t + max(more * known_f + out_own, into + more * b)
        ended = f + more * known_f + last
    whole_new = max(t + whole, own)
    whole_own_new = max(t + whole_own, own_own)
    synced_new = max(f + synced, whole_own_new + sync, ended)
    last_new = max(f + last, t + out_own + sync)
    return t + into, t + out, whole_new, t + out_own, whole_own_new, last_new, synced_new


@inlined_kernel
def batch_of(gpipe: bool, m: int, figures: Lengths) -> float:
    """Returns the batch of a pipeline that is this tail."""
    if gpipe:
        return figures[3] + (m - 1) * figures[1]
    return max(figures[2], figures[6])


@inlined_kernel
def batch_with_ahead(gpipe: bool, m: int, ahead_s: float, ahead_f: float, figures: Lengths) -> float:
    """Returns a lower bound on a batch with this tail behind stages that together take these seconds, forward and
    backward."""
    if gpipe:
        total, slowest_f, slowest_b, synced, _, _, _ = figures
        return max(total + ahead_s + (m - 1) * (slowest_f + slowest_b), synced + ahead_f + (m - 1) * slowest_f)
    return max(figures[2] + ahead_s, figures[6] + ahead_f)


@inner_kernel
def run_batch(gpipe: bool, m: int, seconds: Floats) -> float:
    """Runs a batch pass by pass. seconds: float64[p, 3], front to back: f, b and R of each stage."""
    p = seconds.shape[0]
    forward_end, backward_end = np.full((p, m), -1.0), np.full((p, m), -1.0)
    forwards, backwards = np.zeros(p, np.int64), np.zeros(p, np.int64)
    clock_s = np.zeros(p)
    left = 2 * m * p
    while left > 0:
        for j in range(p):
            while backwards[j] < m:
                warm_up = m if gpipe else min(m, p - j)
                is_forward = forwards[j] < m and forwards[j] - backwards[j] < warm_up
                if is_forward:
                    k = forwards[j]
                    ready_s = 0.0 if j == 0 else forward_end[j - 1, k]
                else:
                    k = backwards[j]
                    ready_s = forward_end[j, k] if j == p - 1 else backward_end[j + 1, k]
                if ready_s < 0.0:
                    break
                if is_forward:
                    clock_s[j] = max(clock_s[j], ready_s) + seconds[j, 0]
                    forward_end[j, k] = clock_s[j]
                    forwards[j] += 1
                else:
                    clock_s[j] = max(clock_s[j], ready_s) + seconds[j, 1]
                    backward_end[j, k] = clock_s[j]
                    backwards[j] += 1
                left -= 1
    return float((clock_s + seconds[:, 2]).max())


PROVED, FOUND, TOO_MANY, ENDED = 0, 1, 2, 3
"""No plan takes less; one does; it cannot be decided; asked to end."""

_MOST_ROWS = 128
_MOST_STATES = 3_000_000
_MOST_WORK = 100_000_000
"""Approximate comparisons of figures: some seconds. They are counted and not timed, so that making and checking a
certificate end at the same place."""

_OFF = 1e-12
"""Share of all work: more than the error of sums of seconds."""

PRICED = FIGURES


class PositionPrices(NamedTuple):
    """Prices by the number of stages behind: float64[q], of a second of f, b and R; room_s: of a device's memory.
    of_layers: float64[m, q], of a downset's layers at a position. ahead_s: float64[m, q + 1], of all layers outside, at
    positions from q on, minus their rooms."""

    forward: Floats
    backward: Floats
    sync: Floats
    room_s: Floats
    of_layers: Floats
    ahead_s: Floats


class Lookup(NamedTuple):
    """Everything that the enumeration reads."""

    tables: StageTables
    shape: FlushShape
    prices: PositionPrices


class TailStates(NamedTuple):
    """States of downsets. start, size: int64[m]. figures: float64[states, 8], with the price. mix: int64[states],
    ascending for each downset, and so is the number of stages."""

    start: Ints
    size: Ints
    figures: Floats
    mix: Ints


class _New(NamedTuple):
    """Room for the states of one downset, as in ``TailStates``."""

    figures: Floats
    mix: Ints


class _Left(NamedTuple):
    """What a downset leaves to the layers in front. ahead_s, ahead_f: their least seconds. least_share: their least
    share for each second of the longest stage possible. spare_s: what the limit leaves beyond the work of all stages.
    widest_s: the most that the first stage may take, at any position."""

    ahead_s: float
    ahead_f: float
    least_share: float
    spare_s: float
    widest_s: float


@inlined_kernel
def lengths_of(figures: Floats, s: int) -> Lengths:
    """Returns the figures of a state, without its price."""
    row = figures[s]
    return row[0], row[1], row[2], row[3], row[4], row[5], row[6]


@inlined_kernel
def priced_stage_s(i: int, j: int, behind: int, least: LeastStage, prices: PositionPrices) -> float:
    """Returns a lower bound on the price of a stage, by its layers, minus the price of the memory that it may hold."""
    f, b = prices.forward[behind], prices.backward[behind]
    found = prices.of_layers[i, behind] - prices.of_layers[j, behind] - prices.room_s[behind]
    return float(found + (f + b) * least.edges_s + f * least.forward_s + b * least.backward_s)


@inlined_kernel
def priced_row_s(behind: int, stage: tuple[float, float, float], prices: PositionPrices) -> float:
    """Returns the price of a stage by its seconds. Its memory is within the limit, so it can be left out."""
    f, b, sync = stage
    return float(prices.forward[behind] * f + prices.backward[behind] * b + prices.sync[behind] * sync)


@inlined_kernel
def _left_by(i: int, search: Lookup) -> _Left:
    tables, shape, _ = search
    ahead_s = tables.ahead_s[i]
    spare_s = shape.limit_s - max(shape.work_s, tables.own_s[i] + ahead_s)
    widest_s = spare_s * (shape.room[shape.most_stages] - shape.room[shape.most_stages - 1])
    longest_s = min(widest_s, shape.limit_s / shape.microbatches) * (1.0 + _OFF)
    least_share = tables.ahead_share[i] / longest_s if longest_s > 0.0 else 0.0
    widest_s = min(widest_s, (shape.limit_s - ahead_s) / shape.microbatches)
    return _Left(ahead_s, tables.ahead_f[i], least_share, spare_s, widest_s)


@inlined_kernel
def _may_take_s(behind: int, left: _Left, shape: FlushShape) -> float:
    """Returns the most that the first stage may take with ``behind`` stages behind it; negative if the positions in
    front have no room for the layers."""
    if left.ahead_s > left.spare_s * (shape.room[shape.most_stages] - shape.room[behind + 1]) and left.ahead_s > 0.0:
        return -1.0
    at_position_s = left.spare_s * (shape.room[behind + 1] - shape.room[behind])
    return float(min((shape.limit_s - left.ahead_s) / shape.microbatches, at_position_s))


@inlined_kernel
def _grown(
    s: int, behind: int, stage: tuple[float, float, float], search: Lookup, found: TailStates, left: _Left
) -> tuple[bool, Lengths]:
    """Returns the figures of a state with a stage in front, and whether they keep the limit."""
    shape = search.shape
    f, b, _ = stage
    tail = lengths_of(found.figures, s)
    lengths = put_in_front(shape.gpipe, shape.microbatches, behind, stage, (f, b), tail)
    batch_s = batch_with_ahead(shape.gpipe, shape.microbatches, left.ahead_s, left.ahead_f, lengths)
    return batch_s <= shape.limit_s, lengths


@inner_kernel
def _added(lengths: Lengths, priced_s: float, mix: int, new: _New, count: int) -> tuple[_New, int]:
    """Adds a state, unless one of the first ``count`` dominates it, and drops those that it dominates."""
    kept = 0
    for other in range(count):
        keep = True
        if new.mix[other] == mix:
            as_good = new.figures[other, PRICED] <= priced_s
            no_better = new.figures[other, PRICED] >= priced_s
            for column in range(FIGURES):
                as_good = as_good and new.figures[other, column] <= lengths[column]
                no_better = no_better and new.figures[other, column] >= lengths[column]
            if as_good:  # then none was dropped: what this one dominates, that one would have dominated
                return new, count
            keep = not no_better
        if keep:
            if kept != other:
                new.figures[kept] = new.figures[other]
                new.mix[kept] = new.mix[other]
            kept += 1
    if kept == new.mix.size:
        new = _New(twice_rows(new.figures), twice(new.mix))
    for column in range(FIGURES):
        new.figures[kept, column] = lengths[column]
    new.figures[kept, PRICED], new.mix[kept] = priced_s, mix
    return new, kept + 1


@inner_kernel
def _with_stages(
    i: int, j: int, left: _Left, search: Lookup, found: TailStates, room: RowRoom, new: _New, count: int
) -> tuple[_New, int, int]:
    """Adds the states of I that have a stage of I without J in front of a state of J. Returns also the approximate
    number of comparisons."""
    tables, shape, prices = search
    work = tables.tail.size
    for r in range(tables.sums.shape[0]):
        least = least_stage((i, j, r), left.widest_s, tables)
        if least.t > left.widest_s:
            continue
        known, rows = -1, 0  # the rows of a stage with ``known`` stages behind it
        for s in range(found.start[j], found.start[j] + found.size[j]):
            behind = stages_of(found.mix[s], shape)
            y = in_flight(shape, behind)
            if behind >= shape.most_stages or least.a * y + least.h > tables.memory_bytes[r]:
                break
            mix = put_on(found.mix[s], r, tables, shape)
            if mix < 0 or left.least_share > share_left(mix, shape):
                continue
            cap_s = _may_take_s(behind, left, shape)
            by_layers_s = priced_stage_s(i, j, behind, least, prices)
            most_priced_s = shape.limit_s - prices.ahead_s[i, behind + 1] - found.figures[s, PRICED]
            if least.t > cap_s or by_layers_s > most_priced_s:
                continue
            if known != behind:
                if not _grown(s, behind, (least.f, least.b, least.sync), search, found, left)[0]:
                    continue
                known = behind
                rows, _ = stage_rows((i, j, r), least, y, cap_s, tables, room)
                work += 50 * tables.edge_start.size
            work += 1 + rows * (1 + count)
            for row in range(rows):
                stage = (room.rows[row, 0], room.rows[row, 1], room.rows[row, 2])
                priced_s = max(by_layers_s, priced_row_s(behind, stage, prices))
                keeps, lengths = _grown(s, behind, stage, search, found, left)
                if keeps and priced_s <= most_priced_s:
                    new, count = _added(lengths, found.figures[s, PRICED] + priced_s, mix, new, count)
    return new, count, work


@inner_kernel
def _joined(i: int, new: _New, count: int, used: int, found: TailStates) -> TailStates:
    """Appends the states of I after ``used`` others."""
    figures, mix = found.figures, found.mix
    while used + count > mix.size:
        figures, mix = twice_rows(figures), twice(mix)
    order = stable_order(new.mix, count)
    for k in range(count):
        for column in range(FIGURES + 1):
            figures[used + k, column] = new.figures[order[k], column]
        mix[used + k] = new.mix[order[k]]
    found.start[i], found.size[i] = used, count
    return TailStates(found.start, found.size, figures, mix)


@inner_kernel
def tail_states(search: Lookup, control: Floats) -> tuple[int, float, TailStates]:
    """Finds the states of all downsets. Returns PROVED or FOUND, by whether one of all layers keeps the limit, and the
    least batch of these."""
    tables, shape, _ = search
    m = tables.bits.shape[0]
    found = _empty_tail(shape.gpipe, m)
    new = _New(np.empty((1024, FIGURES + 1)), np.empty(1024, np.int64))
    room = row_room(_MOST_ROWS, tables)
    live, live_s, live_count = np.zeros(m, np.int64), np.zeros(m), 1
    used, work = 1, 0
    for i in range(1, m):
        if control[0] != 0.0:
            return ENDED, 0.0, found
        if work > _MOST_WORK or used > _MOST_STATES:
            return TOO_MANY, 0.0, found
        left = _left_by(i, search)
        if left.spare_s < 0.0:
            continue
        count = 0
        least_behind_s = tables.own_s[i] - left.widest_s * (1.0 + _OFF) - _OFF * shape.work_s
        for n in range(first_above(live_s[:live_count], least_behind_s), live_count):
            work += 1
            if is_inside(tables.bits, live[n], i):
                new, count, looked = _with_stages(i, live[n], left, search, found, room, new, count)
                work += looked
        if count > 0:
            found = _joined(i, new, count, used, found)
            used += count
            live[live_count], live_s[live_count] = i, tables.own_s[i]
            live_count += 1
    least_batch_s = np.inf
    for s in range(found.start[m - 1], found.start[m - 1] + found.size[m - 1]):
        if ends_whole(found.mix[s], shape):
            least_batch_s = min(least_batch_s, batch_of(shape.gpipe, shape.microbatches, lengths_of(found.figures, s)))
    status = FOUND if least_batch_s < np.inf else PROVED
    return status, least_batch_s, TailStates(found.start, found.size, found.figures[:used], found.mix[:used])


@inner_kernel
def _empty_tail(gpipe: bool, m: int) -> TailStates:
    """Returns the state of no layers, with room for more."""
    figures, mix = np.zeros((4096, FIGURES + 1)), np.zeros(4096, np.int64)
    empty = no_stages(gpipe)
    for column in range(FIGURES):
        figures[0, column] = empty[column]
    size = np.zeros(m, np.int64)
    size[0] = 1
    return TailStates(np.zeros(m, np.int64), size, figures, mix)
