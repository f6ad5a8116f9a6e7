"""Golden records as instances, with the values they must have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from piper_ray.model.instance import Instance
from piper_ray.workloads.formats import load
from tests.data import WORKLOADS, goldens

GIB = 2**30


@dataclass(frozen=True)
class RandomGolden:
    """A random instance. time_per_sample_s: its exact optimum, None if infeasible.

    reference: what the published implementation makes of it, None where that cannot run or finds nothing.
    """

    number: int
    instance: Instance
    time_per_sample_s: float | None
    reference: float | None


@dataclass(frozen=True)
class PublishedGolden:
    """The published implementation on a published workload: its value (None: infeasible) and what it took.

    Its TMPC choice is greedy: an exact value is at most this one.
    """

    name: str
    workload: str
    instance: Instance
    time_per_sample_s: float | None
    stages: int
    downsets: int
    pairs: int
    cpu_s: float


def random_goldens() -> Iterator[RandomGolden]:
    for number, record in enumerate(goldens("random")):
        yield RandomGolden(number, load(record["instance"]), record["time_per_sample_s"], record.get("reference_s"))


@cache
def published_goldens() -> tuple[PublishedGolden, ...]:
    found = []
    for record in goldens("published"):
        instance = load(
            WORKLOADS[record["workload"]],
            devices=record["devices"],
            microbatches=record["microbatches"],
            memory_bytes=record["memory_gib"] * GIB,
            bandwidth_bytes_per_s=record["bandwidth_gib_per_s"] * GIB,
        )
        found.append(
            PublishedGolden(
                name=f"{record['workload']} K={instance.devices} N={instance.microbatches} M={record['memory_gib']}GiB",
                workload=record["workload"],
                instance=instance,
                time_per_sample_s=record["time_per_sample_s"],
                stages=record["stages"],
                downsets=record["downsets"],
                pairs=record["pairs"],
                cpu_s=record["cpu_s"],
            )
        )
    return tuple(found)


def assert_same_time(found_s: float | None, expected_s: float | None, what: object, relative: float = 1e-9) -> None:
    """Both infeasible (None), or equal to 1e-9. ``what``: the record, for the message."""
    if found_s is None or expected_s is None:
        assert found_s is expected_s, what
    else:
        assert math.isclose(found_s, expected_s, rel_tol=relative), (found_s, expected_s, what)
