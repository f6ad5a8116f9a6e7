"""Plans that name each stage's modules by path: for no particular runtime (YAML), and for torch.distributed.pipelining,
with the schedule's list of actions and a script that runs both. Also reads them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
from pydantic import Field

from piper_ray.export.files import Export, json_text, noted, rendered, yaml_text
from piper_ray.export.flags import TORCH
from piper_ray.export.job import ExportJob
from piper_ray.export.run_as import check_batch
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.fields import plain_fields
from piper_ray.model.figures import plural, printable
from piper_ray.model.instance import Instance, Layer, Tmpc, TrainedModel
from piper_ray.model.mode import ALL_REPLICAS, Mode, Recomputation, Sharding
from piper_ray.model.one_mode import tmpcs_under
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.run.exported_files import LISTS, STAGES
from piper_ray.run.job import pass_lists
from piper_ray.run.lists import torch_lists
from piper_ray.simulate.actions import ActionKind
from piper_ray.simulate.run import simulate
from piper_ray.version import __version__
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.fields import Count, Open
from piper_ray.workloads.formats.surroundings import read_schedule


class _Module(Open):
    path: str = Field(description="a text")
    configuration: str = Field(description="the id of a TMPC")


class _StageRow(Open):
    """A row of a stage; its modules are read one by one. calls: for each module, the number of its call."""

    modules: list[Any] = Field(min_length=1, description="a list of modules")
    recomputed: list[bool] | None = Field(default=None, description="a list of true or false for each module")
    calls: list[int] | None = Field(default=None, description="a list of whole numbers, one for each module")


class _Document(Open):
    data_parallel_degree: Count
    tensor_parallel_degree: Count = 1
    context_parallel_degree: Count = 1
    optimizer_shards: Count = 1
    microbatch_samples: Count | None = None
    global_batch_samples: Count | None = None
    stages: list[_StageRow] = Field(min_length=1, description="a list of stages")


def _said(job: ExportJob, *keys: str) -> dict[str, object]:
    return {flag.name: getattr(job, flag.says) for flag in TORCH.written if flag.name in keys}


def export_yaml(job: ExportJob) -> Export:
    """``plan.yaml``, for no particular runtime."""
    stages = [
        {
            "pipeline_rank": rank,
            "modules": [
                {
                    "path": _module_of(job.instance.layer_by_id[layer]),
                    "configuration": stage.tmpc_ids[layer],
                    "recomputation": job.recomputation_of(layer).id,
                }
                for layer in job.in_order(stage.layers)
            ],
        }
        for rank, stage in zip(job.rank_of_stage, job.plan.stages, strict=True)
    ]
    document = {
        "model": job.instance.name,
        **job.schedule.to_dict(),
        **_said(job, "pipeline_ranks", "data_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"),
        **_said(job, "expert_parallel_degree", "expert_tensor_parallel_degree", "sequence_parallel"),
        "gathered_tensors_kept": job.setting.gathered,
        **_said(job, "optimizer_shards"),
        "shared_by_replicas": job.setting.sharding.name.lower(),
        "offload": job.setting.offload,
        "microbatches_per_replica": job.microbatches,
        **_said(job, "microbatch_samples", "global_batch_samples", "tokens_per_sample"),
        **_trained(job.instance.model),
        "stages": stages,
    }
    nameless = [layer.id for layer in job.instance.layers if not layer.path]
    notes = noted("yaml_notes.jinja", job=job, nameless=nameless)
    return Export({"plan.yaml": yaml_text(document)}, "none: plan.yaml is for a launcher of your own", notes)


def _trained(model: TrainedModel | None) -> dict[str, object]:
    """How the model is trained; empty if unknown."""
    if model is None:
        return {}
    return {
        "precision": model.precision,
        "adapter_rank": model.lora_rank,
        **plain_fields(model, ("weight_bytes", "gradient_bytes", "optimizer_bytes", "optimizer_on_host")),
    }


def stages_text(job: ExportJob, further: Mapping[str, object]) -> str:
    """``stages.json``: for each module of a stage also the number of its call, and whether it is recomputed.

    further: additional entries.
    """
    calls = calls_of(job.instance)
    stages = []
    for number, stage in enumerate(job.plan.stages):
        layers = job.in_order(stage.layers)
        stages.append(
            {
                "stage": number,
                "pipeline_rank": job.rank_of_stage[number],
                "modules": [_module_of(job.instance.layer_by_id[layer]) for layer in layers],
                "calls": [calls[layer] for layer in layers],
                "recomputed": [job.recomputation_of(layer) == Recomputation.FULL for layer in layers],
            }
        )
    document = {
        **_said(job, "pipeline_ranks", "data_parallel_degree", "optimizer_shards"),
        "microbatches": job.microbatches,
        **_said(job, "microbatch_samples", "global_batch_samples"),
        **job.schedule.to_dict(),
        **further,
        "stages": stages,
    }
    return json_text(document)


def _module_of(layer: Layer) -> str:
    """The layer's path; for a layer without one, a name that identifies it."""
    return layer.path or f"layer {layer.id}"


def calls_of(instance: Instance) -> dict[int, int]:
    """For each layer the number of its module's call. Layers of one module are its calls, in the order of their ids."""
    seen: Counter[str] = Counter()
    calls = {}
    for layer in sorted(instance.layers, key=lambda layer: layer.id):
        calls[layer.id] = seen[layer.path] if layer.path else 0
        seen[layer.path] += 1
    return calls


def is_stage_document(document: Mapping[str, object]) -> bool:
    """Whether the document has this form."""
    return {"stages", "data_parallel_degree"} <= document.keys()


def read_stage_document(source: str, document: Mapping[str, object], instance: Instance) -> tuple[Plan, Schedule]:
    """The plan and its schedule. Raises InputError with every fault found, UsageError for another batch."""
    faults = Faults()
    read = faults.model(_Document, document, "")
    schedule = read_schedule(
        document.get("schedule"), document.get("chunks"), document.get("group"), "schedule", faults
    )
    if read is None or faults:
        raise InputError(source, faults.found)
    check_batch(instance, source, read.model_dump())
    d, t = read.data_parallel_degree, read.tensor_parallel_degree * read.context_parallel_degree
    layer_of = {(_module_of(instance.layer_by_id[layer]), call): layer for layer, call in calls_of(instance).items()}
    met: Counter[str] = Counter()
    stages = []
    for number, stage in enumerate(read.stages):
        chosen: dict[int, str] = {}
        recomputed, calls = ((given or [])[: len(stage.modules)] for given in (stage.recomputed, stage.calls))
        for index, (raw, recomputes, call) in enumerate(zip_longest(stage.modules, recomputed, calls)):
            where = f"stages[{number}].modules[{index}]"
            module = None if isinstance(raw, str) else faults.model(_Module, raw, where)
            path = raw if isinstance(raw, str) else "" if module is None else module.path
            layer = layer_of.get((path, met[path] if call is None else call))
            met[path] += 1
            if layer is None:
                if path:
                    again = "" if met[path] == 1 else f" {met[path]} times"
                    faults.at(where, f"{path!r} is no layer here{again}; expected the path of a layer of the workload")
                continue
            row = instance.layer_by_id[layer].tmpcs.get(t, ())
            setting = Mode(
                Recomputation.FULL if recomputes else Recomputation.NONE,
                optimizer_shards=_known_shards(row, read.optimizer_shards, d),
            )
            tmpc = _tmpc(row, None if module is None else module.configuration, setting)
            if tmpc is None:
                asked = "none" if module is None else f"none of the id {module.configuration!r}"
                faults.at(where, f"of the TMPCs of {path} at tensor-parallel degree {t} there is {asked}")
            else:
                chosen[layer] = tmpc.id
        ordered = tuple(layer.id for layer in instance.layers if layer.id in chosen)
        stages.append(Stage(ordered, d, t, {layer: chosen[layer] for layer in ordered}))
    if faults:
        raise InputError(source, faults.found)
    return Plan(tuple(stages), keeps_order=True), Schedule.first_of(schedule, instance.schedule)


def _known_shards(row: tuple[Tmpc, ...], shards: int, replicas: int) -> int:
    """The number of shards in the form of the TMPCs' modes: a number, or all replicas."""
    of_state = {tmpc.mode.shares for tmpc in row}
    over_all = shards == replicas > 1 and (Sharding.OPTIMIZER, shards) not in of_state
    return ALL_REPLICAS if over_all else shards


def _tmpc(row: tuple[Tmpc, ...], wanted: str | None, setting: Mode) -> Tmpc | None:
    """The TMPC with this id; without an id, the simplest one that fits the mode."""
    if wanted is not None:
        return next((tmpc for tmpc in row if tmpc.id == wanted), None)
    return next(iter(tmpcs_under(row, setting)), None)


_WHOLE_BYTES = 4.0
"""The bytes of a weight in fp32."""

ONE_STAGE = frozenset({ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B})
"""Schedules that torch runs without a list, with one stage on each rank."""

_MOST_PASSES = 5_000_000


def actions_csv(job: ExportJob) -> str:
    """``0F0,0SEND_F0,0F1,...``: stage, action, microbatch, in the format "compute_comms" of torch's ``_load_csv``.

    Receives are posted when their data are produced, by the plan's times. On NCCL all sends and receives of a rank
    share one stream, and receives that torch itself would post delay others. Raises UsageError for lists with too many
    passes.
    """
    passes = 3 * job.microbatches * len(job.plan.stages)
    if passes > _MOST_PASSES:
        raise UsageError(
            f"a list of {passes:,} passes is more than torch is given here; expected at most {_MOST_PASSES:,}: "
            "fewer microbatches, or a larger data-parallel degree"
        )
    lists = pass_lists(job.schedule, job.pipeline_ranks, job.microbatches)
    timeline = simulate(job.instance, job.plan, job.schedule).timeline
    seconds = np.zeros((len(job.plan.stages), len(ActionKind)))
    seconds[timeline.stage, timeline.kind] = timeline.end_s - timeline.start_s
    return "".join(f"{','.join(own)}\n" for own in torch_lists(lists, seconds))


def export_torch(job: ExportJob) -> Export:
    """The files and their usage. Raises UsageError for layers without paths, and for weights that stages share."""
    model = job.instance.model
    _check_ties(job)
    for layer in job.instance.layers:
        if not layer.path:
            raise UsageError(
                f'layer {layer.id} ("{printable(layer.name)}") has no path: torch cuts a model by the names of its '
                "modules, which workloads of piper-ray profile and estimate have"
            )
    files = {
        STAGES: stages_text(job, {} if model is None else {"weight_type": _weight_type(model)}),
        LISTS: actions_csv(job),
        "pipeline.py": rendered("torch_pipeline.py.jinja", version=__version__),
    }
    command = f"{job.torchrun} YOUR-SCRIPT.py  # which calls pipeline.build"
    notes = noted("torch_notes.jinja", job=job, model=model)
    samples = plural(job.microbatch_samples, "sample")
    usage = rendered("torch_usage.md.jinja", samples=samples, microbatches=job.microbatches)
    return Export(files, command, notes, usage=usage)


def _weight_type(model: TrainedModel) -> str:
    """PyTorch's name of the weights' type."""
    if model.weight_bytes == _WHOLE_BYTES:
        return "float32"
    return "float16" if model.precision == "fp16" else "bfloat16"


def _check_ties(job: ExportJob) -> None:
    """Raises UsageError for weights that several stages share, even on one rank, because each would train its own."""
    stage_of = {layer: number for number, stage in enumerate(job.plan.stages, start=1) for layer in stage.layers}
    for layers in job.instance.tied_layers.values():
        stages = sorted({stage_of[layer] for layer in layers})
        if len(stages) > 1:
            raise UsageError(
                f"{' and '.join(map(job.named, layers))} have weights in common, and are in stages "
                f"{' and '.join(map(str, stages))}: torch would train each stage's apart; expected a plan with them in "
                "one stage (solve --stages 1), or a model that does not tie them"
            )
