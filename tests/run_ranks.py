"""Real pipelines compared with the unpiped model: each rank is a process that runs a batch by every job.

What ``results_of_ranks`` runs.

JOBS.json: {"rendezvous": path, "results": folder, "jobs": path of {name: Job}, pickled}. A job of fewer ranks than
there are runs on the first ones. Writes RESULTS/RANK.json: for each of its jobs the mean loss of its replica (null
where the last stage is not), that of the unpiped model, and the largest difference of a gradient, relative to the
largest gradient.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from piper_ray.run.data import Data, PassInputs
from piper_ray.run.job import Job
from piper_ray.run.rank import RankTraining
from piper_ray.workloads.measure.factory import TrainableModel, find_factory
from tests.run_support import loopback

CPU = torch.device("cpu")


def main(job_file: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    read: dict[str, Any] = json.loads(Path(job_file).read_text())
    jobs: dict[str, Job] = pickle.loads(Path(read["jobs"]).read_bytes())
    dist.init_process_group(
        "gloo",
        init_method=Path(read["rendezvous"]).as_uri(),
        rank=rank,
        world_size=max(job.ranks for job in jobs.values()),
    )
    found = {}
    for name, job in jobs.items():
        ranks = torch.arange(job.ranks).view(job.places, job.replicas)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp"))
        if rank < job.ranks:
            found[name] = compared(job, mesh)
    dist.barrier()
    dist.destroy_process_group()
    Path(read["results"], f"{rank}.json").write_text(json.dumps(found))


def compared(job: Job, mesh: DeviceMesh) -> dict[str, object]:
    training = RankTraining(job, mesh, CPU)
    pipeline = training.pipeline
    pipeline.recorder.begin()
    losses = training.run(training.batch())
    loss, gradients = reference(job)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    difference, compared_parameters = 0.0, 0
    for module in pipeline.modules.values():
        for name, parameter in module.named_parameters():
            expected = gradients[_own_name(name)]
            compared_parameters += 1
            if expected is None:
                difference = max(difference, 0.0 if parameter.grad is None else float(parameter.grad.abs().max()))
                continue
            assert parameter.grad is not None, name
            whole = getattr(parameter.grad, "full_tensor", lambda gradient=parameter.grad: gradient)()
            difference = max(difference, float((whole - expected).abs().max()))
    kinds = sorted({one.what for one in pipeline.recorder.stretches()})
    mean = sum(one.item() for one in losses) / len(losses) if losses else None
    return {
        "loss": mean,
        "expected": loss,
        "difference": difference / largest,
        "parameters": compared_parameters,
        "kinds": kinds,
    }


def reference(job: Job) -> tuple[float, dict[str, torch.Tensor | None]]:
    """Loss and gradients of the whole batch, on one process, from the factory alone."""
    factory = find_factory(job.model, dict(job.arguments))
    model = factory.build(job.microbatch, CPU, ())
    total = 0.0
    for microbatch in Data(factory, model, (), job.microbatch).batch(job.microbatches):
        loss = _loss(model, microbatch) / job.microbatches
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.module.named_parameters()}


def _loss(model: TrainableModel, microbatch: PassInputs) -> torch.Tensor:
    args, kwargs = microbatch.inputs
    output: Any = model.module(*args, **kwargs)
    if model.loss is None:
        result: torch.Tensor = output.sum()
        return result
    value: Any = model.loss(output, *args, **kwargs)
    return value


def _own_name(name: str) -> str:
    """Of a parameter in the user's model: a stage's begins with its layer's number, below what wraps it."""
    parts = name.removeprefix("module.").split(".")
    assert parts[0] == "layers"
    return ".".join(parts[2:])
