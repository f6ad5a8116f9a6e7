"""Column generation: layers that share a memory, and the schemes that none of the rule table improves on.

Of what is known the price of a byte is found at which the layers' least time, with the memory paid for, is the most: no
choice of what is known takes less. Each kind of layer is asked for something cheaper at that price. Where there is
nothing, no choice of anything takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from piper_ray.workloads.schemes.scheme import Scheme

Taken = tuple[float, float]
"""Seconds and bytes."""

_MOST_ROUNDS = 20
_NEAR = 1e-4
"""Of its cost: what is cheaper by less is not worth another round."""


class Cheapest(NamedTuple):
    """Of a kind of layer at a price of memory. taken: by what costs the least. bottom_s: nothing costs less. scheme:
    the one that costs the least; None: something that is known."""

    taken: Taken
    bottom_s: float
    scheme: Scheme | None


class LeastTime(NamedTuple):
    """bound_s: no choices take less. columns: the schemes that were cheaper than what was known, each with the number
    of its kind."""

    bound_s: float
    columns: list[tuple[int, Scheme]]


def least_time(
    counts: Sequence[int],
    known: Sequence[Sequence[Taken]],
    most_bytes: float,
    cheapest: Callable[[int, float], Cheapest],
    enough_s: float,
) -> LeastTime:
    """For a number of layers of each kind, within the memory. known: what may be chosen for a layer of each kind.
    cheapest: of a kind, by its number, at a price of a byte in s. The search ends where the bound is ``enough_s``."""
    rows, columns, bound_s = [[*one] for one in known], list[tuple[int, Scheme]](), 0.0
    for _ in range(_MOST_ROUNDS):
        price_s, before = price_of_memory(counts, rows, most_bytes), len(columns)
        round_s = -price_s * most_bytes
        for kind, count in enumerate(counts):
            found, cost_s = cheapest(kind, price_s), _cost_s(rows[kind], price_s)[0]
            if found.scheme is not None and found.taken[0] + price_s * found.taken[1] < cost_s * (1.0 - _NEAR):
                rows[kind].append(found.taken)
                columns.append((kind, found.scheme))
            round_s += count * min(cost_s, found.bottom_s)
        bound_s = max(bound_s, round_s)
        if len(columns) == before or bound_s >= enough_s:
            break
    return LeastTime(bound_s, columns)


def price_of_memory(counts: Sequence[int], known: Sequence[Sequence[Taken]], most_bytes: float) -> float:
    """In s for a byte. Where it is higher, the cheapest choices hold less than there is; where lower, more."""

    def is_low(price_s: float) -> bool:
        return sum(n * _cost_s(rows, price_s)[1] for n, rows in zip(counts, known, strict=True)) > most_bytes

    if not is_low(0.0):
        return 0.0
    low_s = 0.0
    high_s = sum(n * max(seconds for seconds, _ in rows) for n, rows in zip(counts, known, strict=True)) / 1024.0**2
    for _ in range(60):
        price_s = (low_s + high_s) / 2.0
        low_s, high_s = (price_s, high_s) if is_low(price_s) else (low_s, price_s)
    return high_s


def _cost_s(rows: Sequence[Taken], price_s: float) -> Taken:
    """The least cost of a layer, and the bytes that it has for that."""
    return min((seconds + price_s * held_bytes, held_bytes) for seconds, held_bytes in rows)
