"""Prices of positions for the stages of a lattice, with what crosses their borders.

For any prices no plan takes less than the cheapest way through the lattice costs (``kernels.flush_completion``). Good
prices are sought by column generation (Dantzig and Wolfe, 1960): a linear program shares ways out, over the stages of
those found so far, so that the longest path of the shares is least. Its dual values are prices, and the cheapest way at
these brings further stages. The program only proposes prices: what is proved is what the cheapest way costs.

Only stages of plans below a cutoff count. So what is found is: no plan below the cutoff takes less than the cheapest
way, thus no plan takes less than that or the cutoff, whichever is less.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import highspy
import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.flush.path_prices import LayerChoices, PathPrices, bounded, in_flight_at, path_bounds
from piper_ray.engine.flush.paths import PassPath, longest_paths, path_past
from piper_ray.engine.flush.tables import tables_of_rows
from piper_ray.engine.kernels.flush_completion import PlacedStages, cheapest_way
from piper_ray.engine.kernels.flush_stages import least_figures
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray, StageKey, frozen
from piper_ray.engine.lattice.layer_graph import members

_MOST_ROUNDS, _MOST_WORK = 100, 100_000_000
"""Rounds, and stages at positions that are priced in all of them: some seconds."""

_FEW_STAGES = 2_000
"""Fewer stages than these are searched as quickly without better prices."""

_NEAR = 1e-3
"""Relative. Prices are good enough if the program's value exceeds their bound by no more than this."""

_LONGER, _PATHS_AT_ONCE, _MOST_PATHS = 1e-4, 8, 40
"""A path is added if it is longer than the batch by more than the first, relatively; how many at once, how often."""

_FEWER = 0.9
"""A further search for prices must have fewer stages by this factor."""

_HALF = 0.5
"""Downsets without stages are left out once at most this share of the stages is left."""

_SHARES = (0.6, 0.2)
"""Shares of the best prices in prices that count one stage more."""

_EXCESS = 100.0
"""The price of exceeding a device's memory by its whole size, relative to the work of all layers."""


_NO_COLUMNS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0)


class Tightened:
    """What is left for plans of a task whose batch takes at most ``cutoff_s``, as ever more prices are known.

    rows: int64[k], the downsets that such plans may have, of those given; none if there is no such plan. tables,
    stages: on these. prices: the best ones that are known. ahead_s: float64[k, positions + 1], ``PathBounds.ahead_s``
    at the best prices.
    """

    def __init__(
        self,
        tables: FlushTables,
        task: FlushTask,
        prices: PathPrices,
        stages: PlacedStages,
        cutoff_s: float,
        *,
        has_first_sync: bool = True,
        free: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """stages: at least those of all such plans. has_first_sync: whether the synchronisation of a first stage counts
        at the empty positions in front of it too."""
        self.tables, self.stages, self.prices = tables, stages, prices
        self.rows = np.arange(tables.bits.shape[0])
        self.ahead_s: FloatArray = np.zeros((self.rows.size, task.most_stages + 1))
        self._task, self._cutoff_s, self._choices = task, cutoff_s, LayerChoices.of(tables, task)
        self._free = free
        self._work, self._listed, self._has_first_sync = 0, stages.stage.size, has_first_sync

    def tighten(self) -> None:
        """Seeks the best prices, then looks at each position more closely, for as long as this leaves stages out. Few
        stages are searched as quickly with the prices that are known."""
        program = WayProgram(self._choices, self._task) if self._listed >= _FEW_STAGES else None
        while program is not None and self.rows.size > 0:
            self._seek(program)
            before = self.stages.stage.size
            for prices in self._stressed():
                if self.rows.size > 0:
                    self._leave_out(prices)
            if self.stages.stage.size > _FEWER * before or self._work > _MOST_WORK:
                break
        if self.rows.size > 0:
            self.ahead_s, _ = self._leave_out(self.prices)
            self.prices = bounded(self._choices, self._task, self.prices)

    def _seek(self, program: WayProgram) -> None:
        """Seeks the best prices for the stages that are left."""
        prices, best_s = self.prices, -np.inf
        for _ in range(_MOST_ROUNDS):
            ahead_s, way = self._leave_out(prices)
            if self.rows.size == 0:
                return
            if ahead_s[0, 0] > best_s:
                best_s, self.prices = float(ahead_s[0, 0]), prices
            program.keep(self.stages, self.rows)
            program.add_way(self.tables, self.rows, way, prices, self._free)
            if self._work > _MOST_WORK or not program.solve() or program.batch_s <= best_s * (1.0 + _NEAR):
                return
            prices = program.prices

    def _stressed(self) -> Iterator[PathPrices]:
        """Prices that count one position more than the best ones do."""
        task, best, positions = self._task, self.prices, self._task.most_stages
        for q in range(positions):
            path = path_past(task.schedule, task.microbatches, positions, q)
            for share in _SHARES:
                forward, backward, sync = (
                    share * known + (1.0 - share) * often for known, often in zip(best[:3], path, strict=True)
                )
                yield PathPrices(forward, backward, sync, share * best.memory_s, 0.0)

    def _leave_out(self, prices: PathPrices) -> tuple[FloatArray, IndexArray]:
        """Leaves out what is in no plan below the cutoff by these prices, and the downsets without stages. Returns
        ``ahead_s`` of the downsets left, and the cheapest way through them."""
        self._work += self.stages.stage.size
        bounds = path_bounds(self.tables, self._task, prices, self._choices)
        if not self._has_first_sync:
            bounds = frozen(bounds._replace(first_sync=np.zeros_like(bounds.first_sync)))
        ahead_s, way, rest = cheapest_way(self.stages, bounds, self._cutoff_s)
        self.stages = frozen(rest)
        if 0 < rest.stage.size > _HALF * self._listed:
            return ahead_s, way
        self._listed = rest.stage.size
        outer = np.flatnonzero(np.diff(rest.start))
        is_new = np.diff(rest.stage, prepend=-1) > 0  # they ascend
        inner = rest.inner[rest.stage[is_new]]
        left = np.union1d(outer, inner)
        self.stages = frozen(
            PlacedStages(
                start=np.append(rest.start[left], rest.start[-1]),
                stage=np.cumsum(is_new, dtype=np.int32) - np.int32(1),
                behind=rest.behind,
                time_s=rest.time_s,
                inner=np.searchsorted(left, inner).astype(np.int32),
                figures=rest.figures[rest.stage[is_new]],
            )
        )
        self.tables, self.rows = tables_of_rows(self.tables, left), self.rows[left]
        return ahead_s[left], np.searchsorted(left, way)


class WayProgram:
    """The linear program, and its solution.

    Columns: the forward, the backward and the synchronisation seconds of each position; the batch; the excess over the
    memory at each position, at a high cost; then stages, each at a position, with a choice for each layer. Rows: the
    seconds of each position; the memory of each position; then paths, and for each downset with each number of stages
    behind it that as many ways go on from there as lead to it.
    """

    def __init__(self, choices: LayerChoices, task: FlushTask) -> None:
        self._choices, self._task = choices, task
        positions = self._positions = task.most_stages
        self._unit_s, self._in_flight = task.work_s, in_flight_at(task)
        self._paths: list[tuple[PassPath, int]] = []
        self._nodes: dict[tuple[int, int], int] = {}
        self._stages: dict[tuple[int, int, int], list[int]] = {}  # columns, by the downsets and the position
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        self._highs.setOptionValue("threads", 1)
        costs = np.concatenate([np.zeros(3 * positions), [1.0], np.full(positions, _EXCESS)])
        for cost in costs.tolist():
            self._highs.addCol(cost, 0.0, np.inf, 0, _NO_COLUMNS, _NO_VALUES)
        for k in range(3 * positions):
            self._add_row(0.0, 0.0, [k], [-1.0])
        for k in range(positions):
            self._add_row(-np.inf, 0.0, [3 * positions + 1 + k], [-1.0])
        self._nodes[0, 0] = self._add_row(1.0, 1.0, [], [])
        even = np.full(positions, 1.0 / positions)
        self._add_paths(longest_paths(task.schedule, task.microbatches, even, even, np.zeros(positions)))

    def add_way(
        self,
        tables: FlushTables,
        rows: IndexArray,
        way: IndexArray,
        prices: PathPrices,
        free: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """Adds the stages of a way. way: int64[..], downsets of the tables, from the empty one on; rows: int64[m],
        their numbers in the program. free: the numbers of outer and inner ones between which a stage takes no
        time."""
        copies_of = self._choices.copies.size
        for q, (inner, outer) in enumerate(pairwise(way.tolist())):
            border = int(rows[outer]), outer == rows.size - 1
            if (int(rows[outer]), int(rows[inner])) in free:
                self.add_stage(int(rows[inner]), *border, q, np.zeros(copies_of), (0.0, 0.0), prices)
                continue
            vertices = self._choices.of_vertex[members(tables.bits[outer] & ~tables.bits[inner])]
            least = least_figures(StageKey(outer, inner, int(self._task.bounding[0])), tables, self._task)
            paid_s = least.crossing_s + least.tensor_forward_s, least.crossing_s + least.tensor_backward_s
            self.add_stage(int(rows[inner]), *border, q, np.bincount(vertices, minlength=copies_of), paid_s, prices)

    def add_stage(
        self,
        inner: int,
        outer: int,
        is_first: bool,
        q: int,
        copies: FloatArray | IndexArray,
        paid_s: tuple[float, float],
        prices: PathPrices,
    ) -> None:
        """Adds a stage at position q, with the choices that cost least. inner, outer: the numbers of its downsets, 0
        for the empty one. copies: [layers], how many of each layer it has. paid_s: what it pays for what crosses its
        borders forward and backward."""
        choices, positions, task = self._choices, self._positions, self._task
        sync = prices.sync[q:].sum() if is_first else prices.sync[q]
        held = choices.a_bytes * self._in_flight[q] + choices.b_bytes
        priced_s = choices.forward_s * prices.forward[q] + choices.backward_s * prices.backward[q]
        order = np.lexsort((priced_s + choices.sync_s * sync + held * prices.memory_s[q], choices.layer))
        chosen = order[np.searchsorted(choices.layer[order], np.arange(choices.copies.size))]
        columns = (choices.forward_s, choices.backward_s, choices.sync_s)
        forward_s, backward_s, sync_s = (float(dot(copies, column[chosen])) / self._unit_s for column in columns)
        forward_s, backward_s = forward_s + paid_s[0] / self._unit_s, backward_s + paid_s[1] / self._unit_s
        index, values = [self._node(inner, q), q, positions + q], [1.0, forward_s, backward_s]
        if not is_first:
            index, values = [*index, self._node(outer, q + 1)], [*values, -1.0]
        # The first stage's synchronisation counts at the empty positions in front of it too.
        synced = range(q, positions if is_first else q + 1)
        index += [*(2 * positions + k for k in synced), 3 * positions + q]
        values += [*(sync_s for _ in synced), float(dot(copies, held[chosen])) / task.most_memory_bytes - 1.0]
        self._stages.setdefault((inner, outer, q), []).append(self._highs.getNumCol())
        self._highs.addCol(0.0, 0.0, np.inf, len(index), np.array(index, np.int32), np.array(values))

    def keep(self, stages: PlacedStages, rows: IndexArray) -> None:
        """Leaves out all stages but these. rows: as in ``add_way``."""
        for key in list(self._stages):
            inner, outer, q = key
            row = int(np.searchsorted(rows, outer))
            is_there = row < rows.size and rows[row] == outer
            at = slice(stages.start[row], stages.start[row + 1]) if is_there else slice(0)
            there = rows[stages.inner[stages.stage[at]]] == inner
            if not (there & (stages.behind[at] == q)).any():
                for column in self._stages.pop(key):
                    self._highs.changeColBounds(column, 0.0, 0.0)

    def solve(self) -> bool:
        """Solves the program, with all paths that turn out to be longer than the batch. Returns False if no solution is
        found."""
        for _ in range(_MOST_PATHS):
            self._highs.run()
            if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return False
            values = np.array(self._highs.getSolution().col_value)[: 3 * self._positions + 1]
            stages = values[:-1].reshape(3, -1)
            paths = longest_paths(self._task.schedule, self._task.microbatches, *stages)
            longer = [path for path in paths if path.seconds(*stages) > values[-1] * (1.0 + _LONGER)]
            if not longer:
                break
            self._add_paths(longer[:_PATHS_AT_ONCE])
        return True

    @property
    def batch_s(self) -> float:
        """The value of the last solution."""
        return float(self._highs.getInfo().objective_function_value) * self._unit_s

    @property
    def prices(self) -> PathPrices:
        """The prices of the last solution, without a bound."""
        duals = np.array(self._highs.getSolution().row_dual)
        memory = np.maximum(0.0, -duals[3 * self._positions : 4 * self._positions])
        weight = np.maximum(0.0, duals[[row for _, row in self._paths]])
        of_paths = zip(*(path for path, _ in self._paths), strict=True)
        forward, backward, sync = (dot(weight, np.stack(often)) / weight.sum() for often in of_paths)
        return PathPrices(forward, backward, sync, memory * (self._unit_s / self._task.most_memory_bytes), 0.0)

    def _add_paths(self, paths: list[PassPath]) -> None:
        for path in paths:
            often = np.concatenate(path)
            some = np.flatnonzero(often)
            row = self._add_row(0.0, np.inf, [*some.tolist(), often.size], [*(-often[some]).tolist(), 1.0])
            self._paths.append((path, row))

    def _node(self, downset: int, behind: int) -> int:
        """Returns the row of a downset with a number of stages behind it."""
        if (downset, behind) not in self._nodes:
            self._nodes[downset, behind] = self._add_row(0.0, 0.0, [], [])
        return self._nodes[downset, behind]

    def _add_row(self, least: float, most: float, columns: list[int], values: list[float]) -> int:
        self._highs.addRow(least, most, len(columns), np.array(columns, np.int32), np.array(values))
        return int(self._highs.getNumRow()) - 1
