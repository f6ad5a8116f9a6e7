"""What all chunks send and receive at least, on graphs with too many downsets to be listed.

A chunk pays for each edge at its borders, but not for an edge to another chunk of its rank. Chunks of a rank are at
least p apart, and no chunk is empty. So an edge is between two ranks wherever it is cut, if fewer than p - 1 layers may
be between the chunks of its ends by the other edges. Only such edges are counted; on ranks of a single chunk, all are.

Vertices are labelled as in front of a chunk, inside or behind it (``lattice.labelling``). For each number of layers in
front of a chunk and inside it the least is kept that any chunk pays. The cheapest way with as many steps as there are
chunks is a bound. Layers without an edge that is counted take no step: at most as many chunks as there are such layers
have no other layer, and these are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.cells import cell_ranges, every_stage, least_cost
from piper_ray.engine.lattice.labelling import Labelling

_MOST_INSIDE, _FEW_INSIDE = 64, 8
"""Chunks of up to so many layers are distinguished by their number; with fewer than the second there is no bound."""

_MOST_FIGURES, _MOST_MOVES = 30_000_000, 2_000_000_000
"""Limits on the figures that are kept at once, and on moves times numbers of layers."""

_A_LITTLE_LESS = 1.0 - 1e-9


class EdgeCosts(NamedTuple):
    """Of each edge of the graph: its ends' vertices; what it costs the chunks of its tail and of its head at least, in
    either direction."""

    tail: IndexArray
    head: IndexArray
    out_s: FloatArray
    in_s: FloatArray


def least_of_ways_s(labelling: Labelling, edges: EdgeCosts) -> FloatArray:
    """Returns float64[n + 1]: the least that this many chunks send and receive together, in either direction; edges
    that cost nothing are not counted."""
    moves, n = labelling.moves, labelling.moves.order.size
    steps = np.zeros(n, np.int64)
    paid = edges.out_s + edges.in_s > 0.0
    steps[edges.tail[paid]] = steps[edges.head[paid]] = 1
    counted = int(steps.sum())
    figures = 2 * int(moves.states.max()) * (counted + 1)
    most = min(_MOST_INSIDE, _MOST_FIGURES // figures, _MOST_MOVES // (labelling.label.size * (counted + 1))) - 2
    if counted == 0 or most < _FEW_INSIDE:
        return np.zeros(n + 1)
    most = min(most, counted)
    cost = labelling.charges.seconds(edges.in_s, edges.out_s)
    least_s = least_cost(labelling, steps, cost, cell_ranges(labelling, steps, every_stage(steps, most - 1)))
    # By the layers in front of a chunk's back and those inside it: the same by those in front of its front.
    inside = np.arange(1, most)
    front = np.arange(counted + 1)[:, None] - inside
    of_step_s = np.where(front >= 0, least_s[np.maximum(front, 0), inside], np.inf)
    reached_s, ways_s = np.full(counted + 1, np.inf), np.full(counted + 1, np.inf)
    reached_s[0] = 0.0
    for chunks in range(1, counted + 1):
        further_s = np.minimum.accumulate((reached_s + least_s[:, most])[: counted + 1 - most])
        reached_s = (reached_s[np.maximum(front, 0)] + of_step_s).min(axis=1, initial=np.inf)
        reached_s[most:] = np.minimum(reached_s[most:], further_s)
        ways_s[chunks] = reached_s[counted]
    ways_s[0] = 0.0
    ways_s = np.minimum.accumulate(ways_s[::-1])[::-1]
    of_chunks = np.maximum(0, np.arange(n + 1) - (n - counted))
    found: FloatArray = ways_s[np.minimum(of_chunks, counted)] * _A_LITTLE_LESS
    return found
