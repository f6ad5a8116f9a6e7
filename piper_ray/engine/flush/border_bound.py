"""A lower bound for plans of a (d, t) on graphs with many downsets, listed or not: the shortest way over the cheapest
borders at each amount of work (``kernels.flush_borders``).

By prices of positions (``flush.path_prices``), moving the layers in front of a border from behind it to in front of it
changes their cost by a known amount; to this comes what stages pay at their borders. A stage pays for each edge that
crosses its border, but not for edges that pass it, from a stage in front to one behind. No edge passes a stage with
more work than the edge's *span*: the work of all layers that are neither in front of its tail nor behind its head. Long
edges, such as of a mask that each block of a decoder reads, count where their ends are surely in different stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.evaluation.dual_prices import work_behind_s
from piper_ray.engine.flush.cell_bound import CellBound
from piper_ray.engine.flush.cell_figures import StageCosts
from piper_ray.engine.flush.path_prices import LayerChoices, PathPrices, in_flight_at
from piper_ray.engine.flush.paths import often
from piper_ray.engine.kernels.flush_borders import (
    BorderCells,
    WayPrices,
    cheapest_border_way,
    cheapest_borders,
    cheapest_downsets,
)
from piper_ray.engine.kernels.flush_types import FlushTables, FlushTask
from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.cells import cell_ranges, cells_along, every_stage, least_cost
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.lattice.labelling import BORDER_LABELS, Labelling
from piper_ray.engine.lattice.layer_graph import LayerGraph, ancestors, members_of

_CELLS, _GROUP = 1024, 4
"""Cells, and cells of a group."""

_CELLS_OF_SHARE, _MOST_CHOSEN = 4, 50_000_000
"""For downsets with cheap borders: cells in each share of the work, and the largest number of figures."""

_CELLS_OF_STAGES, _MOST_FIGURES, _MOST_STEPS = 256, 6_000_000, 2_000_000_000
"""For what stages pay: cells, and limits on the figures that are kept at once and on the steps."""

_SHORT = np.append(0.0, 2.0 ** np.arange(-7.0, -1.0))
"""Spans, as shares of all work."""

_QUANTILES = (0.25, 0.5, 0.75)
"""Quantiles of the value of a second of layers."""

_CLOSE = 1e-3
"""Relative. A time with plans, as far as is known, is not looked at more closely than this above one without."""

_RISE, _MOST_RISES = 1.06, 40

_MOST_WAYS, _FEW_WAYS = 60, 20
"""Prices tried at all times together: each takes some hundredths of a second."""

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
    """Bounds plans on one graph with the variants of a task. by_stages: closer bounds, if stages can be labelled."""

    cells: BorderCells
    work: LayerWork
    by_stages: CellBound | None

    @classmethod
    def of(
        cls,
        graph: LayerGraph,
        labelling: Labelling,
        stages: Labelling | None,
        tables: FlushTables,
        variants: IndexArray,
    ) -> BorderBound | None:
        """Returns None if some layer has no option or no layer takes any time. labelling: of single borders; stages: of
        stages, if there is one."""
        own_s = _least_work_s(tables, variants)
        all_s = float(own_s.sum())
        if not 0.0 < all_s < np.inf:
            return None
        work, cells_of = LayerWork.of(graph, own_s), cells_along(graph, own_s, _CELLS)
        edges = _Edges.of(graph, tables, variants, work)
        limits_s = all_s * (np.append(-1.0, _SHORT)[:, None] + _ROUNDING)
        short = edges.span_s <= limits_s[1:]
        paid = [np.where(are_short, of_edge_s, 0.0) for of_edge_s in (edges.in_s, edges.out_s) for are_short in short]
        charges_s = np.stack([labelling.front_charges.seconds(np.zeros_like(edges.in_s), row) for row in paid], axis=1)
        from_s, to_s, least_s = cheapest_borders(labelling.moves, labelling.in_front, cells_of, own_s, charges_s)
        from_s, to_s = from_s * (1.0 - _ROUNDING), to_s * (1.0 + _ROUNDING)
        longer = edges.past_loose_layers(graph, work)
        cells = BorderCells(
            from_s,
            to_s,
            np.ascontiguousarray(least_s[:, : _SHORT.size]),
            np.ascontiguousarray(least_s[:, _SHORT.size :]),
            all_s * (_SHORT + 2.0 * _ROUNDING),
            np.arange(from_s.size) // _GROUP,
            np.stack([longer.surely_paid(from_s, to_s, limit_s) for limit_s in limits_s[:, 0]]),
            _paid_by_stages(
                graph, labelling, stages, own_s, edges, _ranges(from_s, to_s, np.arange(0, from_s.size, _GROUP))
            ),
        )
        by_stages = None
        if stages is not None:
            by_stages = CellBound(StageCosts.of(graph, stages, labelling, own_s, edges.tail, edges.in_s, edges.out_s))
        return cls(frozen(cells), frozen(work), by_stages)

    def least_s(
        self,
        tables: FlushTables,
        task: FlushTask,
        prices: PathPrices,
        lower_s: float,
        upper_s: float,
        stops: Callable[[], bool],
    ) -> float:
        """Returns a time that no plan of the task is below; inf if none takes at most ``upper_s``. lower_s: a known
        bound.

        The more time stages may take, the shorter are ways. So the cost of the shortest way for stages of a given time
        bounds all plans of at least that time. If it costs more than this time, no plan takes so little. The range that
        is left is halved; if no plan is known, times are tried from ``lower_s`` up. stops: as in ``CellBound``.
        """
        if self.by_stages is not None and upper_s < np.inf:
            return self.by_stages.least_s(tables, task, lower_s, upper_s, stops)
        choices, found_s = LayerChoices.of(tables, task), lower_s
        if upper_s == np.inf:
            way_prices = self._held(choices, task).priced(prices)
            for _ in range(_MOST_RISES):
                most_s = found_s * _RISE
                least_s, *_ = cheapest_border_way(self.cells, way_prices, most_s)
                if least_s <= most_s * (1.0 + _TIE):
                    return max(found_s, least_s)
                found_s = most_s
            return found_s
        return self._halved(choices, task, prices, lower_s, upper_s, _MOST_WAYS)

    def quick_s(
        self, tables: FlushTables, task: FlushTask, prices: PathPrices, lower_s: float, upper_s: float
    ) -> float:
        """The same with few prices."""
        return self._halved(LayerChoices.of(tables, task), task, prices, lower_s, upper_s, _FEW_WAYS)

    def _halved(
        self,
        choices: LayerChoices,
        task: FlushTask,
        prices: PathPrices,
        lower_s: float,
        upper_s: float,
        most_ways: int,
    ) -> float:
        """Halves the range between a bound and a plan, with prices sought for each time. Returns the bound. most_ways:
        how many prices are tried; after these, no further ones are sought."""
        held = self._held(choices, task)
        found_s, high_s, most_s = lower_s, upper_s, upper_s
        while found_s < most_s:
            least_s, prices, tried = self._raised(held, prices, most_s, max(1, most_ways))
            most_ways -= tried
            if least_s > most_s * (1.0 + _TIE):
                if most_s == upper_s:
                    return np.inf
                found_s = most_s
            else:
                found_s, high_s = max(found_s, least_s), most_s
            if high_s <= found_s * (1.0 + _CLOSE):
                break
            most_s = 0.5 * (found_s + high_s)
        return found_s

    def _raised(
        self, held: _HeldByTask, prices: PathPrices, most_s: float, most_ways: int
    ) -> tuple[float, PathPrices, int]:
        """Seeks prices by which plans whose batch takes at most ``most_s`` cost more than that. Returns the largest
        cost of a cheapest way, its prices, and how many prices were tried: ``most_ways`` at most.

        Prices are sought as in ``WayProgram``, with the stages of the cheapest ways by all prices so far. Once the
        shares of these take no more than ``most_s``, hardly any prices would cost more.
        """
        from piper_ray.engine.flush.way_program import WayProgram  # HiGHS is loaded where it is needed

        program: WayProgram | None = None
        best_s, best, count = -np.inf, prices, self.cells.from_s.size
        for tried in range(1, most_ways + 1):
            least_s, way, paid_s = cheapest_border_way(self.cells, held.priced(prices), most_s)
            if least_s > best_s:
                best_s, best = float(least_s), prices
            if best_s > most_s * (1.0 + _TIE) or tried == most_ways:
                break
            program = program or WayProgram(held.choices, held.task)
            for q, (back, front) in enumerate(pairwise(way.tolist())):
                copies = self._copies(held.choices, back, front)
                paid = float(paid_s[q]), float(paid_s[q])
                program.add_stage((back + 1) % (count + 1), front + 1, front < 0, q, copies, paid, prices)
            if not program.solve() or program.batch_s <= most_s:
                break
            prices = program.prices
        return best_s, best, tried

    def _copies(self, choices: LayerChoices, back: int, front: int) -> FloatArray:
        """Returns float64[layers]: about how many of each layer are between two borders, by the work in front of
        them."""
        cells, work = self.cells, self.work
        from_s = work.own_s.sum() if back == cells.from_s.size else cells.from_s[back]
        to_s = cells.from_s[front] if front >= 0 else -np.inf
        middle_s = 0.5 * (work.up_s + work.apart_s)
        share = ((to_s < middle_s) & (middle_s <= from_s)).astype(np.float64)
        taken_s = float(dot(share, work.own_s))
        whole_s = from_s - max(to_s, 0.0)
        share = share * (whole_s / taken_s) if taken_s > 0.0 else np.full(share.size, whole_s / work.own_s.sum())
        copies: FloatArray = np.bincount(choices.of_vertex, share, choices.copies.size).astype(np.float64)
        return copies

    def _held(self, choices: LayerChoices, task: FlushTask) -> _HeldByTask:
        held = choices.least_held(in_flight_at(task))[:, choices.of_vertex] / task.most_memory_bytes
        in_front = [(self.least_in_front(row), -self.least_in_front(-row)) for row in held]
        return _HeldByTask(
            self, choices, task, np.stack(in_front).swapaxes(1, 2).copy(), held.sum(axis=1) * (1.0 - _ROUNDING)
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


class _HeldByTask(NamedTuple):
    """What the layers of a task hold, in any cell, and in all; see ``WayPrices``."""

    bound: BorderBound
    choices: LayerChoices
    task: FlushTask
    held: FloatArray
    held_at_all: FloatArray

    def priced(self, prices: PathPrices) -> WayPrices:
        """Returns the costs of ways in the task."""
        choices, task, positions = self.choices, self.task, self.task.most_stages
        cost_s = choices.least_s(prices, in_flight_at(task))[:, choices.of_vertex]
        border_s = np.zeros((positions, self.bound.cells.from_s.size))
        for q in range(1, positions):
            border_s[q] = self.bound.least_in_front(cost_s[q] - cost_s[q - 1])
        first_sync = np.append(np.cumsum(prices.sync[::-1])[::-1], 0.0)[1:]
        begin_s = float(cost_s[0].sum())
        return frozen(
            WayPrices(
                passes=prices.forward + prices.backward,
                room_s=prices.memory_s * task.most_memory_bytes,
                begin_s=begin_s - _TINY * abs(begin_s),
                border_s=border_s,
                first_s=first_sync[:, None] * self.bound.least_in_front(choices.least_sync_s()[choices.of_vertex]),
                held=self.held,
                held_at_all=self.held_at_all,
                often=np.array([often(task.schedule, task.microbatches, q + 1) for q in range(positions)], np.float64),
                microbatches=task.microbatches,
                stages=task.stages,
            )
        )


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
        starts = np.arange(0, from_s.size, _GROUP)
        none, ranges = starts.size, _ranges(from_s, to_s, starts)
        (tail_behind, tail_front), (head_behind, head_front) = (
            _first_cells(ends, *ranges) for ends in (self.tails, self.heads)
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


def _ranges(from_s: FloatArray, to_s: FloatArray, starts: IndexArray) -> tuple[FloatArray, FloatArray]:
    """Returns the least and the most work in front of borders of several cells each, inf and -inf if they have none."""
    return np.minimum.reduceat(from_s, starts), np.maximum.reduceat(
        np.where(np.isfinite(from_s), to_s, -np.inf), starts
    )


def _paid_by_stages(
    graph: LayerGraph,
    labelling: Labelling,
    stages: Labelling | None,
    own_s: FloatArray,
    edges: _Edges,
    ranges: tuple[FloatArray, FloatArray],
) -> FloatArray:
    """Returns ``BorderCells.stage_s``. ranges: the least and the most work in front of each group's borders.

    Stages are labelled on a grid of their own: for each two of its cells the least is kept that any stage between
    borders of these pays. Two groups have the least of all cells that share some work with them.
    """
    if stages is None:
        return np.zeros((ranges[0].size + 1,) * 2)
    steps, states = stages.moves.source.size, int(stages.moves.states.max())
    cells = int(min(_CELLS_OF_STAGES, (_MOST_FIGURES / states) ** 0.5, (_MOST_STEPS / steps) ** 0.5))
    cells_of, no_charges_s = cells_along(graph, own_s, cells), np.zeros((labelling.label.size, 0))
    from_s, to_s, _ = cheapest_borders(labelling.moves, labelling.in_front, cells_of, own_s, no_charges_s)
    charge_s = stages.charges.seconds(edges.in_s, edges.out_s)
    of_labels = cell_ranges(stages, cells_of, every_stage(cells_of, int(cells_of.sum())))
    by_inside_s = least_cost(stages, cells_of, charge_s, of_labels)
    behind = np.arange(from_s.size)
    inside = behind - behind[:, None]
    paid_s = np.where(inside >= 0, by_inside_s[behind[:, None], inside], np.inf) * (1.0 - _ROUNDING)
    shares = [
        (from_s * (1.0 - _ROUNDING) <= most_s) & (to_s * (1.0 + _ROUNDING) >= least_s)
        for least_s, most_s in zip(*ranges, strict=True)
    ]
    ends = np.eye(from_s.size, dtype=np.bool_)
    by_back = np.stack([paid_s[:, some].min(axis=1, initial=np.inf) for some in (*shares, ends[-1])])
    return np.stack([by_back[:, some].min(axis=1, initial=np.inf) for some in (*shares, ends[0])])


def downsets_with_cheap_borders(
    graph: LayerGraph, labelling: Labelling | None, tables: FlushTables, most: int
) -> BitArray | None:
    """Returns uint64[m, words]: the empty set, V, and a downset with the cheapest border for each of ``most`` equal
    shares of the work in front. None if no layer takes any time. labelling: of single borders; None: borders are those
    of a chain.

    Where layers may be on either side of a border at about the same cost, cheap borders of two shares may cross, and
    no stage is between them. So the unions of the downsets up to each share are there too, and the intersections from
    each share on: each of the two is a chain. What crosses their borders costs little: that of a union and that of an
    intersection cost no more than the two borders that they are made of.
    """
    every = np.arange(tables.option_start.shape[0])
    own_s = _least_work_s(tables, every)
    if not 0.0 < own_s.sum() < np.inf:
        return None
    paid_s = (tables.edge_in_s + tables.edge_out_s).min(axis=0)
    if labelling is None:
        least_s, bits = _borders_of_chain(graph, paid_s)
        shares = np.arange(most) * (own_s.sum() / most)
        starts = np.unique(np.searchsorted(np.cumsum(own_s), shares))
    else:
        cells = max(1, min(_CELLS_OF_SHARE * most, _MOST_CHOSEN // (graph.size * int(labelling.moves.states.max()))))
        charge_s = labelling.front_charges.seconds(np.zeros_like(paid_s), paid_s)
        cells_of = cells_along(graph, own_s, cells)
        least_s, bits = cheapest_downsets(labelling.moves, labelling.in_front, cells_of, charge_s)
        starts = np.unique(np.arange(most) * least_s.size // most)
    ends = np.append(starts[1:], least_s.size)
    chosen = [first + int(np.argmin(least_s[first:end])) for first, end in zip(starts, ends, strict=True)]
    few = bits[[c for c in chosen if least_s[c] < np.inf]][::-1]  # from the back
    none, every_one = np.zeros_like(bits[:1]), np.bitwise_or.reduce(bits, axis=0)[None]
    unions, shared = np.bitwise_or.accumulate(few), np.bitwise_and.accumulate(few[::-1])
    return np.unique(np.concatenate([none, few, unions, shared, every_one]), axis=0)


def _borders_of_chain(graph: LayerGraph, paid_s: FloatArray) -> tuple[FloatArray, BitArray]:
    """Returns what crosses the borders between the vertices of a chain, from the back, and inf, float64[n]; and their
    downsets and V, uint64[n, words]. paid_s: float64[e]."""
    changes = np.zeros(graph.size + 1)
    for (tail, head, _), edge_s in zip(graph.edges, paid_s.tolist(), strict=True):
        changes[head + 1] += edge_s
        changes[tail + 1] -= edge_s
    return np.append(np.cumsum(changes)[1:-1], np.inf), chain_lattice(graph, range(graph.size)).arrays.bits[1:]


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
