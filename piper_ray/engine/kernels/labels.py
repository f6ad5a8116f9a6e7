"""Kernel: labels vertices one after the other, by the labels of the frontier (``lattice.labelling``)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import twice
from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.types import IndexArray

BEHIND, INSIDE, IN_FRONT, OUTSIDE = 0, 1, 2, 3

WIDEST = 31
"""The most vertices in a frontier: two bits of a word for the label of each."""

_FIRST = 1024
_SCATTER = 0x2545F4914F6CDD1D


class EdgesOfVertices(NamedTuple):
    """Of each vertex. start: int64[n + 1], into the other arrays. vertex: int64[..], neighbours. edge: int64[..], the
    edge to each. is_head: int64[..], 1 if the neighbour is its head."""

    start: IndexArray
    vertex: IndexArray
    edge: IndexArray
    is_head: IndexArray


class LabelledMoves(NamedTuple):
    """states, move_start, source, target: as in ``LabelMoves``. label: int64[moves], of the vertex. charge_start:
    int64[moves + 1], into ``charge``; front_start, front: likewise. All are empty if there are too many moves."""

    states: IndexArray
    move_start: IndexArray
    source: IndexArray
    target: IndexArray
    label: IndexArray
    charge_start: IndexArray
    charge: IndexArray
    front_start: IndexArray
    front: IndexArray


@kernel
def label_vertices(order: IndexArray, near: EdgesOfVertices, labels: IndexArray, most_moves: int) -> LabelledMoves:
    """Labels the vertices in ``order`` in all ways in which no label rises along an edge. The states of a vertex are
    numbered as its moves reach them first, by source and then by label. labels: int64[..], the possible ones,
    ascending."""
    n = order.size
    left, slot, used = np.diff(near.start), np.full(n, -1), 0
    codes = np.zeros(1, np.int64)  # of each state: the labels of the frontier, each in the bits of its vertex's slot
    states, move_start = np.ones(n + 1, np.int64), np.zeros(n + 1, np.int64)
    source, target, label = np.empty(_FIRST, np.int64), np.empty(_FIRST, np.int64), np.empty(_FIRST, np.int64)
    charge_start, front_start = np.zeros(_FIRST, np.int64), np.zeros(_FIRST, np.int64)
    charge, front = np.empty(_FIRST, np.int64), np.empty(_FIRST, np.int64)
    none = np.empty(0, np.int64)
    too_many = LabelledMoves(none, none, none, none, none, none, none, none, none)
    for k in range(n):
        v = order[k]
        closed = 0  # the bits of vertices that leave the frontier
        for at in range(near.start[v], near.start[v + 1]):
            w = near.vertex[at]
            if slot[w] >= 0:
                left[v] -= 1
                left[w] -= 1
                if left[w] == 0:
                    closed |= 3 << 2 * slot[w]
        own = -1
        if left[v] > 0:
            own = 0
            while own < WIDEST and (used & ~closed) >> 2 * own & 3 != 0:
                own += 1
            if own == WIDEST:
                return too_many
        begin = at_move = move_start[k]
        most = begin + codes.size * labels.size
        while most + 1 >= source.size:
            source, target, label = twice(source), twice(target), twice(label)
            charge_start, front_start = twice(charge_start), twice(front_start)
        reached = np.empty(codes.size * labels.size, np.int64)
        table, count = np.full(_power_above(2 * reached.size), -1), 0
        for state in range(codes.size):
            for of_v in labels:
                if not _may_follow(v, of_v, codes[state], near, slot):
                    continue
                code = codes[state] & ~closed
                if own >= 0:
                    code |= of_v << 2 * own
                at = _place(table, reached, code)
                if table[at] < 0:
                    table[at] = count
                    reached[count] = code
                    count += 1
                source[at_move], target[at_move], label[at_move] = state, table[at], of_v
                at_move += 1
        if at_move > most_moves:
            return too_many
        _sort_by_target(begin, at_move, count, source, target, label)
        for move in range(begin, at_move):
            at_charge, at_front = charge_start[move], front_start[move]
            for at in range(near.start[v], near.start[v + 1]):
                w = near.vertex[at]
                if slot[w] < 0:
                    continue
                tail, head = label[move], codes[source[move]] >> 2 * slot[w] & 3
                if near.is_head[at] == 0:
                    tail, head = head, tail
                if at_charge == charge.size:
                    charge = twice(charge)
                if at_front == front.size:
                    front = twice(front)
                if tail == INSIDE and head in (BEHIND, OUTSIDE):
                    charge[at_charge] = 2 * near.edge[at] + 1
                    at_charge += 1
                elif head == INSIDE and tail in (IN_FRONT, OUTSIDE):
                    charge[at_charge] = 2 * near.edge[at]
                    at_charge += 1
                if tail == IN_FRONT and head != IN_FRONT:
                    front[at_front] = 2 * near.edge[at] + 1
                    at_front += 1
            charge_start[move + 1], front_start[move + 1] = at_charge, at_front
        for at in range(near.start[v], near.start[v + 1]):
            w = near.vertex[at]
            if slot[w] >= 0 and left[w] == 0:
                slot[w] = -1
        used &= ~closed
        if own >= 0:
            slot[v] = own
            used |= 3 << 2 * own
        codes = reached[:count].copy()
        states[k + 1], move_start[k + 1] = count, at_move
    moves = move_start[n]
    return LabelledMoves(
        states,
        move_start,
        source[:moves].copy(),
        target[:moves].copy(),
        label[:moves].copy(),
        charge_start[: moves + 1].copy(),
        charge[: charge_start[moves]].copy(),
        front_start[: moves + 1].copy(),
        front[: front_start[moves]].copy(),
    )


@inner_kernel
def _may_follow(v: int, label: int, code: int, near: EdgesOfVertices, slot: IndexArray) -> bool:
    """Whether v may have the label in this state."""
    for at in range(near.start[v], near.start[v + 1]):
        w = near.vertex[at]
        if slot[w] < 0:
            continue
        tail, head = label, code >> 2 * slot[w] & 3
        if near.is_head[at] == 0:
            tail, head = head, tail
        if tail < head and head != OUTSIDE:
            return False
    return True


@leaf_kernel
def _power_above(least: int) -> int:
    """Returns a power of two that is larger."""
    found = 2
    while found <= least:
        found *= 2
    return found


@inner_kernel
def _place(table: IndexArray, codes: IndexArray, code: int) -> int:
    """Returns where the number of a code is in a table, or the empty place for it. table: int64[a power of two], -1
    where empty. codes: of the numbers."""
    at = (code * _SCATTER >> 20) & (table.size - 1)
    while table[at] >= 0 and codes[table[at]] != code:
        at = (at + 1) & (table.size - 1)
    return at


@inner_kernel
def _sort_by_target(
    begin: int, end: int, states: int, source: IndexArray, target: IndexArray, label: IndexArray
) -> None:
    """Sorts some moves by their targets; those of one target stay in order."""
    first = np.zeros(states + 1, np.int64)
    for move in range(begin, end):
        first[target[move] + 1] += 1
    for state in range(states):
        first[state + 1] += first[state]
    moves = np.empty((3, end - begin), np.int64)
    for move in range(begin, end):
        at = first[target[move]]
        first[target[move]] += 1
        moves[0, at], moves[1, at], moves[2, at] = source[move], target[move], label[move]
    for move in range(begin, end):
        source[move], target[move], label[move] = moves[0, move - begin], moves[1, move - begin], moves[2, move - begin]
