"""torch.distributed.pipelining: stages by module path, the schedule's list of passes, and a script that runs both."""

from __future__ import annotations

from piper_ray.export.files import Export, json_text, rendered
from piper_ray.export.job import Job
from piper_ray.export.stage_documents import torch_document
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import TrainedModel
from piper_ray.model.schedule import ScheduleName
from piper_ray.run.exported_files import LISTS, STAGES
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.version import __version__

_WHOLE_BYTES = 4.0
"""Of a weight in fp32."""

TORCH_NAMES = {
    ScheduleName.GPIPE: "GPipe",
    ScheduleName.ONE_F_ONE_B: "1F1B",
    ScheduleName.INTERLEAVED: "Interleaved1F1B",
    ScheduleName.LOOPED_BFS: "LoopedBFS",
    ScheduleName.ZB_H1: "InterleavedZeroBubble",
    ScheduleName.ZB_V: "ZBVZeroBubble",
    ScheduleName.DUALPIPE_V: "DualPipeV",
}
"""As ``get_schedule_class`` knows them."""

ONE_STAGE = frozenset({ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B})
"""Schedules that torch runs without a list: one stage on each rank."""

_MOST_PASSES = 5_000_000


def actions_csv(job: Job) -> str:
    """``0F0,0F1,1F0,...``: stage, kind of pass, microbatch. Raises UsageError for lists of too many passes."""
    passes = 3 * job.microbatches * len(job.plan.stages)
    if passes > _MOST_PASSES:
        raise UsageError(
            f"a list of {passes:,} passes is more than torch is given here; expected at most {_MOST_PASSES:,}: "
            "fewer microbatches, or a larger data-parallel degree"
        )
    lines = []
    for rank, actions in enumerate(flush_lists(job.schedule, job.pipeline_ranks, job.microbatches)):
        stages = job.schedule.stages_of_rank(rank, job.pipeline_ranks)
        lines.append(
            ",".join(
                f"{stages[chunk]}{ActionKind(kind).name}{microbatch}" for kind, chunk, microbatch in actions.tolist()
            )
        )
    return "\n".join(lines) + "\n"


def require_own_products(model: TrainedModel) -> None:
    """Raises UsageError for what a module in bf16 or fp16 does not do by itself."""
    if model.precision == "fp8":
        raise UsageError("PyTorch's own modules have no products of 8 bits (fp8), and this plan has; expected bf16")
    if model.lora_rank:
        raise UsageError("pipeline.py adds no adapters (LoRA) to a model, and this plan trains some")


def export_torch(job: Job) -> Export:
    """The files and how they are used. Raises UsageError for layers without paths, and weights that stages share."""
    model = job.instance.model
    if model is not None:
        require_own_products(model)
    _check_ties(job)
    document = torch_document(job, {} if model is None else {"weight_type": _weight_type(model)})
    files = {
        STAGES: json_text(document),
        LISTS: actions_csv(job),
        "pipeline.py": rendered("torch_pipeline.py.jinja", version=__version__),
    }
    command = f"{job.torchrun} YOUR-SCRIPT.py  # which calls pipeline.build"
    notes = ["each node needs piper-ray with torch: pip install 'piper-ray[torch]'"]
    if job.optimizer_shards > 1:
        notes.append(
            "the plan shares the optimizer's state among replicas, and pipeline.py does not: expected "
            "torch.distributed.optim.ZeroRedundancyOptimizer over the group of the mesh's dp"
        )
    if model is not None:
        notes.append(
            f"the plan counts on {model.weight_bytes:g} bytes of weight, {model.gradient_bytes:g} of gradient and "
            f"{model.optimizer_bytes:g} of optimizer state a parameter; gradients and states have the types that your "
            "optimizer gives them"
        )
    samples = plural(job.microbatch_samples, "sample")
    usage = rendered("torch_usage.md.jinja", samples=samples, microbatches=job.microbatches)
    return Export(files, command, (*notes, *job.sharing_notes, *job.notes), usage=usage)


def _weight_type(model: TrainedModel) -> str:
    """PyTorch's name of it."""
    if model.weight_bytes == _WHOLE_BYTES:
        return "float32"
    return "float16" if model.precision == "fp16" else "bfloat16"


def _check_ties(job: Job) -> None:
    """Raises UsageError for weights that several stages share, also on one rank: each would train its own."""
    stage_of = {layer: number for number, stage in enumerate(job.plan.stages, start=1) for layer in stage.layers}
    for layers in job.instance.tied_layers.values():
        stages = sorted({stage_of[layer] for layer in layers})
        if len(stages) > 1:
            raise UsageError(
                f"{' and '.join(map(job.named, layers))} have weights in common, and are in stages "
                f"{' and '.join(map(str, stages))}: torch would train each stage's apart; expected a plan with them in "
                "one stage (solve --stages 1), or a model with weights apart"
            )
