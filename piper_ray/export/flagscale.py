"""FlagScale's system section: meshes, layers of each stage, and recomputation of each stage; and what starts it.

Read in the source of FlagScale 1.0, whose Megatron-LM is 0.15 (third_party/Megatron-LM): all names that are written are
those of its arguments (flagscale/train/arguments.py, flagscale/backends/Megatron-LM, flagscale/runner).
"""

from __future__ import annotations

from piper_ray.export.files import Export, yaml_text
from piper_ray.export.job import Job
from piper_ray.export.megatron import CONNECTIONS, asks_for_connections
from piper_ray.export.megatron_flags import Settings
from piper_ray.export.megatron_model import model_settings, require_megatron_model
from piper_ray.export.megatron_settings import context_settings, overlap_settings, precision_settings
from piper_ray.model.errors import UsageError


def export_flagscale(job: Job) -> Export:
    """``system.yaml`` and ``experiment.yaml``, to be merged into the task's own.

    Raises UsageError for what FlagScale has no setting for.
    """
    if job.pieces.predictors:
        raise UsageError(
            "FlagScale's hetero_pipeline_layer_split counts decoder layers alone, and this model predicts further "
            "tokens (one whose config has num_nextn_predict_layers = 0 does not)"
        )
    counts = job.first_recomputed
    if counts is None:
        raise UsageError(
            "FlagScale recomputes the first layers of each stage in full, or none; this plan does otherwise"
        )
    d, t, p = job.data_parallel_degree, job.tensor_parallel_degree, job.pipeline_ranks
    context = job.setting.context
    split = [sum(map(job.pieces.is_block, stage)) for stage in job.pieces_of_stages]
    hetero: dict[str, object] = {
        "enable_hetero": True,
        "hetero_pipeline_layer_split": split,
        "hetero_process_meshes": [t, context, job.expert_ranks or 1, d, p],
        "hetero_device_types": [_DEVICE],
        "hetero_current_device_type": _DEVICE,
        "standalone_embedding_stage": False,
    }
    system: dict[str, object] = {
        "tensor_model_parallel_size": t,
        "pipeline_model_parallel_size": p,
        "context_parallel_size": context,
        "sequence_parallel": job.setting.sequence_parallel,
        "use_distributed_optimizer": job.setting.optimizer_shards > 1,
        **context_settings(job),
        **overlap_settings(job),
        **_precision(job),
        "hetero": hetero,
    }
    if job.expert_ranks is not None:
        system["expert_model_parallel_size"] = job.expert_ranks
        system["expert_tensor_parallel_size"] = job.setting.expert_tensor
        hetero["expert_tensor_parallel_size_per_process_mesh"] = [job.setting.expert_tensor]
    if any(counts):
        m = job.microbatches
        system["recompute"] = {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": max(counts),
            "recompute_granularity_per_stage_micro_batch": [[1, m, int(count > 0)] for count in counts],
            "recompute_method_per_stage_micro_batch": [[1, m, 1] for _ in counts],
            "recompute_num_layers_per_stage_micro_batch": [[1, m, count] for count in counts],
        }
    model: dict[str, object] = {
        "num_layers": job.pieces.blocks,
        **_model(job),
        "micro_batch_size": job.microbatch_samples,
        "global_batch_size": job.global_batch_samples,
    }
    if job.instance.batch.tokens_per_sample is not None:
        model["seq_length"] = job.instance.batch.tokens_per_sample
    notes = [f"hetero_device_types: {_DEVICE} stands for the name of your devices"]
    if job.instance.model is None:
        notes.append("the workload does not say which model it is: its shape and its precision are the task's own")
    if job.tied_over_ranks:
        notes.append(
            f"{job.tied_text}: FlagScale sums their gradients over these where untie_embeddings_and_output_weights of "
            "the task's model is false"
        )
    if 0 in split:
        stages = ", ".join(str(number) for number, count in enumerate(split, start=1) if count == 0)
        notes.append(f"stage {stages} has no transformer layer")
    if job.nodes > 1:
        notes.append(
            f"HOSTFILE names a file with a line for each of {job.nodes} nodes, ADDRESS slots={job.processes_per_node}: "
            "without one FlagScale starts this node alone"
        )
    files = {
        "system.yaml": yaml_text({"system": system, "model": model}),
        "experiment.yaml": yaml_text({"experiment": _experiment(job)}),
    }
    command = (
        f"{'HOSTFILE=... ' if job.nodes > 1 else ''}flagscale train ... with system.yaml's sections merged into the "
        "task's train configuration, and experiment.yaml's into the one above it"
    )
    return Export(files, command, (*notes, *job.sharing_notes, *job.notes))


_DEVICE = "GPU"


def _experiment(job: Job) -> dict[str, object]:
    """How many processes there are on which nodes. OmegaConf refuses to go on without HOSTFILE."""
    runner: dict[str, object] = {
        "backend": "torchrun", "nnodes": job.nodes, "nproc_per_node": job.processes_per_node,
    }  # fmt: skip
    if job.nodes > 1:
        runner["hostfile"] = "${oc.env:HOSTFILE}"
    if asks_for_connections(job):
        return {"runner": runner, "envs": {CONNECTIONS: 1}}
    return {"runner": runner}


def _model(job: Job) -> Settings:
    """The model's arguments, which FlagScale takes by Megatron's names; empty where nobody knows the model."""
    model = job.instance.model
    if model is None:
        return {}
    if model.lora_rank:
        raise UsageError(
            "the export for FlagScale writes no adapters (LoRA), and this plan has some; Megatron-Bridge's does "
            "(--to megatron-bridge)"
        )
    settings = model_settings(require_megatron_model(model))
    if settings.get("moe_shared_expert_gate"):
        raise UsageError("Megatron in FlagScale (0.15) has no gate of shared experts, and this model has one")
    return settings


def _precision(job: Job) -> Settings:
    return {} if job.instance.model is None else precision_settings(job, job.instance.model)
