"""Upper limits on any plan's time per sample, and on any stage's memory."""

from __future__ import annotations

from piper_ray.cost.tolerances import RESOLUTION
from piper_ray.model.cluster import Link
from piper_ray.model.instance import Instance


def ceiling_s(instance: Instance) -> float:
    """Returns a time that no plan exceeds: every layer's slowest TMPC, every edge crossing twice, and all weights
    synchronised, over the slowest link."""
    total_s = 0.0
    for layer in instance.layers:
        tmpcs = [tmpc for of_degree in layer.tmpcs.values() for tmpc in of_degree]
        charges = [sum(tmpc.forward_sync_bytes.values()) + sum(tmpc.backward_sync_bytes.values()) for tmpc in tmpcs]
        total_s += max(tmpc.time_per_sample_s for tmpc in tmpcs)
        total_s += instance.cluster.transfer_s(2.0 * max(charges))
        weights_bytes = max(tmpc.weights_bytes for tmpc in tmpcs)
        total_s += Link(instance.cluster.bandwidth_bytes_per_s).resync_s(weights_bytes, instance.microbatches)
    crossing_bytes = 4.0 * sum(edge.communication_bytes for edge in instance.edges)
    crossing_bytes += sum(tensor.forward_bytes + tensor.backward_bytes for tensor in instance.tensors)
    ceiling = (total_s + instance.cluster.transfer_s(crossing_bytes)) * (1.0 + 1e-9)
    return max(ceiling, RESOLUTION)  # above the lower bound of 0 if nothing takes any time


def ceiling_bytes(instance: Instance, in_flight: int) -> float:
    """Returns the bytes that no stage exceeds: every layer's largest TMPC, with ``in_flight`` microbatches in
    flight."""
    return sum(
        max(
            (
                tmpc.activation_bytes * in_flight + tmpc.fixed_bytes + tmpc.shared_bytes
                for of_degree in layer.tmpcs.values()
                for tmpc in of_degree
            ),
            default=0.0,
        )
        for layer in instance.layers
    )
