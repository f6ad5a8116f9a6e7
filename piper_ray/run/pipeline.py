"""A rank's part of a pipeline: its stages of a traced model, on its device, connected to the others' by torch.

This is the only way from a plan to torch, for ``piper-ray run`` (``rank``) and exported folders (``exported``). torch's
wrappers make replicas where their hooks are called. Where the backward pass is split, it computes gradients of
parameters without autograd's accumulation, so DistributedDataParallel would not notice them; such stages are not
wrapped: replicas begin alike, and their gradients are summed after a step.

All schedules run as a table of passes in torch's pipeline runtime, not by torch's classes of the same names. The lists
are then the planned and simulated ones, also for m < p, and 1F1B avoids a fault of torch 2.13 (its own list lacks a
forward pass on the last rank). The table also states where ranks send and receive (``lists``).
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

from piper_ray.model.errors import Fault, InputError
from piper_ray.run.data import PassInputs
from piper_ray.run.job import LayerJob, PipelinePlan, Replicas, Stretch
from piper_ray.run.stages import Border, StageModule, borders_of, cuts_of, untouched
from piper_ray.simulate.actions import ActionKind
from piper_ray.workloads.measure.factory import Inputs, TrainableModel
from piper_ray.workloads.measure.graph import TracedModel, traced_model
from piper_ray.workloads.measure.passes import Clock, clock_of
from piper_ray.workloads.measure.tracer import with_tensors

Mark = Callable[[], float]


class PassFailed(Exception):
    """An error of the user's own code, or of the device, in a pass: ``__cause__`` is the error."""

    def __init__(self, kind: ActionKind, stage: int) -> None:
        way = "forward" if kind is ActionKind.F else "backward"
        super().__init__(f"the {way} pass of stage {stage + 1}")
        self.stage = stage


@dataclass
class _Open:
    """An interval whose moments the device may not have reached yet."""

    what: str
    stage: int | None
    microbatch: int | None
    start: Mark
    end: Mark
    version: int | None = None


class Recorder:
    """Records a rank's intervals in a step. Microbatch k of the replica is number ``first + k apart`` of the batch."""

    def __init__(self, clock: Clock, first: int, apart: int) -> None:
        self.clock = clock
        self._first, self._apart = first, apart
        self._open: list[_Open] = []

    def begin(self) -> None:
        """Begins a step; its intervals count from now."""
        self._open.clear()
        self._begun = self.clock()

    def add(self, what: str, stage: int | None, k: int | None, start: Mark, version: int | None = None) -> None:
        """Adds an interval from ``start`` until now. version: of the weights that it used."""
        microbatch = None if k is None else self._first + k * self._apart
        self._open.append(_Open(what, stage, microbatch, start, self.clock(), version))

    def lengthen(self) -> None:
        """Extends the last interval until now."""
        self._open[-1].end = self.clock()

    def stretches(self) -> list[Stretch]:
        """The intervals of the step, in seconds since it began. Waits until the device has finished it."""
        begun_s = self._begun()
        return [
            Stretch(one.what, one.stage, one.microbatch, one.start() - begun_s, one.end() - begun_s, one.version)
            for one in self._open
        ]


class TimedStage(PipelineStage):
    """Records the times of passes, without waiting for other ranks. Raises PassFailed for errors within a pass."""

    def __init__(self, *arguments: Any, recorder: Recorder, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recorder = recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        return self._timed(ActionKind.F, fwd_chunk_id, super().forward_one_chunk, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        kind = ActionKind.B if options.get("full_backward", True) else ActionKind.I
        return self._timed(kind, bwd_chunk_id, super().backward_one_chunk, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        return self._timed(ActionKind.W, bwd_chunk_id, super().backward_weight_one_chunk, *arguments, **options)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        start = self._recorder.clock()
        super().perform_reduce_grad(grad_scale_factor)
        self._recorder.add("all-reduce", self.stage_index, None, start)

    def _timed(self, kind: ActionKind, k: int, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = self._recorder.clock()
        try:
            result = run(k, *arguments, **options)
        except Exception as error:
            raise PassFailed(kind, self.stage_index) from error
        self._recorder.add(kind.name, self.stage_index, k, start)
        return result


class TableSchedule(_PipelineScheduleRuntime):
    """Takes microbatches one by one, because each has its own inputs. Gradients are the mean over them."""

    def __init__(self, plan: PipelinePlan, stages: Sequence[TimedStage], loss: Callable[..., torch.Tensor]) -> None:
        super().__init__(list(stages), plan.microbatches, loss_fn=loss, scale_grads=True)
        actions = {place: [*map(_Action.from_str, own)] for place, own in enumerate(plan.lists)}
        self._prepare_schedule_with_comms(actions, format="compute_comms")

    def run(self, inputs: Sequence[Mapping[str, torch.Tensor]], targets: Sequence[object]) -> list[torch.Tensor]:
        """Works through a batch. inputs: of each microbatch. targets: further arguments of the loss.

        Returns the losses, in the order of the passes, on the rank that has the last stage, else nothing.
        """
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        losses: list[torch.Tensor] = []
        arguments: list[Any] = [() for _ in inputs]
        self._step_microbatches(arguments, list(map(dict, inputs)), list(targets), losses, return_outputs=False)
        return losses


def divided_model(
    spec: str, stages: Sequence[Sequence[LayerJob]], model: TrainableModel, of_loss: Inputs, *, whole: bool
) -> tuple[list[StageModule], list[Border], StageLoss]:
    """The modules of all stages of a model on the CPU, their borders, and the loss of the last one's output.

    of_loss: further arguments of the loss. whole: see ``StageModule``. Raises InputError for a model that the plan does
    not fit.
    """
    with untouched(model.module):
        traced = _traced(spec, stages, model)
        loss = StageLoss(spec, traced.result, model.loss)
        modules = [StageModule(cut, traced.layers, whole=whole) for cut in cuts_of(spec, stages, traced)]
        tensors = PassInputs.of(model.inputs).tensors
        borders = borders_of(spec, modules, tensors, lambda outputs: loss(outputs, of_loss))
    for module, border in zip(modules, borders, strict=True):
        module.copied = border.written
        module.sends = border.sent if module is not modules[-1] else None
    return modules, borders, loss


class Pipeline:
    """modules: the modules of this rank's stages, by stage. border_bytes: bytes of torch's receive buffers.
    reads_inputs: whether they read inputs of the model. has_loss: whether the last stage is on this rank."""

    def __init__(
        self,
        spec: str,
        plan: PipelinePlan,
        model: TrainableModel,
        of_loss: Inputs,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        """spec: the name of the model in errors. model: on the CPU and whole; stages of other ranks are freed. of_loss:
        further arguments of the loss for the model's own inputs. mesh: (pp, dp).

        Raises InputError for a model that the plan does not fit.
        """
        self.plan, self.device = plan, device
        place, replica = (mesh.get_local_rank(name) for name in ("pp", "dp"))
        stages, borders, loss = divided_model(spec, plan.stages, model, of_loss, whole=plan.splits)
        self.recorder = Recorder(clock_of(device), replica, plan.replicas)
        self._sum_group = mesh.get_group("dp") if sums_by_hand(plan) else None
        self.modules: dict[int, nn.Module] = {}
        self.border_bytes = 0.0
        timed = []
        for stage in plan.stages_of(place):
            module, border = stages[stage], borders[stage]
            self.modules[stage] = shared(module.on(device), plan, mesh, border)
            self.border_bytes += _border_bytes(plan, stage, border)
            timed.append(
                TimedStage(
                    self.modules[stage],
                    stage,
                    len(plan.stages),
                    device,
                    input_args=border.received,
                    output_args=border.sent,
                    group=mesh.get_group("pp"),
                    recorder=self.recorder,
                )
            )
        self.reads_inputs = any(stages[stage].reads_inputs for stage in self.modules)
        self.has_loss = len(plan.stages) - 1 in self.modules
        self._schedule = TableSchedule(plan, timed, self._timed(loss))

    def run(self, batch: Sequence[PassInputs], of_loss: Sequence[Inputs]) -> list[torch.Tensor]:
        """All passes of a batch. Parameters then have the gradients of the mean of the whole batch's losses, over all
        replicas.

        batch: this replica's microbatches. of_loss: for each, further arguments of the loss. Returns this replica's
        losses on the rank of the last stage, else nothing.
        """
        losses = self._schedule.run([one.tensors for one in batch], of_loss)
        if self._sum_group is not None:
            start = self.recorder.clock()
            mean_gradients(self.parameters(), self._sum_group)
            self.recorder.add("all-reduce", None, None, start)
        return losses

    def _timed(self, loss: StageLoss) -> Callable[[tuple[torch.Tensor, ...], Inputs], torch.Tensor]:
        """The loss, timed as a part of the forward pass before it."""

        def timed(outputs: tuple[torch.Tensor, ...], of_loss: Inputs) -> torch.Tensor:
            try:
                value = loss(outputs, of_loss)
            except Exception as error:
                raise PassFailed(ActionKind.F, len(self.plan.stages) - 1) from error
            self.recorder.lengthen()
            return value

        return timed

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained here."""
        return [one for module in self.modules.values() for one in module.parameters() if one.requires_grad]


@dataclass(frozen=True)
class StageLoss:
    """The loss of the last stage's output: the given function's, or else the sum of all outputs that have a gradient.

    result: the model's result, with slots for the stage's tensors.
    """

    spec: str
    result: object
    given: Callable[..., Any] | None

    def __call__(self, outputs: tuple[torch.Tensor, ...], of_loss: Inputs) -> torch.Tensor:
        """Computes the loss. Raises InputError for a loss that cannot be trained on."""
        args, kwargs = of_loss
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


def _traced(spec: str, stages: Sequence[Sequence[LayerJob]], model: TrainableModel) -> TracedModel:
    """The traced model, whose layers are those of the plan."""
    paths = sorted({layer.path for stage in stages for layer in stage})
    known = {path for path, _ in model.module.named_modules(remove_duplicate=False)}
    name = type(model.module).__name__
    what = f"is in the plan, and {name} has no such module; expected the model that was planned"
    if faults := [Fault(path, what) for path in paths if path not in known]:
        raise InputError(spec, faults)
    return traced_model(spec, model, [glob.escape(path) for path in paths])


def _border_bytes(plan: PipelinePlan, stage: int, border: Border) -> float:
    """The bytes that torch keeps for received inputs and gradients of each microbatch."""
    kept = [*border.received, *(border.sent if stage < len(plan.stages) - 1 else ())]
    return float(plan.microbatches * sum(tensor.nbytes for tensor in kept))


def _without_views(_: nn.Module, __: object, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A layer's outputs, with copies of those that are views.

    The next layer may write into a view, and torch would then not call the hook that gathers the layer's parameters
    before its backward pass.
    """
    return tuple(one.clone() if isinstance(one, torch.Tensor) and one._is_view() else one for one in outputs)


def sums_by_hand(plan: PipelinePlan) -> bool:
    """Whether ``mean_gradients`` must follow each step."""
    return plan.splits and plan.replicas > 1 and plan.sharing is Replicas.DDP


def shared(module: StageModule, plan: PipelinePlan, mesh: DeviceMesh, border: Border) -> nn.Module:
    """The module as one of d replicas."""
    if plan.replicas == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    if plan.sharing is Replicas.FULLY_SHARD:
        layers = dict(zip(module.cut.layers, module.layers, strict=True))
        for layer in _own_layers(layers, module.writing):  # so that one is gathered while another runs
            layer.register_forward_hook(_without_views)
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        return module
    group = mesh.get_group("dp")
    if not sums_by_hand(plan):
        return DistributedDataParallel(module, process_group=group, find_unused_parameters=border.idle)
    begin_alike(module, group)
    return module


def begin_alike(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all replicas the first one's values, as torch's wrapper does."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            sent = tensor.contiguous()
            dist.broadcast(sent, group=group, group_src=0)
            tensor.copy_(sent)


def _own_layers(layers: Mapping[int, nn.Module], writing: Collection[int]) -> list[nn.Module]:
    """The layers of a stage, by number, that can each be sharded separately.

    They share no parameter with another layer, and do not write into their inputs, which torch does not allow.
    """
    count = Counter(parameter for layer in layers.values() for parameter in set(layer.parameters()))
    return [
        layer
        for number, layer in layers.items()
        if number not in writing and {count[parameter] for parameter in layer.parameters()} == {1}
    ]


def mean_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replaces gradients by their mean over the group. A gradient that no replica has stays missing; one that only some
    replicas have counts as zero on the others, because replicas of a mixture of experts send tokens to different
    experts."""
    if not parameters:
        return
    present = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX, group)
    gradients = []
    for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
        if somewhere:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.contiguous()
            gradients.append(parameter.grad)
    for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        work.wait()
    for gradient in gradients:
        gradient.div_(dist.get_world_size(group))
