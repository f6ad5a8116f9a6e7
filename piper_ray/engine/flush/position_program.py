"""A linear program that shares the layers of a (d, t) out over all positions of its pipeline.

Parts of layers are at any positions, each part with a choice of its own. All layers are placed; each position fits in
memory; no path is longer than the batch, which is minimised. Paths that turn out to be longer are added, and the
program is solved again.
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.flush.path_prices import LayerChoices, PathPrices, bounded, in_flight_at
from piper_ray.engine.flush.paths import PassPath, longest_paths, paths_past
from piper_ray.engine.kernels.flush_types import TWO_BW, FlushTables, FlushTask
from piper_ray.engine.kernels.types import FloatArray

_MOST_ROUNDS = 40
_NEAR = 1e-4
"""Relative. A path is added only if it is longer than the batch by more than this."""

_PATHS_AT_ONCE, _IN_VAIN = 8, 3
"""Paths added in a round. Rounds that together lengthen the batch by no more than ``_NEAR`` are the last ones."""

_MOST_COLUMNS = 100_000
"""Larger programs take longer than they save: one of 50,000 takes 2 s."""


_MANY_LAYERS, _PIECES = 400, 96
"""From this number of layers on, pieces of a chain of them are shared out. Cutting through a block of operators is
expensive, and if layers were cut one by one, the prices of memory would not reflect that."""

_EXCESS = 100.0
"""The price of exceeding a device's memory by its whole size, relative to the work of all layers."""


def path_prices(tables: FlushTables, task: FlushTask, most_s: float = np.inf) -> PathPrices | None:
    """Returns good prices, or the first by which a batch takes more than ``most_s``; None under a schedule without
    paths, if a layer has no choice, or if it would take too long."""
    if task.schedule == TWO_BW or task.work_s <= 0.0:
        return None
    choices = LayerChoices.of(tables, task)
    if not choices.has_all:
        return None
    is_long = choices.of_vertex.size > _MANY_LAYERS
    shared = choices.in_pieces(in_flight_at(task), _PIECES) if is_long else choices
    if shared.layer.size * task.most_stages > _MOST_COLUMNS:
        return None
    program, rounds_s = PositionProgram(shared, task), np.zeros(0)
    for _ in range(_MOST_ROUNDS):
        if not program.solve():
            return None
        stages, least_s = program.stages
        rounds_s = np.append(rounds_s, least_s)
        if rounds_s.size > _IN_VAIN and least_s <= rounds_s[-1 - _IN_VAIN] * (1.0 + _NEAR):
            break
        if least_s > most_s and bounded(choices, task, program.prices).bound_s > most_s:
            break
        paths = longest_paths(task.schedule, task.microbatches, *stages)
        longer = [path for path in paths if path.seconds(*stages) > least_s * (1.0 + _NEAR)]
        if not longer:
            break
        program.add(longer[:_PATHS_AT_ONCE])
    return bounded(choices, task, program.prices)


class PositionProgram:
    """The program, in units of the work of all layers and of the memory of a device.

    Columns: parts of layers by position and choice; forward, backward and synchronisation seconds of each position; the
    batch; the excess over the memory at each position, at a high cost. Rows: each layer is placed; the seconds of each
    position; the memory of each position; then paths.
    """

    def __init__(self, choices: LayerChoices, task: FlushTask) -> None:
        self._choices, self._task = choices, task
        positions = self._positions = task.most_stages
        self._unit_s = task.work_s
        self._in_flight = in_flight_at(task)
        self._paths: list[PassPath] = []
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        self._highs.setOptionValue("threads", 1)
        self._highs.passModel(self._model())
        even = np.full(positions, 1.0 / positions)
        self.add(longest_paths(task.schedule, task.microbatches, even, even, np.zeros(positions)))
        self.add(paths_past(task.schedule, task.microbatches, positions))

    def _model(self) -> highspy.HighsLp:
        choices, positions = self._choices, self._positions
        layers, count = choices.copies.size, choices.layer.size
        q = np.repeat(np.arange(positions), count)
        held = (choices.a_bytes * self._in_flight[:, None] + choices.b_bytes).ravel() / self._task.most_memory_bytes
        rows = np.stack([np.tile(choices.layer, positions), *(layers + k * positions + q for k in range(4))], axis=1)
        of_choices = (choices.forward_s, choices.backward_s, choices.sync_s)
        seconds = [np.tile(of_choice, positions) / self._unit_s for of_choice in of_choices]
        values = np.stack([np.ones(q.size), *seconds, held], axis=1)
        sums = 3 * positions
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = q.size + sums + 1 + positions, layers + 4 * positions
        lp.col_cost_ = np.concatenate([np.zeros(q.size + sums), [1.0], np.full(positions, _EXCESS)])
        lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.full(lp.num_col_, np.inf)
        lp.row_lower_ = np.concatenate([choices.copies, np.zeros(sums), np.full(positions, -np.inf)])
        lp.row_upper_ = np.concatenate([choices.copies, np.zeros(sums), np.ones(positions)])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        first = np.append(np.arange(0, values.size, 5), values.size + np.arange(sums + 1))
        lp.a_matrix_.start_ = np.append(first, values.size + np.arange(sums, sums + positions + 1))
        lp.a_matrix_.index_ = np.concatenate([rows.ravel(), layers + np.arange(sums + positions)])
        lp.a_matrix_.value_ = np.concatenate([values.ravel(), np.full(sums + positions, -1.0)])
        return lp

    def add(self, paths: Sequence[PassPath]) -> None:
        """Adds paths. A batch takes no less than any of them."""
        first = self._positions * self._choices.layer.size
        for path in paths:
            often = np.concatenate(path)
            some = np.flatnonzero(often)
            columns = np.append(first + some, first + often.size).astype(np.int32)
            self._highs.addRow(0.0, np.inf, columns.size, columns, np.append(-often[some], 1.0))
        self._paths += paths

    def solve(self) -> bool:
        """Solves the program. Returns False if no solution is found."""
        self._highs.run()
        return bool(self._highs.getModelStatus() == highspy.HighsModelStatus.kOptimal)

    @property
    def stages(self) -> tuple[tuple[FloatArray, FloatArray, FloatArray], float]:
        """The forward, backward and synchronisation seconds of each position, and the time of the batch."""
        values = np.array(self._highs.getSolution().col_value)[self._positions * self._choices.layer.size :]
        batch = 3 * self._positions
        forward_s, backward_s, sync_s = values[:batch].reshape(3, -1) * self._unit_s
        return (forward_s, backward_s, sync_s), float(values[batch]) * self._unit_s

    @property
    def prices(self) -> PathPrices:
        """The prices of the last solution, without a bound."""
        duals = np.array(self._highs.getSolution().row_dual)
        first = self._choices.copies.size + 3 * self._positions
        memory = np.maximum(0.0, -duals[first : first + self._positions])
        weight = np.maximum(0.0, duals[first + self._positions :])
        of_paths = zip(*self._paths, strict=True)
        forward, backward, sync = (dot(weight, np.stack(often)) / weight.sum() for often in of_paths)
        memory_s = memory * (self._unit_s / self._task.most_memory_bytes)
        return PathPrices(forward, backward, sync, memory_s, 0.0)
