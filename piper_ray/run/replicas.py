"""Stages as replicas: torch's wrappers where its hooks are called, and sums by hand where the backward pass is split.

A split backward pass computes gradients of parameters without autograd's accumulation, so DistributedDataParallel
never hears of them. Such stages stay as they are: replicas begin alike, and their gradients are summed after a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from piper_ray.run.borders import Border
from piper_ray.run.job import Replicas
from piper_ray.run.pipeline_plan import PipelinePlan


def sums_by_hand(plan: PipelinePlan) -> bool:
    """Whether ``mean_gradients`` has to follow each step."""
    return plan.splits and plan.replicas > 1 and plan.sharing is Replicas.DDP


def shared(module: nn.Module, plan: PipelinePlan, mesh: DeviceMesh, border: Border) -> nn.Module:
    """The module as one of d replicas."""
    if plan.replicas == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    if plan.sharing is Replicas.FULLY_SHARD:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        return module
    group = mesh.get_group("dp")
    if not sums_by_hand(plan):
        return DistributedDataParallel(module, process_group=group, find_unused_parameters=border.idle)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:  # as the wrapper does
            sent = tensor.contiguous()
            dist.broadcast(sent, group=group, group_src=0)
            tensor.copy_(sent)
    return module


def mean_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Over the group. What no replica has a gradient for has none afterwards; a replica's missing one counts as zero:
    which experts of a mixture got tokens differs between replicas."""
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
