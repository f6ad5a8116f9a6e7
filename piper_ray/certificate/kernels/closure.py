"""Kernels: whether every stage in front of a listed tail leads to a listed one, or to one that no plan can have.

A stage in front is one that some choice of configurations keeps within its time and memory. Both are shares of the
limits, so a choice fits if its times and its memories each sum to at most 1. For any price p >= 0 no choice fits if the
least of time + p memory, summed over the layers, exceeds 1 + p. Such a price is sought by bisection. If none is found,
all choices are enumerated, without dominated ones.
"""

from __future__ import annotations

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints, first_above, holds, is_cut, is_inside
from piper_ray.certificate.kernels.types import FITS, TOO_HARD, UNFIT, Claim, ThreadScratch
from piper_ray.compiled.jit import inlined_kernel, leaf_kernel

_PRICES = 40
_LARGEST_PRICE = 1e12


@leaf_kernel
def _at_price(items: int, item: Ints, time: Floats, memory: Floats, price: float) -> tuple[float, float, float]:
    """Returns the least of time + price memory, and the time and memory of a choice with that value."""
    bound, total_time, total_memory = 0.0, 0.0, 0.0
    for k in range(items):
        best, best_memory, best_time = np.inf, np.inf, np.inf
        for o in range(item[k], item[k + 1]):
            cost = time[o] + price * memory[o]
            if cost < best or (cost == best and memory[o] < best_memory):
                best, best_memory, best_time = cost, memory[o], time[o]
        bound += best
        total_time += best_time
        total_memory += best_memory
    return bound, total_time, total_memory


@leaf_kernel
def by_prices(items: int, item: Ints, time: Floats, memory: Floats, guess: float) -> tuple[int, float]:
    """Returns FITS or UNFIT, or TOO_HARD if prices do not decide; and the last price tried."""
    bound, total_time, total_memory = _at_price(items, item, time, memory, 0.0)
    if bound > 1.0:
        return UNFIT, guess
    if total_memory <= 1.0:
        return FITS, guess
    low, high, price = 0.0, np.inf, guess
    for _ in range(_PRICES):
        bound, total_time, total_memory = _at_price(items, item, time, memory, price)
        if bound > 1.0 + price:
            return UNFIT, price
        if total_time <= 1.0 and total_memory <= 1.0:
            return FITS, price
        if total_memory > 1.0:
            low = price
        else:
            high = price
        if high == np.inf:
            if price >= _LARGEST_PRICE:
                break
            price *= 8.0
        elif low == 0.0:
            price = high / 8.0
        else:
            price = np.sqrt(low * high)
    return TOO_HARD, price


@leaf_kernel
def by_choices(
    items: int,
    item: Ints,
    time: Floats,
    memory: Floats,
    price: float,
    rest: Floats,
    room_time: Floats,
    room_memory: Floats,
) -> int:
    """Returns FITS or UNFIT; TOO_HARD if there are more choices to compare than there is room for.

    It keeps choices of the first layers, by rising time and falling memory, that the other layers might complete, by
    their least time, their least memory, and their least at the price. rest: float64[3, items], these three. room_time,
    room_memory: float64[3, room]: the known choices, those with the next layer's options so far, and one more.
    """
    for k in range(items - 1, -1, -1):
        least_time, least_memory, least_cost = np.inf, np.inf, np.inf
        for o in range(item[k], item[k + 1]):
            least_time = min(least_time, time[o])
            least_memory = min(least_memory, memory[o])
            least_cost = min(least_cost, time[o] + price * memory[o])
        after = k + 1 < items
        rest[0, k] = least_time + (rest[0, k + 1] if after else 0.0)
        rest[1, k] = least_memory + (rest[1, k + 1] if after else 0.0)
        rest[2, k] = least_cost + (rest[2, k + 1] if after else 0.0)
    known, merged, spare = 0, 1, 2
    room_time[known, 0] = room_memory[known, 0] = 0.0
    size = 1
    for k in range(items):
        later_time, later_memory, later_cost = 0.0, 0.0, 0.0
        if k + 1 < items:
            later_time, later_memory, later_cost = rest[0, k + 1], rest[1, k + 1], rest[2, k + 1]
        so_far = 0
        for o in range(item[k], item[k + 1]):
            if so_far + size > room_time.shape[1]:
                return TOO_HARD
            count, left, right = 0, 0, 0
            while left < so_far or right < size:
                if left < so_far and (right == size or room_time[merged, left] <= room_time[known, right] + time[o]):
                    total_time, total_memory = room_time[merged, left], room_memory[merged, left]
                    left += 1
                else:
                    total_time = room_time[known, right] + time[o]
                    total_memory = room_memory[known, right] + memory[o]
                    right += 1
                    if total_time + later_time > 1.0 or total_memory + later_memory > 1.0:
                        continue
                    if total_time + price * total_memory + later_cost > 1.0 + price:
                        continue
                if count == 0 or total_memory < room_memory[spare, count - 1]:
                    room_time[spare, count], room_memory[spare, count] = total_time, total_memory
                    count += 1
            merged, spare = spare, merged
            so_far = count
        known, merged = merged, known
        size = so_far
        if size == 0:
            return UNFIT
    return FITS


@inlined_kernel
def _is_listed(place: int, state: int, kind: int, more: int, total: int, claim: Claim) -> bool:
    """Whether a place has a listed state at most as large in all figures as another one with ``more`` devices of a
    kind, and a sum of ``total``."""
    _, cluster, _, _, tails = claim
    listed, spent = False, tails.spent[state] + more * cluster.prices[kind] + cluster.rounding
    for other in range(tails.start[place], tails.start[place + 1]):
        if listed or tails.spent[other] > spent:
            break
        listed = tails.data_parallel_sum[other] <= total
        for g in range(cluster.devices.size):
            listed = listed and tails.devices[other, g] <= tails.devices[state, g] + (more if g == kind else 0)
    return listed


@inlined_kernel
def _fill(i: int, j: int, r: int, k: int, y: int, claim: Claim, scratch: ThreadScratch) -> int:
    """Fills in the stage's options as shares of its time and memory. Returns its number of layers."""
    graph, cluster, ways, _, tails = claim
    d = cluster.degrees[k]
    budget_s, limit_bytes = cluster.budget_s * d, ways.memory_bytes[r]
    fixed_s = 0.0
    for tensor in range(graph.tensor_s.size):
        if is_cut(graph.tensors, tensor, tails.bits, i, j):
            fixed_s += graph.tensor_s[tensor]
    items, at = 0, 0
    scratch.item[0] = 0
    for v in range(ways.edge_start.size - 1):
        if not holds(tails.bits, i, v) or holds(tails.bits, j, v):
            continue
        for o in range(ways.start[r, v], ways.start[r, v + 1]):
            total_s = ways.time_s[o] + ways.weights_bytes[o] * ways.resync_s[r, k]
            for n in range(ways.edge_start[v], ways.edge_start[v + 1]):
                e = ways.edge[n]
                if graph.head[e] == v:
                    crosses = not holds(tails.bits, i, graph.tail[e])
                else:
                    crosses = holds(tails.bits, j, graph.head[e])
                if crosses:
                    total_s += ways.charge_s[ways.charge_start[o] + n - ways.edge_start[v]]
            if items == 0:
                total_s += fixed_s
            held = ways.a_bytes[o] * y + ways.b_bytes[o] + ways.shared_bytes[o] / d
            # If the limit is zero, the share is zero or too much.
            scratch.time[at] = total_s / budget_s if budget_s > 0.0 else (0.0 if total_s <= 0.0 else 2.0)
            scratch.memory[at] = held / limit_bytes if limit_bytes > 0.0 else (0.0 if held <= 0.0 else 2.0)
            at += 1
        items += 1
        scratch.item[items] = at
    return items


@leaf_kernel
def stage_fits(i: int, j: int, r: int, k: int, y: int, claim: Claim, scratch: ThreadScratch) -> int:
    """Whether stage I without J can keep the budgets in way r, with degree k and y microbatches in flight: FITS, UNFIT,
    or TOO_HARD to decide."""
    items = _fill(i, j, r, k, y, claim, scratch)
    found, price = by_prices(items, scratch.item, scratch.time, scratch.memory, scratch.price[r, k])
    scratch.price[r, k] = price
    if found == TOO_HARD:
        found = by_choices(
            items,
            scratch.item,
            scratch.time,
            scratch.memory,
            price,
            scratch.rest,
            scratch.room_time,
            scratch.room_memory,
        )
    return found


@inlined_kernel
def _leaving_s(i: int, r: int, crossings: int, claim: Claim, scratch: ThreadScratch) -> float:
    """Returns the cost of edges from the stage into J. All edges into J (in ``scratch``) were subtracted before."""
    graph, least, tails = claim.graph, claim.least, claim.tails
    total_s = 0.0
    for n in range(crossings):
        e = scratch.crossing[n]
        if holds(tails.bits, i, graph.tail[e]):
            total_s += least.incoming_s[r, e] + least.outgoing_s[r, e]
    return total_s


@inlined_kernel
def _stage_leads_out(
    i: int, j: int, front: int, state: int, crossings: int, claim: Claim, scratch: ThreadScratch
) -> int:
    """Whether I without J fits in front of a tail of J in a listed state, and the resulting tail is not listed."""
    _, cluster, ways, least, tails = claim
    kinds, later_sum = cluster.devices.size, tails.data_parallel_sum[state]
    for r in range(ways.degree.size):
        kind, t = ways.kind[r], ways.degree[r]
        if least.missing[r, i] > least.missing[r, j] or front != ways.behind[r] * kinds + kind:
            continue
        if i == tails.worth.size - 1 and ways.ahead[r] != kind:
            continue  # no stage is in front of all layers
        reached = (kind * kinds + ways.ahead[r]) * tails.worth.size + i
        most = min((cluster.devices[kind] - tails.devices[state, kind]) // t, tails.sum_limit[i] - later_sum)
        left = tails.room[i] - tails.spent[state]
        if most * t * cluster.prices[kind] > left:
            most = int(left / (t * cluster.prices[kind]))
        if most < cluster.degrees[ways.first[r]]:
            continue
        # The least that the stage takes on one device, without weights and tensors, however sums were rounded.
        least_s = least.time_s[r, i] - least.time_s[r, j] + least.into_s[r, i] - least.into_s[r, j]
        least_s -= least.rounding_s[r]
        if least_s > cluster.budget_s * most:
            continue
        k = ways.first[r]
        while k < ways.end[r] and least_s > cluster.budget_s * cluster.degrees[k]:
            k += 1
        if k == ways.end[r] or cluster.degrees[k] > most:
            continue
        if _is_listed(reached, state, kind, t * cluster.degrees[k], later_sum + cluster.degrees[k], claim):
            continue  # and so is the result with more replicas
        least_s += _leaving_s(i, r, crossings, claim, scratch)
        weights = max(0.0, least.weights_bytes[r, i] - least.weights_bytes[r, j] - least.rounding_weights[r])
        a_bytes = least.a_bytes[r, i] - least.a_bytes[r, j]
        b_bytes = least.b_bytes[r, i] - least.b_bytes[r, j]
        shared_bytes = least.shared_bytes[r, i] - least.shared_bytes[r, j]
        for k in range(ways.first[r], ways.end[r]):
            d = cluster.degrees[k]
            if d > most:
                break
            if least_s + weights * ways.resync_s[r, k] > cluster.budget_s * d:
                continue
            if _is_listed(reached, state, kind, t * d, later_sum + d, claim):
                break
            y = 1 + (later_sum + d - 1) // d
            held_bytes = a_bytes * y + b_bytes + shared_bytes / d
            if held_bytes - least.rounding_bytes[r] * y > ways.memory_bytes[r]:
                continue
            scratch.tested[1] += 1
            found = stage_fits(i, j, r, k, y, claim, scratch)
            if found != UNFIT:
                scratch.gap[0], scratch.gap[1], scratch.gap[2], scratch.gap[3] = j, i, r, k
                return found
    return UNFIT


@leaf_kernel
def first_gap(first: int, last: int, claim: Claim, scratch: ThreadScratch) -> int:
    """Checks all stages in front of the tails at the live places first .. last - 1.

    UNFIT if none leads to a tail that is not listed; FITS if one does, which is then in ``scratch.gap``; TOO_HARD if
    one may.
    """
    graph, cluster, _, _, tails = claim
    whole = tails.worth.size - 1
    for at in range(first, last):
        j, front = tails.live[at] % tails.worth.size, tails.live[at] // tails.worth.size
        crossings = 0
        for e in range(graph.tail.size):
            if holds(tails.bits, j, graph.head[e]) and not holds(tails.bits, j, graph.tail[e]):
                scratch.crossing[crossings] = e
                crossings += 1
        for state in range(tails.start[tails.live[at]], tails.start[tails.live[at] + 1]):
            spent = tails.spent[state]
            if spent > tails.room[j] or tails.data_parallel_sum[state] > tails.sum_limit[j]:
                continue
            done = 0
            for product in cluster.products:
                # A stage on that many devices is worth no more, and leaves enough for the layers in front of it.
                beyond = spent + product - cluster.worth + tails.worth[whole] - 2.0 * cluster.rounding
                upto = tails.worth[j] + product + 2.0 * cluster.rounding
                begin = max(done, first_above(tails.worth, beyond))
                done = max(done, first_above(tails.worth, upto))
                for i in range(begin, done):
                    if i == j or not is_inside(tails.bits, j, i):
                        continue
                    scratch.tested[0] += 1
                    found = _stage_leads_out(i, j, front, state, crossings, claim, scratch)
                    if found in (FITS, TOO_HARD):
                        return found
    return UNFIT
