"""``ds_config.json``: batch, precision, optimizer and sharing of its state, as DeepSpeed's pipelines have them.

Read in the source of DeepSpeed 0.19.8. Under a pipeline bf16 weights with fp32 gradients go to BF16_Optimizer
(ZeRO stage 1 with ``grad_accum_dtype`` fp32: runtime/engine.py, _do_optimizer_sanity_check), gradients in half
precision to DeepSpeedZeroOptimizer. Either shares its state among all replicas; PipelineEngine refuses stages 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper_ray.export.job import Job
from piper_ray.export.overlaps import software_of
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import bytes_text
from piper_ray.model.settings import Sharding, setting_of
from piper_ray.model.trained_model import TrainedModel
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.software import Precision

_WEIGHT_BYTES = 2.0
_OPTIMIZER_BYTES = 12.0
_NAMES = {2.0: "bf16", 4.0: "fp32"}

_OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}
"""fp32 weights and two fp32 moments: 12 bytes a parameter."""


def deepspeed_config(job: Job) -> dict[str, object]:
    """Without precision and optimizer where nobody knows how the model is trained. Raises UsageError for what
    DeepSpeed's pipelines have not got."""
    model = job.instance.model
    batch: dict[str, object] = {
        "train_batch_size": job.global_batch_samples,
        "train_micro_batch_size_per_gpu": job.microbatch_samples,
        "gradient_accumulation_steps": job.microbatches,
    }
    if model is None:
        return batch | {"zero_optimization": {"stage": 1 if job.setting.optimizer_shards > 1 else 0}}
    zero: dict[str, object] = {"stage": 1, "overlap_comm": False}
    return batch | _precision(job, model) | _OPTIMIZER | {"zero_optimization": zero}


def require_trainable(model: TrainedModel) -> None:
    """Raises UsageError for what DeepSpeed's pipelines have not got."""
    if model.lora_rank:
        raise UsageError("DeepSpeed's pipelines have no adapters (LoRA), and this plan trains some")
    if model.precision == Precision.FP8.value:
        raise UsageError(
            "DeepSpeed has no products of 8 bits (fp8), and this plan has; expected precision bf16 or fp16"
        )
    if model.weight_bytes != _WEIGHT_BYTES:
        raise UsageError(f"DeepSpeed keeps weights in {_WEIGHT_BYTES:g} bytes, and the plan in {model.weight_bytes:g}")
    if model.gradient_bytes not in _NAMES:
        raise UsageError(f"DeepSpeed sums gradients in 2 or 4 bytes, and the plan in {model.gradient_bytes:g}")
    if model.optimizer_bytes != _OPTIMIZER_BYTES:
        raise UsageError(
            f"the optimizer of DeepSpeed's pipelines keeps {_OPTIMIZER_BYTES:g} bytes a parameter (fp32 weights and "
            f"moments), and the plan's {model.optimizer_bytes:g}"
        )


def _precision(job: Job, model: TrainedModel) -> dict[str, object]:
    require_trainable(model)
    if model.precision == Precision.FP16.value:
        return {
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
            "data_types": {"grad_accum_dtype": "fp16"},
            "communication_data_type": "fp16",
        }
    # immediate_grad_update gives a bf16 gradient back as soon as it is added up: 2 bytes a parameter less.
    reduced = reduced_bytes(job, model)
    return {
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": _NAMES[model.gradient_bytes]},
        "communication_data_type": _NAMES.get(reduced, _NAMES[model.gradient_bytes]),
    }


def reduced_bytes(job: Job, model: TrainedModel) -> float:
    """Of a gradient on its way to the other replicas, as the plan's times have it."""
    software = software_of(job)
    if software is None:
        return model.gradient_bytes
    training = Training(
        weight_bytes=model.weight_bytes, gradient_bytes=model.gradient_bytes, optimizer_bytes=model.optimizer_bytes
    )
    return software.reduced_bytes(Precision(model.precision), training)


def trained_parameters(job: Job) -> dict[int, int] | None:
    """On a rank, of each layer id, by what replicas exchange of it; None where nobody knows the bytes of each."""
    model = job.instance.model
    if model is None:
        return None
    gradient = reduced_bytes(job, model)
    each_bytes = {Sharding.NONE: gradient, Sharding.OPTIMIZER: (gradient + model.weight_bytes) / 2.0}
    return {
        layer: int(tmpc.weights_bytes // each_bytes[setting_of(tmpc).shares[0]])
        for stage, chosen in zip(job.plan.stages, job.tmpcs, strict=True)
        for layer, tmpc in zip(stage.layers, chosen, strict=True)
    }


def state_notes(job: Job) -> Iterator[str]:
    """Where DeepSpeed keeps, sums or exchanges otherwise than the plan's figures have it."""
    model, d = job.instance.model, job.data_parallel_degree
    if model is None:
        yield (
            "the workload does not say how the model is trained: add precision (bf16 or fp16) and optimizer to "
            "ds_config.json; without a precision DeepSpeed trains in fp32"
        )
        return
    yield "ds_config.json has usual figures of the optimizer, at a constant learning rate: change them"
    most = max(_stage_parameters(job))
    if model.precision == Precision.FP16.value and model.gradient_bytes > _WEIGHT_BYTES:
        saved = bytes_text((model.gradient_bytes - _WEIGHT_BYTES) * most)
        yield (
            f"DeepSpeed's pipelines sum fp16 gradients in fp16, the plan in {model.gradient_bytes:g} bytes: up to "
            f"{saved} less on a rank, and less precise over many microbatches"
        )
    elif model.precision == Precision.BF16.value and model.gradient_bytes > _WEIGHT_BYTES:
        yield (
            "DeepSpeed before 0.19.8 keeps a bf16 gradient beside its fp32 sum until the step, which takes up to "
            f"{bytes_text(_WEIGHT_BYTES * most)} more on a rank than the plan's figures"
        )
    if d > 1 and job.setting.optimizer_shards == 1:
        yield (
            f"DeepSpeed shares the optimizer's state among all {d} replicas, the plan among none: less memory, and "
            "weights are gathered after each step, which the plan's times do not count"
        )
    summed_whole = model.precision == Precision.BF16.value and model.gradient_bytes > _WEIGHT_BYTES
    if job.setting.optimizer_shards > 1 and summed_whole:
        yield (
            "DeepSpeed all-reduces the fp32 gradients of a bf16 model; the plan's times count scattering them, which "
            "is half as much"
        )


def _stage_parameters(job: Job) -> list[int]:
    found = trained_parameters(job) or {}
    return [sum(found[layer] for layer in stage.layers) for stage in job.plan.stages]
