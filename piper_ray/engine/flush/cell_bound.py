"""A lower bound for plans of a (d, t) on graphs with many downsets: whole ways over stages between two amounts of work
(``flush.cell_figures``).

Prices of positions bound mixtures of ways: one way is slow at one position, another at another. With few, long stages a
mixture takes up to a fifth less than any plan. So stages that no plan below a time has are left out: by the path past
each of them, and by the cheapest way through it at prices of positions. A finer grid has only stages that are left.
Where a mixture of the ways left takes no longer than that time, plans are divided by where a border is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from piper_ray.engine.flush.cell_figures import GridFigures, PassShares, StageCosts
from piper_ray.engine.flush.path_prices import LayerChoices
from piper_ray.engine.flush.path_program import LevelPrices
from piper_ray.engine.flush.paths import PassPath, longest_paths, paths_past
from piper_ray.engine.kernels.cell_stages import (
    NO_BORDER,
    CellFigures,
    CellStages,
    cheapest_cell_ways,
    stages_within,
)
from piper_ray.engine.kernels.flush_types import GPIPE, FlushTables, FlushTask
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray, frozen

_GRIDS = (128, 256, 512, 1024, 2048)
"""Numbers of cells, from coarse to fine."""

_MOST_STEPS = 4_000_000_000
"""Limit on the steps for all figures of a grid, of which a billion takes a second or two."""

_MOST_STAGES = 3_000_000
"""Limit on the cell stages at all positions together. Each takes 72 bytes, several times; a look at all takes half a
second."""

_MANY_STAGES = 30_000
"""Where so many cell stages are left, no finer grid is tried, which would have several times as many."""

_CLOSE = 1e-3
"""Relative. A time with plans, as far as is known, is not looked at more closely than this above one without."""

_MOST_PARTS, _FEW_PARTS = 500, 8
"""Parts into which plans are divided: on the last grid for all times together, each with at most half of those left;
and on each grid for the first time."""

_MOST_LOOKED_AT = 100_000_000
"""Limit on the cell stages of the last grid times the parts, with few parts at least."""

_MOST_ROUNDS, _FEW_ROUNDS = 40, 10
"""Rounds of prices for the first part, and for each other one."""

_FEWER = 0.95
"""Stages are left out by their paths again if no larger share than this was left."""

_ROUNDING = 1e-9
"""Relative rounding error of sums."""


@dataclass(frozen=True)
class CellBound:
    """Bounds plans on one graph with the variants of a task."""

    costs: StageCosts

    def least_s(
        self,
        tables: FlushTables,
        task: FlushTask,
        lower_s: float,
        upper_s: float,
        stops: Callable[[], bool],
    ) -> float:
        """Returns a time that no plan of the task is below; inf if none takes at most ``upper_s``. lower_s: a known
        bound. stops: whether to end with what is proved so far."""
        choices, most_s = LayerChoices.of(tables, task), upper_s / task.microbatches * (1.0 + _ROUNDING)
        passes = PassShares.of(choices)
        left, found_s, coarse = None, np.inf, None
        for cells in _GRIDS:
            grid = GridFigures(self.costs, choices, task, self.costs.grid(cells), _MOST_STEPS, stops)
            if left is None or coarse is None:
                whole = grid.window_within(most_s)
                windows = None if whole is None else [whole] * task.most_stages
            else:
                windows = self.costs.windows_on(grid.cells_of, coarse, left.stages, task.most_stages)
            figures = None if windows is None else grid.of(windows)
            if figures is None or _in_time(figures, most_s) > _MOST_STAGES or stops():
                break
            stages = frozen(stages_within(frozen(figures), most_s, task.stages))
            left, _ = _CellWays(task, passes, stages, figures.cells)._within(upper_s, _MOST_ROUNDS, stops)
            found_s = np.inf if left is None else left._least_found_s(upper_s, _FEW_PARTS, stops)[0]
            if found_s == np.inf:
                return np.inf
            if left is None or left.stages.behind.size > _MANY_STAGES:
                break
            coarse = grid.cells_of
        return lower_s if left is None else left.least_s(lower_s, upper_s, found_s, stops)


def _in_time(figures: CellFigures, most_s: float) -> int:
    """Returns how many cell stages take at most ``most_s``."""
    of_groups = np.count_nonzero(figures.time_s <= most_s, axis=(1, 2))
    return int(of_groups[figures.group].sum())


class _CellWays(NamedTuple):
    """Ways over cell stages, of which plans may have the given ones. cells: of the grid."""

    task: FlushTask
    passes: PassShares
    stages: CellStages
    cells: int
    prices: LevelPrices | None = None

    def least_s(self, lower_s: float, upper_s: float, found_s: float, stops: Callable[[], bool]) -> float:
        """Returns a time that no plan is below; inf if none takes at most ``upper_s``. The range between a bound and
        the quickest way is halved. found_s: the time of a way, or ``upper_s`` if none was found in few parts."""
        low_s, most_s, high_s = lower_s, upper_s, np.inf
        if found_s < upper_s:
            most_s, high_s = 0.5 * (low_s + found_s), found_s
        parts_left = min(_MOST_PARTS, max(_FEW_PARTS, _MOST_LOOKED_AT // self.stages.behind.size))
        while parts_left > 0 and high_s > low_s * (1.0 + _CLOSE) and not stops():
            found_s, parts = self._least_found_s(most_s, (parts_left + 1) // 2, stops)
            parts_left -= parts
            if found_s < np.inf:
                high_s = found_s
            elif high_s == np.inf:
                return np.inf
            else:
                low_s = most_s
            most_s = 0.5 * (low_s + high_s)
        return low_s

    def _least_found_s(self, most_s: float, most_parts: int, stops: Callable[[], bool]) -> tuple[float, int]:
        """Returns inf if it is proved that no plan takes at most ``most_s``; else the time of a way that takes so
        little, or ``most_s`` if none was found either. Also returns into how many parts plans were divided,
        ``most_parts`` at most."""
        pending, parts = [self], 0
        while pending:
            parts += 1
            found, way_s = pending.pop()._within(most_s, _MOST_ROUNDS if parts == 1 else _FEW_ROUNDS, stops)
            if found is None:
                continue
            halves = () if way_s <= most_s or parts >= most_parts or stops() else found._halves()
            if not halves:
                return min(way_s, most_s), parts
            pending += halves
        return np.inf, parts

    def _within(self, most_s: float, most_rounds: int, stops: Callable[[], bool]) -> tuple[_CellWays | None, float]:
        """Returns the ways of plans of at most ``most_s`` that are left, with the best prices for them; None if it is
        proved that there are no such plans. Also returns the time of a way that takes so little, inf if none was found.

        Prices are sought as in ``WayProgram``. Once a mixture of the ways found takes no more than ``most_s``, hardly
        any prices would cost more.
        """
        from piper_ray.engine.flush.path_program import PathProgram  # HiGHS is loaded where it is needed

        task, left, limit_s = self.task, self._without_slow(most_s), most_s * (1.0 + _ROUNDING)
        even = paths_past(task.schedule, task.microbatches, task.most_stages)
        prices = self.prices or LevelPrices.of(PassPath(*(np.mean(often, axis=0) for often in zip(*even, strict=True))))
        program, best_s = PathProgram(task), -np.inf
        for _ in range(most_rounds):
            if left is None:
                return None, np.inf
            if stops():
                break
            cost_s = left._cost_s(prices)
            behind_s, ahead_s, way = left._cheapest(cost_s)
            if way.size == 0:
                return None, np.inf
            if (least_s := float(cost_s[way].sum())) > best_s:
                best_s, left = least_s, left._replace(prices=prices)
            seconds, beyond_s = left._seconds(way, prices.path)
            filled = _filled(seconds, way.size, beyond_s)
            way_s = longest_paths(task.schedule, task.microbatches, *filled)[0].seconds(*filled)
            if way_s <= most_s:
                return left, way_s
            left = left._only(behind_s + cost_s + ahead_s <= limit_s)
            program.add(seconds / most_s, beyond_s / most_s)
            if not program.solve() or program.batch <= 1.0:
                break
            prices = program.prices
        return left, np.inf

    def _without_slow(self, most_s: float) -> _CellWays | None:
        """Leaves out stages past which a path takes more than ``most_s``; None if no way is left.

        A path goes once through the stages in front of a stage, m - w + 1 times through it, with w microbatches in
        flight, and before and after that either down to the last stage and up again, or through w - 1 further passes of
        the stage. If all m microbatches are in flight, only one of the two can be so.

        Where a path goes through all stages, their level times count once, and what more it goes through some of them.
        """
        left, m, limit_s = self, self.task.microbatches, most_s * (1.0 + _ROUNDING)
        while True:
            stages = left.stages
            last_s = np.where(stages.front == NO_BORDER, stages.sync_s, 0.0)
            behind_s, ahead_s, _ = left._cheapest(stages.time_s + last_s)
            level_behind_s, level_ahead_s, _ = left._cheapest(stages.level_s + last_s)
            level_s = level_behind_s + stages.level_s + level_ahead_s
            if self.task.schedule == GPIPE:
                more_s, past_s = behind_s, level_s + (m - 1) * stages.time_s
            else:
                further = np.minimum(m - 1, stages.behind)
                # The paths through both kinds of passes take least where each kind has half of the stage's time.
                passes_s = 0.5 * further * stages.time_s
                down_s = np.maximum(0.0, behind_s - passes_s)
                more_s = np.where(further == m - 1, down_s, 2.0 * down_s)
                past_s = level_s + (m - 1) * stages.time_s - passes_s
                twice_s = level_s + (m - 1 - further) * stages.time_s + behind_s
                past_s = np.where(further == m - 1, past_s, np.maximum(past_s, twice_s))
            slowest_s = np.maximum(more_s + m * stages.time_s + ahead_s, past_s) + last_s
            some = left._only(slowest_s <= limit_s)
            if some is None or some.stages.behind.size > _FEWER * stages.behind.size:
                return some
            left = some

    def _halves(self) -> tuple[_CellWays, ...]:
        """Divides plans by the cell of a border, at the position where it is least known: up to a cell, or a plan with
        fewer stages; and beyond it. Returns none if all borders are known."""
        stages, has_border = self.stages, self.stages.front != NO_BORDER
        spread = []
        for q in range(int(stages.behind.max()) + 1):
            fronts = stages.front[has_border & (stages.behind == q)]
            spread.append(0 if fronts.size == 0 else int(fronts.max() - fronts.min()))
        q = int(np.argmax(spread))
        if spread[q] == 0:
            return ()
        is_there, is_next = stages.behind == q, stages.behind == q + 1
        fronts = stages.front[has_border & is_there]
        middle = min(int(np.median(fronts)), int(fronts.max()) - 1)
        beyond = ~(is_there & has_border & (stages.front <= middle)) & ~(is_next & (stages.back <= middle))
        beyond &= has_border | (stages.behind > q)
        up_to = ~(is_there & (stages.front > middle)) & ~(is_next & (stages.back > middle))
        return tuple(half for half in (self._only(up_to), self._only(beyond)) if half is not None)

    def _cheapest(self, cost_s: FloatArray) -> tuple[FloatArray, FloatArray, IndexArray]:
        found: tuple[FloatArray, FloatArray, IndexArray] = cheapest_cell_ways(
            self.stages, cost_s, self.task.most_stages, self.cells
        )
        return found

    def _only(self, some: BoolArray) -> _CellWays | None:
        """Returns the ways over some of the stages; None if there are no stages."""
        return self._replace(stages=_of_stages(self.stages, some)) if some.any() else None

    def _cost_s(self, prices: LevelPrices) -> FloatArray:
        """Returns what stages cost at least by these prices. Seconds that may be of either kind of pass count as the
        kind of the lower price."""
        stages, at, path = self.stages, self.stages.behind, prices.path
        forward, backward = path.forward[at] - prices.of_all, path.backward[at] - prices.of_all
        sync = np.where(stages.front == NO_BORDER, np.cumsum(path.sync[::-1])[::-1][at], path.sync[at])
        shares, of_either = self.passes, np.minimum(forward, backward)
        more = shares.forward * (forward - of_either) + shares.backward * (backward - of_either)
        found: FloatArray = of_either * stages.time_s + more * stages.quick_s
        found += sync * stages.sync_s + prices.of_all * stages.level_s
        return found

    def _seconds(self, way: IndexArray, path: PassPath) -> tuple[FloatArray, float]:
        """Returns float64[3, positions]: the forward, backward and synchronisation seconds of a way's stages that cost
        as much, and how much their level times are beyond their passes. Empty positions in front synchronise as the
        first stage does."""
        stages, p = _of_stages(self.stages, way), way.size
        is_forward = path.forward[:p] < path.backward[:p]
        found = np.zeros((3, self.task.most_stages))
        forward_s, backward_s = self.passes.forward * stages.quick_s, self.passes.backward * stages.quick_s
        found[0, :p] = np.where(is_forward, stages.time_s - backward_s, forward_s)
        found[1, :p] = stages.time_s - found[0, :p]
        found[2, :p], found[2, p:] = stages.sync_s, stages.sync_s[-1]
        return found, float(stages.level_s.sum() - found[:2].sum())


def _filled(seconds: FloatArray, stages: int, more_s: float) -> FloatArray:
    """Adds seconds to the quickest stages first, half of them to each pass. seconds: float64[3, positions]."""
    time_s, found = seconds[:2, :stages].sum(axis=0), seconds.copy()
    rising_s = np.sort(time_s)
    levels_s = (np.cumsum(rising_s) + max(0.0, more_s)) / np.arange(1, stages + 1)
    level_s = levels_s[np.argmax(np.append(rising_s[1:], np.inf) >= levels_s)]
    found[:2, :stages] += 0.5 * np.maximum(0.0, level_s - time_s)
    return found


def _of_stages(stages: CellStages, some: BoolArray | IndexArray) -> CellStages:
    behind, back, front, *seconds = stages
    return frozen(CellStages(behind[some], back[some], front[some], *(of_stage[some] for of_stage in seconds)))
