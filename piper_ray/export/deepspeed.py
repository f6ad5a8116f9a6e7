"""DeepSpeed's configuration, and a PipelineModule that is divided as the plan says."""

from __future__ import annotations

from itertools import accumulate

from piper_ray.export.files import Export, json_text
from piper_ray.export.job import Job
from piper_ray.model.errors import UsageError
from piper_ray.model.recomputation import Recomputation

_SCRIPT = '''"""The plan for DeepSpeed: PlannedPipelineModule(layers=...), of the workload's layers in its order."""

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

PARTS = {parts}
"""Of the {layers} layers where each stage begins, and the end."""

LAYERS = {names}
"""What the list holds, for people."""

DEGREES = {{"num_pp": {p}, "num_mp": {t}, "num_dp": {d}}}
"""Of pipeline, tensor and data parallelism."""

RECOMPUTED = {recomputed}
"""Whether layers recompute in their backward pass, or keep all."""

STATE_SHARDS = {shards}
"""Replicas that share the optimizer's state in the plan; ds_config.json says whether DeepSpeed does so."""


def topology():
    """The ranks of the plan."""
    return PipeModelDataParallelTopology(**DEGREES)


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule with the plan's stages."""

    def __init__(self, layers, **options):
        if len(layers) != PARTS[-1]:
            raise ValueError(f"the plan is of {{PARTS[-1]}} layers, not {{len(layers)}}")
        options.setdefault("topology", topology())
        options.setdefault("activation_checkpoint_interval", int(RECOMPUTED))
        super().__init__(layers=layers, **options)

    def _partition_layers(self, method="uniform"):
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(PARTS)
        self._set_bounds(start=PARTS[stage], stop=PARTS[stage + 1])
'''


def export_deepspeed(job: Job) -> Export:
    """``ds_config.json`` and ``planned_module.py``. Raises UsageError for what DeepSpeed has no setting for."""
    if job.recomputation not in (Recomputation.NONE, Recomputation.FULL):
        raise UsageError(
            "DeepSpeed recomputes all layers in full or none (activation_checkpoint_interval); this plan does otherwise"
        )
    parts = [0, *accumulate(len(stage.layers) for stage in job.plan.stages)]
    layers = job.in_order([layer for stage in job.plan.stages for layer in stage.layers])
    names = [job.named(layer) for layer in layers]
    listed = "[\n" + "".join(f"    {name!r},\n" for name in names) + "]"
    script = _SCRIPT.format(
        parts=parts,
        layers=parts[-1],
        names=listed,
        p=job.pipeline_ranks,
        t=job.tensor_parallel_degree,
        d=job.data_parallel_degree,
        recomputed=job.recomputation == Recomputation.FULL,
        shards=job.setting.optimizer_shards,
    )
    config = {
        "train_batch_size": job.global_batch_samples,
        "train_micro_batch_size_per_gpu": job.microbatch_samples,
        "gradient_accumulation_steps": job.microbatches,
        "zero_optimization": {"stage": 1 if job.setting.optimizer_shards > 1 else 0},
    }
    notes = []
    if job.tensor_parallel_degree > 1:
        notes.append(
            f"tensor parallelism, t = {job.tensor_parallel_degree}, is the layers' own: DeepSpeed divides none"
        )
    for tied in job.tied_over_ranks:
        places = " and ".join(str(layers.index(layer)) for layer in job.in_order(tied))
        notes.append(
            f"{job.tied_text}: give numbers {places} of layers= as deepspeed.pipe.TiedLayerSpec with one key, whose "
            "gradients DeepSpeed sums; of other layers each rank trains its own copy"
        )
    where = f"--num_nodes {job.nodes} --num_gpus {job.processes_per_node}"
    if job.processes_of_last_node < job.processes_per_node:
        where = "--hostfile HOSTFILE"
        notes.append(
            f"the hostfile names {job.nodes} nodes with slots={job.processes_per_node}, the last one with "
            f"slots={job.processes_of_last_node}"
        )
    command = (
        f"deepspeed {where} YOUR-SCRIPT.py --deepspeed "
        "--deepspeed_config ds_config.json  # its model is planned_module.PlannedPipelineModule(layers=[...])"
    )
    files = {"ds_config.json": json_text(config), "planned_module.py": script}
    return Export(files, command, (*notes, *job.sharing_notes, *job.notes))
