"""For Megatron-LM: what a plan asks of it, as arguments by their names in Python (parallelism, batch, recomputation,
precision), and the launch files that say so to ``pretrain_gpt.py``."""

from __future__ import annotations

from piper_ray.export.files import Export, noted, rendered, resource
from piper_ray.export.job import ExportJob
from piper_ray.export.megatron_flags import PLAN_FLAGS, Settings, Value, said_by, true_ones, words_of
from piper_ray.export.megatron_layout import layout_text, stage_letters
from piper_ray.export.megatron_model import model_settings, require_divided, require_megatron_model, unsaid
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import TrainedModel
from piper_ray.model.mode import Recomputation
from piper_ray.workloads.estimate.decoder_shape import DecoderShape, decoder_shape
from piper_ray.workloads.estimate.software import ContextExchange

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def export_megatron(job: ExportJob) -> Export:
    """``megatron.args``, ``training.args`` and ``launch.sh``; without the model's arguments where nobody knows it.

    Raises UsageError for a plan or a model that Megatron has no arguments for.
    """
    settings = dict(plan_settings(job)) | dict(overlap_settings(job))
    model, notes = job.instance.model, list(megatron_notes(job))
    known = model is not None
    if model is not None:
        shape = require_pretrained(model)
        require_divided(shape, job.tensor_parallel, job.expert_tensor)
        settings |= dict(model_settings(shape)) | dict(precision_settings(job, model))
        notes += unsaid(shape)
        notes.append("training.args has usual figures of the optimizer and the length of the training: change them")
    else:
        notes.append(
            "the workload does not say which model it is: give launch.sh the model's own arguments and its precision"
        )
    files = {
        "megatron.args": "".join(" ".join(words) + "\n" for words in words_of(settings)),
        **({"training.args": resource("training.args")} if known else {}),
        "launch.sh": rendered("megatron_launch.sh.jinja", job=job, known=known, connections=asks_for_connections(job)),
    }
    command = f"bash launch.sh {'DATA [ARGUMENTS...]' if known else 'MODEL-ARGUMENTS...'}"
    return Export(files, command, tuple(notes))


def require_pretrained(model: TrainedModel) -> DecoderShape:
    """The decoder that ``pretrain_gpt.py`` trains. Raises UsageError with the reasons why it does not."""
    if model.lora_rank:
        raise UsageError(
            "Megatron-LM trains no adapters (LoRA), and this plan does; Megatron-Bridge does (--to megatron-bridge)"
        )
    return require_megatron_model(model)


def asks_for_connections(job: ExportJob) -> bool:
    """Whether Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1."""
    return job.tensor_parallel > 1 or job.context_parallel > 1


def megatron_notes(job: ExportJob) -> tuple[str, ...]:
    """What Megatron's arguments leave open, for all who hand a plan to Megatron."""
    return noted("megatron_notes.jinja", job=job)


def plan_settings(job: ExportJob) -> Settings:
    """Raises UsageError for a plan that Megatron has no arguments for."""
    found = said_by(job, *(flag.name for flag in PLAN_FLAGS if flag.says))
    if job.expert_parallel is None:
        del found["expert_tensor_parallel_size"]
    if job.pipeline_ranks > 1:
        found["pipeline_model_parallel_layout"] = layout_text(stage_letters(job.pieces, job.pieces_of_stages))
    found["use_distributed_optimizer"] = job.optimizer_shards > 1
    found |= dict(_recomputation(job)) | dict(context_settings(job))
    return true_ones({flag.name: found[flag.name] for flag in PLAN_FLAGS if flag.name in found})


_CONTEXT = {ContextExchange.RING: "p2p", ContextExchange.ALL_GATHER: "all_gather", ContextExchange.ALL_TO_ALL: "a2a"}


def context_settings(job: ExportJob) -> Settings:
    """How groups that share a sequence attend to all of it, where the workload says so. Raises UsageError for what no
    kernel does."""
    model = job.instance.model
    if job.context_parallel == 1 or model is None:
        return {}
    kind = _CONTEXT[ContextExchange(model.context_exchange)]
    shape = decoder_shape(model)
    # TransformerEngine's attn_forward_func_with_cp takes no others.
    if kind == "p2p" and shape is not None and any(shape.windows):
        raise UsageError(
            "context parallelism as a ring takes no sliding windows (TransformerEngine), and this model has some; "
            "expected estimate --context-exchange all-gather or all-to-all"
        )
    if kind != "p2p" and shape is not None and shape.latent is not None:
        raise UsageError(
            f"context parallelism by {model.context_exchange} takes no latent attention (TransformerEngine), and this "
            "model has it; expected estimate --context-exchange ring"
        )
    return {"cp_comm_type": kind}


def _recomputation(job: ExportJob) -> dict[str, Value]:
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


def overlap_settings(job: ExportJob) -> Settings:
    """What the plan's times count as hidden, turned on."""
    software = job.software
    found: dict[str, Value] = {}
    if software is not None and software.gradient_overlap and job.weight_replicas > 1:
        found["overlap_grad_reduce"] = True
        found["overlap_param_gather"] = job.optimizer_shards > 1
    found["tp_comm_overlap"] = job.hides_tensor_exchanges and job.sequence_parallel
    return true_ones(found)


def precision_settings(job: ExportJob, model: TrainedModel) -> Settings:
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
        if job.optimizer_shards == 1 and job.data_parallel > 1:
            raise UsageError(
                f"Megatron keeps {model.optimizer_bytes:g} bytes of optimizer state a parameter where replicas share "
                "it, and the plan's do not; expected estimate --zero all"
            )
        found["use_distributed_optimizer"] = True
    return true_ones(found)


def fp8_recipe(model: TrainedModel) -> str:
    """How products of 8 bits are scaled: by blocks, or by tensors."""
    return "mxfp8" if model.scales_by_blocks else "tensorwise"


_WEIGHT_BYTES = 2.0

_OPTIMIZERS: dict[float, Settings] = {
    12.0: {},
    8.0: {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
}
"""By bytes a parameter: fp32 weights and moments; moments in bf16."""
