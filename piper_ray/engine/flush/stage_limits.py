"""Limits on single stages of a plan below a cutoff under a flush, and the downsets useful for such plans.

Stage j, with q stages behind it, takes t_j for each of m microbatches. No batch of a pipeline takes less than

    1f1b    sum of all t + (m - 1 - min(q, m - 1) / 2) t_j
    gpipe   sum of all t + (m - 1) t_j

Under GPipe this is sum t + (m - 1) (max f + max b). Under 1F1B it follows from ``flush_paths``: the path through j
consists of the stages in front of it, m - w + 1 times t_j, and S_j and E_j. Each of these two is at least the sum of t
of the stages behind, and with w - 1 = min(q, m - 1) at least (w - 1) f_j, or (w - 1) b_j; so their sum is at least the
former and half of (w - 1) t_j. If m = w, one of the two is in the path, with w - 1 times the other pass.

So no stage of a plan below a cutoff takes more than a threshold. This is Piper's decision problem with one d and one t:
its dual prices bound the number of stages that layers take, and the useful downsets are found as for 2bw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from piper_ray.engine.evaluation.dual_prices import (
    Cover,
    DualPrices,
    LabelledStages,
    PlanLimits,
    dearest_weights,
    work_behind_s,
)
from piper_ray.engine.flush.paths import often
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.kernels.cover import StageKinds
from piper_ray.engine.kernels.flush_stages import in_flight
from piper_ray.engine.kernels.flush_types import GPIPE, SUM, FlushTables, FlushTask
from piper_ray.engine.kernels.reach import ReachKinds
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.labelling import Labelling

_GUARD = 1e-6
"""Fraction of a stage. By rounding, prices may sum to slightly more than they should."""

_ROUNDING = 1e-9
"""Relative rounding error of sums of seconds."""

_ENDLESS = 2.0**40
"""More stages behind a layer than any pipeline has; larger numbers do not fit in an integer."""

_ROUNDS = 60

_FIRST_STEP = 0.02
"""First relative step between times for which a cover shows that no plan takes as little."""

_NO_CHECK: Callable[[], None] = lambda: None  # noqa: E731


class PathArrays(NamedTuple):
    """All stages of a graph as paths, with the least that they pay and hold."""

    stages: LabelledStages
    slowest_s: float  # no stage takes longer
    behind_s: FloatArray  # float64[r, n]: of each vertex and all behind it, the least t
    least_weights: FloatArray  # float64[n, r], bytes
    least_a: FloatArray
    least_b: FloatArray
    least_shared: FloatArray


def build_paths(workload: FlushWorkload, labelling: Labelling) -> PathArrays:
    """Builds the paths. labelling: of the workload's graph."""
    graph, tables, layers = workload.lattice.graph, workload.arrays, workload.values.sums
    return frozen(
        PathArrays(
            LabelledStages.of(labelling, 2.0 * tables.edge_in_s, 2.0 * tables.edge_out_s),
            _slowest_s(tables),
            np.stack([work_behind_s(graph, _least_s(tables, r)) for r in range(len(workload.placed))]),
            np.ascontiguousarray(layers[:, :, SUM.least_weights].T),
            np.ascontiguousarray(layers[:, :, SUM.least_activation].T),
            np.ascontiguousarray(layers[:, :, SUM.least_fixed].T),
            np.ascontiguousarray(layers[:, :, SUM.least_shared].T),
        )
    )


def tail_limits(inside: FloatArray, most_stages: int) -> IndexArray:
    """Returns int64[m]: the most stages that the tail of each downset has in a plan that keeps the prices' threshold; 0
    if no plan has that tail. inside: float64[m], the sum of prices within each downset.
    """
    most: IndexArray = np.floor(most_stages - (inside[-1] - inside) + _GUARD).astype(np.int64)
    return np.where(most >= np.ceil(inside - _GUARD), most, 0)


class FlushCover(Cover):
    """Covers of a task's layers by its stages, each of which counts as one device. tables: on any downsets. most_cells:
    as in ``Cover``.
    """

    def __init__(self, tables: FlushTables, task: FlushTask, paths: PathArrays, most_cells: int) -> None:
        most_in_flight = in_flight(task.schedule, task.microbatches, task.most_stages - 1)
        limits = PlanLimits(task.most_stages, task.most_stages, task.most_memory_bytes, most_in_flight)
        super().__init__(paths.stages, limits, most_cells)
        self._tables, self._task, self._paths = tables, task, paths
        self._behind_s = paths.behind_s[task.bounding].min(axis=0)
        self._often = often(task.schedule, task.microbatches, task.most_stages)

    def _stage_s(self, batch_s: float) -> float:
        """Returns the largest time of a stage for a microbatch in a plan whose batch takes ``batch_s``.

        The least work of all layers does not include what a stage pays at its borders, and what those in front of it
        pay for what leaves them: these count once more in the sum of all stages. The batch ends once the first stage
        has synchronised.
        """
        alone_s, stages = batch_s / self._task.microbatches, self._paths.stages
        self.first_s = np.zeros_like(self.first_s)
        among_s = (batch_s - self._task.work_s) / self._often if self._often > 0.0 else np.inf
        if among_s < alone_s:
            charge_s = (1.0 + 1.0 / self._often) * stages.charge_s + stages.front_s / self._often
            front_s = (1.0 + 1.0 / self._often) * stages.front_s
            stages = frozen(stages._replace(charge_s=charge_s, front_s=front_s))
            weights = self._paths.least_weights[:, self._task.bounding].min(axis=1)
            self.first_s = weights * (self._task.sync_s_per_byte[self._task.bounding[0]] / self._often)
        self.pay(stages)
        return min(alone_s, among_s)

    def prices(self, batch_s: float, check: Callable[[], None] = _NO_CHECK) -> DualPrices | None:
        """Returns prices for plans whose batch takes at most ``batch_s``; None if nothing bounds their stages."""
        stage_s = min(self._stage_s(batch_s), self._paths.slowest_s)
        if stage_s <= 0.0:
            return None
        return self.dual_prices(stage_s, until=self._enough, rounds=_ROUNDS, check=check)

    def has_plan(self, prices: DualPrices) -> bool:
        """Whether, as far as the prices show, the layers may fit in the number of stages that there are."""
        return prices.devices < self._enough

    def none_below_s(self, batch_s: float, check: Callable[[], None] = _NO_CHECK) -> float:
        """Returns a bound on the time of a batch, at least ``batch_s``, for which it is proved. Tries ever longer
        times."""
        shown_s, step = batch_s, _FIRST_STEP
        while self._stage_s(shown_s) < self._paths.slowest_s:
            prices = self.prices(shown_s * (1.0 + step), check)
            if prices is None or self.has_plan(prices):
                return shown_s
            shown_s, step = shown_s * (1.0 + step), 2.0 * step
        return np.inf

    @property
    def _enough(self) -> float:
        """A number of stages that no plan has."""
        return self._task.most_stages * (1.0 + _GUARD)

    def kinds_at(self, keep_s: float) -> StageKinds:
        rows = [self._weights(int(r), keep_s) for r in self._task.bounding]
        return frozen(
            StageKinds(
                devices=np.ones(len(rows), np.int64),
                variant=self._task.bounding,
                weight_s=np.stack([weight_s for weight_s, _ in rows]),
                budget_s=np.array([budget_s for _, budget_s in rows]) * (1.0 + _ROUNDING),
                charge_s=self.stages.charge_s,
            )
        )

    def with_memory(self, kinds: StageKinds) -> ReachKinds:
        task, paths = self._task, self._paths
        least_b = paths.least_b + paths.least_shared / task.data_parallel_degree
        whole = task.schedule == GPIPE
        return frozen(
            ReachKinds(
                variant=kinds.variant,
                degree=np.ones(kinds.variant.size, np.int64),
                devices=kinds.devices,
                weight_s=kinds.weight_s,
                budget_s=kinds.budget_s,
                least_a=np.zeros(paths.least_a.shape) if whole else paths.least_a,
                least_b=least_b + task.microbatches * paths.least_a if whole else least_b,
                least_shared=np.zeros(paths.least_a.shape),
            )
        )

    def _weights(self, r: int, keep_s: float) -> tuple[FloatArray, float]:
        """Returns the weight of each vertex, and the budget. A stage with a vertex has at least as many stages behind
        it as the work behind the vertex needs."""
        tables, task = self._tables, self._task
        start = tables.option_start[r]
        of_variant = slice(start[0], start[-1])
        time_s = tables.option_forward_s[of_variant] + tables.option_backward_s[of_variant]
        behind = np.ceil(np.minimum(self._behind_s / keep_s, _ENDLESS) - 1.0 - _ROUNDING)
        at_once = [in_flight(task.schedule, task.microbatches, max(0, q)) for q in behind.astype(np.int64).tolist()]
        held_bytes = tables.option_activation[of_variant] * np.repeat(np.array(at_once, np.float64), np.diff(start))
        held_bytes += tables.option_fixed[of_variant] + tables.option_shared[of_variant] / task.data_parallel_degree
        return dearest_weights(time_s, held_bytes, start[:-1] - start[0], keep_s, task.most_memory_bytes)


def _slowest_s(tables: FlushTables) -> float:
    """Returns the time of all layers with their slowest options, and of all that can cross borders, on both sides of
    each."""
    time_s = tables.option_forward_s + tables.option_backward_s
    layers = tables.option_start.shape[1] - 1
    slowest_s = np.zeros(layers)
    for start in tables.option_start:
        np.maximum.at(slowest_s, np.repeat(np.arange(layers), np.diff(start)), time_s[start[0] : start[-1]])
    crossing_s = tables.charge_s.sum() + tables.tensor_forward_s.sum() + tables.tensor_backward_s.sum()
    return float(slowest_s.sum() + 4.0 * crossing_s)


def _least_s(tables: FlushTables, r: int) -> FloatArray:
    """Returns float64[n]: the least time t of each vertex in a variant; inf if it has no option. The fastest comes
    first."""
    start = tables.option_start[r]
    has_some = start[:-1] < start[1:]
    found = np.full(start.size - 1, np.inf)
    first = start[:-1][has_some]
    found[has_some] = tables.option_forward_s[first] + tables.option_backward_s[first]
    return found
