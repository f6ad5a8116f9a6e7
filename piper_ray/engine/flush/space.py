"""Selects the downsets on which tasks look for tails: all of a graph, or for each task those useful for its plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from piper_ray.engine.evaluation.dual_prices import DualPrices
from piper_ray.engine.evaluation.reach import Beam, Reach, Room
from piper_ray.engine.flush.path_prices import NO_BOUNDS, PathPrices, path_bounds
from piper_ray.engine.flush.stage_limits import FlushCover, PathArrays, tail_limits
from piper_ray.engine.flush.tables import LayerValues, tables_on
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.downsets import member_sums
from piper_ray.engine.kernels.flush_completion import PlacedStages, cheapest_way, placed_stages
from piper_ray.engine.kernels.flush_stages import AheadArrays, look_ahead
from piper_ray.engine.kernels.flush_types import NO_FREE_STAGES, FlushTables, PathBounds
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.downsets import listed_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph

_CELLS, _FEW_CELLS = 1024, 256
"""Cells of the grid of times in the search for dual prices: more if the list of downsets depends on them."""

_ROOM = Room(downsets=1_000_000, steps=1_000_000_000)
_BEAM = Beam(width=30, early=0.02)
_BEAM_ROOM = Room(downsets=100_000, steps=100_000_000)


LITTLE_WORK, RAISING_WORK, MUCH_WORK = 5_000_000, 100_000_000, 250_000_000
"""Limits on the work of ``placed_stages``: a fraction of a tenth of a second, a second, and up to four."""

MANY_LAYERS = 400
"""From this number of layers on, states with the choices of their stages take so long that bounds are computed
first."""

_SOON = 200_000
"""Downsets times positions for which bounds, apart from ``placed_stages``, take about a tenth of a second."""


class TooManyDownsets(Exception):
    """Raised if more downsets can be part of plans than there is room for, or listing them takes too long."""


class ListedTables(NamedTuple):
    """Tables on some downsets. most_tails: int64[m], the most stages that the tail of each downset has. bounds: the
    task's, at ``prices``.
    """

    tables: FlushTables
    ahead: AheadArrays
    most_tails: IndexArray
    bounds: PathBounds = NO_BOUNDS
    prices: PathPrices | None = None

    @property
    def least_s(self) -> float:
        """A time that no plan is below, by the bounds."""
        return float(self.bounds.ahead_s[0, 0]) if self.bounds.ahead_s.size > 0 else 0.0

    @property
    def is_empty(self) -> bool:
        """Whether no plan below the cutoff has downsets of these."""
        return self.tables.bits.size == 0


@dataclass(frozen=True)
class SearchSpace:
    """Where tasks look for tails. tables: on all downsets. is_large: whether the downsets are so numerous that prices
    may pay. paths: the stages on which dual prices are found.

    graph, values: given if all downsets are too many. Then each task lists the downsets useful for its plans, and
    ``tables`` are on a chain. is_beam: a task lists only some of them, along a beam, which prove nothing.
    """

    tables: FlushTables
    is_large: bool = False
    paths: PathArrays | None = None
    graph: LayerGraph | None = None
    values: LayerValues | None = None
    is_beam: bool = False

    def along_beams(self) -> SearchSpace:
        """Returns the space in which tasks follow beams, for early plans."""
        return replace(self, is_beam=True)

    def whole(self, task: DegreePair) -> ListedTables | None:
        """Returns the tables of all downsets useful for the task, for a single stage those of a chain; None if they are
        too many.
        """
        if self.graph is not None and task.arrays.most_stages > 1:
            return None
        most_tails = np.full(self.tables.bits.shape[0], task.arrays.most_stages)
        return ListedTables(self.tables, task.ahead, most_tails)

    def is_soon_bounded(self, task: DegreePair) -> bool:
        """Whether ``least_s`` with little work takes less time than the first states."""
        downsets = self.tables.bits.shape[0]
        return self.graph is None and self.has_many_layers and downsets * task.arrays.most_stages <= _SOON

    @property
    def has_many_layers(self) -> bool:
        """Whether states take so long that bounds come first."""
        return bool(self.tables.option_start.shape[1] - 1 > MANY_LAYERS)

    def within(
        self, task: DegreePair, control: FloatArray, check: Callable[[], None]
    ) -> tuple[ListedTables | None, float]:
        """Returns the downsets useful for plans of the task whose batch takes at most control[0], or those along a
        beam; None if there is no such plan. Also returns a proved bound on the time of a batch. control: as in
        ``run_task``.

        Raises TooManyDownsets, and what ``check`` raises.
        """
        whole, batch_s = self.whole(task), float(control[0])
        if whole is not None:
            tightened = self.tightened(whole, task, control)
            if tightened is not None:
                return tightened, 0.0
            whole = _with_bounds(whole, task)
        cover, prices = None, None
        if self.paths is not None:
            cells = _FEW_CELLS if self.is_beam or whole is not None else _CELLS
            cover = FlushCover(self.tables, task.arrays, self.paths, cells)
            prices = cover.prices(batch_s, check)
        if cover is None or prices is None:
            if whole is None:
                raise TooManyDownsets
            return whole, 0.0
        if not cover.has_plan(prices):
            return None, cover.none_below_s(batch_s, check)
        if whole is None:
            listed = self._listed(cover, task, prices, check)
            return listed and (self.tightened(listed, task, control) or _with_bounds(listed, task)), 0.0
        inside = member_sums(whole.tables.bits, prices.of_vertex[:, None].copy())[:, 0]
        return whole._replace(most_tails=tail_limits(inside, task.arrays.most_stages)), 0.0

    def least_s(
        self, task: DegreePair, prices: PathPrices | None, control: FloatArray, most_work: int = MUCH_WORK
    ) -> float:
        """Returns a bound by prices on plans whose batch takes at most control[0]; inf if there are none, 0 for graphs
        with too many downsets. most_work: the limit on the search for the shortest way."""
        whole = self.whole(task)
        return 0.0 if whole is None else self._completed(whole, task, prices, control, most_work).least_s

    def _completed(
        self,
        listed: ListedTables,
        task: DegreePair,
        prices: PathPrices | None,
        control: FloatArray,
        most_work: int = MUCH_WORK,
    ) -> ListedTables:
        """Returns the tables with the bounds by prices. If there is a cutoff, they use the stages of the lattice."""
        bounds = path_bounds(listed.tables, task.arrays, prices)
        stages = self._stages(listed, task, bounds, most_work, control)
        if stages is not None:
            ahead_s, *_ = cheapest_way(stages, bounds, float(control[0]))
            bounds = frozen(bounds._replace(ahead_s=np.maximum(ahead_s, bounds.ahead_s)))
        return listed._replace(bounds=bounds, prices=prices)

    def _stages(
        self, listed: ListedTables, task: DegreePair, bounds: PathBounds, most_work: int, control: FloatArray
    ) -> PlacedStages | None:
        """Returns the stages of all plans below the cutoff; None if there is no cutoff or it would take too long."""
        if bounds is NO_BOUNDS or not np.isfinite(control[0]):
            return None
        tables, ahead, most_tails, *_ = listed
        has_all, stages = placed_stages(
            tables, task.arrays, ahead, most_tails, bounds, NO_FREE_STAGES, most_work, control
        )
        return frozen(stages) if has_all else None

    def tightened(
        self, listed: ListedTables, task: DegreePair, control: FloatArray, most_work: int = MUCH_WORK
    ) -> ListedTables | None:
        """Returns the tables with bounds by good prices for plans below the cutoff, and the downsets that these may
        have: none if there is no such plan. Returns None if that would take too long, or without prices."""
        bounds = path_bounds(listed.tables, task.arrays, task.prices)
        stages = self._stages(listed, task, bounds, most_work, control)
        if stages is None or task.prices is None:
            return None
        from piper_ray.engine.flush.way_program import Tightened  # HiGHS is loaded where it is needed

        found = Tightened(listed.tables, task.arrays, task.prices, stages, float(control[0]))
        found.tighten()
        tables, prices = found.tables, found.prices
        if found.rows.size == 0:
            return listed._replace(tables=tables, prices=prices)
        bounds = path_bounds(tables, task.arrays, prices)
        bounds = frozen(bounds._replace(ahead_s=np.maximum(found.ahead_s, bounds.ahead_s)))
        most_tails = listed.most_tails[found.rows]
        return ListedTables(tables, frozen(look_ahead(tables, task.arrays)), most_tails, bounds, prices)

    def _listed(
        self,
        cover: FlushCover,
        task: DegreePair,
        prices: DualPrices,
        check: Callable[[], None],
    ) -> ListedTables | None:
        assert self.graph is not None
        assert self.values is not None
        room, beam = (_BEAM_ROOM, _BEAM) if self.is_beam else (_ROOM, None)
        found = Reach(cover).downsets(prices, room, beam, check)
        if found is None:
            raise TooManyDownsets
        if int(np.bitwise_count(found).sum(axis=1).max()) < self.graph.size:
            return None
        lattice = listed_lattice(self.graph, found)
        tables = tables_on(lattice, self.tables, self.values)
        inside = lattice.sums(prices.of_vertex[:, None])[:, 0]
        most_tails = tail_limits(inside, task.arrays.most_stages)
        return ListedTables(tables, frozen(look_ahead(tables, task.arrays)), most_tails)


def _with_bounds(listed: ListedTables, task: DegreePair) -> ListedTables:
    """Returns the tables with bounds by the task's prices."""
    return listed._replace(bounds=path_bounds(listed.tables, task.arrays, task.prices), prices=task.prices)
