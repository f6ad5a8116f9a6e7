# What the package offers, in the order of its reference: each name, and the module where it lives. Type checkers read
# this, and so does the package itself (``__init__.py``), which loads a module when one of its names is first asked for.
# ``from MODULE import NAME as NAME`` declares a public name.
# isort: skip_file
# ruff: noqa: E402, PYI035 - in the order of the reference, and what is declared makes up __all__

__all__: list[str]

def __getattr__(name: str) -> object: ...

# functions: from a model to a plan, what it is worth, files, pictures, sweeps
from piper_ray.workloads.formats.load import load as load
from piper_ray.calibrate.workload import estimate as estimate
from piper_ray.workloads.estimate.kinds import on_several_kinds as on_several_kinds
from piper_ray.export.memory import memory as memory
from piper_ray.workloads.measure.workload import profile as profile
from piper_ray.engine.solve import solve as solve
from piper_ray.proposal.plan import plan as plan
from piper_ray.engine.frontier.frontier import frontier as frontier
from piper_ray.evaluate import evaluate as evaluate
from piper_ray.simulate.run import simulate as simulate
from piper_ray import planners

baselines = planners
from piper_ray.workloads.formats.load import dump as dump
from piper_ray.workloads.formats.load import load_plan as load_plan
from piper_ray.workloads.formats.load import dump_plan as dump_plan
from piper_ray.workloads.formats.load import load_solution as load_solution
from piper_ray.engine.certify import certify as certify
from piper_ray.certificate.check import verify_certificate as verify_certificate
from piper_ray.certificate.certificate import read_certificate as read_certificate
from piper_ray.certificate.certificate import write_certificate as write_certificate
from piper_ray.report.document import info as info
from piper_ray.report.graph import draw as draw
from piper_ray.simulate.trace import write_trace as write_trace
from piper_ray.simulate.trace import chrome_trace as chrome_trace
from piper_ray.sweep.run import run_sweep as run_sweep
from piper_ray.sweep.dataset import read_dataset as read_dataset
from piper_ray.run.run import run as run
from piper_ray.run.trace import run_trace as run_trace
from piper_ray.run.trace import write_run_trace as write_run_trace

# the problem
from piper_ray.model.instance import Instance as Instance
from piper_ray.model.instance import Layer as Layer
from piper_ray.model.instance import Edge as Edge
from piper_ray.model.instance import Tmpc as Tmpc
from piper_ray.model.mode import Mode as Mode
from piper_ray.model.mode import Sharding as Sharding
from piper_ray.model.mode import Recomputation as Recomputation
from piper_ray.model.instance import TrainedModel as TrainedModel
from piper_ray.model.instance import Tensor as Tensor
from piper_ray.model.cluster import Cluster as Cluster
from piper_ray.model.cluster import DeviceKind as DeviceKind
from piper_ray.model.cluster import Link as Link
from piper_ray.model.instance import Batch as Batch
from piper_ray.model.passes import Passes as Passes
from piper_ray.model.passes import passes_of as passes_of
from piper_ray.model.passes import with_passes as with_passes
from piper_ray.workloads.formats.load import Source as Source
from piper_ray.engine.frontier.result import Numbers as Numbers
from piper_ray.model.forms import Form as Form
from piper_ray.model.forms import InFlight as InFlight

# what plans must keep
from piper_ray.model.constraints import Restrictions as Restrictions
from piper_ray.model.constraints import Constraint as Constraint
from piper_ray.model.constraints import Scope as Scope
from piper_ray.model.constraints import NoTensorParallelism as NoTensorParallelism
from piper_ray.model.constraints import NoDataParallelism as NoDataParallelism
from piper_ray.model.constraints import RecomputeRule as RecomputeRule
from piper_ray.model.constraints import TensorParallelDegrees as TensorParallelDegrees
from piper_ray.model.constraints import SameDegrees as SameDegrees
from piper_ray.model.constraints import StageCount as StageCount
from piper_ray.model.constraints import AllDevices as AllDevices
from piper_ray.model.constraints import KeepOrder as KeepOrder
from piper_ray.model.constraints import Unplaced as Unplaced
from piper_ray.model.constraints import SustainedRate as SustainedRate
from piper_ray.model.constraints import Recompute as Recompute

# how it is solved
from piper_ray.model.options import SolveOptions as SolveOptions
from piper_ray.model.options import Contract as Contract
from piper_ray.engine.preparation import Preparation as Preparation
from piper_ray.model.schedule import Schedule as Schedule
from piper_ray.model.schedule import ScheduleName as ScheduleName
from piper_ray.simulate.run import SimulationOptions as SimulationOptions
from piper_ray.model.schedule import AllReduce as AllReduce
from piper_ray.model.schedule import StepTerms as StepTerms
from piper_ray.simulate.run import InFlightRule as InFlightRule
from piper_ray.simulate.run import Transfers as Transfers
from piper_ray.model.stop import Stop as Stop
from piper_ray.engine.evaluation.backend import Backend as Backend
from piper_ray.engine.backends.ray import RayBackend as RayBackend
from piper_ray.engine.backends.ray.coordinator import WithoutWorkers as WithoutWorkers

# events, and who hears them
from piper_ray.model.events import Listener as Listener
from piper_ray.engine.frontier.result import FrontierListener as FrontierListener
from piper_ray.engine.frontier.result import CurveAdvanced as CurveAdvanced
from piper_ray.engine.frontier.result import PointClosed as PointClosed
from piper_ray.sweep.point import Progress as Progress
from piper_ray.sweep.point import SweepListener as SweepListener
from piper_ray.sweep.point import Point as Point
from piper_ray.sweep.plan_point import PlanPoint as PlanPoint
from piper_ray.sweep.point import Best as Best
from piper_ray.model.events import Event as Event
from piper_ray.model.events import Note as Note
from piper_ray.model.events import Compiling as Compiling
from piper_ray.model.events import PartBegun as PartBegun
from piper_ray.model.events import StepFinished as StepFinished
from piper_ray.model.events import DegreesAdvanced as DegreesAdvanced
from piper_ray.model.events import DegreesSearched as DegreesSearched
from piper_ray.model.events import EvaluationAdvanced as EvaluationAdvanced
from piper_ray.model.events import EvaluationFinished as EvaluationFinished
from piper_ray.model.events import IncumbentFound as IncumbentFound
from piper_ray.model.events import Bounds as Bounds

# the answer
from piper_ray.model.solution import Solution as Solution
from piper_ray.model.solution import Status as Status
from piper_ray.model.stop import StoppedBy as StoppedBy
from piper_ray.model.solution import Infeasibility as Infeasibility
from piper_ray.model.solution import SolveStats as SolveStats
from piper_ray.model.solution import EvaluationStats as EvaluationStats
from piper_ray.model.solution import DegreeStats as DegreeStats
from piper_ray.model.solution import ClusterStats as ClusterStats
from piper_ray.model.solution import NodeStats as NodeStats
from piper_ray.model.solution import BlockStats as BlockStats
from piper_ray.certificate.certificate import Certificate as Certificate
from piper_ray.certificate.certificate import Tails as Tails
from piper_ray.certificate.certificate import PassPrices as PassPrices
from piper_ray.certificate.passes import PathSteps as PathSteps
from piper_ray.certificate.check import CertifiedBound as CertifiedBound
from piper_ray.model.solution import Forecast as Forecast
from piper_ray.proposal.plan import Planned as Planned
from piper_ray.proposal.demand import Figures as Figures
from piper_ray.engine.frontier.result import Frontier as Frontier
from piper_ray.engine.frontier.result import FrontierPoint as FrontierPoint
from piper_ray.engine.frontier.result import FrontierStats as FrontierStats
from piper_ray.model.plan import Plan as Plan
from piper_ray.model.plan import Stage as Stage
from piper_ray.evaluate import Evaluation as Evaluation
from piper_ray.evaluate import StageEvaluation as StageEvaluation
from piper_ray.evaluate import Binding as Binding
from piper_ray.calibrate.memory import LayoutMemory as LayoutMemory
from piper_ray.workloads.estimate.ranks import RankMemory as RankMemory
from piper_ray.simulate.result import Simulation as Simulation
from piper_ray.simulate.result import RankSimulation as RankSimulation
from piper_ray.simulate.stages import StageLoad as StageLoad
from piper_ray.simulate.result import PathPart as PathPart
from piper_ray.simulate.result import Interval as Interval
from piper_ray.simulate.timeline import Timeline as Timeline
from piper_ray.simulate.timeline import MemorySteps as MemorySteps
from piper_ray.simulate.timeline import Versions as Versions
from piper_ray.run.job import Run as Run
from piper_ray.run.job import RankRun as RankRun
from piper_ray.run.job import Stretch as Stretch
from piper_ray.run.job import Job as Job
from piper_ray.run.job import LayerJob as LayerJob
from piper_ray.run.job import Replicas as Replicas

# errors
from piper_ray.model.stop import StopSearch as StopSearch
from piper_ray.model.errors import PiperRayError as PiperRayError
from piper_ray.model.errors import UsageError as UsageError
from piper_ray.model.errors import InputError as InputError
from piper_ray.model.errors import Fault as Fault
from piper_ray.model.errors import InfeasibleError as InfeasibleError
from piper_ray.model.errors import LimitError as LimitError
from piper_ray.model.errors import ChoiceTooHard as ChoiceTooHard
from piper_ray.model.errors import InvalidPlan as InvalidPlan
from piper_ray.model.errors import ClusterError as ClusterError
from piper_ray.model.errors import CheckpointRefused as CheckpointRefused
from piper_ray.model.errors import CheckpointLost as CheckpointLost
from piper_ray.model.errors import CertificateRefused as CertificateRefused
from piper_ray.model.errors import DatasetDamaged as DatasetDamaged
from piper_ray.version import __version__ as __version__
