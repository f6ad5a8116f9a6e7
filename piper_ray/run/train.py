"""A rank's training: steps, each from a common start, timed and gathered on the first rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from piper_ray.run.data import Data, Microbatch
from piper_ray.run.job import Job, PipelinePlan
from piper_ray.run.memory import PeakMemory
from piper_ray.run.pipeline import Pipeline
from piper_ray.run.result import RankRun, Run, Stretch
from piper_ray.workloads.measure.factory import find_factory, parse_input

_CPU = torch.device("cpu")
_LEARNING_RATE = 1e-4

Progress = Callable[[int], None]
"""Steps done, those of the warm-up included."""


class Training:
    """A rank's part of a job: its pipeline, and the microbatches that the job's factory gives.

    Its data are the same on every rank. Raises InputError and UsageError for a model that the plan does not fit."""

    def __init__(self, job: Job, mesh: DeviceMesh, device: torch.device) -> None:
        factory = find_factory(job.model, dict(job.arguments))
        declared = [parse_input(text) for text in job.inputs]
        model = factory.build(job.microbatch, _CPU, declared)
        self._job, self._replica = job, mesh.get_local_rank("dp")
        self._data = Data(factory, model, declared, job.microbatch)
        self.pipeline = Pipeline(job.model, PipelinePlan.of(job), model, model.inputs, mesh, device)

    def batch(self) -> list[Microbatch]:
        """This replica's microbatches of the next step, on its device."""
        whole = self._data.batch(self._job.microbatches)
        return [one.on(self.pipeline.device) for one in whole[self._replica :: self._job.replicas]]

    def run(self, batch: list[Microbatch]) -> list[torch.Tensor]:
        """See ``Pipeline.run``; the loss gets the microbatch's inputs."""
        return self.pipeline.run(batch, [one.inputs for one in batch])


@dataclass(frozen=True)
class _Step:
    """Of one rank. losses: their sum, and their number, where the last stage is."""

    stretches: list[Stretch]
    losses: tuple[float, int]

    @property
    def end_s(self) -> float:
        return max(stretch.end_s for stretch in self.stretches)


def train(job: Job, device: torch.device, progress: Progress) -> Run | None:
    """Trains by the job's plan: the process group is there, all its ranks call this, and the first gets the run.

    Random numbers, of dropout say, begin with the rank's own number: replicas differ in them, and runs do not. Raises
    InputError and UsageError for a model that does not fit the plan, PassFailed for an error in a pass.
    """
    mesh = init_device_mesh(device.type, (job.places, job.replicas), mesh_dim_names=("pp", "dp"))
    training = Training(job, mesh, device)
    torch.manual_seed(dist.get_rank())
    parameters = training.pipeline.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE) if parameters else None
    memory = PeakMemory(device)
    with memory:
        for module in training.pipeline.modules.values():
            memory.held([*module.parameters(), *module.buffers()])
        steps = [_step(training, optimizer)]
        progress(1)
        memory.forget_peak()  # the first step began without the optimizer's state
        steps.append(_step(training, optimizer))
    for done in range(2, job.steps_before + job.steps):
        progress(done)
        steps.append(_step(training, optimizer))
    progress(job.steps_before + job.steps)
    return _gathered(job, device, training.pipeline.border_bytes, memory.peak_bytes, steps)


def _step(training: Training, optimizer: torch.optim.Optimizer | None) -> _Step:
    batch = training.batch()
    recorder, device = training.pipeline.recorder, training.pipeline.device
    _together(device)
    recorder.begin()
    losses = training.run(batch)
    start = recorder.clock()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    recorder.add("optimizer", None, None, start)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _Step(recorder.stretches(), (sum(loss.item() for loss in losses), len(losses)))


def _together(device: torch.device) -> None:
    """All ranks go on from here at once: they meet on the CPU, when the devices have nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))


def _gathered(job: Job, device: torch.device, border_bytes: float, peak_bytes: float, steps: list[_Step]) -> Run | None:
    ranks = dist.get_world_size()
    found: list[tuple[list[float], list[tuple[float, int]]]] = [([], []) for _ in range(ranks)]
    dist.all_gather_object(found, ([step.end_s for step in steps], [step.losses for step in steps]))
    steps_s = [max(ends) for ends in zip(*(ends for ends, _ in found), strict=True)]
    losses = [
        sum(total for total, _ in of_ranks) / sum(count for _, count in of_ranks)
        for of_ranks in zip(*(of_rank for _, of_rank in found), strict=True)
    ]
    measured_s = steps_s[job.steps_before :]
    shown = measured_s.index(median_low(measured_s))
    rank = dist.get_rank()
    own = RankRun(
        name=job.name_of(rank),
        stages=job.stages_of(rank),
        replica=rank % job.replicas,
        stretches=tuple(steps[job.steps_before + shown].stretches),
        peak_memory_bytes=peak_bytes,
        border_bytes=border_bytes,
    )
    runs: list[RankRun | None] = [None] * ranks
    dist.gather_object(own, runs if rank == 0 else None)
    if rank:
        return None
    return Run(
        job=job,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        threads=torch.get_num_threads(),
        steps_s=tuple(measured_s),
        losses=tuple(losses),
        shown=shown,
        ranks=tuple(one for one in runs if one is not None),
    )
