"""piper_ray: exact planning of pipeline, data and tensor parallelism (Piper, NeurIPS 2021).

    instance = piper_ray.load("inputs/bert32-a100.toml", devices=2048, microbatches=1920)
    solution = piper_ray.solve(instance)
    piper_ray.evaluate(instance, solution.plan)

Importing this package loads plain data types only; the readers and the solver load when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Imported at once, not lazily: `piper_ray.evaluate` and `piper_ray.simulate` are also modules, whose import would hide
# the functions.
from piper_ray.evaluate import Evaluation, StageEvaluation, evaluate
from piper_ray.model.errors import (
    CheckpointLost,
    CheckpointRefused,
    ClusterError,
    DatasetDamaged,
    Fault,
    InfeasibleError,
    InputError,
    InvalidPlan,
    LimitError,
    PiperRayError,
    UsageError,
)
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.options import SolveOptions
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.restrictions import Recompute, Restrictions
from piper_ray.model.solution import Infeasibility, Solution, Status
from piper_ray.model.stop import Stop, StopSearch
from piper_ray.simulate.options import AllReduce, InFlightRule, Schedule, ScheduleName, SimulationOptions
from piper_ray.simulate.run import simulate
from piper_ray.version import __version__

if TYPE_CHECKING:
    from piper_ray import planners as baselines
    from piper_ray.engine.backends.ray import RayBackend
    from piper_ray.engine.frontier.frontier import Frontier, frontier
    from piper_ray.engine.frontier.points import FrontierPoint
    from piper_ray.engine.solve import solve
    from piper_ray.simulate.result import Simulation
    from piper_ray.sweep.dataset import read_dataset
    from piper_ray.sweep.run import run_sweep
    from piper_ray.workloads.formats import dump, load, load_plan

__all__ = [
    # functions
    "load",
    "dump",
    "load_plan",
    "solve",
    "frontier",
    "evaluate",
    "simulate",
    "run_sweep",
    "read_dataset",
    # the problem
    "Instance",
    "Layer",
    "Edge",
    "Tmpc",
    "Tensor",
    "Restrictions",
    "Recompute",
    "SolveOptions",
    "Schedule",
    "ScheduleName",
    "SimulationOptions",
    "AllReduce",
    "InFlightRule",
    "Stop",
    "RayBackend",
    "baselines",
    # the answer
    "Solution",
    "Status",
    "Infeasibility",
    "Frontier",
    "FrontierPoint",
    "Plan",
    "Stage",
    "Evaluation",
    "StageEvaluation",
    "Simulation",
    # errors
    "StopSearch",
    "PiperRayError",
    "UsageError",
    "InputError",
    "Fault",
    "InfeasibleError",
    "LimitError",
    "InvalidPlan",
    "ClusterError",
    "CheckpointRefused",
    "CheckpointLost",
    "DatasetDamaged",
    "__version__",
]

# Where the functions live that bring numba, numpy or pydantic with them (PEP 562).
_LAZY = {
    "load": "piper_ray.workloads.formats",
    "dump": "piper_ray.workloads.formats",
    "load_plan": "piper_ray.workloads.formats",
    "solve": "piper_ray.engine.solve",
    "run_sweep": "piper_ray.sweep.run",
    "read_dataset": "piper_ray.sweep.dataset",
    "frontier": "piper_ray.engine.frontier.frontier",
    "Frontier": "piper_ray.engine.frontier.frontier",
    "FrontierPoint": "piper_ray.engine.frontier.points",
    "Simulation": "piper_ray.simulate.result",
    "RayBackend": "piper_ray.engine.backends.ray",
}


def __getattr__(name: str) -> object:
    if name == "baselines":
        return import_module("piper_ray.planners")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
