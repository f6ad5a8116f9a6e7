"""The problem of an evaluation: the tables of one workload on one cluster, in the form that the kernels take.

Also measures how fast work is done: the time of a bucket bound differs a thousandfold between problems.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from piper_ray.cost.stage import resync_s_per_byte, transfer_s_per_byte
from piper_ray.cost.tolerances import MEMORY_TOLERANCE
from piper_ray.cost.variants import Variant
from piper_ray.engine.kernels.downsets import crossing_sums
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
from piper_ray.engine.lattice.layer_graph import LayerGraph, number_graph
from piper_ray.engine.tables.tmpc_options import TmpcOptions, VertexCosts, build_options
from piper_ray.model.instance import Instance

_ENOUGH_BOUNDS, _ENOUGH_S = 10_000, 2e-4
"""Calls with fewer bounds and fewer seconds than these are not measured: most of their time is the call itself."""

_LEAST_S = 1e-12
_WEIGHT = 0.3  # of the newest figure in the running mean


@dataclass
class Rate:
    """Seconds that one thread takes for a bucket bound, with the work that follows from it. A guess until it is
    measured."""

    s_per_bound: float = 8e-9
    measured: bool = False

    def record(self, bounds: int, seconds: float) -> None:
        """Records a measurement. bounds: as estimated beforehand, the number of downsets times that of buckets."""
        if bounds <= 0 or seconds <= 0 or (bounds < _ENOUGH_BOUNDS and seconds < _ENOUGH_S):
            return
        newest = max(seconds / bounds, _LEAST_S)
        self.s_per_bound += (_WEIGHT if self.measured else 1.0) * (newest - self.s_per_bound)
        self.measured = True

    def seconds(self, bounds: int) -> float:
        return bounds * self.s_per_bound

    def bounds_within(self, seconds: float) -> float:
        """Returns the number of bounds that a kernel call should make within ``seconds``; a small number until one is
        measured."""
        return seconds / self.s_per_bound if self.measured and self.s_per_bound > 0 else _ENOUGH_BOUNDS


@dataclass
class Rates:
    """The rates of one problem. far: over finished levels. near: among the levels of a batch, where stages are short
    and more of them fit.
    """

    far: Rate = field(default_factory=Rate)
    near: Rate = field(default_factory=lambda: Rate(3e-8))


_ROUNDING = 1e-12
"""Relative. Sums of the same figures in another order differ by less."""


class StageSums(NamedTuple):
    """Sums over each downset. A stage's cost is a difference of two of them. They do not depend on K, N, M, B.

    figures: float64[m, r] each, sums over its vertices; ``in_bytes``, ``out_bytes``: over its crossing edges. Those of
    shared bytes are float64[0, r] if no option has any.
    tensor_bytes: float64[m, 1], of the tensors that the downset cuts.
    device_work_s: float64[m], sum over layers of the least t * p: the least devices times seconds that it needs.
    replica_work_s: float64[m], the same with p: the least data-parallel degrees times seconds.
    """

    figures: VertexCosts
    tensor_bytes: FloatArray
    device_work_s: FloatArray
    replica_work_s: FloatArray


def build_sums(lattice: Lattice, options: TmpcOptions) -> StageSums:
    """Computes the sums, in one pass over the lattice for each figure."""
    least = options.least

    def summed(name: str, values: Any) -> Any:
        if name in ("in_bytes", "out_bytes"):
            return crossing_sums(lattice.arrays.crossing_start, lattice.arrays.crossing, values)
        if name in ("least_shared", "fast_shared") and not options.shares:
            return np.zeros((0, values.shape[1]))
        return lattice.sums(values).astype(values.dtype, copy=False)

    def work_s(of_variant: FloatArray) -> FloatArray:
        cheapest = np.where(least.missing > 0, np.inf, of_variant).min(axis=1, keepdims=True)
        return lattice.sums(cheapest)[:, 0].copy()

    return StageSums(
        VertexCosts(**{name: summed(name, values) for name, values in least._asdict().items()}),
        _cut_bytes(lattice, options),
        device_work_s=work_s(least.work_s * options.arrays.degree.astype(np.float64)),
        replica_work_s=work_s(least.work_s),
    )


def _cut_bytes(lattice: Lattice, options: TmpcOptions) -> FloatArray:
    arrays = lattice.arrays
    if not lattice.graph.tensors:
        return np.zeros((lattice.size, 1))
    return crossing_sums(arrays.cut_start, arrays.cut, options.tensor_bytes[:, None].copy())


def cost_arrays(
    sums: StageSums, options: TmpcOptions, resync_s_per_byte: FloatArray, transfer_s_per_byte: float
) -> CostArrays:
    """Returns the sums in seconds: for a byte of weights, 4 / (N B) of each variant (float64[r]); for a byte that
    crosses an edge, 2 / B; for a byte of a tensor, 1 / B."""
    figures = sums.figures
    as_they_are = {name: values for name, values in figures._asdict().items() if name in CostArrays._fields}
    cut_s = 0.5 * transfer_s_per_byte * sums.tensor_bytes
    edges_s = transfer_s_per_byte * (options.least.in_bytes + options.least.out_bytes)
    tensors_s = transfer_s_per_byte * options.tensor_bytes
    return CostArrays(
        need_s=figures.work_s + transfer_s_per_byte * figures.in_bytes + cut_s,
        cap_s=figures.work_s - transfer_s_per_byte * figures.out_bytes - cut_s,
        resync_s=figures.weights_bytes * resync_s_per_byte,
        both_s=np.ascontiguousarray(np.vstack([edges_s, np.tile(tensors_s[:, None], edges_s.shape[1])]).T),
        **as_they_are,
    )


@dataclass(frozen=True)
class LatticeTables:
    """Lattice and stage sums. They do not depend on K, N, M, B."""

    lattice: Lattice
    options: TmpcOptions
    sums: StageSums

    @classmethod
    def build(cls, lattice: Lattice, options: TmpcOptions) -> LatticeTables:
        return cls(lattice, options, build_sums(lattice, options))


@dataclass(frozen=True)
class Problem:
    """A workload on a cluster. resync_s_per_byte: float64[r], 4 / (N B); multiplied by weights and d - 1, it gives
    seconds of a stage on one device."""

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
        """The scratch of the calling thread."""
        if not hasattr(self._scratch, "cache"):
            self._scratch.cache = make_step_cache(self.tables)
        cache: StepCache = self._scratch.cache
        return cache

    def work_s(self) -> float:
        """Returns the seconds per sample of a plan that uses all devices and wastes nothing."""
        return max(self._work_s())

    def _work_s(self) -> tuple[float, float]:
        """Returns all work divided by all devices, and by all replicas, in s."""
        sums, cluster = self.workload.sums, self.cluster
        by_devices = float(sums.device_work_s[-1]) / cluster.devices
        return by_devices, float(sums.replica_work_s[-1]) / cluster.data_parallel_limit

    def lower_bound_s(self) -> float:
        """Returns a lower bound on the seconds per sample of any plan: the largest of all work divided by all devices,
        the work of all replicas divided by the limit on the sum of d, and any single layer's time."""
        least, cluster = self.workload.options.least, self.cluster
        # No stage with a layer is faster than that layer alone, with the best variant and degree that the devices
        # allow.
        d = cluster.divisors.astype(np.float64)
        resync_s = least.weights_bytes * self.resync_s_per_byte
        alone_s = (least.work_s[:, :, None] + (d - 1.0) * resync_s[:, :, None]) / d
        index = np.arange(d.size)
        in_range = (cluster.first_divisor[:, None] <= index) & (index < cluster.end_divisor[:, None])
        within = in_range & (self.options.degree[:, None] * cluster.divisors <= cluster.devices)
        allowed = (least.missing[:, :, None] == 0) & within
        layer_s = np.where(allowed, alone_s, np.inf).min(axis=(1, 2), initial=np.inf)
        bounds_s = np.append(layer_s, self._work_s())
        return float(bounds_s[np.isfinite(bounds_s)].max()) * (1.0 - _ROUNDING)

    def with_cluster(self, cluster: ClusterArrays) -> Problem:
        """Returns the problem with the same tables on another cluster, e.g. with another memory limit. N and B must be
        the same."""
        scratch = self._scratch if cluster.memory_bytes == self.cluster.memory_bytes else threading.local()
        return replace(self, tables=self.tables._replace(cluster=cluster), _scratch=scratch)


def build_problem(workload: LatticeTables, instance: Instance, data_parallel_degrees: Sequence[int]) -> Problem:
    """Scales the workload's sums to the instance's N and B, and takes its K and M.

    data_parallel_degrees: the degrees that a stage can have, ascending.
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
    """Returns the problem of plans whose stages are runs of ``order``: the vertices, each after its successors.

    degrees: the data-parallel degrees that a stage can have, ascending.
    """
    return build_problem(LatticeTables.build(chain_lattice(graph, order), options), instance, degrees)


def _resync_s_per_byte(workload: LatticeTables, instance: Instance, data_parallel_degrees: Sequence[int]) -> FloatArray:
    """Returns float64[r]. All degrees of a variant, except 1, use the same link (``variants.by_links``)."""
    return np.array(
        [
            resync_s_per_byte(
                instance,
                next((d for d in data_parallel_degrees if max(2, x.least_data_parallel_degree) <= d), 1),
                x.degree,
                x.kind,
            )
            for x in workload.options.variants
        ],
        np.float64,
    )


def tables_of_nothing() -> Tables:
    """Returns the tables of a graph without layers. Kernels are compiled for types, not for sizes."""
    instance, graph = Instance((), (), 1, 1, 1.0, 1.0), number_graph((), ())
    return chain_problem(instance, graph, build_options(instance, graph, [Variant(1, {})]), (), (1,)).tables
