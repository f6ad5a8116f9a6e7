"""The time and memory of a stage under Piper's schedule, asynchronous 1F1B (PipeDream-2BW), as the solver computes
them.

A stage has d replicas. Its layers take ``work_s`` on one device (time and communication per sample), and its weights
``resync_s`` for each further replica: it takes (work + (d - 1) resync) / d. Each replica holds a y + b + shared / d
bytes with y microbatches in flight. ``evaluate``, the paper's table and the tests' brute force have these formulas
separately, on purpose. Source: Piper, section 3.
"""

from __future__ import annotations

from piper_ray.compiled.jit import leaf_kernel
from piper_ray.model.instance import Instance


def resync_s_per_byte(
    instance: Instance, data_parallel_degree: int, tensor_parallel_degree: int, kind: str = ""
) -> float:
    """Returns 4 / (N B). Multiplied by weights and d - 1, it gives the seconds per sample of a stage on one device. B
    is the bandwidth of its replicas' link. kind: of the stage's devices, if there are several."""
    link = instance.cluster.of_kind(kind).replicas_link(data_parallel_degree, tensor_parallel_degree)
    return link.resync_s(1.0, instance.microbatches)


def transfer_s_per_byte(instance: Instance) -> float:
    """Returns 2 / B: a tensor is sent forwards, and its gradient back."""
    return instance.cluster.transfer_s(2.0)


@leaf_kernel
def one_device_s(work_s: float, resync_s: float, d: int) -> float:
    """Returns d times the time of a stage of d replicas."""
    return work_s + (d - 1) * resync_s


@leaf_kernel
def in_flight(later_sum: int, d: int) -> int:
    """Returns y = ceil(s / d) with s = later_sum + d: the microbatches that a stage of degree d keeps in flight.

    later_sum: the sum of d of the stages behind.
    """
    return 1 + (later_sum + d - 1) // d


@leaf_kernel
def held_bytes(a_bytes: float, b_bytes: float, shared_bytes: float, y: int, d: int) -> float:
    """Returns the bytes on each of d replicas with y microbatches in flight."""
    return a_bytes * y + b_bytes + shared_bytes / d
