"""Dual prices of layers: the devices that each is worth at a threshold, such that no set of layers takes fewer.

They are the dual of covering all layers by fractional stages, found stage by stage (column generation; Desaulniers,
Desrosiers and Solomon, 2005) in a box around the best values so far (Marsten, Hogan and Blankenship, 1975). Any values
become valid prices if they are divided by the largest ratio of a stage's value to its devices. So each round gives a
lower bound, and the linear program need not be solved exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.cost.tolerances import RESOLUTION, THRESHOLD_TOLERANCE
from piper_ray.engine.kernels.cover import (
    CoverBasis,
    LabelMoves,
    StageKinds,
    dearest_stage,
    least_spent_s,
    solve_in_box,
)
from piper_ray.engine.kernels.reach import ReachKinds, StagePaths
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.labelling import Labelling
from piper_ray.engine.lattice.layer_graph import LayerGraph, descendants, members_of, offsets
from piper_ray.engine.tables.problem import Problem

_CELLS, _FINER = 256, 4
"""Cells of the first grid of times, and the factor of the next one if it is too coarse."""

_ROUNDS = 80
_STAGES_A_ROUND = 4
_FAR_TOO_MANY = 2.0
"""Multiple of all devices. Dual prices that sum to more need not be any better."""

_NEARLY = 0.9
"""Share of the largest ratio in a round that a stage needs to become a column."""

_BOX, _LEAST_BOX, _LARGEST_BOX = 0.05, 1e-3, 0.3
_GROW, _SHRINK = 1.5, 0.5
_ENOUGH = 1e-4
"""A round whose relative gain cannot exceed this is the last."""

_MOVE_S = 1.5e-6
"""Rough seconds of a round for each move of the labelling and kind of stage. It is the same on every machine."""

_PIVOTS = 300
"""Pivots before the inverse is computed anew."""

_MEMORY_PRICES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0)
"""Prices of all memory, in budgets of time, that are tried for each kind of stage."""

GUARD = 1e-9
"""Relative: by so much the budgets of ``StageKinds`` are larger, as sums of prices are inexact."""


@dataclass(frozen=True)
class DualPrices:
    """Dual prices for plans that keep ``threshold_s``: of_vertex, float64[n], in devices. No set of layers takes fewer
    devices than the sum of its prices."""

    threshold_s: float
    of_vertex: FloatArray

    @property
    def devices(self) -> float:
        """The sum of all prices: no plan that keeps the threshold takes fewer devices."""
        return float(self.of_vertex.sum())

    def serves(self, threshold_s: float) -> bool:
        """Whether the prices hold for plans that keep this threshold."""
        return threshold_s <= self.threshold_s


class PlanLimits(NamedTuple):
    """Limits of all plans: devices, sum of data-parallel degrees, bytes of a device, and microbatches in flight."""

    devices: int
    data_parallel_sum: int
    memory_bytes: float
    in_flight: int


class LabelledStages(NamedTuple):
    """All stages of a graph as paths, with the least costs of their borders. moves, label: see ``Labelling``."""

    moves: LabelMoves
    label: IndexArray
    charge_s: FloatArray  # float64[r, moves], paid by a stage
    front_s: FloatArray  # float64[r, moves], paid by the stages in front of it

    @classmethod
    def of(cls, labelling: Labelling, in_s: FloatArray, out_s: FloatArray) -> LabelledStages:
        """in_s, out_s: float64[r, e], the cost of an edge to the stage of its head and of its tail, in both
        directions."""
        pairs = list(zip(in_s, out_s, strict=True))
        charge_s, front_s = (
            np.stack([charges.seconds(*pair) for pair in pairs])
            for charges in (labelling.charges, labelling.front_charges)
        )
        return frozen(cls(labelling.moves, labelling.label, charge_s, front_s))

    @property
    def paths(self) -> StagePaths:
        """The paths in the form that the search for downsets uses."""
        moves, label = self.moves, self.label
        state_start = offsets(moves.states)
        step = np.repeat(np.arange(moves.order.size), np.diff(moves.move_start))
        source = state_start[step] + moves.source
        target = np.full((int(state_start[-1]), 3), -1, np.int64)
        target[source, label] = state_start[step + 1] + moves.target
        charges_s = np.zeros((2, self.charge_s.shape[0], *target.shape))
        charges_s[:, :, source, label] = self.charge_s, self.front_s
        return frozen(StagePaths(moves.order, state_start, target, *charges_s))


class Cover(ABC):
    """Fractional covers of layers by stages, at any threshold. most_cells: of the grid of times.

    first_s: float64[n], the least extra cost of layers to the first stage of a plan, if each stage takes one device.
    """

    def __init__(self, stages: LabelledStages, limits: PlanLimits, most_cells: int = _CELLS) -> None:
        self.stages, self.limits, self._most_cells = stages, limits, most_cells
        self.first_s = np.zeros(stages.moves.order.size)
        # A stage that keeps a threshold keeps every higher one.
        self._known: list[tuple[BoolArray, float, float]] = []

    def pay(self, stages: LabelledStages) -> None:
        """Replaces the costs of borders."""
        if not np.array_equal(stages.charge_s, self.stages.charge_s):
            self._known = []
        self.stages = stages

    @abstractmethod
    def kinds_at(self, keep_s: float) -> StageKinds:
        """Returns the kinds of stages, and what each may spend if no stage takes longer than ``keep_s``."""

    @abstractmethod
    def with_memory(self, kinds: StageKinds) -> ReachKinds:
        """Returns the same kinds with the least memory of their layers."""

    def kinds(self, dual_prices: DualPrices) -> StageKinds:
        """Returns the kinds with a stage that may keep the threshold and waste no more devices than plans can spare."""
        spare = self.limits.devices - dual_prices.devices
        kinds = self.kinds_at(kept_s(dual_prices.threshold_s))
        inside = np.zeros(dual_prices.of_vertex.size, np.bool_)
        useful = []
        for kind, devices in enumerate(kinds.devices.tolist()):
            least, alone = 1.0 - spare / devices - GUARD, _some(kinds, slice(kind, kind + 1))
            _, found = dearest_stage(
                self.stages.moves, alone, self._most_cells, dual_prices.of_vertex, least, np.ones(1), inside
            )
            if found >= 0:
                useful.append(kind)
        return _some(kinds, useful)

    def dual_prices(
        self,
        threshold_s: float,
        *,
        start: DualPrices | None = None,
        until: float = np.inf,
        rounds: int = _ROUNDS,
        check: Callable[[], None] = lambda: None,
    ) -> DualPrices:
        """Returns good dual prices. start: prices to start from. until: ends when they sum to more devices. check: may
        raise."""
        kinds = self.kinds_at(kept_s(threshold_s))
        alone = (kinds.weight_s / kinds.budget_s[:, None] * kinds.devices[:, None]).min(axis=0)
        if not np.isfinite(alone).all():
            return DualPrices(threshold_s, np.zeros(alone.size))
        trial = start.of_vertex if start is not None and start.devices > 0.0 else alone
        ascent = _Ascent(self.stages.moves, kinds, self._most_cells)
        for inside, devices, known_at_s in self._known:
            if known_at_s <= threshold_s:
                ascent.program.add(inside, devices)
        devices = self.limits.devices
        found = ascent.run(np.minimum(trial, devices), min(until, _FAR_TOO_MANY * devices), rounds, check)
        self._known += [(inside, devices, threshold_s) for inside, devices in ascent.found]
        # No stage has more than its share of time. Prices found on a coarse grid may be worse than these shares.
        best = max(found, alone, key=np.sum)
        return DualPrices(threshold_s, best * (1.0 - GUARD))


class StageCover(Cover):
    """A cover of a problem's layers by its stages. labelling: of these. replica_s: float64[n], the least time of each
    vertex. edge_s: float64[e, r], the least that an edge costs the stages of its two ends."""

    def __init__(self, problem: Problem, labelling: Labelling, most_cells: int = _CELLS) -> None:
        options, least, cluster = problem.options, problem.workload.options.least, problem.cluster
        in_s, out_s = edges_s(problem)
        super().__init__(
            LabelledStages.of(labelling, in_s.T, out_s.T),
            PlanLimits(cluster.devices, cluster.data_parallel_limit, cluster.memory_bytes, cluster.data_parallel_limit),
            most_cells,
        )
        self._problem, self.labelling, self.edge_s = problem, labelling, in_s + out_s
        self._kinds = [
            (r, int(d))
            for r in range(options.degree.size)
            for d in cluster.divisors[cluster.first_divisor[r] : cluster.end_divisor[r]]
            if options.degree[r] * d <= cluster.devices
        ]
        self.graph = problem.workload.lattice.graph
        self.replica_s = np.where(least.missing > 0, np.inf, least.work_s).min(axis=1)
        self._behind_s = work_behind_s(self.graph, self.replica_s)

    @classmethod
    def of(cls, problem: Problem, most_cells: int = _CELLS) -> StageCover | None:
        """Returns None if the graph is so entangled that enumerating its stages takes longer than the prices save."""
        labelling = Labelling.of(problem.workload.lattice.graph)
        return None if labelling is None else cls(problem, labelling, most_cells)

    @staticmethod
    def least_round_s(problem: Problem) -> float:
        """Returns the rough seconds of a round with the best labelling that a graph of this size can have."""
        return _MOVE_S * 3 * problem.workload.lattice.graph.size * problem.options.degree.size

    def degree_of(self, variant: IndexArray) -> IndexArray:
        """Returns the tensor-parallel degrees of variants."""
        return self._problem.options.degree[variant]

    @property
    def round_s(self) -> float:
        """The rough seconds of a round."""
        return _MOVE_S * self.stages.moves.source.size * len(self._kinds)

    def kinds_at(self, keep_s: float) -> StageKinds:
        degree = self._problem.options.degree
        rows = [self._row(r, d, keep_s) for r, d in self._kinds]
        return frozen(
            StageKinds(
                devices=np.array([degree[r] * d for r, d in self._kinds], np.int64),
                variant=np.array([r for r, _ in self._kinds], np.int64),
                weight_s=np.stack([weight_s for weight_s, _ in rows]),
                budget_s=np.array([budget_s for _, budget_s in rows]) * (1.0 + GUARD),
                charge_s=self.stages.charge_s,
            )
        )

    def with_memory(self, kinds: StageKinds) -> ReachKinds:
        least = self._problem.workload.options.least
        return frozen(
            ReachKinds(
                variant=kinds.variant,
                degree=kinds.devices // self._problem.options.degree[kinds.variant],
                devices=kinds.devices,
                weight_s=kinds.weight_s,
                budget_s=kinds.budget_s,
                least_a=np.ascontiguousarray(least.least_a),
                least_b=np.ascontiguousarray(least.least_b),
                least_shared=np.ascontiguousarray(least.least_shared),
            )
        )

    def _row(self, r: int, d: int, keep_s: float) -> tuple[FloatArray, float]:
        """Returns the weights and the budget of a kind: time, and memory at the price that binds most.

        A stage with a vertex has at least as many microbatches in flight as the replicas behind that vertex need.
        """
        options, memory_bytes = self._problem.options, self._problem.cluster.memory_bytes
        budget_s = keep_s * d
        first, last = options.option_start[r, 0], options.option_start[r, -1]
        time_s = options.option_p_s[first:last] + (d - 1) * options.option_resync_s[first:last]
        start = options.option_start[r, :-1] - first
        counts = np.diff(options.option_start[r])
        later = np.maximum(0.0, np.minimum(self._behind_s / keep_s, 2.0**40) - d)
        in_flight = np.repeat(1.0 + np.ceil(later / d - GUARD), counts)
        held = options.option_a[first:last] * in_flight + options.option_b[first:last]
        held += options.option_shared[first:last] / d
        return dearest_weights(time_s, held, start, budget_s, memory_bytes)


def dearest_weights(
    time_s: FloatArray, held_bytes: FloatArray, start: IndexArray, budget_s: float, memory_bytes: float
) -> tuple[FloatArray, float]:
    """Returns the weights of vertices and their budget: time, and memory at the price that binds most.

    time_s, held_bytes: of each option. start: int64[n], the first option of each vertex. budget_s: the most time of a
    stage.
    """
    counts = np.diff(start, append=time_s.size)
    best: tuple[float, FloatArray, float] | None = None
    for price in (0.0, *_MEMORY_PRICES):
        per_byte = price * budget_s / memory_bytes if memory_bytes > 0.0 else 0.0
        weight_s = _least_of_each(time_s + per_byte * held_bytes, start, counts)
        within_s = budget_s + per_byte * memory_bytes
        share = float(weight_s[counts > 0].sum()) / within_s
        if best is None or share > best[0]:
            best = share, weight_s, within_s
    assert best is not None
    return best[1], best[2]


def work_behind_s(graph: LayerGraph, least_s: FloatArray) -> FloatArray:
    """Returns float64[n]: the least time, in sum, of each vertex and all behind it."""
    behind = descendants(graph.successors)
    return np.array([least_s[members_of(mask | 1 << v)].sum() for v, mask in enumerate(behind)])


def _some(kinds: StageKinds, at: slice | list[int]) -> StageKinds:
    some = kinds._replace(
        devices=kinds.devices[at], variant=kinds.variant[at], weight_s=kinds.weight_s[at], budget_s=kinds.budget_s[at]
    )
    return frozen(some)


def kept_s(threshold_s: float) -> float:
    """Returns the longest time of a stage that keeps the threshold, with its tolerance."""
    return max(threshold_s * (1.0 + THRESHOLD_TOLERANCE), RESOLUTION)


def edges_s(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Returns float64[e, r] each: the least cost of an edge to the stage of its head, and to that of its tail."""
    least = problem.workload.options.least
    bytes_s = least.in_bytes + least.out_bytes
    both_s = problem.costs.both_s[:, : bytes_s.shape[0]].T
    with np.errstate(invalid="ignore", divide="ignore"):
        incoming_s = np.where(bytes_s > 0.0, both_s * (least.in_bytes / bytes_s), 0.0)
    return incoming_s, np.maximum(0.0, both_s - incoming_s)


def _least_of_each(values: FloatArray, start: IndexArray, counts: IndexArray) -> FloatArray:
    """Returns the least value of each run; inf for empty ones."""
    found = np.full(counts.size, np.inf)
    some = counts > 0
    if some.any():
        found[some] = np.minimum.reduceat(values, start[some])
    return found


class _Ascent:
    """Raises dual prices from round to round."""

    def __init__(self, moves: LabelMoves, kinds: StageKinds, most_cells: int) -> None:
        self._moves, self._kinds, self._cells, self._most_cells = moves, kinds, _CELLS, most_cells
        self._size = kinds.weight_s.shape[1]
        self._ratios = np.ones(kinds.devices.size)
        self._too_coarse = False
        self.program = _BoxProgram(self._size)
        self.found: list[tuple[BoolArray, float]] = []

    def run(self, trial: FloatArray, until: float, rounds: int, check: Callable[[], None]) -> FloatArray:
        best, total, promised, box = trial, 0.0, np.inf, _BOX
        for _ in range(rounds):
            check()
            ratio = self._look(trial)
            value = float(trial.sum()) / ratio
            if value > total:
                if value - total > 0.1 * (promised - total):
                    box = min(_LARGEST_BOX, box * _GROW)
                best, total = trial / ratio, value
            else:
                box = max(box * _SHRINK, _LEAST_BOX)
            if total > until:
                break
            if self._too_coarse:
                self._cells = min(self._cells * _FINER, self._most_cells)
                trial, box = best, _BOX
                continue
            width = box * (best + 0.25 * best.mean())
            trial = self.program.solve(np.maximum(0.0, best - width), best + width)
            promised = float(trial.sum())
            if promised - total < _ENOUGH * total:
                break
        return best

    def _look(self, price: FloatArray) -> float:
        """Returns the largest ratio of any stage. That stage, and others disjoint from it, become columns.

        If the grid shows a stage that does not keep the threshold, and it may be refined, the stage does not become a
        column: the grid is too coarse.
        """
        inside = np.zeros(self._size, np.bool_)
        rest = price.copy()
        self._too_coarse = False
        largest, kind = dearest_stage(self._moves, self._kinds, self._cells, rest, 1e-9, self._ratios, inside)
        ratios = self._ratios.copy()
        for k in range(_STAGES_A_ROUND):
            if kind < 0:
                break
            if self._keeps(kind, inside):
                devices = float(self._kinds.devices[kind])
                if self.program.add(inside, devices):
                    self.found.append((inside.copy(), devices))
            else:
                self._too_coarse = self._too_coarse or k == 0
            rest[inside] = 0.0
            if k + 1 < _STAGES_A_ROUND:
                _, kind = dearest_stage(self._moves, self._kinds, self._cells, rest, _NEARLY * largest, ratios, inside)
        return max(float(largest), 1e-9)

    def _keeps(self, kind: int, inside: BoolArray) -> bool:
        """Whether the stage becomes a column: it keeps its budget, or the grid cannot be refined."""
        if self._cells >= self._most_cells:
            return True
        kinds = self._kinds
        charge_s = kinds.charge_s[kinds.variant[kind]]
        spent_s = least_spent_s(self._moves, kinds.weight_s[kind], charge_s, inside)
        return bool(spent_s <= kinds.budget_s[kind])


class _BoxProgram:
    """Maximises the sum of dual prices, each within its box, such that those of each stage sum to at most its
    devices."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._members = [np.array([v]) for v in range(size)] * 2
        self._cost = [0.0] * (2 * size)
        self._known: set[tuple[bytes, float]] = set()
        self._basis = np.arange(size)
        self._inverse: FloatArray = np.eye(size)
        # The demands differ slightly, so that a step seldom has length zero.
        self._demand: FloatArray = np.array(
            1.0 + 1e-7 * (np.arange(1, size + 1) * 0.6180339887498949 % 1.0), np.float64
        )
        self._share: FloatArray = self._demand.copy()

    def add(self, inside: BoolArray, devices: float) -> bool:
        """Adds a stage. Returns whether it is new."""
        key = inside.tobytes(), devices
        if key in self._known:
            return False
        self._known.add(key)
        self._members.append(np.flatnonzero(inside))
        self._cost.append(devices)
        return True

    def solve(self, lower: FloatArray, upper: FloatArray) -> FloatArray:
        n = self._size
        self._cost[:n], self._cost[n : 2 * n] = upper.tolist(), (-lower).tolist()
        start = np.zeros(len(self._members) + 1, np.int64)
        np.cumsum([members.size for members in self._members], out=start[1:])
        cover = CoverBasis(
            start, np.concatenate(self._members), np.array(self._cost), self._basis, self._inverse, self._share
        )
        price = np.empty(n)
        for _ in range(10):
            if solve_in_box(cover, len(self._members), _PIVOTS, price) < _PIVOTS:
                break
            self._invert()
        return np.clip(price, lower, upper)

    def _invert(self) -> None:
        """Inverts the basis anew, to remove accumulated rounding errors."""
        n = self._size
        matrix = np.zeros((n, n))
        for k, column in enumerate(self._basis):
            matrix[self._members[column], k] = -1.0 if n <= column < 2 * n else 1.0
        self._inverse[:] = np.linalg.inv(matrix)
        self._share[:] = np.maximum(0.0, dot(self._inverse, self._demand))
