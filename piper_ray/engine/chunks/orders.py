"""Orders of a model's layers that edges run along: runs of one make a plan, and those of others other plans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from piper_ray.engine.kernels.types import IndexArray

_TRIES = 4
"""Times as many orders are drawn as are wanted, as some come more than once."""


def linear_orders(predecessors: Sequence[Sequence[int]], seconds: Sequence[float], most: int) -> list[IndexArray]:
    """Some of them, int64[n] each, no two the same: layers by place. A chain has one.

    First the numbers themselves, then branch after branch in the sequence of numbers and its reverse, then all
    branches side by side, then branch after branch in random sequences. predecessors: of each layer, with smaller
    numbers. seconds: of each layer.
    """
    found: dict[bytes, IndexArray] = {}
    for tried, places in enumerate(_draws(predecessors, seconds)):
        order = np.array(places, np.int64)
        found.setdefault(order.tobytes(), order)
        if len(found) == most or tried == _TRIES * most:
            break
    return list(found.values())


def _draws(predecessors: Sequence[Sequence[int]], seconds: Sequence[float]) -> Iterator[list[int]]:
    n = len(predecessors)
    yield list(range(n))
    yield _branch_by_branch(predecessors, [float(x) for x in range(n)])
    yield _branch_by_branch(predecessors, [float(-x) for x in range(n)])
    yield _side_by_side(predecessors, seconds)
    draws = random.Random(0)
    while True:
        yield _branch_by_branch(predecessors, [draws.random() for _ in range(n)])


def _branch_by_branch(predecessors: Sequence[Sequence[int]], rank: Sequence[float]) -> list[int]:
    """Always a layer that the last one has made ready, if there is one; of several that of the least rank."""
    n = len(predecessors)
    successors: list[list[int]] = [[] for _ in range(n)]
    for x, tails in enumerate(predecessors):
        for tail in tails:
            successors[tail].append(x)
    missing = [len(tails) for tails in predecessors]
    ready = sorted((x for x in range(n) if not missing[x]), key=rank.__getitem__, reverse=True)
    found = []
    while ready:
        x = ready.pop()
        found.append(x)
        for head in sorted(successors[x], key=rank.__getitem__, reverse=True):
            missing[head] -= 1
            if not missing[head]:
                ready.append(head)
    return found


def _side_by_side(predecessors: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[int]:
    """By the part of the longest path through a layer that lies before it."""
    n = len(predecessors)
    before, behind = [0.0] * n, [0.0] * n
    for x in range(n):
        before[x] = max((before[tail] + seconds[tail] for tail in predecessors[x]), default=0.0)
    for x in reversed(range(n)):
        for tail in predecessors[x]:
            behind[tail] = max(behind[tail], behind[x] + seconds[x])
    part = [before[x] / max(before[x] + seconds[x] + behind[x], 1e-300) for x in range(n)]
    found: list[int] = []
    placed = 0
    for x in sorted(range(n), key=lambda x: (part[x], x)):  # where nothing takes any time, parts may be equal or worse
        if all(placed >> tail & 1 for tail in predecessors[x]):
            found.append(x)
            placed |= 1 << x
    return found if len(found) == n else list(range(n))
