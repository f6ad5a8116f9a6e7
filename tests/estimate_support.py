"""Models and settings for the tests of the estimator."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from piper_ray.model.instance import Tmpc
from piper_ray.workloads.estimate.architectures import FAMILIES
from piper_ray.workloads.estimate.build import Estimate, EstimateRequest, estimate
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.hardware import Hardware, load_hardware
from piper_ray.workloads.estimate.modes import PLAIN, LayerMode, Offer
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.runtimes import DEFAULT, held_by

MEGATRON_CORE, NEMO, FSDP = (held_by(software) or DEFAULT for software in ("megatron-core", "nemo", "fsdp"))


def model_of(model_type: str, *, tokens: int | None = None, **config: object) -> ModelConfig:
    """A model from the keys of a config."""
    family = FAMILIES[model_type]
    read = family.config.model_validate(config)
    most = read.most_tokens
    if tokens is None and most is not None:
        tokens = min(most, family.tokens)
    document = {"model_type": model_type, **config}
    return ModelConfig(model_type, family, read, document, tokens, family.samples, family.batch)


def gpt(layers: int, width: int, heads: int, vocabulary: int = 51200, tokens: int = 2048) -> ModelConfig:
    """A GPT as Megatron's papers describe it."""
    return model_of(
        "gpt2", tokens=tokens, n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=tokens
    )


def estimated(
    model: ModelConfig,
    gpu: str = "A100-80",
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    samples: int | None = None,
    batch: int | None = None,
    fused: bool = True,
    software: str = "megatron-core",
    precision: str = "bf16",
    zero_shards: int = 1,
    offload: bool = False,
    reserve_bytes: float | None = None,
    lora: int = 0,
    offer: Offer = PLAIN,
    context_exchange: str = "ring",
) -> Estimate:
    """The estimate with the built-in hardware."""
    request = EstimateRequest(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        samples=samples,
        batch=batch,
        fused=fused,
        software=software,
        precision=precision,
        offer=replace(PLAIN, zero=zero_shards, offload=offload) if offer == PLAIN else offer,
        context_exchange=context_exchange,
        reserve_bytes=reserve_bytes,
        lora=lora,
    )
    return estimate(model, built_in_hardware(), gpu, request)


@cache
def built_in_hardware() -> Hardware:
    """The built-in table, which takes longer to read than an estimate to make."""
    return load_hardware()


def kind_of(result: Estimate, key: str = "block") -> LayerKind:
    return next(kind for kind in result.architecture.kinds if kind.key == key)


def tmpc_of(result: Estimate, mode: LayerMode, key: str = "block") -> Tmpc:
    """The TMPC of the first layer of a kind in a mode."""
    index = next(index for index, node in enumerate(result.architecture.nodes) if node.kind.key == key)
    return next(tmpc for tmpc in result.instance.layers[index].tmpcs[mode.devices] if tmpc.id == mode.id)
