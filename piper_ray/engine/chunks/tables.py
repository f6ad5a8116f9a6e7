"""The arrays of one tensor-parallel degree: layers in an order, what they may run, and what every border costs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from piper_ray.cost.shares import HeldLayers
from piper_ray.cost.variants import Variant, fastest_first, least_by_passes
from piper_ray.engine.chunks.rank_transfers import RankTransfers
from piper_ray.engine.kernels.chunk_bound import APART, BEFORE_HUB, BEHIND_HUB, COLUMNS, FIGURE, HUB, LayerKinds
from piper_ray.engine.kernels.chunk_cuts import EdgesAlong
from piper_ray.engine.kernels.chunk_stages import OrderedLayers
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray, frozen
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import Lattice, build_lattice
from piper_ray.engine.lattice.labelling import SET_LABELS, Labelling
from piper_ray.engine.lattice.layer_graph import (
    LayerGraph,
    ancestors,
    build_graph,
    count_downsets,
    descendants,
    offsets,
    runs,
)
from piper_ray.model.instance import Edge, Instance, Tmpc
from piper_ray.simulate.stages import PassTimes, pass_times

_TRIES = 4
"""How many times as many orders are drawn as are wanted, because some are drawn more than once."""


def linear_orders(predecessors: Sequence[Sequence[int]], seconds: Sequence[float], most: int) -> list[IndexArray]:
    """Some orders, int64[n] each, all different: the layers by place. A chain has one order.

    First comes the order of the numbers themselves, then branch after branch in the sequence of numbers and its
    reverse, then all branches side by side, then branch after branch in random sequences. predecessors: those of each
    layer, with smaller numbers. seconds: of each layer.
    """
    if all(x - 1 in tails for x, tails in enumerate(predecessors) if x):
        return [np.arange(len(predecessors))]
    found: dict[bytes, IndexArray] = {}
    for tried, places in enumerate(_draws(predecessors, seconds)):
        order = np.array(places, np.int64)
        found.setdefault(order.tobytes(), order)
        if len(found) == most or tried == _TRIES * most:
            break
    return list(found.values())


def _draws(predecessors: Sequence[Sequence[int]], seconds: Sequence[float]) -> Iterator[list[int]]:
    n = len(predecessors)
    yield list(range(n))
    yield _branch_by_branch(predecessors, [float(x) for x in range(n)])
    yield _branch_by_branch(predecessors, [float(-x) for x in range(n)])
    yield _side_by_side(predecessors, seconds)
    draws = random.Random(0)
    while True:
        yield _branch_by_branch(predecessors, [draws.random() for _ in range(n)])


def _branch_by_branch(predecessors: Sequence[Sequence[int]], rank: Sequence[float]) -> list[int]:
    """Continues with a layer that the last one has made ready, if there is one; of several, with the one of the least
    rank."""
    n = len(predecessors)
    successors: list[list[int]] = [[] for _ in range(n)]
    for x, tails in enumerate(predecessors):
        for tail in tails:
            successors[tail].append(x)
    missing = [len(tails) for tails in predecessors]
    ready = sorted((x for x in range(n) if not missing[x]), key=rank.__getitem__, reverse=True)
    found = []
    while ready:
        x = ready.pop()
        found.append(x)
        for head in sorted(successors[x], key=rank.__getitem__, reverse=True):
            missing[head] -= 1
            if not missing[head]:
                ready.append(head)
    return found


def _side_by_side(predecessors: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[int]:
    """Orders layers by the part of the longest path through a layer that lies before it."""
    n = len(predecessors)
    before, behind = [0.0] * n, [0.0] * n
    for x in range(n):
        before[x] = max((before[tail] + seconds[tail] for tail in predecessors[x]), default=0.0)
    for x in reversed(range(n)):
        for tail in predecessors[x]:
            behind[tail] = max(behind[tail], behind[x] + seconds[x])
    part = [before[x] / max(before[x] + seconds[x] + behind[x], 1e-300) for x in range(n)]
    found: list[int] = []
    placed = 0
    for x in sorted(range(n), key=lambda x: (part[x], x)):  # where nothing takes any time, parts may be equal or worse
        if all(placed >> tail & 1 for tail in predecessors[x]):
            found.append(x)
            placed |= 1 << x
    return found if len(found) == n else list(range(n))


_MOST_DOWNSETS = 100_000
"""Larger lattices are not searched for borders; transfers across their borders count as nothing in bounds."""

_MOST_MOVES_OF_SETS = 500_000
"""Limit on the moves of labels of sets, over which sums are taken for each d."""

_MOST_ORDERS = 64

_MOST_VARIANTS = 62

_HUB_READERS = 3
"""A layer that fewer others read is not a hub."""


@dataclass(frozen=True)
class ModelOrder:
    """The layers front to back, in an order that edges run along.

    layers: ids by position. before, behind: int64[n], how many layers must come before and behind each.
    """

    instance: Instance
    graph: LayerGraph
    layers: tuple[int, ...]
    before: IndexArray
    behind: IndexArray

    @classmethod
    def of(cls, instance: Instance) -> ModelOrder:
        graph = build_graph(instance, without_contraction())
        behind, before = (
            np.array([mask.bit_count() for mask in reversed(of(graph.successors))], np.int64)
            for of in (descendants, ancestors)
        )
        return cls(instance, graph, tuple(reversed(graph.layer_ids)), before, behind)

    @property
    def size(self) -> int:
        return len(self.layers)

    @property
    def is_chain(self) -> bool:
        """Whether there is only one order along the edges."""
        return bool((self.before == np.arange(self.size)).all())

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the successors of each position."""
        n = self.size
        return tuple(tuple(sorted(n - 1 - v for v in heads)) for heads in reversed(self.graph.successors))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the predecessors of each position."""
        n = self.size
        return tuple(tuple(sorted(n - 1 - v for v in tails)) for tails in reversed(self.graph.predecessors))

    @cached_property
    def orders(self) -> list[IndexArray]:
        """Some orders along the edges, beginning with the order of positions itself."""
        rows = [self.instance.layer_by_id[layer].tmpcs.values() for layer in self.layers]
        seconds = [min(sum(pass_times(tmpc)) for tmpcs in row for tmpc in tmpcs) for row in rows]
        return linear_orders(self.predecessors, seconds, _MOST_ORDERS)

    @cached_property
    def position(self) -> dict[int, int]:
        return {layer: index for index, layer in enumerate(self.layers)}

    @cached_property
    def hub(self) -> int | None:
        """The layer from which several others read the most bytes; None if no layer is read by many."""
        readers: dict[int, list[float]] = {}
        for edge in self.instance.edges:
            if edge.communication_bytes > 0.0:
                readers.setdefault(edge.source, []).append(edge.communication_bytes)
        sizes = {layer: sum(sizes) for layer, sizes in readers.items() if len(sizes) >= _HUB_READERS}
        return max(sizes, key=lambda layer: (sizes[layer], -self.position[layer]), default=None)

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """For each position, how the layer lies relative to the hub."""
        if self.hub is None:
            return (APART,) * self.size
        reached = descendants(self.graph.successors)
        vertex = self.size - 1 - self.position[self.hub]
        found = []
        for x in range(self.size):
            v = self.size - 1 - x
            behind, before = reached[vertex] >> v & 1, reached[v] >> vertex & 1
            found.append(HUB if v == vertex else BEHIND_HUB if behind else BEFORE_HUB if before else APART)
        return tuple(found)

    @cached_property
    def downsets(self) -> int | None:
        """The number of downsets. None if there are too many to be counted."""
        return count_downsets(self.graph)

    @cached_property
    def lattice(self) -> Lattice | None:
        """The lattice. None if it is too large to be searched."""
        count = self.downsets
        return build_lattice(self.graph, count, count) if count is not None and count <= _MOST_DOWNSETS else None

    @cached_property
    def sets(self) -> Labelling | None:
        """Any sets of layers as labels; None if there are too many moves."""
        return Labelling.of(self.graph, SET_LABELS, _MOST_MOVES_OF_SETS)

    @cached_property
    def neighbouring(self) -> tuple[bool, ...]:
        """For each edge of the graph, whether it is not the hub's and no chunk can lie between the chunks of its ends,
        since chunks are not empty: by the edges all others come before its tail or behind its head."""
        graph, before, behind = self.graph, ancestors(self.graph.successors), descendants(self.graph.successors)
        return tuple(
            graph.layer_ids[tail] != self.hub
            and (before[tail] | behind[head] | 1 << tail | 1 << head).bit_count() == graph.size
            for tail, head, _ in graph.edges
        )


class EdgeSeconds(NamedTuple):
    """tail, head: positions. sent_s, received_s: the least time of their ranks in either direction, if the ranks
    differ."""

    tail: int
    head: int
    sent_s: float
    received_s: float


class _AlikeLayers(NamedTuple):
    """Kinds of layers. side: int64[kinds]. figures: of each kind's options. members: its positions, which ascend."""

    side: IndexArray
    figures: list[FloatArray]
    members: list[IndexArray]


@dataclass(frozen=True)
class DegreeTables:
    """One t, and what layers may run at it. tmpcs: for each position, the fastest first. like: for each position, the
    first position whose row is the same apart from the numbers of its neighbours."""

    order: ModelOrder
    degree: int
    tmpcs: tuple[tuple[Tmpc, ...], ...]
    like: tuple[int, ...]

    @classmethod
    def of(cls, order: ModelOrder, degree: int, variants: Iterable[Variant]) -> DegreeTables | None:
        """Makes the tables of what any of the variants allows. None if some layer may run nothing."""
        listed = list(variants)
        found, like = list[tuple[Tmpc, ...]](), list[int]()
        first: dict[object, int] = {}
        for position, layer in enumerate(order.layers):
            allowed = {tmpc.id: tmpc for variant in listed for tmpc in variant.tmpcs[layer]}
            if not allowed:
                return None
            like.append(first.setdefault((id(order.instance.layer_by_id[layer].priced), *allowed), position))
            if like[-1] == position:
                found.append(least_by_passes(allowed.values(), pass_times, 0))
            else:
                found.append(tuple(allowed[tmpc.id] for tmpc in found[like[-1]]))
        return cls(order, degree, tuple(found), tuple(like))

    @cached_property
    def passes(self) -> tuple[tuple[PassTimes, ...], ...]:
        own = {x: tuple(map(pass_times, self.tmpcs[x])) for x in set(self.like)}
        return tuple(own[x] for x in self.like)

    @cached_property
    def option_start(self) -> IndexArray:
        return offsets(len(row) for row in self.tmpcs)

    @cached_property
    def least_s(self) -> float:
        """The least seconds of all layers together, for one microbatch."""
        return sum(sum(row[0]) for row in self.passes)

    @cached_property
    def least_there_and_back_s(self) -> float:
        """The same without gradients of weights. Nothing waits for these where the backward pass is split."""
        return sum(min(seconds.forward_s + seconds.input_s for seconds in row) for row in self.passes)

    @cached_property
    def least_weights_bytes(self) -> float:
        return sum(min(tmpc.weights_bytes for tmpc in row) for row in self.tmpcs)

    @cached_property
    def least_activation_bytes(self) -> float:
        """The least activations of all layers together, for one microbatch."""
        return sum(min(tmpc.activation_bytes for tmpc in row) for row in self.tmpcs)

    def usual_border_s(self, stages: int) -> float:
        """About the time that a border between ranks takes on both sides for a microbatch: at most half of all borders
        take more, in either direction. If there is no lattice, the mean of one plan's borders, in both directions: with
        about as many layers in each stage."""
        if stages < 2:
            return 0.0
        if self.order.lattice is not None:
            return self._median_border_s
        if stages not in self._mean_border_s:
            tail, head, paid_s, crossing_s = self.along_order
            first = np.maximum(1, (2 * np.arange(stages - 1) + 1) * self.order.size // (2 * stages))
            least_s = np.minimum.reduceat(crossing_s, first)
            cheapest = np.flatnonzero(
                crossing_s[first[0] :] == np.repeat(least_s, np.diff(first, append=crossing_s.size))
            )
            cuts = cheapest[np.searchsorted(cheapest, first - first[0])] + first[0]
            chunk_of = np.searchsorted(cuts, np.arange(self.order.size), side="right")
            self._mean_border_s[stages] = 2.0 * float(paid_s[chunk_of[tail] != chunk_of[head]].sum()) / (stages - 1)
        return self._mean_border_s[stages]

    @cached_property
    def rank_transfers(self) -> RankTransfers | None:
        """What ranks send and receive; None for a chain, whose pieces tell more, and where that takes too long."""
        order, n = self.order, self.order.size
        sets = None if order.is_chain else order.sets
        if sets is None:
            return None
        work_s = np.array([sum(self.passes[n - 1 - v][0]) for v in range(n)])
        return RankTransfers.of(order.graph, sets, work_s, *self._graph_edge_s)

    @cached_property
    def _graph_edge_s(self) -> tuple[FloatArray, FloatArray]:
        """The least that each edge of the graph costs the chunk of its tail, and that of its head."""
        bandwidth = self.order.instance.bandwidth_bytes_per_s
        edges = [self.order.instance.edges[index] for _, _, index in self.order.graph.edges]
        sent = np.array([min(self._sent_bytes(edge)) for edge in edges], np.float64)
        return sent / bandwidth, np.array([min(self._received_bytes(edge)) for edge in edges], np.float64) / bandwidth

    @cached_property
    def _median_border_s(self) -> float:
        sent, received = self.border_s
        return float(np.median(sent[1:-1] + received[1:-1])) if self.order.size > 1 else 0.0

    @cached_property
    def _mean_border_s(self) -> dict[int, float]:
        """By the number of stages, as far as it was asked for."""
        return {}

    @cached_property
    def along_order(self) -> tuple[IndexArray, IndexArray, FloatArray, FloatArray]:
        """The positions of the edges' ends, and what both ranks pay, and float64[n], what they pay for all edges across
        the border in front of each position."""
        tail, head, sent_s, received_s = self._edge_arrays
        paid_s, n = sent_s + received_s, self.order.size
        begun_s, ended_s = (np.bincount(ends + 1, paid_s, n + 1)[:n] for ends in (tail, head))
        return tail, head, paid_s, np.cumsum(begun_s - ended_s)

    @cached_property
    def _edge_arrays(self) -> tuple[IndexArray, IndexArray, FloatArray, FloatArray]:
        """``edge_seconds`` by columns."""
        edges = self.edge_seconds
        tail, head = _integers(edge.tail for edge in edges), _integers(edge.head for edge in edges)
        seconds = np.array([(edge.sent_s, edge.received_s) for edge in edges], np.float64).reshape(-1, 2)
        return tail, head, seconds[:, 0].copy(), seconds[:, 1].copy()

    def edges_along(self, order: IndexArray, free: BoolArray) -> EdgesAlong:
        """The edges that cost something along an order of the positions. free: bool[edges], in the order of
        ``along_order``, those that cost nothing now."""
        tail, head, sent_s, received_s = self._edge_arrays
        sent_s, received_s = (np.where(free, 0.0, 2.0 * seconds) for seconds in (sent_s, received_s))
        n, place = self.order.size, np.empty(self.order.size, np.int64)
        place[order] = np.arange(n)
        tail, head = place[tail], place[head]
        by_head = np.argsort(head, kind="stable")
        begun_s, ended_s = (np.bincount(ends + 1, sent_s + received_s, n + 1) for ends in (tail, head))
        return EdgesAlong(
            offsets(np.bincount(head, minlength=n).tolist()),
            tail[by_head],
            sent_s[by_head],
            received_s[by_head],
            np.bincount(tail, sent_s, n).astype(np.float64),
            np.cumsum(begun_s - ended_s),
        )

    def least_fixed_bytes(self, data_parallel_degree: int) -> float:
        """The least fixed bytes of all layers together."""
        own, shared_bytes = self._own_figures
        starts = self.option_start.tolist()
        least = {
            x: (own[first:end, FIGURE.fixed] + shared_bytes[first:end] / data_parallel_degree).min()
            for x, first, end in ((x, starts[x], starts[x + 1]) for x in set(self.like))
        }
        return float(sum(least[x] for x in self.like))

    def held_layers(self, data_parallel_degree: int, microbatches: int, sync_of_byte_s: float) -> HeldLayers:
        """The layers for a bound on a batch with this number of microbatches for each replica. sync_of_byte_s: seconds
        for each byte of a rank's weights."""
        alike = self._alike(data_parallel_degree)
        rows = [np.frombuffer(options).reshape(-1, len(FIGURE)) for _, options in alike]
        seconds = [
            (microbatches * row[:, :3].sum(axis=1)).min() + sync_of_byte_s * row[:, FIGURE.weights].min()
            for row in rows
        ]
        fixed, activation = np.full((2, len(rows), max(map(len, rows))), np.inf)
        for kind, row in enumerate(rows):
            fixed[kind, : len(row)], activation[kind, : len(row)] = row[:, FIGURE.fixed], row[:, FIGURE.activation]
        return HeldLayers(np.array([len(x) for x in alike.values()], float), np.array(seconds), fixed, activation)

    def figures(self, data_parallel_degree: int) -> FloatArray:
        """The figures of all options, float64[options, COLUMNS]."""
        own, shared_bytes = self._own_figures
        found = own.copy()
        found[:, FIGURE.fixed] += shared_bytes / data_parallel_degree
        return found

    @cached_property
    def _own_figures(self) -> tuple[FloatArray, FloatArray]:
        """``figures`` without what replicas share, which is float64[options]."""
        own = {x: self._figures_at(x) for x in set(self.like)}
        found, shared_bytes = (np.concatenate([own[x][part] for x in self.like]) for part in (0, 1))
        return found, shared_bytes

    def _figures_at(self, position: int) -> tuple[FloatArray, FloatArray]:
        row = self.tmpcs[position]
        found = np.zeros((len(row), COLUMNS))
        found[:, :3] = self.passes[position]
        for column, name in (
            (FIGURE.weights, "weights_bytes"),
            (FIGURE.activation, "activation_bytes"),
            (FIGURE.fixed, "fixed_bytes"),
        ):
            found[:, column] = [getattr(tmpc, name) for tmpc in row]
        return found, np.array([tmpc.shared_bytes for tmpc in row])

    def layers(self, data_parallel_degree: int) -> OrderedLayers:
        """The layers with the figures of this degree."""
        return frozen(self._layers._replace(figures=self.figures(data_parallel_degree)))

    @cached_property
    def _layers(self) -> OrderedLayers:
        """``layers`` without what replicas share."""
        instance, position = self.order.instance, self.order.position
        bandwidth = instance.bandwidth_bytes_per_s
        edges = [edge for edge in instance.edges if self._costs(edge)]
        charge_s: list[float] = []
        tail_charge, head_charge = [], []
        for edge in edges:
            tail_charge.append(len(charge_s))
            charge_s += [size / bandwidth for size in self._sent_bytes(edge)]
            head_charge.append(len(charge_s))
            charge_s += [size / bandwidth for size in self._received_bytes(edge)]
        ends = [sorted(position[layer] for layer in tensor.layers) for tensor in instance.tensors]
        return frozen(
            OrderedLayers(
                self.option_start,
                *runs(self.order.successors),
                *runs(self.order.predecessors),
                self._own_figures[0],
                _integers(position[edge.source] for edge in edges),
                _integers(position[edge.target] for edge in edges),
                _integers(tail_charge),
                _integers(head_charge),
                np.array(charge_s, np.float64),
                *runs(ends),
                np.array([tensor.forward_bytes / bandwidth for tensor in instance.tensors], np.float64),
                np.array([tensor.backward_bytes / bandwidth for tensor in instance.tensors], np.float64),
            )
        )

    def _costs(self, edge: Edge) -> bool:
        return any((*self._sent_bytes(edge), *self._received_bytes(edge)))

    def _sent_bytes(self, edge: Edge) -> list[float]:
        """The bytes sent in either direction in the chunk of the edge's tail, for each option of the tail."""
        row = self.tmpcs[self.order.position[edge.source]]
        return [edge.communication_bytes + tmpc.backward_sync_bytes.get(edge.target, 0.0) for tmpc in row]

    def _received_bytes(self, edge: Edge) -> list[float]:
        row = self.tmpcs[self.order.position[edge.target]]
        return [edge.communication_bytes + tmpc.forward_sync_bytes.get(edge.source, 0.0) for tmpc in row]

    @cached_property
    def edge_seconds(self) -> list[EdgeSeconds]:
        """The seconds of the edges that cost something."""
        position, bandwidth = self.order.position, self.order.instance.bandwidth_bytes_per_s
        return [
            EdgeSeconds(
                position[edge.source],
                position[edge.target],
                min(self._sent_bytes(edge)) / bandwidth,
                min(self._received_bytes(edge)) / bandwidth,
            )
            for edge in self.order.instance.edges
            if self._costs(edge)
        ]

    @cached_property
    def border_s(self) -> tuple[FloatArray, FloatArray]:
        """The least that a border makes the chunk before it send, and the chunk behind it receive, in either direction.

        float64[n + 1] each, by the number of layers behind the border. Only edges between whose ends no chunk can lie
        are counted.
        """
        n = self.order.size
        sent, received = np.full(n + 1, np.inf), np.full(n + 1, np.inf)
        lattice = self.order.lattice
        if lattice is None:
            return np.zeros(n + 1), np.zeros(n + 1)
        out_s, in_s = (of_edge_s * np.array(self.order.neighbouring) for of_edge_s in self._graph_edge_s)
        start = lattice.arrays.crossing_start
        sizes = np.repeat(np.arange(lattice.levels), np.diff(lattice.arrays.level_start))
        for least, charge in ((sent, out_s), (received, in_s)):
            sums = np.concatenate([[0.0], np.cumsum(charge[lattice.arrays.crossing])])
            np.minimum.at(least, sizes, np.maximum(0.0, sums[start[1:]] - sums[start[:-1]]))
        return sent * (1.0 - 1e-12), received * (1.0 - 1e-12)

    def crossing_s(self, rank_of: IndexArray) -> FloatArray:
        """float64[2, s]: the least that each chunk sends, and receives, in either direction."""
        s, n = rank_of.size, self.order.size
        sent, received = self.border_s
        found = np.zeros((2, s))
        for k in range(s - 1):  # the border between chunks k and k + 1
            if rank_of[k] != rank_of[k + 1]:
                sizes = slice(s - 1 - k, n - k)
                found[0, k] = sent[sizes].min()
                found[1, k + 1] = received[sizes].min()
        return found

    @cached_property
    def _further_s(self) -> FloatArray:
        """float64[2, options]: what the option of a layer at a border makes its chunk send, and receive, beyond the
        least in either direction. inf: no edge between whose ends no chunk can lie begins, or ends, at the layer."""
        order, bandwidth = self.order, self.order.instance.bandwidth_bytes_per_s
        found = np.full((2, int(self.option_start[-1])), np.inf)
        for (_, _, index), near in zip(order.graph.edges, order.neighbouring, strict=True):
            edge = order.instance.edges[index]
            ends = (edge.source, self._sent_bytes(edge)), (edge.target, self._received_bytes(edge))
            for row, (layer, size) in zip(found, ends if near else (), strict=False):
                first, end = self.option_start[order.position[layer] :][:2]
                if min(size) > 0.0:
                    row[first:end] = np.minimum(row[first:end], (np.array(size) - min(size)) / bandwidth)
        return found

    def further_s(self, rank_of: IndexArray, members: Sequence[IndexArray]) -> FloatArray:
        """float64[2, s, options of kinds]: each chunk sends, and receives, beyond ``crossing_s`` as much as the entry
        of some layer in it with its option; inf: that layer cannot be the one at the border. members: the positions of
        each kind.

        Between the ends of an edge that crosses a border which surely costs something, no chunk lies.
        """
        starts = self.option_start
        rows = [
            np.min([self._further_s[:, starts[x] : starts[x + 1]] for x in positions], axis=0) for positions in members
        ]
        return np.where(self.crossing_s(rank_of)[..., None] > 0.0, np.concatenate(rows, axis=1)[:, None], 0.0)

    def windows(self, stages: int) -> IndexArray:
        """int64[n, 2]: for each position the first and the last of this many chunks that the layer may be in.

        A layer is in chunk k only if enough other layers are left for the chunks behind k: all but it and those before
        it. The same holds the other way round. No chunk is empty.
        """
        n, last = self.order.size, stages - 1
        first_chunk = np.maximum(0, last - (n - 1 - self.order.before))
        last_chunk = np.minimum(last, n - 1 - self.order.behind)
        return np.stack([first_chunk, last_chunk], axis=1).astype(np.int64)

    def kinds(self, data_parallel_degree: int, stages: int, *, merged: bool) -> tuple[LayerKinds, list[IndexArray]]:
        """Groups of layers that may be in the same chunks and run the same, and their positions, which ascend. merged:
        groups them for any chunks that they may be in."""
        alike = self._alike_kinds(data_parallel_degree)
        positions = np.concatenate(alike.members)
        windows, sizes = self.windows(stages)[positions], np.array([one.size for one in alike.members])
        if merged:
            start = np.cumsum(sizes) - sizes
            first, last = np.minimum.reduceat(windows[:, 0], start), np.maximum.reduceat(windows[:, 1], start)
            return self._kinds_in(alike, np.arange(sizes.size), sizes, first, last), [*alike.members]
        rows = np.column_stack([np.repeat(np.arange(sizes.size), sizes), windows])
        each, row_of, sizes = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
        by_row = positions[np.argsort(row_of.ravel(), kind="stable")]
        members = [by_row[start:end] for start, end in pairwise(offsets(sizes.tolist()).tolist())]
        kind, first, last = each.T.copy()
        return self._kinds_in(alike, kind, sizes, first, last), members

    @staticmethod
    def _kinds_in(
        alike: _AlikeLayers, kind: IndexArray, layers: IndexArray, first_chunk: IndexArray, last_chunk: IndexArray
    ) -> LayerKinds:
        """Some of each of these kinds of layers, in these chunks."""
        options = [alike.figures[n] for n in kind.tolist()]
        start = offsets(map(len, options))
        return LayerKinds(
            layers,
            np.ones(kind.size, np.int64),
            first_chunk,
            last_chunk,
            alike.side[kind],
            start,
            np.concatenate(options),
            np.zeros(int(start[-1])),
        )

    def _alike_kinds(self, data_parallel_degree: int) -> _AlikeLayers:
        if data_parallel_degree not in self._alike_kinds_of:
            alike = self._alike(data_parallel_degree)
            self._alike_kinds_of[data_parallel_degree] = _AlikeLayers(
                _integers(side for side, _ in alike),
                [np.frombuffer(options).reshape(-1, len(FIGURE)) for _, options in alike],
                [np.array(listed, np.int64) for listed in alike.values()],
            )
        return self._alike_kinds_of[data_parallel_degree]

    @cached_property
    def _alike_kinds_of(self) -> dict[int, _AlikeLayers]:
        return {}

    def _alike(self, data_parallel_degree: int) -> dict[tuple[int, bytes], list[int]]:
        """By side and options, the positions, which ascend."""
        if data_parallel_degree not in self._alike_of:
            found: dict[tuple[int, bytes], list[int]] = {}
            for (side, options, shared_bytes), positions in self._alike_of_any.items():
                figures = np.frombuffer(options).reshape(-1, len(FIGURE)).copy()
                figures[:, FIGURE.fixed] += np.frombuffer(shared_bytes) / data_parallel_degree
                found.setdefault((side, figures.tobytes()), []).extend(positions)
            self._alike_of[data_parallel_degree] = {key: sorted(positions) for key, positions in found.items()}
        return self._alike_of[data_parallel_degree]

    @cached_property
    def _alike_of(self) -> dict[int, dict[tuple[int, bytes], list[int]]]:
        return {}

    @cached_property
    def _alike_of_any(self) -> dict[tuple[int, bytes, bytes], list[int]]:
        """By side, by options without what replicas share, and by what replicas share: the positions."""
        own, shared_bytes = self._own_figures
        figures = np.zeros((len(own), len(FIGURE)))
        figures[:, :COLUMNS] = own
        self._charge_hub(figures)
        found: dict[tuple[int, bytes, bytes], list[int]] = {}
        for x, (first, end) in enumerate(pairwise(self.option_start.tolist())):
            key = self.order.sides[x], figures[first:end].tobytes(), shared_bytes[first:end].tobytes()
            found.setdefault(key, []).append(x)
        return found

    def _charge_hub(self, figures: FloatArray) -> None:
        """Writes what each option pays for the hub's edge to its layer."""
        bandwidth = self.order.instance.bandwidth_bytes_per_s
        for edge in self.order.instance.edges:
            if edge.source == self.order.hub:
                x = self.order.position[edge.target]
                options = slice(int(self.option_start[x]), int(self.option_start[x + 1]))
                figures[options, FIGURE.from_hub_s] += np.array(self._received_bytes(edge)) / bandwidth
                figures[options, FIGURE.to_hub_s] += min(self._sent_bytes(edge)) / bandwidth


@dataclass(frozen=True)
class MixedTables:
    """What chunks may run where each chunk chooses a variant for itself, the same one for all of its layers.

    count: the number of variants. variants: int64[options of ``tables``], a bit for each; None if there are too many
    variants for that.
    """

    tables: DegreeTables
    count: int
    variants: IndexArray | None

    @classmethod
    def of(cls, order: ModelOrder, degree: int, variants: Sequence[Variant]) -> MixedTables:
        """Makes the tables for these variants; every layer may run something in one of them."""
        rows: list[tuple[Tmpc, ...]] = []
        bits: list[int] = []
        for layer in order.layers:
            found: dict[str, tuple[Tmpc, int]] = {}
            for index, variant in enumerate(variants):
                for tmpc in least_by_passes(variant.tmpcs[layer], pass_times, 0):
                    found[tmpc.id] = tmpc, found.get(tmpc.id, (tmpc, 0))[1] | 1 << index
            listed = sorted(found.values(), key=lambda one: fastest_first(one[0], pass_times))
            rows.append(tuple(tmpc for tmpc, _ in listed))
            bits += [mask for _, mask in listed]
        masks = _integers(bits) if len(variants) <= _MOST_VARIANTS else None
        return cls(DegreeTables(order, degree, tuple(rows), tuple(range(order.size))), len(variants), masks)

    @classmethod
    def of_one(cls, tables: DegreeTables) -> MixedTables:
        """Makes the tables for a single variant."""
        return cls(tables, 1, np.ones(int(tables.option_start[-1]), np.int64))


def _integers(values: Iterable[int]) -> IndexArray:
    return np.array(list(values), np.int64)
