"""What solves of one graph share: variants, contraction, lattice and stage sums. None of it depends on M or B, nor on N
where there is one link.

Of K it depends in one way: tensor-parallel degrees above K are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import NamedTuple

from piper_ray.cost.variants import (
    Variant,
    by_links,
    layer_without_choice,
    link_ranges,
    replica_ranges,
    stage_variants,
)
from piper_ray.engine.findings import Findings
from piper_ray.engine.forecast import lattice_within
from piper_ray.engine.lattice.contracted import ContractedGraph
from piper_ray.engine.lattice.contraction import Contraction, memory_is_ample
from piper_ray.engine.lattice.counting import count_pairs
from piper_ray.engine.lattice.downsets import listed_pairs
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.engine.tables.problem import LatticeTables
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.model.constraints import Constraint, NoDataParallelism
from piper_ray.model.events import Listener, StepFinished, silent
from piper_ray.model.instance import Edge, Instance, Layer
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Infeasibility

_FEW_DOWNSETS = 1_200
"""Downsets up to which looking at all pairs is the quickest way to count the nested ones."""


class PointShape(NamedTuple):
    """What of a point, beside its graph, decides on its preparation. degrees: t up to K. replica_ranges: those of the
    data-parallel degrees that it can have, see ``variants``; link_ranges: so for each t. ample_memory: see
    ``lattice.contraction``.
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
        # What is about replicas alone has its say in the ranges.
        constraints = tuple(x for x in restrictions.constraints if not isinstance(x, NoDataParallelism))
        ample = memory_is_ample(instance)
        return cls(constraints, degrees, ranges, links, ample)


@dataclass(frozen=True)
class Outline:
    """What comes before the lattice, and is quick whatever its size. alike: the variants as they are before those with
    different links are told apart."""

    alike: tuple[Variant, ...]
    variants: tuple[Variant, ...]
    contracted: ContractedGraph

    @property
    def contraction(self) -> Contraction:
        return self.contracted.contraction

    @property
    def graph(self) -> LayerGraph:
        return self.contracted.graph

    @classmethod
    def of(cls, instance: Instance, restrictions: Restrictions) -> Outline:
        alike = tuple(v for v in stage_variants(instance, restrictions) if v.degree <= instance.devices)
        return cls(alike, by_links(instance, restrictions, alike), ContractedGraph.of(instance, alike))


@dataclass(frozen=True)
class Preparation:
    """For all points with these layers, edges and shape. Exactly one of workload and impossible is there.

    lattice_s, stage_costs_s: what making it took. impossible: some layer has no TMPC that is allowed. findings: what
    solves with it have found.

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
        """Whether it was made for this graph and shape. Instances made with ``replace`` share their layers."""
        same = self.layers is instance.layers and self.edges is instance.edges
        return same and self.shape == PointShape.of(instance, restrictions)


def prepare(
    instance: Instance,
    restrictions: Restrictions,
    memory_limit_bytes: float | None = None,
    listener: Listener = silent,
    outline: Outline | None = None,
) -> Preparation:
    """Builds lattice and stage sums. outline: where it is known already.

    Raises LimitError if the lattice does not fit into the limit, or the machine.
    """
    started = time.perf_counter()
    shape = PointShape.of(instance, restrictions)
    outline = outline or Outline.of(instance, restrictions)
    variants, graph = outline.variants, outline.graph
    impossible = layer_without_choice(instance, variants)
    if impossible is not None:
        return Preparation(instance.layers, instance.edges, shape, outline, None, impossible, 0.0, 0.0)
    expected = outline.contracted.downsets
    lattice, lattice_s = lattice_within(graph, len(variants), expected, memory_limit_bytes, listener, started)

    began = time.perf_counter()
    workload = LatticeTables.build(lattice, build_options(instance, graph, variants))
    stage_costs_s = time.perf_counter() - began
    tmpcs = sum(len(of_vertex) for of_variant in workload.options.tmpcs for of_vertex in of_variant)
    listener(StepFinished("stage costs", stage_costs_s, f"{tmpcs:,} TMPCs that none beats in {len(variants)} variants"))
    return Preparation(instance.layers, instance.edges, shape, outline, workload, None, lattice_s, stage_costs_s)
