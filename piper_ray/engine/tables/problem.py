"""What an evaluation is about: the tables of one workload on one cluster, as the kernels take them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from piper_ray.cost.bounds import DegreesAllowed, LayersAlone, lower_bound_s
from piper_ray.cost.stage import resync_s_per_byte, transfer_s_per_byte
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.engine.kernels.selection import StepCache, make_step_cache
from piper_ray.engine.kernels.types import (
    ClusterArrays,
    CostArrays,
    FloatArray,
    LatticeArrays,
    OptionArrays,
    Tables,
    frozen,
)
from piper_ray.engine.lattice.downsets import Lattice, chain_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.engine.tables.rate import Rates
from piper_ray.engine.tables.stage_sums import StageSums, build_sums, cost_arrays
from piper_ray.engine.tables.tmpc_options import TmpcOptions
from piper_ray.model.instance import Instance


@dataclass(frozen=True)
class LatticeTables:
    """Lattice and stage sums: what does not depend on K, N, M, B."""

    lattice: Lattice
    options: TmpcOptions
    sums: StageSums

    @classmethod
    def build(cls, lattice: Lattice, options: TmpcOptions) -> LatticeTables:
        return cls(lattice, options, build_sums(lattice, options))


@dataclass(frozen=True)
class Problem:
    """A workload on a cluster. resync_s_per_byte: float64[r], 4 / (N B); times weights and d - 1, s of a stage on one
    device."""

    workload: LatticeTables
    tables: Tables
    resync_s_per_byte: FloatArray
    rates: Rates = field(default_factory=Rates, repr=False, compare=False)
    _scratch: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    @property
    def lattice(self) -> LatticeArrays:
        return self.tables.lattice

    @property
    def costs(self) -> CostArrays:
        return self.tables.costs

    @property
    def options(self) -> OptionArrays:
        return self.tables.options

    @property
    def cluster(self) -> ClusterArrays:
        return self.tables.cluster

    @property
    def scratch(self) -> StepCache:
        """Scratch of the calling thread."""
        if not hasattr(self._scratch, "cache"):
            self._scratch.cache = make_step_cache(self.tables)
        cache: StepCache = self._scratch.cache
        return cache

    def work_s(self) -> float:
        """What a plan would take that uses all there is and wastes nothing, in s per sample."""
        sums, cluster = self.workload.sums, self.cluster
        by_devices = float(sums.device_work_s[-1]) / cluster.devices
        return max(by_devices, float(sums.replica_work_s[-1]) / cluster.data_parallel_limit)

    def lower_bound_s(self) -> float:
        """No plan is faster, in s per sample."""
        sums, least, cluster = self.workload.sums, self.workload.options.least, self.cluster
        layers = LayersAlone(least.work_s, least.weights_bytes * self.resync_s_per_byte, least.missing)
        degrees = DegreesAllowed(
            devices=cluster.devices,
            data_parallel_limit=cluster.data_parallel_limit,
            tensor_parallel=self.options.degree,
            data_parallel=cluster.divisors,
            first=cluster.first_divisor,
            end=cluster.end_divisor,
        )
        return lower_bound_s(float(sums.device_work_s[-1]), float(sums.replica_work_s[-1]), layers, degrees)

    def with_cluster(self, cluster: ClusterArrays) -> Problem:
        """The same tables with another memory limit, say; N and B must be the same."""
        scratch = self._scratch if cluster.memory_bytes == self.cluster.memory_bytes else threading.local()
        return replace(self, tables=self.tables._replace(cluster=cluster), _scratch=scratch)


def build_problem(workload: LatticeTables, instance: Instance, data_parallel_degrees: Sequence[int]) -> Problem:
    """Scales the workload's sums to the instance's N and B, and takes its K and M.

    data_parallel_degrees: those that a stage can have, ascending.
    """
    limit = instance.data_parallel_limit
    resync, transfer = _resync_s_per_byte(workload, instance, data_parallel_degrees), transfer_s_per_byte(instance)
    allowed = np.array(data_parallel_degrees, np.int64)
    least = [variant.least_data_parallel_degree for variant in workload.options.variants]
    most = [variant.most_data_parallel_degree for variant in workload.options.variants]
    tables = Tables(
        lattice=workload.lattice.arrays,
        costs=frozen(cost_arrays(workload.sums, workload.options, resync, transfer)),
        options=frozen(workload.options.in_seconds(resync, transfer)),
        cluster=frozen(
            ClusterArrays(
                devices=instance.devices,
                data_parallel_limit=limit,
                memory_bytes=instance.memory_bytes * (1.0 + MEMORY_TOLERANCE),
                divisors=allowed,
                divisor_at_least=np.searchsorted(allowed, np.arange(allowed[-1] + 1)).astype(np.int64),
                first_divisor=np.searchsorted(allowed, np.array(least, np.int64)).astype(np.int64),
                end_divisor=np.searchsorted(allowed, np.array(most, np.int64), side="right").astype(np.int64),
            )
        ),
    )
    return Problem(workload, tables, resync)


def chain_problem(
    instance: Instance, graph: LayerGraph, options: TmpcOptions, order: Sequence[int], degrees: Sequence[int]
) -> Problem:
    """The problem of plans whose stages are runs of ``order``: the vertices, each after its successors.

    degrees: data-parallel ones that a stage can have, ascending.
    """
    return build_problem(LatticeTables.build(chain_lattice(graph, order), options), instance, degrees)


def _resync_s_per_byte(workload: LatticeTables, instance: Instance, data_parallel_degrees: Sequence[int]) -> FloatArray:
    """float64[r]. All degrees of a variant, but 1, have the same link (``variants.by_links``)."""
    return np.array(
        [
            resync_s_per_byte(
                instance,
                next((d for d in data_parallel_degrees if max(2, x.least_data_parallel_degree) <= d), 1),
                x.degree,
            )
            for x in workload.options.variants
        ],
        np.float64,
    )
