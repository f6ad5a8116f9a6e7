"""Events that a running solve reports, for a log, a live line or a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piper_ray.model.gap import relative_gap


@dataclass(frozen=True)
class Compiling:
    """A kernel that no run of this version needed here before is about to be compiled; all of them take half a minute.

    As notes on compiled kernels, it may come on any thread.
    """


@dataclass(frozen=True)
class PartBegun:
    """Solve number ``number``, from 1, of several that look for plans of parts of all; the best of them is the answer.

    what: which plans it looks for, in words ("2 of 6 settings of all layers: sp, full").
    """

    number: int
    what: str


@dataclass(frozen=True)
class StepFinished:
    """A step of the preparation is done. ``note``: its figures in words ("221,565 downsets in 318 levels")."""

    step: str
    seconds: float
    note: str


@dataclass(frozen=True)
class Bounds:
    """Where the search stands. upper_s is None until a plan is known."""

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
    """An evaluation under way: ``done`` of ``total`` downsets, ``level`` of ``levels``, after ``seconds``."""

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
    """An evaluation's answer, and the bounds after it."""

    index: int
    threshold_s: float
    feasible: bool
    seconds: float
    live_downsets: int
    bounds: Bounds


@dataclass(frozen=True)
class DegreesAdvanced:
    """A round of a search over degrees (d, t) under way. Of ``total`` that may have a plan of at most ``threshold_s``
    (inf: any) ``done`` are searched and ``running`` are being searched, after ``seconds``.
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
    """A round's answer over ``degrees`` pairs (d, t): whether a plan takes at most ``threshold_s``; and the bounds
    after it.
    """

    index: int
    threshold_s: float
    feasible: bool
    degrees: int
    seconds: float
    bounds: Bounds


@dataclass(frozen=True)
class IncumbentFound:
    """A better plan. ``origin``: what found it ("chain", "evaluation", "search")."""

    origin: str
    time_per_sample_s: float
    stages: int
    devices: int
    bounds: Bounds


@dataclass(frozen=True)
class Note:
    """Something that the user should know: a worker lost, a way chosen."""

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
    """Called with each event, in order, on the thread that called ``solve``."""

    def __call__(self, event: Event) -> None: ...


def silent(event: Event) -> None:
    """The listener of those who do not want to know."""
