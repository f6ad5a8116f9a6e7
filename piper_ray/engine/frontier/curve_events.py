"""What a frontier reports on its way, beside the events of every solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piper_ray.model.events import Event


@dataclass(frozen=True)
class CurveAdvanced:
    """``closed`` of ``points`` points are proved; ``by_sum``: bounds on the sum of data-parallel degrees."""

    by_sum: bool
    closed: int
    points: int
    evaluations: int
    elapsed_s: float


@dataclass(frozen=True)
class PointClosed:
    """A point of a large lattice's curve is as narrow as a pass asks for: its bounds, in s, inf without a plan, and the
    evaluations made for it."""

    by_sum: bool
    position: int
    lower_s: float
    upper_s: float
    evaluations: int
    elapsed_s: float


class FrontierListener(Protocol):
    """Called with each event, in order, on the thread that called ``frontier``."""

    def __call__(self, event: Event | CurveAdvanced | PointClosed) -> None: ...


def silent(event: Event | CurveAdvanced | PointClosed) -> None:
    """The listener of those who do not want to know."""
