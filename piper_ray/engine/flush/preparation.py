"""What solves of one graph share under schedules with a flush: the lattice of all layers, and what they may run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

from piper_ray.cost.variants import Variant, layer_without_choice, stage_variants
from piper_ray.engine.flush.tables import FlushWorkload, build_workload
from piper_ray.engine.forecast import lattice_within
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.counting import count_downsets
from piper_ray.engine.lattice.downsets import chain_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.model.events import Listener, StepFinished, silent
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Infeasibility

_CHAIN_SHARE = 4
"""A chain pays when the lattice has this many times as many downsets."""


@dataclass(frozen=True)
class FlushPreparation:
    """For ``instance`` on as many devices or fewer, and with any other number of microbatches, memory and bandwidth
    that leave the same variants.

    lattice_s, stage_costs_s: what making it took.
    """

    instance: Instance
    restrictions: Restrictions
    variants: tuple[Variant, ...]
    graph: LayerGraph
    workload: FlushWorkload
    lattice_s: float
    stage_costs_s: float

    @cached_property
    def chain(self) -> FlushWorkload | None:
        """A lattice of n + 1 downsets, where that is worth its while: for a plan to begin with."""
        if self.workload.lattice.size < _CHAIN_SHARE * (self.graph.size + 1):
            return None
        return build_workload(self.instance, chain_lattice(self.graph, range(self.graph.size)), self.variants)


def prepare_flush(
    instance: Instance,
    restrictions: Restrictions,
    memory_limit_bytes: float | None = None,
    listener: Listener = silent,
) -> FlushPreparation | Infeasibility:
    """Tables, or why there is no plan: some layer has no TMPC that is allowed. Raises LimitError if the lattice does
    not fit.

    The lattice is that of all layers: a layer that costs nothing may be a stage of its own, which under 1F1B lets the
    stages before it start with one more forward pass. So none may be merged with a neighbour.
    """
    began_s = time.perf_counter()
    variants = tuple(
        variant for variant in stage_variants(instance, restrictions) if variant.degree <= instance.devices
    )
    graph = build_graph(instance, without_contraction())
    impossible = layer_without_choice(instance, variants)
    if impossible is not None:
        return impossible
    expected = count_downsets(graph)
    lattice, lattice_s = lattice_within(graph, len(variants), expected, memory_limit_bytes, listener, began_s)

    began_s = time.perf_counter()
    workload = build_workload(instance, lattice, variants)
    stage_costs_s = time.perf_counter() - began_s
    tmpcs = sum(len(of_vertex) for of_variant in workload.tmpcs for of_vertex in of_variant)
    listener(StepFinished("stage costs", stage_costs_s, f"{tmpcs:,} TMPCs that none beats in {len(variants)} variants"))
    return FlushPreparation(instance, restrictions, variants, graph, workload, lattice_s, stage_costs_s)
