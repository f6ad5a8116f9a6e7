"""A rank's part of a job: its pipeline, and the microbatches that the job's factory gives."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from piper_ray.run.data import Data, Microbatch
from piper_ray.run.job import Job
from piper_ray.run.pipeline import Pipeline
from piper_ray.run.pipeline_plan import PipelinePlan
from piper_ray.workloads.measure.factory import find_factory
from piper_ray.workloads.measure.inputs import parse_input

_CPU = torch.device("cpu")


class Training:
    """Its data are the same on every rank. Raises InputError and UsageError for a model that the plan does not fit."""

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
