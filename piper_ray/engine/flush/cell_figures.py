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

from piper_ray.cost.products import dot
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

_QUANTILES, _HIGH = 65, 1e3
"""How many quantiles of the seconds that layers save by holding one byte more are looked at as prices of a byte; and
the last of them so many times, at which a stage that does not fit takes too long."""

_MORE_PRICES, _FEW_STEPS = 10, 400_000_000
"""How many more prices than the dearest are taken, where that takes no more steps: a tenth of a second or two."""

_LOOKS = 3
"""How often the stages within limits are looked at for what takes no price: times, level times and synchronisation."""

_ROUNDING = 1e-9
"""Relative rounding error of sums."""


class StageWindow(NamedTuple):
    """Which stages a position may have, and some shares of all work that these have."""

    limits: CellLimits
    shares: tuple[float, ...]


_NO_STAGES = StageWindow(CellLimits(0, -1, 0, -1, 0), (0.0,))


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

    def windows_on(
        self, finer: IndexArray, coarse: IndexArray, stages: CellStages, positions: int
    ) -> list[StageWindow]:
        """Returns each position's stages on a finer grid, if they are among some on a coarse one. finer, coarse:
        int64[n], the cells of each vertex."""
        moves, no_charges_s = self.borders.moves, np.zeros((self.borders.label.size, 0))
        found = cheapest_borders(moves, self.borders.in_front, coarse, finer.astype(np.float64), no_charges_s)
        least, most = found[0], found[1]
        front = np.where(stages.front == NO_BORDER, 0, stages.front)
        windows = [_NO_STAGES] * positions
        for q in np.unique(stages.behind).tolist():
            at = stages.behind == q
            fronts, backs = front[at], stages.back[at]
            inside = int((most[backs] - least[fronts]).max())
            limits = CellLimits(
                int(least[fronts].min()),
                int(most[fronts].max()),
                int(least[backs].min()),
                int(most[backs].max()),
                inside,
            )
            windows[q] = StageWindow(limits, (float(np.mean(backs - fronts) / coarse.sum()),))
        return windows


class PassShares(NamedTuple):
    """Each stage's passes take at least these shares of the least time of its layers and edges. Neither is more than
    half, because an edge costs the same in each pass."""

    forward: float
    backward: float

    @classmethod
    def of(cls, choices: LayerChoices) -> PassShares:
        passes_s = np.stack([choices.forward_s, choices.backward_s])
        *least_s, time_s = choices.least(np.vstack([passes_s, passes_s.sum(axis=0)]))
        shares = np.stack(least_s)[:, time_s > 0.0] / time_s[time_s > 0.0]
        return cls(*shares.min(axis=1, initial=0.5).tolist())


class _Least(NamedTuple):
    """The least of any stages within limits, whatever memory they need: float64[f, w] each, see ``CellFigures``."""

    time_s: FloatArray
    quick_s: FloatArray
    level_s: FloatArray
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

    def window_within(self, most_s: float) -> StageWindow | None:
        """Returns the window of all stages of at most ``most_s``; None if there would be too many figures."""
        cells = int(self.cells_of.sum())
        most = int(np.ceil(cells * most_s / self.costs.weight_s.sum())) + 2
        for _ in range(_MOST_WIDER):
            limits = CellLimits(0, cells, 0, cells, min(most, cells))
            ranges = self._of_limits(limits)
            if ranges.figures > _MOST_FIGURES or ranges.steps > self.most_steps:
                return None
            if most >= cells or self._least(limits, 2.0 * self._edge_s, self._time_s)[:, -1].min() > most_s:
                return StageWindow(limits, (1.0 / self.task.most_stages, most / cells))
            most = int(_WIDER * most) + 1
        return None

    def of(self, windows: Sequence[StageWindow]) -> CellFigures | None:
        """Returns the figures of the stages in the window of each position; None if they would be too many, or take too
        many steps. Prices of a byte are those at which stages of a window's shares take longest, and a few more where
        that takes few steps."""
        memory, cells = self.task.most_memory_bytes, int(self.cells_of.sum())
        at_once = in_flight_at(self.task).astype(np.int64)
        known = np.array(sorted({*_IN_FLIGHT, int(at_once.max())}))
        held_at = known[np.searchsorted(known, at_once, side="right") - 1].tolist()
        positions = list(zip(held_at, windows, strict=True))
        times = {y: _LeastTimes.of(self.choices, self._time_s, self._held(y)) for y in set(held_at)}
        for more, most_steps in ((_MORE_PRICES, min(_FEW_STEPS, self.most_steps)), (0, self.most_steps)):
            groups = {(y, window): times[y].dearest(window, cells, memory, more) for y, window in positions}
            looks = [(limits, _LOOKS) for limits, _ in set(windows)]
            looks += [(window.limits, 2 * len(prices)) for (_, window), prices in groups.items()]
            if sum(self._of_limits(limits).steps * often for limits, often in looks) <= most_steps:
                break
        else:
            return None
        if max(self._of_limits(limits).figures for limits, _ in windows) > _MOST_FIGURES:
            return None
        alone, found = dict[CellLimits, _Least](), list[_Least]()
        for (y, (limits, _)), prices in groups.items():
            if limits not in alone:
                alone[limits] = self._alone(limits)
            time_s, _, level_s, _ = alone[limits]
            for price_s in prices:
                if self.stops():
                    return None
                priced, room = self._time_s + price_s * self._held(y), price_s * memory
                time_s = np.maximum(time_s, self._least(limits, 2.0 * self._edge_s, priced, room)[:, :-1])
                if price_s < times[y].price_s[-1]:
                    level_s = np.maximum(level_s, self._level(limits, priced, room))
            found.append(alone[limits]._replace(time_s=time_s, level_s=level_s))
        size = tuple(max(x) for x in zip(*(least.time_s.shape for least in found), strict=True))
        least = _Least(*(np.stack([_padded(of_group, size) for of_group in kind]) for kind in zip(*found, strict=True)))
        numbers = {group: k for k, group in enumerate(groups)}
        return CellFigures(
            least.time_s,
            least.quick_s,
            least.level_s,
            least.sync_s,
            np.array([window.limits.least_front for _, window in groups]),
            np.array([numbers[position] for position in positions]),
            cells + 1,
        )

    def _alone(self, limits: CellLimits) -> _Least:
        time_s = np.maximum(0.0, self._least(limits, 2.0 * self._edge_s, self._time_s)[:, :-1])
        sync_s = np.maximum(0.0, self._least(limits, np.zeros_like(self._edge_s), self.choices.sync_s)[:, :-1])
        return _Least(time_s, time_s, self._level(limits, self._time_s, 0.0), sync_s)

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


class _LeastTimes(NamedTuple):
    """The least time of all layers together with what they hold, at several prices of a byte: zero, quantiles of the
    seconds that layers save by holding one byte more, and one at which what does not fit takes too long. float64[k]
    each."""

    price_s: FloatArray
    least_s: FloatArray

    @classmethod
    def of(cls, choices: LayerChoices, time_s: FloatArray, held: FloatArray) -> _LeastTimes:
        """time_s, held: float64[choices], s and bytes."""
        first = np.flatnonzero(np.diff(choices.layer, prepend=-1))
        quick_s, least_held = np.minimum.reduceat(time_s, first), np.minimum.reduceat(held, first)
        of_quick, of_least = (
            np.minimum.reduceat(np.where(one == least[choices.layer], other, np.inf), first)
            for one, least, other in ((time_s, quick_s, held), (held, least_held, time_s))
        )
        saves = of_quick > least_held
        worth_s = (of_least - quick_s)[saves] / (of_quick - least_held)[saves]
        price_s = np.append(0.0, np.quantile(worth_s, np.linspace(0.0, 1.0, _QUANTILES)) if saves.any() else ())
        if held.any():
            price_s = np.append(price_s, _HIGH * max(price_s[-1], time_s.sum() / held.sum()))
        return cls(price_s, dot(choices.least(time_s + price_s[:, None] * held), choices.copies))

    def dearest(self, window: StageWindow, cells: int, memory_bytes: float, more: int) -> list[float]:
        """Returns the prices other than zero at which a stage that holds ``memory_bytes`` takes longest, for each share
        of the window; ``more`` prices evenly spaced; and the last one if the largest stages may not fit."""
        last, largest = self.price_s.size - 1, window.limits.most_inside / max(1, cells)
        found = {self._dearest(share, memory_bytes) for share in window.shares}
        found |= set(np.linspace(0, last, more + 2, dtype=np.int64)[1:-1].tolist())
        if self._dearest(largest, memory_bytes) == last:
            found.add(last)
        return [float(self.price_s[k]) for k in sorted(found - {0})]

    def _dearest(self, share: float, memory_bytes: float) -> int:
        return int(np.argmax(share * self.least_s - self.price_s * memory_bytes))
