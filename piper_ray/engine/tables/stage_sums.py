"""Stage-cost tables: sums over each downset, of which a stage's cost is a difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.kernels.sums import crossing_sums
from piper_ray.engine.kernels.types import CostArrays, FloatArray, IndexArray
from piper_ray.engine.lattice.downsets import Lattice
from piper_ray.engine.tables.tmpc_options import TmpcOptions


@dataclass(frozen=True)
class StageSums:
    """Sums over each downset; depend on none of K, N, M, B. All float64[m, r] but ``missing``.

    many_s, one_s: what choices take more than the fastest, memory priced: see engine/kernels/scan.py.
    least_shared, fast_shared: float64[0, r] where no option has bytes to share out.
    tensor_bytes: float64[m, 1], of the tensors that the downset cuts.
    in_bytes, out_bytes: over the crossing edges, least charge in the stage of the head, and of the tail.
    device_work_s: float64[m], sum over layers of the least t * p: devices times seconds that it needs at least.
    replica_work_s: float64[m], the same with p: sum of data-parallel degrees times seconds.
    """

    work_s: FloatArray
    weights_bytes: FloatArray
    least_a: FloatArray
    least_b: FloatArray
    fast_a: FloatArray
    fast_b: FloatArray
    many_s: FloatArray
    one_s: FloatArray
    least_shared: FloatArray
    fast_shared: FloatArray
    missing: IndexArray
    tensor_bytes: FloatArray
    in_bytes: FloatArray
    out_bytes: FloatArray
    device_work_s: FloatArray
    replica_work_s: FloatArray


def build_sums(lattice: Lattice, options: TmpcOptions) -> StageSums:
    """One pass over the lattice for each figure."""
    least = options.least
    missing = least.missing > 0

    def over_crossing(values: FloatArray) -> FloatArray:
        return crossing_sums(lattice.arrays.crossing_start, lattice.arrays.crossing, values)

    def if_any(values: FloatArray) -> FloatArray:
        return lattice.sums(values) if options.shares else np.zeros((0, values.shape[1]))

    degree = options.arrays.degree.astype(np.float64)
    device_work = np.where(missing, np.inf, least.work_s * degree).min(axis=1, keepdims=True)
    replica_work = np.where(missing, np.inf, least.work_s).min(axis=1, keepdims=True)
    return StageSums(
        work_s=lattice.sums(least.work_s),
        weights_bytes=lattice.sums(least.weights_bytes),
        least_a=lattice.sums(least.least_a),
        least_b=lattice.sums(least.least_b),
        fast_a=lattice.sums(least.fast_a),
        fast_b=lattice.sums(least.fast_b),
        many_s=lattice.sums(least.many_s),
        one_s=lattice.sums(least.one_s),
        least_shared=if_any(least.least_shared),
        fast_shared=if_any(least.fast_shared),
        tensor_bytes=_cut_bytes(lattice, options),
        missing=lattice.sums(least.missing.astype(np.float64)).astype(np.int64),
        in_bytes=over_crossing(least.in_bytes),
        out_bytes=over_crossing(least.out_bytes),
        device_work_s=lattice.sums(device_work)[:, 0].copy(),
        replica_work_s=lattice.sums(replica_work)[:, 0].copy(),
    )


def _cut_bytes(lattice: Lattice, options: TmpcOptions) -> FloatArray:
    arrays = lattice.arrays
    if not lattice.graph.tensors:
        return np.zeros((lattice.size, 1))
    return crossing_sums(arrays.cut_start, arrays.cut, options.tensor_bytes[:, None].copy())


def cost_arrays(
    sums: StageSums, options: TmpcOptions, resync_s_per_byte: FloatArray, transfer_s_per_byte: float
) -> CostArrays:
    """The sums in seconds: a byte of weights as 4 / (N B) of each variant (float64[r]), one that crosses an edge as
    2 / B, of a tensor as 1 / B."""
    cut_s = 0.5 * transfer_s_per_byte * sums.tensor_bytes
    edges_s = transfer_s_per_byte * (options.least.in_bytes + options.least.out_bytes)
    tensors_s = transfer_s_per_byte * options.tensor_bytes
    return CostArrays(
        need_s=sums.work_s + transfer_s_per_byte * sums.in_bytes + cut_s,
        cap_s=sums.work_s - transfer_s_per_byte * sums.out_bytes - cut_s,
        resync_s=sums.weights_bytes * resync_s_per_byte,
        least_a=sums.least_a,
        least_b=sums.least_b,
        fast_a=sums.fast_a,
        fast_b=sums.fast_b,
        many_s=sums.many_s,
        one_s=sums.one_s,
        least_shared=sums.least_shared,
        fast_shared=sums.fast_shared,
        missing=sums.missing,
        both_s=np.ascontiguousarray(np.vstack([edges_s, np.tile(tensors_s[:, None], edges_s.shape[1])]).T),
    )
