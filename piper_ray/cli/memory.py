"""``piper-ray memory``: what each rank of a layout will hold."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from piper_ray.cli.options import REQUIRED, argument, option
from piper_ray.cli.shared import STDIN, JsonOption, LaunchOptions
from piper_ray.cli.telling import note, show_document
from piper_ray.model.units import parse_tokens


@dataclass(frozen=True)
class LaidModelOptions:
    """MODEL, how it is laid out, and on what."""

    model: str = argument(
        "MODEL",
        "A Hugging Face config.json or id, or a model's name, such as llama3-70b; - reads a config from stdin.",
    )
    layout: str = option(
        "LAYOUT",
        "Words such as tp=4,pp=8,dp=2,mbs=1,gbs=256,recompute=mlp; or Megatron's launch "
        "arguments or a configuration of torchtitan, FlagScale or Megatron-Bridge, as text or file.",
        default=REQUIRED,
    )
    gpu: str | None = option("NAME", "The GPU that it has to fit on, such as H100-SXM.")
    gpus: int | None = option("COUNT", "All GPUs, if LAYOUT does not give the number of replicas.", min=1)
    tokens: int | None = option("COUNT", "Tokens of a sample, such as 8192 or 128k (131,072).", parse=parse_tokens)
    global_batch: int | None = option("SAMPLES", "Samples of a batch, over all replicas.", min=1)
    microbatch_size: int | None = option("SAMPLES", "Samples of a microbatch.", min=1)
    precision: str | None = option("NAME", "Precision of products: bf16 (if not given), fp16 or fp8.")
    software: str | None = option(
        "NAME", "The generation of training software, as estimate has it; megatron-core if not given."
    )
    hardware: Path | None = option("FILE", "A TOML file whose constants replace those of the built-in table.")


def memory(laid: LaidModelOptions, launched: LaunchOptions, told_as: JsonOption) -> None:
    """Show what each rank of a LAYOUT of MODEL will hold, by term: weights, gradients, optimizer state, activations of
    the microbatches in flight, loss, buffers, and what is reserved.

    What LAYOUT does not say is assumed, and the answer lists it.
    """
    from piper_ray.export.launched import source_of
    from piper_ray.export.memory import memory_of_layout
    from piper_ray.report.memory import memory_document, print_memory
    from piper_ray.report.terminal import console
    from piper_ray.workloads.estimate.config import read_config, read_model
    from piper_ray.workloads.estimate.hardware import load_hardware

    model = read_config(sys.stdin.read(), "stdin") if laid.model == str(STDIN) else read_model(laid.model)
    source, of_folder = source_of(laid.layout)
    names = "tokens", "global_batch", "microbatch_size", "precision", "software"
    given = {name: getattr(laid, name) for name in names}
    table = load_hardware(laid.hardware, note)
    given["gpus"] = laid.gpus or of_folder.world
    found = memory_of_layout(model, source, table, laid.gpu, given, launched.asked())
    if told_as.json:
        show_document(memory_document(found))
    else:
        print_memory(console(), found)
