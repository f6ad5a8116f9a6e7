"""Chunks of downsets on a Ray cluster, through any failure. ARCHITECTURE.md, "On a cluster", tells how.

backend -> dispatcher -> coordinator (no I/O), pool (actors), machines, publication (object store) -> worker, arrow
"""

from piper_ray.engine.backends.ray.backend import RayBackend
from piper_ray.engine.backends.ray.coordinator import WithoutWorkers

__all__ = ["RayBackend", "WithoutWorkers"]
