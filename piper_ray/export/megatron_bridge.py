"""For Megatron-Bridge: a module whose ``apply`` sets in a recipe what the plan decides, and refuses another model."""

from __future__ import annotations

from piper_ray.export.files import Export
from piper_ray.export.job import Job
from piper_ray.export.megatron import CONNECTIONS, asks_for_connections, megatron_notes
from piper_ray.export.megatron_flags import PLAN_FLAGS, Kind
from piper_ray.export.megatron_settings import (
    fp8_recipe,
    overlap_settings,
    plan_settings,
    precision_settings,
)
from piper_ray.export.overlaps import hides_tensor_exchanges
from piper_ray.model.errors import UsageError
from piper_ray.model.trained_model import TrainedModel
from piper_ray.workloads.estimate.architectures.latent import LatentAttention
from piper_ray.workloads.estimate.architectures.layers import Attention
from piper_ray.workloads.estimate.architectures.state_space import DeltaNet
from piper_ray.workloads.estimate.decoder_shape import DecoderShape, decoder_shape

_SCRIPT = '''"""What the plan decides, for a Megatron-Bridge recipe: apply(cfg) changes its ConfigContainer."""

PLANNED = {planned}
"""The planned model, by fields of cfg.model; a recipe may leave some open (None)."""


def apply(cfg):
    """Sets parallelism, layout, batch, recomputation and precision; returns the same object.

    Raises ValueError for a recipe of another model.
    """
    for name, value in PLANNED.items():
        given = getattr(cfg.model, name, None)
        if given is not None and given != value:
            raise ValueError(f"the plan is of a model with {{name}} = {{value}}; the recipe has {{given}}")
{body}    return cfg
'''

_PEFT = """    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    cfg.peft = CanonicalLoRA(dim={rank}, alpha={rank})
"""

_OVERLAP = """    cfg.model.tp_comm_overlap = True
    if getattr(cfg, "comm_overlap", None) is not None:
        cfg.comm_overlap.tp_comm_overlap = True
"""

_HALF_GRADIENTS = """    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    cfg.mixed_precision = get_mixed_precision_config(cfg.mixed_precision)
    cfg.mixed_precision.grad_reduce_in_fp32 = False
"""

_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}


def export_bridge(job: Job) -> Export:
    """``piper_plan.py``. Raises UsageError for a plan that Megatron has no fields for, or what is no decoder."""
    model, notes = job.instance.model, list(megatron_notes(job))
    planned: dict[str, object] = {"num_layers": job.pieces.blocks}
    lines = [f"    cfg.{field} = {_literal(value)}\n" for field, value in _fields(job).items()]
    if model is None:
        notes.append("the workload does not say which model it is: apply checks its depth alone, and sets no precision")
    else:
        shape = require_decoder(model)
        planned |= _planned(shape)
        lines += _precision(job, model)
        if model.lora_rank:
            lines.append(_lora(model, shape))
    if hides_tensor_exchanges(job) and job.setting.sequence_parallel:
        lines.append(_OVERLAP)
    rows = "".join(f'    "{name}": {value!r},\n' for name, value in planned.items())
    script = _SCRIPT.format(planned=f"{{\n{rows}}}", body="".join(lines))
    connections = f"{CONNECTIONS}=1 " if asks_for_connections(job) else ""
    command = (
        f"{connections}{job.torchrun} YOUR-SCRIPT.py  # which calls piper_plan.apply(cfg) before pretrain(cfg, ...)"
    )
    return Export({"piper_plan.py": script}, command, (*notes, *job.sharing_notes, *job.notes))


def require_decoder(model: TrainedModel) -> DecoderShape:
    """Whose blocks a layout can place. Raises UsageError for other models."""
    shape, named = decoder_shape(model), model.config.get("model_type")
    if shape is None:
        raise UsageError(f"the plan's layouts are of decoders of text; {named} is none")
    if any(not isinstance(part, (Attention, LatentAttention, DeltaNet)) for part in shape.mixing):
        raise UsageError(f"Megatron takes no layout for a model with state spaces or convolutions ({named})")
    return shape


def _fields(job: Job) -> dict[str, object]:
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


def _precision(job: Job, model: TrainedModel) -> list[str]:
    precision_settings(job, model)  # refuses what Megatron cannot keep
    if model.optimizer_bytes != TrainedModel.optimizer_bytes:
        raise UsageError(
            f"{model.optimizer_bytes:g} bytes of optimizer state a parameter, where Megatron-Bridge's recipes keep "
            f"{TrainedModel.optimizer_bytes:g}"
        )
    named = _PRECISIONS[fp8_recipe(model) if model.precision == "fp8" else model.precision]
    lines = [f'    cfg.mixed_precision = "{named}"\n']
    return lines + ([_HALF_GRADIENTS] if model.gradient_bytes == 2.0 and model.precision != "fp16" else [])


def _lora(model: TrainedModel, shape: DecoderShape) -> str:
    if shape.experts is not None:
        raise UsageError("Megatron-Bridge adapts no routers (LoRA), and the plan counts adapters of these, too")
    return _PEFT.format(rank=model.lora_rank)


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
