"""FlagScale's system section: meshes, layers of each stage, and recomputation of each stage; and what starts it. Both
written and read.

Read in the source of FlagScale 1.0, whose Megatron-LM is 0.15 (third_party/Megatron-LM): all names that are written are
those of its arguments (flagscale/train/arguments.py, flagscale/backends/Megatron-LM, flagscale/runner).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from piper_ray.export.files import Export, noted, yaml_text
from piper_ray.export.job import ExportJob
from piper_ray.export.megatron import (
    CONNECTIONS,
    asks_for_connections,
    context_settings,
    overlap_settings,
    precision_settings,
)
from piper_ray.export.megatron_arguments import read_values
from piper_ray.export.megatron_bridge import read_fields
from piper_ray.export.megatron_flags import READ_FLAGS, Settings, said_by
from piper_ray.export.megatron_layout import with_ends
from piper_ray.export.megatron_model import model_settings, require_megatron_model
from piper_ray.export.run_as import ReadLayout
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Recomputation
from piper_ray.runtimes.pieces import ModelPieces


def export_flagscale(job: ExportJob) -> Export:
    """``system.yaml`` and ``experiment.yaml``, to be merged into the task's own.

    Raises UsageError for what FlagScale has no setting for.
    """
    if job.pieces.predictors:
        raise UsageError(
            "FlagScale's hetero_pipeline_layer_split counts decoder layers alone, and this model predicts further "
            "tokens (one whose config has num_nextn_predict_layers = 0 does not)"
        )
    counts = job.first_recomputed
    if counts is None:
        raise UsageError(
            "FlagScale recomputes the first layers of each stage in full, or none; this plan does otherwise"
        )
    split = [sum(map(job.pieces.is_block, stage)) for stage in job.pieces_of_stages]
    hetero: dict[str, object] = {
        "enable_hetero": True,
        _SPLIT: split,
        _MESHES: [getattr(job, name) or 1 for name in _MESH],
        "hetero_device_types": [_DEVICE],
        "hetero_current_device_type": _DEVICE,
        "standalone_embedding_stage": False,
    }
    system: dict[str, object] = {
        **said_by(job, *_DIVIDED, "sequence_parallel"),
        "use_distributed_optimizer": job.optimizer_shards > 1,
        **context_settings(job),
        **overlap_settings(job),
        **({} if job.instance.model is None else precision_settings(job, job.instance.model)),
        "hetero": hetero,
    }
    if job.expert_parallel is not None:
        system |= said_by(job, "expert_model_parallel_size", "expert_tensor_parallel_size")
        hetero["expert_tensor_parallel_size_per_process_mesh"] = [job.expert_tensor]
    if any(counts):
        system["recompute"] = {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": max(counts),
            "recompute_granularity_per_stage_micro_batch": [[1, job.microbatches, int(count > 0)] for count in counts],
            "recompute_method_per_stage_micro_batch": [[1, job.microbatches, 1] for _ in counts],
            _RECOMPUTED: [[1, job.microbatches, count] for count in counts],
        }
    model = {
        **said_by(job, "num_layers"),
        **_model(job),
        **said_by(job, "micro_batch_size", "global_batch_size", "seq_length"),
    }
    empty = [number for number, count in enumerate(split, start=1) if count == 0]
    notes = noted("flagscale_notes.jinja", job=job, device=_DEVICE, empty=empty)
    files = {
        "system.yaml": yaml_text({"system": system, "model": model}),
        "experiment.yaml": yaml_text({"experiment": _experiment(job)}),
    }
    command = (
        f"{'HOSTFILE=... ' if job.nodes > 1 else ''}flagscale train ... with system.yaml's sections merged into the "
        "task's train configuration, and experiment.yaml's into the one above it"
    )
    return Export(files, command, notes)


_DEVICE = "GPU"
_SOURCE = "FlagScale system"
_SECTIONS_DEEP = 4
_MESHES, _SPLIT = "hetero_process_meshes", "hetero_pipeline_layer_split"
_RECOMPUTED = "recompute_num_layers_per_stage_micro_batch"

_DIVIDED = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_MESH = ("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel", "pipeline_ranks")
"""Figures of a plan, by their names in a ``ExportJob`` and in ``RunAs``, in the order of a mesh."""


def _experiment(job: ExportJob) -> dict[str, object]:
    """How many processes there are on which nodes. OmegaConf refuses to go on without HOSTFILE."""
    runner: dict[str, object] = {
        "backend": "torchrun", "nnodes": job.nodes, "nproc_per_node": job.processes_per_node,
    }  # fmt: skip
    if job.nodes > 1:
        runner["hostfile"] = "${oc.env:HOSTFILE}"
    if asks_for_connections(job):
        return {"runner": runner, "envs": {CONNECTIONS: 1}}
    return {"runner": runner}


def _model(job: ExportJob) -> Settings:
    """The model's arguments, which FlagScale takes by Megatron's names; empty where nobody knows the model."""
    model = job.instance.model
    if model is None:
        return {}
    if model.lora_rank:
        raise UsageError(
            "the export for FlagScale writes no adapters (LoRA), and this plan has some; Megatron-Bridge's does "
            "(--to megatron-bridge)"
        )
    settings = model_settings(require_megatron_model(model))
    if settings.get("moe_shared_expert_gate"):
        raise UsageError("Megatron in FlagScale (0.15) has no gate of shared experts, and this model has one")
    return settings


def read_sections(document: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout | None:
    """Of a YAML whose sections have Megatron's names: FlagScale's, or a Megatron-Bridge config's. None for another."""
    values = _flat(document)
    if not values.keys() & {"tensor_model_parallel_size", "pipeline_model_parallel_size"}:
        return None
    if values.get(_MESHES) is None:
        return read_fields(values, pieces, instance)
    return _of_meshes(values, pieces, instance)


def _flat(document: Mapping[str, object], depth: int = _SECTIONS_DEEP) -> dict[str, object]:
    """What stands in all sections, by its own name."""
    found: dict[str, object] = {}
    for name, value in document.items():
        if not isinstance(value, Mapping):
            found[str(name)] = value
        elif depth > 1:
            found |= _flat(value, depth - 1)
    return found


def _of_meshes(values: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """Layers of each stage by count, recomputation by stage. Raises UsageError."""
    mesh = values[_MESHES]
    if not _are_counts(mesh) or len(mesh) != len(_MESH):
        raise UsageError(f"{_SOURCE}: {_MESHES}: {mesh}; expected one mesh: [t, cp, ep, dp, pp]")
    said = dict(zip(_MESH, mesh, strict=True))
    for name in _DIVIDED:
        if values.get(name, size := said[READ_FLAGS[name].says]) != size:
            raise UsageError(f"{_SOURCE}: {name}: {values[name]}, but {_MESHES} has {size}")
    ranks, split = said["pipeline_ranks"], values.get(_SPLIT)
    if not _are_counts(split, least=0) or len(split) != ranks or sum(split) != pieces.blocks:
        raise UsageError(f"{_SOURCE}: {_SPLIT}: {split}; expected {ranks} numbers, {pieces.blocks} together")
    common = {name: value for name, value in values.items() if not name.startswith("recompute_")}
    read = read_values(common, pieces, instance, with_ends(split, pieces.predictors))
    run_as = replace(read.run_as, data_parallel=said["data_parallel"], expert_parallel=said["expert_parallel"])
    if (counts := values.get(_RECOMPUTED)) is not None:
        if not isinstance(counts, list) or len(counts) != ranks or not all(_is_one_span(x) for x in counts):
            raise UsageError(
                f"{_SOURCE}: {_RECOMPUTED}: {counts}; expected {ranks} lists such as [1, 16, 2]: the same for all "
                "microbatches"
            )
        run_as = replace(run_as, recomputation=Recomputation.FULL, recomputed_layers=tuple(x[2] for x in counts))
    return replace(read, run_as=run_as, names=frozenset(values.keys() & READ_FLAGS.keys()))


def _are_counts(value: object, least: int = 1) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= least for one in value)


def _is_one_span(value: object) -> TypeGuard[list[int]]:
    """One setting for all microbatches: ``[1, 16, 2]``."""
    return _are_counts(value, least=0) and len(value) == 3
