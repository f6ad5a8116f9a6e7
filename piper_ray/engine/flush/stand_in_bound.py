"""Where tails are sought for a lower bound for plans of a (d, t): on the borders that stand in for all others
(``flush.stand_ins``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.flush.path_prices import NO_BOUNDS, PathPrices, path_bounds
from piper_ray.engine.flush.space import ListedTables
from piper_ray.engine.flush.stand_ins import StandIns, ordered
from piper_ray.engine.flush.tables import tables_of_rows
from piper_ray.engine.kernels.flush_completion import placed_stages
from piper_ray.engine.kernels.flush_stages import AheadArrays
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask, FreeStages
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen


@dataclass(frozen=True)
class StandInBound:
    """Bounds a task by stand-ins. tables, ahead: on all downsets."""

    stand_ins: StandIns
    tables: FlushTables
    task: FlushTask
    ahead: AheadArrays

    @classmethod
    def of(cls, stand_ins: StandIns, tables: FlushTables, task: FlushTask, ahead: AheadArrays) -> StandInBound:
        return cls(stand_ins, tables, stand_ins.task(task), ahead)

    @property
    def _free_set(self) -> frozenset[tuple[int, int]]:
        free = self.stand_ins.free
        outer = np.repeat(np.arange(free.start.size - 1), np.diff(free.start))
        return frozenset(zip(outer.tolist(), free.inner.tolist(), strict=True))

    def within(
        self, prices: PathPrices | None, most_s: float, most_work: int, control: FloatArray
    ) -> tuple[ListedTables, FreeStages] | None:
        """Returns tables and free stages for tails that bound those of all plans of at most ``most_s``: without
        downsets if there are no such plans; None if that would take too long."""
        from piper_ray.engine.flush.way_program import Tightened  # HiGHS is loaded where it is needed

        bounds, rows, free = path_bounds(self.tables, self.task, prices), self.stand_ins.rows, self.stand_ins.free
        if bounds is NO_BOUNDS or prices is None:
            return None
        bounds = bounds._replace(
            first_sync=np.zeros_like(bounds.first_sync),
            of_stage_s=bounds.of_stage_s[rows],
            ahead_s=self.stand_ins.least(bounds.ahead_s),
        )
        tables, most_tails = tables_of_rows(self.tables, rows), np.full(rows.size, self.task.most_stages)
        ahead = self.stand_ins.ahead(tables, self.ahead)
        has_all, stages = placed_stages(
            tables, self.task, ahead, most_tails, frozen(bounds), free, most_work, np.array([most_s, control[1]])
        )
        if not has_all:
            return None
        left = Tightened(tables, self.task, prices, frozen(stages), most_s, has_first_sync=False, free=self._free_set)
        left.tighten()
        if left.rows.size == 0:
            return ListedTables(left.tables, ahead, most_tails[:0], NO_BOUNDS, left.prices), free
        bounds = path_bounds(left.tables, self.task, left.prices)
        bounds = frozen(bounds._replace(first_sync=np.zeros_like(bounds.first_sync), ahead_s=left.ahead_s))
        number = np.full(rows.size, -1)
        number[left.rows] = np.arange(left.rows.size)
        outer, inner = number[np.repeat(np.arange(rows.size), np.diff(free.start))], number[free.inner]
        is_left = (outer >= 0) & (inner >= 0)
        outer, inner = outer[is_left], inner[is_left]
        some_free = frozen(FreeStages(np.searchsorted(outer, np.arange(left.rows.size + 1)), inner))
        return (
            ListedTables(
                left.tables, _of_rows(ahead, left.rows, left.tables), most_tails[left.rows], bounds, left.prices
            ),
            some_free,
        )


def _of_rows(ahead: AheadArrays, rows: IndexArray, tables: FlushTables) -> AheadArrays:
    some = ahead._replace(
        own_s=ahead.own_s[rows],
        ahead_s=ahead.ahead_s[rows],
        ahead_forward_s=ahead.ahead_forward_s[rows],
        ahead_activation=ahead.ahead_activation[rows],
        ahead_fixed=ahead.ahead_fixed[rows],
        ahead_shared=ahead.ahead_shared[rows],
    )
    return ordered(some, tables)
