"""The optimizer's state in host memory, where parameters are updated: what it does to an estimate.

Of U parameters of a stage's replica each of d replicas updates U / d once a batch, on the host, while its GPU waits:
k U / d seconds, gradients down and weights up included. That is k U / N for each of N / d microbatches at any d, so a
TMPC can have this price. Between the first and the last microbatch of a pipeline it counts p - 1 times too often.
"""

from __future__ import annotations

from dataclasses import replace

from piper_ray.model.instance import Instance, Layer, Tmpc, with_rows
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.workloads.estimate.costs import Setting, rounded_s

HOST_BYTES = 16.0
"""Of host memory for each parameter: fp32 weights, two moments, and gradients on their way."""


def with_state_on_host(instance: Instance, setting: Setting) -> Instance:
    """The instance with the TMPCs whose replicas share the optimizer's state, or have none; no GPU holds it."""
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
