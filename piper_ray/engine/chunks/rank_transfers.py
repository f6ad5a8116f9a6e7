"""What all ranks send and receive at least in plans of less than a given time, on graphs of any width.

A rank's chunks may have any set of the layers. It does their work, sends and receives for each edge between one of them
and another rank's layer, and all that takes no longer than its part of the batch. So no rank has many layers, and each
set of layers has edges to others. Ranks have all layers together.

Vertices are labelled as inside a set or outside (``lattice.labelling``). For each number of cells, a measure of work,
the least is kept that any set of so many cells sends and receives. A set of many cells may be too slow: what it takes
beyond the rank's time, at some prices, is added. What ``p`` sets with all cells cost together at least is a bound.

A layer that has much work and few bytes, such as an embedding, is cheap for a set; but only one set has it. So layers
without predecessors or without successors have a price, which all sets together pay once.

Where many layers read one, sets without such readers are cheap, and all sets could do without them. So each reader has
a negative price as well: what it receives, which all sets together get once. A set that holds the layer they read and
some readers would then cost less than nothing. So in a further row of prices the layer that is read has a price.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.kernels.rank_sets import least_of_parts, least_of_sets
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.lattice.cells import FEW_READERS, cells_along
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import LayerGraph

_CELLS = 512
"""About the number of cells: many for each rank, few enough for sums over pairs of them in a millisecond."""

_PRICES = (0.0, 0.0625, 1.0, 16.0)
"""Prices of a second beyond a rank's time. High ones forbid too much work, but make it pay to leave out small layers
with whole cells; low ones do not."""

_A_LITTLE_MORE, _A_LITTLE_LESS = 1.0 + 1e-9, 1.0 - 1e-9
"""Factors on times and sums, because sums are rounded."""


@dataclass(frozen=True)
class RankTransfers:
    """least_s: float64[prices of ends, ``_PRICES``, cells + 1], the least that a set sends and receives, in both
    directions, with the price of its ends and with each second that it takes at a price. once_s: float64[prices of
    ends], the price of all ends together."""

    least_s: FloatArray
    once_s: FloatArray

    @classmethod
    def of(
        cls, graph: LayerGraph, labelling: Labelling, work_s: FloatArray, out_s: FloatArray, in_s: FloatArray
    ) -> RankTransfers:
        """labelling: by ``SET_LABELS``. work_s: float64[n], the least time of each vertex for a microbatch. out_s,
        in_s: what each edge costs the rank of its tail and that of its head at least, in either direction."""
        moves, cells_of = labelling.moves, cells_along(graph, work_s, _CELLS)
        vertex = np.repeat(moves.order, np.diff(moves.move_start))
        transfers_s = 2.0 * labelling.charges.seconds(in_s, out_s)

        def least_s(second: float, end_s: FloatArray) -> FloatArray:
            inside_s = moves.inside * (second * work_s + end_s)[vertex]
            found: FloatArray = least_of_sets(moves, cells_of, (1.0 + second) * transfers_s + inside_s)
            return found

        ends = [not heads or not tails for heads, tails in zip(graph.successors, graph.predecessors, strict=True)]
        free_s, all_cells = np.zeros(work_s.size), int(cells_of.sum())
        usual_s = float(np.median(least_s(0.0, free_s)[all_cells // 16 : all_cells // 4 + 1]))
        prices = [free_s, np.where(np.array(ends) & (work_s > 0.0), usual_s if usual_s < np.inf else 0.0, 0.0)]
        of_readers_s, of_read_s = _received_s(graph, in_s)
        if of_readers_s.any():
            prices += [prices[-1] - 2.0 * of_readers_s, prices[-1] - 2.0 * of_readers_s + of_read_s]
        least = np.array([[least_s(second, end_s) for second in _PRICES] for end_s in prices])
        return cls(least, np.array([end_s.sum() for end_s in prices]))

    def least_together_s(self, ranks: int, rank_s: float) -> float:
        """Returns what all ranks send and receive at least, in either direction, if none takes more than ``rank_s`` for
        a microbatch.

        What a set takes beyond that is then at most 0, so at any price it may be added. Each layer is in one set, so
        the prices of ends are paid once.
        """
        beyond_s = np.multiply(_PRICES, rank_s * _A_LITTLE_MORE)[:, None]
        costs_s = (self.least_s - beyond_s).max(axis=1)
        each_s = [least_of_parts(cost_s, ranks) - once_s for cost_s, once_s in zip(costs_s, self.once_s, strict=True)]
        return 0.5 * max(0.0, *map(float, each_s)) * _A_LITTLE_LESS


def _received_s(graph: LayerGraph, in_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """float64[n] each: what vertices receive from those that many others read, one way; and what the others receive
    from such a vertex.

    Where a reader, such as a projection, serves one other vertex alone, the first vertex on its way that reads several
    stands for it. Else a set with the vertex that all read would have all readers, and get their prices for little.
    """
    received_s, read_s = np.zeros((2, graph.size))
    for (tail, head, _), edge_s in zip(graph.edges, in_s.tolist(), strict=True):
        if len(graph.successors[tail]) > FEW_READERS:
            at = head
            while len(graph.predecessors[at]) == 1 and len(graph.successors[at]) == 1:
                at = graph.successors[at][0]
            received_s[at] += edge_s
            read_s[tail] += edge_s
    return received_s, read_s
