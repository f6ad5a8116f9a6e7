"""What a plan asks of Megatron, as arguments by their names in Python: parallelism, batch, recomputation, precision."""

from __future__ import annotations

from piper_ray.export.job import Job
from piper_ray.export.megatron_flags import Settings, Value
from piper_ray.export.megatron_layout import layout_text, stage_letters
from piper_ray.export.overlaps import hides_tensor_exchanges, software_of
from piper_ray.model.errors import UsageError
from piper_ray.model.recomputation import Recomputation
from piper_ray.model.trained_model import TrainedModel
from piper_ray.simulate.actions import group_size
from piper_ray.workloads.estimate.architectures.latent import LatentAttention
from piper_ray.workloads.estimate.architectures.layers import Attention
from piper_ray.workloads.estimate.decoder_shape import decoder_shape
from piper_ray.workloads.estimate.software import ContextExchange

_BLACKWELL = ("B", "GB")
"""How the keys of GPUs begin whose products of 8 bits have scales for blocks of 32 numbers (MXFP8)."""


def plan_settings(job: Job) -> Settings:
    """Raises UsageError for a plan that Megatron has no arguments for."""
    p, v, setting = job.pipeline_ranks, job.schedule.v, job.setting
    found: dict[str, Value] = {
        "num_layers": job.pieces.blocks,
        **({"mtp_num_layers": job.pieces.predictors} if job.pieces.predictors else {}),
        "tensor_model_parallel_size": job.tensor_parallel_degree,
        "pipeline_model_parallel_size": p,
        "context_parallel_size": setting.context,
        **_experts(job),
        "sequence_parallel": setting.sequence_parallel,
        "micro_batch_size": job.microbatch_samples,
        "global_batch_size": job.global_batch_samples,
    }
    if job.instance.batch.tokens_per_sample is not None:
        found["seq_length"] = job.instance.batch.tokens_per_sample
    if p > 1:
        found["pipeline_model_parallel_layout"] = layout_text(stage_letters(job.pieces, job.pieces_of_stages))
    group = group_size(p, job.microbatches, job.schedule.group) if v > 1 else p
    if group != p:
        found["microbatch_group_size_per_virtual_pipeline_stage"] = group
    found["use_distributed_optimizer"] = setting.optimizer_shards > 1
    found |= dict(_recomputation(job)) | dict(context_settings(job))
    return {name: value for name, value in found.items() if value is not False}


_CONTEXT = {ContextExchange.RING: "p2p", ContextExchange.ALL_GATHER: "all_gather", ContextExchange.ALL_TO_ALL: "a2a"}


def context_settings(job: Job) -> Settings:
    """How groups that share a sequence attend to all of it, where the workload says so. Raises UsageError for what no
    kernel does."""
    model = job.instance.model
    if job.setting.context == 1 or model is None:
        return {}
    kind = _CONTEXT[ContextExchange(model.context_exchange)]
    shape = decoder_shape(model)
    parts = () if shape is None else shape.mixing
    # TransformerEngine's attn_forward_func_with_cp takes no others.
    if kind == "p2p" and any(isinstance(part, Attention) and part.window for part in parts):
        raise UsageError(
            "context parallelism as a ring takes no sliding windows (TransformerEngine), and this model has some; "
            "expected estimate --context-exchange all-gather or all-to-all"
        )
    if kind != "p2p" and any(isinstance(part, LatentAttention) for part in parts):
        raise UsageError(
            f"context parallelism by {model.context_exchange} takes no latent attention (TransformerEngine), and this "
            "model has it; expected estimate --context-exchange ring"
        )
    return {"cp_comm_type": kind}


def _experts(job: Job) -> dict[str, Value]:
    if job.expert_ranks is None:
        return {}
    return {
        "expert_model_parallel_size": job.expert_ranks,
        "expert_tensor_parallel_size": job.setting.expert_tensor,
    }


def _recomputation(job: Job) -> dict[str, Value]:
    """One for all: the first k layers of each chunk, all layers, or the same parts of all."""
    if job.recomputation == Recomputation.NONE:
        return {}
    if job.recomputation == Recomputation.FULL:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if job.recomputation is not None:
        return {"recompute_granularity": "selective", "recompute_modules": job.recomputation.parts}
    counts = job.first_recomputed
    if counts is None:
        raise UsageError(
            "Megatron recomputes no layer, each one, the same parts of each, or the first ones of each stage; in this "
            "plan stages do otherwise"
        )
    most = max(counts)
    for number, (count, kinds) in enumerate(zip(counts, job.recomputed, strict=True), start=1):
        if count != min(most, len(kinds)):
            raise UsageError(
                f"Megatron recomputes as many first layers in one stage as in another; stage {number} recomputes "
                f"{count} of {len(kinds)}, another one {most} (solve --runtime megatron keeps to that)"
            )
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": most}


def overlap_settings(job: Job) -> Settings:
    """What the plan's times count as hidden, turned on."""
    software = software_of(job)
    found: dict[str, Value] = {}
    if software is not None and software.gradient_overlap and job.weight_replicas > 1:
        found["overlap_grad_reduce"] = True
        found["overlap_param_gather"] = job.setting.optimizer_shards > 1
    found["tp_comm_overlap"] = hides_tensor_exchanges(job) and job.setting.sequence_parallel
    return {name: value for name, value in found.items() if value is not False}


def precision_settings(job: Job, model: TrainedModel) -> Settings:
    """Precision of products, of gradients as they are summed, and of the optimizer's state.

    Raises UsageError for bytes a parameter that no arguments give.
    """
    found: dict[str, Value] = {"fp16" if model.precision == "fp16" else "bf16": True}
    if model.precision == "fp8":
        found |= {"fp8_format": "hybrid", "fp8_recipe": fp8_recipe(model)}
    if model.weight_bytes != _WEIGHT_BYTES:
        raise UsageError(f"Megatron keeps weights in {_WEIGHT_BYTES:g} bytes, and the plan in {model.weight_bytes:g}")
    if model.gradient_bytes not in (2.0, 4.0):
        raise UsageError(f"Megatron sums gradients in 2 or 4 bytes, and the plan in {model.gradient_bytes:g}")
    if model.precision == "fp16":
        found["accumulate_allreduce_grads_in_fp32"] = model.gradient_bytes == 4.0
    else:
        found["grad_reduce_in_bf16"] = model.gradient_bytes == 2.0
    if model.optimizer_bytes not in _OPTIMIZERS:
        raise UsageError(
            f"Megatron's optimizer keeps {' or '.join(f'{size:g}' for size in _OPTIMIZERS)} bytes a parameter, and the "
            f"plan's {model.optimizer_bytes:g}"
        )
    found |= _OPTIMIZERS[model.optimizer_bytes]
    if "use_precision_aware_optimizer" in found:  # which Megatron has as a distributed optimizer alone
        if job.setting.optimizer_shards == 1 and job.data_parallel_degree > 1:
            raise UsageError(
                f"Megatron keeps {model.optimizer_bytes:g} bytes of optimizer state a parameter where replicas share "
                "it, and the plan's do not; expected estimate --zero all"
            )
        found["use_distributed_optimizer"] = True
    return {name: value for name, value in found.items() if value is not False}


def fp8_recipe(model: TrainedModel) -> str:
    """How products of 8 bits are scaled: by blocks on Blackwell, by tensors before."""
    return "mxfp8" if model.gpu.startswith(_BLACKWELL) else "tensorwise"


_WEIGHT_BYTES = 2.0

_OPTIMIZERS: dict[float, Settings] = {
    12.0: {},
    8.0: {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
}
"""By bytes a parameter: fp32 weights and moments; moments in bf16."""
