"""The tables that all points of a frontier share: they depend on the workload and on the variants allowed, not on K."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.errors import LimitError
from piper_ray.forecast import downset_limit, over_limit
from piper_ray.lattice.contraction import Contraction, contract
from piper_ray.lattice.counting import count_downsets
from piper_ray.lattice.downsets import build_lattice
from piper_ray.lattice.graph import build_graph
from piper_ray.model import Instance
from piper_ray.problem import Problem, Workload, build_problem
from piper_ray.restrictions import Restrictions
from piper_ray.stage_cost.options import build_options
from piper_ray.variants import Variant, stage_variants


@dataclass(frozen=True)
class Preparation:
    """A workload's tables under variants, for problems of any K, N, M, B."""

    restrictions: Restrictions
    contraction: Contraction
    workload: Workload

    @classmethod
    def of(
        cls,
        instance: Instance,
        restrictions: Restrictions,
        variants: tuple[Variant, ...],
        memory_limit_bytes: float | None,
    ) -> Preparation:
        """Raises LimitError if the lattice does not fit."""
        contraction = contract(instance, variants)
        graph = build_graph(instance, contraction)
        expected = count_downsets(graph)
        limit = downset_limit(graph, len(variants), expected, memory_limit_bytes)
        try:
            lattice = build_lattice(graph, limit, expected)
        except LimitError:
            raise over_limit(limit, memory_limit_bytes) from None
        return cls(restrictions, contraction, Workload.build(lattice, build_options(instance, graph, variants)))

    def problem(self, instance: Instance) -> Problem:
        """At the instance's K, N, M and B."""
        return build_problem(self.workload, instance, self.restrictions.data_parallelism)


def usable_variants(instance: Instance, restrictions: Restrictions) -> tuple[Variant, ...]:
    """Those that the instance's devices allow."""
    return tuple(v for v in stage_variants(instance, restrictions) if v.degree <= instance.devices)
