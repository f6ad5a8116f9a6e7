"""Kernels: which mixes of stages on several kinds of devices tails may have, and how they follow from each other.

A mix is a combination of numbers of stages on each kind, a *cell*, with the ends of the tail. Mix 0 is cell 0, of no
stages; cell c > 0 with ends e is mix e (cells - 1) + c. Tables are by cell: with three kinds there are nine ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel
from piper_ray.engine.kernels.flush_paths import Figures
from piper_ray.engine.kernels.flush_types import ONE_F_ONE_B, TWO_BW, FlushTask
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray


class ShareRoom(NamedTuple):
    """How much of a *share* stages can take. A stage on kind g that takes x seconds has x w_g of it, with any w_g > 0.

    slowest: for each second of a batch. filled: for each second of a batch that is left by ``spent_s`` of the tail
    behind these stages; inf: not known.
    """

    slowest: float
    filled: float


class MixTables(NamedTuple):
    """The fields of ``FlushTask`` with the same names."""

    next_cell: IndexArray
    previous_cell: IndexArray
    is_whole: BitArray
    share_left: FloatArray


class MixRules(NamedTuple):
    """What decides which cells there are, for g kinds and z moves."""

    fewest_stages: int  # of a plan
    most_stages: int
    fewest: IndexArray  # int64[g]: stages of a plan on each kind
    most: IndexArray  # int64[g]
    borders: IndexArray  # int64[g, most + 1]: see ``flush.mixes.MixLimits``
    moves: IndexArray  # int64[z, 3]: as in ``flush.mixes.MixLimits``, but -1 for neighbours on other kinds
    schedule: int
    microbatches: int
    share: FloatArray  # float64[g]: for each second on a kind; float64[0]: ``FlushTask.share_left`` is not wanted


@kernel
def mix_tables(rules: MixRules) -> MixTables:
    """Makes the tables, with cells in the order of their stages, and of those on each kind."""
    kinds, moves = rules.most.size, rules.moves.shape[0]
    stride = np.ones(kinds, np.int64)
    for kind in range(kinds - 2, -1, -1):
        stride[kind] = stride[kind + 1] * (rules.most[kind + 1] + 1)
    grid = stride[0] * (rules.most[0] + 1)
    begin = np.zeros(rules.most_stages + 2, np.int64)  # the first cell with this many stages
    for at in range(grid):
        stages = _stages_at(at, stride, rules.most)
        if stages <= rules.most_stages:
            begin[stages + 1] += 1
    for stages in range(rules.most_stages + 1):
        begin[stages + 1] += begin[stages]
    cells = begin[rules.most_stages + 1]
    cell_of, place = np.full(grid, -1, np.int64), np.empty(cells, np.int64)
    for at in range(grid):
        stages = _stages_at(at, stride, rules.most)
        if stages <= rules.most_stages:
            cell_of[at], place[begin[stages]] = begin[stages], at
            begin[stages] += 1
    next_cell, previous_cell = np.full((cells, moves), -1, np.int64), np.full((cells, kinds), -1, np.int64)
    is_whole, share_left = np.zeros(cells, np.uint8), np.zeros((cells if rules.share.size > 0 else 0, 2))
    left = np.zeros(kinds, np.int64)
    for cell in range(cells):
        at = place[cell]
        stages = _stages_at(at, stride, rules.most)
        whole = cell > 0 and stages >= rules.fewest_stages
        for kind in range(kinds):
            count = at // stride[kind] % (rules.most[kind] + 1)
            whole = whole and count >= rules.fewest[kind]
            if count > 0:
                previous_cell[cell, kind] = cell_of[at - stride[kind]]
            left[kind] = rules.most[kind] - count
        is_whole[cell] = whole
        if share_left.size > 0:
            room = share_room(rules.schedule, rules.microbatches, stages, rules.most_stages - stages, left, rules.share)
            share_left[cell, 0], share_left[cell, 1] = room.slowest, room.filled
        for move in range(moves):
            kind, behind, ahead = rules.moves[move, 0], rules.moves[move, 1], rules.moves[move, 2]
            count = at // stride[kind] % (rules.most[kind] + 1)
            if count == rules.most[kind] or (cell == 0 and behind < 0):  # behind no stages they count as its own kind
                continue
            if behind >= 0 and rules.borders[kind, count] != behind:
                continue
            if ahead >= 0 and rules.borders[kind, count + 1] != ahead:
                continue
            next_cell[cell, move] = cell_of[at + stride[kind]]
    return MixTables(next_cell, previous_cell, is_whole, share_left)


@kernel
def share_room(
    schedule: int, microbatches: int, behind: int, most_stages: int, most: IndexArray, share: FloatArray
) -> ShareRoom:
    """Returns the room of ``most_stages`` stages at most, ``most`` on each kind, with ``behind`` stages behind them.
    share: float64[g], the w_g.

    No stage takes more than T / m: hence ``slowest``. Under 1F1B let k stages have q behind them, stage j the j-th from
    the back. It takes x_j, and with m > q + k its own path has m - q - j times x_j, x_i once for each of the k in front
    of it and twice for each behind it (see ``flush_paths``): let B be that matrix, then B x <= T - spent. All its rows
    have the sum r = m - q + k - 1. So if the y with y B = w is not negative, w x = y B x <= (T - spent) sum y, where
    sum y = sum w / r. By columns, (m - q - j - 1) y_j = w_j - sum y - the y_i in front of j. From the front on, y_i is
    not negative and at most w_i / (m - q - k), if each w_j >= (1 / r + 1 / (m - q - k)) sum w. A w that is less is
    raised to that, as w x only grows. Then fewer or slower stages have no more room. Under GPipe B has m for x_j and
    1 for all others, and w_j >= sum w / r with r = m + k - 1 is enough.
    """
    kinds, left, stages, at_once = share.size, most_stages, 0, 0.0
    counts, done = np.zeros(kinds, np.int64), np.zeros(kinds, np.bool_)
    for _ in range(kinds):  # the fastest ones first
        fastest = -1
        for kind in range(kinds):
            if not done[kind] and (fastest < 0 or share[kind] > share[fastest]):
                fastest = kind
        done[fastest] = True
        counts[fastest] = min(most[fastest], left)
        left -= counts[fastest]
        stages += counts[fastest]
        at_once += counts[fastest] * share[fastest]
    slowest = at_once / microbatches
    rows = float(microbatches + stages - 1)
    least = 1.0 / rows
    if schedule == ONE_F_ONE_B:
        rows -= behind
        if microbatches <= behind + stages:
            return ShareRoom(slowest, np.inf)
        least = 1.0 / rows + 1.0 / (microbatches - behind - stages)
    if schedule == TWO_BW or stages == 0:
        return ShareRoom(slowest, np.inf)
    raised, total = 0.0, at_once
    for _ in range(kinds + 1):
        fast, slow = 0.0, 0
        for kind in range(kinds):
            if share[kind] < raised:
                slow += counts[kind]
            else:
                fast += counts[kind] * share[kind]
        if least * slow >= 1.0:
            return ShareRoom(slowest, np.inf)
        raised = max(raised, least * fast / (1.0 - least * slow))
        total = fast + slow * raised
    return ShareRoom(slowest, total / rows)


@kernel
def share_rooms(schedule: int, microbatches: int, most_stages: int, most: IndexArray, shares: FloatArray) -> FloatArray:
    """Returns float64[s]: the room of all stages of a plan, for each of ``shares``, float64[s, g]."""
    found = np.empty(shares.shape[0])
    for row in range(found.size):
        room = share_room(schedule, microbatches, 0, most_stages, most, shares[row])
        found[row] = min(room.slowest, room.filled)
    return found


@inlined_kernel
def spent_s(schedule: int, tail: Figures) -> float:
    """Returns the time of a batch that a tail of these figures takes, so that the stages in front cannot have it."""
    return tail[0] + tail[1] if schedule == ONE_F_ONE_B else tail[0]


@inlined_kernel
def is_shared_out(share: float, left_s: float, filled: float) -> bool:
    """Whether ``ShareRoom.filled`` says that stages cannot take this share in what is left of a batch."""
    return filled < np.inf and share > left_s * filled


@inlined_kernel
def _stages_at(at: int, stride: IndexArray, most: IndexArray) -> int:
    """Returns the number of stages of a cell, by its place in the grid of all combinations."""
    stages = 0
    for kind in range(stride.size):
        stages += at // stride[kind] % (most[kind] + 1)
    return stages


@inlined_kernel
def ends_of(mix: int, task: FlushTask) -> int:
    """Returns the number of the mix's ends; a tail of no stages may have any."""
    return (mix - 1) // (task.next_cell.shape[0] - 1) if mix > 0 else 0


@inlined_kernel
def mix_behind(mix: int, variant: int, task: FlushTask) -> int:
    """Returns the mix of the tail behind a stage of ``variant`` that is the first of a tail of ``mix``; -1: it cannot
    be."""
    cells = task.next_cell.shape[0] - 1
    cell = mix - task.ends_ahead[variant] * cells
    if cell < 1 or cell > cells:
        return -1
    behind = task.previous_cell[cell, task.ends_behind[variant] % task.previous_cell.shape[1]]
    if behind < 0 or task.next_cell[behind, task.move[variant]] != cell:
        return -1
    return behind + task.ends_behind[variant] * cells if behind > 0 else 0


@inlined_kernel
def may_be_first(variant: int, task: FlushTask) -> bool:
    """Whether the first stage of a plan may be of ``variant``: it counts as having one of its own kind in front."""
    return bool(task.ends_ahead[variant] % (task.previous_cell.shape[1] + 1) == 0)
