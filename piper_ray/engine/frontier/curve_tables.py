"""The tables that all points of a frontier share: they depend on the workload and on the variants allowed, not on K."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.engine.lattice.contraction import Contraction
from piper_ray.engine.preparation import prepare
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions


@dataclass(frozen=True)
class CurvePreparation:
    """A workload's tables under restrictions, for problems of any K, N, M, B."""

    restrictions: Restrictions
    contraction: Contraction
    workload: LatticeTables

    @classmethod
    def of(cls, instance: Instance, restrictions: Restrictions, memory_limit_bytes: float | None) -> CurvePreparation:
        """With the variants that the instance's devices allow, of which every layer must have one.

        Raises LimitError if the lattice does not fit.
        """
        prepared = prepare(instance, restrictions, memory_limit_bytes)
        assert prepared.workload is not None, "a layer without a choice"
        return cls(restrictions, prepared.outline.contraction, prepared.workload)

    def problem(self, instance: Instance) -> Problem:
        """At the instance's K, N, M and B."""
        return build_problem(self.workload, instance, self.restrictions.data_parallel_degrees(instance))
