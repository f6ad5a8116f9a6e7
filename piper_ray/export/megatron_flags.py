"""The launch arguments of Megatron-LM that a plan decides: one table for writing and for reading them.

Names and meanings are those of Megatron-LM 0.16 to 0.20; the fields are those of a Megatron-Bridge ConfigContainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

Value = bool | int | float | str | tuple[str, ...]
Settings = Mapping[str, Value]
"""Arguments by their names in Python (``tensor_model_parallel_size``). A switch is there and true, or not there."""


class Kind(Enum):
    """What follows a flag: a whole number, a text, nothing, or several words."""

    NUMBER = "number"
    TEXT = "text"
    SWITCH = "switch"
    WORDS = "words"


@dataclass(frozen=True)
class PlanFlag:
    """name: in Python. fields: of Megatron-Bridge's config that say the same; none where only Megatron-LM has it."""

    name: str
    kind: Kind = Kind.NUMBER
    fields: tuple[str, ...] = ()


def flag_of(name: str) -> str:
    """The flag of an argument by its name in Python."""
    return "--" + name.replace("_", "-")


PLAN_FLAGS = (
    PlanFlag("num_layers"),
    PlanFlag("mtp_num_layers", fields=("model.mtp_num_layers",)),
    PlanFlag("tensor_model_parallel_size", fields=("model.tensor_model_parallel_size",)),
    PlanFlag("pipeline_model_parallel_size", fields=("model.pipeline_model_parallel_size",)),
    PlanFlag("context_parallel_size", fields=("model.context_parallel_size",)),
    PlanFlag("expert_model_parallel_size", fields=("model.expert_model_parallel_size",)),
    PlanFlag("expert_tensor_parallel_size", fields=("model.expert_tensor_parallel_size",)),
    PlanFlag("sequence_parallel", Kind.SWITCH, ("model.sequence_parallel",)),
    PlanFlag("micro_batch_size", fields=("train.micro_batch_size",)),
    PlanFlag("global_batch_size", fields=("train.global_batch_size",)),
    PlanFlag("seq_length", fields=("model.seq_length", "dataset.seq_length")),
    PlanFlag("pipeline_model_parallel_layout", Kind.TEXT, ("model.pipeline_model_parallel_layout",)),
    PlanFlag("microbatch_group_size_per_virtual_pipeline_stage", fields=("model.microbatch_group_size_per_vp_stage",)),
    PlanFlag(
        "use_distributed_optimizer",
        Kind.SWITCH,
        ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    ),
    PlanFlag("recompute_granularity", Kind.TEXT, ("model.recompute_granularity",)),
    PlanFlag("recompute_modules", Kind.WORDS, ("model.recompute_modules",)),
    PlanFlag("recompute_method", Kind.TEXT, ("model.recompute_method",)),
    PlanFlag("recompute_num_layers", fields=("model.recompute_num_layers",)),
    PlanFlag("overlap_grad_reduce", Kind.SWITCH, ("ddp.overlap_grad_reduce",)),
    PlanFlag("overlap_param_gather", Kind.SWITCH, ("ddp.overlap_param_gather", "optimizer.overlap_param_gather")),
    PlanFlag("tp_comm_overlap", Kind.SWITCH),
    PlanFlag("cp_comm_type", Kind.TEXT, ("model.cp_comm_type",)),
)
"""What exports write of a plan, in this order."""

OLDER_FLAGS = (
    PlanFlag("data_parallel_size"),
    PlanFlag("decoder_first_pipeline_num_layers", fields=("model.num_layers_in_first_pipeline_stage",)),
    PlanFlag("decoder_last_pipeline_num_layers", fields=("model.num_layers_in_last_pipeline_stage",)),
    PlanFlag("num_layers_per_virtual_pipeline_stage"),
    PlanFlag("num_virtual_stages_per_pipeline_rank", fields=("model.virtual_pipeline_model_parallel_size",)),
    PlanFlag("account_for_embedding_in_pipeline_split", Kind.SWITCH),
    PlanFlag("account_for_loss_in_pipeline_split", Kind.SWITCH),
    PlanFlag("recompute_activations", Kind.SWITCH),
)
"""Further ones that layouts of other people have."""

READ_FLAGS = {flag.name: flag for flag in (*PLAN_FLAGS, *OLDER_FLAGS)}
"""By name."""

RENAMED_FIELDS = {
    field.rpartition(".")[2]: flag.name
    for flag in READ_FLAGS.values()
    for field in flag.fields
    if field.rpartition(".")[2] != flag.name
}
"""Names of arguments by those of fields that are called otherwise."""

COSTLY_FLAGS = (
    "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy", "num_distributed_optimizer_instances", "distribute_saved_activations",
    "cpu_offloading", "optimizer_cpu_offload", "encoder_", "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards", "hierarchical_context_parallel_sizes", "hybrid_context_parallel",
    "max_seqlen_per_dp_cp_rank", "overlap_moe_expert_parallel_comm", "moe_layer_recompute",
)  # fmt: skip
"""Arguments, or how they begin, that change what a run takes and that plans do not hold."""

HARMLESS_FLAGS = frozenset({
    "comm_overlap", "eval_global_batch_size", "eval_micro_batch_size", "eval_context_parallel_size",
    "check_weight_hash_across_dp_replicas_interval", "delta_offload_bytes_across_pp_ranks", "tp_comm_overlap_ag",
    "tp_comm_overlap_cfg", "tp_comm_overlap_rs", "rl_inference_tensor_model_parallel_size",
    "rl_inference_pipeline_model_parallel_size", "rl_inference_expert_model_parallel_size",
    "rl_inference_expert_tensor_model_parallel_size",
})  # fmt: skip
"""Arguments whose names are like those of a plan's and that decide nothing of how a model is trained."""


def words_of(settings: Settings) -> list[list[str]]:
    """Each flag with its value, a line each; switches alone."""
    found = []
    for name, value in settings.items():
        if value is True:
            found.append([flag_of(name)])
        elif isinstance(value, tuple):
            found.append([flag_of(name), *value])
        elif value is not False:
            found.append([flag_of(name), f"{value:g}" if isinstance(value, float) else str(value)])
    return found
