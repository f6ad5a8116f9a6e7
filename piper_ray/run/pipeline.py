"""A rank's part of a pipeline: its stages on its device, joined to the others' by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from piper_ray.model.errors import Fault, InputError
from piper_ray.run.borders import Border, borders_of, untouched
from piper_ray.run.data import Data, Microbatch
from piper_ray.run.job import Job, Replicas, pass_lists
from piper_ray.run.passes import PassFailed, Recorder, TimedStage
from piper_ray.run.stages import StageModule, cuts_of
from piper_ray.run.table import TableSchedule
from piper_ray.simulate.actions import ActionKind
from piper_ray.workloads.measure.factory import find_factory
from piper_ray.workloads.measure.graph import traced_model
from piper_ray.workloads.measure.inputs import parse_input
from piper_ray.workloads.measure.passes import clock_of
from piper_ray.workloads.measure.tracer import with_tensors

_CPU = torch.device("cpu")


class Pipeline:
    """modules: of this rank's stages, by stage. border_bytes: what torch keeps to receive into.

    The whole model is made on the CPU of every rank, and what is of other stages let go. Raises InputError and
    UsageError for a model that the plan does not fit.
    """

    def __init__(self, job: Job, mesh: DeviceMesh, device: torch.device) -> None:
        self.job, self.device = job, device
        place, replica = (mesh.get_local_rank(name) for name in ("pp", "dp"))
        self._replica = replica
        factory = find_factory(job.model, dict(job.arguments))
        declared = [parse_input(text) for text in job.inputs]
        model = factory.build(job.microbatch, _CPU, declared)
        paths = sorted({layer.path for stage in job.stages for layer in stage})
        self.data = Data(factory, model, declared, job.microbatch)
        splits = any(kind is ActionKind.I for passes in pass_lists(job) for kind, _, _ in passes)
        example = Microbatch.of(model.inputs)
        with untouched(model.module):
            traced = traced_model(job.model, model, [_literal(path) for path in paths])
            loss = Loss(job.model, traced.result, model.loss)
            stages = [StageModule(cut, traced.layers, whole=splits) for cut in cuts_of(job.model, job, traced)]
            borders = borders_of(job.model, stages, example.tensors, lambda outputs: loss(outputs, example))
        self.recorder = Recorder(clock_of(device), replica, job.replicas)
        self._sum_group = mesh.get_group("dp") if splits and job.replicas > 1 and job.sharing is Replicas.DDP else None
        held = job.schedule.stages_of_rank(place, job.places)
        self.modules: dict[int, nn.Module] = {}
        timed = []
        self.border_bytes = 0.0
        for stage in held:
            module, border = stages[stage], borders[stage]
            module.copied = border.written
            module.on(device)
            self.modules[stage] = module if self._sum_group is not None else _shared(module, job, mesh, border)
            self.border_bytes += _border_bytes(job, stage, border)
            timed.append(
                TimedStage(
                    self.modules[stage],
                    stage,
                    len(job.stages),
                    device,
                    input_args=border.received,
                    output_args=border.sent,
                    group=mesh.get_group("pp"),
                    recorder=self.recorder,
                )
            )
        self._schedule = TableSchedule(job, timed, self._timed(loss))

    def batch(self) -> list[Microbatch]:
        """This replica's microbatches of the next step, on its device."""
        whole = self.data.batch(self.job.microbatches)
        return [one.on(self.device) for one in whole[self._replica :: self.job.replicas]]

    def run(self, batch: Sequence[Microbatch]) -> list[torch.Tensor]:
        """All passes of a batch; parameters then have the gradients of the mean of the whole batch's losses.

        Returns this replica's losses on the rank of the last stage, else nothing.
        """
        losses = self._schedule.run([one.tensors for one in batch], batch)
        if self._sum_group is not None:
            self._sum_gradients(self._sum_group)
        return losses

    def _timed(self, loss: Loss) -> Callable[[tuple[torch.Tensor, ...], Microbatch], torch.Tensor]:
        """The loss as a part of the forward pass before it."""

        def timed(outputs: tuple[torch.Tensor, ...], microbatch: Microbatch) -> torch.Tensor:
            try:
                value = loss(outputs, microbatch)
            except Exception as error:
                raise PassFailed(ActionKind.F, len(self.job.stages) - 1) from error
            self.recorder.lengthen()
            return value

        return timed

    def _sum_gradients(self, group: dist.ProcessGroup) -> None:
        """Where the backward pass is split: DDP waits for hooks that torch does not call then."""
        start = self.recorder.clock()
        gradients = [one.grad for one in self.parameters() if one.grad is not None]
        for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
            work.wait()
        for gradient in gradients:
            gradient.div_(self.job.replicas)
        self.recorder.add("all-reduce", None, None, start)

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained here."""
        return [one for module in self.modules.values() for one in module.parameters() if one.requires_grad]


@dataclass(frozen=True)
class Loss:
    """Of the last stage's output and the microbatch: the factory's, or else the sum of what has a gradient.

    result: what the model returns, with slots for the stage's tensors.
    """

    spec: str
    result: object
    given: Callable[..., Any] | None

    def __call__(self, outputs: tuple[torch.Tensor, ...], microbatch: Microbatch) -> torch.Tensor:
        """Raises InputError for a loss that cannot be trained on."""
        args, kwargs = microbatch.inputs
        value: object = None
        if self.given is not None:
            value = self.given(with_tensors(self.result, outputs), *args, **kwargs)
        elif summed := [output.sum() for output in outputs if output.requires_grad]:
            value = torch.stack(summed).sum() if len(summed) > 1 else summed[0]
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            what = f"its loss is {_kind(value)}; expected a tensor of one number with a gradient"
            if self.given is None:
                what = "it returns nothing that has a gradient; expected a model that can be trained"
            raise InputError(self.spec, [Fault("", what)])
        return value


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without gradient")
    return f"a {type(value).__name__}"


def _shared(module: nn.Module, job: Job, mesh: DeviceMesh, border: Border) -> nn.Module:
    """The module as one of d replicas."""
    if job.replicas == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    if job.sharing is Replicas.FULLY_SHARD:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        return module
    return DistributedDataParallel(module, process_group=mesh.get_group("dp"), find_unused_parameters=border.idle)


def _border_bytes(job: Job, stage: int, border: Border) -> float:
    """What torch keeps of each microbatch to receive inputs and gradients into."""
    bytes_of_one = border.received_bytes + (border.sent_bytes if stage < len(job.stages) - 1 else 0)
    return float(bytes_of_one * job.microbatches_of_replica)


def _literal(path: str) -> str:
    """A path as a pattern that matches it alone."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in path)
