"""``piper-ray estimate``: a workload from a model's config and the name of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import piper_ray
from piper_ray.cli.modelled import ModelOptions, OfferOptions, parse_some_replicas
from piper_ray.cli.options import command_text, flag, option, parse_size
from piper_ray.cli.telling import note
from piper_ray.model.errors import UsageError
from piper_ray.model.mode import parse_recomputation
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray.workloads.estimate.modes import Offer


@dataclass(frozen=True)
class EveryOfferOption(OfferOptions):
    """All that an estimate knows."""

    zero_2: int = option(
        "SHARDS",
        "Offer sharding gradients too (ZeRO-2), which are scattered in each backward pass.",
        default=1,
        parse=parse_some_replicas,
    )
    fsdp: int = option(
        "SHARDS",
        "Offer sharding weights too (ZeRO-3, FSDP), which are gathered for each pass; in stages of more replicas, over "
        "groups of so many (HSDP).",
        default=1,
        parse=parse_some_replicas,
    )
    context_exchange: str = option(
        "NAME",
        "How groups that share a sequence attend to all its tokens: ring, all-gather (of keys and values) or "
        "all-to-all (of heads).",
        default="ring",
    )
    expert_tensor_parallel: int = option("COUNT", "GPUs that share an expert.", default=1, min=1)
    expert_imbalance: float | None = option(
        "FACTOR", "Tokens of the busiest experts' GPU over those of the average one; 1.25 if not given.", min=1.0
    )
    recompute: list[Any] | None = option(
        "PARTS",
        "Offer recomputing these parts of each layer, as core_attn,mlp, besides what suits the software; may be given "
        "again.",
        parse=parse_recomputation,
    )
    keep_gathered: bool = flag("Offer keeping what sequence parallelism would gather again in the backward pass.")
    offload: bool = flag("Offer keeping activations in host memory.")

    def offer(self) -> Offer:
        """Raises UsageError for figures that make no sense."""
        from piper_ray.workloads.estimate.modes import Offer

        return Offer(
            zero=self.zero,
            zero2=self.zero_2,
            fsdp=self.fsdp,
            offload=self.offload,
            contexts=self.contexts,
            experts=self.experts,
            expert_tensor=self.expert_tensor_parallel,
            gathered=self.keep_gathered,
        )


@dataclass(frozen=True)
class TrainingOptions:
    """How the model is trained."""

    batch: int | None = option("SAMPLES", "Samples of a batch, over all replicas.", "--global-batch", min=1)
    microbatch: int | None = option("SAMPLES", "Samples of a microbatch.", "--microbatch-size", min=1)
    unfused_attention: bool = flag("Attention that keeps its scores, as before FlashAttention.")
    precision: str = option("NAME", "Of matrix products: bf16, fp16 or fp8.", default="bf16")
    software: str = option(
        "NAME",
        "The generation of training software: megatron-core, nemo, fsdp, megascale, megatron-2022, megatron-2021 or "
        "deepspeed-2021.",
        default="megatron-core",
    )
    lora: int = option(
        "RANK",
        "Train adapters of that rank beside every matrix of the layers (LoRA); 0 trains the model itself.",
        default=0,
        min=0,
    )
    reserve: float | None = option(
        "SIZE",
        "Leave so much of each GPU free, as 5GiB, for CUDA's context, communicators and what is stuck in the "
        "allocator, in place of what is usual.",
        parse=parse_size,
    )


@dataclass(frozen=True)
class EstimateOutput:
    """What is shown of the estimate."""

    out: Path | None = option("FILE", "Write the workload to FILE (.toml or .json) and not to stdout.", "-o", "--out")
    explain: str | None = option("LAYER", "Show how each figure of a layer (its kind or number) comes about.")


def estimate(
    context: typer.Context,
    modelled: ModelOptions,
    shown: EstimateOutput,
    trained: TrainingOptions,
    offered: EveryOfferOption,
) -> None:
    """Estimate the workload of training MODEL on a cluster: layers, times, memory and communication."""
    from piper_ray.report.estimate_summary import file_text, summary_lines
    from piper_ray.workloads.estimate.build import EstimateRequest
    from piper_ray.workloads.estimate.build import estimate as run

    out, explain = shown.out, shown.explain
    if out is not None and out.suffix.lower() not in (".toml", ".json"):
        raise UsageError(f"--out {out}: unknown kind of file; expected a path that ends in .json or .toml")
    request = EstimateRequest(
        nodes=modelled.nodes,
        gpus_per_node=modelled.gpus_per_node,
        tokens=modelled.tokens,
        samples=trained.microbatch,
        batch=trained.batch,
        fused=not trained.unfused_attention,
        software=trained.software,
        precision=trained.precision,
        offer=offered.offer(),
        recomputations=tuple(offered.recompute or ()),
        context_exchange=offered.context_exchange,
        expert_imbalance=offered.expert_imbalance,
        lora=trained.lora,
        reserve_bytes=trained.reserve,
    )
    model, hardware = modelled.read()
    request = modelled.calibrated(model, hardware, request)
    result = run(model, hardware, modelled.gpu, request)
    for text in result.instance.notes:
        note(text)
    if explain is not None:
        from piper_ray.report.estimate_explanation import explanation_lines

        typer.echo("\n".join(explanation_lines(result, explain)))
        if out is None:
            return
    if out is None:
        typer.echo(file_text(result, command_text(context, hidden=("explain",))), nl=False)
        return
    if out.suffix.lower() == ".json":
        piper_ray.dump(result.instance, out)
    else:
        write_atomically(out, file_text(result, command_text(context, hidden=("explain",))))
    typer.echo("\n".join(summary_lines(result)))
