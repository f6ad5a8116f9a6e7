"""The points of a curve as answers, and what they took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from piper_ray.engine.frontier.curve import Curve
from piper_ray.model.gap import relative_gap
from piper_ray.model.renamed import renamed
from piper_ray.model.solution import Status


@dataclass(frozen=True)
class FrontierPoint:
    """The answer on ``devices`` devices with the sum of data-parallel degrees at most ``data_parallel_budget``.

    time_per_sample_s: None where there is no plan or none is known. lower_bound_s: no plan is faster; inf
    where there is none. is_step: less time than at the point before it on its curve.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> frontier = piper_ray.frontier(bert, devices="1..8", threads=1)
    >>> frontier.points()[-1].devices
    8
    """

    devices: int
    data_parallel_budget: int
    status: Status
    time_per_sample_s: float | None
    lower_bound_s: float
    is_step: bool

    time_per_sample = renamed("time_per_sample", "time_per_sample_s")
    lower_bound = renamed("lower_bound", "lower_bound_s")

    @property
    def gap(self) -> float | None:
        """(time_per_sample_s - lower_bound_s) / time_per_sample_s."""
        if self.time_per_sample_s is None:
            return None
        return relative_gap(self.time_per_sample_s, self.lower_bound_s)


@dataclass(frozen=True)
class FrontierStats:
    """Figures of the lattice, threads, evaluations of all curves so far, and seconds.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> frontier = piper_ray.frontier(bert, devices="1..8", threads=1)
    >>> frontier.stats.downsets
    27
    """

    contracted_layers: int = 0
    downsets: int = 0
    levels: int = 0
    threads: int = 0
    evaluations: int = 0
    preparation_s: float = 0.0
    search_s: float = 0.0


def points_of(curve: Curve, limits: Sequence[tuple[int, int]]) -> tuple[FrontierPoint, ...]:
    """limits: (devices, bound on the sum of d) of each position."""
    points = []
    before_s = math.inf
    rows = zip(limits, curve.lower_s.tolist(), curve.upper_s.tolist(), curve.proved().tolist(), strict=True)
    for (devices, budget), lower_s, upper_s, proved in rows:
        known = math.isfinite(upper_s)
        if known:
            status = Status.OPTIMAL if proved else Status.FEASIBLE
        else:
            status = Status.INFEASIBLE if math.isinf(lower_s) else Status.UNKNOWN
        value_s = upper_s if known else None
        lower_s = min(lower_s, upper_s)
        points.append(FrontierPoint(devices, budget, status, value_s, lower_s, upper_s < before_s))
        before_s = upper_s
    return tuple(points)
