"""What solves of one graph have found, as far as it holds for other points of it: bounds, and plans to begin with.

No plan gets slower or too large by more devices, memory or bandwidth, nor by a multiple of the microbatches or a larger
bound on the sum of data-parallel degrees. So a
point's plan is one for all points that have no less, and what no plan of a point beats none beats with less.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.restrictions import Restrictions

_KEPT = 4096
_ROUNDING = 1e-12
"""Relative. At another bandwidth the same stages' times are sums of other figures."""


class FindingsPoint(NamedTuple):
    """data_parallel_limit: of the sum of data-parallel degrees."""

    devices: int
    data_parallel_limit: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    restrictions: Restrictions

    @classmethod
    def of(
        cls, instance: Instance, restrictions: Restrictions, data_parallel_limit: int | None = None
    ) -> FindingsPoint:
        """data_parallel_limit: None: min(N, K)."""
        limit = instance.data_parallel_limit
        return cls(
            instance.devices,
            limit if data_parallel_limit is None else min(limit, data_parallel_limit),
            instance.microbatches,
            instance.memory_bytes,
            instance.bandwidth_bytes_per_s,
            restrictions,
        )

    def has_no_more_than(self, other: FindingsPoint) -> bool:
        return (
            self.devices <= other.devices
            and self.data_parallel_limit <= other.data_parallel_limit
            and self.memory_bytes <= other.memory_bytes
            and self.bandwidth_bytes_per_s <= other.bandwidth_bytes_per_s
            and other.microbatches % self.microbatches == 0
            and self.restrictions == other.restrictions
        )

    def holds(self, plan: Plan) -> bool:
        """Whether there are devices and degrees enough for it."""
        return plan.devices <= self.devices and plan.data_parallel_sum <= self.data_parallel_limit


class _Found(NamedTuple):
    point: FindingsPoint
    lower_s: float
    time_s: float
    plan: Plan


class Known(NamedTuple):
    """lower_s: no plan is faster; 0 where nothing is known. plans: to be tried in turn until one is a plan for this
    point: that of a point with no less, which would be the best, and the best of those with no more, which is one.
    """

    lower_s: float
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Findings:
    """Of points of one graph. For several threads.

    thorough: whether plans are kept, too, that a solve finds on the way to its best, for points with less; and whether
    a solve that a limit may end begins with findings, whose answer then is another one than without.
    """

    thorough: bool = False
    _found: deque[_Found] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def record(self, point: FindingsPoint, lower_s: float, time_s: float, plan: Plan) -> None:
        """A plan, its time per sample, and what no plan is faster than."""
        self._found.append(_Found(point, lower_s, time_s, plan))

    def about(self, here: FindingsPoint) -> Known:
        """What they tell of this point."""
        above: _Found | None = None
        below: _Found | None = None
        lower_s = 0.0
        for found in tuple(self._found):
            if here.has_no_more_than(found.point):
                same = found.point.bandwidth_bytes_per_s == here.bandwidth_bytes_per_s
                bound_s = found.lower_s if same else found.lower_s * (1.0 - _ROUNDING)
                if above is None or bound_s > lower_s:
                    above, lower_s = found, bound_s
            if found.point.has_no_more_than(here) and (below is None or found.time_s < below.time_s):
                below = found
        fits = above is not None and here.holds(above.plan)
        return Known(lower_s, tuple(found.plan for found in (above if fits else None, below) if found is not None))
