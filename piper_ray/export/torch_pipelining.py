"""torch.distributed.pipelining: stages by module path, the schedule's list of passes, and a script that builds both."""

from __future__ import annotations

from piper_ray.export.actions import actions_csv
from piper_ray.export.files import Export, json_text
from piper_ray.export.job import Job
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable
from piper_ray.model.settings import Recomputation

_SCRIPT = '''"""The plan for torch.distributed.pipelining: build(model, device, mesh, loss) gives the schedule.

The mesh has the dimensions pp and dp, in that order: ranks of one stage are neighbours. The model's modules run one
after the other, each on the output of the one before it.
"""

import json
from pathlib import Path

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

FOLDER = Path(__file__).resolve().parent
PLAN = json.loads((FOLDER / "stages.json").read_text())


def mesh(device_type):
    """(pp, dp), for a world of as many ranks as the plan has."""
    shape = (PLAN["pipeline_ranks"], PLAN["data_parallel_degree"])
    return torch.distributed.init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp"))


def build(model, device, mesh, loss):
    """The schedule of this rank's stages, and their modules. loss: of the last stage's output and the target."""
    group = mesh["pp"].get_group()
    rank, stages = mesh["pp"].get_local_rank(), []
    for number, stage in enumerate(PLAN["stages"]):
        if stage["pipeline_rank"] != rank:
            continue
        modules = []
        for path, recomputed in zip(stage["modules"], stage["recomputed"]):
            module = model.get_submodule(path)
            modules.append(checkpoint_wrapper(module) if recomputed else module)
        part = torch.nn.Sequential(*modules).to(device)
        if mesh["dp"].size() > 1:
            part = torch.nn.parallel.DistributedDataParallel(part, process_group=mesh["dp"].get_group())
        stages.append(PipelineStage(part, number, len(PLAN["stages"]), device, group=group))
    schedule = _PipelineScheduleRuntime(stages, PLAN["microbatches"], loss_fn=loss)
    schedule._load_csv(str(FOLDER / "schedule.csv"))
    return schedule, [stage.submod for stage in stages]
'''


def stage_documents(job: Job) -> list[dict[str, object]]:
    """Each stage's module paths, which of them are recomputed, and its rank. Raises UsageError where a path lacks."""
    rank_of = {
        stage: rank
        for rank in range(job.pipeline_ranks)
        for stage in job.schedule.stages_of_rank(rank, job.pipeline_ranks)
    }
    documents: list[dict[str, object]] = []
    for number, (stage, recomputed) in enumerate(zip(job.plan.stages, job.recomputed_layers, strict=True)):
        layers = job.in_order(stage.layers)
        for layer in layers:
            found = job.instance.layer_by_id[layer]
            if not found.path:
                raise UsageError(
                    f'layer {layer} ("{printable(found.name)}") has no path: torch cuts a model by the names of its '
                    "modules, which workloads of piper-ray profile and estimate have"
                )
        documents.append(
            {
                "stage": number,
                "pipeline_rank": rank_of[number],
                "modules": [job.instance.layer_by_id[layer].path for layer in layers],
                "recomputed": [recomputed[layer] is Recomputation.FULL for layer in layers],
            }
        )
    return documents


def export_torch(job: Job) -> Export:
    """The files and how they are used."""
    document = {
        "pipeline_ranks": job.pipeline_ranks,
        "data_parallel_degree": job.data_parallel_degree,
        "optimizer_shards": job.setting.optimizer_shards,
        "microbatches": job.microbatches,
        "microbatch_samples": job.microbatch_samples,
        "global_batch_samples": job.global_batch_samples,
        **job.schedule.to_dict(),
        "stages": stage_documents(job),
    }
    files = {"stages.json": json_text(document), "schedule.csv": actions_csv(job), "pipeline.py": _SCRIPT}
    command = f"{job.torchrun} YOUR-SCRIPT.py  # which calls pipeline.build(model, device, pipeline.mesh('cuda'), loss)"
    chain = (
        "torch runs a chain, each module on the output of the one before it: a model whose modules take more needs a "
        "forward of its own for each stage"
    )
    notes = [chain]
    if job.setting.optimizer_shards > 1:
        notes.append(
            "the optimizer's state is shared out in the plan; pipeline.py wraps stages in DistributedDataParallel: use "
            "ZeroRedundancyOptimizer over the mesh's dp, or fully_shard"
        )
    if job.tied_over_ranks:
        notes.append(
            f"{job.tied_text}: torch trains a copy on each; start them alike and add their gradients up after each "
            "step's passes, over a group of these ranks, or untie them"
        )
    return Export(files, command, (*notes, *job.sharing_notes, *job.notes))
