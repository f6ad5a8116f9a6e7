"""Asynchronous 1F1B in one process: microbatch after microbatch through the whole model, each stage's weights set to
the version that it is to use, with all versions kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from piper_ray.model.schedule import ScheduleName
from piper_ray.run.data import Data
from piper_ray.run.job import Job, pass_stream
from piper_ray.workloads.measure.factory import find_factory

optimizer = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
"""A step long enough for another version to give another loss. AdamW would make much of gradients of rounding alone,
such as those of a bias of keys."""


def updates_before(job: Job, stage: int, k: int) -> int:
    """Updates under PipeDream that a stage has made when it begins the forward pass of k: its replica does as many
    forward passes as it keeps in flight, and then a backward pass before each."""
    own = k // job.degrees[stage]
    count = 0
    for number in range(own + 1):
        count += number >= job.in_flight[stage]
    return count


def version_of(job: Job, stage: int, k: int) -> int:
    """By the papers' words."""
    if job.schedule.name is ScheduleName.TWO_BW:
        batch = k // job.microbatches
        return batch - 1 if batch > 1 else 0
    if not job.vertical_sync:
        return updates_before(job, stage, k)
    seen = updates_before(job, 0, k) * job.degrees[0]  # microbatches in the input stage's newest version
    return max(version for version in range(seen + 1) if version * job.degrees[stage] <= seen)


def replayed(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each microbatch, and the newest weights."""
    factory = find_factory(job.model, dict(job.arguments))
    model = factory.build(job.microbatch, torch.device("cpu"), ())
    data = Data(factory, model, (), job.microbatch)
    named = dict(model.module.named_parameters())
    of_stage = [
        [name for name in named if any(name.startswith(f"{layer.path}.") for layer in layers)] for layers in job.stages
    ]
    newest = [nn.ParameterDict({_key(name): _copy(named[name]) for name in names}) for names in of_stage]
    optimizers = [optimizer(list(one.parameters())) for one in newest]
    versions = [[_values(one)] for one in newest]
    sums: list[dict[str, torch.Tensor]] = [{} for _ in newest]
    losses = []
    for batch in range(pass_stream(job).batches):
        for place, microbatch in enumerate(data.batch(job.microbatches)):
            k = batch * job.microbatches + place
            for stage, names in enumerate(of_stage):
                for name in names:
                    named[name].data.copy_(versions[stage][version_of(job, stage, k)][_key(name)])
            args, kwargs = microbatch.inputs
            output: Any = model.module(*args, **kwargs)
            loss: Any = output.sum() if model.loss is None else model.loss(output, *args, **kwargs)
            loss.backward()
            losses.append(loss.item())
            for stage, names in enumerate(of_stage):
                for name in names:
                    gradient, named[name].grad = named[name].grad, None
                    if gradient is not None:
                        sums[stage][_key(name)] = sums[stage].get(_key(name), 0.0) + gradient
                period = job.microbatches if job.schedule.name is ScheduleName.TWO_BW else job.degrees[stage]
                if (k + 1) % period == 0:
                    for key, parameter in newest[stage].items():
                        parameter.grad = sums[stage][key] / period if key in sums[stage] else None
                    optimizers[stage].step()
                    versions[stage].append(_values(newest[stage]))
                    sums[stage] = {}
    weights = {name: versions[stage][-1][_key(name)] for stage, names in enumerate(of_stage) for name in names}
    return losses, weights


def _key(name: str) -> str:
    return name.replace(".", "/")


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _values(parameters: nn.ParameterDict) -> dict[str, torch.Tensor]:
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}
