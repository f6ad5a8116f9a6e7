"""Circles in a small graph whose arcs gain or lose (Bellman and Ford)."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.simulate.kernels.events import Floats, Integers


@kernel
def gaining_circle(source: Integers, target: Integers, gain: Floats, nodes: int) -> Integers:
    """int64[arcs of it], the arcs of a circle that gains more than it loses, last first; empty if there is none.

    source, target: int64[arcs], nodes from 0. gain: float64[arcs].
    """
    best = np.zeros(nodes)
    by = np.full(nodes, -1, np.int64)
    changed = -1
    for _ in range(nodes + 1):
        changed = -1
        for arc in range(len(source)):
            reached = best[source[arc]] + gain[arc]
            if reached > best[target[arc]]:
                best[target[arc]] = reached
                by[target[arc]] = arc
                changed = target[arc]
        if changed < 0:
            return np.empty(0, np.int64)
    # What still improves after so many rounds hangs on a circle: going back that far ends on it.
    for _ in range(nodes):
        changed = source[by[changed]]
    circle = np.empty(nodes, np.int64)
    length, at = 0, changed
    while length == 0 or at != changed:
        circle[length] = by[at]
        length += 1
        at = source[by[at]]
    return circle[:length]
