"""A lower bound for plans of a (d, t) on graphs with many downsets: whole ways over stages between two amounts of work
(``kernels.cell_stages``).

Prices of positions bound mixtures of ways: one way is slow at one position, another at another. With few, long stages a
mixture takes up to a fifth less than any plan. So stages that no plan below a time has are left out: by the path past
each of them, and by the cheapest way through it at prices of positions. Where a mixture of the ways left takes no
longer than that time, plans are divided by where a border is.

Only the cells of a stage's borders are known. For any price of a byte no stage between them takes less than the least
sum, over all such stages, of the seconds and the priced bytes of its layers and of what it pays at its borders, minus
the price of a device's memory. The largest of these bounds for some prices counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from piper_ray.engine.flush.path_prices import LayerChoices, in_flight_at
from piper_ray.engine.flush.paths import PassPath, longest_paths, paths_past
from piper_ray.engine.kernels.cell_stages import (
    NO_BORDER,
    CellFigures,
    CellStages,
    cheapest_cell_ways,
    least_of_stages,
    stages_within,
)
from piper_ray.engine.kernels.cover import BoolArray
from piper_ray.engine.kernels.flush_types import GPIPE, FlushTables, FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.labelling import IN_FRONT, Labelling

_GRIDS, _FINER = (128, 256, 512, 1024), 4
"""Numbers of cells, from coarse to fine, and how many times the steps of a grid the next one takes at least."""

_WIDER, _MOST_WIDER = 1.3, 4
"""If stages of more cells than are distinguished may be quick enough, this factor more of them are, and how often."""

_MOST_STEPS, _MOST_FIGURES = 8_000_000_000, 70_000_000
"""Limits on the steps for all figures of a grid, of which a billion takes a second, and on the figures that are kept
at once."""

_MOST_STAGES = 3_000_000
"""Limit on the cell stages at all positions together. Each takes 64 bytes, several times; a look at all takes half a
second."""

_IN_FLIGHT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Microbatches in flight for which there are figures. A stage holds no less than it would with fewer in flight."""

_QUANTILES, _HIGH = (0.2, 0.5, 0.8), 1e3
"""Prices of a byte: quantiles of the seconds that layers save by holding one byte more; and the last of them so many
times, at which a stage that does not fit takes too long."""

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

_FEW_READERS = 4
"""A vertex that no more others read than this counts as its work alone in the grid."""


def cells_of_work(order: IndexArray, work_s: FloatArray, cells: int) -> IndexArray:
    """Returns int64[n]: the number of cells that each vertex counts in front of a border. order: int64[n], of the
    labelling."""
    found = np.zeros(order.size, np.int64)
    found[order] = np.diff(np.rint(np.cumsum(work_s[order]) * (cells / work_s.sum())).astype(np.int64), prepend=0)
    return found


@dataclass(frozen=True)
class CellBound:
    """Bounds plans on one graph with the variants of a task. labelling: of stages. weight_s: float64[n], what each
    vertex counts in the grid. edge_in_s, edge_out_s: float64[e], the least that an edge costs the stages of its head
    and of its tail, in each direction.

    The bound holds for any weights. With their work alone, two stages next to each other could both leave out a vertex
    of little work that many others read, and what its edges cost with it. So such a vertex counts its edges too.
    """

    labelling: Labelling
    weight_s: FloatArray
    edge_in_s: FloatArray
    edge_out_s: FloatArray

    @classmethod
    def of(
        cls, labelling: Labelling, own_s: FloatArray, tail: IndexArray, edge_in_s: FloatArray, edge_out_s: FloatArray
    ) -> CellBound:
        """own_s: float64[n], the least time of each vertex. tail: int64[e]."""
        paid_s, dearest_s = edge_in_s + edge_out_s, np.zeros(own_s.size)
        np.maximum.at(dearest_s, tail, paid_s)
        beyond_s = np.bincount(tail, paid_s, own_s.size) - _FEW_READERS * dearest_s
        return cls(labelling, own_s + np.maximum(0.0, beyond_s), edge_in_s, edge_out_s)

    def least_s(
        self, tables: FlushTables, task: FlushTask, lower_s: float, upper_s: float, stops: Callable[[], bool]
    ) -> float:
        """Returns a time that no plan of the task is below; inf if none takes at most ``upper_s``. lower_s: a known
        bound. stops: whether to end with what is proved so far."""
        choices, most_s = LayerChoices.of(tables, task), upper_s / task.microbatches * (1.0 + _ROUNDING)
        left, found_s, steps = None, np.inf, 0
        for cells in _GRIDS:
            if _FINER * steps > _MOST_STEPS:
                break
            figures, steps = self._figures(choices, task, cells, most_s, stops)
            if figures is None or _in_time(figures, most_s) > _MOST_STAGES or stops():
                break
            stages = frozen(stages_within(figures, most_s, task.stages))
            left = _CellWays(task, stages, figures.forward_s.shape[0])._without_slow(upper_s)
            found_s = np.inf if left is None else left._least_found_s(upper_s, _FEW_PARTS, stops)[0]
            if found_s == np.inf:
                return np.inf
        return lower_s if left is None else left.least_s(lower_s, upper_s, found_s, stops)

    def _figures(
        self, choices: LayerChoices, task: FlushTask, cells: int, most_s: float, stops: Callable[[], bool]
    ) -> tuple[CellFigures | None, int]:
        """Returns the figures of stages that take at most ``most_s``, None if they would be too many, and the steps
        taken."""
        moves, label = self.labelling.moves, self.labelling.label
        cells_of = cells_of_work(moves.order, self.weight_s, cells)
        in_front, inside = (label == IN_FRONT).astype(np.int64), moves.inside.astype(np.float64)
        vertex = np.repeat(moves.order, np.diff(moves.move_start))
        edge_s = self.labelling.charges.seconds(self.edge_in_s, self.edge_out_s)
        memory, steps = task.most_memory_bytes, 0

        def least(paid_s: FloatArray, of_choices: FloatArray, room: float, most: int) -> FloatArray:
            """The least of stages' sums over their layers, each with its least choice, beyond ``room``."""
            nonlocal steps
            cost = paid_s + inside * choices.least(of_choices[None, :])[0, choices.of_vertex[vertex]]
            found, taken = least_of_stages(moves, in_front, cells_of, cost, most)
            steps += taken
            rounded: FloatArray = found * (1.0 - _ROUNDING) - room * (1.0 + _ROUNDING)
            return rounded

        time_s = choices.forward_s + choices.backward_s
        at_once = in_flight_at(task).astype(np.int64)
        known = np.array(sorted({*_IN_FLIGHT, int(at_once.max())}))
        rows, row_of = np.unique(np.searchsorted(known, at_once, side="right") - 1, return_inverse=True)
        most, of_time = int(np.ceil(cells * most_s / self.weight_s.sum())) + 2, np.zeros((0, 0))
        for _ in range(_MOST_WIDER):
            most = min(most, cells)
            if 2 * int(moves.states.max()) * cells * most > _MOST_FIGURES:
                return None, steps
            of_time = least(2.0 * edge_s, time_s, 0.0, most)
            if most == cells or of_time[:, most].min() > most_s:
                break
            most = int(_WIDER * most) + 1
        else:
            return None, steps
        of_rows = []
        for y in known[rows].tolist():
            held, found = choices.a_bytes * y + choices.b_bytes, of_time
            for price_s in _prices_of_byte(choices, time_s, held):
                if stops():
                    return None, steps
                found = np.maximum(found, least(2.0 * edge_s, time_s + price_s * held, price_s * memory, most))
            of_rows.append(found)
        figures = frozen(
            CellFigures(
                np.stack(of_rows),
                np.maximum(0.0, least(edge_s, choices.forward_s, 0.0, most)),
                np.maximum(0.0, least(edge_s, choices.backward_s, 0.0, most)),
                np.maximum(0.0, least(np.zeros_like(edge_s), choices.sync_s, 0.0, most)),
                row_of.astype(np.int64),
            )
        )
        return figures, steps


def _in_time(figures: CellFigures, most_s: float) -> int:
    """Returns how many cell stages take at most ``most_s``."""
    of_rows = np.count_nonzero(figures.time_s <= most_s, axis=(1, 2))
    return int(of_rows[figures.in_flight].sum())


def _prices_of_byte(choices: LayerChoices, time_s: FloatArray, held: FloatArray) -> list[float]:
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
    found: list[float] = np.quantile(worth_s, _QUANTILES).tolist()
    return [*found, _HIGH * max(found[-1], float(time_s.sum() / held.sum()))]


class _CellWays(NamedTuple):
    """Ways over cell stages, of which plans may have the given ones. cells: of the grid."""

    task: FlushTask
    stages: CellStages
    cells: int
    prices: PassPath | None = None

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
        prices = self.prices or PassPath(*(np.mean(often, axis=0) for often in zip(*even, strict=True)))
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
            seconds = left._seconds(way, prices)
            way_s = longest_paths(task.schedule, task.microbatches, *seconds)[0].seconds(*seconds)
            if way_s <= most_s:
                return left, way_s
            left = left._only(behind_s + cost_s + ahead_s <= limit_s)
            program.add(seconds / most_s)
            if not program.solve() or program.batch <= 1.0:
                break
            prices = program.prices
        return left, np.inf

    def _without_slow(self, most_s: float) -> _CellWays | None:
        """Leaves out stages past which a path takes more than ``most_s``; None if no way is left.

        A path goes once through the stages in front of a stage, m - w + 1 times through it, with w microbatches in
        flight, and before and after that either down to the last stage and up again, or through w - 1 further passes of
        the stage. If all m microbatches are in flight, only one of the two can be so.
        """
        left, m, limit_s = self, self.task.microbatches, most_s * (1.0 + _ROUNDING)
        while True:
            stages = left.stages
            time_s = np.maximum(stages.time_s, stages.forward_s + stages.backward_s)
            last_s = np.where(stages.front == NO_BORDER, stages.sync_s, 0.0)
            behind_s, ahead_s, _ = left._cheapest(stages.time_s + last_s)
            if self.task.schedule == GPIPE:
                more_s = behind_s
            else:
                further = np.minimum(m - 1, stages.behind)
                forward_s = np.clip(0.5 * time_s, stages.forward_s, time_s - stages.backward_s)
                down_s, up_s = (
                    np.maximum(0.0, behind_s - further * one_s) for one_s in (forward_s, time_s - forward_s)
                )
                more_s = np.where(further == m - 1, np.maximum(down_s, up_s), down_s + up_s)
            some = left._only(more_s + m * time_s + last_s + ahead_s <= limit_s)
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

    def _cost_s(self, prices: PassPath) -> FloatArray:
        """Returns what stages cost at least by these prices. What their time exceeds their passes by belongs to the
        passes that count less."""
        stages, at = self.stages, self.stages.behind
        forward, backward = prices.forward[at], prices.backward[at]
        sync = np.where(stages.front == NO_BORDER, np.cumsum(prices.sync[::-1])[::-1][at], prices.sync[at])
        more_s = np.maximum(0.0, stages.time_s - stages.forward_s - stages.backward_s)
        found: FloatArray = forward * stages.forward_s + backward * stages.backward_s + sync * stages.sync_s
        found += np.minimum(forward, backward) * more_s
        return found

    def _seconds(self, way: IndexArray, prices: PassPath) -> FloatArray:
        """Returns float64[3, positions]: the forward, backward and synchronisation seconds of a way's stages that cost
        as much. Empty positions in front synchronise as the first stage does."""
        stages, p = _of_stages(self.stages, way), way.size
        more_s = np.maximum(0.0, stages.time_s - stages.forward_s - stages.backward_s)
        is_forward = prices.forward[:p] < prices.backward[:p]
        found = np.zeros((3, self.task.most_stages))
        found[0, :p] = stages.forward_s + np.where(is_forward, more_s, 0.0)
        found[1, :p] = stages.backward_s + np.where(is_forward, 0.0, more_s)
        found[2, :p], found[2, p:] = stages.sync_s, stages.sync_s[-1]
        return found


def _of_stages(stages: CellStages, some: BoolArray | IndexArray) -> CellStages:
    seconds = (of_stage[some] for of_stage in (stages.time_s, stages.forward_s, stages.backward_s, stages.sync_s))
    return frozen(CellStages(stages.behind[some], stages.back[some], stages.front[some], *seconds))
