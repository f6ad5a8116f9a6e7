"""Writes DeepSpeed's configuration, a PipelineModule that is divided as in ``stages.json``, and a script that starts
it.

``ds_config.json`` has batch, precision, optimizer and the sharding of its state, in the form of DeepSpeed's pipelines.

Source: DeepSpeed 0.19.8. Under a pipeline bf16 weights with fp32 gradients use BF16_Optimizer (ZeRO stage 1 with
``grad_accum_dtype`` fp32: runtime/engine.py, _do_optimizer_sanity_check), gradients in half precision use
DeepSpeedZeroOptimizer. Both divide their state among all replicas; PipelineEngine refuses stages 2 and 3.
"""

from __future__ import annotations

from piper_ray.export.files import Export, json_text, noted, rendered
from piper_ray.export.job import ExportJob
from piper_ray.export.stage_documents import stages_text
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import bytes_text
from piper_ray.model.instance import TrainedModel
from piper_ray.model.mode import Recomputation, Sharding
from piper_ray.run.exported_files import STAGES
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.software import Precision


def export_deepspeed(job: ExportJob) -> Export:
    """``stages.json``, ``ds_config.json``, ``planned_module.py`` and ``launch.sh``.

    Raises UsageError for settings that DeepSpeed does not have.
    """
    if job.recomputation not in (Recomputation.NONE, Recomputation.FULL):
        raise UsageError(
            "DeepSpeed recomputes all layers in full or none (activation_checkpoint_interval); this plan does otherwise"
        )
    order = job.in_order([layer for stage in job.plan.stages for layer in stage.layers])
    parameters, buffer_bytes = trained_parameters(job), _buffer_bytes(job)
    files = {
        STAGES: stages_text(job, {"tensor_parallel_degree": job.tensor_parallel}),
        "ds_config.json": json_text(deepspeed_config(job)),
        "planned_module.py": rendered(
            "deepspeed_module.py.jinja",
            names=[job.named(layer) for layer in order],
            tied=[[order.index(layer) for layer in job.in_order(tied)] for tied in job.tied_over_ranks],
            parameters=None if parameters is None else [parameters[layer] for layer in order],
        ),
        "launch.sh": rendered("deepspeed_launch.sh.jinja", job=job),
    }
    of_stages = [sum((parameters or {}).get(layer, 0) for layer in stage.layers) for stage in job.plan.stages]
    notes = noted(
        "deepspeed_notes.jinja",
        job=job,
        model=job.instance.model,
        order=order,
        most_parameters=max(of_stages),
        buffer_bytes=buffer_bytes,
        bytes_text=bytes_text,
    )
    usage = rendered("deepspeed_usage.md.jinja", layers=len(order))
    return Export(files, "bash launch.sh SCRIPT [ARGUMENTS...]", notes, usage=usage, beyond_bytes=buffer_bytes)


def _buffer_bytes(job: ExportJob) -> tuple[float, ...]:
    """Memory of PipelineEngine on a device of each pipeline rank, in addition to a plan's figures, in bytes.

    For each microbatch in flight it keeps the received tensor, of which the first layer reads a copy, and the result
    until the backward pass (runtime/pipe/engine.py, _exec_forward_pass: pipe_buffers "inputs" and "outputs").
    """
    p = job.pipeline_ranks
    borders = [0.0, *(_border_bytes(job, stage) for stage in range(1, p)), 0.0]
    return tuple(min(p - stage, job.microbatches) * (borders[stage] + borders[stage + 1]) for stage in range(p))


def _border_bytes(job: ExportJob, stage: int) -> float:
    """The bytes of the whole tensor that comes into a stage for a microbatch, as a single device without others
    receives it."""
    first = job.in_order(job.plan.stages[stage].layers)[0]
    row = job.instance.layer_by_id[first].tmpcs
    plain = row.get(1, row[job.replica_devices])[0]
    return sum(
        edge.communication_bytes + plain.forward_sync_bytes.get(edge.source, 0.0)
        for edge in job.instance.edges
        if edge.target == first
    )


_NAMES = {2.0: "bf16", 4.0: "fp32"}

_OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}
"""The optimizer's state of a parameter is 12 bytes: its fp32 weight and two fp32 moments."""


def deepspeed_config(job: ExportJob) -> dict[str, object]:
    """The configuration; without precision and optimizer if it is unknown how the model is trained."""
    model = job.instance.model
    batch: dict[str, object] = {
        "train_batch_size": job.global_batch_samples,
        "train_micro_batch_size_per_gpu": job.microbatch_samples,
        "gradient_accumulation_steps": job.microbatches,
    }
    if model is None:
        return batch | {"zero_optimization": {"stage": 1 if job.optimizer_shards > 1 else 0}}
    zero: dict[str, object] = {"stage": 1, "overlap_comm": False}
    return batch | _precision(job, model) | _OPTIMIZER | {"zero_optimization": zero}


def _precision(job: ExportJob, model: TrainedModel) -> dict[str, object]:
    if model.precision == Precision.FP16.value:
        return {
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
            "data_types": {"grad_accum_dtype": "fp16"},
            "communication_data_type": "fp16",
        }
    # immediate_grad_update frees a bf16 gradient as soon as it is added to the sum, which saves 2 bytes per parameter.
    reduced = reduced_bytes(job, model)
    return {
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": _NAMES[model.gradient_bytes]},
        "communication_data_type": _NAMES.get(reduced, _NAMES[model.gradient_bytes]),
    }


def reduced_bytes(job: ExportJob, model: TrainedModel) -> float:
    """The bytes of a gradient that is exchanged with other replicas, as in the plan's times."""
    software = job.software
    if software is None:
        return model.gradient_bytes
    training = Training(
        weight_bytes=model.weight_bytes, gradient_bytes=model.gradient_bytes, optimizer_bytes=model.optimizer_bytes
    )
    return software.reduced_bytes(Precision(model.precision), training)


def trained_parameters(job: ExportJob) -> dict[int, int] | None:
    """The number of trained parameters on a rank, by layer id, computed from what replicas exchange; None if the bytes
    of each parameter are unknown."""
    model = job.instance.model
    if model is None:
        return None
    gradient = reduced_bytes(job, model)
    each_bytes = {Sharding.NONE: gradient, Sharding.OPTIMIZER: (gradient + model.weight_bytes) / 2.0}
    return {layer: int(tmpc.weights_bytes // each_bytes[tmpc.mode.sharding]) for layer, tmpc in job.tmpcs.items()}
