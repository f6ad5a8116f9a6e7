"""What a run measured: steps, and of one of them what each rank did and held; or what went wrong on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING

from piper_ray.model.errors import ClusterError, Fault, InputError, LimitError, PiperRayError, UsageError
from piper_ray.model.figures import plural, time_text
from piper_ray.run.job import Job

if TYPE_CHECKING:
    from piper_ray.simulate.result import Simulation


@dataclass(frozen=True)
class Stretch:
    """A stretch of a rank's time, in seconds since the step began.

    what: "F", "B", "I", "W", "all-reduce" or "optimizer". stage, microbatch: of the plan and of the batch, from 0; None
    where it is of none.

    >>> stretch = Stretch("forward", 0, 3, 0.5, 0.75)
    >>> stretch.end_s - stretch.start_s
    0.25
    """

    what: str
    stage: int | None
    microbatch: int | None
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """From its start to its end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RankRun:
    """What one rank did in the step that is shown, and held at most in any.

    stretches: one after the other. border_bytes: of the peak, what torch keeps of all microbatches to receive into.

    >>> import piper_ray
    >>> measured = piper_ray.run("models.py:small_gpt", "plan.json")  # doctest: +SKIP
    >>> measured.ranks[0].peak_memory_bytes  # doctest: +SKIP
    """

    name: str
    stages: tuple[int, ...]
    replica: int
    stretches: tuple[Stretch, ...]
    peak_memory_bytes: float
    border_bytes: float

    def _sum_s(self, *what: str) -> float:
        return sum(one.duration_s for one in self.stretches if one.what in what)

    @property
    def compute_s(self) -> float:
        """Passes."""
        return self._sum_s("F", "B", "I", "W")

    @property
    def all_reduce_s(self) -> float:
        """Sums of gradients that are not part of a backward pass."""
        return self._sum_s("all-reduce")

    @property
    def optimizer_s(self) -> float:
        """The optimizer's step."""
        return self._sum_s("optimizer")


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A plan that was trained.

    steps_s: of each measured step, from its common start until the last rank has updated its weights. losses: of each
    step, those before included: the mean over its microbatches.
    shown: number of the measured step that the ranks' figures are of: one of median length.
    promised_s: of a step, by the plan's document or its simulation; None: nobody promised anything. simulation: of the
    plan, where its instance is at hand. threads, measured_threads: of each rank; and those that the plan's times were
    measured with, None where nobody says. load: of the machine, as ``os.getloadavg`` has it, before the ranks began.

    >>> import piper_ray
    >>> measured = piper_ray.run("models.py:small_gpt", "plan.json")  # doctest: +SKIP
    >>> measured.step_s, measured.losses[-1]  # doctest: +SKIP
    """

    job: Job
    device: str
    threads: int
    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    shown: int
    ranks: tuple[RankRun, ...]
    promised_s: float | None = None
    simulation: Simulation | None = None
    measured_threads: int | None = None
    load: float | None = None

    @property
    def step_s(self) -> float:
        """The median."""
        return median(self.steps_s)

    @property
    def spread_s(self) -> float:
        """From the first to the third quartile of the measured steps."""
        if len(self.steps_s) == 1:
            return 0.0
        low, _, high = quantiles(self.steps_s, n=4, method="inclusive")
        return high - low

    def waiting_s(self, rank: int) -> float:
        """What is left of the shown step: the rank waits for others, or for what they send."""
        found = self.ranks[rank]
        return self.steps_s[self.shown] - found.compute_s - found.all_reduce_s - found.optimizer_s

    def __repr__(self) -> str:
        promised = "" if self.promised_s is None else f", promised {time_text(self.promised_s)}"
        return (
            f"Run({self.job.schedule.text}: {plural(len(self.steps_s), 'step')} on {plural(len(self.ranks), 'rank')}, "
            f"step {time_text(self.step_s)}{promised})"
        )


_KINDS: dict[str, type[PiperRayError]] = {
    kind.__name__: kind for kind in (UsageError, InputError, LimitError, ClusterError, PiperRayError)
}


@dataclass(frozen=True)
class Failure:
    """What a rank tells its launcher where something went wrong.

    kind: name of an error's class. own: the rank's own fault; False: it lost the others, who may have one."""

    kind: str
    message: str
    source: str
    faults: tuple[tuple[str, str], ...]
    own: bool

    @classmethod
    def of(cls, error: PiperRayError) -> Failure:
        """An error that is told as it is."""
        kind = next(name for name, known in _KINDS.items() if isinstance(error, known))
        if isinstance(error, InputError):
            return cls(kind, "", error.source, tuple((fault.path, fault.message) for fault in error.faults), own=True)
        return cls(kind, str(error), "", (), own=True)

    @classmethod
    def lost(cls, message: str) -> Failure:
        """The rank could not go on: as a rule since another one did not."""
        return cls(ClusterError.__name__, message, "", (), own=False)

    def error(self) -> PiperRayError:
        """What the launcher raises."""
        if self.kind == InputError.__name__:
            return InputError(self.source, [Fault(*fault) for fault in self.faults])
        return _KINDS[self.kind](self.message)
