"""What a solve is asked for, and how it may run: one record for single layers and for blocks of operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from piper_ray.engine.backends.calls import TakesCalls, Workers
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.ledger import Ledger, Limits
from piper_ray.model.constraints import AllDevices, SameDegrees, StageCount
from piper_ray.model.errors import UsageError
from piper_ray.model.events import Listener, Note
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import FLUSHED, PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop

if TYPE_CHECKING:
    from piper_ray.engine.checkpoint import Checkpoint


_A_MOMENT_S = 1e-3


@dataclass(frozen=True)
class SolveRequest:
    """backend: the caller's; None: threads of our own. started_s: by ``time.perf_counter``. data_parallel_limit: of the
    sum of data-parallel degrees, for plans whose stages may differ in them; None: min(N, K).
    """

    instance: Instance
    restrictions: Restrictions
    options: SolveOptions
    backend: Backend | None
    listener: Listener
    stop: Stop[Solution]
    step: StepTerms = StepTerms()
    started_s: float = field(default_factory=time.perf_counter)
    data_parallel_limit: int | None = None

    @property
    def limits(self) -> Limits:
        return Limits.of(self.options, self.started_s, self.stop)

    def ledger(self, microbatches: int = 1) -> Ledger[Any]:
        """Of a search for what is asked, before it has begun. microbatches: those that its times are of."""
        return Ledger(microbatches, self.limits, self.listener, self.started_s, self.step.optimizer_s)

    @contextmanager
    def open_backend(self) -> Iterator[Backend]:
        """The caller's backend, which stays open, or threads of our own, which end with the solve."""
        if self.backend is not None:
            yield self.backend
            return
        with closing(LocalBackend(self.options.threads)) as own:
            yield own

    @contextmanager
    def open_workers(self) -> Iterator[Workers]:
        """As ``open_backend``, for calls. Raises UsageError for a backend that takes none."""
        with self.open_backend() as backend:
            if not isinstance(backend, TakesCalls):
                raise UsageError(
                    f"the backend {backend!r} evaluates levels alone, and no calls: leave it out for such a solve"
                )
            backend.listen(self.listener)
            with closing(backend.open_workers()) as workers:
                yield workers

    def with_cluster(self, found: Solution) -> Solution:
        """With what the caller's backend has done."""
        if self.backend is None:
            return found
        return replace(found, stats=replace(found.stats, cluster=self.backend.stats()))

    @contextmanager
    def open_checkpoint(self, *schedules: Schedule, kept: str = "evaluations") -> Iterator[Checkpoint | None]:
        """Open for the time of the solve, if one is wanted. schedules: those that plans may run under; none: Piper's.
        kept: what it keeps, in a word for the user."""
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
        """The answer to ``changed`` in the words of this request, at the end and at any moment before it."""
        part: Stop[Solution] = self.stop.part()
        self.stop.offer(lambda: None if (found := part.answer()) is None else say(found))
        return say(solve(replace(changed, stop=part)))

    def in_time(self, share: int = 1) -> SolveRequest:
        """With a ``share``-th of the time that is left, which counts from now on."""
        limit_s, now_s = self.options.time_limit_s, time.perf_counter()
        if limit_s is None:
            return replace(self, started_s=now_s)
        left_s = max(_A_MOMENT_S, (limit_s - (now_s - self.started_s)) / share)
        return replace(self, options=replace(self.options, time_limit_s=left_s), started_s=now_s)

    def note(self, text: str) -> None:
        """Tells the user."""
        self.listener(Note(text))


def is_by_degrees(schedule: Schedule, restrictions: Restrictions) -> bool:
    """Whether plans have one d and one t for all stages.

    Raises UsageError for constraints that it cannot keep.
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
