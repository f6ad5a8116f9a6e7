"""piper_ray: exact planning of pipeline, data and tensor parallelism (Piper, NeurIPS 2021).

    instance = piper_ray.estimate("llama3-70b", gpu="H100-SXM", nodes=64)  # or load("workload.toml")
    solution = piper_ray.solve(instance, time_limit="10m")
    piper_ray.evaluate(instance, solution.plan)

Importing this package loads next to nothing: data types, the readers and the solver load when first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from piper_ray.version import __version__

TYPE_CHECKING = False  # as typing's, which takes longer to load than all of this
if TYPE_CHECKING:
    from piper_ray import planners as baselines
    from piper_ray.calibrate.workload import estimate
    from piper_ray.certificate.certificate import Certificate, Tails
    from piper_ray.certificate.check import CertifiedBound, verify_certificate
    from piper_ray.certificate.file import read_certificate, write_certificate
    from piper_ray.engine.backends.ray import RayBackend
    from piper_ray.engine.backends.ray.coordinator import WithoutWorkers
    from piper_ray.engine.certify import certify
    from piper_ray.engine.evaluation.backend import Backend
    from piper_ray.engine.frontier.curve_events import CurveAdvanced, FrontierListener, PointClosed
    from piper_ray.engine.frontier.frontier import Frontier, Numbers, frontier
    from piper_ray.engine.frontier.points import FrontierPoint, FrontierStats
    from piper_ray.engine.preparation import Preparation
    from piper_ray.engine.solve import solve
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
        CertificateRefused,
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
        PartBegun,
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
    from piper_ray.model.trained_model import TrainedModel
    from piper_ray.proposal.figures import Figures
    from piper_ray.proposal.plan import Planned, plan
    from piper_ray.report.graph.drawing import draw
    from piper_ray.report.info import info
    from piper_ray.run.job import Job, LayerJob, Replicas
    from piper_ray.run.result import RankRun, Run, Stretch
    from piper_ray.run.run import run
    from piper_ray.run.trace import run_trace, write_run_trace
    from piper_ray.simulate.memory import MemorySteps, Versions
    from piper_ray.simulate.options import InFlightRule, SimulationOptions
    from piper_ray.simulate.result import Interval, PathPart, RankSimulation, Simulation
    from piper_ray.simulate.run import simulate
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
    "plan",
    "frontier",
    "evaluate",
    "simulate",
    "baselines",
    "dump",
    "load_plan",
    "dump_plan",
    "load_solution",
    "certify",
    "verify_certificate",
    "read_certificate",
    "write_certificate",
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
    "TrainedModel",
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
    "PartBegun",
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
    "Certificate",
    "Tails",
    "CertifiedBound",
    "Forecast",
    "Planned",
    "Figures",
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
    "CertificateRefused",
    "DatasetDamaged",
    "__version__",
]

# Where the names live (PEP 562).
_LAZY = {
    "Binding": "piper_ray.evaluate",
    "Evaluation": "piper_ray.evaluate",
    "StageEvaluation": "piper_ray.evaluate",
    "evaluate": "piper_ray.evaluate",
    "Certificate": "piper_ray.certificate.certificate",
    "Tails": "piper_ray.certificate.certificate",
    "CertifiedBound": "piper_ray.certificate.check",
    "verify_certificate": "piper_ray.certificate.check",
    "read_certificate": "piper_ray.certificate.file",
    "write_certificate": "piper_ray.certificate.file",
    "certify": "piper_ray.engine.certify",
    "CertificateRefused": "piper_ray.model.errors",
    "Batch": "piper_ray.model.batch",
    "Cluster": "piper_ray.model.cluster",
    "Link": "piper_ray.model.cluster",
    "AllDevices": "piper_ray.model.constraints",
    "Constraint": "piper_ray.model.constraints",
    "KeepOrder": "piper_ray.model.constraints",
    "NoDataParallelism": "piper_ray.model.constraints",
    "NoTensorParallelism": "piper_ray.model.constraints",
    "Recompute": "piper_ray.model.constraints",
    "RecomputeRule": "piper_ray.model.constraints",
    "SameDegrees": "piper_ray.model.constraints",
    "Scope": "piper_ray.model.constraints",
    "StageCount": "piper_ray.model.constraints",
    "SustainedRate": "piper_ray.model.constraints",
    "TensorParallelDegrees": "piper_ray.model.constraints",
    "CheckpointLost": "piper_ray.model.errors",
    "CheckpointRefused": "piper_ray.model.errors",
    "ChoiceTooHard": "piper_ray.model.errors",
    "ClusterError": "piper_ray.model.errors",
    "DatasetDamaged": "piper_ray.model.errors",
    "Fault": "piper_ray.model.errors",
    "InfeasibleError": "piper_ray.model.errors",
    "InputError": "piper_ray.model.errors",
    "InvalidPlan": "piper_ray.model.errors",
    "LimitError": "piper_ray.model.errors",
    "PiperRayError": "piper_ray.model.errors",
    "UsageError": "piper_ray.model.errors",
    "Bounds": "piper_ray.model.events",
    "Compiling": "piper_ray.model.events",
    "DegreesAdvanced": "piper_ray.model.events",
    "DegreesSearched": "piper_ray.model.events",
    "EvaluationAdvanced": "piper_ray.model.events",
    "EvaluationFinished": "piper_ray.model.events",
    "Event": "piper_ray.model.events",
    "IncumbentFound": "piper_ray.model.events",
    "Listener": "piper_ray.model.events",
    "Note": "piper_ray.model.events",
    "PartBegun": "piper_ray.model.events",
    "StepFinished": "piper_ray.model.events",
    "advice": "piper_ray.model.extras",
    "Edge": "piper_ray.model.instance",
    "Instance": "piper_ray.model.instance",
    "Layer": "piper_ray.model.instance",
    "Tensor": "piper_ray.model.instance",
    "Tmpc": "piper_ray.model.instance",
    "TrainedModel": "piper_ray.model.trained_model",
    "Contract": "piper_ray.model.options",
    "SolveOptions": "piper_ray.model.options",
    "Passes": "piper_ray.model.passes",
    "passes_of": "piper_ray.model.passes",
    "with_passes": "piper_ray.model.passes",
    "Plan": "piper_ray.model.plan",
    "Stage": "piper_ray.model.plan",
    "Restrictions": "piper_ray.model.restrictions",
    "Schedule": "piper_ray.model.schedule",
    "ScheduleName": "piper_ray.model.schedule",
    "BlockStats": "piper_ray.model.solution",
    "ClusterStats": "piper_ray.model.solution",
    "DegreeStats": "piper_ray.model.solution",
    "EvaluationStats": "piper_ray.model.solution",
    "Forecast": "piper_ray.model.solution",
    "Infeasibility": "piper_ray.model.solution",
    "NodeStats": "piper_ray.model.solution",
    "Solution": "piper_ray.model.solution",
    "SolveStats": "piper_ray.model.solution",
    "Status": "piper_ray.model.solution",
    "AllReduce": "piper_ray.model.step",
    "StepTerms": "piper_ray.model.step",
    "Stop": "piper_ray.model.stop",
    "StoppedBy": "piper_ray.model.stop",
    "StopSearch": "piper_ray.model.stop",
    "run": "piper_ray.run.run",
    "InFlightRule": "piper_ray.simulate.options",
    "SimulationOptions": "piper_ray.simulate.options",
    "simulate": "piper_ray.simulate.run",
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
    "plan": "piper_ray.proposal.plan",
    "Planned": "piper_ray.proposal.plan",
    "Figures": "piper_ray.proposal.figures",
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


_SHOWN = (
    "Batch", "Cluster", "Edge", "Instance", "Layer", "PiperRayError", "Plan", "Restrictions", "Schedule",
    "SimulationOptions", "Solution", "SolveOptions", "Stage", "StepTerms", "Tmpc", "TrainedModel", "UsageError",
)  # fmt: skip
"""What users make themselves, or ask for, or catch."""


def __dir__() -> list[str]:
    """What completion offers: all functions and the few types above. All names would begin with a rare constraint."""
    return sorted({*(name for name in __all__ if name.islower()), *_SHOWN})


class _Package(ModuleType):
    """``evaluate``, ``run`` and ``simulate`` are functions here, and modules too: loading one of these, which Python
    would put in the function's place, hides nothing."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
