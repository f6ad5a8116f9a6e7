"""Plans with one d and one t for all stages: which degrees and how many ranks they may have, and
how long they take to sum gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper_ray.cost.variants import Variant
from piper_ray.model.cluster import Cluster
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms

MOST_CHUNKS = 8
"""Of a rank, where nobody asks for more: runtimes seldom go further, as each chunk costs transfers and launches."""


def most_chunks(given: Schedule | ScheduleName | str) -> int | None:
    """Of a rank, where a solve looks for their number; None where that is given, by the schedule's own rule too."""
    schedules = chunk_schedules(given)
    return max(schedule.v for schedule in schedules) if len(schedules) > 1 else None


def chunk_schedules(given: Schedule | ScheduleName | str) -> tuple[Schedule, ...]:
    """A schedule as it is; where its chunks are open those with every number of them that may pay."""
    usual = Schedule.of(given)
    if not usual.chunks_are_open:
        return (usual,)
    return tuple(Schedule(usual.name, chunks, usual.group) for chunks in range(1, MOST_CHUNKS + 1))


def degree_pairs(
    instance: Instance, restrictions: Restrictions, variants: Sequence[Variant]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Each d and t that stages may have, and the numbers of the variants that have both."""
    for d in restrictions.data_parallel_degrees(instance):
        for t in sorted({variant.degree for variant in variants}):
            usable = tuple(
                number
                for number, variant in enumerate(variants)
                if variant.degree == t and variant.least_data_parallel_degree <= d <= variant.most_data_parallel_degree
            )
            if usable:
                yield d, t, usable


def rank_counts(instance: Instance, restrictions: Restrictions, devices: int) -> range:
    """p, the ranks of a pipeline, where each takes so many devices and none is without a layer."""
    most, wanted = instance.devices // devices, restrictions.stage_count
    least = 1
    if restrictions.all_devices:
        least = most if instance.devices % devices == 0 else most + 1
    if wanted is not None:
        least, most = max(least, wanted), min(most, wanted)
    return range(least, min(most, len(instance.layers)) + 1)


def sync_s_per_byte(step: StepTerms, cluster: Cluster, data_parallel_degree: int, tensor_parallel_degree: int) -> float:
    """Seconds at the end of a step for each byte of a stage's weights, whose gradients d replicas sum up, as far as
    these do not hide beside backward passes. The optimizer takes every rank as long, so it is none of a plan's figures.
    """
    d, link = data_parallel_degree, cluster.replicas_link(data_parallel_degree, tensor_parallel_degree)
    return step.all_reduce.factor * (1.0 - step.all_reduce_overlap) * (d - 1) / d / link.bandwidth_bytes_per_s
