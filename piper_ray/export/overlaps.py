"""What a plan's times count as hidden, which launch files are to turn on."""

from __future__ import annotations

from piper_ray.export.job import Job
from piper_ray.workloads.estimate.software import Software, load_software


def software_of(job: Job) -> Software | None:
    """What the workload's times are of; None where it does not say it, or not of a table of ours."""
    return None if job.instance.model is None else load_software().get(job.instance.model.software)


def hides_tensor_exchanges(job: Job) -> bool:
    """Whether the plan's times count a share of tensor parallelism's exchanges as hidden."""
    software = software_of(job)
    return software is not None and job.tensor_parallel_degree > 1 and software.forward_overlap > 0.0
