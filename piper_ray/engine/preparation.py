"""What solves of one graph share: variants, contraction, lattice, stage sums, and findings.

All but the findings do not depend on M or B, nor on N if there is one link. They depend on K only in that
tensor-parallel degrees above K are left out.

Also forecasts what a solve will need, and refuses a solve that does not fit in memory.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import NamedTuple

from piper_ray.cost.variants import (
    Variant,
    by_links,
    layer_without_choice,
    link_ranges,
    replica_ranges,
    usable_variants,
)
from piper_ray.engine.lattice.contraction import Contraction, contract, memory_is_ample
from piper_ray.engine.lattice.downsets import GrownLattice, Lattice, build_lattice, listed_pairs
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph, count_downsets, count_pairs
from piper_ray.engine.tables.problem import LatticeTables
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.constraints import Constraint, NoDataParallelism, Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Listener, StepFinished, silent
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan
from piper_ray.model.solution import Forecast, Infeasibility

_PROCESS_BYTES = 170e6
_SHARE_OF_MACHINE = 0.8
_BOUNDS_PER_S = 5e7
_EVALUATIONS = 10
_OPEN_SHARE = 0.1
_MANY, _MANY_A_LAYER = 1_000_000, 10_000
"""Numbers of downsets above which, by measurement, finding the useful ones is faster than evaluating all: in total, and
for each layer, since dual prices take longer the more layers there are."""

_LISTED = 50_000
"""If the downsets of a graph cannot be counted, up to this number are listed: this takes well under a second."""

_WAY_OUT = (
    "Plan blocks of layers instead (--contract operators), or raise the limit with --memory-limit on a machine that "
    "has the memory."
)


def bytes_per_downset(graph: LayerGraph, variants: int) -> float:
    """Returns the peak bytes for each downset: bit sets (with scratch of the same size, and once more when they are cut
    to their number), crossing edges, sums, states and buckets.

    It counts the eight-byte figures of LatticeArrays, StageSums, CostArrays, FrontArrays, MemberArrays and, at worst,
    one bucket and one group per downset.
    """
    words = max(1, (graph.size + 63) // 64)
    crossing = 2.0 * len(graph.edges) / max(1, graph.size)
    enumeration = 2 * (2 * words + 2)
    return 8.0 * (enumeration + crossing + 22 * variants + 2 + 12 + 6 * words)


def forecast(graph: LayerGraph, downsets: int | None, variants: int) -> Forecast:
    """Returns exact counts if they are quick, the memory that follows from them, and a rough time for one core."""
    if downsets is None:
        return Forecast(None, None, None, None)
    bucket_bounds = _EVALUATIONS * _OPEN_SHARE * downsets * (downsets / 32.0 + 1.0) * variants
    return Forecast(
        downsets=downsets,
        pairs=count_pairs(graph),
        memory_bytes=memory_bytes(graph, variants, downsets),
        seconds=0.01 + downsets * 1e-6 + bucket_bounds / _BOUNDS_PER_S,
    )


def memory_bytes(graph: LayerGraph, variants: int, downsets: int) -> float:
    """Returns the peak memory, in bytes, of a solve that lists ``downsets`` downsets."""
    return _PROCESS_BYTES + downsets * bytes_per_downset(graph, variants)


def downset_limit(graph: LayerGraph, variants: int, downsets: int | None, memory_limit_bytes: float | None) -> int:
    """Returns how many downsets fit in the limit. Raises LimitError if it is known that there are more."""
    limit = downsets_within(graph, variants, memory_limit_bytes)
    if downsets is not None and downsets > limit:
        raise LimitError(
            f"the graph has {downsets:,} downsets, which take about {_gib(memory_bytes(graph, variants, downsets))}; "
            f"the limit is {_gib(_limit_bytes(memory_limit_bytes))}. {_WAY_OUT}"
        )
    return limit


def downsets_within(graph: LayerGraph, variants: int, memory_limit_bytes: float | None) -> int:
    """Returns how many downsets fit in the limit, or in the machine if there is none."""
    room_bytes = max(0.0, _limit_bytes(memory_limit_bytes) - _PROCESS_BYTES)
    return int(room_bytes / bytes_per_downset(graph, variants))


def _limit_bytes(memory_limit_bytes: float | None) -> float:
    return memory_limit_bytes or machine_memory_bytes() * _SHARE_OF_MACHINE


def note_of_many(downsets: int | None) -> str:
    """Returns the note of a solve that lists only useful downsets. downsets: None if they are too many to count."""
    counted = "more downsets than can be counted quickly" if downsets is None else f"{downsets:,} downsets"
    return f"{counted}: only those that a best plan can use are listed"


def machine_memory_bytes() -> float:
    """Returns the physical memory of this machine, in bytes."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _gib(size_bytes: float) -> str:
    if size_bytes < 0.1 * 2**30:  # would be shown as 0.0 GiB
        return f"{size_bytes / 2**20:,.1f} MiB"
    return f"{size_bytes / 2**30:,.1f} GiB"


def tell_of_options(tmpcs: Sequence[Sequence[Sequence[Tmpc]]], began_s: float, listener: Listener) -> float:
    """Reports the tables of stage costs. Returns the seconds since ``began_s``. tmpcs: by variant and vertex."""
    seconds = time.perf_counter() - began_s
    count = sum(len(of_vertex) for of_variant in tmpcs for of_vertex in of_variant)
    listener(StepFinished("stage costs", seconds, f"{count:,} TMPCs that none beats in {len(tmpcs)} variants"))
    return seconds


def lattice_within(
    graph: LayerGraph,
    variants: int,
    expected: int | None,
    memory_limit_bytes: float | None,
    listener: Listener,
    began_s: float,
) -> tuple[GrownLattice, float]:
    """Builds the lattice. Returns it, and the seconds since ``began_s``. variants: their number. expected: the number
    of downsets, if known.

    Raises LimitError if the downsets do not fit in the limit or in the machine.
    """
    limit = downset_limit(graph, variants, expected, memory_limit_bytes)
    try:
        lattice = build_lattice(graph, limit, expected)
    except LimitError:
        fits = _gib(_limit_bytes(memory_limit_bytes))
        raise LimitError(f"the graph has more than {limit:,} downsets, all that fit into {fits}. {_WAY_OUT}") from None
    return lattice, tell_of_lattice(lattice, began_s, listener)


def tell_of_lattice(lattice: Lattice, began_s: float, listener: Listener) -> float:
    """Reports the lattice. Returns the seconds since ``began_s``."""
    seconds = time.perf_counter() - began_s
    listener(StepFinished("lattice", seconds, f"{lattice.size:,} downsets in {lattice.levels:,} levels"))
    return seconds


_KEPT = 4096
_ROUNDING = 1e-12
"""Relative. At another bandwidth the times of the same stages are sums of other figures, and round differently."""


class FindingsPoint(NamedTuple):
    """The parameters of a solve to which findings belong. data_parallel_limit: on the sum of d."""

    devices: int
    data_parallel_limit: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    restrictions: Restrictions

    @classmethod
    def of(
        cls, instance: Instance, restrictions: Restrictions, data_parallel_limit: int | None = None
    ) -> FindingsPoint:
        """data_parallel_limit: None stands for min(N, K)."""
        limit = instance.data_parallel_limit
        return cls(
            instance.devices,
            limit if data_parallel_limit is None else min(limit, data_parallel_limit),
            instance.microbatches,
            instance.memory_bytes,
            instance.bandwidth_bytes_per_s,
            restrictions,
        )

    def has_no_more_than(self, other: FindingsPoint) -> bool:
        return (
            self.devices <= other.devices
            and self.data_parallel_limit <= other.data_parallel_limit
            and self.memory_bytes <= other.memory_bytes
            and self.bandwidth_bytes_per_s <= other.bandwidth_bytes_per_s
            and other.microbatches % self.microbatches == 0
            and self.restrictions == other.restrictions
        )

    def holds(self, plan: Plan) -> bool:
        """Whether the plan fits in the devices and the sum of d."""
        return plan.devices <= self.devices and plan.data_parallel_sum <= self.data_parallel_limit


class _Found(NamedTuple):
    point: FindingsPoint
    lower_s: float
    time_s: float
    plan: Plan


class Known(NamedTuple):
    """What findings imply for a point. lower_s: no plan is faster; 0 if nothing is known. plans: candidates, to be
    tried in order until one is valid here. The first comes from a point with at least as much of everything, and would
    be the best; the second is the best from points with at most as much, and is valid.
    """

    lower_s: float
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Findings:
    """Bounds and plans found by solves of one graph. Several threads may use it.

    thorough: whether to keep also the plans that a solve finds on the way to its best, for points with less; and
    whether a solve with limits begins with findings, which may change its answer.
    """

    thorough: bool = False
    _found: deque[_Found] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def record(self, point: FindingsPoint, lower_s: float, time_s: float, plan: Plan) -> None:
        """Records a plan, its time per sample, and a bound."""
        self._found.append(_Found(point, lower_s, time_s, plan))

    def about(self, here: FindingsPoint) -> Known:
        """Returns what the findings imply for a point."""
        above: _Found | None = None
        below: _Found | None = None
        lower_s = 0.0
        for found in tuple(self._found):
            if here.has_no_more_than(found.point):
                same = found.point.bandwidth_bytes_per_s == here.bandwidth_bytes_per_s
                bound_s = found.lower_s if same else found.lower_s * (1.0 - _ROUNDING)
                if above is None or bound_s > lower_s:
                    above, lower_s = found, bound_s
            if found.point.has_no_more_than(here) and (below is None or found.time_s < below.time_s):
                below = found
        fits = above is not None and here.holds(above.plan)
        return Known(lower_s, tuple(found.plan for found in (above if fits else None, below) if found is not None))


_MANY_DOWNSETS = 100_000
"""Graphs with at most this many downsets are solved in about a second without further contraction."""

_FEW_DOWNSETS = 1_200
"""Up to this number of downsets, testing all pairs is the quickest way to count the nested ones."""


class PointShape(NamedTuple):
    """What a preparation depends on, apart from the graph. degrees: t up to K. replica_ranges: of the data-parallel
    degrees allowed, see ``variants``; link_ranges: the same for each t. ample_memory: see ``lattice.contraction``.
    """

    constraints: tuple[Constraint, ...]
    degrees: tuple[int, ...]
    replica_ranges: tuple[tuple[int, int], ...]
    link_ranges: tuple[tuple[tuple[int, int], ...], ...]
    ample_memory: bool

    @classmethod
    def of(cls, instance: Instance, restrictions: Restrictions) -> PointShape:
        degrees = tuple(t for t in instance.degrees if t <= instance.devices)
        ranges = replica_ranges(instance, restrictions)
        links = tuple(link_ranges(instance, restrictions, t) for t in degrees)
        # Constraints on replicas alone are already in the ranges.
        constraints = tuple(x for x in restrictions.constraints if not isinstance(x, NoDataParallelism))
        ample = memory_is_ample(instance)
        return cls(constraints, degrees, ranges, links, ample)


@dataclass(frozen=True)
class Outline:
    """What comes before the lattice. It is quick to make for any size of the lattice.

    alike: the variants, one for all links. graph: contracted as far as it pays. downsets: their number; None if
    counting them takes long.
    """

    alike: tuple[Variant, ...]
    variants: tuple[Variant, ...]
    contraction: Contraction
    graph: LayerGraph
    downsets: int | None

    @classmethod
    def of(cls, instance: Instance, restrictions: Restrictions) -> Outline:
        alike = usable_variants(instance, restrictions)
        variants, contraction = by_links(instance, restrictions, alike), contract(instance, alike)
        graph = build_graph(instance, contraction)
        found = cls(alike, variants, contraction, graph, count_downsets(graph))
        if found.downsets is not None and found.downsets <= _MANY_DOWNSETS:
            return found
        contraction = contract(instance, alike, all_that_is_free=True)
        if contraction.keeper.keys() == found.contraction.keeper.keys():
            return found
        graph = build_graph(instance, contraction)
        return cls(alike, variants, contraction, graph, count_downsets(graph))


def is_wide(outline: Outline) -> bool:
    """Whether there are so many downsets that listing only the useful ones is better, even if all fit in memory."""
    downsets = outline.downsets
    if downsets is None:
        # Either too many to count or too entangled, as graphs of traced operators are, which have few downsets.
        try:
            build_lattice(outline.graph, _LISTED)
        except LimitError:
            return True
        return False
    return downsets > max(_MANY, _MANY_A_LAYER * outline.graph.size)


@dataclass(frozen=True)
class Preparation:
    """Tables for all points with these layers, edges and shape. Either ``workload`` or ``impossible`` is given.

    lattice_s, stage_costs_s: the time to make them. impossible: some layer has no TMPC that is allowed. findings: of
    the solves that used these tables.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> prepare(bert, piper_ray.Restrictions()).impossible is None
    True
    """

    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    shape: PointShape
    outline: Outline
    workload: LatticeTables | None
    impossible: Infeasibility | None
    lattice_s: float
    stage_costs_s: float
    findings: Findings = field(default_factory=Findings, compare=False)

    @cached_property
    def count_pairs(self) -> Callable[[], int | None]:
        """Counts the nested pairs of downsets, once; None if there is no lattice or they cannot be counted quickly."""
        if self.workload is None:
            return lambda: None
        lattice = self.workload.lattice
        few = lattice.size <= _FEW_DOWNSETS
        return cache(partial(listed_pairs, lattice) if few else partial(count_pairs, self.outline.graph))

    def serves(self, instance: Instance, restrictions: Restrictions) -> bool:
        """Whether the tables were made for this graph and shape. Instances made with ``replace`` share their layers."""
        same = self.layers is instance.layers and self.edges is instance.edges
        return same and self.shape == PointShape.of(instance, restrictions)


def prepare(
    instance: Instance,
    restrictions: Restrictions,
    memory_limit_bytes: float | None = None,
    listener: Listener = silent,
    outline: Outline | None = None,
) -> Preparation:
    """Builds lattice and stage sums. outline: given if it is known already.

    Raises LimitError if the lattice does not fit in the memory limit or in the machine.
    """
    started = time.perf_counter()
    shape = PointShape.of(instance, restrictions)
    outline = outline or Outline.of(instance, restrictions)
    variants, graph = outline.variants, outline.graph
    impossible = layer_without_choice(instance, variants)
    if impossible is not None:
        return Preparation(instance.layers, instance.edges, shape, outline, None, impossible, 0.0, 0.0)
    lattice, lattice_s = lattice_within(graph, len(variants), outline.downsets, memory_limit_bytes, listener, started)

    began = time.perf_counter()
    workload = LatticeTables.build(lattice, build_options(instance, graph, variants))
    stage_costs_s = tell_of_options(workload.options.tmpcs, began, listener)
    return Preparation(instance.layers, instance.edges, shape, outline, workload, None, lattice_s, stage_costs_s)
