"""Kernels: dual prices of vertices, such that those of a stage sum to no more than the devices that it takes.

A plan covers each vertex by a stage. The fewest devices of a *fractional* cover are a lower bound for every plan; the
dual is a price for each vertex, such that those of a stage sum to at most its devices. ``dearest_stage`` finds the
stage that violates this most, ``solve_in_box`` solves the dual for the stages known so far.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import stable_order, twice
from piper_ray.compiled.jit import inner_kernel, kernel
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray


class LabelMoves(NamedTuple):
    """Moves of an automaton that labels vertices, see ``lattice.labelling``: by vertex in ``order``, then by target."""

    order: IndexArray  # int64[n]: vertices
    states: IndexArray  # int64[n + 1]: their number, before each vertex and at the end
    move_start: IndexArray  # int64[n + 1], into the arrays of moves
    source: IndexArray  # int64[moves]: state before the vertex
    target: IndexArray  # int64[moves]: state after it; ascending for each vertex
    inside: IndexArray  # int64[moves]: 1 if the vertex joins the stage


class StageKinds(NamedTuple):
    """Budgets of kinds of stages, each a variant with a degree d: the weights of a stage's vertices and the charges of
    its borders sum to at most its budget. Kinds: q.
    """

    devices: IndexArray  # int64[q]: t d
    variant: IndexArray  # int64[q]
    weight_s: FloatArray  # float64[q, n], inf if a vertex cannot be in such a stage
    budget_s: FloatArray  # float64[q]
    charge_s: FloatArray  # float64[r, moves]


_MOST_A_SECOND, _SECTIONS, _APART = 2.0, 10, 0.1
"""The largest price of a second that is tried, relative to the most that a stage is worth over its budget. How often
the range of prices is cut, to three fifths each time. Half the distance of two prices compared, relative to it."""

_ROUNDING = 1e-9
"""Relative rounding error of sums."""


class _StageWorth(NamedTuple):
    """Bounds on what a stage of a kind is worth after some of its vertices."""

    budget_s: float
    most: FloatArray  # from ``_most_price``
    a_second: float  # from ``_price_of_a_second``
    to_come: FloatArray


class _Partial(NamedTuple):
    """Stages over the vertices labelled so far, for each state by rising weight and price."""

    start: IndexArray  # int64[states + 1]
    weight_s: FloatArray
    price: FloatArray
    node: IndexArray  # of the tree that records the vertices


@kernel
def dearest_stage(
    moves: LabelMoves,
    kinds: StageKinds,
    cells: int,
    price: FloatArray,
    least_ratio: float,
    ratios: FloatArray,
    inside: BoolArray,
) -> tuple[float, int]:
    """Returns the largest ratio of price to devices of any stage, if above ``least_ratio``, and its kind; else -1.

    Partial stages whose weights differ by less than one of ``cells`` parts of the budget are merged, with the highest
    price and the least weight. So the ratio may be above that of any stage, but never below.

    ratios: float64[q], each kind's largest ratio of the last call, or a bound: decides the order of kinds, and is
    updated. inside: bool[n], receives the vertices of the stage.
    """
    found, best = -1, least_ratio
    chosen = np.empty(inside.size, np.bool_)
    for kind in stable_order(-ratios, ratios.size):
        devices, budget_s = kinds.devices[kind], kinds.budget_s[kind]
        most = _most_price(kinds.weight_s[kind], budget_s, cells, price)
        if most[0] <= best * devices:
            ratios[kind] = most[0] / devices
            continue
        weight_s, charge_s = kinds.weight_s[kind], kinds.charge_s[kinds.variant[kind]]
        value = best * devices
        a_second, to_come, whole = _price_of_a_second(moves, weight_s, charge_s, budget_s, price, value, most[0])
        if whole > value:
            bounds = _StageWorth(budget_s, most, a_second, to_come)
            value = _largest(moves, weight_s, charge_s, bounds, price, value, chosen)
        if value > best * devices:
            best, found = value / devices, kind
            for v in range(inside.size):
                inside[v] = chosen[v]
        ratios[kind] = min(best, whole / devices)
    return best, found


@inner_kernel
def _most_price(weight_s: FloatArray, budget_s: float, cells: int, price: FloatArray) -> FloatArray:
    """Returns float64[cells + 1]: the most price that vertices add with the budget left after each number of cells."""
    n = weight_s.size
    density = np.empty(n)
    for v in range(n):
        density[v] = -np.inf
        if weight_s[v] <= budget_s:
            density[v] = price[v] / max(weight_s[v], 1e-300)
    order = stable_order(-density, n)
    most = np.empty(cells + 1)
    at, used_s, total = 0, 0.0, 0.0
    for cell in range(cells, -1, -1):
        room_s = budget_s * (cells - cell) / cells
        while at < n and density[order[at]] >= 0.0 and used_s + weight_s[order[at]] <= room_s:
            used_s += weight_s[order[at]]
            total += price[order[at]]
            at += 1
        most[cell] = total
        if at < n and density[order[at]] > 0.0:
            most[cell] += (room_s - used_s) * density[order[at]]
        most[cell] *= 1.0 + 1e-12
    return most


@inner_kernel
def _price_of_a_second(
    moves: LabelMoves,
    weight_s: FloatArray,
    charge_s: FloatArray,
    budget_s: float,
    price: FloatArray,
    above: float,
    most: float,
) -> tuple[float, FloatArray, float]:
    """Returns a price of a second, the most that labels to come are worth at it, and the least bound found on the price
    of a stage: that of its budget, and what any stage is worth beyond its seconds.

    Every price gives a bound, and the bound is convex in it. The search ends where the bound is no more than ``above``.
    most: what a stage is worth at most in any case.
    """
    low, high = 0.0, _MOST_A_SECOND * most / budget_s
    a_second, found, least = high, _worth_to_come(moves, weight_s, charge_s, price, high), np.inf
    for _ in range(_SECTIONS):
        if least <= above:
            break
        lower, higher = 0.5 * (low + high) - _APART * (high - low), 0.5 * (low + high) + _APART * (high - low)
        below, beyond = (
            _worth_to_come(moves, weight_s, charge_s, price, lower),
            _worth_to_come(moves, weight_s, charge_s, price, higher),
        )
        if below[0] + lower * budget_s < beyond[0] + higher * budget_s:
            tried, to_come, high = lower, below, higher
        else:
            tried, to_come, low = higher, beyond, lower
        bound = to_come[0] + tried * budget_s * (1.0 + _ROUNDING)
        if bound < least:
            a_second, found, least = tried, to_come, bound
    return a_second, found, least


@inner_kernel
def _worth_to_come(
    moves: LabelMoves, weight_s: FloatArray, charge_s: FloatArray, price: FloatArray, a_second: float
) -> FloatArray:
    """Returns float64[states of all steps]: the most that the labels of later vertices add, in price minus the price of
    their seconds."""
    n = moves.order.size
    start = np.zeros(n + 2, np.int64)
    for k in range(n + 1):
        start[k + 1] = start[k] + moves.states[k]
    found = np.full(start[n + 1], -np.inf)
    found[start[n]] = 0.0
    for k in range(n - 1, -1, -1):
        v = moves.order[k]
        joining = price[v] - a_second * weight_s[v]
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            worth = found[start[k + 1] + moves.target[move]] - a_second * charge_s[move]
            if moves.inside[move] == 1:
                worth += joining
            source = start[k] + moves.source[move]
            found[source] = max(found[source], worth)
    return found


@inner_kernel
def _largest(
    moves: LabelMoves,
    weight_s: FloatArray,
    charge_s: FloatArray,
    bounds: _StageWorth,
    price: FloatArray,
    above: float,
    chosen: BoolArray,
) -> float:
    """Returns the largest price of a stage, if more than ``above``, with its vertices in ``chosen``."""
    budget_s, most, a_second, to_come = bounds
    cells = most.size - 1
    per_cell = cells / budget_s
    # A tree of choices: each node is a stage with its latest vertex, linked to the stage without it.
    parent, vertex = np.empty(4096, np.int64), np.empty(4096, np.int64)
    parent[0], vertex[0] = -1, -1
    nodes = 1
    known = _Partial(np.array([0, 1]), np.zeros(1), np.zeros(1), np.zeros(1, np.int64))
    best, lightest = np.full(cells + 1, -1.0), np.empty(cells + 1)
    node, joins = np.empty(cells + 1, np.int64), np.empty(cells + 1, np.int64)
    states = 0
    for k in range(moves.order.size):
        v = moves.order[k]
        states += moves.states[k]
        start = np.zeros(moves.states[k + 1] + 1, np.int64)
        room = 0
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            room += known.start[moves.source[move] + 1] - known.start[moves.source[move]]
        room = min(room, moves.states[k + 1] * (cells + 1))
        found = _Partial(start, np.empty(room), np.empty(room), np.empty(room, np.int64))
        used = 0
        move = moves.move_start[k]
        while move < moves.move_start[k + 1]:
            target = moves.target[move]
            low, high = cells + 1, -1
            beyond = above - to_come[states + target] - a_second * budget_s * (1.0 + _ROUNDING)
            while move < moves.move_start[k + 1] and moves.target[move] == target:
                joining = moves.inside[move] == 1
                extra_s = charge_s[move] + (weight_s[v] if joining else 0.0)
                gain = price[v] if joining else 0.0
                for at in range(known.start[moves.source[move]], known.start[moves.source[move] + 1]):
                    total_s = known.weight_s[at] + extra_s
                    if total_s > budget_s:
                        break
                    value = known.price[at] + gain
                    cell = min(int(total_s * per_cell), cells)
                    if value + most[cell] <= above or value - a_second * total_s <= beyond:
                        continue
                    low, high = min(low, cell), max(high, cell)
                    if best[cell] < 0.0:
                        lightest[cell] = total_s
                    lightest[cell] = min(lightest[cell], total_s)
                    if value > best[cell]:
                        best[cell], node[cell], joins[cell] = value, known.node[at], v if joining else -1
                move += 1
            top = -1.0
            for cell in range(low, high + 1):
                if best[cell] > top:
                    top = best[cell]
                    found.weight_s[used], found.price[used], found.node[used] = lightest[cell], top, node[cell]
                    if joins[cell] >= 0:
                        if nodes == parent.size:
                            parent, vertex = twice(parent), twice(vertex)
                        parent[nodes], vertex[nodes] = node[cell], joins[cell]
                        found.node[used] = nodes
                        nodes += 1
                    used += 1
                best[cell] = -1.0
            start[target + 1] = used
        known = _Partial(start, found.weight_s[:used], found.price[:used], found.node[:used])
    largest, last = above, 0
    for at in range(known.price.size):
        if known.price[at] > largest:
            largest, last = known.price[at], known.node[at]
    for v in range(chosen.size):
        chosen[v] = False
    while last > 0:
        chosen[vertex[last]] = True
        last = parent[last]
    return largest


@kernel
def least_spent_s(moves: LabelMoves, weight_s: FloatArray, charge_s: FloatArray, inside: BoolArray) -> float:
    """Returns the least that a stage of these vertices takes, wherever the others are; inf if there is no such stage.

    weight_s: float64[n], charge_s: float64[moves], of its kind.
    """
    spent_s = np.zeros(1)
    for k in range(moves.order.size):
        v = moves.order[k]
        after_s = np.full(moves.states[k + 1], np.inf)
        for move in range(moves.move_start[k], moves.move_start[k + 1]):
            if (moves.inside[move] == 1) == inside[v]:
                total_s = spent_s[moves.source[move]] + charge_s[move]
                after_s[moves.target[move]] = min(after_s[moves.target[move]], total_s)
        if inside[v]:
            for state in range(after_s.size):
                after_s[state] += weight_s[v]
        spent_s = after_s
    least_s = np.inf
    for total_s in spent_s:
        least_s = min(least_s, total_s)
    return float(least_s)


class CoverBasis(NamedTuple):
    """Columns of the cover, and a basis of them. Columns 0 .. n - 1 are single vertices at the upper end of the box,
    and n .. 2 n - 1 remove one at its lower end; then come stages.
    """

    member_start: IndexArray  # int64[columns + 1], into member
    member: IndexArray
    cost: FloatArray  # float64[columns]
    basis: IndexArray  # int64[n]: columns
    inverse: FloatArray  # float64[n, n], of the basis
    share: FloatArray  # float64[n]: how much of each column is in the cover


@kernel
def solve_in_box(cover: CoverBasis, columns: int, steps: int, price: FloatArray) -> int:
    """Makes primal simplex steps until no column is cheaper than its vertices' dual prices, or ``steps`` are done.

    columns: their number. price: float64[n], receives the dual values. Returns the number of steps.
    """
    member_start, member, cost, basis, inverse, share = cover
    n = basis.size
    move = np.empty(n)
    for v in range(n):
        price[v] = 0.0
    for row in range(n):
        for v in range(n):
            price[v] += cost[basis[row]] * inverse[row, v]
    for step in range(steps):
        entering, least = -1, -1e-9
        for v in range(n):
            if cost[v] - price[v] < least:
                entering, least = v, cost[v] - price[v]
            if cost[n + v] + price[v] < least:
                entering, least = n + v, cost[n + v] + price[v]
        for column in range(2 * n, columns):
            reduced = cost[column]
            for at in range(member_start[column], member_start[column + 1]):
                reduced -= price[member[at]]
            if reduced < least:
                entering, least = column, reduced
        if entering < 0:
            return step
        for row in range(n):
            move[row] = 0.0
            for at in range(member_start[entering], member_start[entering + 1]):
                move[row] += inverse[row, member[at]]
            if n <= entering < 2 * n:
                move[row] = -move[row]
        leaving, ratio = -1, np.inf
        for row in range(n):
            if move[row] > 1e-9 and share[row] / move[row] < ratio:
                leaving, ratio = row, share[row] / move[row]
        if leaving < 0:
            return step
        for v in range(n):
            inverse[leaving, v] /= move[leaving]
            price[v] += least * inverse[leaving, v]
        for row in range(n):
            if row != leaving:
                share[row] = max(0.0, share[row] - ratio * move[row])
                if move[row] != 0.0:
                    for v in range(n):
                        inverse[row, v] -= move[row] * inverse[leaving, v]
        share[leaving] = ratio
        basis[leaving] = entering
    return steps
