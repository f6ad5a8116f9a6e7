"""A folder that ``export --to torch`` wrote, as a pipeline: the functions that its ``pipeline.py`` calls on each
rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural
from piper_ray.run.data import PassInputs, divided, in_order_of, moved
from piper_ray.run.job import PipelinePlan
from piper_ray.run.pipeline import Pipeline
from piper_ray.workloads.measure.factory import Inputs, TrainableModel, as_call

_CPU = torch.device("cpu")


class PlannedSchedule:
    """This rank's part of the pipeline. ``step`` works through a batch."""

    def __init__(self, pipeline: Pipeline, inputs: Inputs, target: object) -> None:
        """inputs, target: of one microbatch."""
        self._pipeline, self._inputs, self._target = pipeline, inputs, target

    def step(
        self, *args: object, target: object = None, losses: list[torch.Tensor] | None = None, **kwargs: object
    ) -> None:
        """All passes of a batch. Every parameter then has the gradient of the mean of the whole batch's losses, over
        all replicas. Clear existing gradients before.

        args, kwargs: the model's inputs, all microbatches of this replica concatenated along the first side, the same
        on each rank of the replica; ranks whose stages read no inputs may leave them out. target: for the loss, on the
        rank of the last stage. losses: filled with those of the microbatches there. Raises UsageError for inputs unlike
        those that ``build`` was given.
        """
        pipeline, count = self._pipeline, self._pipeline.plan.microbatches
        calls: list[Inputs] = [((), {})] * count
        if args or kwargs or pipeline.reads_inputs:
            calls = divided("inputs", self._inputs, in_order_of(self._inputs, (args, kwargs)), count)
        targets = divided("target", self._target, target, count) if pipeline.has_loss else [None] * count
        pipeline.recorder.begin()
        found = pipeline.run(
            [PassInputs.of(call).on(pipeline.device) for call in calls],
            [moved(((one,), {}), pipeline.device) for one in targets],
        )
        if losses is not None and pipeline.has_loss:
            losses[:] = [loss.detach() for loss in found]


def make_mesh(plan: PipelinePlan, device_type: str) -> DeviceMesh:
    """The mesh (pp, dp) of all started ranks. Raises UsageError unless their number is the plan's."""
    expected = f"{plan.ranks}: {plan.places} of a pipeline, each with {plural(plan.replicas, 'replica')}"
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
        raise UsageError(f"this process is no rank; expected torchrun to start it as one of {expected}")
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if ranks != plan.ranks:
        raise UsageError(f"{ranks} ranks were started; expected {expected}")
    return init_device_mesh(device_type, (plan.places, plan.replicas), mesh_dim_names=("pp", "dp"))


def build(
    plan: PipelinePlan,
    model: nn.Module,
    device: torch.device | str,
    mesh: DeviceMesh,
    loss: Callable[[Any, Any], torch.Tensor],
    inputs: object,
    target: object,
) -> tuple[PlannedSchedule, list[nn.Module]]:
    """This rank's schedule, and the modules of its stages, which are then on the device.

    model: whole, on the CPU. loss: a function of the model's result and the target. inputs, target: of one microbatch.
    The forward pass is traced with these inputs: a tensor, a tuple by position or a dict by name. Raises UsageError and
    InputError for arguments that do not fit the plan.
    """
    _check_model(plan, model)
    _check_mesh(plan, mesh)
    if not callable(loss):
        raise UsageError(f"build: the loss is a {type(loss).__name__}; expected a function of output and target")
    call = as_call(inputs)
    if not PassInputs.of(call).tensors:
        raise UsageError("build: the inputs have no tensor; expected those of one microbatch")
    trainable = TrainableModel(model, moved(call, _CPU), loss)
    of_loss = moved(((target,), {}), _CPU)
    pipeline = Pipeline(type(model).__name__, plan, trainable, of_loss, mesh, torch.device(device))
    return PlannedSchedule(pipeline, call, target), list(pipeline.modules.values())


def _check_mesh(plan: PipelinePlan, mesh: DeviceMesh) -> None:
    """Raises UsageError for a mesh that is not the plan's."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if (sizes.get("pp"), sizes.get("dp")) != (plan.places, plan.replicas):
        found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no names"
        raise UsageError(f"build: a mesh of {found}; expected pp {plan.places} and dp {plan.replicas}, as mesh() has")


def _check_model(plan: PipelinePlan, model: nn.Module) -> None:
    """Raises UsageError for a value that is not a whole model on the CPU."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"build: the model is a {type(model).__name__}; expected a torch.nn.Module")
    held = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in held:
        if tensor.device != _CPU:
            raise UsageError(
                f"build: {name} is on the device {tensor.device}; expected the whole model on the CPU, with its "
                "weights: build moves this rank's stages to their device"
            )
    for name, weight in model.named_parameters():
        found = str(weight.dtype).removeprefix("torch.")
        if plan.weight_type and weight.is_floating_point() and found != plan.weight_type:
            raise UsageError(
                f"build: {name} is of type {found}, and the plan counts on weights in {plan.weight_type}: "
                f"model.to(torch.{plan.weight_type})"
            )
