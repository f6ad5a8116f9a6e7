"""Plans with one d and one t for all stages: the degrees and numbers of ranks that they may have, and the time to sum
their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from piper_ray.cost.variants import Variant
from piper_ray.model.cluster import Cluster
from piper_ray.model.constraints import Restrictions, SameDegrees
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms

MOST_CHUNKS = 8
"""The most chunks of a rank that are tried by default. Runtimes seldom use more, as each chunk costs transfers and
launches."""


def most_chunks(given: Schedule | ScheduleName | str) -> int | None:
    """Returns the most chunks of a rank that a solve tries; None if the number is given, or follows from the
    schedule."""
    schedules = chunk_schedules(given)
    return max(schedule.v for schedule in schedules) if len(schedules) > 1 else None


def chunk_schedules(given: Schedule | ScheduleName | str) -> tuple[Schedule, ...]:
    """Returns the schedule; or, if its number of chunks is open, a schedule for each number that may pay."""
    usual = Schedule.of(given)
    if not usual.chunks_are_open:
        return (usual,)
    return tuple(Schedule(usual.name, chunks, usual.group, usual.ahead) for chunks in range(1, MOST_CHUNKS + 1))


def degree_choices(
    instance: Instance, restrictions: Restrictions, variants: Sequence[Variant]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields each d that stages may have, with each choice of a t for each kind of devices (0: no stages on this kind),
    and the numbers of the variants with these degrees."""
    names = instance.cluster.kind_names
    for d in restrictions.data_parallel_degrees(instance):
        there = {k: x for k, x in enumerate(variants) if _has_degree(x, d)}
        there = {k: x for k, x in there.items() if restrictions.admits_devices(d * x.degree, x.tmpcs.values())}
        if len(names) > 1:
            there = {k: x for k, x in there.items() if d * x.degree <= instance.cluster.of_kind(x.kind).devices}
        of_kinds = [sorted({x.degree for x in there.values() if x.kind == name}) for name in names]
        for degrees in choices_of_kinds(of_kinds, restrictions):
            usable = tuple(number for number, x in there.items() if x.degree == degrees[names.index(x.kind)])
            if usable:
                yield d, degrees, usable


def choices_of_kinds(of_kinds: Sequence[Sequence[int]], restrictions: Restrictions) -> Iterator[tuple[int, ...]]:
    """Returns choices of a t for each kind of devices, from those that are possible: one t for all kinds, or each its
    own. 0: none."""
    if SameDegrees() in restrictions.constraints:
        for t in sorted({t for found in of_kinds for t in found}):
            yield tuple(t if t in found else 0 for found in of_kinds)
    else:
        yield from product(*(found or [0] for found in of_kinds))


def _has_degree(variant: Variant, d: int) -> bool:
    return variant.least_data_parallel_degree <= d <= variant.most_data_parallel_degree


def rank_counts(instance: Instance, restrictions: Restrictions, *devices: int) -> range:
    """Returns the possible numbers of ranks p, with a layer on each. devices: that each rank takes, on each kind of
    devices if there are several; 0: there are no ranks on this kind."""
    clusters = [own.devices for own in instance.cluster.alike]
    counts = [there // taken if taken > 0 else 0 for there, taken in zip(clusters, devices, strict=True)]
    most, wanted = sum(counts), restrictions.stage_count
    least = 1
    if restrictions.all_devices:
        least = most
        if any(there != count * taken for there, count, taken in zip(clusters, counts, devices, strict=True)):
            least = most + 1
    if wanted is not None:
        least, most = max(least, wanted), min(most, wanted)
    return range(least, min(most, len(instance.layers)) + 1)


def sync_s_per_byte(
    step: StepTerms,
    cluster: Cluster,
    data_parallel_degree: int,
    tensor_parallel_degree: int,
    stages: int | None = None,
) -> float:
    """Seconds at the end of a step for each byte of a stage's weights, whose gradients d replicas sum up, as far as
    these do not hide beside backward passes. The optimizer takes every rank as long, so it is none of a plan's figures.
    stages: see ``Cluster.replicas_link``.
    """
    d, link = data_parallel_degree, cluster.replicas_link(data_parallel_degree, tensor_parallel_degree, stages)
    return step.all_reduce.factor * (1.0 - step.all_reduce_overlap) * (d - 1) / d / link.bandwidth_bytes_per_s
