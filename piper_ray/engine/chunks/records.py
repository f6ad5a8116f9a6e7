"""What a solve under a schedule with chunks is asked beside ``FlushConstraints``, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_ray.cost.chunk_schedules import ChunkSchedule, PipelineShape
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.model.errors import UsageError
from piper_ray.model.plan import Plan
from piper_ray.model.solution import Status

_MOST_CHUNKS = 8
"""Of a rank, where nobody asks for more: runtimes seldom go further, as each chunk costs transfers and launches."""


@dataclass(frozen=True)
class ChunkRules:
    """Raises UsageError for figures that make no sense.

    chunks: the numbers of chunks on a rank that may be; None: 2 for the V-shaped, 1 for zb-h1, 1 to 8 for others.
    group: of microbatches, see ``PipelineShape``; None: the least that suits.
    """

    chunks: frozenset[int] | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if self.chunks is not None and (not self.chunks or min(self.chunks) < 1):
            raise UsageError(f"a rank holds one chunk or more, not {sorted(self.chunks)}")
        if self.group is not None and self.group < 1:
            raise UsageError(f"a group has one microbatch or more, not {self.group}")

    def chunk_counts(self, schedule: ChunkSchedule, most: int) -> Sequence[int]:
        """v, ascending, where each rank can have ``most``. Raises UsageError if the schedule has none that is asked for."""
        if schedule.v_shaped:
            usual: Sequence[int] = (2,)
        else:
            usual = (1,) if schedule is ChunkSchedule.ZB_H1 else range(1, _MOST_CHUNKS + 1)
        if self.chunks is not None:
            if schedule.v_shaped and 2 not in self.chunks:
                raise UsageError(f"schedule {schedule.value} has two chunks on each rank, not {sorted(self.chunks)}")
            usual = (2,) if schedule.v_shaped else sorted(self.chunks)
        return [v for v in usual if v <= most]


@dataclass(frozen=True)
class ChunkPlan:
    """plan: its stages are the chunks, front to back; ranks hold them as ``shape`` says.

    batch_s: of the whole batch, simulated. seconds: float64[stages, 3], what each takes for a microbatch: forward,
    gradients of inputs, gradients of weights, with transfers. sync_s: float64[ranks], after the last pass.
    """

    plan: Plan
    shape: PipelineShape
    batch_s: float
    seconds: FloatArray
    sync_s: FloatArray

    @property
    def devices(self) -> int:
        """Ranks share theirs among their chunks."""
        return self.plan.devices // self.shape.chunks


@dataclass(frozen=True)
class ChunkStats:
    """What a solve took. tasks: shapes with d and t that fit the cluster; bounded: those that were looked into.

    borders_counted: whether transfers are part of the bound; they are not where a graph has too many downsets.
    """

    threads: int
    tasks: int
    bounded: int
    borders_counted: bool
    tables_s: float
    search_s: float


@dataclass(frozen=True)
class ChunkSolution:
    """The best plan found, what its batch takes simulated, and what is proved of every plan's batch under the schedule.

    status: FEASIBLE unless value and bound meet. lower_bound_batch_s: inf if there is no plan. stopped_by: what ended
    the search before both met ("time limit", "gap", "interrupt", "bound"); "bound": it gets no further by itself.
    reason: why there is no plan, where there is none.
    """

    status: Status
    schedule: ChunkSchedule
    microbatches: int
    best: ChunkPlan | None
    lower_bound_batch_s: float
    stats: ChunkStats
    stopped_by: str | None = None
    reason: str | None = None

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
