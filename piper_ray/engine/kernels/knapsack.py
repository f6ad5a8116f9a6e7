"""Kernels: one option for each item, with least total cost within a memory limit (multiple-choice knapsack), exactly.

Items with the same options are common (equal layers), so states are merged by dominance as in Nemhauser and Ullmann
(1969), and cut by the Lagrangian bound at the multiplier of the LP relaxation, found greedily along the convex hulls of
the items (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.arrays import stable_order, twice
from piper_ray.compiled.jit import inner_kernel, kernel
from piper_ray.engine.kernels.types import FloatArray, IndexArray, Items

INFEASIBLE = np.inf
TOO_HARD = -1.0
_MOST_STATES = 1_000_000
"""Largest number of partial choices of a step, some 50 MB; with more the answer is TOO_HARD."""

_MANY_STATES = 256
"""From this number of partial choices of a step on, a sharper bound takes less time than they do."""

_PRICES = 30


class CountBound(NamedTuple):
    """needed: the number of items that must have another option than their fastest. price: s per byte, and prize: s for
    each of these items, for which the bound is largest. lower, upper: bounds on the extra cost of all, in s.
    """

    needed: int
    price: float
    prize: float
    lower: float
    upper: float


@inner_kernel
def hull_steps(items: Items, begin: IndexArray) -> tuple[IndexArray, FloatArray, FloatArray]:
    """Returns the steps along each item's lower hull from its cheapest option to its smallest, by falling bytes saved
    per second.

    begin[k] is an option of item k of least cost. The result is the option reached, the extra cost and the saved memory
    of each step.
    """
    start, cost, memory = items
    reached = np.empty(cost.size, np.int64)
    extra = np.empty(cost.size)
    saved = np.empty(cost.size)
    count = 0
    for k in range(start.size - 1):
        at = begin[k]
        while True:
            best, best_slope = -1, -1.0
            for o in range(start[k], start[k + 1]):
                if memory[o] < memory[at]:
                    rise = cost[o] - cost[at]
                    slope = (memory[at] - memory[o]) / rise if rise > 0.0 else np.inf
                    if slope > best_slope or (slope == best_slope and memory[o] < memory[best]):
                        best, best_slope = o, slope
            if best < 0:
                break
            reached[count] = best
            extra[count] = max(0.0, cost[best] - cost[at])
            saved[count] = memory[at] - memory[best]
            count += 1
            at = best
    slopes = np.empty(count)
    for c in range(count):
        slopes[c] = -saved[c] / extra[c] if extra[c] > 0.0 else -np.inf
    order = stable_order(slopes, count)
    of_steps = np.empty(count, np.int64)
    extra_of_steps, saved_of_steps = np.empty(count), np.empty(count)
    for c in range(count):
        of_steps[c] = reached[order[c]]
        extra_of_steps[c], saved_of_steps[c] = extra[order[c]], saved[order[c]]
    return of_steps, extra_of_steps, saved_of_steps


@inner_kernel
def cheapest(items: Items, item: int) -> int:
    """Returns the option of least cost; of equal ones the one of least memory."""
    start, cost, memory = items
    best = int(start[item])
    for o in range(start[item] + 1, start[item + 1]):
        if cost[o] < cost[best] or (cost[o] == cost[best] and memory[o] < memory[best]):
            best = o
    return best


@kernel
def least_cost(items: Items, limit: float, budget: float, any_within: bool, choice: IndexArray) -> float:
    """Returns the least cost with memory at most ``limit``, and its options in ``choice`` (int64[items]).

    INFEASIBLE if there is none of cost at most ``budget``. any_within: the first choice found within the budget
    suffices. TOO_HARD if there are too many partial choices, as there can be if all options save memory at about the
    same rate and all items differ.
    """
    start, cost, memory = items
    item_of = np.empty(cost.size, np.int64)
    total_cost, total_memory = 0.0, 0.0
    for k in range(start.size - 1):
        for o in range(start[k], start[k + 1]):
            item_of[o] = k
        choice[k] = cheapest(items, k)
        total_cost += cost[choice[k]]
        total_memory += memory[choice[k]]
    if total_cost > budget:
        return INFEASIBLE
    if total_memory <= limit:
        return total_cost

    # Greedy along the hulls: its value before the last step is a lower bound (LP), after it an upper one.
    reached, extra, saved = hull_steps(items, choice)
    multiplier = -1.0
    for c in range(reached.size):
        choice[item_of[reached[c]]] = reached[c]
        if total_memory - saved[c] <= limit:
            multiplier = extra[c] / saved[c]
            if total_cost + (total_memory - limit) * multiplier > budget * (1.0 + 1e-12):
                return INFEASIBLE
            total_cost += extra[c]
            break
        total_cost += extra[c]
        total_memory -= saved[c]
    if multiplier < 0.0:
        return INFEASIBLE
    if any_within and total_cost <= budget:
        return total_cost
    return _merge_states(items, limit, budget, any_within, multiplier, choice, total_cost)


@inner_kernel
def _count_bound(
    items: Items, fastest: IndexArray, excess: float, slack: float, left: float, choice: IndexArray
) -> CountBound:
    """Bounds the extra cost of options that save ``excess`` bytes over the fastest ones, by the number of items that
    need others.

    It is Lagrangian, with a price for memory, bisected, and one for the count. If ``left`` is not negative, it ends
    once the bounds decide whether that many seconds suffice; if they do, ``choice`` becomes such options. slack: saving
    that many bytes less may suffice too, as sums round; the lower bound holds for all choices that do.
    """
    start, cost, memory = items
    count = start.size - 1
    taken = np.empty(count, np.int64)
    largest, score = np.empty(count), np.empty(count)
    extra, saved = np.empty(count), np.empty(count)
    least = np.inf
    for k in range(count):
        at = fastest[k]
        largest[k] = 0.0
        for o in range(start[k], start[k + 1]):
            if memory[o] < memory[at]:
                largest[k] = min(largest[k], memory[o] - memory[at])
                least = min(least, max(0.0, cost[o] - cost[at]))
    order = stable_order(largest, count)
    needed, reach = 0, 0.0
    while needed < count and reach < excess - slack:
        reach -= largest[order[needed]]
        needed += 1
    if needed == 0:
        return CountBound(0, 0.0, 0.0, 0.0, np.inf)
    lower, upper, best_price, best_prize = 0.0, np.inf, 0.0, 0.0
    low, high, price = 0.0, np.inf, max(least * needed / excess, 1e-300)
    for _ in range(_PRICES):
        for k in range(count):
            at = fastest[k]
            score[k], extra[k], saved[k] = np.inf, np.inf, 0.0
            for o in range(start[k], start[k + 1]):
                less = memory[at] - memory[o]
                more = cost[o] - cost[at]
                if less > 0.0 and more - price * less < score[k]:
                    score[k], extra[k], saved[k], taken[k] = more - price * less, more, less, o
        order = stable_order(score, count)
        prize = max(0.0, score[order[needed - 1]])
        bound, total, bytes_saved = prize * needed + price * (excess - slack), 0.0, 0.0
        for rank in range(count):
            k = order[rank]
            if rank < needed:
                total += extra[k]
                bytes_saved += saved[k]
            elif score[k] >= prize:
                break
            bound += min(0.0, score[k] - prize)
        if bound > lower:
            lower, best_price, best_prize = bound, price, prize
        if bytes_saved >= excess:
            upper, high = min(upper, total), price
        else:
            low = price
        if upper <= left:
            for k in range(count):
                choice[k] = fastest[k]
            for rank in range(needed):
                choice[order[rank]] = taken[order[rank]]
            break
        if 0.0 <= left < lower - 1e-12 * (left + lower):
            break
        price = 2.0 * price if high == np.inf else 0.5 * (low + high)
    return CountBound(needed, best_price, best_prize, lower, upper)


@inner_kernel
def _rests(items: Items, multiplier: float) -> tuple[IndexArray, FloatArray, FloatArray]:
    """Returns three simple ways to choose for items k..: cheapest, smallest, and least cost + multiplier * memory.

    The result is the options, int64[3, items], and cost and memory of items k.., float64[3, items + 1].
    """
    start, cost, memory = items
    count = start.size - 1
    option = np.empty((3, count), np.int64)
    rest_cost = np.zeros((3, count + 1))
    rest_memory = np.zeros((3, count + 1))
    for k in range(count - 1, -1, -1):
        option[0, k] = cheapest(items, k)
        option[1, k] = start[k]
        option[2, k] = start[k]
        for o in range(start[k] + 1, start[k + 1]):
            if memory[o] < memory[option[1, k]]:
                option[1, k] = o
            if cost[o] + multiplier * memory[o] < cost[option[2, k]] + multiplier * memory[option[2, k]]:
                option[2, k] = o
        for way in range(3):
            rest_cost[way, k] = rest_cost[way, k + 1] + cost[option[way, k]]
            rest_memory[way, k] = rest_memory[way, k + 1] + memory[option[way, k]]
    return option, rest_cost, rest_memory


@inner_kernel
def _merge_states(
    items: Items,
    limit: float,
    budget: float,
    any_within: bool,
    multiplier: float,
    choice: IndexArray,
    greedy_cost: float,
) -> float:
    """Adds items one by one to all undominated partial choices whose bound is below the best known.

    ``choice`` holds the greedy choice at first, and keeps it if nothing cheaper is found. Each partial choice is also
    completed in three simple ways: this finds a choice early if there are many.
    """
    start, cost, memory = items
    option, rest_cost, rest_memory = _rests(items, multiplier)
    best = greedy_cost
    best_state, best_way, best_items = np.int64(-1), 0, 0
    # A bound by how many items must have another option: not used until it is worth its time.
    count_bound = CountBound(0, 0.0, 0.0, 0.0, np.inf)
    rest_bound = np.zeros(start.size)
    known = np.inf

    # States of all items so far are kept, so that the choice can be read backwards.
    pool_parent = np.empty(1024, np.int64)
    pool_option = np.empty(1024, np.int64)
    pool = 1
    pool_parent[0] = -1
    pool_option[0] = -1
    state_cost = np.zeros(1)
    state_memory = np.zeros(1)
    state_others = np.zeros(1, np.int64)
    state_id = np.zeros(1, np.int64)
    for k in range(start.size - 1):
        width = start[k + 1] - start[k]
        if count_bound.needed == 0 and state_cost.size * width > _MANY_STATES:
            left = budget - rest_cost[0, 0] if any_within else -1.0
            excess, slack = rest_memory[0, 0] - limit, 1e-12 * limit
            count_bound = _count_bound(items, option[0], excess, slack, left, choice)
            known = rest_cost[0, 0] + count_bound.upper
            if any_within and known <= budget:
                return float(known)
            if rest_cost[0, 0] + count_bound.lower > budget * (1.0 + 1e-12):
                return INFEASIBLE
            _add_rest_bounds(items, option[0], count_bound, rest_bound)
        if state_cost.size * width > _MOST_STATES:
            return TOO_HARD
        new_cost = np.empty(state_cost.size * width)
        new_memory = np.empty(new_cost.size)
        new_others = np.empty(new_cost.size, np.int64)
        new_from = np.empty(new_cost.size, np.int64)
        new_option = np.empty(new_cost.size, np.int64)
        count = 0
        most = min(budget, best, known)
        most += 1e-12 * (abs(budget) + multiplier * limit if np.isfinite(budget) else abs(best))
        most_by_count = most - count_bound.prize * count_bound.needed + count_bound.price * limit
        for s in range(state_cost.size):
            for o in range(start[k], start[k + 1]):
                c = state_cost[s] + cost[o]
                m = state_memory[s] + memory[o]
                if m + rest_memory[1, k + 1] > limit * (1.0 + 1e-12):
                    continue
                if c + rest_cost[2, k + 1] + multiplier * (m + rest_memory[2, k + 1] - limit) > most:
                    continue
                others = state_others[s] + (1 if memory[o] < memory[option[0, k]] else 0)
                if count_bound.needed > 0:
                    by_count = c - count_bound.prize * others + count_bound.price * m + rest_bound[k + 1]
                    if by_count > most_by_count + 1e-12 * (abs(by_count) + abs(most_by_count)):
                        continue
                new_cost[count] = c
                new_memory[count] = m
                new_others[count] = others
                new_from[count] = state_id[s]
                new_option[count] = o
                count += 1
        order = stable_order(new_cost, count)
        state_cost = np.empty(count)
        state_memory = np.empty(count)
        state_others = np.empty(count, np.int64)
        state_id = np.empty(count, np.int64)
        kept = 0
        for at in order:
            if kept > 0 and new_memory[at] >= state_memory[kept - 1]:
                continue
            if pool == pool_parent.size:
                pool_parent = twice(pool_parent)
                pool_option = twice(pool_option)
            pool_parent[pool] = new_from[at]
            pool_option[pool] = new_option[at]
            state_cost[kept] = new_cost[at]
            state_memory[kept] = new_memory[at]
            state_others[kept] = new_others[at]
            state_id[kept] = pool
            for way in range(3):
                whole = new_cost[at] + rest_cost[way, k + 1]
                if whole < best and new_memory[at] + rest_memory[way, k + 1] <= limit:
                    best, best_state, best_way, best_items = whole, np.int64(pool), way, k + 1
            kept += 1
            pool += 1
        state_cost = state_cost[:kept]
        state_memory = state_memory[:kept]
        state_others = state_others[:kept]
        state_id = state_id[:kept]
        if any_within and best <= budget:
            break

    if best_state >= 0:
        for k in range(best_items, start.size - 1):
            choice[k] = option[best_way, k]
        at = best_state
        for k in range(best_items - 1, -1, -1):
            choice[k] = pool_option[at]
            at = pool_parent[at]
    return best if best <= budget else INFEASIBLE


@inner_kernel
def _add_rest_bounds(items: Items, fastest: IndexArray, bound: CountBound, rest_bound: FloatArray) -> None:
    """Fills ``rest_bound``, float64[items + 1]: the least of cost, plus memory at its price, minus prizes, of items k..
    ."""
    start, cost, memory = items
    for k in range(start.size - 2, -1, -1):
        least = np.inf
        for o in range(start[k], start[k + 1]):
            prize = bound.prize if memory[o] < memory[fastest[k]] else 0.0
            least = min(least, cost[o] + bound.price * memory[o] - prize)
        rest_bound[k] = rest_bound[k + 1] + least
