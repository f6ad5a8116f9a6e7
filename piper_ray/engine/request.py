"""The request of a solve and how it may run: one record for single layers and for blocks of operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from piper_ray.compiled.jit import make_ready
from piper_ray.engine.backends.calls import TakesCalls, Workers
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.ledger import Ledger, Limits
from piper_ray.model.constraints import AllDevices, Restrictions, SameDegrees, StageCount
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Listener, Note
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import FLUSHED, PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop

if TYPE_CHECKING:
    from piper_ray.engine.checkpoint import Checkpoint

_A_MOMENT_S = 1e-3


def _started_s() -> float:
    """Now. Kernels are made ready before: that takes some tenths of a second, which are no part of a search."""
    make_ready()
    return time.perf_counter()


class Sought(Enum):
    """What a search with chunks is for: its best plan with a bound, a bound, or the plan with quick bounds."""

    BOTH = "both"
    BOUND = "bound"
    PLAN = "plan"


@dataclass
class KeptSearches:
    """Searches with chunks from which later solves of the same problem go on, by their cluster and restrictions.

    known: bounds with which they begin, of another problem that has all their plans and more. seeks: what is sought.
    """

    searches: dict[object, Any] = field(default_factory=dict)
    known: Mapping[object, Mapping[Any, float]] = field(default_factory=dict)
    seeks: Sought = Sought.BOTH

    def for_parts(self, seeks: Sought) -> KeptSearches:
        """The start of a solve all of whose plans are among those of these searches."""
        return KeptSearches(known={key: one.proved_s for key, one in self.searches.items()}, seeks=seeks)


@dataclass(frozen=True)
class SolveRequest:
    """A request. backend: the caller's; None: threads of this process. started_s: by ``time.perf_counter``.
    data_parallel_limit: on the sum of d, for plans whose stages may differ in d; None: min(N, K).
    kept: the searches of earlier solves of the same problem, and of this one; None: nothing is kept.
    """

    instance: Instance
    restrictions: Restrictions
    options: SolveOptions
    backend: Backend | None
    listener: Listener
    stop: Stop[Solution]
    step: StepTerms = StepTerms()
    started_s: float = field(default_factory=_started_s)
    data_parallel_limit: int | None = None
    kept: KeptSearches | None = None

    def __post_init__(self) -> None:
        """Kinds of devices are searched in the order of their names: their order in a file decides nothing."""
        cluster = self.instance.cluster
        kinds = tuple(sorted(cluster.kinds, key=lambda kind: kind.name))
        if kinds != cluster.kinds:
            ordered = replace(self.instance, cluster=replace(cluster, kinds=kinds)).checked_as(self.instance)
            object.__setattr__(self, "instance", ordered)

    @property
    def limits(self) -> Limits:
        return Limits.of(self.options, self.started_s, self.stop)

    def ledger(self, microbatches: int = 1) -> Ledger[Any]:
        """Makes the ledger of a new search. microbatches: its times are of batches of this size."""
        return Ledger(microbatches, self.limits, self.listener, self.started_s, self.step.optimizer_s)

    @contextmanager
    def open_backend(self) -> Iterator[Backend]:
        """Opens the caller's backend, which stays open, or new threads, which end with the solve."""
        if self.backend is not None:
            yield self.backend
            return
        with closing(LocalBackend(self.options.threads)) as own:
            yield own

    @contextmanager
    def open_workers(self) -> Iterator[Workers]:
        """Opens workers for calls, like ``open_backend``. Raises UsageError for a backend that takes no calls."""
        with self.open_backend() as backend:
            if not isinstance(backend, TakesCalls):
                raise UsageError(
                    f"the backend {backend!r} evaluates levels alone, and no calls: leave it out for such a solve"
                )
            backend.listen(self.listener)
            with closing(backend.open_workers()) as workers:
                yield workers

    def with_cluster(self, found: Solution) -> Solution:
        """Returns the solution with the statistics of the caller's backend."""
        if self.backend is None:
            return found
        return replace(found, stats=replace(found.stats, cluster=self.backend.stats()))

    @contextmanager
    def open_checkpoint(self, *schedules: Schedule, kept: str = "evaluations") -> Iterator[Checkpoint | None]:
        """Opens a checkpoint for the time of the solve, if one is requested. schedules: under which plans may run;
        none: Piper's. kept: the word for its records in a note to the user."""
        location = self.options.resume
        if location is None:
            yield None
            return

        from piper_ray.engine.checkpoint import Checkpoint, Identity

        identity = Identity.of(self.instance, self.restrictions, schedules or (PAPERS_SCHEDULE,), self.step)
        with Checkpoint.open(location, identity, on_warning=self.note) as checkpoint:
            if checkpoint.answers:
                self.note(f"resumed from {location}: {checkpoint.answers} {kept} are on record")
            with self.stop.ending(checkpoint.close):
                yield checkpoint

    def answered(
        self, solve: Callable[[SolveRequest], Solution], changed: SolveRequest, say: Callable[[Solution], Solution]
    ) -> Solution:
        """Solves ``changed``, and translates its answers by ``say``: the last one, and any before it."""
        part: Stop[Solution] = self.stop.part()
        self.stop.offer(lambda: None if (found := part.answer()) is None else say(found))
        return say(solve(replace(changed, stop=part)))

    def in_time(self, share: int = 1) -> SolveRequest:
        """Returns the request with 1 / ``share`` of the remaining time, which counts from now on."""
        limit_s, now_s = self.options.time_limit_s, time.perf_counter()
        if limit_s is None:
            return replace(self, started_s=now_s)
        left_s = max(_A_MOMENT_S, (limit_s - (now_s - self.started_s)) / share)
        return replace(self, options=replace(self.options, time_limit_s=left_s), started_s=now_s)

    def note(self, text: str) -> None:
        """Passes a note to the user."""
        self.listener(Note(text))


def is_by_degrees(schedule: Schedule, restrictions: Restrictions) -> bool:
    """Whether plans have one d and one t for all stages. Raises UsageError for constraints that such plans cannot
    satisfy.
    """
    rules = restrictions.plan_wide
    if schedule.name in FLUSHED or (schedule == PAPERS_SCHEDULE and any(isinstance(x, SameDegrees) for x in rules)):
        how = f"with one d and one t for all stages (schedule {schedule.name.value})"
        restrictions.require_same_degrees(how)
        return True
    if any(isinstance(rule, (StageCount, AllDevices)) for rule in rules):
        listed = ", ".join(map(repr, rules))
        raise UsageError(f"under 2bw {listed} needs equal d and t in all stages: add SameDegrees (--same-degrees)")
    return False
