"""PipeDream's own planner (Narayanan et al., SOSP 2019)."""

from __future__ import annotations

from piper_ray.baselines.pipedream.parameters import Level, Partition, States
from piper_ray.baselines.pipedream.planner import PipeDream

__all__ = ["Level", "Partition", "PipeDream", "States"]
