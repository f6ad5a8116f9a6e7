"""piper_ray: exact planning of pipeline, data and tensor parallelism (Piper, NeurIPS 2021).

    instance = piper_ray.estimate("llama3-70b", gpu="H100-SXM", nodes=64)  # or load("workload.toml")
    solution = piper_ray.solve(instance, time_limit="10m")
    piper_ray.evaluate(instance, solution.plan)

Importing this package loads plain data types only; the readers and the solver load when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

# Imported at once, not lazily: `piper_ray.evaluate`, `piper_ray.run` and `piper_ray.simulate` are also modules, whose
# import would hide the functions.
from piper_ray.evaluate import Binding, Evaluation, StageEvaluation, evaluate
from piper_ray.model.batch import Batch
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.constraints import (
    AllDevices,
    Constraint,
    KeepOrder,
    NoDataParallelism,
    NoTensorParallelism,
    Recompute,
    RecomputeRule,
    SameDegrees,
    Scope,
    StageCount,
    SustainedRate,
    TensorParallelDegrees,
)
from piper_ray.model.errors import (
    CheckpointLost,
    CheckpointRefused,
    ChoiceTooHard,
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
from piper_ray.model.events import (
    Bounds,
    Compiling,
    DegreesAdvanced,
    DegreesSearched,
    EvaluationAdvanced,
    EvaluationFinished,
    Event,
    IncumbentFound,
    Listener,
    Note,
    StepFinished,
)
from piper_ray.model.extras import advice
from piper_ray.model.instance import Edge, Instance, Layer, Tensor, Tmpc
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.passes import Passes, passes_of, with_passes
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.solution import (
    BlockStats,
    ClusterStats,
    DegreeStats,
    EvaluationStats,
    Forecast,
    Infeasibility,
    NodeStats,
    Solution,
    SolveStats,
    Status,
)
from piper_ray.model.step import AllReduce, StepTerms
from piper_ray.model.stop import Stop, StoppedBy, StopSearch
from piper_ray.run.run import run
from piper_ray.simulate.options import InFlightRule, SimulationOptions
from piper_ray.simulate.run import simulate
from piper_ray.version import __version__

if TYPE_CHECKING:
    from piper_ray import planners as baselines
    from piper_ray.calibrate.workload import estimate
    from piper_ray.engine.backends.ray import RayBackend
    from piper_ray.engine.backends.ray.coordinator import WithoutWorkers
    from piper_ray.engine.evaluation.backend import Backend
    from piper_ray.engine.frontier.curve_events import CurveAdvanced, FrontierListener, PointClosed
    from piper_ray.engine.frontier.frontier import Frontier, Numbers, frontier
    from piper_ray.engine.frontier.points import FrontierPoint, FrontierStats
    from piper_ray.engine.preparation import Preparation
    from piper_ray.engine.solve import solve
    from piper_ray.report.graph.drawing import draw
    from piper_ray.report.info import info
    from piper_ray.run.job import Job, LayerJob, Replicas
    from piper_ray.run.result import RankRun, Run, Stretch
    from piper_ray.run.trace import run_trace, write_run_trace
    from piper_ray.simulate.memory import MemorySteps, Versions
    from piper_ray.simulate.result import Interval, PathPart, RankSimulation, Simulation
    from piper_ray.simulate.stages import StageLoad
    from piper_ray.simulate.timeline import Timeline
    from piper_ray.simulate.trace import chrome_trace, write_trace
    from piper_ray.sweep.dataset import read_dataset
    from piper_ray.sweep.point import Point
    from piper_ray.sweep.progress import Best, Progress, SweepListener
    from piper_ray.sweep.run import run_sweep
    from piper_ray.workloads.formats import Form, InFlight, dump, dump_plan, load, load_plan, load_solution
    from piper_ray.workloads.formats.load import Source
    from piper_ray.workloads.measure.workload import profile

__all__ = [
    # functions: from a model to a plan, what it is worth, files, pictures, sweeps
    "load",
    "estimate",
    "profile",
    "solve",
    "frontier",
    "evaluate",
    "simulate",
    "baselines",
    "dump",
    "load_plan",
    "dump_plan",
    "load_solution",
    "info",
    "draw",
    "write_trace",
    "chrome_trace",
    "run_sweep",
    "read_dataset",
    "run",
    "run_trace",
    "write_run_trace",
    # the problem
    "Instance",
    "Layer",
    "Edge",
    "Tmpc",
    "Tensor",
    "Cluster",
    "Link",
    "Batch",
    "Passes",
    "passes_of",
    "with_passes",
    "Source",
    "Numbers",
    "Form",
    "InFlight",
    # what plans must keep
    "Restrictions",
    "Constraint",
    "Scope",
    "NoTensorParallelism",
    "NoDataParallelism",
    "RecomputeRule",
    "TensorParallelDegrees",
    "SameDegrees",
    "StageCount",
    "AllDevices",
    "KeepOrder",
    "SustainedRate",
    "Recompute",
    # how it is solved
    "SolveOptions",
    "Contract",
    "Preparation",
    "Schedule",
    "ScheduleName",
    "SimulationOptions",
    "AllReduce",
    "StepTerms",
    "InFlightRule",
    "Stop",
    "Backend",
    "RayBackend",
    "WithoutWorkers",
    # what is told meanwhile
    "Listener",
    "FrontierListener",
    "CurveAdvanced",
    "PointClosed",
    "Progress",
    "SweepListener",
    "Point",
    "Best",
    "Event",
    "Note",
    "Compiling",
    "StepFinished",
    "DegreesAdvanced",
    "DegreesSearched",
    "EvaluationAdvanced",
    "EvaluationFinished",
    "IncumbentFound",
    "Bounds",
    # the answer
    "Solution",
    "Status",
    "StoppedBy",
    "Infeasibility",
    "SolveStats",
    "EvaluationStats",
    "DegreeStats",
    "ClusterStats",
    "NodeStats",
    "BlockStats",
    "Forecast",
    "Frontier",
    "FrontierPoint",
    "FrontierStats",
    "Plan",
    "Stage",
    "Evaluation",
    "StageEvaluation",
    "Binding",
    "Simulation",
    "RankSimulation",
    "StageLoad",
    "PathPart",
    "Interval",
    "Timeline",
    "MemorySteps",
    "Versions",
    "Run",
    "RankRun",
    "Stretch",
    "Job",
    "LayerJob",
    "Replicas",
    # errors
    "StopSearch",
    "PiperRayError",
    "UsageError",
    "InputError",
    "Fault",
    "InfeasibleError",
    "LimitError",
    "ChoiceTooHard",
    "InvalidPlan",
    "ClusterError",
    "CheckpointRefused",
    "CheckpointLost",
    "DatasetDamaged",
    "__version__",
]

# Where the names live that bring numba, numpy or pydantic with them (PEP 562).
_LAZY = {
    "load": "piper_ray.workloads.formats",
    "dump": "piper_ray.workloads.formats",
    "load_plan": "piper_ray.workloads.formats",
    "dump_plan": "piper_ray.workloads.formats",
    "load_solution": "piper_ray.workloads.formats",
    "Form": "piper_ray.workloads.formats",
    "InFlight": "piper_ray.workloads.formats",
    "Source": "piper_ray.workloads.formats.load",
    "estimate": "piper_ray.calibrate.workload",
    "profile": "piper_ray.workloads.measure.workload",
    "info": "piper_ray.report.info",
    "draw": "piper_ray.report.graph.drawing",
    "solve": "piper_ray.engine.solve",
    "Preparation": "piper_ray.engine.preparation",
    "run_sweep": "piper_ray.sweep.run",
    "read_dataset": "piper_ray.sweep.dataset",
    "frontier": "piper_ray.engine.frontier.frontier",
    "Frontier": "piper_ray.engine.frontier.frontier",
    "FrontierPoint": "piper_ray.engine.frontier.points",
    "FrontierStats": "piper_ray.engine.frontier.points",
    "FrontierListener": "piper_ray.engine.frontier.curve_events",
    "CurveAdvanced": "piper_ray.engine.frontier.curve_events",
    "PointClosed": "piper_ray.engine.frontier.curve_events",
    "Numbers": "piper_ray.engine.frontier.frontier",
    "Progress": "piper_ray.sweep.progress",
    "SweepListener": "piper_ray.sweep.progress",
    "Point": "piper_ray.sweep.point",
    "Best": "piper_ray.sweep.progress",
    "Backend": "piper_ray.engine.evaluation.backend",
    "Simulation": "piper_ray.simulate.result",
    "RankSimulation": "piper_ray.simulate.result",
    "PathPart": "piper_ray.simulate.result",
    "Interval": "piper_ray.simulate.result",
    "StageLoad": "piper_ray.simulate.stages",
    "Timeline": "piper_ray.simulate.timeline",
    "MemorySteps": "piper_ray.simulate.memory",
    "Versions": "piper_ray.simulate.memory",
    "chrome_trace": "piper_ray.simulate.trace",
    "write_trace": "piper_ray.simulate.trace",
    "Run": "piper_ray.run.result",
    "RankRun": "piper_ray.run.result",
    "Stretch": "piper_ray.run.result",
    "Job": "piper_ray.run.job",
    "LayerJob": "piper_ray.run.job",
    "Replicas": "piper_ray.run.job",
    "run_trace": "piper_ray.run.trace",
    "write_run_trace": "piper_ray.run.trace",
    "RayBackend": "piper_ray.engine.backends.ray",
    "WithoutWorkers": "piper_ray.engine.backends.ray.coordinator",
}


def __getattr__(name: str) -> object:
    if name == "baselines":
        return import_module("piper_ray.planners")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        raise advice(error) or error from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
