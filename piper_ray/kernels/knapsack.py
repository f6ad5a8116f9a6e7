"""Kernel: one option for each item, least total cost within a memory limit (multiple-choice knapsack), exactly.

Items with the same options are common (equal layers), so states are merged by dominance as in Nemhauser and Ullmann
(1969), and cut by the Lagrangian bound at the multiplier of the LP relaxation, found greedily along the convex hulls
of the items (Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11).
"""

from __future__ import annotations

import numpy as np

from piper_ray.kernels.jit import kernel
from piper_ray.kernels.types import FloatArray, IndexArray

INFEASIBLE = np.inf


@kernel
def hull_steps(
    start: IndexArray, cost: FloatArray, memory: FloatArray, begin: IndexArray
) -> tuple[IndexArray, FloatArray, FloatArray]:
    """Steps along each item's lower hull from its cheapest option to its smallest, by falling bytes saved per second.

    Option o of item k lies in start[k] .. start[k + 1] - 1; begin[k] is one of least cost. Returns the option reached,
    and for each step its extra cost and the memory it saves.
    """
    items = start.size - 1
    reached = np.empty(cost.size, np.int64)
    extra = np.empty(cost.size)
    saved = np.empty(cost.size)
    count = 0
    for k in range(items):
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
    order = np.argsort(slopes, kind="mergesort")
    return reached[order], extra[order], saved[order]


@kernel
def cheapest(start: IndexArray, cost: FloatArray, memory: FloatArray, item: int) -> int:
    """The option of least cost; of equal ones the one of least memory."""
    best = int(start[item])
    for o in range(start[item] + 1, start[item + 1]):
        if cost[o] < cost[best] or (cost[o] == cost[best] and memory[o] < memory[best]):
            best = o
    return best


@kernel
def least_cost(
    start: IndexArray, cost: FloatArray, memory: FloatArray, limit: float, budget: float, choice: IndexArray
) -> float:
    """Least cost with memory at most ``limit``, and its options in ``choice`` (int64[items]).

    INFEASIBLE if there is none of cost at most ``budget``.
    """
    items = start.size - 1
    item_of = np.empty(cost.size, np.int64)
    total_cost, total_memory = 0.0, 0.0
    for k in range(items):
        item_of[start[k] : start[k + 1]] = k
        choice[k] = cheapest(start, cost, memory, k)
        total_cost += cost[choice[k]]
        total_memory += memory[choice[k]]
    if total_cost > budget:
        return INFEASIBLE
    if total_memory <= limit:
        return total_cost

    # Greedy along the hulls: its value before the last step bounds from below (LP), after it from above.
    reached, extra, saved = hull_steps(start, cost, memory, choice)
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
    return _merge_states(start, cost, memory, limit, min(budget, total_cost), multiplier, choice, total_cost)


@kernel
def _merge_states(
    start: IndexArray,
    cost: FloatArray,
    memory: FloatArray,
    limit: float,
    budget: float,
    multiplier: float,
    choice: IndexArray,
    greedy_cost: float,
) -> float:
    """Adds item after item to all undominated partial choices that the bound leaves below ``budget``.

    ``choice`` comes in as the greedy choice, which stands if nothing cheaper is found.
    """
    items = start.size - 1
    rest = np.zeros(items + 1)  # of items k.., the least cost + multiplier * memory
    rest_memory = np.zeros(items + 1)
    for k in range(items - 1, -1, -1):
        least, least_memory = np.inf, np.inf
        for o in range(start[k], start[k + 1]):
            least = min(least, cost[o] + multiplier * memory[o])
            least_memory = min(least_memory, memory[o])
        rest[k] = rest[k + 1] + least
        rest_memory[k] = rest_memory[k + 1] + least_memory

    # States of all items so far, so that the choice can be read backwards.
    pool_parent = np.empty(1024, np.int64)
    pool_option = np.empty(1024, np.int64)
    pool = 1
    pool_parent[0] = -1
    pool_option[0] = -1
    state_cost = np.zeros(1)
    state_memory = np.zeros(1)
    state_id = np.zeros(1, np.int64)
    slack = 1e-12 * (abs(budget) + multiplier * limit)
    for k in range(items):
        width = start[k + 1] - start[k]
        new_cost = np.empty(state_cost.size * width)
        new_memory = np.empty(new_cost.size)
        new_from = np.empty(new_cost.size, np.int64)
        new_option = np.empty(new_cost.size, np.int64)
        count = 0
        for s in range(state_cost.size):
            for o in range(start[k], start[k + 1]):
                c = state_cost[s] + cost[o]
                m = state_memory[s] + memory[o]
                if m + rest_memory[k + 1] > limit * (1.0 + 1e-12):
                    continue
                if c + multiplier * (m - limit) + rest[k + 1] > budget + slack:
                    continue
                new_cost[count] = c
                new_memory[count] = m
                new_from[count] = state_id[s]
                new_option[count] = o
                count += 1
        order = np.argsort(new_cost[:count], kind="mergesort")
        state_cost = np.empty(count)
        state_memory = np.empty(count)
        state_id = np.empty(count, np.int64)
        kept = 0
        for at in order:
            if kept > 0 and new_memory[at] >= state_memory[kept - 1]:
                continue
            if pool == pool_parent.size:
                pool_parent = np.concatenate((pool_parent, np.empty(pool, np.int64)))
                pool_option = np.concatenate((pool_option, np.empty(pool, np.int64)))
            pool_parent[pool] = new_from[at]
            pool_option[pool] = new_option[at]
            state_cost[kept] = new_cost[at]
            state_memory[kept] = new_memory[at]
            state_id[kept] = pool
            kept += 1
            pool += 1
        state_cost = state_cost[:kept]
        state_memory = state_memory[:kept]
        state_id = state_id[:kept]

    for s in range(state_cost.size):
        if state_memory[s] <= limit and state_cost[s] < greedy_cost:
            at = state_id[s]
            for k in range(items - 1, -1, -1):
                choice[k] = pool_option[at]
                at = pool_parent[at]
            greedy_cost = state_cost[s]
            break
    return greedy_cost if greedy_cost <= budget else INFEASIBLE
