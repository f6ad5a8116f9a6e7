"""A linear program that mixes ways through a pipeline so that the longest path of the mixture is least."""

from __future__ import annotations

from typing import NamedTuple

import highspy
import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.flush.paths import PassPath, longest_paths, paths_past
from piper_ray.engine.kernels.flush_types import FlushTask
from piper_ray.engine.kernels.types import FloatArray

_LONGER, _PATHS_AT_ONCE, _MOST_SOLVES = 1e-6, 4, 60
"""A path is added if it is longer than the batch by more than the first, relatively; how many at once, how often."""

_NO_COLUMNS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0)


class LevelPrices(NamedTuple):
    """What a second costs: as often as passes and synchronisations are on ``path``. of_all: what it costs in any pass;
    no more than in each."""

    path: PassPath
    of_all: float

    @classmethod
    def of(cls, path: PassPath, of_all: float = np.inf) -> LevelPrices:
        return cls(path, max(0.0, min(of_all, float(path.forward.min()), float(path.backward.min()))))


class PathProgram:
    """The program, and its solution. Columns: the batch; how many seconds more each pass takes; then the share of each
    way. Rows: the shares are a whole; the seconds more are as many as the ways have beyond their passes; then paths, of
    which the batch takes no less than any."""

    def __init__(self, task: FlushTask) -> None:
        self._task, self._ways = task, list[FloatArray]()
        self._paths = list(paths_past(task.schedule, task.microbatches, task.most_stages))
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        self._highs.setOptionValue("threads", 1)
        self._highs.addCol(1.0, -np.inf, np.inf, 0, _NO_COLUMNS, _NO_VALUES)
        self._passes = 2 * task.most_stages
        for _ in range(self._passes):
            self._highs.addCol(0.0, 0.0, np.inf, 0, _NO_COLUMNS, _NO_VALUES)
        self._highs.addRow(1.0, 1.0, 0, _NO_COLUMNS, _NO_VALUES)
        self._add_row(np.append(0.0, np.ones(self._passes)))
        for path in self._paths:
            self._add_path(path)

    def add(self, seconds: FloatArray, beyond: float) -> None:
        """Adds a way. seconds: float64[3, positions], forward, backward and synchronisation, all in one unit, which is
        that of the batch. beyond: so many more than these, in any passes."""
        self._ways.append(seconds)
        lengths = [path.seconds(*seconds) for path in self._paths]
        rows = np.arange(len(lengths) + 2, dtype=np.int32)
        self._highs.addCol(0.0, 0.0, np.inf, rows.size, rows, np.append([1.0, -beyond], np.negative(lengths)))

    def solve(self) -> bool:
        """Solves the program, with all paths that turn out to be longer than the batch. Returns False if no solution is
        found, or one without prices."""
        for _ in range(_MOST_SOLVES):
            self._highs.run()
            if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return False
            batch, *values = self._highs.getSolution().col_value
            mixture = np.einsum("w,wkq->kq", np.array(values[self._passes :]), np.stack(self._ways))
            mixture[:2] += np.reshape(values[: self._passes], (2, -1))
            paths = longest_paths(self._task.schedule, self._task.microbatches, *mixture)
            most_s = batch * (1.0 + _LONGER)
            longer = [path for path in paths[:_PATHS_AT_ONCE] if path.seconds(*mixture) > most_s]
            if not longer:
                return bool(self._weights.sum() > 0.0)
            for path in longer:
                self._add_path(path)
                self._paths.append(path)
        return False

    @property
    def batch(self) -> float:
        """The value of the last solution."""
        return float(self._highs.getInfo().objective_function_value)

    @property
    def prices(self) -> LevelPrices:
        """What seconds cost by the last solution: as on the mean of its paths."""
        weights, every = self._weights, zip(*self._paths, strict=True)
        path = PassPath(*(dot(weights, np.stack(often)) / weights.sum() for often in every))
        return LevelPrices.of(path, self._highs.getSolution().row_dual[1] / weights.sum())

    @property
    def _weights(self) -> FloatArray:
        """The dual values of the paths in the last solution."""
        found: FloatArray = np.maximum(0.0, np.array(self._highs.getSolution().row_dual)[2:])
        return found

    def _add_path(self, path: PassPath) -> None:
        lengths = [path.seconds(*way) for way in self._ways]
        self._add_row(np.concatenate(([1.0], -path.forward, -path.backward, np.negative(lengths))))

    def _add_row(self, values: FloatArray) -> None:
        columns = np.flatnonzero(values).astype(np.int32)
        self._highs.addRow(0.0, np.inf, columns.size, columns, values[columns])
