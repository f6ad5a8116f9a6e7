"""torchtitan's configuration: ``torchtitan.json`` says what the plan decides, ``piper_plan.py`` sets it in a config."""

from __future__ import annotations

from piper_ray.export.actions import ONE_STAGE, TORCH_NAMES, actions_csv
from piper_ray.export.files import Export, json_text
from piper_ray.export.job import Job
from piper_ray.export.torchtitan_modules import module_names
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import divisors
from piper_ray.model.recomputation import Recomputation

_CONFIG = '''"""torchtitan's config of the plan: --module piper_plan --config planned, with this folder on PYTHONPATH.

PIPER_BASE names the model's own config function, such as torchtitan.models.llama3.config_registry:llama3_70b.
"""

import importlib
import json
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def apply(config):
    """Sets in a torchtitan config what the plan decides; returns it. Raises ValueError for a model of other depth."""
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    decided = json.loads((FOLDER / "torchtitan.json").read_text())
    planned, layers = decided["layers"], len(config.model_spec.model.layers)
    if layers != planned:  # of which torchtitan would train those that both have
        raise ValueError(f"the plan is of {planned} layers, the config of {layers}")
    for section in ("parallelism", "training"):
        for name, value in decided[section].items():
            if name == "pipeline_parallel_schedule_csv" and value:
                value = str(FOLDER / value)
            setattr(getattr(config, section), name, value)
    policies = {"none": lambda: None, "selective": SelectiveAC.Config, "full": FullAC.Config}
    config.activation_checkpoint = policies[decided["activation_checkpoint"]]()
    return config


def planned():
    """The model's own config with the plan."""
    module, _, function = os.environ["PIPER_BASE"].partition(":")
    return apply(getattr(importlib.import_module(module), function)())
'''


def titan_document(job: Job) -> dict[str, object]:
    """The fields of torchtitan 0.3's config that the plan decides. Raises UsageError for what it has no field for."""
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
    document: dict[str, object] = {
        "layers": job.pieces.blocks,
        "parallelism": parallelism,
        "training": training,
        "activation_checkpoint": "selective" if job.recomputation.selective else job.recomputation.id,
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


def export_torchtitan(job: Job) -> Export:
    """The files and how they are used."""
    document = titan_document(job)
    files = {"torchtitan.json": json_text(document), "piper_plan.py": _CONFIG}
    if job.pipeline_ranks > 1 and job.schedule.name not in ONE_STAGE:
        files["schedule.csv"] = actions_csv(job)
    command = (
        f"PYTHONPATH=. PIPER_BASE=torchtitan.models.MODEL.config_registry:CONFIG {job.torchrun} -m torchtitan.train "
        "--module piper_plan --config planned"
    )
    return Export(files, command, (*_notes(job), *job.notes))


def _notes(job: Job) -> list[str]:
    found = []
    planned, written = job.setting.optimizer_shards, _shard_degree(job) * job.setting.context
    if written > 1 and planned == 1:
        found.append(
            f"torchtitan shards weights over {written} ranks, those that share a sequence or its experts, which takes "
            "less memory and other messages than the plan counts on"
        )
    elif planned > 1 and not job.shards_in_groups:
        found.append(
            "the plan shards the optimizer's state alone (ZeRO-1); torchtitan's data_parallel_shard_degree shards "
            "weights and gradients too, which takes less memory and other messages"
        )
    if written != planned > 1:
        found.append(
            f"the plan shares among {planned} ranks, which are no whole groups here: {written} are written, which "
            "takes less memory"
        )
    if job.setting.sequence_parallel and not job.setting.gathered and job.recomputation == Recomputation.NONE:
        found.append(
            "torchtitan keeps what sequence parallelism gathers for the backward pass; the plan gathers it again, "
            "which takes less memory and more messages (estimate --keep-gathered has TMPCs that keep it)"
        )
    return found
