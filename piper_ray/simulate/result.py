"""The result of a simulation: figures of the step and of each rank, and the timeline behind them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from piper_ray.model.figures import bytes_text, held_text, html_table, plural, time_text
from piper_ray.model.instance import Batch
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.run import SimulationOptions
from piper_ray.simulate.stages import StageLoad
from piper_ray.simulate.timeline import MemorySteps, Timeline, Versions, memory_steps

PROMISE_KEPT = 1.0 + 1e-6
"""A step within this factor of the promised one keeps the promise."""


_MEMORY_TOLERANCE = 1e-9
"""Relative tolerance, because sums round."""


@dataclass(frozen=True)
class Interval:
    """An interval of one rank's time.

    >>> interval = Interval(rank=0, start_s=0.5, end_s=0.75)
    >>> interval.end_s - interval.start_s
    0.25
    """

    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RankSimulation:
    """How one rank spends the simulated window (the step under a flush, else some periods of the steady state).

    compute_s: passes and the optimizer, without transfers. communication_s: transfers that delay passes, and
    all-reduce. waiting_s: idle while the next pass's input is on its way. bubble_s: otherwise idle. These add up to the
    length of ``window_s``. in_flight: the most microbatches at once, for each of its stages.
    fixed_memory_bytes: the constant part of the peak. memory_limit_bytes: the memory of its devices.
    versions: the versions of the weights, under PipeDream.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> simulation.ranks[0].devices
    1
    """

    name: str
    stages: tuple[int, ...]
    replica: int
    devices: int
    compute_s: float
    communication_s: float
    waiting_s: float
    bubble_s: float
    in_flight: tuple[int, ...]
    peak_memory_bytes: float
    fixed_memory_bytes: float
    memory_limit_bytes: float
    versions: Versions | None


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path: work of a rank, or a transfer, that delays the end of the step.

    what: "F", "B", "I", "W", "transfer" (on its way to ``rank``), "all-reduce" or "optimizer".
    communication_s: the part of a pass that is transfers.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> simulation.critical_path[0].what
    'F'
    """

    rank: int
    what: str
    stage: int | None
    microbatch: int | None
    start_s: float
    end_s: float
    communication_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """The time from its start to its end."""
        return self.end_s - self.start_s


def pass_of(timeline: Timeline, action: int) -> PathPart:
    """The pass with index ``action`` in the timeline."""
    return PathPart(
        int(timeline.rank_of_action[action]),
        ActionKind(timeline.kind[action]).name,
        int(timeline.stage[action]),
        int(timeline.microbatch[action]),
        float(timeline.start_s[action]),
        float(timeline.end_s[action]),
        float(timeline.communication_s[action]),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """A plan under a schedule, simulated event by event.

    batch: N microbatches, with their samples and tokens if known. step_s: the time of the batch, from the first forward
    pass to the last rank's end; for an asynchronous schedule, N times the long-run time of a microbatch.
    promised_s: the step time that an asynchronous schedule is planned for, N times the slowest stage's time; None under
    a flush. ranks: the ranks of one pipeline; ``pipelines`` equal ones run. window_s: start and end of the time that
    the ranks' figures cover. in_flight: for each stage, the microbatches that a replica may keep in flight under a 1F1B
    schedule. sustaining: the least numbers that would keep an asynchronous schedule's promise, if ``in_flight`` does
    not.
    critical_path: consecutive parts from 0 to the end of the step; empty for asynchronous schedules. steady: whether
    the asynchronous pipeline was simulated until it repeated itself; if not, step_s is the average of a long run.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> simulation = piper_ray.simulate(bert, solution.plan)
    >>> f"{simulation.step_s:.3f} s"
    '0.219 s'
    """

    schedule: Schedule
    options: SimulationOptions
    batch: Batch
    step_s: float
    pipelines: int
    ranks: tuple[RankSimulation, ...]
    stages: tuple[StageLoad, ...]
    window_s: tuple[float, float]
    in_flight: tuple[int, ...] | None
    timeline: Timeline
    notes: tuple[str, ...]
    promised_s: float | None = None
    sustaining: tuple[int, ...] | None = None
    all_reduces: tuple[Interval, ...] = ()
    optimizer_steps: tuple[Interval, ...] = ()
    critical_path: tuple[PathPart, ...] = ()
    steady: bool = True

    @property
    def keeps_promise(self) -> bool | None:
        """Whether an asynchronous schedule reaches the rate that it is planned for; None under a flush."""
        return None if self.promised_s is None else self.step_s <= self.promised_s * PROMISE_KEPT

    @property
    def time_per_sample_s(self) -> float:
        """step_s / N; Piper's sample is a microbatch."""
        return self.step_s / self.microbatches

    @property
    def microbatches(self) -> int:
        """N: the microbatches of a batch."""
        return self.batch.microbatches

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of the whole batch; None if the number of samples per microbatch is unknown."""
        return None if self.batch.samples is None else self._rate(self.batch.samples)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole batch; None if the number of tokens per microbatch is unknown."""
        tokens = self.batch.tokens_per_microbatch
        return None if tokens is None else self._rate(tokens * self.microbatches)

    def _rate(self, count: int) -> float:
        return count / self.step_s if self.step_s > 0 else float("inf")

    @property
    def devices(self) -> int:
        """The number of devices that the plan uses. Chunks of a rank share their devices."""
        return self.pipelines * sum(rank.devices for rank in self.ranks)

    @property
    def memory_limit_bytes(self) -> float:
        """The memory of a device; the largest if there are several kinds."""
        return max(rank.memory_limit_bytes for rank in self.ranks)

    @property
    def peak_memory_bytes(self) -> float:
        """The peak memory of a device, on the rank with the highest peak."""
        return max(rank.peak_memory_bytes for rank in self.ranks)

    @property
    def length_s(self) -> float:
        """The length of ``window_s``."""
        return self.window_s[1] - self.window_s[0]

    @property
    def bubble_share(self) -> float:
        """The idle share of all ranks' time, weighted by their devices."""
        length_s = self.length_s
        devices = sum(rank.devices for rank in self.ranks)
        idle_s = sum((rank.bubble_s + rank.waiting_s) * rank.devices for rank in self.ranks)
        return idle_s / (devices * length_s) if length_s > 0 else 0.0

    @cached_property
    def busiest(self) -> int:
        """The first of the ranks that are busy longest, counting passes, transfers and all-reduce."""
        busy_s = [rank.compute_s + rank.communication_s for rank in self.ranks]
        return busy_s.index(max(busy_s))

    @property
    def memory_violations(self) -> list[str]:
        """A sentence for each rank that needs more memory than its devices have, the one that lacks most first."""
        return [
            f"{rank.name} needs {bytes_text(rank.peak_memory_bytes)} on each device, "
            f"{bytes_text(rank.peak_memory_bytes - rank.memory_limit_bytes)} more than it has"
            for rank in sorted(self.ranks, key=lambda rank: rank.memory_limit_bytes - rank.peak_memory_bytes)
            if rank.peak_memory_bytes > rank.memory_limit_bytes * (1.0 + _MEMORY_TOLERANCE)
        ]

    def memory(self, rank: int) -> MemorySteps:
        """A rank's memory over time."""
        return memory_steps(self.timeline, self.stages, rank, self.ranks[rank].versions)

    @property
    def text(self) -> str:
        """Schedule, step, idle time, ranks and peak memory, in a line."""
        return self.text_of(time_text(self.step_s))

    def text_of(self, step: str) -> str:
        """The same with the step in these words."""
        return (
            f"{self.schedule.text}: step {step}, {100.0 * self.bubble_share:.1f} % idle, "
            f"{plural(len(self.ranks), 'rank')}, {self.ranks[self.busiest].name} busiest, "
            f"peak memory {self._peak_text}"
        )

    def __repr__(self) -> str:
        return f"Simulation({self.text})"

    def _repr_html_(self) -> str:
        rows = [
            ("step", time_text(self.step_s)),
            ("time per microbatch", time_text(self.time_per_sample_s)),
            *([] if self.promised_s is None else [("promised step", time_text(self.promised_s))]),
            ("idle", f"{100.0 * self.bubble_share:.1f} %"),
            ("ranks", f"{len(self.ranks):,}" + (f" of each of {self.pipelines:,} pipelines" * (self.pipelines > 1))),
            ("busiest", self.ranks[self.busiest].name),
            ("peak memory", self._peak_text),
        ]
        return html_table(f"Simulation: {self.schedule.text}", rows)

    @property
    def _peak_text(self) -> str:
        over = ": too much" if self.memory_violations else ""
        return f"{held_text(self.peak_memory_bytes)} of {held_text(self.memory_limit_bytes)}{over}"
