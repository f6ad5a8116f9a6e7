"""What each runtime's own code says of exported folders: asked and answered in JSON, by stdin and stdout.

A question is the name of a function below, a folder, and how many blocks the model has; a line has several. A process
of its own answers, as importing these runtimes changes warnings, environment and logging of whoever does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import shlex
import sys
import types
import unittest.mock
import warnings
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

ANSWERS = "answers: "
"""Begins the line of stdout that has those to a line of stdin; runtimes print lines of their own."""

EXPERTS = 8
"""Of the mixtures that tests export."""


def megatron(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """Launch arguments become a TransformerConfig, which reads the layout."""
    flags = _flags(folder)
    renamed = {"microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage"}
    known = (
        "num_layers", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "pipeline_model_parallel_layout", "sequence_parallel", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "recompute_modules", "expert_model_parallel_size", "expert_tensor_parallel_size",
        *renamed,
    )  # fmt: skip
    fields = {
        renamed.get(name, name): int(value) if str(value).isdecimal() else value
        for name, value in flags.items()
        if name in known
    }
    return _transformer_config(fields) | {"flags": sorted(flags)}


def _flags(folder: Path) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for line in (folder / "megatron.args").read_text().splitlines():
        flag, *values = shlex.split(line)
        name = flag.removeprefix("--").replace("-", "_")
        flags[name] = values if name == "recompute_modules" else values[0] if values else True
    return flags


def megatron_bridge(folder: Path, blocks: int) -> object:
    """``apply`` changes a config container, whose model part becomes a TransformerConfig."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    planned = _imported(folder, "piper_plan")
    model = types.SimpleNamespace(num_layers=None)
    cfg = types.SimpleNamespace(
        model=model,
        train=types.SimpleNamespace(),
        dataset=types.SimpleNamespace(),
        ddp=DistributedDataParallelConfig(),
        optimizer=OptimizerConfig(),
    )
    planned.apply(cfg)
    fields = {name: value for name, value in vars(model).items() if name != "seq_length"}
    layout = fields["pipeline_model_parallel_layout"]
    fields["num_layers"] = layers = blocks
    model.num_layers = layers + 1
    try:
        planned.apply(cfg)
        refused = False
    except ValueError:
        refused = True
    found = _transformer_config({name: value for name, value in fields.items() if value is not None})
    return found | {"given_layout": layout, "train": vars(cfg.train), "refuses_other_depth": refused}


def _transformer_config(fields: dict[str, Any]) -> dict[str, Any]:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    t = fields.get("tensor_model_parallel_size", 1)
    if "expert_model_parallel_size" in fields:
        fields = fields | {"num_moe_experts": EXPERTS, "add_bias_linear": False}
    config = TransformerConfig(hidden_size=64 * t, num_attention_heads=8 * t, pipeline_dtype=torch.bfloat16, **fields)
    layout = config.pipeline_model_parallel_layout
    stages = None
    if layout is not None:
        p, v = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
        stages = [[piece.name for piece in layout.layout[stage % p][stage // p]] for stage in range(p * v)]
    return {
        "stages": stages,
        "chunks": config.virtual_pipeline_model_parallel_size,
        "recompute": [
            config.recompute_granularity,
            config.recompute_method,
            config.recompute_num_layers,
            config.recompute_modules,
        ],
        "sequence_parallel": config.sequence_parallel,
        "group": config.microbatch_group_size_per_vp_stage,
        "context": config.context_parallel_size,
        "experts": [config.expert_model_parallel_size, config.expert_tensor_parallel_size],
    }


_OF_GPT_MODEL = (
    "vocab_size", "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent",
    "untie_embeddings_and_output_weights",
)  # fmt: skip
_OF_CONFIG = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}


def megatron_parameters(folder: Path, blocks: int) -> object:
    """Parameters of Megatron-Core's GPTModel as the arguments describe it, and those of its predictors apart.

    It is built without memory and without TransformerEngine, whose norms are parts of other modules. A text where
    Megatron-Core refuses it.
    """
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    flags = {name: _value(name, value) for name, value in _flags(folder).items()}
    torch.distributed.init_process_group(backend="fake", rank=0, world_size=1, store=FakeStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    try:
        model = _gpt_model(flags, blocks)
    except (ValueError, AssertionError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    further = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    return [sum(sizes.values()) - further, further]


def _value(name: str, value: Any) -> Any:
    """As Megatron-LM's parser makes it of an argument's text."""
    if not isinstance(value, str):
        return value
    if name == "window_size":
        return tuple(map(int, value.split(",")))
    if value.startswith("(["):
        return eval(value)
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def _gpt_model(flags: dict[str, Any], blocks: int) -> Any:
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    torch.cuda.current_device = lambda: torch.device("meta")  # where experts are made
    torch.cuda.Stream = lambda *_, **__: None
    plain = DotProductAttention.__init__

    def without_sizes(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:  # noqa: ARG001
        plain(self, *args, **kwargs)  # which has no parameters; latent attention's own is TransformerEngine's

    latent = "multi_latent_attention" in flags
    kind = MLATransformerConfig if latent else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    activations = {
        "swiglu": (torch.nn.functional.silu, True),
        "squared_relu": (lambda x: torch.nn.functional.relu(x) ** 2, False),
        "quick_geglu": (quick_gelu, True),
    }
    function, gated = next(
        (found for name, found in activations.items() if name in flags), (torch.nn.functional.gelu, False)
    )
    given = {_OF_CONFIG.get(name, name): value for name, value in flags.items()}
    apart = {"pipeline_model_parallel_layout", "moe_grouped_gemm", "window_size" if latent else ""}
    fields = {name: value for name, value in given.items() if name in known - apart and "_parallel" not in name}
    fields = {name: value for name, value in fields.items() if not name.startswith(("recompute", "fp8", "tp_comm"))}
    config = kind(
        **fields,
        add_bias_linear="disable_bias_linear" not in flags,
        activation_func=function,
        gated_linear_unit=gated,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        **({"apply_rope_fusion": False} if latent else {}),
    )
    with (
        torch.device("meta"),
        unittest.mock.patch.object(DotProductAttention, "__init__", without_sizes),
        unittest.mock.patch.object(multi_latent_attention, "TELinear", type("Absent", (), {})),
    ):
        norm = flags["normalization"]
        if config.num_moe_experts:
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm)
        else:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(
                qk_layernorm=config.qk_layernorm, multi_latent_attention=latent, normalization=norm
            )
        further = None
        if config.mtp_num_layers:
            last = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
            further = gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=False)
        assert config.num_layers == blocks
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=flags["vocab_size"],
            max_sequence_length=flags["max_position_embeddings"],
            position_embedding_type=flags["position_embedding_type"],
            rotary_percent=flags.get("rotary_percent", 1.0),
            rotary_base=flags.get("rotary_base", 10000),
            share_embeddings_and_output_weights="untie_embeddings_and_output_weights" not in flags,
            mtp_block_spec=further,
        )


def megatron_groups(folder: Path, blocks: int) -> object:
    """The ranks that share weights, sequences, experts and stages, by Megatron's own initialisation on ranks that are
    pretended: of rank 0 in each kind of group."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = megatron(folder, blocks)
    assert isinstance(found, dict)
    flags = _flags(folder)
    world = len((folder / "ranks.csv").read_text().splitlines()) - 1
    torch.distributed.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    parallel_state.initialize_model_parallel(
        **{
            name: int(flags[name])
            for name in (
                "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                "expert_model_parallel_size", "expert_tensor_parallel_size",
            )
            if name in flags
        },
        create_gloo_process_groups=False,
    )  # fmt: skip
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "replicas": parallel_state.get_data_parallel_group(),
        "experts": parallel_state.get_expert_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
    }
    ranks = {name: torch.distributed.get_process_group_ranks(group) for name, group in groups.items()}
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return found | {"ranks": ranks}


def megatron_layouts(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """Layout strings, one a line of a file, as Megatron reads them; null for what it refuses."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
    found: list[list[str] | None] = []
    for line in folder.read_text().splitlines():
        try:
            stages = PipelineParallelLayerLayout.parse_str_to_list(line)
        except (AssertionError, ValueError, KeyError):
            found.append(None)
            continue
        found.append(["".join(letters[piece.name] for piece in stage) for stage in stages])
    return found


def torchtitan(folder: Path, blocks: int) -> object:
    """torchtitan takes the config that a launch gives it; the model is split and the schedule built, on ranks that are
    pretended."""
    import torch

    config = titan_config(folder)
    if isinstance(config, str):
        raise AssertionError(config)
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import pipeline_parallel as pp

    given = config.parallelism
    ranks = given.pipeline_parallel_degree
    world = len((folder / "ranks.csv").read_text().splitlines()) - 1
    dims = ParallelDims.from_config(given, world)
    policy = config.activation_checkpoint
    found: dict[str, Any] = {
        "parallelism": asdict(given),
        "training": {"local": config.training.local_batch_size, "global": config.training.global_batch_size},
        "seq_len": config.training.seq_len,
        "policy": None if policy is None else type(policy).__qualname__,
        "is_config": policy is None or is_dataclass(policy),
        "parts": {},
        "meshes": _meshes(dims, world),
    }
    if ranks == 1:
        return found
    for rank in range(ranks):
        mesh = _pretended_mesh(rank, ranks)
        model = torch.nn.Module()
        model.tok_embeddings = model.norm = model.lm_head = torch.nn.Identity()
        model.layers = torch.nn.ModuleDict({str(i): torch.nn.Identity() for i in range(blocks)})
        stages, parts = pp._pipeline_module_split(
            model,
            mesh,
            given.pipeline_parallel_schedule,
            torch.device("cpu"),
            given.module_fqns_per_model_part,
            get_mesh=lambda *_: None,
        )
        for stage, part in zip(stages, parts, strict=True):
            found["parts"][stage.stage_index] = [rank, sorted(part.layers, key=int), part.tok_embeddings is not None]
        schedule = pp._build_pipeline_schedule(
            parallelism=given,
            local_batch_size=config.training.local_batch_size,
            stages=stages,
            loss_fn=lambda *_: (torch.zeros(()), None),
        )
        found["schedule"] = type(schedule).__name__
        found["microbatches"] = schedule._n_microbatches
        if given.pipeline_parallel_schedule_csv:
            rows = (folder / "schedule.csv").read_text().splitlines()
            read = schedule.pipeline_order_with_comms
            assert [",".join(map(str, read[rank])) for rank in range(ranks)] == rows
        torch.distributed.destroy_process_group()
    return found


def _meshes(dims: Any, world: int) -> dict[str, int]:
    """Sizes of the meshes that torchtitan itself makes and checks, on ranks that are pretended."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    dims.build_mesh()
    sizes = {name: mesh.size() for name, mesh in dims._single_axis_meshes.items()}
    torch.distributed.destroy_process_group()
    return sizes


def torchtitan_divisions(folder: Path, blocks: int) -> object:
    """How torchtitan divides so many layers itself, the ends counting as so many; null for what it refuses. folder: a
    file of numbers of stages, and of layers that the first and last stage have less."""
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    def divided(stages: int, first: int, last: int) -> Any:
        try:
            return _generate_llm_fqn_per_model_part(stages, blocks, first, last)
        except ValueError:
            return None

    return [divided(*case) for case in json.loads(folder.read_text())]


def torchtitan_parameters(folder: Path, blocks: int) -> object:
    """Parameters of the model that torchtitan makes of a launch, which it has compared with the planned ones itself,
    and figures that change none. A text where it refuses."""
    config = titan_config(folder)
    if isinstance(config, str):
        return config
    import torch
    from torchtitan.models.common import RMSNorm

    spec = config.model_spec
    with torch.device("meta"):
        model = spec.model.build()
    assert len(model.layers) == blocks
    (epsilon,) = {norm.eps for _, norm, _, _ in spec.model.traverse(RMSNorm.Config)}
    rope = spec.model.layers[0].attention.rope
    return {
        "parameters": sum(x.numel() for x in model.parameters()),
        "trained": sum(x.numel() for x in model.parameters() if x.requires_grad),
        "name": spec.name,
        "epsilon": epsilon,
        "theta": rope.theta,
        "scaling": rope.scaling,
        "loss": config.loss.loss_fn.global_vocab_size,
        "optimizer": config.optimizer.implementation,
        "compile": [config.compile.components, config.compile.enable_async_tensor_parallel],
    }


def torchtitan_converters(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """What a launch makes of a model's config before it is built, which takes GPUs and torchao: names and settings."""
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIns())
    said = json.loads((folder / "torchtitan.json").read_text())["model"]
    found = _imported(folder, "piper_plan")._converters(said)
    return [[type(one).__qualname__, asdict(one)] for one in found]


def torchtitan_tied(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """What torchtitan says against the config of a launch, if the model's ends are tied; None: nothing."""

    def tie(model: Any) -> None:
        model.enable_weight_tying = True

    return _titan_complaint(folder, tie)


def torchtitan_key_heads(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """The same for a model with two heads of keys and values."""

    def share(model: Any) -> None:
        for layer in model.layers:
            layer.attention.n_kv_heads = 2

    return _titan_complaint(folder, share)


def torchtitan_other_depth(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """What the exported file says of a config with a layer more."""
    config = titan_config(folder)
    config.model_spec.model.layers.append(config.model_spec.model.layers[-1])
    try:
        sys.modules["piper_plan"].apply(config)
    except ValueError as error:
        return str(error)
    return None


def _titan_complaint(folder: Path, change: Any) -> str | None:
    config = titan_config(folder, change)
    return config if isinstance(config, str) else None


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that reading data, showing progress and GPUs take, and no config does."""

    def __init__(self) -> None:
        others = ("torchdata", "datasets", "tokenizers", "tensorboard")
        self.missing = {name for name in others if importlib.util.find_spec(name) is None}
        if "tensorboard" in self.missing:
            self.missing.add("torch.utils.tensorboard")
        if importlib.util.find_spec("triton") is None:
            self.missing.add("torchtitan.distributed.minimal_async_ep.kernels")

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if name.partition(".")[0] in self.missing or name in self.missing:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        found = types.ModuleType(spec.name)
        found.__file__ = __file__
        vars(found)["__getattr__"] = self._member
        return found

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""

    @staticmethod
    def _member(name: str) -> Any:
        """Whatever is asked for: a class, or a function that leaves things as they are."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else lambda *given, **_: given[0] if given else None


def titan_config(folder: Path, change: Any = None, *arguments: str, update: bool = True) -> Any:
    """torchtitan's whole config as its own command line reads it for an export; a text where torchtitan refuses it.
    change: what is done to the model's config before torchtitan looks at it (update)."""
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIns())
    from torchtitan.config.manager import ConfigManager

    sys.modules["piper_plan"] = _imported(folder, "piper_plan")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            config = ConfigManager().parse_args(["--module", "piper_plan", "--config", "planned", *arguments])
            if change is not None:
                change(config.model_spec.model)
            if update:
                config.model_spec.model.update_from_config(config=config)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        except SystemExit:
            return said.getvalue()
    return config


def _pretended_mesh(rank: int, ranks: int) -> Any:
    """One rank's view of a pipeline whose other ranks are not there."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(backend="fake", rank=rank, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))


def torch_pipelining(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """torch validates the lists of passes; the script builds a model's stages on ranks that are pretended."""
    import torch
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plan = json.loads((folder / "stages.json").read_text())
    ranks, stages = plan["pipeline_ranks"], len(plan["stages"])
    rows = (folder / "schedule.csv").read_text().splitlines()
    actions = {rank: [_Action.from_str(text) for text in row.split(",")] for rank, row in enumerate(rows)}
    mapping = _validate_schedule(actions, ranks, stages, plan["microbatches"])
    pipeline = _imported(folder, "pipeline")
    built = {}
    world = ranks * plan["data_parallel_degree"]
    for rank in range(0, world, plan["data_parallel_degree"]):
        torch.distributed.init_process_group(backend="fake", rank=rank, world_size=world, store=FakeStore())
        model = _chain_of([path for stage in plan["stages"] for path in stage["modules"]])
        kind = getattr(torch, plan["weight_type"])
        loss, x = torch.nn.functional.mse_loss, torch.zeros(1, 2, dtype=kind)
        model.to(kind)
        schedule, parts = pipeline.build(model, torch.device("cpu"), pipeline.mesh("cpu"), loss, x, x)
        built[rank] = [type(schedule).__name__, len(parts)]
        ours = schedule._pipeline._schedule
        lists = dict(ours.pipeline_order_with_comms)
        ours._load_csv(str(folder / "schedule.csv"), format="compute_comms")
        assert ours.pipeline_order_with_comms == lists
        torch.distributed.destroy_process_group()
    return {"stage_of_rank": {str(stage): rank for stage, rank in mapping.items()}, "built": built}


def _chain_of(paths: list[str]) -> Any:
    """Modules at these paths, with a parameter each, one after the other."""
    import torch

    class Chain(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            for path in paths:
                x = self.get_submodule(path)(x)
            return x

    model = Chain()
    for path in paths:
        at, *names = model, *path.split(".")
        for name in names[:-1]:
            if not hasattr(at, name):
                at.add_module(name, torch.nn.Module())
            at = getattr(at, name)
        at.add_module(names[-1], torch.nn.Linear(2, 2))
    return model


def deepspeed(folder: Path, blocks: int) -> object:  # noqa: ARG001
    """Each rank's passes by TrainSchedule, and its layers by the exported module's partition; the config as read."""
    import torch
    from deepspeed.runtime import config as deepspeed_config
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    planned = _imported(folder, "planned_module")
    config = json.loads((folder / "ds_config.json").read_text())
    topology = planned.topology()
    p, m = topology.get_dim("pipe"), config["gradient_accumulation_steps"]
    passes, parts = [], []
    for rank in range(p):
        steps = [command for step in TrainSchedule(m, p, rank).steps() for command in step]
        kinds = {ForwardPass: "F", BackwardPass: "B"}
        passes.append("".join(kinds[type(command)] for command in steps if type(command) in kinds))
        module = object.__new__(planned.PlannedPipelineModule)
        torch.nn.Module.__init__(module)
        module._topo, module.global_rank = topology, topology.filter_match(pipe=rank)[0]
        module._starts = list(range(len(planned.LAYERS) + 1))
        module._partition_layers()
        parts.append([module._local_start, module._local_stop])
    d = topology.get_dim("data")
    # Ranks that are pretended: DeepSpeed's own initialisation would compile messages for CPUs.
    deepspeed_config.dist = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: d)
    read = deepspeed_config.DeepSpeedConfig(config)
    ranks = [topology.get_coord(rank)._asdict() for rank in range(topology.world_size())]
    return {
        "passes": passes,
        "parts": parts,
        "batch": [read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps],
        "zero": read.zero_config.stage,
        "ranks": ranks,
    }


def _imported(folder: Path, name: str) -> Any:
    """A module of an exported folder; those of other folders have the same name."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        answers = [globals()[name](Path(folder), blocks) for name, folder, blocks in json.loads(line)]
        sys.stdout.write(f"\n{ANSWERS}{json.dumps(answers, default=str)}\n")
        sys.stdout.flush()
