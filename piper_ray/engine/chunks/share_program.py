"""The linear program of a case of a task in which layers may be shared out over its chunks.

The order of passes is fixed, so no pass begins later than the longest path to it ends, and a path is a sum over layers.
Parts of layers are in any chunks of their windows, each part with an option of its own. All layers are present. At no
moment does a rank hold more than the memory. It has no more or fewer units of time than it may, and no chunk is empty.
No path is longer than the batch, which is minimised. Paths that turn out to be longer are added, and the program is
solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import highspy
import numpy as np

from piper_ray.engine.chunks.layer_counts import LayerCounts
from piper_ray.engine.kernels.chunk_bound import FIGURE, NO_LIMIT, LayerKinds, Paths, Prices, ShapeLimits, window
from piper_ray.engine.kernels.chunk_program import PASSES
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray

_PENALTIES = (10.0, 1e3, 1e5)
"""Penalties for exceeding the limits of memory or units, relative, in batches. They are tried one after the other."""

_NOTHING = 1e-9

_MOST_NODES = 200
"""The most nodes of a search for whole layers."""

_ROUND = 20_000
"""Iterations times rows that take as long as the other work for each solution."""


class _Cells(NamedTuple):
    """Columns that stand for parts of layers: which kind, in which chunk, with which option. int64[cells] each."""

    kind: IndexArray
    chunk: IndexArray
    option: IndexArray


class FractionalPlan(NamedTuple):
    """batch_s: its length by the known paths and by the penalties. lacks: whether it has too much or too little of
    something.

    passes_s: float64[s, PASSES]. sync_s, units: float64[p]. layers_in: float64[kinds, s], numbers of layers.
    """

    batch_s: float
    passes_s: FloatArray
    sync_s: FloatArray
    units: FloatArray
    layers_in: FloatArray
    lacks: bool


class Basis(NamedTuple):
    """The basis of a program: HiGHS's status of each column and row."""

    columns: IndexArray
    rows: IndexArray

    def with_paths(self, kept: IndexArray, paths: int) -> Basis | None:
        """The basis of the program with only these of its paths; None if that program has none."""
        others = self.rows.size - paths
        found = Basis(self.columns, np.concatenate([self.rows[:others], self.rows[others:][kept]]))
        basic = sum(np.count_nonzero(part == int(highspy.HighsBasisStatus.kBasic)) for part in found)
        return found if basic == found.rows.size else None


class ShareProgram:
    """The program in units of ``scale_s`` and of the memory of a device. hub: the hub's chunk, -1 if it is open or
    there is none. excluded: bool[kinds, s], the chunks that may have no layer of a kind.

    Columns: parts of layers; seconds of each kind of pass of each chunk; synchronisation of each rank; activations of
    each chunk; fixed bytes of each rank; what ranks have too much, and too little; the batch. Rows: each kind's layers
    are present; all these sums; moments; units, too many and too few; layers of chunks, and those of each counted kind;
    then paths. core_s: an average of the fractional plans so far, which the caller that adds paths keeps: seconds of
    passes and of synchronisation. worked: iterations of the simplex method so far, times rows, and work counted as
    such. basis: the start of the next solution, of a program of this size.
    """

    def __init__(
        self,
        kinds: LayerKinds,
        limits: ShapeLimits,
        hub: int,
        excluded: BoolArray,
        scale_s: float,
        paths: Paths,
        basis: Basis | None = None,
        counted: Sequence[int] = (),
    ) -> None:
        self._kinds, self._limits, self._hub, self._scale_s = kinds, limits, hub, scale_s
        self._counted = np.array(counted, np.int64)
        s, p = limits.rank_of.size, limits.most_units.size
        self.core_s: tuple[FloatArray, FloatArray] | None = None
        self.worked = 0
        self._cells = _cells(kinds, hub, excluded)
        cells, moments = self._cells.kind.size, limits.moment_rank.size
        # Where groups of columns and of rows begin.
        self._sums = cells + np.cumsum([0, PASSES * s, p, s, p])
        self._over = int(self._sums[-1])
        self._rows = np.cumsum([0, kinds.layers.size, PASSES * s, p, s, p, moments, p, p, s, self._counted.size * s])
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        self._highs.setOptionValue("threads", 1)
        self._highs.passModel(self._model())
        self.add(paths)
        self._duals = np.append(np.zeros(int(self._rows[-1])), np.ones(paths.rank.size))
        if basis is not None:
            first = highspy.HighsBasis()
            first.col_status, first.row_status = ([*map(highspy.HighsBasisStatus, part.tolist())] for part in basis)
            first.valid = True
            self._highs.setBasis(first)

    def add(self, paths: Paths) -> None:
        """Requires that the batch takes no less than these paths."""
        count = paths.rank.size
        often = np.zeros((count, self._over + 3 - self._sums[0]))  # of all columns behind those of parts of layers
        often[:, : self._sums[1] - self._sums[0]] = -paths.counts.transpose(0, 2, 1).reshape(count, -1)
        often[np.arange(count), self._sums[1] - self._sums[0] + paths.rank] = -1.0
        often[:, -1] = 1.0
        row, column = np.nonzero(often)
        start = np.searchsorted(row, np.arange(count)).astype(np.int32)
        value, column = often[row, column], (self._sums[0] + column).astype(np.int32)
        self._highs.addRows(count, np.zeros(count), np.full(count, np.inf), row.size, start, column, value)

    def require_units(self, rank: int, units: float) -> None:
        """Requires at least ``units`` of this rank."""
        self._highs.changeRowBounds(int(self._rows[7]) + rank, units, np.inf)

    def limit_layers(self, counts: LayerCounts) -> None:
        """Limits the layers of the counted kinds in each chunk."""
        rows = np.arange(*self._rows[-2:], dtype=np.int32)
        least, most = (x[self._counted].ravel().astype(np.float64) for x in (counts.least, counts.most))
        self._highs.changeRowsBounds(rows.size, rows, least, most)  # type: ignore[attr-defined]

    def solve(self, enough_s: float) -> FractionalPlan | None:
        """Solves the program. None if no solution is found. enough_s: a longer batch is as good as any other one."""
        for penalty in _PENALTIES:
            for column in (self._over, self._over + 1):
                self._highs.changeColCost(column, penalty)
            self._highs.run()
            self.worked += int(self._highs.getInfo().simplex_iteration_count) * self._highs.getNumRow() + _ROUND
            if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return None
            solution = self._highs.getSolution()
            values, self._duals = np.array(solution.col_value), np.array(solution.row_dual)
            batch_s = float(self._highs.getInfo().objective_function_value) * self._scale_s
            lacks = bool(values[self._over : self._over + 2].max() > _NOTHING)
            if batch_s >= enough_s or not lacks:
                break
        kind, chunk, option = self._cells
        s, p = self._limits.rank_of.size, self._limits.most_units.size
        part = values[: kind.size]
        first, sync, activation = self._sums[:3]
        units = np.bincount(self._limits.rank_of[chunk], part * self._kinds.units[option], p)
        return FractionalPlan(
            batch_s,
            np.ascontiguousarray(values[first:sync].reshape(PASSES, s).T) * self._scale_s,
            values[sync:activation] * self._scale_s,
            units.astype(np.float64),
            np.bincount(kind * s + chunk, part, self._kinds.layers.size * s).reshape(-1, s).astype(np.float64),
            lacks,
        )

    def whole(self, before: Sequence[tuple[int, int]]) -> IndexArray | None:
        """Seeks a plan of whole layers that keeps all limits, int64[s, options]: how many layers run each option of a
        kind in each chunk. None if none is found soon. before: pairs of kinds of a single layer; the first one's is in
        no later chunk. Nothing else can be done with the program afterwards."""
        kind, chunk, option = self._cells
        s, cells = self._limits.rank_of.size, np.arange(kind.size, dtype=np.int32)
        until = chunk <= np.arange(s)[:, None]
        for first, second in before:
            for row in until * ((kind == second) - 1.0 * (kind == first)):
                some = np.flatnonzero(row).astype(np.int32)
                self._highs.addRow(-np.inf, 0.0, some.size, some, row[some])
        for column in (self._over, self._over + 1):
            self._highs.changeColBounds(column, 0.0, 0.0)
        self._highs.changeColsIntegrality(cells.size, cells, np.full(cells.size, highspy.HighsVarType.kInteger))
        for name in ("primal_feasibility_tolerance", "mip_feasibility_tolerance"):
            self._highs.setOptionValue(name, _NOTHING)
        self._highs.setOptionValue("mip_max_nodes", _MOST_NODES)
        self._highs.setOptionValue("mip_max_improving_sols", 1)
        self._highs.run()
        info = self._highs.getInfo()
        self.worked += max(0, int(info.simplex_iteration_count)) * self._highs.getNumRow() + _ROUND
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        found = np.zeros((s, self._kinds.units.size), np.int64)
        found[chunk, option] = np.round(self._highs.getSolution().col_value[: kind.size])
        return found

    @property
    def basis(self) -> Basis:
        """The basis of the last solution, with the paths added since."""
        found = self._highs.getBasis()
        columns, rows = (np.array([*map(int, part)], np.int64) for part in (found.col_status, found.row_status))
        return Basis(columns, rows)

    @property
    def prices(self) -> Prices:
        """The prices of the last solution; even ones if there is none."""
        duals = self._duals
        moments, most, least, filled, counted, paths = self._rows[5:]
        path = np.maximum(0.0, duals[paths:])
        batch_s = self._scale_s / path.sum()
        of_units = -(duals[most:least] + duals[least:filled]) * batch_s
        layers = np.zeros((self._kinds.layers.size if self._counted.size else 0, self._limits.rank_of.size))
        layers[self._counted] = -duals[counted:paths].reshape(-1, layers.shape[1]) * batch_s
        return Prices(
            path / path.sum(),
            np.maximum(0.0, -duals[moments:most]) * (batch_s / self._limits.memory_bytes),
            np.where(self._limits.most_units < NO_LIMIT, of_units, np.minimum(0.0, of_units)),
            np.maximum(0.0, duals[filled:counted]) * batch_s,
            layers,
        )

    def _model(self) -> highspy.HighsLp:
        limits, scale_s = self._limits, self._scale_s
        s, p = limits.rank_of.size, limits.most_units.size
        crossing = limits.crossing_s / scale_s
        none, free = np.zeros(2 * p + 2 * s), np.full(p, np.inf)
        sums = np.concatenate([-crossing, -crossing, none])  # nothing waits for the gradients of weights
        moments = limits.moment_rank.size
        most = np.where(limits.most_units < NO_LIMIT, limits.most_units, free)
        any_layers = np.full(self._counted.size * s, np.inf)
        lower = [self._kinds.layers, sums, np.full(moments + p, -np.inf), limits.least_units, np.ones(s), -any_layers]
        upper = [self._kinds.layers, sums, np.ones(moments), most, free, np.full(s, np.inf), any_layers]
        row, column, value = self._entries()
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self._over + 3, int(self._rows[-1])
        lp.col_cost_ = np.append(np.zeros(self._over + 2), 1.0)
        lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.full(lp.num_col_, np.inf)
        lp.row_lower_, lp.row_upper_ = np.concatenate(lower), np.concatenate(upper)
        order = np.lexsort((row, column))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(column[order], np.arange(lp.num_col_ + 1))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = row[order], value[order]
        return lp

    def _entries(self) -> tuple[IndexArray, IndexArray, FloatArray]:
        """Rows, columns and values that are not 0."""
        kinds, limits, scale_s = self._kinds, self._limits, self._scale_s
        kind, chunk, option = self._cells
        s, p = limits.rank_of.size, limits.most_units.size
        cell, rank, figures = np.arange(kind.size), limits.rank_of[chunk], kinds.figures[option]
        _, passes, sync, activation, fixed, moments, most, least, filled, counted, _ = self._rows.tolist()
        memory = limits.memory_bytes
        bytes_ = figures / memory
        listed = [
            (kind, cell, np.ones(cell.size)),
            (sync + rank, cell, figures[:, FIGURE.weights] * (limits.sync_s_per_byte / scale_s)),
            (activation + chunk, cell, bytes_[:, FIGURE.activation]),
            (fixed + rank, cell, bytes_[:, FIGURE.fixed]),
            (most + rank, cell, kinds.units[option]),
            (least + rank, cell, kinds.units[option]),
            (filled + chunk, cell, kinds.counted[kind]),
            (np.arange(passes, moments), np.arange(self._sums[0], self._over), np.full(moments - passes, -1.0)),
        ]
        for number, one in enumerate(self._counted.tolist()):
            of_kind = cell[kind == one]
            listed.append((counted + number * s + chunk[of_kind], of_kind, np.ones(of_kind.size)))
        seconds = figures[:, FIGURE.forward_s : FIGURE.weight_s + 1] / scale_s
        if self._hub >= 0:
            apart = (rank != limits.rank_of[self._hub]) / scale_s
            seconds[:, :2] += (figures[:, FIGURE.from_hub_s] * apart)[:, None]
            at_hub = figures[:, FIGURE.to_hub_s] * apart
            listed += [(np.full(cell.size, passes + k * s + self._hub), cell, at_hub) for k in range(2)]
        listed += [(passes + k * s + chunk, cell, seconds[:, k]) for k in range(PASSES)]
        moment, holding = np.nonzero(limits.held)
        listed += [
            (moments + moment, self._sums[2] + holding, limits.held[moment, holding]),
            (
                moments + np.arange(limits.moment_rank.size),
                self._sums[3] + limits.moment_rank,
                np.ones(most - moments),
            ),
            (np.arange(moments, most), np.full(most - moments, self._over), np.full(most - moments, -1.0)),
            (np.arange(most, least), np.full(p, self._over), -np.clip(limits.most_units, 1.0, kinds.layers.sum())),
            (np.arange(least, filled), np.full(p, self._over + 1), np.maximum(1.0, limits.least_units)),
            (np.arange(filled, filled + s), np.full(s, self._over + 1), np.ones(s)),
        ]
        row, column, value = (np.concatenate(part) for part in zip(*listed, strict=True))
        some = value != 0.0
        return row[some], column[some], value[some]


def _cells(kinds: LayerKinds, hub: int, excluded: BoolArray) -> _Cells:
    found = []
    for c in range(kinds.layers.size):
        first, last = (kinds.first_chunk[c], kinds.last_chunk[c]) if hub < 0 else window(kinds, c, hub)
        chunks, options = np.arange(first, last + 1), np.arange(kinds.option_start[c], kinds.option_start[c + 1])
        chunks = chunks[~excluded[c, chunks]]
        size = chunks.size * options.size
        found.append((np.full(size, c), np.repeat(chunks, options.size), np.tile(options, chunks.size)))
    return _Cells(*(np.concatenate(part).astype(np.int64) for part in zip(*found, strict=True)))
