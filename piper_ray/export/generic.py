"""A plan for no runtime in particular: stages by module path, degrees, batch, ranks, as YAML."""

from __future__ import annotations

from piper_ray.export.files import Export, yaml_text
from piper_ray.export.job import Job
from piper_ray.model.settings import setting_of


def export_yaml(job: Job) -> Export:
    """``plan.yaml``."""
    rank_of = {
        stage: rank
        for rank in range(job.pipeline_ranks)
        for stage in job.schedule.stages_of_rank(rank, job.pipeline_ranks)
    }
    nameless = [layer.id for layer in job.instance.layers if not layer.path]
    stages = []
    for number, (stage, recomputed) in enumerate(zip(job.plan.stages, job.recomputed_layers, strict=True)):
        stages.append(
            {
                "pipeline_rank": rank_of[number],
                "modules": [
                    {
                        "path": job.instance.layer_by_id[layer].path or f"layer {layer}",
                        "configuration": stage.tmpc_ids[layer],
                        "recomputation": recomputed[layer].id,
                    }
                    for layer in job.in_order(stage.layers)
                ],
            }
        )
    document = {
        "model": job.instance.name,
        **job.schedule.to_dict(),
        "pipeline_ranks": job.pipeline_ranks,
        "data_parallel_degree": job.data_parallel_degree,
        "tensor_parallel_degree": job.tensor_parallel_degree,
        "context_parallel_degree": job.setting.context,
        "expert_parallel_degree": job.expert_ranks,
        "expert_tensor_parallel_degree": job.setting.expert_tensor,
        "sequence_parallel": job.setting.sequence_parallel,
        "gathered_tensors_kept": job.setting.gathered,
        "optimizer_shards": job.setting.optimizer_shards,
        "shared_by_replicas": job.setting.shares[0].name.lower(),
        "offload": any(setting_of(tmpc).offload for of_stage in job.tmpcs for tmpc in of_stage),
        "microbatches_per_replica": job.microbatches,
        "microbatch_samples": job.microbatch_samples,
        "global_batch_samples": job.global_batch_samples,
        "tokens_per_sample": job.instance.batch.tokens_per_sample,
        **_trained(job),
        "stages": stages,
    }
    notes = []
    if nameless:
        notes.append(f"{len(nameless)} layers have no path, such as layer {nameless[0]}: they are named by their ids")
    if job.tied_over_ranks:
        notes.append(f"{job.tied_text}: whoever runs the plan keeps them alike")
    return Export(
        {"plan.yaml": yaml_text(document)}, "none: plan.yaml is for a launcher of your own", (*notes, *job.notes)
    )


def _trained(job: Job) -> dict[str, object]:
    """How the model is trained; nothing where nobody knows."""
    model = job.instance.model
    if model is None:
        return {}
    return {
        "precision": model.precision,
        "adapter_rank": model.lora_rank,
        "weight_bytes": model.weight_bytes,
        "gradient_bytes": model.gradient_bytes,
        "optimizer_bytes": model.optimizer_bytes,
    }
