"""What no plan's time per sample is below, and what it is never above: where a search begins."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.cost.tolerances import RESOLUTION
from piper_ray.model.instance import Instance

_ROUNDING = 1e-12
"""Relative. Sums of the same figures in another order differ by less."""


class LayersAlone(NamedTuple):
    """Of each layer in each variant (n, r) the least figures: what any stage with it takes for it on one device.

    work_s, resync_s: float64[n, r]. missing: int64[n, r], 1 where the variant has no TMPC for the layer.
    """

    work_s: npt.NDArray[np.float64]
    resync_s: npt.NDArray[np.float64]
    missing: npt.NDArray[np.int64]


class DegreesAllowed(NamedTuple):
    """devices: K. data_parallel_limit: of the sum of data-parallel degrees. tensor_parallel: int64[r], t.

    data_parallel: int64[..], ascending; a stage of variant r has one of first[r] .. end[r] - 1 of them (int64[r] both).
    """

    devices: int
    data_parallel_limit: int
    tensor_parallel: npt.NDArray[np.int64]
    data_parallel: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]


def lower_bound_s(device_work_s: float, replica_work_s: float, layers: LayersAlone, degrees: DegreesAllowed) -> float:
    """max of: all work over all devices; all replicas' work over the data-parallel limit; the largest single layer.

    device_work_s: sum over layers of the least t * p. replica_work_s: of the least p. In s per sample.
    """
    # Each layer alone, at each variant and degree that the devices allow: no stage with it is faster.
    d = degrees.data_parallel.astype(np.float64)
    alone_s = (layers.work_s[:, :, None] + (d - 1.0) * layers.resync_s[:, :, None]) / d
    index = np.arange(degrees.data_parallel.size)
    in_range = (degrees.first[:, None] <= index) & (index < degrees.end[:, None])
    within = in_range & (degrees.tensor_parallel[:, None] * degrees.data_parallel <= degrees.devices)
    allowed = (layers.missing[:, :, None] == 0) & within
    layer_s = np.where(allowed, alone_s, np.inf).min(axis=(1, 2), initial=np.inf)
    bounds = [
        device_work_s / degrees.devices,
        replica_work_s / degrees.data_parallel_limit,
        *(float(value) for value in layer_s),
    ]
    finite = [bound for bound in bounds if np.isfinite(bound)]
    return max(finite) * (1.0 - _ROUNDING)


def ceiling_s(instance: Instance) -> float:
    """No plan is slower: every layer's slowest TMPC, every edge crossing twice, and all weights synchronised, over the
    slowest link."""
    total_s = 0.0
    for layer in instance.layers:
        tmpcs = [tmpc for of_degree in layer.tmpcs.values() for tmpc in of_degree]
        charges = [sum(tmpc.forward_sync_bytes.values()) + sum(tmpc.backward_sync_bytes.values()) for tmpc in tmpcs]
        total_s += max(tmpc.time_per_sample_s for tmpc in tmpcs)
        total_s += instance.cluster.transfer_s(2.0 * max(charges))
        weights_bytes = max(tmpc.weights_bytes for tmpc in tmpcs)
        total_s += instance.cluster.links[-1].resync_s(weights_bytes, instance.microbatches)
    crossing_bytes = 4.0 * sum(edge.communication_bytes for edge in instance.edges)
    crossing_bytes += sum(tensor.forward_bytes + tensor.backward_bytes for tensor in instance.tensors)
    ceiling = (total_s + instance.cluster.transfer_s(crossing_bytes)) * (1.0 + 1e-9)
    return max(ceiling, RESOLUTION)  # above the lower bound of 0 where nothing takes any time


def ceiling_bytes(instance: Instance) -> float:
    """No stage holds more: every layer's largest TMPC, with as many microbatches in flight as there can be."""
    limit = instance.data_parallel_limit
    return sum(
        max(
            (
                tmpc.activation_bytes * limit + tmpc.fixed_bytes + tmpc.shared_bytes
                for of_degree in layer.tmpcs.values()
                for tmpc in of_degree
            ),
            default=0.0,
        )
        for layer in instance.layers
    )
