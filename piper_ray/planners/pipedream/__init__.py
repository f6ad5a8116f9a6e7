"""PipeDream's own planner (Narayanan et al., SOSP 2019)."""

from __future__ import annotations

from piper_ray.planners.pipedream.planner import Level, Partition, PipeDream, Recurrence, States

__all__ = ["Level", "Partition", "PipeDream", "Recurrence", "States"]
