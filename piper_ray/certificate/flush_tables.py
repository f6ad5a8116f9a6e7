"""The choices of layers at one d and t, from the instance alone: by layer, and over all tails of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product

import numpy as np

from piper_ray.certificate.certificate import PassPrices, StageWay, Tails
from piper_ray.certificate.flush_kinds import AlikeRanks, PlacedWays, alike_ranks
from piper_ray.certificate.kernels.downsets import Floats, Ints, sums_over
from piper_ray.certificate.kernels.flush_mixes import units_of
from piper_ray.certificate.kernels.flush_stages import SUM, FlushShape, StageTables
from piper_ray.certificate.kernels.flush_states import PositionPrices
from piper_ray.certificate.passes import KINDS, PassCounts, PassGraph
from piper_ray.certificate.tables import (
    MARGIN_BYTES,
    MARGIN_S,
    ChoiceTable,
    Vertices,
    choice_table,
    downsets_of,
    least_charge_bytes,
    tensors_of,
)
from piper_ray.model.errors import CertificateRefused
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms
from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.stages import pass_times

FIGURES = 6
"""Number of figures of a choice: seconds forward, of gradients of inputs, of gradients of weights, and of
synchronisation; bytes for each microbatch in flight, and once."""

_EPSILON = 2.0**-52
_WHOLE_BACKWARD = frozenset({ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS})
"""Schedules with chunks whose backward passes are not split."""

_SUMS_OFF = 1e-12
"""Relative error allowed in sums of layers' figures: far more than there is."""

_NO_TIME = 1e-18


@dataclass(frozen=True)
class OnDegrees:
    """All plans of one d, and one t on each kind of devices. ways: those in which their stages may run. layers: ids,
    each after what it hands anything to. ranks_of_kind: by kind of devices. sync_s_per_byte: by the kind of a stage's
    devices."""

    instance: Instance
    schedule: Schedule
    data_parallel_degree: int
    degrees: tuple[int, ...]
    ways: tuple[StageWay, ...]
    layers: tuple[int, ...]
    ranks_of_kind: tuple[AlikeRanks, ...]
    sync_s_per_byte: Mapping[str, float]

    @property
    def microbatches(self) -> int:
        return self.instance.microbatches // self.data_parallel_degree

    @property
    def has_kinds(self) -> bool:
        """Whether devices are of several kinds, for which there are no prices."""
        return len(self.degrees) > 1

    @property
    def most_of_kind(self) -> tuple[int, ...]:
        """The largest number of ranks on each kind of devices."""
        return tuple(x.stages[-1] for x in self.ranks_of_kind)

    @property
    def most_ranks(self) -> int:
        return min(sum(self.most_of_kind), len(self.layers) // self.schedule.v)

    @property
    def memory_bytes(self) -> float:
        """The memory of a device; the largest if there are several kinds."""
        return max(self.memory_of_kind)

    @property
    def memory_of_kind(self) -> tuple[float, ...]:
        return tuple(own.memory_bytes * (1.0 + MARGIN_BYTES) for own in self.instance.cluster.alike)

    @cached_property
    def share_of_kind(self) -> Floats:
        """float64[kinds]: the value of a second on a kind, as a share of the time of all layers that it can run."""
        found = []
        for name in self.instance.cluster.kind_names:
            rows = [
                [sum(self.row(x)[:3]) for w in self.ways if w.kind == name for x in w.tmpcs[v]] for v in self.layers
            ]
            found.append(1.0 / (sum(min(row) for row in rows if row) or 1.0))
        return np.array(found)

    @cached_property
    def least_share(self) -> Floats:
        """float64[layers]: the least share of each layer on any kind."""
        number = {name: g for g, name in enumerate(self.instance.cluster.kind_names)}
        share = {way.kind: float(self.share_of_kind[number[way.kind]]) for way in self.ways}
        return np.array(
            [
                min(sum(self.row(x)[:3]) * share[w.kind] for w in self.ways for x in w.tmpcs[layer])
                for layer in self.layers
            ]
        )

    def on_kind(self, layer: int, kind: str) -> OnDegrees:
        """Returns the plans that have a layer on one kind of devices."""
        ways = tuple(x if x.kind == kind else replace(x, tmpcs={**x.tmpcs, layer: ()}) for x in self.ways)
        return replace(self, ways=ways)

    def row(self, tmpc: Tmpc) -> tuple[float, ...]:
        """Returns the figures of a TMPC."""
        passes = pass_times(tmpc)
        return (
            passes.forward_s,
            passes.input_s,
            passes.weight_s,
            tmpc.weights_bytes * self.sync_s_per_byte[tmpc.kind],
            tmpc.activation_bytes,
            tmpc.fixed_bytes + tmpc.shared_bytes / self.data_parallel_degree,
        )

    def stage_row(self, tmpc: Tmpc) -> tuple[float, ...]:
        """Returns the figures of a TMPC with an unsplit backward pass."""
        forward_s, input_s, weight_s, *others = self.row(tmpc)
        return forward_s, input_s + weight_s, *others

    @cached_property
    def rows(self) -> tuple[Floats, ...]:
        """float64[choices, FIGURES] for each layer, over all ways."""
        return tuple(
            np.array([self.row(x) for way in self.ways for x in way.tmpcs[layer]], np.float64).reshape(-1, FIGURES)
            for layer in self.layers
        )

    @property
    def is_possible(self) -> bool:
        """Whether each layer has a choice, and there are devices for a rank."""
        return self.most_ranks >= 1 and all(rows.shape[0] > 0 for rows in self.rows)

    @cached_property
    def work_s(self) -> float:
        """The least forward and backward seconds of all layers, for one microbatch."""
        return sum(float(rows[:, :3].sum(axis=1).min()) for rows in self.rows) * (1.0 - _SUMS_OFF)

    @cached_property
    def least_s(self) -> float:
        """A time that no batch is below, for any memory."""
        if self.schedule.name not in (ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE):
            once = slice(0, 3 if self.schedule.name in _WHOLE_BACKWARD else 2)
            once_s = sum(float(rows[:, once].sum(axis=1).min()) for rows in self.rows) * (1.0 - _SUMS_OFF)
            return max(once_s, self.work_s * self.microbatches / self.most_ranks)
        share = float(self.least_share.sum() / (np.array(self.most_of_kind) @ self.share_of_kind))
        return max(self.work_s * (1.0 + 1.0 / float(self.room[-1])), self.microbatches * share) * (1.0 - _SUMS_OFF)

    @cached_property
    def room(self) -> Floats:
        """float64[most_ranks + 1]: see ``FlushShape``.

        The path through a stage includes all stages' t once, those in front on the way in and out. Under gpipe it adds
        m - 1 times the stage: batch >= sum t + (m - 1) t_j, as max f + max b is no less than t_j. Under 1f1b, with w =
        min(m, q + 1), it adds m - w times the stage itself; and twice it may either go to the last stage, or stay for w
        - 1 more forward or backward passes. Going to the last stage once gives sum t; the other time max((w - 1) f_j,
        (w - 1) b_j) is at least half of (w - 1) t_j. So batch >= sum t + (m - w + (w - 1) / 2) t_j = sum t + (m - 1 -
        (w - 1) / 2) t_j.
        """
        m, q = self.microbatches, np.arange(self.most_ranks)
        more = m - 1.0 - (np.zeros(q.size) if self.schedule.name is ScheduleName.GPIPE else np.minimum(q, m - 1) / 2.0)
        return np.append(0.0, np.cumsum(1.0 / np.maximum(more, _NO_TIME)))


def pairs_of(
    instance: Instance, schedule: Schedule, step: StepTerms, ways: Sequence[StageWay], degrees: Iterable[int]
) -> list[OnDegrees]:
    """Yields the plans for each d and t that a plan may have, or t of each kind of devices; t is 0 for a kind without
    stages."""
    layers, found = _after_successors(instance), []
    names, own = instance.cluster.kind_names, instance.cluster.alike
    for d in sorted(degrees):
        able = [way for way in ways if d in way.data_parallel_degrees]
        choices = [
            sorted({way.degree for way in able if way.kind == name and d * way.degree <= x.devices}) or [0]
            for name, x in zip(names, own, strict=True)
        ]
        for each in product(*choices):
            of_kind = dict(zip(names, each, strict=True))
            used = tuple(way for way in able if way.degree == of_kind[way.kind])
            parts = []
            for g, t in enumerate(each) if used else ():
                most = min(own[g].devices // (d * t), len(layers) // schedule.v) if t > 0 else 0
                parts.append(alike_ranks(instance.cluster, g, schedule, d, t, most))
            for ranks in product(*parts) if used else ():
                sync = {
                    name: _sync_s_per_byte(step, d, x.ring_bytes_per_s) for name, x in zip(names, ranks, strict=True)
                }
                found.append(OnDegrees(instance, schedule, d, each, used, layers, ranks, sync))
    return found


def _sync_s_per_byte(step: StepTerms, d: int, ring_bytes_per_s: float) -> float:
    """Seconds for each byte to synchronise a stage's replicas."""
    return step.all_reduce.factor * (1.0 - step.all_reduce_overlap) * (d - 1) / (d * ring_bytes_per_s)


def _after_successors(instance: Instance) -> tuple[int, ...]:
    left = {layer.id: 0 for layer in instance.layers}
    before: dict[int, list[int]] = {v: [] for v in left}
    for edge in instance.edges:
        left[edge.source] += 1
        before[edge.target].append(edge.source)
    ready = [-v for v, count in left.items() if count == 0]
    heapify(ready)
    found = []
    while ready:
        found.append(-heappop(ready))
        for u in before[found[-1]]:
            left[u] -= 1
            if left[u] == 0:
                heappush(ready, -u)
    return tuple(found)


@dataclass(frozen=True)
class StagePrices:
    """Prices of the figures of a choice at each stage, front to back: float64[FIGURES, stages]. room_s: float64[ranks],
    the price of the memory of each rank, to be subtracted."""

    of_figures: Floats
    room_s: Floats

    @classmethod
    def of(cls, pair: OnDegrees, prices: PassPrices, known: PassGraph | None = None) -> StagePrices:
        """Computes the prices. Raises CertificateRefused for invalid paths and negative prices. known: the graph of
        passes, if it exists.

        Weights are divided by their sum, which gives a mean of paths. Each path is a bound.
        """
        if prices.ranks * pair.microbatches * pair.schedule.v > MOST_PASSES:
            raise CertificateRefused("a path of the certificate is through more passes than are looked at")
        graph = known or PassGraph(pair.schedule, prices.ranks, pair.microbatches)
        weights = np.array([weight for weight, _ in prices.paths], np.float64)
        if not (weights.size and np.isfinite(weights).all() and weights.min() >= 0.0 and weights.sum() > 0.0):
            raise CertificateRefused("the weights of a certificate's paths are no weights")
        walked = [graph.walked(walk) for _, walk in prices.paths]
        shares = weights / weights.sum() * (1.0 - _SUMS_OFF)
        mean = PassCounts(
            np.tensordot(shares, np.stack([x.passes for x in walked]), 1),
            shares @ np.stack([x.sync for x in walked]),
        )
        return cls(*priced_figures(pair, graph, mean, prices.memory))

    @property
    def of_memory_alone(self) -> StagePrices:
        """Returns the prices without those of seconds."""
        of_figures = self.of_figures.copy()
        of_figures[:4] = 0.0
        return StagePrices(of_figures, self.room_s)


MOST_PASSES = 2_000_000
"""Largest number of passes of a batch through which paths are followed."""


def priced_figures(
    pair: OnDegrees, graph: PassGraph, mean: PassCounts, memory: Sequence[tuple[int, int, float]]
) -> tuple[Floats, Floats]:
    """Returns the prices of figures. memory: rank, place in its list, seconds per byte at that pass."""
    found, room_s = np.zeros((FIGURES, graph.stages)), np.zeros(graph.ranks)
    by_kind = mean.passes
    found[0] = by_kind[:, ActionKind.F]
    found[1] = by_kind[:, ActionKind.I] + by_kind[:, ActionKind.B]
    found[2] = by_kind[:, ActionKind.W] + by_kind[:, ActionKind.B]
    found[3] = mean.sync[graph.rank_of]
    assert by_kind.shape[1] == KINDS
    for rank, place, price in memory:
        if not (
            0 <= rank < graph.ranks and 0 <= place < graph.start[rank + 1] - graph.start[rank] and 0.0 <= price < np.inf
        ):
            raise CertificateRefused("the certificate prices the memory of no pass, or below 0")
        held = graph.held[graph.start[rank] + place]
        for chunk, stage in enumerate(pair.schedule.stages_of_rank(rank, graph.ranks)):
            found[4, stage] += price * held[chunk]
            found[5, stage] += price
        room_s[rank] += price * pair.memory_bytes
    if not (np.isfinite(found).all() and np.isfinite(room_s).all()):
        raise CertificateRefused("a price of the certificate is no number")
    return found, room_s


def least_priced_s(pair: OnDegrees, prices: StagePrices) -> float:
    """Returns a lower bound on a batch: each layer where it costs least, minus the price of all memory."""
    of_layers = sum(float((rows @ prices.of_figures).min()) for rows in pair.rows)
    room_s = float(prices.room_s.sum())
    return of_layers - room_s - _SUMS_OFF * (of_layers + room_s)


class FlushTails:
    """The downsets of an instance's layers. Raises LimitError if there are more than ``most``."""

    def __init__(self, instance: Instance, layers: tuple[int, ...], most: int) -> None:
        nothing = np.zeros(0, np.int64)
        tails = Tails(instance.devices, layers, {}, np.zeros((0, 0), np.uint8), nothing, nothing)
        self._instance = instance
        self.vertices = Vertices.of(instance, tails)
        self._bits, self._parent, self._added = downsets_of(self.vertices, most)
        self.size = int(self._bits.shape[0])
        self._tensors, self._tensor_bytes = tensors_of(instance, self.vertices)

    def _sums(self, values: Floats) -> Floats:
        return np.asarray(sums_over(self._parent, self._added, np.ascontiguousarray(values)))

    def of(self, pair: OnDegrees) -> tuple[StageTables, Ints, tuple[int, ...]]:
        """Returns the tables for these degrees, the order of the downsets in them, and the open ends
        (``flush_kinds``)."""
        vertices = self.vertices
        borders, d = [x.borders for x in pair.ranks_of_kind], pair.data_parallel_degree
        placed = PlacedWays.of(self._instance, vertices, pair.ways, borders, d)
        ways, n, edges = len(pair.ways), len(vertices.layers), len(vertices.edges)
        choices = choice_table(self._instance, vertices, pair.ways, pair.stage_row)
        in_bytes, out_bytes = least_charge_bytes(vertices, choices)
        tensor_s = self._tensor_bytes / placed.tensor_rate[:, None]
        least = np.array([[_least_of(choices, r, v) for v in range(n)] for r in range(ways)])
        sums = np.stack([np.stack([self._sums(column) for column in of_way.T], axis=1) for of_way in least])
        own_s = self._sums(np.array([rows[:, :3].sum(axis=1).min() for rows in pair.rows]))
        own_f = self._sums(np.array([rows[:, 0].min() for rows in pair.rows]))
        own_share = self._sums(pair.least_share)
        order = np.lexsort((np.bitwise_count(self._bits).sum(axis=1), own_s))
        terms = 8.0 * (n + 2 * edges + 2) * _EPSILON
        rounding = terms * least.sum(axis=1)
        rounding[:, [SUM.mixed, SUM.missing]] = 0.0
        whole_s, whole_f, whole_share = own_s.max(), own_f.max(), own_share.max()
        tables = StageTables(
            bits=np.ascontiguousarray(self._bits[order]),
            own_s=np.ascontiguousarray(own_s[order]),
            kind=placed.kind,
            behind=placed.behind,
            ahead=placed.ahead,
            memory_bytes=np.array(pair.memory_of_kind)[placed.kind],
            sums=np.ascontiguousarray(sums[placed.way][:, order]),
            rounding=rounding[placed.way],
            tail=np.array([u for u, _ in vertices.edges], np.int64),
            head=np.array([v for _, v in vertices.edges], np.int64),
            in_rate=placed.in_rate,
            out_rate=placed.out_rate,
            in_s=in_bytes[placed.way] / placed.in_rate,
            out_s=out_bytes[placed.way] / placed.out_rate,
            tensors=self._tensors,
            tensor_forward_s=np.ascontiguousarray(tensor_s[:, 0]),
            tensor_backward_s=np.ascontiguousarray(tensor_s[:, 1]),
            start=choices.start[placed.way],
            choices=choices.figures,
            charge_start=choices.charge_start,
            charge_bytes=choices.charge_bytes,
            edge_start=choices.edge_start,
            edge=choices.edge,
            ahead_s=np.maximum(0.0, whole_s - own_s[order] - terms * whole_s),
            ahead_f=np.maximum(0.0, whole_f - own_f[order] - terms * whole_f),
            ahead_share=np.maximum(0.0, whole_share - own_share[order] - terms * whole_share),
        )
        return tables, order, tuple(v for _, v in placed.open_ends)

    def priced(self, pair: OnDegrees, prices: StagePrices | None, order: Ints) -> PositionPrices:
        """Returns the prices of positions, which count stages from the back."""
        if prices is None:
            none, downsets = np.zeros(pair.most_ranks), order.size
            nothing = np.zeros((downsets, none.size + 1))
            return PositionPrices(none, none, none, none, nothing[:, 1:].copy(), nothing)
        of_figures, room_s = prices.of_figures[:, ::-1], prices.room_s[::-1].copy()
        positions = room_s.size
        cost = np.stack([(rows @ of_figures).min(axis=0) for rows in pair.rows])
        ahead = np.minimum.accumulate(cost[:, ::-1], axis=1)[:, ::-1]
        inside = np.stack([self._sums(column)[order] for column in cost.T], axis=1)
        behind = np.stack([self._sums(column)[order] for column in ahead.T], axis=1)
        rooms_s = np.append(np.cumsum(room_s[::-1])[::-1], 0.0)
        off_s = _SUMS_OFF * (float(ahead[:, 0].sum()) + float(cost.max(axis=1).sum()) + float(rooms_s[0]))
        left = np.zeros((inside.shape[0], positions + 1))
        whole = np.bitwise_count(self._bits[order]).sum(axis=1) == len(pair.layers)
        left[:, :positions] = behind[whole] - behind - rooms_s[:-1] - 2.0 * off_s
        left[:, positions] = np.where(whole, -2.0 * off_s, np.inf)
        return PositionPrices(
            forward=of_figures[0].copy(),
            # B is an I and a W; if both have the same cost, there is one price.
            backward=np.minimum(of_figures[1], of_figures[2]),
            sync=of_figures[3].copy(),
            room_s=room_s,
            of_layers=np.ascontiguousarray(inside),
            ahead_s=left,
        )


def shape_of(pair: OnDegrees, limit_s: float) -> FlushShape:
    """Returns the shape of plans that take at most the limit."""
    borders = np.zeros((len(pair.degrees), max(pair.most_of_kind) + 1), np.int64)
    for row, x in zip(borders, pair.ranks_of_kind, strict=True):
        row[: len(x.borders)] = x.borders
    return FlushShape(
        gpipe=pair.schedule.name is ScheduleName.GPIPE,
        microbatches=pair.microbatches,
        most_stages=pair.most_ranks,
        most_of_kind=np.array(pair.most_of_kind, np.int64),
        fewest_of_kind=np.array([x.stages[0] for x in pair.ranks_of_kind], np.int64),
        limit_s=limit_s * (1.0 + MARGIN_S),
        work_s=pair.work_s,
        room=pair.room,
        share=pair.share_of_kind,
        mix_unit=units_of(pair.most_of_kind),
        borders=borders,
    )


def _least_of(choices: ChoiceTable, r: int, v: int) -> Floats:
    """Returns the columns of ``StageTables.sums``."""
    first, end = choices.start[r, v], choices.start[r, v + 1]
    if first == end:
        return np.array([0.0] * SUM.missing + [1.0] + [0.0] * (len(SUM) - SUM.missing - 1))
    figures, edges = choices.figures[first:end], choices.edge_start[v + 1] - choices.edge_start[v]
    paid = choices.charge_bytes[choices.charge_start[first:end, None] + np.arange(edges)]
    time = np.concatenate([figures[:, :3], paid], axis=1)
    best = np.flatnonzero((time == time.min(axis=0)).all(axis=1))
    f, b, sync, a, h = figures.min(axis=0)
    one_a, one_h = figures[best[0], 3:] if best.size else (0.0, 0.0)
    return np.array([f, b, (figures[:, 0] + figures[:, 1]).min(), sync, a, h, best.size == 0, 0.0, one_a, one_h])
