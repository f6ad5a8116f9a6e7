"""The optimizer's state in host memory, where parameters are updated: how this changes an estimate.

If a replica of a stage has U parameters, each of d replicas updates U / d of them once a batch, on the host, while its
GPU waits: k U / d seconds, including the way of gradients down and of weights up. That is k U / N for each of N / d
microbatches, at any d, so a TMPC can carry this price. From the first to the last microbatch of a pipeline it counts p
- 1 times too often.
"""

from __future__ import annotations

from dataclasses import replace

from piper_ray.model.instance import Instance, Layer, Tmpc, with_rows
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.workloads.estimate.costs import Setting, rounded_s

HOST_BYTES = 16.0
"""Bytes of host memory for each parameter: fp32 weights, two moments, and gradients on their way."""


def with_state_on_host(instance: Instance, setting: Setting) -> Instance:
    """The instance with only those TMPCs whose replicas share the optimizer's state or have none. GPUs hold no such
    state."""
    byte_s = 1.0 / (setting.gpu.host_updates_per_s * setting.training.optimizer_bytes * setting.microbatches)

    def rows_of(layer: Layer) -> dict[int, tuple[Tmpc, ...]]:
        moved = {t: tuple(_on_host(tmpc, byte_s) for tmpc in row if _may_be(tmpc)) for t, row in layer.tmpcs.items()}
        return {t: row for t, row in moved.items() if row}

    model = None if instance.model is None else replace(instance.model, optimizer_on_host=True)
    return replace(instance, layers=with_rows(instance.layers, rows_of), model=model).checked_as(instance)


def _may_be(tmpc: Tmpc) -> bool:
    return tmpc.mode.optimizer_shards == ALL_REPLICAS or not tmpc.weights_bytes


def _on_host(tmpc: Tmpc, byte_s: float) -> Tmpc:
    if not tmpc.shared_bytes:
        return tmpc
    whole_s = rounded_s(tmpc.time_per_sample_s + byte_s * tmpc.shared_bytes)
    backward_s = None if tmpc.forward_s is None else whole_s - tmpc.forward_s
    return tmpc.changed(time_per_sample_s=whole_s, backward_s=backward_s, shared_bytes=0.0)
