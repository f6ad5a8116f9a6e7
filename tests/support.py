"""Golden records as instances, with the values they must have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from piper_ray.model.instance import Instance
from piper_ray.workloads.formats.load import load
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

    workload: str
    devices: int
    microbatches: int | None
    memory_gib: float
    bandwidth_gib_per_s: float
    time_per_sample_s: float | None
    stages: int
    downsets: int
    pairs: int
    cpu_s: float

    @property
    def name(self) -> str:
        microbatches = "" if self.microbatches is None else f" N={self.microbatches}"
        return f"{self.workload} K={self.devices}{microbatches} M={self.memory_gib}GiB"

    @cached_property
    def instance(self) -> Instance:
        """Loaded by the test that needs it, not by each process that collects tests."""
        return load(
            WORKLOADS[self.workload],
            devices=self.devices,
            microbatches=self.microbatches,
            memory_bytes=self.memory_gib * GIB,
            bandwidth_bytes_per_s=self.bandwidth_gib_per_s * GIB,
        )


def random_goldens() -> Iterator[RandomGolden]:
    for number, record in enumerate(goldens("random")):
        yield RandomGolden(number, load(record["instance"]), record["time_per_sample_s"], record.get("reference_s"))


@cache
def published_goldens() -> tuple[PublishedGolden, ...]:
    return tuple(PublishedGolden(**record) for record in goldens("published"))


def assert_same_time(found_s: float | None, expected_s: float | None, what: object, relative: float = 1e-9) -> None:
    """Both infeasible (None), or equal to 1e-9. ``what``: the record, for the message."""
    if found_s is None or expected_s is None:
        assert found_s is expected_s, what
    else:
        assert math.isclose(found_s, expected_s, rel_tol=relative), (found_s, expected_s, what)
