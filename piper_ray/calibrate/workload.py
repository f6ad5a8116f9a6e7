"""``piper_ray.estimate``: the command ``piper-ray estimate`` as a function, calibrated if asked."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance


def _size(name: str, value: object) -> float:
    size_bytes = arguments.number(value)
    if size_bytes is None or not 0.0 <= size_bytes < math.inf:
        raise UsageError(f"{name} must be a number of bytes >= 0, not {arguments.shown(value)}")
    return size_bytes


def estimate(
    model: str | os.PathLike[str],
    gpu: str,
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    tokens: int | None = None,
    microbatch: int | None = None,
    batch: int | None = None,
    fused_attention: bool = True,
    precision: str = "bf16",
    software: str = "megatron-core",
    zero: int = 1,
    offload: bool = False,
    lora: int | None = None,
    reserve_bytes: float | None = None,
    hardware: str | os.PathLike[str] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
) -> Instance:
    """The workload of training a model on ``nodes`` equal nodes, by formulas and not measured.

    model: a known name such as "llama3-70b", or the path of a Hugging Face config.json. gpu: of the table of hardware,
    such as "H100-SXM"; hardware: the path of a TOML file over that table. tokens: of a sample; microbatch, batch: in
    samples. None: what the model's own training or the GPU's node has. precision: of matrix products, "bf16", "fp16" or
    "fp8". software: the generation of training software, such as "megatron-core", "nemo" or "fsdp". zero: optimizer
    state over so many replicas as a further choice. offload: activations in host memory as a further choice. lora: rank
    of adapters that are trained in the model's place (LoRA).

    reserve_bytes: of each GPU, left free for CUDA's context, communicators and what is stuck in the allocator, in place
    of what is usual.

    calibrate: a file of measured runs in their layouts, or of a profiled workload of this model; the few constants that
    these tell apart are fitted, and the instance's ``notes`` say what was changed and how far.

    Raises UsageError for arguments that make no sense, InputError for a file that is not sound.

    >>> import piper_ray
    >>> piper_ray.estimate("llama3-70b", gpu="H100-SXM", nodes=64).devices
    512
    """
    from piper_ray.workloads.estimate import build
    from piper_ray.workloads.estimate.config import read_model
    from piper_ray.workloads.estimate.hardware import load_hardware

    def given(name: str, value: int | None) -> int | None:
        return None if value is None else arguments.positive(name, value)

    def text(name: str, value: str, example: str) -> str:
        arguments.of_kind(name, value, str, f"a text, such as '{example}'")
        return value

    arguments.of_kind("gpu", gpu, str, "the name of a GPU, such as 'H100-SXM'")
    request = build.EstimateRequest(
        nodes=arguments.positive("nodes", nodes),
        gpus_per_node=given("gpus_per_node", gpus_per_node),
        tokens=given("tokens", tokens),
        samples=given("microbatch", microbatch),
        batch=given("batch", batch),
        fused=arguments.flag("fused_attention", fused_attention),
        software=text("software", software, "megatron-core"),
        precision=text("precision", precision, "bf16"),
        zero_shards=arguments.positive("zero", zero),
        offload=arguments.flag("offload", offload),
        lora=given("lora", lora) or 0,
        reserve_bytes=None if reserve_bytes is None else _size("reserve_bytes", reserve_bytes),
    )
    notes: list[str] = []
    table = load_hardware(None if hardware is None else arguments.location("hardware", hardware), notes.append)
    read = read_model(arguments.location("model", model))
    if calibrate is not None:
        from piper_ray.calibrate.calibrated import calibrated
        from piper_ray.calibrate.measurements import Estimated

        request = calibrated(arguments.location("calibrate", calibrate), Estimated(read, table, gpu, request))
    found = build.estimate(read, table, gpu, request)
    return replace(found.instance, notes=(*read.notes, *notes, *request.calibration.told))
