"""The linear program of ``rank_patterns``: parts of patterns for each rank, the longest known path least."""

from __future__ import annotations

from typing import NamedTuple

import highspy
import numpy as np
import numpy.typing as npt

from piper_ray.engine.chunks.rank_patterns import PatternPrices, RankPatterns, Rows
from piper_ray.engine.kernels.types import FloatArray

_ROUND = 20_000
"""As in ``share_program``."""

_OPTIONS = {"threads": 1, "simplex_scale_strategy": 0, "simplex_dual_edge_weight_strategy": 1}
"""Of HiGHS. Figures are scaled already; and where rows are few and dense, weights by Devex take less time than exact
ones."""


class PatternShares(NamedTuple):
    """batch_s: of the known paths. shares: float64[patterns]."""

    batch_s: float
    shares: FloatArray


class PatternProgram:
    """Columns: patterns, and the batch. Rows: of each rank the shares are 1 together; of each kind all layers are
    present; then paths, as they are added. prices: of the last solution.

    worked: as in ``ShareProgram``.
    """

    def __init__(self, patterns: RankPatterns, allowed: npt.NDArray[np.bool_], rows: Rows) -> None:
        self._columns = np.flatnonzero(allowed)
        self._size, self._ranks, kinds = allowed.size, patterns.first.size, patterns.kinds.layers.size
        self._fixed_rows = self._ranks + kinds
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        for name, value in _OPTIONS.items():
            self._highs.setOptionValue(name, value)
        self.worked = 0
        self.prices: PatternPrices | None = None
        size = self._columns.size
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = size + 1, self._fixed_rows
        lp.col_cost_ = (np.arange(size + 1) == size).astype(np.float64)
        lp.col_lower_, lp.col_upper_ = np.zeros(size + 1), np.full(size + 1, np.inf)
        ones, all_layers = np.ones(self._ranks), patterns.kinds.layers.astype(np.float64)
        lp.row_lower_ = lp.row_upper_ = np.concatenate([ones, all_layers])
        is_of_rank = patterns.rank[self._columns, None] == np.arange(self._ranks)
        entries = np.column_stack([is_of_rank, patterns.of_kinds[self._columns]])
        column, row = np.nonzero(entries)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(column, np.arange(size + 2))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = row, entries[column, row].astype(np.float64)
        self._highs.passModel(lp)
        self._scale_s = float(rows.added_s.max())
        self.add(rows)

    def add(self, rows: Rows) -> None:
        """The batch takes no less than these paths."""
        added, fixed_s = rows.added_s[:, self._columns] / self._scale_s, rows.fixed_s / self._scale_s
        entries = np.column_stack([-added, np.ones(fixed_s.size)])
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
        layer, path = duals[self._ranks : self._fixed_rows], np.maximum(0.0, duals[self._fixed_rows :])
        if not path.any():
            return None
        self.prices = PatternPrices(path / path.sum(), layer * (self._scale_s / path.sum()))
        shares = np.zeros(self._size)
        shares[self._columns] = values[:-1]
        return PatternShares(float(values[-1]) * self._scale_s, shares)
