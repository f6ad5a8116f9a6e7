"""How far off a plan can be from the best: the one formula of solutions, bounds on the way, and frontiers."""

from __future__ import annotations


def relative_gap(time_s: float, lower_bound_s: float) -> float:
    """(time - lower bound) / time, in 0 .. 1; 0 for a plan that takes no time."""
    return max(0.0, (time_s - lower_bound_s) / time_s) if time_s > 0.0 else 0.0
