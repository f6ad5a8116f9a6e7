"""The layer graph of an instance, contracted as far as it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_ray.cost.variants import Variant
from piper_ray.engine.lattice.contraction import Contraction, contract
from piper_ray.engine.lattice.counting import count_downsets
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.model.instance import Instance

_MANY_DOWNSETS = 100_000
"""What takes no more is planned in a second as it is."""


@dataclass(frozen=True)
class ContractedGraph:
    """downsets: of ``graph``; None where they cannot be counted quickly."""

    contraction: Contraction
    graph: LayerGraph
    downsets: int | None

    @classmethod
    def of(cls, instance: Instance, variants: Sequence[Variant]) -> ContractedGraph:
        found = cls._by(contract(instance, variants), instance)
        if found.downsets is not None and found.downsets <= _MANY_DOWNSETS:
            return found
        contraction = contract(instance, variants, all_that_is_free=True)
        return found if contraction.keeper.keys() == found.contraction.keeper.keys() else cls._by(contraction, instance)

    @classmethod
    def _by(cls, contraction: Contraction, instance: Instance) -> ContractedGraph:
        graph = build_graph(instance, contraction)
        return cls(contraction, graph, count_downsets(graph))
