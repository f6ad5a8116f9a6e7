"""``piper_ray.estimate``: the command ``piper-ray estimate`` as a function, with optional calibration."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, TypedDict

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Recomputation, parse_recomputation
from piper_ray.model.units import parse_bytes_per_s

PARAMETERS = {"reserve": "reserve_bytes", "host-memory": "host_memory_bytes"}
"""The parameters of functions that estimate, by those of the command's options that have another name."""


MODEL_WORDS = "the path of a config.json, an id of the hub, or the name of a known model, such as 'llama3-70b'"


def shared_replicas(value: object, name: str = "zero") -> int:
    """The number of replicas that ``zero`` or ``fsdp`` states. Raises UsageError."""
    if value == "all":
        return ALL_REPLICAS
    if isinstance(value, str):
        raise UsageError(f"{name} must be a whole number of at least 1, or 'all', not {arguments.shown(value)}")
    return arguments.positive(name, value)


def text_argument(name: str, value: str, example: str) -> str:
    """The value, which must be a text. Raises UsageError."""
    arguments.of_kind(name, value, str, f"a text, such as '{example}'")
    return value


class _Running(TypedDict):
    """Fields of a request (``build.EstimateRequest``): how software runs the model."""

    precision: str
    overlaps: tuple[str, ...]
    dispatcher: str | None
    expert_imbalance: float | None


def running_arguments(
    precision: str, overlap: Iterable[str], dispatcher: str | None, expert_imbalance: float | None
) -> _Running:
    """These arguments of functions as fields of a request. Raises UsageError."""
    names = (overlap,) if isinstance(overlap, str) else tuple(overlap)
    return _Running(
        precision=text_argument("precision", precision, "bf16"),
        overlaps=tuple(text_argument("overlap", name, "experts") for name in names),
        dispatcher=None if dispatcher is None else text_argument("dispatcher", dispatcher, "once-per-node"),
        expert_imbalance=None
        if expert_imbalance is None
        else arguments.number_from("expert_imbalance", expert_imbalance, 1.0, "a number >= 1"),
    )


def recomputation_arguments(recompute: Iterable[str]) -> tuple[Recomputation, ...]:
    """The kinds of recomputation to offer. Raises UsageError."""
    names = (recompute,) if isinstance(recompute, str) else recompute
    return tuple(parse_recomputation(text_argument("recompute", one, "core_attn,mlp")) for one in names)


def bytes_argument(name: str, value: object) -> float | None:
    """A number of bytes; None stays None. Raises UsageError."""
    return None if value is None else arguments.number_from(name, value, 0.0, "a number of bytes >= 0")


@arguments.named_as_parameters(PARAMETERS)
def estimate(
    model: str | os.PathLike[str],
    gpu: str,
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    domain: int | None = None,
    uplink: float | str | None = None,
    tokens: int | None = None,
    images: int | None = None,
    microbatch_size: int | None = None,
    global_batch: int | None = None,
    fused_attention: bool = True,
    precision: str = "bf16",
    software: str = "megatron-core",
    overlap: Iterable[str] = (),
    dispatcher: str | None = None,
    zero: int | Literal["all"] = 1,
    zero_2: int = 1,
    fsdp: int | Literal["all"] = 1,
    context_parallel: Iterable[int] = (),
    context_exchange: str = "ring",
    expert_parallel: Iterable[int] = (),
    expert_tensor_parallel: int = 1,
    expert_imbalance: float | None = None,
    recompute: Iterable[str] = (),
    keep_gathered: bool = False,
    offload: bool = False,
    optimizer_on_host: bool = False,
    lora: int | None = None,
    reserve_bytes: float | None = None,
    hardware: str | os.PathLike[str] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
) -> Instance:
    """The workload of training a model on ``nodes`` equal nodes, computed by formulas, not measured.

    model: a known name such as "llama3-70b", an id of the Hugging Face hub, or the path of a config.json. gpu: an entry
    of the table of hardware, such as "H100-SXM". domain: GPUs that share the fast link, if these are several nodes.
    uplink: what they together send to others and receive, as "100GB/s", where they share an uplink.
    hardware: the path of a TOML file whose entries replace those of the table. tokens: the tokens of a sample. images:
    the images of a sample, for models with image input. microbatch_size, global_batch: in samples. None: the value of
    the model's own training, or of the GPU's node. precision: of matrix products, "bf16", "fp16" or "fp8". software:
    the generation of training software, such as "megatron-core", "nemo" or "fsdp". lora: rank of adapters that are
    trained while the model is frozen (LoRA).

    Further ways to run layers, each a TMPC of its own. zero, zero_2, fsdp: the number of replicas that divide the
    optimizer state, also gradients, also weights; zero="all", fsdp="all": all replicas of a stage. context_parallel:
    degrees, such as (2, 4); context_exchange: "ring", "all-gather" or "all-to-all". expert_parallel: ranks that experts
    are spread over, independent of t, where expert_tensor_parallel devices share each expert; expert_imbalance: tokens
    of the busiest rank over the average; dispatcher: how tokens reach experts, "all-to-all", "once-per-node" or
    "all-gather". overlap: exchanges that overlap with passes, of "tensor", "experts" and "context". recompute: parts of
    layers that the backward pass recomputes, such as ("core_attn,mlp",), in addition to those that suit the software.
    keep_gathered: keep what sequence parallelism would gather again. offload: activations in host memory.
    optimizer_on_host: not a TMPC of its
    own: all TMPCs keep the optimizer's state in host memory, and parameters are updated there.

    reserve_bytes: the bytes of each GPU that are left free for CUDA's context, communicators and fragments of the
    allocator, in place of the usual number.

    calibrate: a file of measured runs with their layouts, or of a profiled workload of this model. The few constants
    that these determine are fitted, and the instance's ``notes`` state the changes and the remaining error.

    Raises UsageError for arguments that make no sense, InputError for an invalid file.

    >>> import piper_ray
    >>> piper_ray.estimate("llama3-70b", gpu="H100-SXM", nodes=64).devices
    512
    """
    from piper_ray.workloads.estimate import build
    from piper_ray.workloads.estimate.config import read_model, with_images
    from piper_ray.workloads.estimate.hardware import load_hardware
    from piper_ray.workloads.estimate.modes import Offer

    text = text_argument
    arguments.of_kind("gpu", gpu, str, "the name of a GPU, such as 'H100-SXM'")
    request = build.EstimateRequest(
        nodes=arguments.positive("nodes", nodes),
        gpus_per_node=arguments.positive_or_none("gpus_per_node", gpus_per_node),
        domain=arguments.positive_or_none("domain", domain),
        uplink_bytes_per_s=None if uplink is None else parse_bytes_per_s(uplink),
        tokens=arguments.positive_or_none("tokens", tokens),
        samples=arguments.positive_or_none("microbatch_size", microbatch_size),
        batch=arguments.positive_or_none("global_batch", global_batch),
        fused=arguments.flag("fused_attention", fused_attention),
        software=text("software", software, "megatron-core"),
        offer=Offer(
            zero=shared_replicas(zero),
            zero2=arguments.positive("zero_2", zero_2),
            fsdp=shared_replicas(fsdp, "fsdp"),
            offload=arguments.flag("offload", offload),
            contexts=tuple(sorted({1, *arguments.degrees("context_parallel", context_parallel)})),
            experts=arguments.degrees("expert_parallel", expert_parallel),
            expert_tensor=arguments.positive("expert_tensor_parallel", expert_tensor_parallel),
            gathered=arguments.flag("keep_gathered", keep_gathered),
        ),
        recomputations=recomputation_arguments(recompute),
        context_exchange=text("context_exchange", context_exchange, "ring"),
        **running_arguments(precision, overlap, dispatcher, expert_imbalance),
        lora=arguments.positive_or_none("lora", lora) or 0,
        optimizer_on_host=arguments.flag("optimizer_on_host", optimizer_on_host),
        reserve_bytes=bytes_argument("reserve_bytes", reserve_bytes),
    )
    notes: list[str] = []
    table = load_hardware(None if hardware is None else arguments.location("hardware", hardware), notes.append)
    read = read_model(arguments.location("model", model, MODEL_WORDS))
    if images is not None:
        read = with_images(read, arguments.positive("images", images), request.tokens)
    if calibrate is not None:
        from piper_ray.calibrate.measurements import Estimated, calibrated

        request = calibrated(arguments.location("calibrate", calibrate), Estimated(read, table, gpu, request))
    found = build.estimate(read, table, gpu, request)
    return replace(found.instance, notes=(*read.notes, *notes, *request.calibration.notes, *found.instance.notes))
