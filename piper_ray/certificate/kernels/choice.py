"""Kernel: whether some choice of configurations keeps a stage within its time and memory.

Both are in shares of what there is, so a choice fits if its times and its memories add up to no more than 1 each. For
any price p >= 0 none does if the least of time + p memory, added up over the layers, exceeds 1 + p. A price that shows
so is looked for by bisection. Where none is found all choices are gone through, less those that others are as good as.
"""

from __future__ import annotations

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats, Ints
from piper_ray.certificate.kernels.types import FITS, TOO_HARD, UNFIT
from piper_ray.compiled.jit import inner_kernel, leaf_kernel

_PRICES = 40
_LARGEST_PRICE = 1e12
_MOST_CHOICES = 1_000_000


@leaf_kernel
def _at_price(
    items: int, item: Ints, time: Floats, memory: Floats, price: float
) -> tuple[float, float, float]:
    """The least of time + price memory, and the time and memory of a choice that has it."""
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
    """FITS or UNFIT, or TOO_HARD where prices do not tell; and the last price looked at."""
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


@inner_kernel
def by_choices(items: int, item: Ints, time: Floats, memory: Floats, price: float) -> int:
    """FITS or UNFIT; TOO_HARD with too many choices to compare.

    Choices of the layers so far, by rising time and falling memory: those only that some choice of the others could
    complete, by their least time, their least memory, and their least at the price.
    """
    rest_time, rest_memory, rest_cost = np.zeros(items + 1), np.zeros(items + 1), np.zeros(items + 1)
    for k in range(items - 1, -1, -1):
        least_time, least_memory, least_cost = np.inf, np.inf, np.inf
        for o in range(item[k], item[k + 1]):
            least_time = min(least_time, time[o])
            least_memory = min(least_memory, memory[o])
            least_cost = min(least_cost, time[o] + price * memory[o])
        rest_time[k] = rest_time[k + 1] + least_time
        rest_memory[k] = rest_memory[k + 1] + least_memory
        rest_cost[k] = rest_cost[k + 1] + least_cost
    known_time, known_memory = np.zeros(1), np.zeros(1)
    for k in range(items):
        merged_time, merged_memory = np.empty(0), np.empty(0)
        for o in range(item[k], item[k + 1]):
            found_time = np.empty(merged_time.size + known_time.size)
            found_memory = np.empty(found_time.size)
            count, left, right = 0, 0, 0
            while left < merged_time.size or right < known_time.size:
                take_left = right == known_time.size
                if left < merged_time.size and not take_left:
                    take_left = merged_time[left] <= known_time[right] + time[o]
                if take_left:
                    total_time, total_memory = merged_time[left], merged_memory[left]
                    left += 1
                else:
                    total_time, total_memory = known_time[right] + time[o], known_memory[right] + memory[o]
                    right += 1
                    if total_time + rest_time[k + 1] > 1.0 or total_memory + rest_memory[k + 1] > 1.0:
                        continue
                    if total_time + price * total_memory + rest_cost[k + 1] > 1.0 + price:
                        continue
                if count > 0 and total_memory >= found_memory[count - 1]:
                    continue
                found_time[count], found_memory[count] = total_time, total_memory
                count += 1
            merged_time, merged_memory = found_time[:count], found_memory[:count]
            if count > _MOST_CHOICES:
                return TOO_HARD
        known_time, known_memory = merged_time, merged_memory
        if known_time.size == 0:
            return UNFIT
    return FITS
