"""Schedules that are planned with one d and one t for all stages: how many microbatches a stage holds, and what a step
takes beside their passes."""

from __future__ import annotations

from enum import Enum

from piper_ray.model.cluster import Cluster
from piper_ray.model.schedule import StepTerms


class FlushSchedule(str, Enum):
    """GPIPE: all forward passes, then all backward passes. ONE_F_ONE_B: 1F1B, PipeDream-Flush: a warm-up of forward
    passes, then a backward and a forward pass by turns, then the backward passes that are left. TWO_BW: Piper's own
    schedule, which never flushes; its plans may have one d and one t, too.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    TWO_BW = "2bw"

    @classmethod
    def flushed(cls) -> tuple[FlushSchedule, ...]:
        """Those that drain the pipeline after each batch."""
        return cls.GPIPE, cls.ONE_F_ONE_B

    def in_flight_microbatches(self, microbatches: int, stages_behind: int) -> int:
        """y: of how many of a replica's microbatches a stage holds the activations at once."""
        if self is FlushSchedule.TWO_BW:
            return stages_behind + 1
        return microbatches if self is FlushSchedule.GPIPE else min(microbatches, stages_behind + 1)


def sync_s_per_byte(step: StepTerms, cluster: Cluster, data_parallel_degree: int, tensor_parallel_degree: int) -> float:
    """Seconds at the end of a step for each byte of a stage's weights, whose gradients d replicas sum up, as far as
    these do not hide beside backward passes. The optimizer takes every rank as long, so it is none of a plan's figures.
    """
    d, link = data_parallel_degree, cluster.replicas_link(data_parallel_degree, tensor_parallel_degree)
    return step.all_reduce.factor * (1.0 - step.all_reduce_overlap) * (d - 1) / d / link.bandwidth_bytes_per_s
