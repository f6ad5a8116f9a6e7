"""What a frontier reports on its way, beside the events of every solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piper_ray.model.events import Event


@dataclass(frozen=True)
class CurveAdvanced:
    """``closed`` of ``points`` points are proved; ``by_sum``: bounds on the sum of data-parallel degrees.

    >>> event = CurveAdvanced(by_sum=False, closed=3, points=8, evaluations=12, elapsed_s=1.5)
    >>> f"{event.closed} of {event.points} points"
    '3 of 8 points'
    """

    by_sum: bool
    closed: int
    points: int
    evaluations: int
    elapsed_s: float


@dataclass(frozen=True)
class PointClosed:
    """A point of a large lattice's curve is as narrow as a pass asks for: its bounds, in s, inf without a plan, and the
    evaluations made for it.

    >>> PointClosed(by_sum=False, position=8, lower_s=0.012, upper_s=0.012, evaluations=4, elapsed_s=0.5).position
    8
    """

    by_sum: bool
    position: int
    lower_s: float
    upper_s: float
    evaluations: int
    elapsed_s: float


class FrontierListener(Protocol):
    """Called with each event, in order, on the thread that called ``frontier``.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> seen = []
    >>> frontier = piper_ray.frontier(bert, devices="1..8", listener=seen.append, threads=1)
    >>> len(seen) > 0
    True
    """

    def __call__(self, event: Event | CurveAdvanced | PointClosed) -> None: ...


def silent(event: Event | CurveAdvanced | PointClosed) -> None:
    """The listener of those who do not want to know."""
