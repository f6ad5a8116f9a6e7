"""What PipeDream's planner is told, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError


class States(str, Enum):
    """Where a partition may cut.

    DOWNSETS: everywhere. SINGLE_SOURCE: only the states that PipeDream itself grows, from the file's first source.
    ORDER: only along one topological order: n + 1 states for graphs with too many.
    """

    DOWNSETS = "downsets"
    SINGLE_SOURCE = "single-source"
    ORDER = "order"


@dataclass(frozen=True)
class Level:
    """Groups of ``machines`` devices, or groups of the level below, joined by links of ``bandwidth_bytes_per_s``."""

    machines: int
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        machines, bandwidth = arguments.whole(self.machines), arguments.number(self.bandwidth_bytes_per_s)
        if machines is None or machines < 1 or bandwidth is None or not bandwidth > 0.0:
            raise UsageError(
                f"a level needs at least 1 machine and a bandwidth above 0 in bytes per second, not {self}"
            )
        object.__setattr__(self, "machines", machines)
        object.__setattr__(self, "bandwidth_bytes_per_s", bandwidth)


@dataclass(frozen=True)
class Partition:
    """PipeDream's answer. stages: layer ids, front to back. replication: data-parallel degree of each.

    time_per_stage_s: the recurrence's value. states: what it ran over; as PipeDream counts, without that of no layers.
    """

    stages: tuple[tuple[int, ...], ...]
    replication: tuple[int, ...]
    time_per_stage_s: float
    states: int

    @property
    def noam(self) -> int:
        """The optimal number of minibatches in flight: machines / replicas of the first stage, rounded up."""
        return -(-sum(self.replication) // self.replication[0])
