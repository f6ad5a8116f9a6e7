"""Calls on a Ray cluster, which survive any failure; chunks of levels are calls too.

docs/decisions/0021-levels-on-a-ray-cluster.md explains the design. backend, levels, calls -> dispatcher -> coordinator
(no I/O), pool (actors), machines, publication (object store) -> worker
"""

from piper_ray.engine.backends.ray.backend import RayBackend
from piper_ray.engine.backends.ray.coordinator import WithoutWorkers

__all__ = ["RayBackend", "WithoutWorkers"]
