"""The work of a run's ranks: a plan that torch can run, as plain data that is sent to each of them. Also a run's
measurements: steps, and each rank's times and memory in one of them; or a rank's failure."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from piper_ray.model import arguments
from piper_ray.model.cores import share_of_cores
from piper_ray.model.errors import PiperRayError, UsageError
from piper_ray.model.figures import plural, time_text
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.run.lists import torch_lists
from piper_ray.run.stream import PassStream
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.simulate.steady import rule_in_flight
from piper_ray.workloads.formats.plans import PlannedDocument

if TYPE_CHECKING:
    from piper_ray.simulate.result import Simulation


Pass = tuple[ActionKind, int, int]
"""One pass: its kind, its stage, and its microbatch among those of a replica."""

_DEVICES = ("cpu", "cuda")


class Replicas(str, Enum):
    """How the replicas of a stage share their work: torch's DistributedDataParallel, or its fully_shard.

    >>> Replicas("ddp").value
    'ddp'
    """

    DDP = "ddp"
    FULLY_SHARD = "fully-shard"


@dataclass(frozen=True)
class LayerJob:
    """A layer of a stage, as a run finds it in the model.

    path: the path of its module. call: the number of the module's call in a forward pass, from 0.

    >>> LayerJob("blocks.3", call=0, recompute=True).path
    'blocks.3'
    """

    path: str
    call: int
    recompute: bool


@dataclass(frozen=True)
class JobOptions:
    """How a plan is run. Raises UsageError for values that make no sense.

    model, arguments: of the factory; inputs: as in ``profile``. microbatches: N; microbatch: samples of one; None: the
    plan's own. steps: the number of measured ones, after ``warm_up`` and two more. vertical_sync: under PipeDream.
    """

    model: str
    arguments: Mapping[str, object]
    inputs: tuple[str, ...]
    microbatches: int | None
    microbatch: int | None
    device: str
    sharing: Replicas
    steps: int
    warm_up: int
    vertical_sync: bool

    def __post_init__(self) -> None:
        arguments.of_kind("model", self.model, str, "a factory, such as 'model.py:build'")
        if self.device not in _DEVICES:
            raise UsageError(f"device must be 'cpu' or 'cuda', not {arguments.shown(self.device)}")
        (warm_up,) = arguments.whole_numbers("warm_up", [self.warm_up])
        if warm_up < 0:
            raise UsageError(f"warm_up must be at least 0, not {warm_up}")
        found: dict[str, object] = {
            "arguments": {key: _plain(key, value) for key, value in self.arguments.items()},
            "inputs": tuple(self.inputs),
            "sharing": arguments.choice("sharing", self.sharing, Replicas),
            "steps": arguments.positive("steps", self.steps),
            "warm_up": warm_up,
        }
        for name in ("microbatches", "microbatch"):
            if getattr(self, name) is not None:
                found[name] = arguments.positive(name, getattr(self, name))
        for name, value in found.items():
            object.__setattr__(self, name, value)


def _plain(key: str, value: object) -> object:
    """Checks an argument of the factory, which is shown in messages and sent to the ranks."""
    try:
        if ast.literal_eval(repr(value)) == value:
            return value
    except (ValueError, SyntaxError):
        pass
    raise UsageError(f"argument {key} of the model: {arguments.shown(value)} is no number, text, or container of those")


@dataclass(frozen=True)
class Job(JobOptions):
    """The model that a run's ranks train, and how.

    stages: the layers of each, front to back; degrees: d of each. in_flight: the microbatches that a replica of each
    stage keeps under an asynchronous schedule. microbatches: N; microbatch: samples of one.

    model, arguments: of the factory; inputs: as in ``profile``. steps: the number of measured ones, after
    ``steps_before`` others, of which ``warm_up`` are the warm-up's. threads: the threads of each rank, on a CPU.

    >>> import piper_ray
    >>> measured = piper_ray.run("models.py:small_gpt", "plan.json")  # doctest: +SKIP
    >>> measured.job.degrees  # doctest: +SKIP
    """

    microbatches: int
    microbatch: int
    stages: tuple[tuple[LayerJob, ...], ...]
    schedule: Schedule
    degrees: tuple[int, ...]
    threads: int
    in_flight: tuple[int, ...] = ()

    @property
    def places(self) -> int:
        """p: ranks of one pipeline."""
        return len(self.stages) // self.schedule.v

    @property
    def replicas(self) -> int:
        """d of all stages, under a schedule that flushes."""
        return self.degrees[0]

    @property
    def ranks(self) -> int:
        """The number of ranks. They are numbered by place, and by replica within a place."""
        return sum(self.degrees[: self.places])

    def seat(self, rank: int) -> tuple[int, int]:
        """The place and the replica of a rank."""
        first = [0, *accumulate(self.degrees[: self.places])]
        place = bisect_right(first, rank) - 1
        return place, rank - first[place]

    def rank_of(self, place: int, replica: int) -> int:
        """The rank of a replica of a place."""
        return sum(self.degrees[:place]) + replica

    @property
    def steps_before(self) -> int:
        """The steps that are not measured. The optimizer creates its state in the first one, memory is tracked until
        the end of the second, and then come those of the warm-up."""
        return 2 + self.warm_up

    @property
    def efforts(self) -> int:
        """The number of all steps, for progress."""
        return self.steps_before + self.steps

    @property
    def microbatches_of_replica(self) -> int:
        """m: replica i runs microbatches i, i + d, i + 2d and so on."""
        return self.microbatches // self.replicas

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """A rank's stages, by chunk."""
        place, _ = self.seat(rank)
        return self.schedule.stages_of_rank(place, self.places)

    def name_of(self, rank: int) -> str:
        """``rank 1 (stage 2, replica 1)``."""
        stages = self.stages_of(rank)
        text = f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {', '.join(str(stage + 1) for stage in stages)}"
        place, replica = self.seat(rank)
        return f"{text}, replica {replica})" if self.degrees[place] > 1 else f"{text})"


def pass_lists(schedule: Schedule, places: int, microbatches: int) -> tuple[tuple[Pass, ...], ...]:
    """For each place its passes in order: kind, stage, microbatch. microbatches: of a replica.

    Raises UsageError if the schedule cannot run this number of microbatches on this number of ranks.
    """
    found = []
    for place, actions in enumerate(flush_lists(schedule, places, microbatches)):
        stages = schedule.stages_of_rank(place, places)
        found.append(tuple((ActionKind(kind), stages[chunk], k) for kind, chunk, k in actions.tolist()))
    return tuple(found)


@dataclass(frozen=True)
class PipelinePlan:
    """A plan in the form that torch's pipelines need, made from a job or from an exported folder.

    stages: the layers of each, front to back. passes: for each place (rank of one pipeline) its list, in order. lists:
    the same with all actions of torch between passes. replicas: d. sharing: how replicas share their work. weight_type:
    PyTorch's name of the weights' type; empty if unknown.
    """

    stages: tuple[tuple[LayerJob, ...], ...]
    passes: tuple[tuple[Pass, ...], ...]
    lists: tuple[tuple[str, ...], ...]
    replicas: int
    sharing: Replicas
    weight_type: str = ""

    @classmethod
    def of(cls, job: Job) -> PipelinePlan:
        """Raises UsageError if the schedule cannot run this number of microbatches on this number of ranks."""
        passes = pass_lists(job.schedule, job.places, job.microbatches_of_replica)
        return cls(job.stages, passes, torch_lists(passes), job.replicas, job.sharing)

    @property
    def places(self) -> int:
        """p: ranks of one pipeline."""
        return len(self.passes)

    @property
    def ranks(self) -> int:
        """p d: rank r d + i is replica i of place r."""
        return self.places * self.replicas

    @property
    def microbatches(self) -> int:
        """m: the microbatches of a replica."""
        return 1 + max(k for passes in self.passes for _, _, k in passes)

    @property
    def splits(self) -> bool:
        """Whether backward passes run in two parts."""
        return any(kind is ActionKind.I for passes in self.passes for kind, _, _ in passes)

    def stages_of(self, place: int) -> list[int]:
        """The stages of a place, ascending."""
        return sorted({stage for _, stage, _ in self.passes[place]})


def job_of(plan: PlannedDocument, schedule: Schedule, options: JobOptions) -> Job:
    """A job for the plan. Raises UsageError, with the reason, for a plan that torch's pipelines cannot run."""
    microbatches = options.microbatches or plan.microbatches
    microbatch = options.microbatch or plan.samples_per_microbatch
    if microbatches is None:
        raise UsageError("the plan does not say how many microbatches a batch has; expected --microbatches N")
    if microbatch is None:
        raise UsageError("the plan does not say how many samples a microbatch has; expected --microbatch-size SAMPLES")
    for number, stage in enumerate(plan.stages, start=1):
        if stage.tensor_parallel_degree > 1:
            raise UsageError(
                f"stage {number} has tensor-parallel degree {stage.tensor_parallel_degree}: run cuts models at layers, "
                "and cannot divide a layer; expected a plan with t = 1 (solve --no-tensor-parallel)"
            )
    degrees = [stage.data_parallel_degree for stage in plan.stages]
    if not schedule.asynchronous and len(set(degrees)) > 1:
        raise UsageError(
            f"the stages have data-parallel degrees {', '.join(map(str, degrees))}: torch's pipelines have one for all "
            "stages; expected a plan with one (solve --same-degrees, or a schedule with a flush)"
        )
    for d in degrees:
        if microbatches % d:
            raise UsageError(f"{microbatches} microbatches cannot be shared by {d} replicas; expected a multiple")
    if len(plan.stages) % schedule.v:
        raise UsageError(
            f"schedule {schedule.name.value} puts {schedule.v} stages on each rank; the plan has {len(plan.stages)}, "
            f"which {schedule.v} does not divide"
        )
    planned: dict[str, Any] = {
        "microbatches": microbatches,
        "microbatch": microbatch,
        "stages": _layers(plan),
        "schedule": schedule,
        "degrees": tuple(degrees),
        "threads": _threads(plan, sum(degrees) // schedule.v),
        "in_flight": (plan.in_flight or rule_in_flight(degrees)) if schedule.asynchronous else (),
    }
    job = Job(**(vars(options) | planned))
    if schedule.asynchronous:
        _check_stream(job)
    else:
        PipelinePlan.of(job)  # raises if there is none
    if job.vertical_sync and schedule.name is not ScheduleName.PIPEDREAM:
        raise UsageError(f"vertical sync: schedule {schedule.name.value} has one version in all stages anyway")
    return job


def pass_stream(job: Job) -> PassStream:
    """All passes of the run under an asynchronous schedule: those of the steps, and further ones while it drains."""
    depth = max(y * d for y, d in zip(job.in_flight, job.degrees, strict=True))
    batches = job.steps_before + job.steps + -(-depth // job.microbatches)
    return PassStream(job.schedule.name, job.degrees, job.in_flight, job.microbatches, batches, job.vertical_sync)


def _check_stream(job: Job) -> None:
    """Raises UsageError for a job that cannot run endlessly."""
    name = job.schedule.name.value
    if job.device != "cpu":
        raise UsageError(f"schedule {name} runs over gloo alone; expected --device cpu")
    if job.sharing is not Replicas.DDP:
        raise UsageError(f"schedule {name} keeps versions of whole weights; expected --replicas ddp")
    for number, (y, d) in enumerate(zip(job.in_flight, job.degrees, strict=True), start=1):
        if job.schedule.name is ScheduleName.TWO_BW and y * d > job.microbatches:
            raise UsageError(
                f"stage {number} keeps {y * d} microbatches in flight, and a batch has {job.microbatches}: two versions"
                " of the weights are enough for larger batches alone; expected more --microbatches"
            )
    replace(pass_stream(job), batches=3).order()


def _threads(plan: PlannedDocument, ranks: int) -> int:
    """The number of threads with which times were measured, if each rank can have as many; otherwise a rank's share of
    the cores."""
    share = share_of_cores(ranks)
    return share if plan.measured_threads is None else min(plan.measured_threads, share)


def _layers(plan: PlannedDocument) -> tuple[tuple[LayerJob, ...], ...]:
    """The layers of each stage. Layers of one module are its calls, in the order of their ids."""
    calls: dict[str, list[int]] = defaultdict(list)
    for layer in sorted((layer for stage in plan.stages for layer in stage.layers), key=lambda layer: layer.id):
        calls[layer.path].append(layer.id)
    return tuple(
        tuple(LayerJob(layer.path, calls[layer.path].index(layer.id), layer.recompute) for layer in stage.layers)
        for stage in plan.stages
    )


@dataclass(frozen=True)
class Stretch:
    """An interval of a rank's time, in seconds since the step began.

    what: "F", "B", "I", "W", "all-reduce" or "optimizer". stage, microbatch: their numbers in the plan and in the
    batch, from 0; None if it belongs to none. version: the number of updates in the weights that a pass used, under an
    asynchronous schedule, where microbatch numbers continue into the next batch.

    >>> stretch = Stretch("forward", 0, 3, 0.5, 0.75)
    >>> stretch.end_s - stretch.start_s
    0.25
    """

    what: str
    stage: int | None
    microbatch: int | None
    start_s: float
    end_s: float
    version: int | None = None

    @property
    def duration_s(self) -> float:
        """The time from its start to its end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RankRun:
    """One rank's work in the step that is shown, and its largest memory in any step.

    stretches: consecutive intervals. border_bytes: the part of the peak that torch keeps to receive all microbatches
    into. versions: the most versions of its weights at a time.

    >>> import piper_ray
    >>> measured = piper_ray.run("models.py:small_gpt", "plan.json")  # doctest: +SKIP
    >>> measured.ranks[0].peak_memory_bytes  # doctest: +SKIP
    """

    name: str
    stages: tuple[int, ...]
    replica: int
    stretches: tuple[Stretch, ...]
    peak_memory_bytes: float
    border_bytes: float
    versions: int = 1

    def _sum_s(self, *what: str) -> float:
        return sum(one.duration_s for one in self.stretches if one.what in what)

    @property
    def compute_s(self) -> float:
        """The time of passes."""
        return self._sum_s("F", "B", "I", "W")

    @property
    def all_reduce_s(self) -> float:
        """The time of sums of gradients that are not part of a backward pass."""
        return self._sum_s("all-reduce")

    @property
    def optimizer_s(self) -> float:
        """The time of the optimizer's step."""
        return self._sum_s("optimizer")


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """The result of training by a plan.

    steps_s: the time of each measured step, from its common start until the last rank has updated its weights. losses:
    the loss of each step, including those before the measured ones: the mean over its microbatches. shown: the number
    of the measured step for the ranks' figures: one of median length. promised_s: the time of a step by the plan's
    document or its simulation; None if neither states it. simulation: of the plan, if its instance is known. threads:
    the threads of each rank. measured_threads: those with which the plan's times were measured; None if unknown.
    load: the load of the machine, as in ``os.getloadavg``, before the ranks began. is_bare: the machine does not hold
    the whole model, so its stages got weights of their own.

    >>> import piper_ray
    >>> measured = piper_ray.run("models.py:small_gpt", "plan.json")  # doctest: +SKIP
    >>> measured.step_s, measured.losses[-1]  # doctest: +SKIP
    """

    job: Job
    device: str
    threads: int
    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    shown: int
    ranks: tuple[RankRun, ...]
    promised_s: float | None = None
    simulation: Simulation | None = None
    measured_threads: int | None = None
    load: float | None = None
    is_bare: bool = False

    @property
    def step_s(self) -> float:
        """The median of the measured steps."""
        return median(self.steps_s)

    @property
    def spread_s(self) -> float:
        """The time from the first to the third quartile of the measured steps."""
        if len(self.steps_s) == 1:
            return 0.0
        low, _, high = quantiles(self.steps_s, n=4, method="inclusive")
        return high - low

    def waiting_s(self, rank: int) -> float:
        """The rest of the shown step, in which the rank waits for others, or for what they send."""
        found = self.ranks[rank]
        return self.steps_s[self.shown] - found.compute_s - found.all_reduce_s - found.optimizer_s

    def __repr__(self) -> str:
        promised = "" if self.promised_s is None else f", promised {time_text(self.promised_s)}"
        return (
            f"Run({self.job.schedule.text}: {plural(len(self.steps_s), 'step')} on {plural(len(self.ranks), 'rank')}, "
            f"step {time_text(self.step_s)}{promised})"
        )


@dataclass(frozen=True)
class Failure:
    """A failure that a rank reports to its launcher.

    error: raised by the launcher. own: whether the rank failed itself; if not, it lost the others, one of which may
    have failed."""

    error: PiperRayError
    own: bool = True
