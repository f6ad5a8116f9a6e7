"""For Megatron-Bridge: a module whose ``apply`` sets in a recipe what the plan decides, and refuses another model; and
the fields of such a recipe or config, read."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from piper_ray.export.files import Export, rendered
from piper_ray.export.job import ExportJob
from piper_ray.export.megatron import (
    CONNECTIONS,
    asks_for_connections,
    fp8_recipe,
    megatron_notes,
    overlap_settings,
    plan_settings,
    precision_settings,
)
from piper_ray.export.megatron_arguments import read_values
from piper_ray.export.megatron_flags import PLAN_FLAGS, READ_FLAGS, RENAMED_FIELDS, Kind
from piper_ray.export.megatron_layout import BLOCK, EMBEDDING, LOSS, MTP
from piper_ray.export.run_as import ReadLayout
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, TrainedModel
from piper_ray.runtimes.pieces import ModelPieces
from piper_ray.workloads.estimate.architectures.layers import Attention, LatentAttention
from piper_ray.workloads.estimate.architectures.state_space import DeltaNet
from piper_ray.workloads.estimate.decoder_shape import DecoderShape, decoder_shape

_LETTERS = {"embedding": EMBEDDING, "decoder": BLOCK, "loss": LOSS, "mtp": MTP}
"""Of a layout string, by a Bridge layout's words."""

_SETTING = re.compile(r"^\s*cfg\.(?:\w+\.)*(?P<name>\w+) = (?P<value>.+)$", re.MULTILINE)
_CHANGED = re.compile(r"cfg\.[\w.]+ *[-+*/|%]+=.*")

_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}


def export_bridge(job: ExportJob) -> Export:
    """``piper_plan.py``. Raises UsageError for a plan that Megatron has no fields for, or what is no decoder."""
    model, notes = job.instance.model, list(megatron_notes(job))
    planned: dict[str, object] = {"num_layers": job.blocks}
    precision, rank = None, 0
    if model is None:
        notes.append("the workload does not say which model it is: apply checks its depth alone, and sets no precision")
    else:
        shape = require_decoder(model)
        planned |= _planned(shape)
        precision, rank = _precision(job, model), model.lora_rank
        if rank and shape.experts is not None:
            raise UsageError("Megatron-Bridge adapts no routers (LoRA), and the plan counts adapters of these, too")
    script = rendered(
        "megatron_bridge.py.jinja",
        planned=_literals(planned),
        fields=_literals(_fields(job)),
        precision=precision,
        half_gradients=model is not None and model.gradient_bytes == 2.0 and model.precision != "fp16",
        adapter_rank=rank,
        overlaps=job.hides_tensor_exchanges and job.sequence_parallel,
    )
    connections = f"{CONNECTIONS}=1 " if asks_for_connections(job) else ""
    command = (
        f"{connections}{job.torchrun} YOUR-SCRIPT.py  # which calls piper_plan.apply(cfg) before pretrain(cfg, ...)"
    )
    return Export({"piper_plan.py": script}, command, tuple(notes))


def require_decoder(model: TrainedModel) -> DecoderShape:
    """Whose blocks a layout can place. Raises UsageError for other models."""
    shape, named = decoder_shape(model), model.config.get("model_type")
    if shape is None:
        raise UsageError(f"the plan's layouts are of decoders of text; {named} is none")
    if any(not isinstance(part, (Attention, LatentAttention, DeltaNet)) for part in shape.mixing):
        raise UsageError(f"Megatron takes no layout for a model with state spaces or convolutions ({named})")
    return shape


def _fields(job: ExportJob) -> dict[str, object]:
    """Of the config, with what the plan does not ask for: a recipe may have that of another layout."""
    settings = dict(plan_settings(job)) | dict(overlap_settings(job))
    usual: dict[str, object] = {
        "expert_model_parallel_size": 1,
        "microbatch_group_size_per_virtual_pipeline_stage": job.pipeline_ranks,
    }
    found: dict[str, object] = {}
    for flag in PLAN_FLAGS:
        value: object = settings.get(flag.name, usual.get(flag.name, False if flag.kind is Kind.SWITCH else None))
        if isinstance(value, tuple):
            value = list(value)
        if flag.name != "seq_length" or value is not None:
            found |= dict.fromkeys(flag.fields, value)
    return found | {"model.virtual_pipeline_model_parallel_size": job.schedule.v if job.schedule.v > 1 else None}


def _planned(shape: DecoderShape) -> dict[str, object]:
    """What tells one model from another, in fields that all of Bridge's recipes have."""
    config = shape.config
    found: dict[str, object] = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
    }
    if (experts := shape.experts) is not None:
        found |= {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.inner,
        }
    else:
        found["ffn_hidden_size"] = config.inner
    return found


def _precision(job: ExportJob, model: TrainedModel) -> str:
    """By Megatron-Bridge's name of it."""
    precision_settings(job, model)  # refuses what Megatron cannot keep
    if model.optimizer_bytes != TrainedModel.optimizer_bytes:
        raise UsageError(
            f"{model.optimizer_bytes:g} bytes of optimizer state a parameter, where Megatron-Bridge's recipes keep "
            f"{TrainedModel.optimizer_bytes:g}"
        )
    return _PRECISIONS[fp8_recipe(model) if model.precision == "fp8" else model.precision]


def _literals(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, f'"{value}"' if isinstance(value, str) else repr(value)) for name, value in values.items()]


def is_recipe(text: str) -> bool:
    """Whether it sets fields of a Megatron-Bridge config, in Python."""
    return _SETTING.search(text) is not None


def read_recipe(text: str, pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """Of lines such as ``cfg.model.tensor_model_parallel_size = 2``; nothing is run. Raises UsageError."""
    values: dict[str, object] = {}
    if (changed := _CHANGED.search(text)) is not None:
        raise UsageError(f"{changed[0]}: expected a value that need not be worked out")
    for found in _SETTING.finditer(text):
        name, value = found["name"], found["value"].strip()
        values[name] = _value(value)
        if values[name] is None and value != "None" and _argument(name) in READ_FLAGS:
            raise UsageError(f"cfg.{name} = {value}: expected a value that need not be worked out")
    return read_fields(values, pieces, instance)


def _value(text: str) -> object:
    """None for what has to be worked out."""
    try:
        return ast.literal_eval(text.partition("#")[0] if '"' not in text and "'" not in text else text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def read_fields(values: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """Of a config's fields by their own names, without those of its sections. Raises UsageError."""
    named = {_argument(name): value for name, value in values.items()}
    layout = named.get("pipeline_model_parallel_layout")
    if isinstance(layout, list):
        named["pipeline_model_parallel_layout"] = _layout_text(layout)
    if layout is not None:
        named.pop("num_virtual_stages_per_pipeline_rank", None)  # follows from the layout
    read = read_values(named, pieces, instance)
    return replace(read, names=frozenset(name for name in values if _argument(name) in READ_FLAGS))


def _argument(field: str) -> str:
    """Its name among Megatron-LM's arguments."""
    return RENAMED_FIELDS.get(field, field)


def _layout_text(layout: Sequence[object]) -> str:
    stages = []
    for number, stage in enumerate(layout):
        names = stage if isinstance(stage, list) else [stage]
        unknown = [name for name in names if not isinstance(name, str) or name not in _LETTERS]
        if unknown:
            known = ", ".join(_LETTERS)
            raise UsageError(f"pipeline_model_parallel_layout[{number}]: {unknown[0]!r}; expected one of {known}")
        stages.append("".join(_LETTERS[str(name)] for name in names))
    return "|".join(stages)
