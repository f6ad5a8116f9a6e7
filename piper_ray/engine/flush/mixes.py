"""Which stages may come before which, and the rates at which their borders are charged: on devices of several kinds,
and with faster links within groups.

The rates at a stage's borders follow from its own kind, from those of its neighbours, and within a kind from where the
border lies. So there is a copy of a variant for each neighbour behind it and in front: a rate within its kind, or
another kind. A tail *promises* the kind of the stage that comes in front; the numbers of stages on each kind behind a
border determine its rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.cost.variants import Variant
from piper_ray.engine.kernels.flush_mixes import MixRules, mix_tables, share_room
from piper_ray.engine.kernels.flush_types import FlushTask
from piper_ray.engine.kernels.types import FloatArray, IndexArray
from piper_ray.engine.lattice.layer_graph import LayerGraph, ancestors, descendants
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.schedule import FLUSHED, Schedule


@dataclass(frozen=True)
class Placed:
    """A variant between stages of given numbers in ``BorderRates``. kind: the number of its devices' kind.

    The last stage counts as having one of its own kind behind it, and the first one as having one in front.
    """

    variant: Variant
    kind: int
    behind: int
    ahead: int


@dataclass(frozen=True)
class BorderRates:
    """rates: of borders within each kind of devices, in bytes per second, the fastest first. Edges that may skip stages
    go at the last one, that of the outermost link. by_stages: whether the links of borders, or of replicas, depend on
    how many stages there are. sizes: the numbers of devices that stages may have.

    All rates are numbered, those of the first kind first. The last number of a kind also stands for a neighbour on this
    kind of a stage on another one.
    """

    rates: tuple[tuple[float, ...], ...]
    by_stages: bool = False
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, instance: Instance, graph: LayerGraph, schedule: Schedule) -> BorderRates:
        """Returns one rate for each kind if its borders are alike: with one link, under 2bw, or if all edges may skip
        stages."""
        alike = instance.cluster.alike
        by_stages = any(len(own.links) > 1 for own in alike) and schedule.name in FLUSHED
        first = 0 if by_stages and unpassed_edges(graph).any() else -1
        sizes = tuple(sorted({d * t for d in divisors(instance.microbatches) for t in instance.degrees}))
        return cls(tuple(own.border_rates(sizes)[first:] for own in alike), by_stages, sizes)

    @classmethod
    def outermost(cls, cluster: Cluster) -> BorderRates:
        """Returns one rate for each kind."""
        return cls(tuple((own.bandwidth_bytes_per_s,) for own in cluster.alike))

    @property
    def kinds(self) -> list[int]:
        """The kind of each number."""
        return [g for g, rates in enumerate(self.rates) for _ in rates]

    @property
    def last(self) -> list[int]:
        """The last number of each kind."""
        return [int(x) - 1 for x in np.cumsum([len(rates) for rates in self.rates])]

    def between(self, cluster: Cluster) -> FloatArray:
        """Returns float64[kinds, numbers]: rates between stages of each kind and their neighbours."""
        names, own = cluster.kind_names, [rate for rates in self.rates for rate in rates]
        return np.array(
            [
                [own[x] if g == h else cluster.rate_between(names[g], names[h]) for x, h in enumerate(self.kinds)]
                for g in range(len(names))
            ]
        )

    def neighbours(self, cluster: Cluster, kind: int, degree: int) -> list[int]:
        """Returns the numbers of the neighbours that stages of ``degree`` devices or a multiple may have."""
        others, last = [x for x in self.last if x != self.last[kind]], self.last[kind]
        own, found = cluster.alike[kind], {last}
        for size in self.sizes if len(self.rates[kind]) > 1 else ():
            if size % degree == 0:
                shared = next(
                    k for k, x in enumerate(own.links) if x.devices is None or 2 * own.each_site(size) <= x.devices
                )
                found |= {self._number(own, kind, level, size) for level in range(shared, len(own.links))}
        return sorted([*others, *found])

    def _number(self, own: Cluster, kind: int, level: int, size: int) -> int:
        """Returns the number of the rate at a border of this level between stages of ``size`` devices."""
        rates = self.rates[kind]
        return self.last[kind] + 1 - len(rates) + rates.index(own.level_bytes_per_s(level, size))

    def parts(
        self, cluster: Cluster, d: int, degrees: Sequence[int], stages: range
    ) -> Iterator[tuple[range, tuple[range, ...], tuple[tuple[int, ...], ...]]]:
        """The numbers of stages in all, and on each kind, with the same rates at their borders and of their replicas;
        and for each kind the numbers of these rates, by the stages of the kind behind: behind the last one the slowest
        of all."""
        most = [
            min(stages[-1], own.devices // (d * t)) if t > 0 else 0
            for own, t in zip(cluster.alike, degrees, strict=True)
        ]
        for each in product(*(self._alike(cluster, kind, d, degrees[kind], most[kind]) for kind in range(len(most)))):
            of_kinds, numbers = tuple(x for x, _ in each), tuple(x for _, x in each)
            least = max(stages.start, sum(x.start for x in of_kinds))
            if least <= (end := min(stages[-1], sum(x[-1] for x in of_kinds))):
                yield range(least, end + 1), of_kinds, numbers

    def _alike(self, cluster: Cluster, kind: int, d: int, t: int, most: int) -> Iterator[tuple[range, tuple[int, ...]]]:
        """The same for one kind. With no more stages than have the same links, the number may also be zero."""
        own, last = cluster.alike[kind], self.last[kind]
        if not self.by_stages or most == 0:
            yield range(most + 1), (last,) * (most + 1)
            return

        def links(count: int) -> tuple[tuple[int, ...], Link]:
            return own.border_periods(d * t, count), own.replicas_link(d, t, count)

        least = 0
        for (periods, _), counts in groupby(range(1, most + 1), key=links):
            end = [*counts][-1]
            found = [last] * end
            if len(self.rates[kind]) > 1:
                found = [self._number(own, kind, own.border_level(q, periods), d * t) for q in range(1, end + 1)]
            yield range(least, end + 1), (max(found[:-1], default=found[-1]), *found)
            least = end + 1


def placed_variants(variants: Sequence[Variant], cluster: Cluster, borders: BorderRates) -> list[Placed]:
    """Returns each variant with all neighbours that its stages may have."""
    kind_of = {name: g for g, name in enumerate(cluster.kind_names)}
    return [
        Placed(variant, kind, *pair)
        for variant in variants
        for kind in [kind_of[variant.kind]]
        for pair in product(borders.neighbours(cluster, kind, variant.degree), repeat=2)
    ]


class EdgeRates(NamedTuple):
    """The rates assumed for edges that enter and that leave a stage of a placed variant: float64[r, e] each, in bytes
    per second. are_exact: every plan has these rates; else no plan has slower ones.
    """

    come_in: FloatArray
    go_out: FloatArray
    are_exact: bool


def edge_rates(graph: LayerGraph, placed: Sequence[Placed], cluster: Cluster, borders: BorderRates) -> EdgeRates:
    """Returns the rates of edges. If no stage can lie between the ends of an edge, it goes to a neighbour. Any other
    edge may go to a stage further on, on devices of any kind that can run the layer there.
    """
    shape = len(placed), len(graph.edges)
    own, behind, ahead = (np.array([getattr(x, name) for x in placed]) for name in ("kind", "behind", "ahead"))
    at_border = borders.between(cluster)
    rates, unpassed = at_border[:, borders.last], unpassed_edges(graph)
    come_in, go_out = np.empty(shape), np.empty(shape)
    kinds, are_exact = possible_kinds(graph, placed), True
    for e, (tail, head, _) in enumerate(graph.edges):
        if unpassed[e]:
            come_in[:, e], go_out[:, e] = at_border[own, ahead], at_border[own, behind]
        else:
            come_in[:, e], go_out[:, e] = (rates[own][:, list(kinds[v])].max(axis=1) for v in (tail, head))
            are_exact = are_exact and len(kinds[tail]) == len(kinds[head]) == 1
    are_exact = are_exact and all(len(kinds[v]) == 1 for ends, _ in graph.tensors for v in ends)
    return EdgeRates(come_in, go_out, are_exact)


def unpassed_edges(graph: LayerGraph) -> npt.NDArray[np.bool_]:
    """Returns bool[e]: whether every other layer comes before the edge's tail or after its head, so that no stage can
    lie between."""
    before, after = ancestors(graph.successors), descendants(graph.successors)
    found = [before[tail].bit_count() + after[head].bit_count() == graph.size - 2 for tail, head, _ in graph.edges]
    return np.array(found, np.bool_)


def tensor_rates(graph: LayerGraph, placed: Sequence[Placed], cluster: Cluster) -> FloatArray:
    """Returns float64[h]: rates of tensors with several ends, in bytes per second. No plan has a slower one, and none a
    faster one if each end can be on one kind only.
    """
    kinds, names = possible_kinds(graph, placed), cluster.kind_names
    found = np.full(len(graph.tensors), cluster.bandwidth_bytes_per_s)
    for h, (ends, _) in enumerate(graph.tensors):
        certain = {kind for v in ends for kind in kinds[v] if len(kinds[v]) == 1}
        if certain:
            found[h] = cluster.slowest_rate(names[kind] for kind in certain)
    return found


def possible_kinds(graph: LayerGraph, placed: Sequence[Placed]) -> list[frozenset[int]]:
    """Returns for each vertex the numbers of the kinds of devices that can run it; all kinds if none can."""
    found = [frozenset(x.kind for x in placed if x.variant.tmpcs[layer]) for layer in graph.layer_ids]
    return [kinds or frozenset(x.kind for x in placed) for kinds in found]


class MixLimits(NamedTuple):
    """Limits on the mixes of a task. stages: the numbers that a plan may have, and of_kinds those on devices of each
    kind. borders: for each kind the numbers of the rates at borders, by the stages of the kind behind. last: of
    ``BorderRates``. moves: those that stages may have, by ``FlushTask.move``: a stage's kind, and the numbers of its
    neighbours behind and in front.
    """

    stages: range
    of_kinds: tuple[range, ...]
    borders: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    moves: tuple[tuple[int, int, int], ...]

    @property
    def most(self) -> IndexArray:
        """The most stages on devices of each kind."""
        return np.array([found[-1] for found in self.of_kinds])

    @property
    def most_mixes(self) -> int:
        """An upper bound on the number of mixes."""
        return prod(len(range(found.stop)) for found in self.of_kinds) * len(self.of_kinds) ** 2


def moves_between(borders: Sequence[Sequence[int]], last: Sequence[int]) -> set[tuple[int, int, int]]:
    """Returns the moves that stages may have. borders, last: as in ``MixLimits``."""
    found: set[tuple[int, int, int]] = set()
    for kind, numbers in enumerate(borders):
        others = [x for x in last if x != last[kind]]
        pairs = {*pairwise(numbers), *product(others, repeat=2), *product(numbers, others), *product(others, numbers)}
        found |= {(kind, behind, ahead) for behind, ahead in pairs}
    return found


def with_mixes(task: FlushTask, limits: MixLimits) -> FlushTask:
    """Returns the task with the mixes that its tails may have."""
    most, kinds = limits.most, len(limits.of_kinds)
    borders = np.zeros((kinds, int(most.max()) + 1), np.int64)
    for row, found in zip(borders, limits.borders, strict=True):
        row[: len(found)] = found
    kind_of = np.repeat(np.arange(kinds), np.diff((-1, *limits.last)))
    moves = np.array(limits.moves)
    neighbours = np.where(kind_of[moves[:, 1:]] == moves[:, :1], moves[:, 1:], -1)
    tables = mix_tables(
        MixRules(
            limits.stages.start,
            limits.stages[-1],
            np.array([found.start for found in limits.of_kinds]),
            most,
            borders,
            np.concatenate([moves[:, :1], neighbours], axis=1),
            task.schedule,
            task.microbatches,
            _share_of_kinds(task, kinds) if kinds > 1 else np.empty(0),
        )
    )
    return task._replace(**tables._asdict())


def share_within(task: FlushTask, limits: MixLimits) -> float:
    """Returns the share that a plan may have for each second of a batch: see ``ShareRoom``."""
    share = _share_of_kinds(task, len(limits.of_kinds))
    return min(share_room(task.schedule, task.microbatches, 0, limits.stages[-1], limits.most, share))


def _share_of_kinds(task: FlushTask, kinds: int) -> FloatArray:
    found = np.zeros(kinds)
    found[task.ends_behind[task.variants] % kinds] = task.share_of_s[task.variants]
    return found
