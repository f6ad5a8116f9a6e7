"""What a solve under a flush answers."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.cost.schedules import FlushSchedule
from piper_ray.engine.flush.plans import FlushPlan
from piper_ray.model.plan import Plan
from piper_ray.model.solution import Status
from piper_ray.model.stop import StoppedBy


@dataclass(frozen=True)
class FlushStats:
    """What a solve took. tasks: pairs (d, t) that fit the cluster; searched: those whose bound did not rule them out.

    states: pipeline tails kept, over all tasks. looked_through: those in which plans were looked at one by one.
    """

    downsets: int
    levels: int
    threads: int
    tasks: int
    searched: int
    looked_through: int
    states: int
    lattice_s: float
    stage_costs_s: float
    search_s: float


@dataclass(frozen=True)
class FlushSolution:
    """The best plan found, what its batch takes simulated, and what is proved of every plan's batch under the schedule.

    lower_bound_batch_s: inf if there is no plan. stopped_by: what ended the search before a proof; None if it ended by
    itself.
    reason: why there is no plan, where there is none. least_memory_bytes: of a device, with which there is one;
    None: not known.
    """

    status: Status
    schedule: FlushSchedule
    microbatches: int
    best: FlushPlan | None
    lower_bound_batch_s: float
    stats: FlushStats
    stopped_by: StoppedBy | None = None
    reason: str | None = None
    least_memory_bytes: float | None = None

    @property
    def plan(self) -> Plan | None:
        return None if self.best is None else self.best.plan

    @property
    def time_per_sample_s(self) -> float | None:
        """Seconds of the simulated batch for each of its N microbatches."""
        return None if self.best is None else self.best.batch_s / self.microbatches

    @property
    def lower_bound_s(self) -> float:
        """No plan takes less for a microbatch under this schedule."""
        return self.lower_bound_batch_s / self.microbatches

    @property
    def gap(self) -> float | None:
        if self.best is None:
            return None
        if self.best.batch_s <= 0.0:
            return 0.0
        return max(0.0, (self.best.batch_s - self.lower_bound_batch_s) / self.best.batch_s)
