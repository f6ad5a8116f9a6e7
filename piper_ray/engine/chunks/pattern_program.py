"""The linear program of ``rank_patterns``: parts of patterns for each rank, the longest known path least."""

from __future__ import annotations

from typing import NamedTuple

import highspy
import numpy as np
import numpy.typing as npt

from piper_ray.engine.chunks.rank_patterns import PatternPrices, RankPatterns, Rows
from piper_ray.engine.kernels.chunk_program import PASSES
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_PENALTY = 10.0
"""For each layer too many or too few, in times of the longest pattern."""

_ROUND = 20_000
"""As in ``share_program``."""

_OPTIONS = {"threads": 1, "simplex_scale_strategy": 0, "simplex_dual_edge_weight_strategy": 1}
"""Of HiGHS. Figures are scaled already; and where rows are few and dense, weights by Devex take less time than exact
ones."""


class PatternShares(NamedTuple):
    """batch_s: of the known paths. shares: float64[patterns]. spread_s: float64[s, PASSES], what the memory of ranks
    costs."""

    batch_s: float
    shares: FloatArray
    spread_s: FloatArray


class PatternProgram:
    """Columns: patterns, what the memory of ranks costs in each chunk and kind of pass, and the batch. Rows: of each
    rank the shares are 1 together; of each kind all layers are present; what each rank's memory costs is spread; then
    paths, as they are added. prices: of the last solution.

    worked: as in ``ShareProgram``.
    """

    def __init__(self, patterns: RankPatterns, allowed: npt.NDArray[np.bool_], rows: Rows) -> None:
        self._columns = np.flatnonzero(allowed)
        self._first_ones = self._columns.size
        self._patterns = patterns
        self._size, self._ranks, kinds = allowed.size, patterns.first.size, patterns.kinds.layers.size
        stages, spread = patterns.crossing_s.size, patterns.spread_in
        self._stages, self._spread_in = stages, spread
        self._end = self._ranks + kinds  # of the rows of layers
        self._fixed_rows = self._end + (self._ranks if patterns.only_counts else 0)
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        for name, value in _OPTIONS.items():
            self._highs.setOptionValue(name, value)
        self.worked = 0
        self.prices: PatternPrices | None = None
        size, spread_size = self._columns.size, stages * spread.size
        lacking = 2 * kinds if patterns.only_counts else 0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = size + spread_size + 1 + lacking, self._fixed_rows
        lp.col_cost_ = np.concatenate([np.zeros(size + spread_size), [1.0], np.full(lacking, _PENALTY)])
        lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.full(lp.num_col_, np.inf)
        ones, rest = np.ones(self._ranks), self._fixed_rows - self._end
        lp.row_lower_ = np.concatenate([ones, patterns.least_layers, np.zeros(rest)])
        lp.row_upper_ = np.concatenate([ones, patterns.kinds.layers, np.full(rest, np.inf)])
        self._scale_s = float(rows.added_s.max())
        entries = self._entries(self._columns)
        if patterns.only_counts:
            in_chunks = np.repeat(patterns.program.rank_of, spread.size)[:, None] == np.arange(self._ranks)
            entries = np.concatenate([entries, np.column_stack([np.zeros((spread_size, self._end)), in_chunks])])
            amiss = np.zeros((1 + lacking, self._fixed_rows))
            amiss[1:, self._ranks : self._end] = np.concatenate([np.eye(kinds), -np.eye(kinds)])
            entries = np.concatenate([entries, amiss])
        column, row = np.nonzero(entries)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(column, np.arange(lp.num_col_ + 1))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = row, entries[column, row].astype(np.float64)
        self._first_more = lp.num_col_
        self._highs.passModel(lp)
        self.add(rows)

    def _entries(self, columns: IndexArray) -> FloatArray:
        """float64[columns, rows], of patterns in the rows in front of those of paths."""
        patterns = self._patterns
        is_of_rank = patterns.rank[columns, None] == np.arange(self._ranks)
        found = [is_of_rank, patterns.of_kinds[columns]]
        if patterns.only_counts:
            found.append(is_of_rank * patterns.spread_s[columns, None] / -self._scale_s)
        return np.column_stack(found).astype(np.float64)

    def add_patterns(self, columns: IndexArray, rows: Rows) -> None:
        """Adds these patterns. rows: all paths so far."""
        entries = np.column_stack([self._entries(columns), -rows.added_s[:, columns].T / self._scale_s])
        column, row = np.nonzero(entries)
        start = np.searchsorted(column, np.arange(columns.size)).astype(np.int32)
        none, values = np.zeros(columns.size), entries[column, row]
        self._highs.addCols(columns.size, none, none, none + np.inf, row.size, start, row.astype(np.int32), values)
        self._columns = np.concatenate([self._columns, columns])

    def add(self, rows: Rows) -> None:
        """The batch takes no less than these paths."""
        added, fixed_s = rows.added_s[:, self._columns] / self._scale_s, rows.fixed_s / self._scale_s
        often = rows.often[:, :, self._spread_in].reshape(fixed_s.size, self._stages * self._spread_in.size)
        first = self._first_ones
        amiss = np.zeros((fixed_s.size, self._first_more - first - often.shape[1] - 1))
        entries = np.column_stack([-added[:, :first], -often, np.ones(fixed_s.size), amiss, -added[:, first:]])
        row, column = np.nonzero(entries)
        start = np.searchsorted(row, np.arange(fixed_s.size)).astype(np.int32)
        values = entries[row, column]
        upper = np.full(fixed_s.size, np.inf)
        self._highs.addRows(fixed_s.size, fixed_s, upper, row.size, start, column.astype(np.int32), values)

    def solve(self) -> PatternShares | None:
        """Solves the program; None if no solution is found, or no path takes any time in it."""
        self._highs.run()
        self.worked += int(self._highs.getInfo().simplex_iteration_count) * self._highs.getNumRow() + _ROUND
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = self._highs.getSolution()
        values = np.array(solution.col_value)
        duals = np.array(solution.row_dual)
        layer, path = duals[self._ranks : self._end], np.maximum(0.0, duals[self._fixed_rows :])
        if not path.any():
            return None
        self.prices = PatternPrices(path / path.sum(), layer * (self._scale_s / path.sum()))
        first, batch = self._first_ones, self._first_ones + self._stages * self._spread_in.size
        shares = np.zeros(self._size)
        shares[self._columns] = np.concatenate([values[:first], values[self._first_more :]])
        spread_s = np.zeros((self._stages, PASSES))
        spread_s[:, self._spread_in] = values[first:batch].reshape(self._stages, -1) * self._scale_s
        return PatternShares(float(values[batch]) * self._scale_s, shares, spread_s)
