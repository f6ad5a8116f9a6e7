"""Finds prices for a certificate of plans under a flush, by linear programming.

Layers, or parts of them, are at any stages of a pipeline, each part with its own choice. All layers are placed; at no
pass does a rank hold more than its memory; no path through the passes is longer than the batch, which is minimised.
Paths and passes that turn out to be longer, or to hold more, are added, and the program is solved again. Its dual
prices go into the certificate. The program uses the check's own tables; the check trusts no prices.
"""

from __future__ import annotations

from collections.abc import Callable

import highspy
import numpy as np

from piper_ray.certificate.certificate import PassPrices
from piper_ray.certificate.flush_tables import FIGURES, MOST_PASSES, OnDegrees, StagePrices, least_priced_s
from piper_ray.certificate.passes import KINDS, PassGraph, PathSteps
from piper_ray.cost.products import dot
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.model.schedule import ScheduleName
from piper_ray.simulate.actions import ActionKind

_MOST_ROUNDS = 60
_NEAR = 1e-5
"""Relative. A path is added only if it is longer by more than this, and a pass only if it holds more by this."""

_PATHS_AT_ONCE = 8
_MOST_COLUMNS = 60_000
_EXCESS = 1e4
"""The price of exceeding a device's memory by its whole size, in units of all work: more than any plan."""


def find_prices(pair: OnDegrees, ranks: int, wanted_s: float, look: Callable[[], object]) -> PassPrices | None:
    """Returns prices that prove ``wanted_s`` of a batch, or as much as possible; None if it would take too long. look:
    called between two programs; it may raise."""
    schedule, m = pair.schedule, pair.microbatches
    stages = ranks * schedule.v
    layers, copies = _kinds(pair)
    choices = sum(rows.shape[0] for rows in layers)
    if choices * stages > _MOST_COLUMNS or stages * m * KINDS > 2 * MOST_PASSES or ranks * m * schedule.v > MOST_PASSES:
        return None
    graph = PassGraph(schedule, ranks, m)
    program = _StageProgram(pair, graph, layers, copies)
    best: PassPrices | None = None
    best_s = -np.inf
    for _ in range(_MOST_ROUNDS):
        look()
        if not program.solve():
            return best
        prices = program.prices
        of_stages = StagePrices.of(pair, prices, graph)
        if least_priced_s(pair, of_stages.of_memory_alone) > 0.0:
            return prices  # they prove that no plan fits
        proved_s = least_priced_s(pair, of_stages)
        if proved_s > best_s:
            best, best_s = prices, proved_s
        if proved_s >= wanted_s or not program.extend():
            return best
    return best


def _kinds(pair: OnDegrees) -> tuple[list[FloatArray], FloatArray]:
    """Returns the choices of layers, with equal layers once, and the number of each."""
    found: dict[bytes, int] = {}
    rows: list[FloatArray] = []
    copies: list[float] = []
    for of_layer in pair.rows:
        of_layer = np.unique(of_layer, axis=0)
        number = found.setdefault(of_layer.tobytes(), len(rows))
        if number == len(rows):
            rows.append(of_layer)
            copies.append(0.0)
        copies[number] += 1.0
    return rows, np.array(copies)


def _first_paths(pair: OnDegrees, graph: PassGraph) -> list[PathSteps]:
    """Returns a path to each rank, through its whole list; under one-chunk schedules also to the end, or as far down as
    possible."""
    m, p = pair.microbatches, graph.ranks
    found = []
    for rank in range(p):
        length = int(graph.start[rank + 1] - graph.start[rank])
        found.append(PathSteps(0, 0, (0, rank, length - 1)))
        if pair.schedule.name is ScheduleName.ONE_F_ONE_B:
            found.append(PathSteps(0, 0, (0, rank, length - 1, rank)))
            behind, warm_up = p - 1 - rank, min(m, p - rank)
            if m > warm_up:
                back = 2 * behind + 1
                found.append(PathSteps(0, 0, (0, rank + back, 2 * (m - warm_up) - 1, back + rank)))
                found.append(PathSteps(0, 0, (0, rank + back, 2 * m - 1 - warm_up, rank)))
        elif pair.schedule.name is ScheduleName.GPIPE:
            behind = p - 1 - rank
            found.append(PathSteps(0, 0, (0, rank, m - 1, behind, 1, behind, m - 1, rank)))
    return list(dict.fromkeys(found))


class _StageProgram:
    """The program, in units of the work of all layers and of the memory of a device.

    Columns: parts of layers by stage and choice; the figures of each stage; the batch; the excess over the memory.
    Rows: each layer is placed; the definitions of the figures; then paths, and passes with what their ranks hold.
    """

    def __init__(self, pair: OnDegrees, graph: PassGraph, layers: list[FloatArray], copies: FloatArray) -> None:
        self._pair, self._graph = pair, graph
        self._unit_s = pair.work_s if pair.work_s > 0.0 else 1.0
        self._unit_bytes = pair.memory_bytes if pair.memory_bytes > 0.0 else 1.0
        units = np.array([self._unit_s] * 4 + [self._unit_bytes] * 2)
        self._figures = np.concatenate(layers) / units
        self._layer = np.repeat(np.arange(len(layers)), [rows.shape[0] for rows in layers])
        self._first = self._figures.shape[0] * graph.stages
        self._batch = self._first + FIGURES * graph.stages
        self._paths: list[tuple[int, PathSteps]] = []
        self._passes: list[tuple[int, int, int]] = []
        self._known: set[object] = set()
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        self._highs.silent()
        self._highs.setOptionValue("threads", 1)
        self._highs.passModel(self._model(len(layers), copies))
        for walk in _first_paths(pair, graph):
            self._add_path(walk)
        self._add_passes(np.ones((graph.stages, FIGURES)), least=0.0)

    def _model(self, layers: int, copies: FloatArray) -> highspy.HighsLp:
        stages, choices = self._graph.stages, self._figures.shape[0]
        stage = np.repeat(np.arange(stages), choices)
        figure_rows = layers + np.arange(stages * FIGURES).reshape(stages, FIGURES)
        rows = np.concatenate([np.tile(self._layer, stages)[:, None], figure_rows[stage]], axis=1)
        values = np.concatenate([np.ones((stage.size, 1)), np.tile(self._figures, (stages, 1))], axis=1)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self._batch + 2, layers + stages * FIGURES
        lp.col_cost_ = np.append(np.zeros(self._batch), [1.0, _EXCESS])
        lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.full(lp.num_col_, np.inf)
        lp.row_lower_ = lp.row_upper_ = np.append(copies, np.zeros(stages * FIGURES))
        kept = values.ravel() != 0.0
        counts = (values != 0.0).sum(axis=1)
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kColwise
        ends = np.cumsum(np.concatenate([counts, np.ones(stages * FIGURES, np.int64), [0, 0]]))
        matrix.start_ = np.append(0, ends).astype(np.int32)
        matrix.index_ = np.append(rows.ravel()[kept], figure_rows.ravel()).astype(np.int32)
        matrix.value_ = np.append(values.ravel()[kept], np.full(stages * FIGURES, -1.0))
        return lp

    def _column(self, stage: IndexArray, figure: int) -> IndexArray:
        columns: IndexArray = self._first + stage * FIGURES + figure
        return columns

    def solve(self) -> bool:
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return False
        found = self._highs.getSolution()
        self._values, self._duals = np.array(found.col_value), np.array(found.row_dual)
        return True

    @property
    def _stage_figures(self) -> FloatArray:
        """float64[stages, FIGURES]: the figures of the solution."""
        found: FloatArray = self._values[self._first : self._batch].reshape(self._graph.stages, FIGURES)
        return np.maximum(found, 0.0)

    @property
    def prices(self) -> PassPrices:
        pair, graph = self._pair, self._graph
        duals = np.maximum(self._duals, 0.0)
        paths = [(float(duals[row]), walk) for row, walk in self._paths if duals[row] > 1e-12]
        total = sum(weight for weight, _ in paths) or 1.0
        if not paths:
            paths = [(1.0, self._paths[0][1])]
        per_byte = self._unit_s / self._unit_bytes / total
        held = np.maximum(-self._duals, 0.0)
        memory = [(rank, place, float(held[row]) * per_byte) for row, rank, place in self._passes if held[row] > 1e-15]
        return PassPrices(
            devices=pair.instance.devices,
            data_parallel_degree=pair.data_parallel_degree,
            degree=pair.degrees[0],
            ranks=graph.ranks,
            chunks=pair.schedule.v,
            paths=tuple(paths),
            memory=tuple(memory),
        )

    def extend(self) -> bool:
        """Adds paths and passes that the solution violates. Returns whether there are any."""
        paths = self._add_paths(self._stage_figures, self._values[self._batch] * (1.0 + _NEAR))
        passes = self._add_passes(self._stage_figures, 1.0 + self._values[self._batch + 1] + _NEAR)
        return paths or passes

    def _add_paths(self, figures: FloatArray, least: float = 0.0) -> bool:
        seconds = np.zeros((self._graph.stages, KINDS))
        seconds[:, ActionKind.F], seconds[:, ActionKind.I], seconds[:, ActionKind.W] = figures[:, :3].T
        seconds[:, ActionKind.B] = figures[:, 1] + figures[:, 2]
        sync = np.bincount(self._graph.rank_of, figures[:, 3], self._graph.ranks).astype(np.float64)
        longer = [walk for length, walk in self._graph.longest(seconds, sync, 2 * _PATHS_AT_ONCE) if length > least]
        added = [walk for walk in longer[:_PATHS_AT_ONCE] if walk not in self._known]
        for walk in added:
            self._add_path(walk)
        return bool(added)

    def _add_path(self, walk: PathSteps) -> None:
        self._known.add(walk)
        counts = self._graph.walked(walk)
        by_kind = counts.passes
        columns, values = [np.array([self._batch])], [np.array([1.0])]
        of_figure = (
            by_kind[:, ActionKind.F],
            by_kind[:, ActionKind.I] + by_kind[:, ActionKind.B],
            by_kind[:, ActionKind.W] + by_kind[:, ActionKind.B],
            counts.sync[self._graph.rank_of],
        )
        for figure, times in enumerate(of_figure):
            used = np.flatnonzero(times)
            columns.append(self._column(used, figure))
            values.append(-times[used])
        self._paths.append((self._highs.getNumRow(), walk))
        self._add_row(0.0, np.inf, np.concatenate(columns), np.concatenate(values))

    def _add_passes(self, figures: FloatArray, least: float) -> bool:
        """Adds the passes at which ranks hold most."""
        graph, added = self._graph, False
        for rank in range(graph.ranks):
            stages = np.array(self._pair.schedule.stages_of_rank(rank, graph.ranks))
            held = graph.held[graph.start[rank] : graph.start[rank + 1]]
            bytes_held = dot(held, figures[stages, 4]) + figures[stages, 5].sum()
            place = int(np.argmax(bytes_held))
            if bytes_held[place] <= least or (rank, place) in self._known:
                continue
            self._known.add((rank, place))
            self._passes.append((self._highs.getNumRow(), rank, place))
            columns = np.concatenate([self._column(stages, 4), self._column(stages, 5), [self._batch + 1]])
            values = np.concatenate([held[place].astype(np.float64), np.ones(stages.size), [-1.0]])
            self._add_row(-np.inf, 1.0, columns, values)
            added = True
        return added

    def _add_row(self, lower: float, upper: float, columns: IndexArray, values: FloatArray) -> None:
        self._highs.addRow(lower, upper, columns.size, columns.astype(np.int32), values.astype(np.float64))
