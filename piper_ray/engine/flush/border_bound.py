"""A lower bound for plans of a (d, t) on graphs with many downsets, listed or not: the shortest way over the cheapest
borders at each amount of work (``kernels.flush_borders``).

By prices of positions (``flush.path_prices``), moving the layers in front of a border from behind it to in front of it
changes their cost by a known amount; to this comes what stages pay at their borders. A stage pays for each edge that
crosses its border, but not for edges that pass it, from a stage in front to one behind. No edge passes a stage with
more work than the edge's *span*: the work of all layers that are neither in front of its tail nor behind its head. Long
edges, such as of a mask that each block of a decoder reads, count where their ends are surely in different stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from piper_ray.engine.evaluation.dual_prices import work_behind_s
from piper_ray.engine.flush.path_prices import LayerChoices, PathPrices, in_flight_at
from piper_ray.engine.flush.paths import often
from piper_ray.engine.kernels.flush_borders import (
    GROUP,
    BorderCells,
    WayPrices,
    cheapest_borders,
    cheapest_downsets,
    least_way_s,
)
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.labelling import BORDER_LABELS, IN_FRONT, Labelling
from piper_ray.engine.lattice.layer_graph import LayerGraph, ancestors, members_of

_CELLS = 4096

_CELLS_OF_SHARE, _MOST_CHOSEN = 4, 50_000_000
"""For downsets with cheap borders: cells in each share of the work, and the largest number of figures."""

_SHORT = np.append(0.0, 2.0 ** np.arange(-7.0, -1.0))
"""Spans, as shares of all work."""

_QUANTILES = (0.25, 0.5, 0.75)
"""Quantiles of the value of a second of layers."""

_SHARES = (1.0, 0.998, 0.995, 0.99, 0.98, 0.96, 0.92, 0.84)
"""Shares of a plan's time at which bounds are tried."""

_RISE, _MOST_RISES = 1.06, 40

_TIE = 1e-8

_LOOSE = 1.0 / 32.0
"""Share of all work. A layer is loose if the work in front of borders that may or may not have it in front ranges over
more than this."""

_ROUNDING, _TINY = 1e-9, 1e-11
"""Relative rounding errors of sums: of those that limit ways, and of those that are their costs."""


class LayerWork(NamedTuple):
    """float64[n] each. own_s: the least time of a layer. up_s: the sum over it and all layers in front of it. apart_s:
    the sum over all layers but it and those behind it.

    If less than ``up_s`` is in front of a border, the layer is behind it; if more than ``apart_s`` is, the layer is in
    front of it.
    """

    own_s: FloatArray
    up_s: FloatArray
    apart_s: FloatArray

    @classmethod
    def of(cls, graph: LayerGraph, own_s: FloatArray) -> LayerWork:
        in_front = ancestors(graph.successors)
        up_s = np.array([own_s[members_of(mask | 1 << v)].sum() for v, mask in enumerate(in_front)])
        return cls(own_s, up_s, own_s.sum() - work_behind_s(graph, own_s))


@dataclass(frozen=True)
class BorderBound:
    """Bounds plans on one graph with the variants of a task."""

    cells: BorderCells
    work: LayerWork

    @classmethod
    def of(
        cls, graph: LayerGraph, labelling: Labelling, tables: FlushTables, variants: IndexArray
    ) -> BorderBound | None:
        """Returns None if some layer has no option or no layer takes any time. labelling: of single borders."""
        own_s = _least_work_s(tables, variants)
        all_s = float(own_s.sum())
        if not 0.0 < all_s < np.inf:
            return None
        work, cells_of = LayerWork.of(graph, own_s), _cells_of(labelling, own_s, _CELLS)
        edges = _Edges.of(graph, tables, variants, work)
        limits_s = all_s * (np.append(-1.0, _SHORT)[:, None] + _ROUNDING)
        short = edges.span_s <= limits_s[1:]
        paid = [np.where(are_short, of_edge_s, 0.0) for of_edge_s in (edges.in_s, edges.out_s) for are_short in short]
        charges_s = np.stack([labelling.front_charges.seconds(np.zeros_like(edges.in_s), row) for row in paid], axis=1)
        from_s, to_s, least_s = cheapest_borders(labelling.moves, _in_front(labelling), cells_of, own_s, charges_s)
        from_s, to_s = from_s * (1.0 - _ROUNDING), to_s * (1.0 + _ROUNDING)
        longer = edges.past_loose_layers(graph, work)
        cells = BorderCells(
            from_s,
            to_s,
            np.ascontiguousarray(least_s[:, : _SHORT.size]),
            np.ascontiguousarray(least_s[:, _SHORT.size :]),
            all_s * (_SHORT + 2.0 * _ROUNDING),
            np.stack([longer.surely_paid(from_s, to_s, limit_s) for limit_s in limits_s[:, 0]]),
        )
        return cls(frozen(cells), frozen(work))

    def least_s(
        self, tables: FlushTables, task: FlushTask, prices: PathPrices, lower_s: float, upper_s: float
    ) -> float:
        """Returns a time that no plan of the task is below; inf if none takes at most ``upper_s``. lower_s: a known
        bound.

        The more time stages may take, the shorter are ways. So the cost of the shortest way for stages of a given time
        bounds all plans of at least that time. Times are tried from ``upper_s`` down, or from ``lower_s`` up if no plan
        is known.
        """
        way_prices, found_s = self.way_prices(tables, task, prices), lower_s
        if upper_s == np.inf:
            for _ in range(_MOST_RISES):
                most_s = found_s * _RISE
                least_s = float(least_way_s(self.cells, way_prices, most_s))
                if least_s <= most_s * (1.0 + _TIE):
                    return max(found_s, least_s)
                found_s = most_s
            return found_s
        for share in _SHARES:
            most_s = share * upper_s
            if most_s <= found_s:
                break
            least_s = float(least_way_s(self.cells, way_prices, most_s))
            if least_s > most_s * (1.0 + _TIE):
                return np.inf if most_s == upper_s else most_s
            found_s = max(found_s, least_s)
        return found_s

    def way_prices(self, tables: FlushTables, task: FlushTask, prices: PathPrices) -> WayPrices:
        """Returns the costs of ways in the task."""
        choices, positions = LayerChoices.of(tables, task), task.most_stages
        cost_s = choices.least_s(prices, in_flight_at(task))[:, choices.of_vertex]
        border_s = np.zeros((positions, self.cells.from_s.size))
        for q in range(1, positions):
            border_s[q] = self.least_in_front(cost_s[q] - cost_s[q - 1])
        held = choices.least_held(in_flight_at(task))[:, choices.of_vertex] / task.most_memory_bytes
        least_held = [self.least_in_front(row) for row in held]
        most_held = [-self.least_in_front(-row) for row in held]
        first_sync = np.append(np.cumsum(prices.sync[::-1])[::-1], 0.0)[1:]
        begin_s = float(cost_s[0].sum())
        return frozen(
            WayPrices(
                passes=prices.forward + prices.backward,
                room_s=prices.memory_s * task.most_memory_bytes,
                begin_s=begin_s - _TINY * abs(begin_s),
                border_s=border_s,
                first_s=first_sync[:, None] * self.least_in_front(choices.least_sync_s()[choices.of_vertex]),
                held=np.stack([np.array(least_held), np.array(most_held)], axis=2),
                held_at_all=held.sum(axis=1) * (1.0 - _ROUNDING),
                often=np.array([often(task.schedule, task.microbatches, q + 1) for q in range(positions)], np.float64),
                microbatches=task.microbatches,
                stages=task.stages,
            )
        )

    def least_in_front(self, value: FloatArray) -> FloatArray:
        """Returns float64[c]: a lower bound, for each cell, on the sum of ``value`` over the layers in front of a
        border of that cell; 0 if it has none. value: float64[n].

        The bound holds for any value of a second of work. It is the value of the work in front, plus what layers are
        worth beyond their work: all that must be in front count, and all that may be there count if this is negative.
        The best of several values of a second is taken.
        """
        from_s, to_s, own_s = self.cells.from_s, self.cells.to_s, self.work.own_s
        has_some = np.isfinite(from_s)
        may, must = _first_cells(self.work, from_s, to_s)
        found = np.full(from_s.size, -np.inf)
        a_second = np.append(
            value.sum() / own_s.sum(), np.quantile(value[own_s > 0.0] / own_s[own_s > 0.0], _QUANTILES)
        )
        for worth in a_second.tolist():
            beyond = value - worth * own_s
            changes = np.zeros(from_s.size + 1)
            np.add.at(changes, may, np.minimum(0.0, beyond))
            np.add.at(changes, np.maximum(may, must), np.maximum(0.0, beyond))
            of_work = worth * np.where(has_some, from_s if worth >= 0.0 else to_s, 0.0)
            found = np.maximum(found, of_work + np.cumsum(changes)[:-1])
        return np.where(has_some, found - _TINY * np.abs(value).sum(), 0.0)


class _Edges(NamedTuple):
    """Edges of a graph. in_s, out_s: float64[e], the least that an edge costs the stage of its head and of its tail, in
    each direction. span_s: float64[e]. tails, heads: ``LayerWork`` of its ends. tail, head: int64[e]. from_s:
    float64[e]; an edge counts as long for limits from there to its span.
    """

    in_s: FloatArray
    out_s: FloatArray
    span_s: FloatArray
    tails: LayerWork
    heads: LayerWork
    tail: IndexArray
    head: IndexArray
    from_s: FloatArray

    @classmethod
    def of(cls, graph: LayerGraph, tables: FlushTables, variants: IndexArray, work: LayerWork) -> _Edges:
        in_s, out_s = (of_edge[variants].min(axis=0) for of_edge in (tables.edge_in_s, tables.edge_out_s))
        ends = np.array([edge[:2] for edge in graph.edges], np.int64).reshape(-1, 2).T
        return cls._between(work, ends[0], ends[1], in_s, out_s)

    @classmethod
    def _between(
        cls, work: LayerWork, tail: IndexArray, head: IndexArray, in_s: FloatArray, out_s: FloatArray
    ) -> _Edges:
        tails, heads = (LayerWork(*(x[end] for x in work)) for end in (tail, head))
        from_s = np.full(in_s.size, -np.inf)
        return cls(in_s, out_s, heads.apart_s - tails.up_s, tails, heads, tail, head, from_s)

    def past_loose_layers(self, graph: LayerGraph, work: LayerWork) -> _Edges:
        """Adds edges past loose layers, which may be far from the layers behind them, such as a decoder's keys of the
        encoder's output.

        Such a layer reads a single other one. If that one is in front of a stage with a layer behind the loose one, the
        stage pays in any case: either for what the loose layer reads or for what it makes, of which each layer behind
        has its share. The same holds for the stage of the layer that is read. Where all these edges are long, those
        past the loose layer replace them.
        """
        loose = np.flatnonzero(work.apart_s - work.up_s > _LOOSE * work.own_s.sum())
        into, out_of = ([np.zeros(0, np.int64) for _ in range(graph.size)] for _ in range(2))
        for v in loose.tolist():
            into[v], out_of[v] = np.flatnonzero(self.head == v), np.flatnonzero(self.tail == v)
        taken = np.zeros(self.in_s.size, np.bool_)
        from_s, past, until_s = self.from_s.copy(), [], []
        for v in loose[::-1].tolist():
            both = np.append(into[v], out_of[v])
            if into[v].size != 1 or out_of[v].size == 0 or taken[both].any():
                continue
            taken[both] = True
            least_s, first = self.span_s[both].min(), into[v][0]
            from_s[both] = least_s
            for e in out_of[v].tolist():
                paid_s = [min(x[first] / out_of[v].size, x[e]) for x in (self.in_s, self.out_s)]
                past.append((self.tail[first], self.head[e], *paid_s))
                until_s.append(least_s)
        tail, head, in_s, out_s = np.array(past).reshape(-1, 4).T
        more = _Edges._between(work, tail.astype(np.int64), head.astype(np.int64), in_s, out_s)
        every = zip(self._replace(from_s=from_s), more._replace(span_s=np.array(until_s)), strict=True)
        return _Edges(*(_together(mine, other) for mine, other in every))

    def surely_paid(self, from_s: FloatArray, to_s: FloatArray, limit_s: float) -> FloatArray:
        """``BorderCells.long_s`` for edges that are long beyond a limit."""
        some = (self.from_s <= limit_s) & (limit_s < self.span_s)
        starts = np.arange(0, from_s.size, GROUP)
        reached_s = np.maximum.reduceat(np.where(np.isfinite(from_s), to_s, -np.inf), starts)
        none = starts.size
        (tail_behind, tail_front), (head_behind, head_front) = (
            _first_cells(ends, np.minimum.reduceat(from_s, starts), reached_s) for ends in (self.tails, self.heads)
        )
        changes = np.zeros((none + 2, none + 2))

        def add(fronts: _Range, backs: _Range, paid_s: FloatArray) -> None:
            """Adds a payment for all borders in these ranges: in front of a stage, and behind it."""
            for front, sign in zip(fronts, (1.0, -1.0), strict=True):
                for back, other in zip(backs, (1.0, -1.0), strict=True):
                    np.add.at(changes, (front, back), np.where(some, sign * other * paid_s, 0.0))

        first, last, end = (np.full(self.in_s.size, at) for at in (0, none, none + 1))
        # First, the tail is in front of the stage and the head in it; then the tail is in it and the head behind it.
        add((tail_front, np.maximum(tail_front, head_behind)), (head_front, end), self.in_s)
        behind = (tail_front, np.maximum(tail_front, head_behind))
        add((first, tail_behind), behind, self.out_s)
        add((last, end), behind, self.out_s)
        found = np.cumsum(np.cumsum(changes, axis=0), axis=1)[:-1, :-1]
        rounding: FloatArray = np.maximum(0.0, found - _ROUNDING * (self.in_s.sum() + self.out_s.sum()))
        return rounding


def _together(one: Any, other: Any) -> Any:
    if isinstance(one, LayerWork):
        return LayerWork(*map(_together, one, other))
    return np.append(one, other)


_Range = tuple[IndexArray, IndexArray]


def _first_cells(work: LayerWork, from_s: FloatArray, to_s: FloatArray) -> _Range:
    """Returns, for each layer, the first cell whose borders may have it in front, and the first whose borders must."""
    most_s = np.maximum.accumulate(np.where(np.isfinite(from_s), to_s, -np.inf))
    least_s = np.minimum.accumulate(from_s[::-1])[::-1]
    may = np.searchsorted(most_s * (1.0 + _ROUNDING), work.up_s * (1.0 - _ROUNDING))
    must = np.searchsorted(least_s * (1.0 - _ROUNDING), work.apart_s * (1.0 + _ROUNDING), side="right")
    return may, must


def downsets_with_cheap_borders(
    graph: LayerGraph, labelling: Labelling, tables: FlushTables, most: int
) -> BitArray | None:
    """Returns uint64[m, words]: the empty set, V, and a downset with the cheapest border for each of ``most`` equal
    shares of the work in front. None if no layer takes any time. labelling: of single borders.
    """
    every = np.arange(tables.option_start.shape[0])
    own_s = _least_work_s(tables, every)
    if not 0.0 < own_s.sum() < np.inf:
        return None
    cells = max(1, min(_CELLS_OF_SHARE * most, _MOST_CHOSEN // (graph.size * int(labelling.moves.states.max()))))
    paid_s = (tables.edge_in_s + tables.edge_out_s).min(axis=0)
    charge_s = labelling.front_charges.seconds(np.zeros_like(paid_s), paid_s)
    cells_of = _cells_of(labelling, own_s, cells)
    least_s, bits = cheapest_downsets(labelling.moves, _in_front(labelling), cells_of, charge_s)
    starts = np.unique(np.arange(most) * least_s.size // most)
    ends = np.append(starts[1:], least_s.size)
    chosen = [first + int(np.argmin(least_s[first:end])) for first, end in zip(starts, ends, strict=True)]
    none, every_one = np.zeros_like(bits[:1]), np.bitwise_or.reduce(bits, axis=0)[None]
    return np.unique(np.concatenate([none, bits[[c for c in chosen if least_s[c] < np.inf]], every_one]), axis=0)


def _cells_of(labelling: Labelling, own_s: FloatArray, cells: int) -> IndexArray:
    """Returns int64[n]: the number of cells that each vertex counts in front of a border."""
    order = labelling.moves.order
    found = np.zeros(order.size, np.int64)
    found[order] = np.diff(np.rint(np.cumsum(own_s[order]) * (cells / own_s.sum())).astype(np.int64), prepend=0)
    return found


def _in_front(labelling: Labelling) -> IndexArray:
    found: IndexArray = (labelling.label == IN_FRONT).astype(np.int64)
    return found


def border_labelling(graph: LayerGraph) -> Labelling | None:
    """Returns a labelling of single borders; None if they are too many."""
    return Labelling.of(graph, BORDER_LABELS)


def _least_work_s(tables: FlushTables, variants: IndexArray) -> FloatArray:
    """Returns float64[n]: the least time t of each vertex; inf if it has no option. A variant's fastest option comes
    first."""
    time_s = tables.option_forward_s + tables.option_backward_s
    found = np.full(tables.option_start.shape[1] - 1, np.inf)
    for start in tables.option_start[variants]:
        has_some = start[:-1] < start[1:]
        found[has_some] = np.minimum(found[has_some], time_s[start[:-1][has_some]])
    return found
