"""The live line of ``piper-ray plan``: which of its solves is under way, what is known, what is left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from piper_ray.model.events import (
    Bounds,
    DegreesAdvanced,
    DegreesSearched,
    EvaluationAdvanced,
    EvaluationFinished,
    Event,
    IncumbentFound,
    PartBegun,
)
from piper_ray.model.figures import duration_text, percent_text, time_text
from piper_ray.proposal.propose import SolveBegun
from piper_ray.report.live import WORTH_A_GUESS_S, LiveLog

_WITH_BOUNDS = (DegreesAdvanced, DegreesSearched, EvaluationAdvanced, EvaluationFinished, IncumbentFound)


class ProposalLog(LiveLog):
    """Watches ``propose``, and then, after ``begin``, ``what_would_help``."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.begin("planning")

    def begin(self, what: str) -> None:
        """A phase of which nothing is known yet. what: is done in it, in words."""
        self._what = what
        self._began_s = time.perf_counter()
        self._solve: SolveBegun | None = None
        self._part: PartBegun | None = None
        self._bounds: Bounds | None = None

    def __call__(self, event: SolveBegun | Event) -> None:
        if self._ended:
            return
        if isinstance(event, SolveBegun):
            self._solve, self._part, self._bounds = event, None, None
        elif isinstance(event, PartBegun):
            self._part, self._bounds = event, None
        elif isinstance(event, _WITH_BOUNDS):
            self._bounds = event.bounds

    def live_line(self) -> Text:
        solve, elapsed_s = self._solve, time.perf_counter() - self._began_s
        if solve is None:
            return Text(f"{self._what}, {elapsed_s:.1f} s", style="dim")
        done = solve.number - 1
        parts = [f"{solve.number} of {solve.total}: {solve.what}, {elapsed_s:.1f} s"]
        if elapsed_s > WORTH_A_GUESS_S and done:
            parts.append(f"about {duration_text(elapsed_s * (solve.total / done - 1.0))} left")
        if solve.best_s is not None:
            parts.append(f"best {time_text(solve.best_s, 4)}")
        if self._bounds is not None and self._bounds.lower_s > 0.0:
            parts.append(_bounds_text(self._bounds, solve.microbatches))
        if self._part is not None:
            parts.append(self._part.what)
        return Text(", ".join(parts), style="dim")


def _bounds_text(bounds: Bounds, microbatches: int) -> str:
    """Of a step of the solve under way."""
    if bounds.upper_s is None or bounds.gap is None:
        return f"here at least {time_text(microbatches * bounds.lower_s, 4)}"
    return f"here {time_text(microbatches * bounds.upper_s, 4)}, gap {percent_text(bounds.gap)}"
