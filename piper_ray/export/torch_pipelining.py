"""torch.distributed.pipelining: stages by module path, the schedule's list of passes, and a script that runs both."""

from __future__ import annotations

from piper_ray.export.actions import actions_csv
from piper_ray.export.files import Export, json_text
from piper_ray.export.job import Job
from piper_ray.export.stage_documents import calls_of
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural, printable
from piper_ray.model.recomputation import Recomputation
from piper_ray.model.trained_model import TrainedModel
from piper_ray.run.exported_files import LISTS, STAGES
from piper_ray.version import __version__

_WHOLE_BYTES = 4.0
"""Of a weight in fp32."""

_SCRIPT = f'''"""The plan for torch.distributed.pipelining: build(...) gives a rank its schedule, as README.md says."""

from pathlib import Path

try:
    from piper_ray.run import exported
    from piper_ray.run.exported_files import read_folder
except ModuleNotFoundError as error:
    needed = "pipeline.py needs piper-ray {__version__} or later with torch: pip install 'piper-ray[torch]'"
    raise ModuleNotFoundError(f"{{error}}; {{needed}}", name=error.name) from error

PLAN = read_folder(Path(__file__).resolve().parent)


def mesh(device_type):
    """(pp, dp), for a world of as many ranks as the plan has."""
    return exported.make_mesh(PLAN, device_type)


def build(model, device, mesh, loss, inputs, target=None):
    """The schedule of this rank's stages, and their modules.

    model: whole, on the CPU. loss: of what the model returns and the target. inputs, target: of one microbatch.
    """
    return exported.build(PLAN, model, device, mesh, loss, inputs, target)
'''

_USAGE = """\
Each rank runs `YOUR-SCRIPT.py`, with this folder on PYTHONPATH:

```python
import pipeline

mesh = pipeline.mesh("cuda")
schedule, parts = pipeline.build(model, device, mesh, loss, inputs, target)
optimizer = torch.optim.AdamW([one for part in parts for one in part.parameters()])
for inputs, target in batches:
    losses = []
    schedule.step(inputs, target=target, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
```

- Each node needs piper-ray with torch: `pip install 'piper-ray[torch]'`. `build` cuts the model as `piper-ray run`
  does: it traces one forward pass and gives each stage its layers with all that happens between them, such as
  activations, norms and residual sums.
- `model` is the whole model, on the CPU, with the same modules on every rank. `build` moves this rank's stages to
  `device`; where the model is not needed any more, `del model` frees the others.
- `build` takes the `inputs` of one microbatch ({samples}), as the model gets them: a tensor, a tuple of positional
  arguments or a dict of named ones; and the `target` of that microbatch. `loss(output, target)` gets what the model
  returns, and returns one number: the mean over the microbatch. The target may be left out if the loss does not use it.
- The graph is good for inputs of these shapes. What the model's code asks of sizes, of plain values and of its mode is
  answered once, when it is traced: call `model.train()` before. Give the model its precision, as by
  `model.to(torch.bfloat16)`, rather than `torch.autocast`: stages have room for tensors of the types that were traced.
- `step` takes the batch of this replica: {microbatches} of {samples}, one after the other along the first side, as
  `step(*positional, target=..., **named)`. Ranks of one replica get the same batch, replicas different ones. A rank
  whose stages read no inputs may leave them out, and only the last stage needs the target. A tensor of the shape that
  `build` was given is the same for each microbatch.
- After `step` every parameter has the gradient of the mean of the losses of the whole batch, over all replicas: nothing
  else is to be called. Clear the gradients before the next step. `losses` gets the loss of each microbatch, where the
  last stage is.
- Replicas begin with the weights of the first one. For masks of dropout that differ between replicas, and are the same
  in each run, seed each rank after `build` with a number of its own: `torch.manual_seed(seed + rank)`.
"""


def stage_documents(job: Job) -> list[dict[str, object]]:
    """Each stage's modules by path, which of the calls of that module it is, whether it is recomputed, and the stage's
    rank. Raises UsageError where a path lacks."""
    rank_of = {
        stage: rank
        for rank in range(job.pipeline_ranks)
        for stage in job.schedule.stages_of_rank(rank, job.pipeline_ranks)
    }
    calls = calls_of(job.instance)
    documents: list[dict[str, object]] = []
    for number, (stage, recomputed) in enumerate(zip(job.plan.stages, job.recomputed_layers, strict=True)):
        layers = job.in_order(stage.layers)
        for layer in layers:
            found = job.instance.layer_by_id[layer]
            if not found.path:
                raise UsageError(
                    f'layer {layer} ("{printable(found.name)}") has no path: torch cuts a model by the names of its '
                    "modules, which workloads of piper-ray profile and estimate have"
                )
        documents.append(
            {
                "stage": number,
                "pipeline_rank": rank_of[number],
                "modules": [job.instance.layer_by_id[layer].path for layer in layers],
                "calls": [calls[layer] for layer in layers],
                "recomputed": [recomputed[layer] == Recomputation.FULL for layer in layers],
            }
        )
    return documents


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
    document = {
        "pipeline_ranks": job.pipeline_ranks,
        "data_parallel_degree": job.data_parallel_degree,
        "optimizer_shards": job.setting.optimizer_shards,
        "microbatches": job.microbatches,
        "microbatch_samples": job.microbatch_samples,
        "global_batch_samples": job.global_batch_samples,
        **job.schedule.to_dict(),
        **({} if model is None else {"weight_type": _weight_type(model)}),
        "stages": stage_documents(job),
    }
    files = {STAGES: json_text(document), LISTS: actions_csv(job), "pipeline.py": _SCRIPT}
    command = f"{job.torchrun} YOUR-SCRIPT.py  # which calls pipeline.build"
    notes = ["each node needs piper-ray with torch: pip install 'piper-ray[torch]'"]
    if job.setting.optimizer_shards > 1:
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
    usage = _USAGE.format(
        samples=plural(job.microbatch_samples, "sample"), microbatches=f"{job.microbatches} microbatches"
    )
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
