"""How many stages the tail of each downset may have, by dual prices: a bound on what single stages take under a flush.

Of m microbatches stage j, with q stages behind it, takes t_j for each. No batch of a pipeline takes less than

    1f1b    sum of all t + (m - 1 - min(q, m - 1) / 2) t_j
    gpipe   sum of all t + (m - 1) t_j

Under GPipe that is sum t + (m - 1) (max f + max b). Under 1F1B it follows from ``flush_paths``: of the path through j
there are the stages in front of it, m - w + 1 times t_j, and S_j and E_j. Each of these two is at least the sum of t of
the stages behind, and with w - 1 = min(q, m - 1) at least (w - 1) f_j, or (w - 1) b_j; so their sum is at least the
former and half of (w - 1) t_j. Where m = w one of the two is in the path, with w - 1 times the other pass.

So a plan below a cutoff has no stage that takes more than a threshold, which is Piper's decision problem with one d and
one t: its dual prices bound how many stages layers take.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.engine.evaluation.dual_prices import Cover, dearest_weights, work_behind_s
from piper_ray.engine.flush.tables import FlushWorkload
from piper_ray.engine.kernels.cover import LabelMoves, StageKinds
from piper_ray.engine.kernels.downsets import member_sums
from piper_ray.engine.kernels.flush_stages import in_flight
from piper_ray.engine.kernels.flush_types import GPIPE, TWO_BW, FlushTables, FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.labelling import Labelling

_GUARD = 1e-6
"""Of a stage: prices sum to a little more by rounding."""

_ROUNDING = 1e-9
"""Relative, of sums of seconds."""

_ENDLESS = 2.0**40
"""Stages behind a layer that no pipeline has: more fit into no integer."""

_ROUNDS = 60


class PathArrays(NamedTuple):
    """All stages of a graph as paths, with what they pay at least. moves: see ``lattice.labelling``."""

    moves: LabelMoves
    charge_s: FloatArray  # float64[r, moves]: in both directions
    behind_s: FloatArray  # float64[r, n]: of each vertex and all behind it, the least t


def build_paths(workload: FlushWorkload) -> PathArrays | None:
    """None for a graph so entangled that its stages take longer to look through than that saves."""
    graph, tables = workload.lattice.graph, workload.arrays
    labelling = Labelling.of(graph)
    if labelling is None:
        return None
    variants = range(len(workload.variants))
    return frozen(
        PathArrays(
            labelling.moves,
            np.stack([labelling.charges_s(2.0 * tables.edge_in_s[r], 2.0 * tables.edge_out_s[r]) for r in variants]),
            np.stack([work_behind_s(graph, _least_s(tables, r)) for r in variants]),
        )
    )


def stage_limits(tables: FlushTables, task: FlushTask, paths: PathArrays, work_s: float, batch_s: float) -> IndexArray:
    """int64[m]: the most stages that the tail of each downset has in a plan whose batch takes ``batch_s`` at most; 0
    where no plan has that tail.

    work_s: no stages of all layers take less for a microbatch.
    """
    most_stages = np.full(tables.bits.shape[0], task.most_stages)
    stage_s = most_stage_s(task.schedule, task.microbatches, task.most_stages, work_s, batch_s)
    if stage_s <= 0.0 or not np.isfinite(stage_s):
        return most_stages
    cover = _FlushCover(tables, task, paths)
    prices = cover.dual_prices(stage_s, until=task.most_stages * (1.0 + _GUARD), rounds=_ROUNDS).of_vertex
    inside = member_sums(tables.bits, prices[:, None].copy())[:, 0]
    most: IndexArray = np.floor(task.most_stages - (inside[-1] - inside) + _GUARD).astype(np.int64)
    return np.where(most >= np.ceil(inside - _GUARD), most, 0)


def most_stage_s(schedule: int, microbatches: int, most_stages: int, work_s: float, batch_s: float) -> float:
    """What a stage may take for a microbatch, wherever it is, in a pipeline of so many stages at most."""
    m = microbatches
    alone_s = batch_s / m
    if schedule == TWO_BW:
        return alone_s
    often = m - 1 if schedule == GPIPE else m - 1 - min(most_stages - 1, m - 1) / 2.0
    return min(alone_s, (batch_s - work_s) / often) if often > 0.0 else alone_s


class _FlushCover(Cover):
    """Of the layers of a task by its stages, each of which counts as one device."""

    def __init__(self, tables: FlushTables, task: FlushTask, paths: PathArrays) -> None:
        super().__init__(paths.moves, task.most_stages)
        self._tables, self._task, self._charge_s = tables, task, paths.charge_s
        self._behind_s = paths.behind_s[task.variants].min(axis=0)

    def kinds_at(self, keep_s: float) -> StageKinds:
        rows = [self._weights(int(r), keep_s) for r in self._task.variants]
        return StageKinds(
            devices=np.ones(len(rows), np.int64),
            variant=self._task.variants,
            weight_s=np.stack([weight_s for weight_s, _ in rows]),
            budget_s=np.array([budget_s for _, budget_s in rows]) * (1.0 + _ROUNDING),
            charge_s=self._charge_s,
        )

    def _weights(self, r: int, keep_s: float) -> tuple[FloatArray, float]:
        """Of each vertex, and the budget: a stage with a vertex has those stages behind it that the work behind the
        vertex asks for."""
        tables, task = self._tables, self._task
        start = tables.option_start[r]
        of_variant = slice(start[0], start[-1])
        time_s = tables.option_forward_s[of_variant] + tables.option_backward_s[of_variant]
        behind = np.ceil(np.minimum(self._behind_s / keep_s, _ENDLESS) - 1.0 - _ROUNDING)
        at_once = [in_flight(task.schedule, task.microbatches, max(0, q)) for q in behind.astype(np.int64).tolist()]
        held_bytes = tables.option_activation[of_variant] * np.repeat(np.array(at_once, np.float64), np.diff(start))
        held_bytes += tables.option_fixed[of_variant] + tables.option_shared[of_variant] / task.data_parallel_degree
        return dearest_weights(time_s, held_bytes, start[:-1] - start[0], keep_s, task.memory_bytes)


def _least_s(tables: FlushTables, r: int) -> FloatArray:
    """float64[n]: t of each vertex's fastest option in a variant, which comes first; inf where it has none."""
    start = tables.option_start[r]
    has_some = start[:-1] < start[1:]
    found = np.full(start.size - 1, np.inf)
    first = start[:-1][has_some]
    found[has_some] = tables.option_forward_s[first] + tables.option_backward_s[first]
    return found
