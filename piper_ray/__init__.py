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
    from piper_ray.certificate.certificate import Certificate, Tails, read_certificate, write_certificate
    from piper_ray.certificate.check import CertifiedBound, verify_certificate
    from piper_ray.engine.backends.ray import RayBackend
    from piper_ray.engine.backends.ray.coordinator import WithoutWorkers
    from piper_ray.engine.certify import certify
    from piper_ray.engine.evaluation.backend import Backend
    from piper_ray.engine.frontier.events import CurveAdvanced, FrontierListener, PointClosed
    from piper_ray.engine.frontier.frontier import frontier
    from piper_ray.engine.frontier.ranges import Numbers
    from piper_ray.engine.frontier.result import Frontier, FrontierPoint, FrontierStats
    from piper_ray.engine.preparation import Preparation
    from piper_ray.engine.solve import solve
    from piper_ray.evaluate import Binding, Evaluation, StageEvaluation, evaluate
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
    from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tensor, Tmpc, TrainedModel
    from piper_ray.model.mode import Mode, Recomputation, Sharding
    from piper_ray.model.options import Contract, SolveOptions
    from piper_ray.model.passes import Passes, passes_of, with_passes
    from piper_ray.model.plan import Plan, Stage
    from piper_ray.model.restrictions import Restrictions
    from piper_ray.model.schedule import AllReduce, Schedule, ScheduleName, StepTerms
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
    from piper_ray.model.stop import Stop, StoppedBy, StopSearch
    from piper_ray.proposal.plan import Figures, Planned, plan
    from piper_ray.report.document import info
    from piper_ray.report.graph import draw
    from piper_ray.run.job import Job, LayerJob, RankRun, Replicas, Run, Stretch
    from piper_ray.run.run import run
    from piper_ray.run.trace import run_trace, write_run_trace
    from piper_ray.simulate.options import InFlightRule, SimulationOptions
    from piper_ray.simulate.result import Interval, PathPart, RankSimulation, Simulation
    from piper_ray.simulate.run import simulate
    from piper_ray.simulate.stages import StageLoad
    from piper_ray.simulate.timeline import MemorySteps, Timeline, Versions
    from piper_ray.simulate.trace import chrome_trace, write_trace
    from piper_ray.sweep.dataset import read_dataset
    from piper_ray.sweep.point import Best, Point, Progress, SweepListener
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
    "Mode",
    "Sharding",
    "Recomputation",
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

_NAMES = {
    "evaluate": "Binding Evaluation StageEvaluation evaluate",
    "certificate.certificate": "Certificate Tails read_certificate write_certificate",
    "certificate.check": "CertifiedBound verify_certificate",
    "engine.certify": "certify",
    "model.errors": (
        "CertificateRefused CheckpointLost CheckpointRefused ChoiceTooHard ClusterError DatasetDamaged Fault "
        "InfeasibleError InputError InvalidPlan LimitError PiperRayError UsageError"
    ),
    "model.cluster": "Cluster Link",
    "model.constraints": (
        "AllDevices Constraint KeepOrder NoDataParallelism NoTensorParallelism Recompute RecomputeRule "
        "SameDegrees Scope StageCount SustainedRate TensorParallelDegrees"
    ),
    "model.events": (
        "Bounds Compiling DegreesAdvanced DegreesSearched EvaluationAdvanced EvaluationFinished Event "
        "IncumbentFound Listener Note PartBegun StepFinished"
    ),
    "model.instance": "Batch Edge Instance Layer Tensor Tmpc TrainedModel",
    "model.mode": "Mode Recomputation Sharding",
    "model.options": "Contract SolveOptions",
    "model.passes": "Passes passes_of with_passes",
    "model.plan": "Plan Stage",
    "model.restrictions": "Restrictions",
    "model.schedule": "AllReduce Schedule ScheduleName StepTerms",
    "model.solution": (
        "BlockStats ClusterStats DegreeStats EvaluationStats Forecast Infeasibility NodeStats Solution SolveStats "
        "Status"
    ),
    "model.stop": "Stop StoppedBy StopSearch",
    "run.run": "run",
    "simulate.options": "InFlightRule SimulationOptions",
    "simulate.run": "simulate",
    "workloads.formats": "load dump load_plan dump_plan load_solution Form InFlight",
    "workloads.formats.load": "Source",
    "calibrate.workload": "estimate",
    "workloads.measure.workload": "profile",
    "report.document": "info",
    "report.graph": "draw",
    "engine.solve": "solve",
    "proposal.plan": "plan Planned Figures",
    "engine.preparation": "Preparation",
    "sweep.run": "run_sweep",
    "sweep.dataset": "read_dataset",
    "engine.frontier.frontier": "frontier",
    "engine.frontier.result": "Frontier FrontierPoint FrontierStats",
    "engine.frontier.events": "FrontierListener CurveAdvanced PointClosed",
    "engine.frontier.ranges": "Numbers",
    "sweep.point": "Best Point Progress SweepListener",
    "engine.evaluation.backend": "Backend",
    "simulate.result": "Simulation RankSimulation PathPart Interval",
    "simulate.stages": "StageLoad",
    "simulate.timeline": "MemorySteps Timeline Versions",
    "simulate.trace": "chrome_trace write_trace",
    "run.job": "Job LayerJob RankRun Replicas Run Stretch",
    "run.trace": "run_trace write_run_trace",
    "engine.backends.ray": "RayBackend",
    "engine.backends.ray.coordinator": "WithoutWorkers",
}
"""By the module where they live; the package has them from there when they are first asked for (PEP 562)."""

_HOMES = {name: f"piper_ray.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "baselines":
        return import_module("piper_ray.planners")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from piper_ray.model.errors import advice

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
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
