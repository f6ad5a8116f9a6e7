"""When a search ends before its proof."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from piper_ray.model.options import SolveOptions
from piper_ray.model.stop import Stop, StoppedBy, StopSearch


@dataclass(frozen=True)
class Limits:
    """gap: relative, between the best plan and the lower bound. deadline_s: by ``time.perf_counter``. stop: a wish.
    within_s: time per sample; a search ends once no plan keeps within it."""

    gap: float = 0.0
    deadline_s: float | None = None
    stop: Stop[Any] = field(default_factory=Stop)
    within_s: float = math.inf

    @classmethod
    def of(cls, options: SolveOptions, started_s: float, stop: Stop[Any]) -> Limits:
        """started_s: what the time limit counts from, by ``time.perf_counter``."""
        limit_s = options.time_limit_s
        within_s = math.inf if options.within_s is None else options.within_s
        return cls(options.gap, None if limit_s is None else started_s + limit_s, stop, within_s)

    @property
    def are_none(self) -> bool:
        """Whether only a wish ends the search before its proof."""
        return self.gap == 0.0 and self.deadline_s is None and self.within_s == math.inf

    @property
    def reached(self) -> StoppedBy | None:
        """Whether it is asked to stop, or the deadline is over."""
        if self.stop.requested:
            return StoppedBy.INTERRUPT
        late = self.deadline_s is not None and time.perf_counter() > self.deadline_s
        return StoppedBy.TIME_LIMIT if late else None

    def check(self) -> None:
        """Raises StopSearch where ``reached``."""
        reached = self.reached
        if reached is not None:
            raise StopSearch(reached)
