"""torchtitan's launch: ``torchtitan.json`` says plan and model, ``piper_plan.py`` makes a config of them."""

from __future__ import annotations

from collections.abc import Iterator

from piper_ray.export.actions import ONE_STAGE, TORCH_NAMES, actions_csv
from piper_ray.export.files import Export, json_text
from piper_ray.export.job import Job
from piper_ray.export.overlaps import hides_tensor_exchanges, software_of
from piper_ray.export.torchtitan_model import model_fields, require_titan_model
from piper_ray.export.torchtitan_modules import module_names
from piper_ray.export.torchtitan_plan import plan_module
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import divisors
from piper_ray.model.recomputation import Recomputation
from piper_ray.model.trained_model import TrainedModel


def titan_document(job: Job) -> dict[str, object]:
    """The fields of torchtitan 0.3's config that the plan decides, and its model if the workload says it.

    Raises UsageError for what torchtitan has no field for, and for models that it cannot build.
    """
    if job.recomputation is None:
        raise UsageError("torchtitan has one activation-checkpoint setting for all layers; in this plan they differ")
    _require_experts(job)
    d, p, context = job.data_parallel_degree, job.pipeline_ranks, job.setting.context
    shards = _shard_degree(job)
    samples = job.microbatch_samples
    parallelism: dict[str, object] = {
        "pipeline_parallel_degree": p,
        "data_parallel_replicate_degree": d // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": job.tensor_parallel_degree,
        "enable_sequence_parallel": job.setting.sequence_parallel,
        "context_parallel_degree": context,
    }
    if shards * context > 1:
        parallelism["fsdp_reshard_after_forward"] = "always" if job.shards_in_groups else "never"
    if job.expert_ranks is not None:
        parallelism["expert_parallel_degree"] = job.expert_ranks
    if p > 1:
        parallelism |= {
            "pipeline_parallel_schedule": TORCH_NAMES[job.schedule.name],
            "pipeline_parallel_microbatch_size": samples,
            "module_fqns_per_model_part": module_names(job.pieces, job.pieces_of_stages),
        }
        if job.schedule.name not in ONE_STAGE:
            parallelism["pipeline_parallel_schedule_csv"] = "schedule.csv"
    training: dict[str, object] = {
        "local_batch_size": samples * (job.microbatches if p > 1 else 1),
        "global_batch_size": job.global_batch_samples,
    }
    if job.instance.batch.tokens_per_sample is not None:
        training["seq_len"] = job.instance.batch.tokens_per_sample
    if p > 1 or (job.expert_ranks or 1) > 1:
        training["disable_cuda_graphs"] = True  # which are on by default, and refused beside these
    if (model := job.instance.model) is not None:
        tokens = job.instance.batch.tokens_per_sample
        further: dict[str, object] = {
            "compile": _compile(job, model),
            "model": model_fields(require_titan_model(model), model, tokens),
        }
        training |= {
            "disable_cuda_graphs": True,  # whose memory the plan does not count
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        }
    else:
        further = {}
    document: dict[str, object] = {
        "layers": job.pieces.blocks,
        "parallelism": parallelism,
        "training": training,
        "activation_checkpoint": "selective" if job.recomputation.selective else job.recomputation.id,
        **further,
    }
    return document if job.schedule.group is None else document | {"group": job.schedule.group}


def _shard_degree(job: Job) -> int:
    """data_parallel_shard_degree, the least that divides d and holds as many shards as the plan and as many ranks as
    its experts need: torchtitan spreads experts over these replicas, cp and t."""
    d, context = job.data_parallel_degree, job.setting.context
    wanted = 1 if job.setting.optimizer_shards == 1 else -(-job.setting.optimizer_shards // context)
    ranks = job.expert_ranks or 1
    within = context * job.tensor_parallel_degree
    return next((n for n in divisors(d) if n >= wanted and n * within % ranks == 0), d)


def _require_experts(job: Job) -> None:
    """Raises UsageError where torchtitan cannot lay experts out so."""
    if job.setting.expert_tensor > 1:
        raise UsageError("torchtitan has no tensor parallelism of experts apart from the others'; this plan has it")


def _compile(job: Job, model: TrainedModel) -> dict[str, object]:
    """torch.compile as torchtitan's own configs use it: of blocks and loss, but for experts in bf16 of the loss alone.

    Exchanges of tensor parallelism run beside products where the plan counts on it, which takes compiled blocks.
    """
    blocks = _compiles_blocks(job, model)
    hidden = blocks and hides_tensor_exchanges(job) and job.setting.sequence_parallel
    return {
        "enable": True,
        "components": ["model", "loss"] if blocks else ["loss"],
        "enable_async_tensor_parallel": hidden,
    }


def _compiles_blocks(job: Job, model: TrainedModel) -> bool:
    return not job.experts or model.precision == "fp8"


def export_torchtitan(job: Job) -> Export:
    """The files and how they are used."""
    document = titan_document(job)
    model = job.instance.model
    files = {"torchtitan.json": json_text(document), "piper_plan.py": plan_module(model is not None)}
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
    model, software = job.instance.model, software_of(job)
    if model is None:
        yield "the workload does not say which model it is: PIPER_BASE names the config function of the user's own"
        return
    if model.software != _OWN_SOFTWARE:
        named = model.software if software is None else software.name
        yield f"the plan's times are of {named}, not of torchtitan (estimate --software {_OWN_SOFTWARE})"
    if job.setting.context > 1 and model.context_exchange != job.runtime.context_exchange:
        yield (
            "torchtitan gathers keys and values for groups that share a sequence "
            f"(estimate --context-exchange {job.runtime.context_exchange}); the plan's times count on "
            f"{model.context_exchange}"
        )
    if hides_tensor_exchanges(job) and not (job.setting.sequence_parallel and _compiles_blocks(job, model)):
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
    planned, written = job.setting.optimizer_shards, _shard_degree(job) * job.setting.context
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
    if job.setting.sequence_parallel and not job.setting.gathered and job.recomputation == Recomputation.NONE:
        yield (
            "torchtitan keeps what sequence parallelism gathers for the backward pass; the plan gathers it again, "
            "which takes less memory and more messages (estimate --keep-gathered has TMPCs that keep it)"
        )
