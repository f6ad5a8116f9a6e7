"""The launch arguments of Megatron-LM that a plan decides: one table, by which they are written and read.

Names and meanings are those of Megatron-LM 0.16 to 0.20; the fields are those of a Megatron-Bridge ConfigContainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Value = bool | int | float | str | tuple[str, ...]
Settings = dict[str, Value]
"""Arguments by their names in Python (``tensor_model_parallel_size``). A switch is there and true, or not there."""


class Kind(Enum):
    """What follows a flag: a whole number, a text, nothing, or several words."""

    NUMBER = "number"
    TEXT = "text"
    SWITCH = "switch"
    WORDS = "words"


@dataclass(frozen=True)
class PlanFlag:
    """name: in Python. says: the figure of a plan that its value is, by its name in an ``ExportJob``, and in ``RunAs``
    if it is none of ``COMPARED``; empty where it says several, or a part of one (``megatron``). fields: of
    Megatron-Bridge's config that say the same; none where only Megatron-LM has it."""

    name: str
    says: str = ""
    kind: Kind = Kind.NUMBER
    fields: tuple[str, ...] = ()


def flag_of(name: str) -> str:
    """The flag of an argument by its name in Python."""
    return "--" + name.replace("_", "-")


def _of_model(name: str, says: str = "", kind: Kind = Kind.NUMBER) -> PlanFlag:
    """What the section of the model has by the same name."""
    return PlanFlag(name, says, kind, (f"model.{name}",))


PLAN_FLAGS = (
    PlanFlag("num_layers", "blocks"),
    _of_model("mtp_num_layers", "predictors"),
    _of_model("tensor_model_parallel_size", "tensor_parallel"),
    _of_model("pipeline_model_parallel_size", "pipeline_ranks"),
    _of_model("context_parallel_size", "context_parallel"),
    _of_model("expert_model_parallel_size", "expert_parallel"),
    _of_model("expert_tensor_parallel_size", "expert_tensor"),
    _of_model("sequence_parallel", "sequence_parallel", Kind.SWITCH),
    PlanFlag("micro_batch_size", "microbatch_samples", fields=("train.micro_batch_size",)),
    PlanFlag("global_batch_size", "global_batch_samples", fields=("train.global_batch_size",)),
    PlanFlag("seq_length", "tokens_per_sample", fields=("model.seq_length", "dataset.seq_length")),
    _of_model("pipeline_model_parallel_layout", kind=Kind.TEXT),
    PlanFlag(
        "microbatch_group_size_per_virtual_pipeline_stage",
        "group",
        fields=("model.microbatch_group_size_per_vp_stage",),
    ),
    PlanFlag(
        "use_distributed_optimizer",
        kind=Kind.SWITCH,
        fields=("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    ),
    _of_model("recompute_granularity", kind=Kind.TEXT),
    _of_model("recompute_modules", kind=Kind.WORDS),
    _of_model("recompute_method", kind=Kind.TEXT),
    _of_model("recompute_num_layers"),
    PlanFlag("overlap_grad_reduce", kind=Kind.SWITCH, fields=("ddp.overlap_grad_reduce",)),
    PlanFlag(
        "overlap_param_gather",
        kind=Kind.SWITCH,
        fields=("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
    ),
    PlanFlag("tp_comm_overlap", kind=Kind.SWITCH),
    _of_model("cp_comm_type", kind=Kind.TEXT),
)
"""What exports to Megatron-LM write of a plan, in this order. Megatron-Bridge gets those with fields, FlagScale those
that are figures of a plan."""

OLDER_FLAGS = (
    PlanFlag("data_parallel_size", "data_parallel"),
    PlanFlag("decoder_first_pipeline_num_layers", fields=("model.num_layers_in_first_pipeline_stage",)),
    PlanFlag("decoder_last_pipeline_num_layers", fields=("model.num_layers_in_last_pipeline_stage",)),
    PlanFlag("num_layers_per_virtual_pipeline_stage"),
    PlanFlag("num_virtual_stages_per_pipeline_rank", fields=("model.virtual_pipeline_model_parallel_size",)),
    PlanFlag("account_for_embedding_in_pipeline_split", kind=Kind.SWITCH),
    PlanFlag("account_for_loss_in_pipeline_split", kind=Kind.SWITCH),
    PlanFlag("recompute_activations", kind=Kind.SWITCH),
)
"""Further ones that layouts of other people have."""

READ_FLAGS = {flag.name: flag for flag in (*PLAN_FLAGS, *OLDER_FLAGS)}
"""By name."""

COMPARED = frozenset({"num_layers", "mtp_num_layers", "seq_length", "global_batch_size", "micro_batch_size"})
"""Arguments that are the workload's own: a layout's are compared with these, and are no part of how it is run."""

RENAMED_FIELDS = {
    field.rpartition(".")[2]: flag.name
    for flag in READ_FLAGS.values()
    for field in flag.fields
    if field.rpartition(".")[2] != flag.name
}
"""Names of arguments by those of fields that are called otherwise."""

DIVIDED = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
MESH = ("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel", "pipeline_ranks")
"""What FlagScale's meshes divide, by arguments; and their figures in order, by their names in an ``ExportJob`` and in
``RunAs``."""


def true_ones(settings: Settings) -> Settings:
    """Without switches that are off."""
    return {name: value for name, value in settings.items() if value is not False}
