"""What a published run says of its layout, and what is assumed where it is silent."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from piper_ray.calibrate.runs import PublishedRun, RunModel
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.mode import EVERY_SECOND_PRODUCT, MEGATRON_MODULES, Recomputation, Sharding
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.estimate.config import ModelConfig, model_of_config, read_model
from piper_ray.workloads.estimate.hardware import Gpu, Hardware
from piper_ray.workloads.estimate.layout import Layout
from piper_ray.workloads.estimate.software import (
    DEFAULT_SOFTWARE,
    ContextExchange,
    Precision,
    Software,
    Stack,
    software_named,
    stack_of,
)


class NotExpressible(Exception):
    """Why a run cannot be priced."""


@dataclass(frozen=True)
class Untold:
    """What is taken of a run that does not say it. None: what is usual, or a reason not to price it."""

    model: ModelConfig | None = None
    gpu: str | None = None
    gpus_per_node: int | None = None
    software: str | None = None
    precision: Precision | None = None


@dataclass(frozen=True)
class Laid:
    """A run in the estimator's words. software: its generation's key. assumed: what it does not say."""

    model: ModelConfig
    software: str
    stack: Stack
    layout: Layout
    assumed: tuple[str, ...]

    @property
    def sharded(self) -> bool:
        """Whether replicas share out weights too."""
        return self.layout.sharding is Sharding.WEIGHTS


def laid_out(run: PublishedRun, hardware: Hardware, untold: Untold = Untold()) -> Laid:
    """Raises NotExpressible with the reason."""
    assumed: list[str] = []
    try:
        model = _model(run, untold)
        software = _generation(run, untold, assumed)
        stack = _stack(run, software, hardware, untold, assumed)
        layout = _layout(run, model, stack.software, assumed)
    except (UsageError, InputError) as error:
        raise NotExpressible(" ".join(str(error).split())) from error
    return Laid(model, software, stack, layout, tuple(assumed))


def _model(run: PublishedRun, untold: Untold) -> ModelConfig:
    described = run.model
    if untold.model is not None and described == RunModel(name=described.name):
        return untold.model
    if isinstance(described.config, str):
        return read_model(described.config)
    config = dict(described.config) if described.config else _described(run)
    for key in ("max_position_embeddings", "n_positions"):
        known = config.get(key)
        if isinstance(known, int) and run.seq is not None:
            config[key] = max(known, run.seq)  # a run may be longer than its config's own training
    return model_of_config(described.name or run.id, config)


def _described(run: PublishedRun) -> dict[str, object]:
    """A GPT- or Llama-like decoder of the figures that are said."""
    it = run.model
    if it.layers is None or it.hidden is None or it.heads is None or it.vocab is None:
        raise NotExpressible("model: no config, and not all of layers, hidden, heads and vocab")
    inner = it.ffn or 4 * it.hidden
    if it.gated or (it.kv_heads is not None and it.kv_heads != it.heads):
        return {
            "model_type": "llama", "hidden_size": it.hidden, "num_hidden_layers": it.layers,
            "num_attention_heads": it.heads, "num_key_value_heads": it.kv_heads or it.heads,
            "intermediate_size": inner if it.gated else 2 * inner // 3, "vocab_size": it.vocab,
            "max_position_embeddings": run.seq or 2048,
        }  # fmt: skip
    return {
        "model_type": "gpt2", "n_embd": it.hidden, "n_layer": it.layers, "n_head": it.heads, "vocab_size": it.vocab,
        "n_positions": run.seq or 2048, "n_inner": inner,
    }  # fmt: skip


_GENERATIONS = (
    ("megascale", "megascale"),
    ("deepspeed", "deepspeed-2021"),
    ("bloom", "deepspeed-2021"),
    ("mt-nlg", "deepspeed-2021"),
    ("glm-130b", "deepspeed-2021"),
    ("maxtext", "megatron-core"),
    ("torchtitan", "fsdp"),
    ("mosaicml", "fsdp"),
    ("fsdp", "fsdp"),
    ("simumax", "megatron-core"),
    ("nemo", "nemo"),
    ("megatron-bridge", "nemo"),
    ("dgxc", "nemo"),
    ("megatron-core", "megatron-core"),
    ("narayanan", "megatron-2021"),
    ("korthikanti", "megatron-2022"),
    ("vtrain", "megatron-2021"),
)
"""Words of a run, and the generation of software that they mean; the first that is found."""


def _generation(run: PublishedRun, untold: Untold, assumed: list[str]) -> str:
    for words, key in _GENERATIONS:
        if words in run.told:
            return key
    if "fsdp" in run.optimizer_sharding.lower():
        return "fsdp"
    key = untold.software or ("megatron-2021" if run.fused_attention is False else DEFAULT_SOFTWARE)
    assumed.append(f"software {key}")
    return key


def of_hai_llm(run: PublishedRun) -> bool:
    """Whether DeepSeek's own software ran it: on H800, as they did."""
    return "deepseek-v3" in run.told and "h800" in (run.gpu or "").lower()


def _stack(run: PublishedRun, generation: str, hardware: Hardware, untold: Untold, assumed: list[str]) -> Stack:
    name = run.gpu or untold.gpu
    if name is None:
        raise NotExpressible("gpu: not said")
    gpu = _gpu(run, name, hardware)
    words = run.precision.lower().replace("-", "")
    if words.startswith(("bf16", "bfloat16")):
        precision = Precision.BF16
    elif words.startswith(("fp16", "float16")):
        precision = Precision.FP16
    elif words.startswith("fp8"):
        precision = Precision.FP8
    elif words == "":
        precision = untold.precision or Precision.BF16
        assumed.append(f"precision {precision.value}")
    else:
        raise NotExpressible(f"precision: {run.precision}; bf16, fp16 and fp8 can be priced")
    software = software_named(generation)
    if "dualpipe" in run.told:
        software = software.model_copy(update={"expert_overlap": 0.9})
    if ALL_TO_ALL in run.told:
        software = software.model_copy(update={"context": ContextExchange.ALL_TO_ALL})
    if "async tp" in run.told or "asynctp" in run.told:
        software = software.model_copy(update={"forward_overlap": 0.5, "backward_overlap": 0.5})
    if _NO_OVERLAP in run.told:
        software = software.model_copy(update={"forward_overlap": 0.0, "backward_overlap": 0.0})
    return stack_of(gpu, software, precision, run.gpus_per_node or untold.gpus_per_node or gpu.gpus_per_node)


ALL_TO_ALL = "context parallelism by all-to-all"
_NO_OVERLAP = "not overlapped with compute"
_NODE_RATE = re.compile(r"([\d,.]+) ?gbit/s a node")
_CLUSTERS = (("bloom", 4 * 100.0),)
"""Gbit/s of a node, of clusters that are not as their GPUs' makers propose: Jean Zay's nodes of 8 A100 have 4 links of
100 Gbit/s (Le Scao et al. 2022, section 3.2)."""


_UNUSUAL = (("torchtitan", {"matrix_flop_per_s": 835e12, "memory_bytes_per_s": 2.4e12}),)
"""GPUs of clusters that are not as sold: torchtitan's H100 have HBM2e of 96 GB and a lower power limit, so that their
peak lies between that of H100 NVL, which is taken here, and SXM (Liang et al. 2024, section 4; NVL's data sheet)."""


def _gpu(run: PublishedRun, name: str, hardware: Hardware) -> Gpu:
    gpu = hardware.gpu(name)
    found = _NODE_RATE.search(run.told)
    gbit_per_s = float(found.group(1).replace(",", "")) if found else 0.0
    for words, rate in _CLUSTERS:
        if words in run.told and not gbit_per_s:
            gbit_per_s = rate
    for words, changes in _UNUSUAL:
        if words in run.told and gpu.name.startswith("NVIDIA H100"):
            gpu = gpu.model_copy(update=changes)
    if gbit_per_s:
        gpu = gpu.model_copy(update={"network_bytes_per_s": gbit_per_s * 1e9 / 8.0 / gpu.gpus_per_node})
    return gpu


def _layout(run: PublishedRun, model: ModelConfig, software: Software, assumed: list[str]) -> Layout:
    missing = [name for name in ("microbatch", "global_batch") if getattr(run, name) is None]
    if run.tp is None and run.pp is None and run.dp is None:
        missing.insert(0, "layout")
    if missing:
        raise NotExpressible(f"{', '.join(missing)}: not said")
    assert run.microbatch is not None
    assert run.global_batch is not None
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    assumed += [f"{name} 1" for name in ("tp", "pp") if getattr(run, name) is None]
    dp = run.dp or (run.gpus // (tp * pp * cp) if run.gpus else None)
    if not dp:
        raise NotExpressible("neither gpus nor dp is said" if run.gpus is None else "fewer gpus than tp pp cp")
    if run.gpus is not None and tp * pp * cp * dp != run.gpus:
        raise NotExpressible(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} is {tp * pp * cp * dp}, not {run.gpus} gpus")
    if run.global_batch % (run.microbatch * dp):
        raise NotExpressible(f"{dp} replicas of microbatches of {run.microbatch} do not divide {run.global_batch}")
    if run.seq is None and model.tokens is not None:
        raise NotExpressible("seq: not said")
    expert = run.ep if run.ep and run.ep > 1 else None
    layout = Layout(
        tensor=tp,
        pipeline=pp,
        data=dp,
        context=cp,
        expert=expert,
        expert_tensor=run.etp or 1,
        samples=run.microbatch,
        batch=run.global_batch,
        tokens=run.seq if model.tokens is not None else None,
        schedule=_schedule(run, pp),
        sequence_parallel=bool(run.sequence_parallel),
        recomputation=_recomputation(run, software, assumed),
        fused=run.fused_attention is not False,
        stages=None if run.stages is None else tuple(run.stages),
    )
    layout = replace(layout, sharding=_sharding(run, assumed))
    if _NO_OVERLAP in run.told or "after the last backward pass" in run.told:
        layout = replace(layout, overlapped=False)
    return layout


_NAMED_SCHEDULES = (
    ("dualpipe", ScheduleName.DUALPIPE_V),
    ("zb-v", ScheduleName.ZB_V),
    ("zb-h1", ScheduleName.ZB_H1),
    ("zero bubble", ScheduleName.ZB_H1),
    ("gpipe", ScheduleName.GPIPE),
    ("1f1b", ScheduleName.ONE_F_ONE_B),
)


def _schedule(run: PublishedRun, pp: int) -> Schedule:
    v = run.vpp or 1
    if pp == 1:
        return Schedule(ScheduleName.ONE_F_ONE_B)
    if v > 1:
        return Schedule(ScheduleName.INTERLEAVED, v)
    told = f"{run.schedule} {run.notes}".lower()
    for words, name in _NAMED_SCHEDULES:
        if words in told:
            return Schedule(name)
    return Schedule(ScheduleName.ONE_F_ONE_B)


def _recomputation(run: PublishedRun, software: Software, assumed: list[str]) -> Recomputation:
    words = run.recompute.lower()
    if words in ("", "none", "no", "false"):
        if not words:
            assumed.append("no recomputation")
        return Recomputation.NONE
    if words.startswith(("full", "block", "uniform")):
        return Recomputation.FULL
    if words.startswith("selective"):
        return _selective(run, software)
    if words.startswith("partial"):
        assumed.append("partial recomputation: selective")
        return _selective(run, software)
    raise NotExpressible(f"recompute: {run.recompute}; none, selective and full can be priced")


def _sharding(run: PublishedRun, assumed: list[str]) -> Sharding:
    words = run.optimizer_sharding.lower()
    if words in ("", "none", "no"):
        return Sharding.NONE
    if "optimizer and gradients" in words or "zero2" in words or "zero-2" in words:
        return Sharding.GRADIENTS
    if "fsdp" in words or "hsdp" in words or "zero3" in words or "zero-3" in words:
        return Sharding.WEIGHTS
    if not ("zero1" in words or "zero-1" in words or "distributed" in words):
        assumed.append(f"optimizer sharding {run.optimizer_sharding}: as ZeRO-1")
    return Sharding.OPTIMIZER


def _selective(run: PublishedRun, software: Software) -> Recomputation:
    """The parts that are named; else what the software does again by default: Megatron the core of attention."""
    named = set(re.findall(r"\w+", run.recompute)).intersection(MEGATRON_MODULES)
    if named:
        return Recomputation.of_parts(named)
    if of_hai_llm(run) or "maxtext" in run.told:
        return Recomputation.SELECTIVE
    return Recomputation.of_parts([EVERY_SECOND_PRODUCT if EVERY_SECOND_PRODUCT in software.selective else "core_attn"])
