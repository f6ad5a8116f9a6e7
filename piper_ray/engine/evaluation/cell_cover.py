"""The fewest devices that stages take in front of a border and behind it, where only the cell of a border is known: the
amount of work in front of it (``kernels.cell_stages``).

Of all stages of a kind between two cells the quickest one counts, whichever downsets its borders are. So no plan that
keeps a threshold takes fewer devices than the cheapest way from cell to cell. Unlike dual prices, which share stages
out, a way consists of whole stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.dual_prices import GUARD, StageCover, kept_s
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.cells import cell_ranges, cells_along, every_stage, least_cost, work_with_edges
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.tables.problem import Problem

_WIDER = 1.5
"""If a stage of more cells than were expected may keep the threshold, this factor more numbers are distinguished."""

_MOST_FIGURES = 60_000_000
"""Limit on the figures that are kept at once, of 8 bytes each. Longer stages are bounded by lines."""

_SLOPES = (0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1)
"""The slopes of these lines, relative to the time of all layers."""

_READS = 0.25
"""How much of what its edges cost a vertex counts in cells, if more than a few others read it."""

_ROUNDING = 1e-11
"""Relative rounding error of sums."""


@dataclass(frozen=True)
class CellCover:
    """Stages between two cells, for thresholds of at most ``most_s``. cells_of: int64[n], the number of cells that each
    vertex counts in front of a border. Kinds of stages, those of most devices first: their devices, their degrees, what
    they may spend at ``most_s``, and what they spend at least, float64[cells in front, cells inside] each. steps: a
    measure of the time that it took, half a billion a second.
    """

    most_s: float
    cells_of: IndexArray
    devices: IndexArray
    degree: IndexArray
    budget_s: FloatArray
    spent_s: tuple[FloatArray, ...]
    steps: int

    @classmethod
    def of(
        cls, cover: StageCover, cells: int, most_s: float, known: CellCover | None, check: Callable[[], None]
    ) -> CellCover:
        """cells: about their number. known: on a coarser grid. check: may raise."""
        moves, kinds = cover.stages.moves, cover.kinds_at(kept_s(most_s))
        tail = np.array([tail for tail, _, _ in cover.graph.edges], np.int64)
        weight_s = work_with_edges(cover.replica_s, tail, cover.edge_s.min(axis=1), _READS)
        cells_of = cells_along(cover.graph, weight_s, cells)
        vertex, is_inside = np.repeat(moves.order, np.diff(moves.move_start)), moves.inside == 1
        all_cells, steps, spent_s = int(cells_of.sum()), 0, list[FloatArray]()
        budget_s = kinds.budget_s / (1.0 + GUARD)
        order = np.argsort(-kinds.devices, kind="stable")
        for number, kind in enumerate(order):
            weight_s, variant = kinds.weight_s[kind], kinds.variant[kind]
            cost = cover.stages.charge_s[variant] + np.where(is_inside, weight_s[vertex], 0.0)
            whole_s, most = float(weight_s[np.isfinite(weight_s)].sum()), all_cells
            if known is not None:
                most = known.spent_s[number].shape[1] * all_cells // max(1, int(known.cells_of.sum()))
            elif whole_s > budget_s[kind]:
                most = int(all_cells * budget_s[kind] / whole_s)
            while True:
                check()
                most = min(most + 2, all_cells)
                ranges = cell_ranges(cover.labelling, cells_of, every_stage(cells_of, most - 1))
                if ranges.figures > _MOST_FIGURES:
                    found, taken = _along_slopes(cover.labelling, cells_of, cost, whole_s)
                else:
                    found, taken = least_cost(cover.labelling, cells_of, cost, ranges), ranges.steps
                steps += taken
                if found.shape[1] > all_cells or found[:, most].min() > budget_s[kind]:
                    break
                most = int(_WIDER * most)
            useful = np.flatnonzero(found.min(axis=0) <= budget_s[kind] * (1.0 + _ROUNDING))
            spent_s.append(np.ascontiguousarray(found[:, : useful[-1] + 1 if useful.size else 0]))
        degree = kinds.devices // cover.degree_of(kinds.variant)
        return cls(most_s, cells_of, kinds.devices[order], degree[order], budget_s[order], tuple(spent_s), steps)

    def fewest(self, threshold_s: float) -> tuple[FloatArray, FloatArray]:
        """Returns float64[cells + 1] each, by the cells in front of a border: the fewest devices of stages in front of
        it, and of those behind it, if all keep the threshold; inf if they cannot."""
        size = int(self.cells_of.sum()) + 1
        devices_of = np.full((size, max((spent_s.shape[1] for spent_s in self.spent_s), default=0)), np.inf)
        budget_s = (self.budget_s - (kept_s(self.most_s) - kept_s(threshold_s)) * self.degree) * (1.0 + _ROUNDING)
        for devices, most_s, spent_s in zip(self.devices, budget_s, self.spent_s, strict=True):
            devices_of[:, : spent_s.shape[1]][spent_s <= most_s] = devices
        ahead, behind = np.full(size, np.inf), np.full(size, np.inf)
        ahead[0] = behind[-1] = 0.0
        for cell in range(size):
            to = ahead[cell : cell + devices_of.shape[1]]
            np.minimum(to, ahead[cell] + devices_of[cell, : to.size], out=to)
        for cell in range(size - 1, -1, -1):
            rest = behind[cell : cell + devices_of.shape[1]]
            behind[cell] = min(behind[cell], (rest + devices_of[cell, : rest.size]).min(initial=np.inf))
        return ahead, behind

    def needs_more_than(self, devices: int, threshold_s: float) -> bool:
        """Whether no plan that keeps the threshold has so few devices."""
        return bool(self.fewest(threshold_s)[0][-1] > devices)

    def completion(self, problem: Problem, threshold_s: float) -> Completion:
        """Computes the limits of downsets: what is outside takes at least as many devices as what is in front of a
        border of the same cell."""
        ahead, _ = self.fewest(threshold_s)
        behind = problem.workload.lattice.sums(self.cells_of[:, None].astype(np.float64))[:, 0].astype(np.int64)
        device_limit = np.maximum(problem.cluster.devices - ahead[ahead.size - 1 - behind], 0.0).astype(np.int64)
        device_limit.setflags(write=False)
        return Completion(threshold_s, device_limit)


def _along_slopes(stages: Labelling, cells_of: IndexArray, cost: FloatArray, whole_s: float) -> tuple[FloatArray, int]:
    """Returns bounds on ``least_cost`` for all numbers of cells, and the steps: if all stages in front of a border
    take at least a constant beyond some seconds a cell, so does one of w cells."""
    moves, size = stages.moves, int(cells_of.sum()) + 1
    joined = moves.inside * np.repeat(cells_of[moves.order], np.diff(moves.move_start))
    ranges = cell_ranges(stages, cells_of, every_stage(cells_of, -1))
    found = np.full((size, size), -np.inf)
    for slope in _SLOPES:
        a_cell_s = slope * whole_s / max(1, size - 1)
        beyond_s = least_cost(stages, cells_of, cost - a_cell_s * joined, ranges)
        found = np.maximum(found, beyond_s + a_cell_s * np.arange(size))
    found[np.add.outer(np.arange(size), np.arange(size)) >= size] = np.inf
    return found, len(_SLOPES) * ranges.steps
