"""What a training step takes beside the passes of its microbatches."""

from __future__ import annotations

from piper_ray.model.cluster import Cluster
from piper_ray.model.schedule import StepTerms


def sync_s_per_byte(step: StepTerms, cluster: Cluster, data_parallel_degree: int, tensor_parallel_degree: int) -> float:
    """Seconds at the end of a step for each byte of a stage's weights, whose gradients d replicas sum up, as far as
    these do not hide beside backward passes. The optimizer takes every rank as long, so it is none of a plan's figures.
    """
    d, link = data_parallel_degree, cluster.replicas_link(data_parallel_degree, tensor_parallel_degree)
    return step.all_reduce.factor * (1.0 - step.all_reduce_overlap) * (d - 1) / d / link.bandwidth_bytes_per_s
