"""Borders that stand in for others, so that plans of a (d, t) are bounded on few of the lattice's downsets.

Inside a block of operators a border costs more than at its ends, and moving it there takes less time than it saves.
Take a plan, and put for each of its borders the one that *stands in* for it. A stage then has other layers and borders,
but it takes no longer forward, nor backward, nor, with its synchronisation, in all. No batch is longer then: each path
to the end of a stage's synchronisation goes through at least one forward and one backward pass of the stage.

What is moved to a stage has its fastest choice; what a stage holds more is given to it as memory.

That is not so for all stages. A stage pays for an edge that ends in it, but for none that goes past it. If a border
moves past the end of an edge that went past a stage, the stage pays more. *Long* edges count as if they always did. For
short ones the stage must have the layers at their other ends (``near_ends``). Of all other stages, most of them inside
a block, and of those whose borders have one stand-in, nothing is known: they are *free*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.flush.path_prices import in_flight_at
from piper_ray.engine.kernels.downsets import member_sums
from piper_ray.engine.kernels.flush_stages import AheadArrays
from piper_ray.engine.kernels.flush_stand_ins import BorderFigures, conflicts, near_ends, nearest_stand_ins
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask, FreeStages
from piper_ray.engine.kernels.types import FloatArray, IndexArray, frozen

_LONG = 1.0 / 24.0
"""Share of all work, in the order of vertices, from which on an edge is long. Any share is right."""

_MOST_DOWNSETS = 15_000
"""All pairs of downsets are looked at once: a second or two for these."""

_FEWER = 0.5
"""Stand-ins pay if at most this share of the downsets stands for itself."""


@dataclass(frozen=True)
class StandIns:
    """rows: int64[g], the downsets that stand for themselves, ascending. of: int64[m], the number in ``rows`` of what
    stands in for each downset. free: of the stages between these, those that take no time. moved_a, moved_b,
    moved_shared: the most bytes of what one border moves: for each microbatch in flight, once, and once on all
    replicas."""

    rows: IndexArray
    of: IndexArray
    free: FreeStages
    moved_a: float
    moved_b: float
    moved_shared: float

    @classmethod
    def of_tables(
        cls, tables: FlushTables, variant: int, sync_s_per_byte: float, long_share: float = _LONG
    ) -> StandIns | None:
        """Returns None if they do not pay, or are not known. sync_s_per_byte: the largest of any task."""
        m, starts = tables.bits.shape[0], tables.option_start[variant]
        has_all = bool((starts[:-1] < starts[1:]).all())
        if m > _MOST_DOWNSETS or tables.tensor_bits.shape[0] > 0 or not has_all or not _is_even(tables, variant):
            return None
        layers, fast = _LayerFigures.of(tables, variant, sync_s_per_byte), starts[:-1]
        edge_s = tables.edge_in_s[variant] + tables.edge_out_s[variant]
        at_s = np.cumsum(layers.least[:, 0] + layers.least[:, 1])
        is_long = np.abs(at_s[tables.edge_head] - at_s[tables.edge_tail]) > long_share * at_s[-1]
        n, twice = starts.size - 1, np.array([1.0, 1.0, 2.0])
        long_s = np.where(is_long, edge_s, 0.0)
        to_behind = layers.fast + np.bincount(tables.edge_tail, long_s, n)[:, None] * twice
        to_ahead = layers.fast + np.bincount(tables.edge_head, long_s, n)[:, None] * twice
        border_of = np.repeat(np.arange(m), np.diff(tables.crossing_start))
        into, out_of = (
            np.bincount(border_of, of_edge_s[variant][tables.crossing], m)[:, None] * twice
            for of_edge_s in (tables.edge_in_s, tables.edge_out_s)
        )
        figures = BorderFigures(
            into, out_of, *(member_sums(tables.bits, of_layers) for of_layers in (to_behind, to_ahead, layers.least))
        )
        order = np.argsort(figures.least[:, 0] + figures.least[:, 1], kind="stable")
        incident = (tables.out_start, tables.out_edge, tables.in_start, tables.in_edge)
        found = nearest_stand_ins(tables.bits, order, frozen(figures))
        own = np.arange(m)
        while True:
            if np.count_nonzero(found == own) > _FEWER * m:
                return None
            ends = near_ends(tables.bits, found, tables.edge_tail, tables.edge_head, ~is_long, incident)
            is_unlike, is_open = conflicts(tables.bits, order, found, *ends)
            if not is_unlike.any():
                break
            found = np.where(is_unlike, own, found)
            while (found[found] != found).any():
                found = found[found]
        rows = np.flatnonzero(found == own)
        outer, inner = np.nonzero(is_open)
        free = FreeStages(np.searchsorted(outer, np.arange(rows.size + 1)), inner)
        held = np.stack([tables.option_activation[fast], tables.option_fixed[fast], tables.option_shared[fast]], axis=1)
        either = tables.bits ^ tables.bits[found]
        return cls(rows, np.searchsorted(rows, found), frozen(free), *(member_sums(either, held).max(axis=0).tolist()))

    def task(self, task: FlushTask) -> FlushTask:
        """Returns the task with more memory: for what both borders of a stage may move to it."""
        moved_bytes = self.moved_a * float(in_flight_at(task).max()) + self.moved_b
        more_bytes = 2.0 * (moved_bytes + self.moved_shared / task.data_parallel_degree)
        return frozen(
            task._replace(
                memory_bytes=task.memory_bytes + more_bytes, most_memory_bytes=task.most_memory_bytes + more_bytes
            )
        )

    def least(self, of_downsets: FloatArray) -> FloatArray:
        """Returns float64[g, ...]: the least of all downsets that each one stands in for."""
        found = np.full((self.rows.size, *of_downsets.shape[1:]), np.inf)
        np.minimum.at(found, self.of, of_downsets)
        return found

    def ahead(self, tables: FlushTables, ahead: AheadArrays) -> AheadArrays:
        """Returns figures by which no tail of a plan is left out. tables: on ``rows``."""
        of_rows = ahead.own_s[self.rows]
        # One number for all, so that differences of work are no larger than they were.
        moved_s = float((of_rows[self.of] - ahead.own_s).max())
        found = ahead._replace(
            own_s=np.maximum(0.0, of_rows - moved_s),
            ahead_s=self.least(ahead.ahead_s),
            ahead_forward_s=self.least(ahead.ahead_forward_s),
            ahead_activation=self.least(ahead.ahead_activation),
            ahead_fixed=self.least(ahead.ahead_fixed),
            ahead_shared=self.least(ahead.ahead_shared),
        )
        return ordered(found, tables)


def ordered(ahead: AheadArrays, tables: FlushTables) -> AheadArrays:
    """Returns the figures with the order of their downsets, which are those of ``tables``."""
    order = np.argsort(ahead.own_s, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    found = ahead._replace(order=order, ordered_s=ahead.own_s[order], ordered_bits=tables.bits[order], rank=rank)
    return frozen(found)


@dataclass(frozen=True)
class _LayerFigures:
    """Forward seconds, backward seconds, and both with the synchronisation, float64[n, 3]: of the fastest choice, and
    the least of any."""

    fast: FloatArray
    least: FloatArray

    @classmethod
    def of(cls, tables: FlushTables, variant: int, sync_s_per_byte: float) -> _LayerFigures:
        start = tables.option_start[variant]
        forward_s, backward_s = tables.option_forward_s, tables.option_backward_s
        all_s = forward_s + backward_s + tables.option_weights * sync_s_per_byte
        of_options = np.stack([forward_s, backward_s, all_s], axis=1)[start[0] : start[-1]]
        least = np.minimum.reduceat(of_options, start[:-1] - start[0])
        least[:, 2] = np.minimum.reduceat((forward_s + backward_s)[start[0] : start[-1]], start[:-1] - start[0])
        return cls(of_options[start[:-1] - start[0]], least)


def _is_even(tables: FlushTables, variant: int) -> bool:
    """Whether all options of a vertex pay the same for each edge."""
    start = tables.option_start[variant]
    for v in range(start.size - 1):
        ins = tables.in_edge[tables.in_start[v] : tables.in_start[v + 1]]
        outs = tables.out_edge[tables.out_start[v] : tables.out_start[v + 1]]
        least_s = np.append(tables.edge_in_s[variant][ins], tables.edge_out_s[variant][outs])
        for option in range(start[v], start[v + 1]):
            at = tables.charge_start[option]
            if (tables.charge_s[at : at + least_s.size] != least_s).any():
                return False
    return True
