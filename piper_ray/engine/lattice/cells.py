"""The work in front of a border in cells of a grid, and the least that stages between two cells cost."""

from __future__ import annotations

import numpy as np

from piper_ray.engine.kernels.cell_stages import CellLimits, LabelRanges, label_ranges, least_of_stages
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import LayerGraph

FEW_READERS = 4
"""A vertex that no more others read than this counts as its work alone."""


def cells_along(graph: LayerGraph, work_s: FloatArray, cells: int) -> IndexArray:
    """Returns int64[n]: the number of cells of each vertex, from its work. What is left of a cell goes to the vertex
    that comes next among its readers. ``cells`` is about their sum, with one cell at least if there is any work.

    So the number of cells between two vertices of a chain differs little from the work between them. Of layers side by
    side, all small ones count none, not some of them one: a stage could have those alone.
    """
    whole_s, found = float(work_s.sum()), np.zeros(work_s.size, np.int64)
    rest = work_s / whole_s * cells if whole_s > 0.0 else np.zeros(work_s.size)
    for v in range(work_s.size - 1, -1, -1):
        found[v] = max(0, round(rest[v]))
        if graph.successors[v]:
            rest[graph.successors[v][-1]] += rest[v] - found[v]
    if whole_s > 0.0 and not found.any():
        found[np.argmax(work_s)] = 1
    return found


def work_with_edges(own_s: FloatArray, tail: IndexArray, paid_s: FloatArray, share: float = 1.0) -> FloatArray:
    """Returns what each vertex counts in a grid: its work and, if many others read it, a share of what its edges cost.
    Two stages next to each other could both leave out such a vertex of little work, and its edges with it.

    own_s: float64[n]. tail, paid_s: of each edge.
    """
    dearest_s = np.zeros(own_s.size)
    np.maximum.at(dearest_s, tail, paid_s)
    beyond_s = np.bincount(tail, paid_s, own_s.size) - FEW_READERS * dearest_s
    found: FloatArray = own_s + share * np.maximum(0.0, beyond_s)
    return found


def every_stage(cells_of: IndexArray, most_inside: int) -> CellLimits:
    """Returns limits that tell apart stages of up to ``most_inside`` cells."""
    cells = int(cells_of.sum())
    return CellLimits(0, cells, 0, cells, most_inside)


def cell_ranges(stages: Labelling, cells_of: IndexArray, limits: CellLimits) -> LabelRanges:
    """Returns the ranges of cells in which stages are labelled. cells_of: int64[n]."""
    found: LabelRanges = frozen(label_ranges(stages.moves, stages.in_front, cells_of, limits))
    return found


def least_cost(stages: Labelling, cells_of: IndexArray, cost: FloatArray, ranges: LabelRanges) -> FloatArray:
    """Returns float64[f, w]: the least sum of a stage's costs, see ``kernels.cell_stages.least_of_stages``. cost:
    float64[moves]."""
    found: FloatArray = least_of_stages(stages.moves, stages.in_front, cells_of, cost, ranges)
    return found
