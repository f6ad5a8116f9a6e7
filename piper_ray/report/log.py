"""The solver's log: notes, a row for each answer if these are wanted, and on a terminal a live line."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.text import Text

from piper_ray.model import events
from piper_ray.model.figures import PROOF_DIGITS, PROOF_TOLERANCE, duration_text, percent_text, plural, time_text
from piper_ray.model.instance import Instance
from piper_ray.report.summary import instance_lines
from piper_ray.report.terminal import LiveLog, left_texts, print_lines
from piper_ray.version import __version__

_HEAD = f"{'#':>4}  {'threshold':>11}  {'answer':<12} {'lower bound':>11}  {'upper bound':>11}  {'gap':>9}  {'time':>8}"


def _time(seconds: float) -> str:
    return time_text(seconds, PROOF_DIGITS)


_USUAL_ORIGINS = ("evaluation", "search")


class SolverLog(LiveLog):
    """A listener that prints to ``console``; a context manager, so that the live line is always taken down.

    time_limit_s: the limit of the solve; the live line says how much of it is left. verbose: print steps and rows too.

    Each row is a line of its own as soon as it is known, so that the log can be followed through a pipe.
    """

    def __init__(self, console: Console, time_limit_s: float | None = None, *, verbose: bool = True) -> None:
        super().__init__(console)
        self._verbose = verbose
        self._time_limit_s = time_limit_s
        self._gap: float | None = None
        self._advance: events.EvaluationAdvanced | events.DegreesAdvanced | None = None
        self._started_s = time.perf_counter()
        self._has_head = False
        self._closed = False  # the bounds met
        self._part = events.PartBegun(1, "")
        self._part_is_named = True
        self._part_began_s = self._shown_s = 0.0  # of the solve's time

    def begin(self, instance: Instance) -> None:
        """The header: which version plans what on what."""
        self.line(f"piper-ray {__version__}", "bold")
        for line in instance_lines(instance):
            self.line(line)

    def __call__(self, event: events.Event) -> None:
        if self._ended:
            return
        if isinstance(event, events.Compiling):
            self.line("compiling      kernels, once for this version on this machine: up to half a minute")
        elif isinstance(event, events.Note):
            self.line(f"note           {event.text}")
        elif isinstance(event, events.PartBegun):
            self._advance, self._closed = None, False
            self._part, self._part_is_named = event, False
            self._part_began_s = self._shown_s if event.number > 1 else 0.0
        elif isinstance(event, events.StepFinished):
            if self._verbose and self._part.number == 1:  # those of further parts are of no interest any more
                self.line(f"{event.step:<12}  {event.seconds:8.2f} s  {event.note}".rstrip())
        elif isinstance(event, (events.EvaluationAdvanced, events.DegreesAdvanced)):
            self._advance = event
        elif isinstance(event, (events.EvaluationFinished, events.DegreesSearched)):
            self._advance = None
            gap = event.bounds.gap
            closed = gap is not None and gap <= PROOF_TOLERANCE
            # Asked once more though nothing is faster: which of the equally fast plans takes the fewest devices.
            again = closed and self._closed and isinstance(event, events.EvaluationFinished)
            answer = "infeasible" if not event.feasible else "tie-break" if again else "feasible"
            below = "<" if closed and not event.feasible else ""  # by a billionth: the proof
            self._row(str(event.index), below + _time(event.threshold_s), answer, event.bounds)
            self._closed = closed
        elif isinstance(event, events.IncumbentFound):
            answer = "plan" if event.origin in _USUAL_ORIGINS else f"plan ({event.origin})"
            self._row("*", _time(event.time_per_sample_s), answer, event.bounds)

    def _row(self, mark: str, threshold: str, answer: str, bounds: events.Bounds) -> None:
        self._gap = bounds.gap
        if not self._verbose:
            return
        self._begin_rows(_HEAD)
        if not self._part_is_named:
            self._part_is_named = True
            self.line(f"{'-':>4}  {self._part.what}")
        self._shown_s = self._part_began_s + bounds.elapsed_s
        upper = "-" if bounds.upper_s is None else _time(bounds.upper_s)
        gap = "-" if bounds.gap is None else percent_text(bounds.gap)
        self.line(
            f"{mark:>4}  {threshold:>11}  {answer:<12} {_time(bounds.lower_s):>11}  {upper:>11}  "
            f"{gap:>9}  {self._shown_s:6.2f} s"
        )

    def _begin_rows(self, head: str) -> None:
        """The columns' names, before the first row."""
        if not self._has_head:
            self._has_head = True
            self._console.print()
            self.line(head, "bold")

    def line(self, text: str, style: str = "") -> None:
        """Prints the line as it is."""
        print_lines(self._console, [Text(text, style=style)])

    def live_line(self) -> Text:
        """What a terminal shows below the log; asked for often, so that the clock runs while no event comes."""
        advance, elapsed_s = self._advance, time.perf_counter() - self._started_s
        if advance is None:
            parts = ["working", *([] if self._gap is None else [f"gap {percent_text(self._gap)}"])]
        else:
            parts = (
                _degrees_parts(advance) if isinstance(advance, events.DegreesAdvanced) else _evaluation_parts(advance)
            )
        if self._time_limit_s is not None:
            parts.insert(1, f"at most {duration_text(max(0.0, self._time_limit_s - elapsed_s))} left")
        return Text(", ".join([parts[0], f"{elapsed_s:.1f} s", *parts[1:]]), style="dim")


def _evaluation_parts(advance: events.EvaluationAdvanced) -> list[str]:
    share = advance.done / advance.total if advance.total else 1.0
    parts = [f"evaluation {advance.index} at {_time(advance.threshold_s)}"]
    # A downset looks at those before it, so what is done grows as the square of their share.
    parts += left_texts(advance.seconds, share**2, "left of it")
    if advance.bounds.gap is not None:
        parts.append(f"gap {percent_text(advance.bounds.gap)}")
    parts += [f"{share:.0%} of {advance.total:,} downsets", f"level {advance.level:,} of {advance.levels:,}"]
    if advance.chunks_in_flight:
        parts.append(f"{advance.chunks_in_flight} chunks on {advance.workers} workers")
    return parts


def _degrees_parts(advance: events.DegreesAdvanced) -> list[str]:
    at = f" up to {_time(advance.threshold_s)}" if math.isfinite(advance.threshold_s) else ""
    parts = [f"plans{at}: {advance.done:,} of {plural(advance.total, 'pair')} (d, t)"]
    parts += left_texts(advance.seconds, advance.done / advance.total if advance.total else 1.0, "left of them")
    parts.append(f"{advance.running} at work")
    if advance.bounds.gap is not None:
        parts.append(f"gap {percent_text(advance.bounds.gap)}")
    return parts
