"""The least figures of all stages between two amounts of work (``kernels.cell_stages``), on finer and finer grids.

Only the cells of a stage's borders are known. For any price of a byte no stage between them takes less than the least
sum, over all such stages, of the seconds and the priced bytes of its layers and of what it pays at its borders, minus
the price of a device's memory. The largest of these bounds for some prices counts.

The least stage of two cells has as little work as they allow, so that a way over such stages leaves some work out. The
stages of a plan have each layer once. So in a sum over all of them the weight of their layers may be replaced by that
of their cells, which is the same for all: a stage's *level* time. The least of that leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from piper_ray.engine.flush.path_prices import LayerChoices, in_flight_at
from piper_ray.engine.kernels.cell_stages import (
    NO_BORDER,
    CellFigures,
    CellLimits,
    CellStages,
    LabelRanges,
)
from piper_ray.engine.kernels.flush_borders import cheapest_borders
from piper_ray.engine.kernels.flush_types import FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.cells import cell_ranges, cells_along, least_cost, work_with_edges
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import LayerGraph

_WIDER, _MOST_WIDER = 1.3, 4
"""If stages of more cells than are distinguished may be quick enough, this factor more of them are, and how often."""

_MOST_FIGURES = 70_000_000
"""Limit on the figures that are kept at once."""

_IN_FLIGHT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Microbatches in flight for which there are figures. A stage holds no less than it would with fewer in flight."""

_QUANTILES, _FEW_QUANTILES, _HIGH = (0.2, 0.5, 0.8), (0.5,), 1e3
"""Prices of a byte: quantiles of the seconds that layers save by holding one byte more, fewer where steps are too many
for all; and the last of them so many times, at which a stage that does not fit takes too long."""

_ROUNDING = 1e-9
"""Relative rounding error of sums."""

_NO_LIMITS = CellLimits(0, -1, 0, -1, 0)


@dataclass(frozen=True)
class StageCosts:
    """What the stages of a graph cost at least, with the variants of a task. stages, borders: labellings. weight_s:
    float64[n], what each vertex counts in the grid. edge_in_s, edge_out_s: float64[e], the least that an edge costs the
    stages of its head and of its tail, in each direction.

    Any weights are right; see ``work_with_edges``.
    """

    graph: LayerGraph
    stages: Labelling
    borders: Labelling
    weight_s: FloatArray
    edge_in_s: FloatArray
    edge_out_s: FloatArray

    @classmethod
    def of(
        cls,
        graph: LayerGraph,
        stages: Labelling,
        borders: Labelling,
        own_s: FloatArray,
        tail: IndexArray,
        edge_in_s: FloatArray,
        edge_out_s: FloatArray,
    ) -> StageCosts:
        """own_s: float64[n], the least time of each vertex. tail: int64[e]."""
        weight_s = work_with_edges(own_s, tail, edge_in_s + edge_out_s)
        return cls(graph, stages, borders, weight_s, edge_in_s, edge_out_s)

    def grid(self, cells: int) -> IndexArray:
        """Returns int64[n]: the cells of each vertex."""
        return cells_along(self.graph, self.weight_s, cells)

    def limits_on(self, finer: IndexArray, coarse: IndexArray, stages: CellStages, positions: int) -> list[CellLimits]:
        """Returns limits on each position's stages on a finer grid, if they are among some on a coarse one. finer,
        coarse: int64[n], the cells of each vertex."""
        moves, no_charges_s = self.borders.moves, np.zeros((self.borders.label.size, 0))
        found = cheapest_borders(moves, self.borders.in_front, coarse, finer.astype(np.float64), no_charges_s)
        least, most = found[0], found[1]
        front = np.where(stages.front == NO_BORDER, 0, stages.front)
        limits = [_NO_LIMITS] * positions
        for q in np.unique(stages.behind).tolist():
            at = stages.behind == q
            fronts, backs = front[at], stages.back[at]
            inside = int((most[backs] - least[fronts]).max())
            limits[q] = CellLimits(
                int(least[fronts].min()),
                int(most[fronts].max()),
                int(least[backs].min()),
                int(most[backs].max()),
                inside,
            )
        return limits


class _Least(NamedTuple):
    """The least of any stages within limits, whatever memory they need: float64[f, w] each, see ``CellFigures``."""

    time_s: FloatArray
    level_s: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    sync_s: FloatArray


@dataclass(frozen=True)
class GridFigures:
    """Makes figures of the stages of a task on one grid. most_steps: that may be taken for them. stops: whether to make
    none."""

    costs: StageCosts
    choices: LayerChoices
    task: FlushTask
    cells_of: IndexArray
    most_steps: int
    stops: Callable[[], bool]
    _ranges: dict[CellLimits, LabelRanges] = field(default_factory=dict)

    def limits_within(self, most_s: float) -> CellLimits | None:
        """Returns limits that all stages of at most ``most_s`` are within; None if there would be too many figures."""
        cells = int(self.cells_of.sum())
        most = int(np.ceil(cells * most_s / self.costs.weight_s.sum())) + 2
        for _ in range(_MOST_WIDER):
            limits = CellLimits(0, cells, 0, cells, min(most, cells))
            ranges = self._of_limits(limits)
            if ranges.figures > _MOST_FIGURES or ranges.steps > self.most_steps:
                return None
            if most >= cells or self._least(limits, 2.0 * self._edge_s, self._time_s)[:, -1].min() > most_s:
                return limits
            most = int(_WIDER * most) + 1
        return None

    def of(self, limits: Sequence[CellLimits]) -> CellFigures | None:
        """Returns the figures of stages within the limits of each position; None if they would be too many, or take too
        many steps."""
        choices, memory = self.choices, self.task.most_memory_bytes
        at_once = in_flight_at(self.task).astype(np.int64)
        known = np.array(sorted({*_IN_FLIGHT, int(at_once.max())}))
        held_at = known[np.searchsorted(known, at_once, side="right") - 1].tolist()
        groups = {pair: k for k, pair in enumerate(dict.fromkeys(zip(held_at, limits, strict=True)))}
        for quantiles in (_QUANTILES, _FEW_QUANTILES):
            prices = {y: _prices_of_byte(choices, self._time_s, self._held(y), quantiles) for y in set(held_at)}
            looks = [(one, len(_Least._fields)) for one in set(limits)]
            looks += [(one, 2 * len(prices[y])) for y, one in groups]
            if sum(self._of_limits(one).steps * often for one, often in looks) <= self.most_steps:
                break
        else:
            return None
        if max(self._of_limits(one).figures for one in limits) > _MOST_FIGURES:
            return None
        alone, found = dict[CellLimits, _Least](), list[_Least]()
        for y, one in groups:
            if one not in alone:
                alone[one] = self._alone(one)
            time_s, level_s = alone[one][:2]
            for price_s in prices[y]:
                if self.stops():
                    return None
                priced = self._time_s + price_s * self._held(y)
                time_s = np.maximum(time_s, self._least(one, 2.0 * self._edge_s, priced, price_s * memory)[:, :-1])
                if price_s < prices[y][-1]:
                    level_s = np.maximum(level_s, self._level(one, priced, price_s * memory))
            found.append(alone[one]._replace(time_s=time_s, level_s=level_s))
        size = tuple(max(x) for x in zip(*(least.time_s.shape for least in found), strict=True))
        least = _Least(*(np.stack([_padded(of_group, size) for of_group in kind]) for kind in zip(*found, strict=True)))
        return CellFigures(
            least.time_s,
            least.level_s,
            least.forward_s,
            least.backward_s,
            least.sync_s,
            np.array([one.least_front for _, one in groups]),
            np.array([groups[pair] for pair in zip(held_at, limits, strict=True)]),
            int(self.cells_of.sum()) + 1,
        )

    def _alone(self, limits: CellLimits) -> _Least:
        choices, none = self.choices, np.zeros_like(self._edge_s)
        seconds = [
            self._least(limits, paid_s, of_choices)[:, :-1]
            for paid_s, of_choices in (
                (2.0 * self._edge_s, self._time_s),
                (self._edge_s, choices.forward_s),
                (self._edge_s, choices.backward_s),
                (none, choices.sync_s),
            )
        ]
        time_s, *of_passes = (np.maximum(0.0, one) for one in seconds)
        return _Least(time_s, self._level(limits, self._time_s, 0.0), *of_passes)

    def _least(self, limits: CellLimits, paid_s: FloatArray, of_choices: FloatArray, room: float = 0.0) -> FloatArray:
        """Returns the least of stages' sums over their layers, each with its least choice, beyond ``room``."""
        found = self._summed(limits, paid_s, self.choices.least(of_choices[None, :])[0, self.choices.of_vertex])
        rounded: FloatArray = found * (1.0 - _ROUNDING) - room * (1.0 + _ROUNDING)
        return rounded

    def _level(self, limits: CellLimits, of_choices: FloatArray, room: float) -> FloatArray:
        """The same, with the weight of a stage's cells in place of that of its vertices."""
        weight_s = self.costs.weight_s
        of_vertex = self.choices.least(of_choices[None, :])[0, self.choices.of_vertex] - weight_s
        found = self._summed(limits, 2.0 * self._edge_s, of_vertex)[:, :-1]
        found += np.arange(found.shape[1]) * (weight_s.sum() / max(1, self.cells_of.sum()))
        rounded: FloatArray = found - room * (1.0 + _ROUNDING) - _ROUNDING * weight_s.sum()
        return rounded

    def _summed(self, limits: CellLimits, paid_s: FloatArray, of_vertex: FloatArray) -> FloatArray:
        moves = self.costs.stages.moves
        cost = paid_s + moves.inside * of_vertex[np.repeat(moves.order, np.diff(moves.move_start))]
        return least_cost(self.costs.stages, self.cells_of, cost, self._of_limits(limits))

    def _of_limits(self, limits: CellLimits) -> LabelRanges:
        if limits not in self._ranges:
            self._ranges[limits] = cell_ranges(self.costs.stages, self.cells_of, limits)
        return self._ranges[limits]

    def _held(self, in_flight: int) -> FloatArray:
        return self.choices.a_bytes * in_flight + self.choices.b_bytes

    @cached_property
    def _time_s(self) -> FloatArray:
        return self.choices.forward_s + self.choices.backward_s

    @cached_property
    def _edge_s(self) -> FloatArray:
        return self.costs.stages.charges.seconds(self.costs.edge_in_s, self.costs.edge_out_s)


def _padded(figures: FloatArray, size: tuple[int, ...]) -> FloatArray:
    found = np.full(size, np.inf)
    found[: figures.shape[0], : figures.shape[1]] = figures
    return found


def _prices_of_byte(
    choices: LayerChoices, time_s: FloatArray, held: FloatArray, quantiles: tuple[float, ...]
) -> list[float]:
    """Returns prices at which layers choose differently, in s. time_s, held: float64[choices], s and bytes."""
    first = np.flatnonzero(np.diff(choices.layer, prepend=-1))
    quick_s, least_held = np.minimum.reduceat(time_s, first), np.minimum.reduceat(held, first)
    of_quick, of_least = (
        np.minimum.reduceat(np.where(one == least[choices.layer], other, np.inf), first)
        for one, least, other in ((time_s, quick_s, held), (held, least_held, time_s))
    )
    saves = of_quick > least_held
    if not saves.any():
        whole = float(held.sum())
        return [_HIGH * float(time_s.sum()) / whole] if whole > 0.0 else []
    worth_s = np.repeat(
        (of_least - quick_s)[saves] / (of_quick - least_held)[saves], choices.copies[saves].astype(np.int64)
    )
    found: list[float] = np.quantile(worth_s, quantiles).tolist()
    return [*found, _HIGH * max(found[-1], float(time_s.sum() / held.sum()))]
