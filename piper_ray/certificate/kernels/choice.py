"""Kernels: whether some choice of configurations keeps a stage within its time and memory.

Both are shares of the limits, so a choice fits if its times and its memories each sum to at most 1. For any price p >=
0 no choice fits if the least of time + p memory, summed over the layers, exceeds 1 + p. Such a price is sought by
bisection. If none is found, all choices are enumerated, without dominated ones.
"""

from __future__ import annotations

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.certificate.kernels.types import FITS, TOO_HARD, UNFIT
from piper_ray.compiled.jit import leaf_kernel

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
