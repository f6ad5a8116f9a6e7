"""Column generation: layers that share a memory, and schemes that no scheme of the rule table improves on.

For the known schemes, the search finds the price of a byte at which the layers' least time, with the memory paid for,
is the largest: no choice of known schemes takes less. At that price it looks for a cheaper scheme for each kind of
layer. If there is none, no choice of any schemes takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from piper_ray.workloads.schemes.scheme import Scheme

Taken = tuple[float, float]
"""A time in seconds and a size in bytes."""

_MOST_ROUNDS = 20
_NEAR = 1e-4
"""Relative to the cost: a scheme that is cheaper by less than this is not worth another round."""


class Cheapest(NamedTuple):
    """The cheapest scheme for a kind of layer at a price of memory. taken: its seconds and bytes. bottom_s: no scheme
    costs less. scheme: the scheme; None: a known one is the cheapest."""

    taken: Taken
    bottom_s: float
    scheme: Scheme | None


class LeastTime(NamedTuple):
    """bound_s: no choices take less. columns: the schemes that were cheaper than the known ones, each with the number
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
    """The least time for a number of layers of each kind, within the memory. known: the choices for a layer of each
    kind. cheapest: finds the cheapest scheme of a kind, given by its number, at a price of a byte in s. The search ends
    where the bound reaches ``enough_s``."""
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
    """The price of a byte, in s. At a higher price the cheapest choices hold less than the memory; at a lower price,
    more."""

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
    """The least cost of a layer, and the bytes of the choice with this cost."""
    return min((seconds + price_s * held_bytes, held_bytes) for seconds, held_bytes in rows)
