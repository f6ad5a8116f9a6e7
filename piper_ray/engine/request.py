"""What a solve is asked for, and how it may run: one record for single layers and for blocks of operators."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.checkpoint import Checkpoint, Identity
from piper_ray.engine.evaluation.backend import Backend
from piper_ray.engine.search.limits import Limits
from piper_ray.model.events import Listener, Note
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import Solution
from piper_ray.model.step import StepTerms
from piper_ray.model.stop import Stop


@dataclass(frozen=True)
class SolveRequest:
    """backend: the caller's; None: threads of our own. started_s: by ``time.perf_counter``."""

    instance: Instance
    restrictions: Restrictions
    options: SolveOptions
    backend: Backend | None
    listener: Listener
    stop: Stop[Solution]
    step: StepTerms = StepTerms()
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def limits(self) -> Limits:
        return Limits.of(self.options, self.started_s, self.stop)

    @contextmanager
    def open_backend(self) -> Iterator[Backend]:
        """The caller's backend, which stays open, or threads of our own, which end with the solve."""
        if self.backend is not None:
            yield self.backend
            return
        with closing(LocalBackend(self.options.threads)) as own:
            yield own

    @contextmanager
    def open_checkpoint(
        self, schedule: Schedule = PAPERS_SCHEDULE, kept: str = "evaluations"
    ) -> Iterator[Checkpoint | None]:
        """Open for the time of the solve, if one is wanted. kept: what it keeps, in a word for the user."""
        location = self.options.resume
        if location is None:
            yield None
            return
        identity = Identity.of(self.instance, self.restrictions, schedule, self.step)
        with Checkpoint.open(location, identity, on_warning=self.note) as checkpoint:
            if checkpoint.answers:
                self.note(f"resumed from {location}: {checkpoint.answers} {kept} are on record")
            with self.stop.ending(checkpoint.close):
                yield checkpoint

    def note(self, text: str) -> None:
        """Tells the user."""
        self.listener(Note(text))
