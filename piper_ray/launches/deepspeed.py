"""DeepSpeed's part of a launch in Megatron's terms: the content of its own file, and its names of settings."""

from __future__ import annotations

import json
from collections.abc import Mapping

from piper_ray.launches.launch import Dialect, Launch, Source, after_unseen, causes, readable, text_beside
from piper_ray.model.errors import UsageError

_RENAMED = {
    "moe_expert_parallel_size": "expert_model_parallel_size",
    "num_key_value_heads": "num_query_groups",
    "ds_sequence_parallel_size": "context_parallel_size",
    "topk": "moe_router_topk",
    "pipe_parallel_size": "pipeline_model_parallel_size",
    "model_parallel_size": "tensor_model_parallel_size",
    "num_kv_heads": "num_query_groups",
    "moe_num_experts": "num_experts",
    "moe_top_k": "moe_router_topk",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_checkpointing": "checkpoint_activations",
}
"""Names of Megatron-DeepSpeed, of GPT-NeoX and of Hugging Face's trainer."""

_OF_A_BATCH = {"train_batch_size": "global_batch_size", "train_micro_batch_size_per_gpu": "micro_batch_size"}
_STAGES = 3


def with_deepspeed_config(
    options: Mapping[str, object], files: Mapping[str, str], source: Source, ranks: int | None
) -> Launch:
    """The launch with the content of the file of ``--deepspeed_config`` in addition to its options.

    files: written by the script, by name. Raises UsageError for a stage of ZeRO that is not possible.
    """
    found = {_RENAMED.get(name, name): value for name, value in options.items()}
    notes: list[str] = []
    name = found.pop("deepspeed_config", None)
    document = _document(str(name), files, source) if name is not None else {}
    if name is not None and document is None:
        notes.append(f"{readable(str(name))} is not there: what DeepSpeed's own file sets is not known")
    document = document or {}
    zero = _table(document, "zero_optimization")
    of_file = zero.get("stage")
    stage = of_file if of_file is not None else found.get("zero_stage", 0)
    said = found.pop("zero_stage", None)
    if said is not None and of_file is not None and str(said) != str(of_file):
        notes.append(f"--zero-stage {said} differs from stage {of_file} in DeepSpeed's file, which counts")
    if causes(stage) or not str(stage).isdigit() or int(str(stage)) > _STAGES:
        raise UsageError(f"zero stage {readable(str(stage))}: expected 0, 1, 2 or 3")
    _sharing(int(str(stage)), found, zero, notes)
    for theirs, ours in _OF_A_BATCH.items():
        if isinstance(document.get(theirs), int):
            found.setdefault(ours, document[theirs])
    _rest(document, found)
    _accumulation(found, notes)
    is_pipelined = not found.get("no_pipeline_parallel") and found.get("pipeline_model_parallel_size") not in (
        None,
        0,
        "0",
    )
    if str(stage) == "0" and is_pipelined and _table(document, "bf16").get("enabled") is True:
        found["use_distributed_optimizer"] = True
        notes.append("DeepSpeed's pipelines share the optimizer's state in bf16 among replicas at stage 0, too")
    if str(found.get("pipeline_model_parallel_size")) == "0":  # GPT-NeoX: no pipeline
        found["pipeline_model_parallel_size"] = 1
    if not found.keys() & {"tensor_model_parallel_size", "pipeline_model_parallel_size"}:
        notes.append("layers are not divided, as nothing but DeepSpeed's own settings says how")
    if found.pop("no_pipeline_parallel", None) and str(found.get("pipeline_model_parallel_size", 1)) != "1":
        raise UsageError("--no-pipeline-parallel contradicts --pipeline-model-parallel-size")
    found = with_older_names(found)
    if found.get("recompute_granularity") == "full":
        found.setdefault("recompute_method", "uniform")
        found.setdefault("recompute_num_layers", "1")
    if str(found.get("context_parallel_size", 1)) != "1":
        notes.append("--ds-sequence-parallel-size is read as context parallelism that exchanges heads")
        found.setdefault("cp_comm_type", "a2a")
    for name in ("deepspeed", "use_pin_memory", "deepspeed_mpi"):
        found.pop(name, None)
    model = found.pop("model_name_or_path", None)
    return Launch(Dialect.DEEPSPEED, found, ranks, None if model is None else readable(str(model)), tuple(notes))


def _rest(document: Mapping[str, object], found: dict[str, object]) -> None:
    """What the file says of other things than sharing and the batch becomes options: tables by whether they are on."""
    settings = {**document, **_table(document, "activation_checkpointing")}
    optimizer = str(_table(document, "optimizer").get("type", "adam")).lower()
    for name in ("zero_optimization", "activation_checkpointing", "optimizer", *_OF_A_BATCH):
        settings.pop(name, None)
    for name, value in settings.items():
        found.setdefault(_RENAMED.get(name, name), value.get("enabled", True) if isinstance(value, Mapping) else value)
    if not optimizer.startswith("adam"):
        found[f"optimizer_{optimizer}"] = True


def _table(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    table = document.get(name)
    return table if isinstance(table, Mapping) else {}


def _accumulation(found: dict[str, object], notes: list[str]) -> None:
    """A sentence where samples of a batch or of a microbatch follow from a number of replicas that is not said."""
    steps = str(found.pop("gradient_accumulation_steps", ""))
    missing = [name for name in _OF_A_BATCH.values() if name not in found]
    if steps.isdigit() and missing:
        notes.append(
            f"--gradient-accumulation-steps {steps} is of each replica: {' and '.join(missing)} is not compared with "
            "the workload"
        )


def _document(name: str, files: Mapping[str, str], source: Source) -> Mapping[str, object] | None:
    text = files.get(name)
    if text is None:
        _, text = text_beside(after_unseen(name), source.path)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, Mapping) else None


def _sharing(stage: int, found: dict[str, object], zero: Mapping[str, object], notes: list[str]) -> None:
    if stage >= 1:
        found["use_distributed_optimizer"] = True
    if stage == 2:
        notes.append("ZeRO 2 shares gradients, too: the plan shares the optimizer's state alone, and takes more memory")
    if stage == _STAGES:
        found["use_megatron_fsdp"] = True
        found["data_parallel_sharding_strategy"] = "optim_grads_params"
    for name in ("offload_optimizer", "offload_param"):
        told = zero.get(name)
        if isinstance(told, Mapping) and told.get("device", "none") != "none":
            found[f"{name}_to_{told['device']}"] = True
    for name in (
        "cpu_offload",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_gradients",
        "zenflow",
    ):
        if (value := zero.get(name)) is True or value not in (None, False, 1):
            found[name] = zero[name]


def with_older_names(options: Mapping[str, object]) -> dict[str, object]:
    """The options with today's names for recomputation, in place of those from before there were several kinds."""
    found = dict(options)
    # Without checkpoint_activations this option only states how activations are kept, not whether they are.
    found.pop("deepspeed_activation_checkpointing", None)
    layers, checkpoints = found.pop("checkpoint_num_layers", "1"), found.pop("checkpoint_activations", None)
    layers = found.pop("activations_checkpoint_num_layers", layers)
    method = found.pop("activations_checkpoint_method", "uniform" if checkpoints in (True, "true", "True") else None)
    if method is not None:
        usual = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
        found = usual | found
    return found
