"""The settings of a plan as Megatron's arguments, by their names in Python (parallelism, batch, recomputation,
precision), and the files that contain them: for Megatron-LM's ``pretrain_gpt.py``; for a Megatron-Bridge recipe, as a
module whose ``apply`` sets its fields and refuses another model; and for FlagScale, as meshes, layers and recomputation
of each stage.

FlagScale's names come from the source of FlagScale 1.0, whose Megatron-LM is 0.15 (third_party/Megatron-LM): all
written names are arguments there (flagscale/train/arguments.py, flagscale/backends/Megatron-LM, flagscale/runner).
"""

from __future__ import annotations

from collections.abc import Mapping

from piper_ray.export.files import Export, noted, rendered, resource, yaml_text
from piper_ray.export.flags import DISPATCHERS, MEGATRON, Settings, Value, flag_of, true_ones
from piper_ray.export.job import ExportJob
from piper_ray.export.megatron_layout import layout_text, stage_letters
from piper_ray.export.megatron_model import model_settings, require_divided, require_megatron_model, unsaid
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import TrainedModel
from piper_ray.model.mode import Recomputation
from piper_ray.runtimes.meshes import Mesh
from piper_ray.workloads.estimate.architectures.layers import Attention, LatentAttention
from piper_ray.workloads.estimate.architectures.state_space import DeltaNet
from piper_ray.workloads.estimate.decoder_shape import DecoderShape, decoder_shape
from piper_ray.workloads.estimate.software import ContextExchange, TokenDispatcher

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def export_megatron(job: ExportJob) -> Export:
    """``megatron.args``, ``training.args`` and ``launch.sh``; without the model's arguments if the model is unknown.

    Raises UsageError for a plan or a model that Megatron has no arguments for.
    """
    settings = _plan_settings(job) | _overlap_settings(job)
    model = job.instance.model
    left_out: list[str] = []
    if model is not None:
        shape = require_megatron_model(model)
        require_divided(shape, job.tensor_parallel, job.expert_tensor)
        settings |= model_settings(shape) | _precision_settings(job, model)
        left_out += unsaid(shape)
    known = model is not None
    files = {
        "megatron.args": _arguments_text(settings),
        **({"training.args": resource("training.args")} if known else {}),
        "launch.sh": rendered("megatron_launch.sh.jinja", job=job, known=known, connections=_asks_for_connections(job)),
    }
    command = f"bash launch.sh {'DATA [ARGUMENTS...]' if known else 'MODEL-ARGUMENTS...'}"
    return Export(files, command, noted("megatron_notes.jinja", job=job, unsaid=left_out, bridge=False))


def _asks_for_connections(job: ExportJob) -> bool:
    """Whether Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1, as it does on GPUs up to Hopper."""
    model = job.instance.model
    return (job.tensor_parallel > 1 or job.context_parallel > 1) and not (model is not None and model.on_blackwell)


def _figures(job: ExportJob) -> dict[str, Value]:
    """The flags that state figures of a plan, with the plan's values; flags without a value are left out."""
    known = {flag.name: getattr(job, flag.says) for flag in MEGATRON.written if flag.says}
    if job.expert_parallel is None:
        del known["expert_tensor_parallel_size"]
    return {name: value for name, value in known.items() if value is not None}


def _arguments_text(settings: Settings) -> str:
    """One line for each flag, with its value; a switch stands alone."""
    lines = []
    for name, value in settings.items():
        words = value if isinstance(value, tuple) else (f"{value:g}" if isinstance(value, float) else str(value),)
        lines.append(" ".join([flag_of(name), *(() if value is True else words)]) + "\n")
    return "".join(lines)


def _plan_settings(job: ExportJob) -> Settings:
    """The flags of a plan. Raises UsageError for a plan that Megatron has no arguments for."""
    found = _figures(job)
    if job.pipeline_ranks > 1:
        found["pipeline_model_parallel_layout"] = layout_text(stage_letters(job.pieces, job.pieces_of_stages))
    found["use_distributed_optimizer"] = job.optimizer_shards > 1
    found |= _recomputation(job) | _context_settings(job) | _dispatcher_settings(job)
    return true_ones({flag.name: found[flag.name] for flag in MEGATRON.written if flag.name in found})


_CONTEXT = {ContextExchange.RING: "p2p", ContextExchange.ALL_GATHER: "all_gather", ContextExchange.ALL_TO_ALL: "a2a"}


def _context_settings(job: ExportJob) -> Settings:
    """How groups that share a sequence exchange keys and values, if the workload states it. Raises UsageError if no
    kernel supports it."""
    model = job.instance.model
    if job.context_parallel == 1 or model is None:
        return {}
    exchange, shape = ContextExchange(model.context_exchange), decoder_shape(model)
    if shape is not None and (fault := shape.context_fault(exchange)) is not None:
        raise UsageError(fault)
    return {"cp_comm_type": _CONTEXT[exchange]}


def _dispatcher_settings(job: ExportJob) -> Settings:
    """How tokens reach experts, if the workload states it: DeepEP within nodes, HybridEP if links join several
    nodes."""
    if job.dispatcher is None:
        return {}
    found: Settings = {"moe_token_dispatcher_type": DISPATCHERS[job.dispatcher]}
    if job.dispatcher is TokenDispatcher.ONCE_PER_NODE:
        found["moe_flex_dispatcher_backend"] = "hybridep" if job.links_join_nodes else "deepep"
    return found


def _recomputation(job: ExportJob) -> dict[str, Value]:
    """The setting for all layers: the first k layers of each chunk, all layers, or the same parts of all."""
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


def _overlap_settings(job: ExportJob) -> Settings:
    """Switches for the overlaps that the plan's times assume."""
    software = job.software
    found: dict[str, Value] = {}
    if software is not None and software.gradient_overlap and job.weight_replicas > 1:
        found["overlap_grad_reduce"] = True
        found["overlap_param_gather"] = job.optimizer_shards > 1
    found["tp_comm_overlap"] = job.hides_tensor_exchanges and job.sequence_parallel
    return true_ones(found)


def _precision_settings(job: ExportJob, model: TrainedModel) -> Settings:
    """The precision of products, of summed gradients, and of the optimizer's state.

    Raises UsageError for bytes per parameter that no arguments can set.
    """
    found: dict[str, Value] = {"fp16" if model.precision == "fp16" else "bf16": True}
    if model.precision == "fp8":
        found |= {"fp8_format": "hybrid", "fp8_recipe": _fp8_recipe(model)}
    if model.precision == "fp16":
        found["accumulate_allreduce_grads_in_fp32"] = model.gradient_bytes == 4.0
    else:
        found["grad_reduce_in_bf16"] = model.gradient_bytes == 2.0
    found |= _OPTIMIZERS[model.optimizer_bytes]
    if model.optimizer_on_host:
        found |= _ON_HOST
    if "use_precision_aware_optimizer" in found:  # in Megatron it has to be a distributed optimizer
        if job.optimizer_shards == 1 and job.data_parallel > 1:
            raise UsageError(
                f"Megatron keeps {model.optimizer_bytes:g} bytes of optimizer state a parameter where replicas share "
                "it, and the plan's do not; expected estimate --zero all"
            )
        found["use_distributed_optimizer"] = True
    return true_ones(found)


def _fp8_recipe(model: TrainedModel) -> str:
    """How 8-bit products are scaled: by blocks, or by tensors."""
    return "mxfp8" if model.on_blackwell else "tensorwise"


_OPTIMIZERS: dict[float, Settings] = {
    12.0: {},
    8.0: {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
}
"""The settings of optimizers by their bytes per parameter: fp32 weights and moments; moments in bf16."""


_ON_HOST: Settings = {
    "use_precision_aware_optimizer": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
"""What Megatron requires with --optimizer-cpu-offload, and what its guide recommends."""


_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}


def export_bridge(job: ExportJob) -> Export:
    """``piper_plan.py``. Raises UsageError for a plan that Megatron has no fields for, or for a model that is not a
    decoder."""
    model = job.instance.model
    planned: dict[str, object] = {"num_layers": job.blocks}
    precision, rank = None, 0
    if model is not None:
        shape = require_bridge_model(model)
        planned |= _bridge_model(shape)
        precision = _PRECISIONS[_fp8_recipe(model) if model.precision == "fp8" else model.precision]
        rank = model.lora_rank
    script = rendered(
        "megatron_bridge.py.jinja",
        planned=_literals(planned),
        fields=_literals(_bridge_fields(job)),
        precision=precision,
        half_gradients=model is not None and model.gradient_bytes == 2.0 and model.precision != "fp16",
        adapter_rank=rank,
        overlaps_experts=job.overlaps_experts,
        overlaps=job.hides_tensor_exchanges and job.sequence_parallel,
    )
    connections = f"{_CONNECTIONS}=1 " if _asks_for_connections(job) else ""
    command = (
        f"{connections}{job.torchrun} YOUR-SCRIPT.py  # which calls piper_plan.apply(cfg) before pretrain(cfg, ...)"
    )
    return Export({"piper_plan.py": script}, command, noted("megatron_notes.jinja", job=job, unsaid=[], bridge=True))


def require_bridge_model(model: TrainedModel) -> DecoderShape:
    """A decoder whose blocks a layout can place. Raises UsageError for other models, and adapters of routers."""
    shape, named = decoder_shape(model), model.config.get("model_type")
    if shape is None:
        raise UsageError(f"the plan's layouts are for text decoders, and {named} is not one")
    if any(not isinstance(part, (Attention, LatentAttention, DeltaNet)) for part in shape.mixing):
        raise UsageError(f"Megatron takes no layout for a model with state spaces or convolutions ({named})")
    if model.lora_rank and shape.experts is not None:
        raise UsageError("Megatron-Bridge adapts no routers (LoRA), and the plan counts adapters of these, too")
    return shape


def _bridge_fields(job: ExportJob) -> dict[str, object]:
    """The fields of the config, including those that the plan does not set, because a recipe may set them for another
    layout."""
    settings = _plan_settings(job) | _overlap_settings(job)
    usual: dict[str, object] = {
        "expert_model_parallel_size": 1,
        "microbatch_group_size_per_virtual_pipeline_stage": job.pipeline_ranks,
    }
    unsaid = ["seq_length", *([] if job.dispatcher else ["moe_token_dispatcher_type", "moe_flex_dispatcher_backend"])]
    found: dict[str, object] = {}
    for flag in MEGATRON.written:
        value: object = settings.get(flag.name, usual.get(flag.name, False if flag.kind == "switch" else None))
        if isinstance(value, tuple):
            value = list(value)
        if value is not None or flag.name not in unsaid:
            found |= dict.fromkeys(flag.fields, value)
    if job.optimizer_on_host:
        found |= {f"optimizer.{name}": value for name, value in _ON_HOST.items()}
    return found | {"model.virtual_pipeline_model_parallel_size": job.schedule.v if job.schedule.v > 1 else None}


def _bridge_model(shape: DecoderShape) -> dict[str, object]:
    """Fields of all of Bridge's recipes that identify a model."""
    config = shape.config
    found: dict[str, object] = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
    }
    if (experts := shape.experts) is not None:
        found |= {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.inner,
        }
    else:
        found["ffn_hidden_size"] = config.inner
    return found


def _literals(values: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, f'"{value}"' if isinstance(value, str) else repr(value)) for name, value in values.items()]


def export_flagscale(job: ExportJob) -> Export:
    """``system.yaml`` and ``experiment.yaml``, to be merged into those of the task.

    Raises UsageError for settings that FlagScale does not have.
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
    types = _device_types(job)
    hetero: dict[str, object] = {
        "enable_hetero": True,
        "hetero_pipeline_layer_split": split,
        "hetero_process_meshes": [value for mesh in job.meshes for value in _mesh(job, mesh)],
        "hetero_device_types": types,
        "hetero_current_device_type": types[0],
        "standalone_embedding_stage": False,
    }
    figures = _figures(job)
    model = {name: figures.pop(name) for name in _OF_THE_MODEL if name in figures} | _flagscale_model(job)
    system: dict[str, object] = {
        **figures,
        "use_distributed_optimizer": job.optimizer_shards > 1,
        **_context_settings(job),
        **_flagscale_dispatcher(job),
        **_overlap_settings(job),
        **({} if job.instance.model is None else _precision_settings(job, job.instance.model)),
        "hetero": hetero,
    }
    if job.expert_parallel is not None:
        hetero["expert_tensor_parallel_size_per_process_mesh"] = [job.expert_tensor for _ in job.meshes]
    if any(counts):
        system["recompute"] = {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": max(counts),
            "recompute_granularity_per_stage_micro_batch": [[1, job.microbatches, int(count > 0)] for count in counts],
            "recompute_method_per_stage_micro_batch": [[1, job.microbatches, 1] for _ in counts],
            "recompute_num_layers_per_stage_micro_batch": [[1, job.microbatches, count] for count in counts],
        }
    empty = [number for number, count in enumerate(split, start=1) if count == 0]
    meshes = list(zip(types, job.meshes, strict=True))
    notes = noted("flagscale_notes.jinja", job=job, device=_DEVICE, empty=empty, meshes=meshes)
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


def _device_types(job: ExportJob) -> list[str]:
    """A name for each mesh. FlagScale orders ranks by their devices' names and then by nodes, so each mesh needs a name
    of its own, even if a kind has several meshes."""
    kinds = [mesh.kind for mesh in job.meshes]
    if not any(kinds):
        return [_DEVICE] * len(kinds)
    words = ["-".join(kind.split()) for kind in kinds]
    return [
        word if words.count(word) == 1 else f"{word}-{1 + words[:place].count(word)}"
        for place, word in enumerate(words)
    ]


def _mesh(job: ExportJob, mesh: Mesh) -> list[object]:
    """The degrees of a mesh, in FlagScale's order."""
    own = {"tensor_parallel": mesh.t // job.context_parallel, "pipeline_ranks": mesh.ranks}
    if job.setting.experts is None and job.experts:
        own["expert_parallel"] = own["tensor_parallel"]
    return [own.get(name) or getattr(job, name) or 1 for name in MEGATRON.mesh]


_OF_THE_MODEL = ("num_layers", "micro_batch_size", "global_batch_size", "seq_length")
"""Figures of a plan in FlagScale's section of the model; all others are in the section of the system."""


def _experiment(job: ExportJob) -> dict[str, object]:
    """The number of processes and nodes. OmegaConf requires HOSTFILE if there are several nodes."""
    runner: dict[str, object] = {
        "backend": "torchrun", "nnodes": job.nodes, "nproc_per_node": job.processes_per_node,
    }  # fmt: skip
    if job.nodes > 1:
        runner["hostfile"] = "${oc.env:HOSTFILE}"
    if _asks_for_connections(job):
        return {"runner": runner, "envs": {_CONNECTIONS: 1}}
    return {"runner": runner}


def _flagscale_dispatcher(job: ExportJob) -> Settings:
    """The dispatcher in the terms of FlagScale's Megatron, 0.15, which only has DeepEP."""
    found = _dispatcher_settings(job)
    return found | {"moe_enable_deepep": True} if found.pop("moe_flex_dispatcher_backend", None) else found


def _flagscale_model(job: ExportJob) -> Settings:
    """The model's arguments, for which FlagScale uses Megatron's names; empty if the model is unknown."""
    model = job.instance.model
    if model is None:
        return {}
    settings = model_settings(require_megatron_model(model))
    if settings.get("moe_shared_expert_gate"):
        raise UsageError("Megatron in FlagScale (0.15) has no gate of shared experts, and this model has one")
    return settings
