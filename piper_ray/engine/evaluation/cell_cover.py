"""The fewest devices that stages take in front of a border of which only the cell is known: the amount of work in front
of it (``kernels.cell_stages``).

Of all stages of a kind between two cells the quickest one counts, whichever downsets its borders are. So no plan that
keeps a threshold takes fewer devices than the cheapest way from cell to cell. Unlike dual prices, which share stages
out, a way consists of whole stages.

The quickest stage may have less work than its cells stand for. Over all stages of a plan, the work of vertices and the
work that cells stand for have the same sum. So a second that a stage has more of the former may have a price, and one
that it has less costs as much: the sum over a plan stays its number of devices. A stage has at most the work
for which its budget suffices after the least that its edges cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.dual_prices import GUARD, StageCover, kept_s
from piper_ray.engine.kernels.cell_stages import KindFigures, KindLimits, cheapest_in_front, cheapest_with_each_kind
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.cells import cell_ranges, cells_along, every_stage, least_cost, work_with_edges
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.tables.problem import Problem

_WIDER = 1.5
"""If a stage of more cells than were expected may keep the threshold, this factor more numbers are distinguished."""

_MOST_FIGURES = 60_000_000
"""Limit on the figures that are kept at once, of 8 bytes each. Longer stages are bounded by lines."""

_SLOPES = (0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1)
"""The slopes of these lines, relative to the time of all layers."""

_SHORT = 5
"""How many times longer a step takes for lines, which do not tell stages apart by their cells."""

_PRICES = (0.0, 0.25, 0.5, 0.75)
"""Prices of a second of work, in shares of what it costs if all devices together have all work. At that cost itself,
stages without cells would cost less than nothing."""

_ROUNDING = 1e-11
"""Relative rounding error of sums."""

_PART = 1e-6
"""A part of a device, larger than rounding errors of sums of devices."""


_MARGIN = 0.1
"""A share of what is added for each stage. It is larger than the rounding errors of sums of devices."""


@dataclass(frozen=True)
class CellCover:
    """Stages between two cells, for thresholds of at most ``most_s``.

    cells_of: int64[n], the number of cells that each vertex counts in front of a border. work_s: float64[n]. Kinds of
    stages, those of most devices first: their devices, their degrees, what they may spend at ``most_s``, and a rate, of
    what they spend to their work. spent_s, level_s: what they spend at least, and the same at that rate with the work
    of their cells in place of their own, in seconds of work; float64[cells in front, cells inside] for each kind, with
    no columns if no plan has such a stage. steps: a measure of the time that it took, half a billion a second.
    """

    most_s: float
    cells_of: IndexArray
    work_s: FloatArray
    devices: IndexArray
    degree: IndexArray
    budget_s: FloatArray
    rate: FloatArray
    spent_s: tuple[FloatArray, ...]
    level_s: tuple[FloatArray, ...]
    steps: int

    @classmethod
    def of(
        cls,
        cover: StageCover,
        cells: int,
        reads: float,
        most_s: float,
        known: CellCover | None,
        check: Callable[[], None],
    ) -> CellCover:
        """cells: about their number. reads: how much of what its edges cost a vertex counts in cells, if more than a
        few others read it. known: on a coarser grid. check: may raise."""
        moves, kinds = cover.stages.moves, cover.kinds_at(kept_s(most_s))
        tail = np.array([tail for tail, _, _ in cover.graph.edges], np.int64)
        work_s = work_with_edges(cover.replica_s, tail, cover.edge_s.min(axis=1), reads)
        cells_of = cells_along(cover.graph, work_s, cells)
        vertex, is_inside = np.repeat(moves.order, np.diff(moves.move_start)), moves.inside == 1
        all_cells, all_s, steps = int(cells_of.sum()), float(work_s.sum()), 0
        spent_s, level_s, rates = list[FloatArray](), list[FloatArray](), list[float]()
        budget_s = kinds.budget_s / (1.0 + GUARD)
        order = np.argsort(-kinds.devices, kind="stable")
        is_useful = [True] * order.size if known is None else known.useful_kinds(cover.limits.devices)
        for number, kind in enumerate(order):
            weight_s, charge_s = kinds.weight_s[kind], cover.stages.charge_s[kinds.variant[kind]]
            whole_s, most = float(weight_s[np.isfinite(weight_s)].sum()), all_cells
            rates.append(whole_s / all_s if whole_s > 0.0 and all_s > 0.0 else 1.0)
            if not is_useful[number]:
                spent_s.append(np.empty((all_cells + 1, 0)))
                level_s.append(spent_s[-1])
                continue
            cost = charge_s + np.where(is_inside, weight_s[vertex], 0.0)
            if known is not None:
                most = known.spent_s[number].shape[1] * all_cells // max(1, int(known.cells_of.sum()))
            elif whole_s > budget_s[kind]:
                most = int(all_cells * budget_s[kind] / whole_s)
            while True:
                check()
                most = min(most + 2, all_cells)
                found, taken = _least(cover.labelling, cells_of, cost, most, [share * whole_s for share in _SLOPES])
                steps += taken
                if found.shape[1] > all_cells or found[:, most].min() > budget_s[kind]:
                    break
                most = int(_WIDER * most)
            useful = np.flatnonzero(found.min(axis=0) <= budget_s[kind] * (1.0 + _ROUNDING))
            spent_s.append(np.ascontiguousarray(found[:, : useful[-1] + 1 if useful.size else 0]))
            cost = charge_s + np.where(is_inside, (weight_s - rates[-1] * work_s)[vertex], 0.0)
            beside_s, taken = _least(cover.labelling, cells_of, cost, spent_s[-1].shape[1], [0.0])
            steps += taken
            inside = np.arange(spent_s[-1].shape[1])
            level_s.append(beside_s[:, : inside.size] / rates[-1] + inside * (all_s / max(1, all_cells)))
        degree = kinds.devices // cover.degree_of(kinds.variant)
        return cls(
            most_s,
            cells_of,
            work_s,
            kinds.devices[order],
            degree[order],
            budget_s[order],
            np.array(rates),
            tuple(spent_s),
            tuple(level_s),
            steps,
        )

    def prices(self, devices: int) -> tuple[float, ...]:
        """Prices of a second of work, in devices. devices: of a plan at most."""
        work_s = float(self.work_s.sum())
        return tuple(share * devices / work_s for share in _PRICES) if work_s > 0.0 else (0.0,)

    def fewest(self, threshold_s: float, price: float = 0.0, a_stage: float = 0.0) -> FloatArray:
        """Returns float64[cells + 1]: the fewest devices of stages in front of a border, by the cells in front of it,
        if all keep the threshold; inf if they cannot. price: of a second of work; what stages have beyond the work of
        their cells is subtracted. a_stage: is added to the devices of each stage."""
        figures = frozen(self._figures._replace(devices=self._figures.devices + a_stage))
        found: FloatArray = cheapest_in_front(figures, self._limits(threshold_s, price), self._size)
        return found

    @property
    def _size(self) -> int:
        return int(self.cells_of.sum()) + 1

    def _limits(self, threshold_s: float, price: float) -> KindLimits:
        budget_s = (self.budget_s - (kept_s(self.most_s) - kept_s(threshold_s)) * self.degree) * (1.0 + _ROUNDING)
        return frozen(KindLimits(budget_s, budget_s / self.rate, price))

    @cached_property
    def _figures(self) -> KindFigures:
        sizes = [spent_s.size for spent_s in self.spent_s]
        return frozen(
            KindFigures(
                np.concatenate([spent_s.ravel() for spent_s in self.spent_s]),
                np.concatenate([level_s.ravel() for level_s in self.level_s]),
                self.devices.astype(np.float64),
                np.array([spent_s.shape[1] for spent_s in self.spent_s], np.int64),
                np.cumsum([0, *sizes[:-1]]),
            )
        )

    def needs_more_than(self, devices: int, threshold_s: float) -> bool:
        """Whether no plan that keeps the threshold has so few devices."""
        return any(self.fewest(threshold_s, price)[-1] > devices + _PART for price in self.prices(devices))

    def shows_smallest(self, devices: int, stages: int) -> bool:
        """Whether no plan that keeps ``most_s`` has fewer devices, or as many and fewer stages."""
        a_stage = 0.5 / max(1, devices)  # all stages of a plan together count less than a device
        most = devices + (stages - 1 + _MARGIN) * a_stage
        return any(self.fewest(self.most_s, price, a_stage)[-1] > most for price in self.prices(devices))

    def useful_kinds(self, devices: int) -> list[bool]:
        """Whether plans of at most so many devices may have stages of each kind."""
        limits = [self._limits(self.most_s, price) for price in self.prices(devices)]
        costs = [cheapest_with_each_kind(self._figures, one, self._size) for one in limits]
        return [bool(cost <= devices + _PART) for cost in np.max(costs, axis=0)]

    def completion(self, problem: Problem, threshold_s: float) -> Completion:
        """Computes the limits of downsets: what is outside takes at least as many devices as what is in front of a
        border of the same cell, and at each price as many more as its work is beyond that of its cells."""
        of_vertex, all_cells = np.stack([self.cells_of, self.work_s], axis=1), int(self.cells_of.sum())
        inside = problem.workload.lattice.sums(of_vertex)
        in_front = all_cells - inside[:, 0].astype(np.int64)
        beyond_s = self.work_s.sum() * (1.0 - in_front / max(1, all_cells)) - inside[:, 1]
        devices = np.zeros(in_front.size)
        for price in self.prices(problem.cluster.devices):
            devices = np.maximum(devices, self.fewest(threshold_s, price)[in_front] + price * beyond_s)
        device_limit = np.maximum(problem.cluster.devices - np.ceil(devices - _PART), 0.0).astype(np.int64)
        device_limit.setflags(write=False)
        return Completion(threshold_s, device_limit)


def _least(
    stages: Labelling, cells_of: IndexArray, cost: FloatArray, most: int, slopes_s: Sequence[float]
) -> tuple[FloatArray, int]:
    """Returns ``least_cost`` for up to ``most`` cells, and more together, and the steps; bounds on it by lines if its
    figures are many."""
    ranges = cell_ranges(stages, cells_of, every_stage(cells_of, most - 1))
    if ranges.figures > _MOST_FIGURES:
        return _along_slopes(stages, cells_of, cost, slopes_s)
    return least_cost(stages, cells_of, cost, ranges), ranges.steps


def _along_slopes(
    stages: Labelling, cells_of: IndexArray, cost: FloatArray, slopes_s: Sequence[float]
) -> tuple[FloatArray, int]:
    """Returns bounds on ``least_cost`` for all numbers of cells, and the steps: if all stages in front of a border
    take at least a constant beyond some seconds a cell, so does one of w cells. slopes_s: seconds of all cells."""
    moves, size = stages.moves, int(cells_of.sum()) + 1
    joined = moves.inside * np.repeat(cells_of[moves.order], np.diff(moves.move_start))
    ranges = cell_ranges(stages, cells_of, every_stage(cells_of, -1))
    found = np.full((size, size), -np.inf)
    for slope_s in slopes_s:
        a_cell_s = slope_s / max(1, size - 1)
        beyond_s = least_cost(stages, cells_of, cost - a_cell_s * joined, ranges)
        found = np.maximum(found, beyond_s + a_cell_s * np.arange(size))
    found[np.add.outer(np.arange(size), np.arange(size)) >= size] = np.inf
    return found, len(slopes_s) * _SHORT * ranges.steps
