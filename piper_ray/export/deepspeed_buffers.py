"""What DeepSpeed's PipelineEngine holds of stages' inputs and outputs beyond what a plan's figures count.

Of each microbatch in flight it keeps the tensor that came in, whose copy the first layer reads, and the result until
the backward pass (runtime/pipe/engine.py, _exec_forward_pass: pipe_buffers "inputs" and "outputs").
"""

from __future__ import annotations

from collections.abc import Iterator

from piper_ray.export.job import Job
from piper_ray.model.figures import bytes_text


def buffer_bytes(job: Job) -> tuple[float, ...]:
    """On a device of each pipeline rank."""
    p = job.pipeline_ranks
    borders = [0.0, *(_border_bytes(job, stage) for stage in range(1, p)), 0.0]
    return tuple(min(p - stage, job.microbatches) * (borders[stage] + borders[stage + 1]) for stage in range(p))


def buffer_notes(job: Job) -> Iterator[str]:
    """One where there is a border."""
    if job.pipeline_ranks > 1:
        most = bytes_text(max(buffer_bytes(job)))
        yield (
            "DeepSpeed keeps a stage's input and result for each microbatch in flight beside what its layers keep: up "
            f"to {most} on a rank beyond the plan's figures, and the last layer's result for two microbatches"
        )


def _border_bytes(job: Job, stage: int) -> float:
    """Of the tensor that comes into a stage, whole, for a microbatch: what one device without others receives."""
    first = job.in_order(job.plan.stages[stage].layers)[0]
    row = job.instance.layer_by_id[first].tmpcs
    plain = row.get(1, row[job.replica_devices])[0]
    return sum(
        edge.communication_bytes + plain.forward_sync_bytes.get(edge.source, 0.0)
        for edge in job.instance.edges
        if edge.target == first
    )
