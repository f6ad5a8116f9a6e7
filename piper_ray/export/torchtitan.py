"""torchtitan's launch: ``torchtitan.json`` says plan and model, ``piper_plan.py`` makes a config of them."""

from __future__ import annotations

from collections.abc import Iterator

from piper_ray.export.files import Export, json_text, rendered
from piper_ray.export.job import Job
from piper_ray.export.torch_pipelining import ONE_STAGE, actions_csv
from piper_ray.export.torchtitan_config import compiles_blocks, shard_degree, titan_document
from piper_ray.model.mode import Recomputation


def export_torchtitan(job: Job) -> Export:
    """The files and how they are used."""
    document = titan_document(job)
    model = job.instance.model
    files = {
        "torchtitan.json": json_text(document),
        "piper_plan.py": rendered("torchtitan_plan.py.jinja", knows_model=model is not None),
    }
    if job.pipeline_ranks > 1 and job.schedule.name not in ONE_STAGE:
        files["schedule.csv"] = actions_csv(job)
    base, data = "PIPER_BASE=torchtitan.models.MODEL.config_registry:CONFIG ", ""
    usage = ""
    if model is not None:
        base, data, usage = "", ' --hf_assets_path "${TOKENIZER:?a folder with the tokenizer}"', _USAGE
    command = f"PYTHONPATH=. {base}{job.torchrun} -m torchtitan.train --module piper_plan --config planned{data}"
    return Export(files, command, (*_notes(job), *_model_notes(job), *job.notes), usage=usage)


_USAGE = """torchtitan's own config of such a model says the data set (c4), the optimizer's figures and the number of
steps: further arguments change them, such as `--training.steps 1000` or, for 0.3, `--dataloader.dataset_path PATH`.
"""


def _model_notes(job: Job) -> Iterator[str]:
    """Of what the workload says of its model."""
    model, software = job.instance.model, job.software
    if model is None:
        yield "the workload does not say which model it is: PIPER_BASE names the config function of the user's own"
        return
    if model.software != _OWN_SOFTWARE:
        named = model.software if software is None else software.name
        yield f"the plan's times are of {named}, not of torchtitan (estimate --software {_OWN_SOFTWARE})"
    if job.context_parallel > 1 and model.context_exchange != job.runtime.context_exchange:
        yield (
            "torchtitan gathers keys and values for groups that share a sequence "
            f"(estimate --context-exchange {job.runtime.context_exchange}); the plan's times count on "
            f"{model.context_exchange}"
        )
    if job.hides_tensor_exchanges and not (job.sequence_parallel and compiles_blocks(job, model)):
        yield (
            "the plan's times count a part of tensor parallelism's exchanges as hidden, which torchtitan hides with "
            "sequence parallelism and compiled blocks alone"
        )
    if job.pipeline_ranks > 1:
        yield "torchtitan's pipelines take a PyTorch newer than 2.13, whose schedules are handed microbatches"
    if job.experts:
        yield "torchtitan balances experts by a bias of the router, without the loss that a config may ask for"
    if model.lora_rank:
        yield (
            "torchtitan keeps the weights that adapters leave as they are in fp32, which takes more memory than the "
            "plan counts on"
        )
    if model.precision == "fp8":
        yield "products of 8 bits take torchao on each node"


_OWN_SOFTWARE = "fsdp"


def _notes(job: Job) -> Iterator[str]:
    """Of sharding and of what sequence parallelism gathers."""
    planned, written = job.optimizer_shards, shard_degree(job) * job.context_parallel
    if written > 1 and planned == 1:
        yield (
            f"torchtitan shards weights over {written} ranks, those that share a sequence or its experts, which takes "
            "less memory and other messages than the plan counts on"
        )
    if written != planned > 1:
        yield (
            f"the plan shares among {planned} ranks, which are no whole groups here: {written} are written, which "
            "takes less memory"
        )
    whole = job.shards_in_groups and written == job.weight_replicas
    if job.pipeline_ranks == 1 and job.microbatches > 1 and job.weight_replicas > 1 and not whole:
        yield (
            "on one pipeline rank torchtitan gathers weights and reduces gradients for every microbatch; the plan's "
            "times count what replicas tell each other once a batch (plan --runtime torchtitan prices it)"
        )
    if job.pipeline_ranks > 1 and job.shards_in_groups:
        yield (
            "torchtitan's pipelines sum whole gradients up to the last microbatch, which takes more memory than the "
            "plan counts on"
        )
    if job.sequence_parallel and not job.setting.gathered and job.recomputation == Recomputation.NONE:
        yield (
            "torchtitan keeps what sequence parallelism gathers for the backward pass; the plan gathers it again, "
            "which takes less memory and more messages (estimate --keep-gathered has TMPCs that keep it)"
        )
