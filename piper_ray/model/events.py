"""Events that a running solve reports, for a log, a live line or a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piper_ray.model.figures import relative_gap


@dataclass(frozen=True)
class Compiling:
    """A kernel is about to be compiled that no run of this version on this machine has needed before. Compiling all
    kernels takes half a minute. Like notes on compiled kernels, this event may come on any thread.

    >>> isinstance(Compiling(), Event)
    True
    """


@dataclass(frozen=True)
class PartBegun:
    """Solve number ``number``, from 1, of several sub-problems begins. The best of their plans is the answer.

    what: which plans it looks for, in words ("2 of 6 settings of all layers: sp, full").

    >>> PartBegun(2, "2 of 6: sp, full").number
    2
    """

    number: int
    what: str


@dataclass(frozen=True)
class StepFinished:
    """A step of the preparation is done. ``note``: its figures in words ("221,565 downsets in 318 levels").

    >>> StepFinished("lattice", 0.25, "7 downsets in 7 levels").note
    '7 downsets in 7 levels'
    """

    step: str
    seconds: float
    note: str


@dataclass(frozen=True)
class Bounds:
    """The search's best bounds. upper_s is None until a plan is known.

    >>> Bounds(lower_s=0.75, upper_s=1.0, elapsed_s=0.5).gap
    0.25
    """

    lower_s: float
    upper_s: float | None
    elapsed_s: float

    @property
    def gap(self) -> float | None:
        """(upper_s - lower_s) / upper_s; None until a plan is known."""
        if self.upper_s is None:
            return None
        return relative_gap(self.upper_s, self.lower_s)


@dataclass(frozen=True)
class EvaluationAdvanced:
    """An evaluation is running: ``done`` of ``total`` downsets, ``level`` of ``levels``, after ``seconds``.

    >>> bounds = Bounds(0.006, 0.0118, 0.5)
    >>> event = EvaluationAdvanced(1, 0.007, 3, 7, bounds, 6.0, level=2, levels=5, workers=4, chunks_in_flight=8)
    >>> f"{event.done} of {event.total} downsets"
    '3 of 7 downsets'
    """

    index: int
    threshold_s: float
    done: int
    total: int
    bounds: Bounds
    seconds: float
    level: int
    levels: int
    workers: int
    chunks_in_flight: int


@dataclass(frozen=True)
class EvaluationFinished:
    """The answer of an evaluation, and the bounds after it.

    >>> bounds = Bounds(0.006, 0.0118, 0.5)
    >>> EvaluationFinished(1, 0.007, feasible=False, seconds=0.2, live_downsets=5, bounds=bounds).threshold_s
    0.007
    """

    index: int
    threshold_s: float
    feasible: bool
    seconds: float
    live_downsets: int
    bounds: Bounds


@dataclass(frozen=True)
class DegreesAdvanced:
    """A round of a search over degrees (d, t) is running. ``total`` pairs may have a plan of at most ``threshold_s``
    (inf: any plan); ``done`` of them are searched and ``running`` are being searched, after ``seconds``.

    >>> bounds = Bounds(0.006, 0.0118, 0.5)
    >>> event = DegreesAdvanced(1, 0.007, done=3, total=107, running=2, bounds=bounds, seconds=0.1)
    >>> f"{event.done} of {event.total}"
    '3 of 107'
    """

    index: int
    threshold_s: float
    done: int
    total: int
    running: int
    bounds: Bounds
    seconds: float


@dataclass(frozen=True)
class DegreesSearched:
    """The answer of a round over ``degrees`` pairs (d, t): whether a plan takes at most ``threshold_s``; and the bounds
    after it.

    >>> bounds = Bounds(0.006, 0.0118, 0.5)
    >>> DegreesSearched(1, 0.007, feasible=False, degrees=107, seconds=0.2, bounds=bounds).feasible
    False
    """

    index: int
    threshold_s: float
    feasible: bool
    degrees: int
    seconds: float
    bounds: Bounds


@dataclass(frozen=True)
class IncumbentFound:
    """A better plan. ``origin``: what found it ("borders", "chain", "near", "evaluation", "search").

    >>> bounds = Bounds(0.006, 0.0118, 0.5)
    >>> IncumbentFound("search", 0.0118, stages=2, devices=3, bounds=bounds).time_per_sample_s
    0.0118
    """

    origin: str
    time_per_sample_s: float
    stages: int
    devices: int
    bounds: Bounds


@dataclass(frozen=True)
class Note:
    """Something that the user should know: a lost worker, a chosen method.

    >>> Note("a worker is lost").text
    'a worker is lost'
    """

    text: str


Event = (
    Note
    | Compiling
    | PartBegun
    | StepFinished
    | EvaluationAdvanced
    | EvaluationFinished
    | DegreesAdvanced
    | DegreesSearched
    | IncumbentFound
)


class Listener(Protocol):
    """Called with each event, in order, on the thread that called ``solve``.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> seen = []
    >>> solution = piper_ray.solve(bert, listener=seen.append, threads=1)
    >>> any(isinstance(event, piper_ray.StepFinished) for event in seen)
    True
    """

    def __call__(self, event: Event) -> None: ...


def silent(event: object) -> None:
    """A listener that ignores all events."""
