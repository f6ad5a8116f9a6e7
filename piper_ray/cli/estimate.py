"""``piper-ray estimate``: a workload from a model's config and the name of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray.cli.calibration import Calibrate, calibrated_request
from piper_ray.cli.common import command_text, load_model, note, parse_size
from piper_ray.cli.offers import (
    ContextExchanged,
    ContextParallel,
    ExpertImbalance,
    ExpertParallel,
    ExpertTensorParallel,
    KeepGathered,
    Recompute,
    ShardedGradients,
    ShardedState,
    ShardedWeights,
    contexts_of,
    experts_of,
)
from piper_ray.model.errors import UsageError
from piper_ray.storage.files import write_atomically


def estimate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A Hugging Face config.json, or the name of a known model, such as llama3-405b; - reads a config from "
            "stdin.",
        ),
    ],
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", show_default=False, help="The GPU, such as H100-SXM or A100-80.")
    ],
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="COUNT", min=1, show_default=False, help="Nodes of the cluster.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="Write the workload to FILE (.toml or .json) and not to stdout."
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", metavar="COUNT", min=1, help="GPUs of a node, in place of the table's."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="SAMPLES", min=1, help="Samples of a batch, over all replicas."),
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option("--microbatch-size", metavar="SAMPLES", min=1, help="Samples of a microbatch.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="COUNT", min=1, help="Tokens of a sample.")] = None,
    unfused_attention: Annotated[
        bool,
        typer.Option("--unfused-attention", help="Attention that keeps its scores, as before FlashAttention."),
    ] = False,
    precision: Annotated[
        str,
        typer.Option("--precision", metavar="NAME", help="Of matrix products: bf16, fp16 or fp8."),
    ] = "bf16",
    software: Annotated[
        str,
        typer.Option(
            "--software",
            metavar="NAME",
            help="The generation of training software: megatron-core, nemo, fsdp, megascale, megatron-2022, "
            "megatron-2021 or deepspeed-2021.",
        ),
    ] = "megatron-core",
    zero: ShardedState = 1,
    zero_2: ShardedGradients = 1,
    fsdp: ShardedWeights = 1,
    context_parallel: ContextParallel = None,
    context_exchange: ContextExchanged = "ring",
    expert_parallel: ExpertParallel = None,
    expert_tensor_parallel: ExpertTensorParallel = 1,
    expert_imbalance: ExpertImbalance = None,
    recompute: Recompute = None,
    keep_gathered: KeepGathered = False,
    offload: Annotated[bool, typer.Option("--offload", help="Offer keeping activations in host memory.")] = False,
    lora: Annotated[
        int,
        typer.Option(
            "--lora",
            metavar="RANK",
            min=0,
            help="Train adapters of that rank beside every matrix of the layers (LoRA); 0 trains the model itself.",
        ),
    ] = 0,
    reserve: Annotated[
        float | None,
        typer.Option(
            "--reserve",
            metavar="SIZE",
            parser=parse_size,
            help="Leave so much of each GPU free, as 5GiB, for CUDA's context, communicators and what is stuck in the "
            "allocator, in place of what is usual.",
        ),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option("--hardware", metavar="FILE", help="A TOML file of constants over those of the built-in table."),
    ] = None,
    calibrate: Calibrate = None,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain", metavar="LAYER", help="Show how each figure of a layer (its kind or number) comes about."
        ),
    ] = None,
) -> None:
    """Estimate the workload of training MODEL on a cluster: layers, times, memory and communication."""
    from piper_ray.report.estimate_summary import file_text, summary_lines
    from piper_ray.workloads.estimate.build import EstimateRequest
    from piper_ray.workloads.estimate.build import estimate as run
    from piper_ray.workloads.estimate.hardware import load_hardware
    from piper_ray.workloads.estimate.modes import Offer

    if out is not None and out.suffix.lower() not in (".toml", ".json"):
        raise UsageError(f"--out {out}: unknown kind of file; expected a path that ends in .json or .toml")
    request = EstimateRequest(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        tokens=tokens,
        samples=microbatch,
        batch=batch,
        fused=not unfused_attention,
        software=software,
        precision=precision,
        offer=Offer(
            zero=zero,
            zero2=zero_2,
            fsdp=fsdp,
            offload=offload,
            contexts=contexts_of(context_parallel),
            experts=experts_of(expert_parallel),
            expert_tensor=expert_tensor_parallel,
            gathered=keep_gathered,
        ),
        recomputations=tuple(recompute or ()),
        context_exchange=context_exchange,
        expert_imbalance=expert_imbalance,
        lora=lora,
        reserve_bytes=reserve,
    )
    read = load_model(model)
    table = load_hardware(hardware, note)
    request = calibrated_request(calibrate, read, table, gpu, request)
    result = run(read, table, gpu, request)
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
