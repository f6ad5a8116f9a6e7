"""``piper-ray estimate``: a workload from a model's config and the name of a GPU; and the options that plan shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

import piper_ray
from piper_ray.cli.options import REQUIRED, argument, flag, of_options, option
from piper_ray.cli.shared import STDIN
from piper_ray.cli.telling import note
from piper_ray.cli.values import NamedNumber, command_text, parse_degrees, parse_rate, parse_size
from piper_ray.model.errors import UsageError
from piper_ray.model.mode import ALL_REPLICAS, parse_recomputation
from piper_ray.model.units import parse_tokens
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray.workloads.estimate.build import EstimateRequest
    from piper_ray.workloads.estimate.config import ModelConfig
    from piper_ray.workloads.estimate.hardware import Hardware
    from piper_ray.workloads.estimate.modes import Offer


def parse_replicas(text: str) -> int:
    """``8``, or ``all``. Raises UsageError."""
    if text.strip() == "all":
        return NamedNumber.of(ALL_REPLICAS, "all")
    return parse_some_replicas(text)


def parse_some_replicas(text: str) -> int:
    """The number of a text such as ``8``. Raises UsageError."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{text!r} is no number of replicas; expected one such as 8")
    return number


_KIND = "kind of GPU once, with 1 node or more, as A100-80:32"


@dataclass(frozen=True)
class ModelOptions:
    """MODEL, and where it is trained."""

    panel: ClassVar[str] = "Model and cluster"

    model: str = argument(
        "MODEL",
        "A Hugging Face config.json or id, or a model's name, such as llama3-70b; - reads a config from stdin.",
    )
    gpu: list[str] = option(
        "NAME",
        "The GPU, such as H100-SXM or A100-80. Of several kinds each with its nodes: --gpu A100-80:32 --gpu "
        "H100-SXM:32.",
        default=REQUIRED,
    )
    nodes: int | None = option("COUNT", "Nodes of the cluster.", min=1)
    gpus_per_node: int | None = option("COUNT", "GPUs of a node, in place of the table's.", min=1)
    domain: int | None = option(
        "COUNT", "GPUs that share the fast link, if it joins several nodes, such as 72 for NVL72.", min=1
    )
    uplink_bytes_per_s: float | None = option(
        "RATE",
        "The rate of an uplink that the GPUs of a fast link share, both directions together, such as 100GB/s; if "
        "left out, each GPU has its own network link.",
        "--uplink",
        parse=parse_rate,
    )
    site: list[str] | None = option(
        "NAME:NODES",
        "A site and its nodes; give one for each site, such as --site east:64 --site west:64 --between 5GB/s.",
    )
    between_bytes_per_s: float | None = option(
        "RATE",
        "The rate of a GPU between stages on different kinds of GPUs or at different sites, both directions together, "
        "as 50GB/s; if left out, that of the slower network.",
        "--between",
        parse=parse_rate,
    )
    tokens: int | None = option("COUNT", "Tokens of a sample, such as 8192 or 128k (131,072).", parse=parse_tokens)
    images: int | None = option("COUNT", "Images of a sample, for models with a vision tower; one if left out.", min=1)
    hardware: Path | None = option("FILE", "A TOML file whose constants replace those of the built-in table.")
    calibrate: Path | None = option(
        "FILE",
        "Measured steps of runs in their layouts, or a profiled workload of this model: fit the few constants that "
        "these determine, and print what changed.",
    )

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs as they are given, each once."""
        return tuple(dict.fromkeys(name.strip() for text in self.gpu for name in text.split(",")))

    @property
    def nodes_of_kinds(self) -> dict[str, int]:
        """The nodes of each kind of GPU, or at each site, where ``--gpu`` or ``--site`` says them; else none."""
        return self._kinds[0]

    @property
    def _kinds(self) -> tuple[dict[str, int], list[str]]:
        """The nodes of each kind or site, and the faults of what says them."""
        found: dict[str, int] = {}
        wrong: list[str] = []
        gpus = [name for text in self.gpu for name in text.split(",")]
        said = self.site or (gpus if any(":" in gpu for gpu in gpus) else [])
        option, each = ("--site", "site once, with 1 node or more, such as east:64") if self.site else ("--gpu", _KIND)
        for text in said:
            name, _, count = text.strip().partition(":")
            if not name or not count.isdecimal() or int(count) < 1 or name in found:
                wrong.append(f"{option} {text.strip()}")
            else:
                found[name] = int(count)
        faults = [f"{', '.join(wrong)}: expected each {each}"] if wrong else []
        if said and self.nodes is not None:
            faults.append(f"--nodes: {option} {said[0]} says how many nodes there are; give one of the two")
        return found, faults

    def gpu_of(self, kind: str) -> str:
        """The GPUs of a kind; at a site those that all sites have."""
        return self.gpus[0] if self.site else kind

    def refuse_mistakes(self) -> None:
        """Raises UsageError for clusters that are not said."""
        (kinds, faults), between_bytes_per_s = self._kinds, self.between_bytes_per_s
        if not kinds and not faults and self.nodes is None:
            faults.append(f"--nodes is missing; expected how many nodes of {self.gpus[0]} there are")
        if self.site and not faults and (len(kinds) < 2 or len(self.gpus) > 1 or ":" in self.gpus[0]):
            faults.append(
                "--site: expected several sites of one GPU, such as --gpu H100-SXM --site east:64 --site west:64"
            )
        if self.site and between_bytes_per_s is None:
            faults.append("--between is missing; expected the rate of a GPU between sites, such as 5GB/s")
        if len(kinds) < 2 and not faults and not self.site and between_bytes_per_s is not None:
            faults.append("--between: expected GPUs of several kinds, such as --gpu A100-80:32 --gpu H100-SXM:32")
        if between_bytes_per_s is not None and between_bytes_per_s <= 0.0:
            faults.append("--between: expected a rate above 0, such as 50GB/s")
        faults += self._faults_of_gpus()
        if faults:
            raise UsageError("\n".join(dict.fromkeys(faults)))

    @cached_property
    def _table(self) -> Hardware:
        """The GPUs. What its reader notes goes to stderr."""
        from piper_ray.workloads.estimate.hardware import load_hardware

        return load_hardware(self.hardware, note)

    def _faults_of_gpus(self) -> Iterator[str]:
        """Yields what is wrong about each GPU: its name, or the groups of it that share a link."""
        from piper_ray.workloads.estimate.build import EstimateRequest, links_of

        asked = EstimateRequest(nodes=1, gpus_per_node=self.gpus_per_node, domain=self.domain)
        for name in dict.fromkeys(gpu.partition(":")[0] for gpu in self.gpus):
            try:
                gpu = self._table.gpu(name)
                links_of(gpu, asked.domain_of(gpu), self.uplink_bytes_per_s)
            except UsageError as error:  # noqa: PERF203 - a fault for each GPU
                yield str(error)

    def read(self) -> tuple[ModelConfig, Hardware]:
        """The model, whose config is read from stdin for -, and the table. What their readers note goes to stderr."""
        from piper_ray.workloads.estimate.config import read_config, read_model, with_images

        found = read_config(sys.stdin.read(), "stdin") if self.model == str(STDIN) else read_model(self.model)
        for text in found.notes:
            note(text)
        if self.images is not None:
            found = with_images(found, self.images, self.tokens)
        return found, self._table

    def calibrated_on(
        self, gpu: str, model: ModelConfig, hardware: Hardware, request: EstimateRequest
    ) -> EstimateRequest:
        """The request as it is, or with what the file of measurements says of that GPU. Notes say what changed."""
        if self.calibrate is None:
            return request
        from piper_ray.calibrate.measurements import Estimated, calibrated

        found = calibrated(str(self.calibrate), Estimated(model, hardware, gpu, request))
        for text in found.calibration.notes:
            note(text)
        return found


@dataclass(frozen=True)
class OfferOptions:
    """Further ways to run layers that the workload is to have TMPCs of."""

    panel: ClassVar[str] = "Parallelism"

    zero: int = option(
        "SHARDS",
        "Offer sharding the optimizer's state (ZeRO-1) over this many replicas, in stages that have as many; all: over "
        "all replicas of a stage; 1: no sharding.",
        default=1,
        parse=parse_replicas,
    )
    context_parallel: str | None = option(
        "DEGREES",
        "Degrees of context parallelism to offer, such as 1,2,4: this many groups of t GPUs share a sequence. A "
        "plan's t counts the GPUs of all groups.",
    )
    expert_parallel: str | None = option(
        "DEGREES", "Degrees of expert parallelism to offer, such as 8,16, independent of t."
    )
    expert_tensor: int = option("COUNT", "GPUs that share an expert.", "--expert-tensor-parallel", default=1, min=1)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Degrees of context parallelism that are asked for, and none at all. Raises UsageError."""
        return tuple(sorted({1, *_degrees("--context-parallel", self.context_parallel)}))

    @property
    def experts(self) -> tuple[int, ...]:
        """Ranks that experts are to be spread over. Raises UsageError."""
        return _degrees("--expert-parallel", self.expert_parallel)


def _degrees(option: str, text: str | None) -> tuple[int, ...]:
    """``1,2,4``; none where nothing is asked for. Raises UsageError."""
    found = () if text is None else parse_degrees(option, text)
    if found and found[0] < 1:
        raise UsageError(f"{option} {text}: expected numbers from 1, such as 1,2,4")
    return found


@dataclass(frozen=True)
class EveryOfferOption(OfferOptions):
    """All that an estimate knows."""

    zero2: int = option(
        "SHARDS",
        "Offer sharding gradients too (ZeRO-2), which are scattered in each backward pass.",
        "--zero-2",
        default=1,
        parse=parse_some_replicas,
    )
    fsdp: int = option(
        "SHARDS",
        "Offer sharding weights too (ZeRO-3, FSDP) over this many replicas; stages of more replicas have several such "
        "groups (HSDP); all: over all replicas of a stage. Each pass gathers the weights.",
        default=1,
        parse=parse_replicas,
    )
    context_exchange: str = option(
        "NAME",
        "How groups that share a sequence attend to all its tokens: ring, all-gather (of keys and values) or "
        "all-to-all (of heads).",
        default="ring",
    )
    recompute: list[Any] | None = option(
        "PARTS",
        "Offer recomputing these parts of each layer, such as core_attn,mlp, in addition to those that suit the "
        "software; may be given again.",
        parse=parse_recomputation,
    )
    gathered: bool = flag(
        "Offer keeping what sequence parallelism would gather again in the backward pass.", "--keep-gathered"
    )
    offload: bool = flag("Offer keeping activations in host memory.")
    optimizer_on_host: bool | None = option(
        None,
        "Keep the optimizer's state in host memory, and update parameters there.",
        "--optimizer-on-host/--no-optimizer-on-host",
    )

    def offer(self) -> Offer:
        """Raises UsageError for figures that make no sense."""
        from piper_ray.workloads.estimate.modes import Offer

        return of_options(Offer, self, contexts=self.contexts, experts=self.experts)


def parse_overlaps(text: str) -> tuple[str, ...]:
    """``tensor,experts``. Raises UsageError."""
    from piper_ray.workloads.estimate.software import overlaps_named

    return tuple(one.value for one in overlaps_named(name.strip() for name in text.split(",")))


def parse_graphs(text: str) -> tuple[str, ...]:
    """``attn,moe_router``. Raises UsageError."""
    from piper_ray.workloads.estimate.software import graphs_named

    return tuple(one.value for one in graphs_named(name.strip() for name in text.split(",")))


@dataclass(frozen=True)
class RunningOptions:
    """How software runs the model."""

    panel: ClassVar[str] = "Software"

    precision: str = option("NAME", "Precision of matrix products: bf16, fp16 or fp8.", default="bf16")
    overlaps: Any = option(
        "NAMES",
        "Exchanges that overlap with passes, beyond those that the software overlaps by default: tensor, experts, "
        "context, or several, such as tensor,experts.",
        "--overlap",
        default="",
        parse=lambda text: parse_overlaps(text) if text else (),
    )
    graphs: Any = option(
        "NAMES",
        "What CUDA graphs capture, so that the host launches it as one: attn (all that is not routed to experts), "
        "moe_router (routing), or both, such as attn,moe_router; full_iteration: a whole step.",
        "--cuda-graphs",
        default="",
        parse=lambda text: parse_graphs(text) if text else (),
    )
    dispatcher: str | None = option(
        "NAME",
        "How tokens reach their experts: all-to-all (a copy for each expert), once-per-node (DeepEP, HybridEP: over "
        "the network once for each node) or all-gather. If not given, all-to-all among up to 8 ranks in nodes of up to "
        "8 GPUs, else once-per-node.",
    )
    expert_imbalance: float | None = option(
        "FACTOR",
        "Tokens of the GPU with the busiest experts over the average: 1.0 if they are balanced by force; 1.25 if not "
        "given.",
        min=1.0,
    )


@dataclass(frozen=True)
class TrainingOptions:
    """How the model is trained."""

    panel: ClassVar[str] = "Training"

    batch: int | None = option("SAMPLES", "Samples of a batch, over all replicas.", "--global-batch", min=1)
    samples: int | None = option("SAMPLES", "Samples of a microbatch.", "--microbatch-size", min=1)
    unfused_attention: bool = flag("Attention that keeps its scores, as before FlashAttention.")
    software: str = option(
        "NAME",
        "The generation of training software: megatron-core, nemo, fsdp, torchtitan, megascale, megatron-2022, "
        "megatron-2021, deepspeed-2021, or another of docs/explanation/pricing.md.",
        default="megatron-core",
    )
    lora: int = option(
        "RANK",
        "Train adapters of this rank for every matrix of the layers (LoRA); 0 trains the model itself.",
        default=0,
        min=0,
    )
    reserve_bytes: float | None = option(
        "SIZE",
        "Leave this much of each GPU free, such as 5GiB, for CUDA's context, communicators and the allocator's "
        "fragments, in place of what is usual.",
        parse=parse_size,
    )


@dataclass(frozen=True)
class EstimateOutput:
    """What is shown of the estimate."""

    panel: ClassVar[str] = "Answer"

    out: Path | None = option("FILE", "Write the workload to FILE (.toml, .json), not to stdout.", "-o", "--out")
    explain: str | None = option("LAYER", "Show how each figure of a layer (its kind or number) comes about.")


def estimate(
    context: typer.Context,
    modelled: ModelOptions,
    shown: EstimateOutput,
    trained: TrainingOptions,
    running: RunningOptions,
    offered: EveryOfferOption,
) -> None:
    """Estimate the workload of training MODEL on a cluster: layers, times, memory and communication."""
    from piper_ray.report.estimate import file_text, summary_lines
    from piper_ray.report.terminal import console, print_lines
    from piper_ray.workloads.estimate.build import EstimateRequest
    from piper_ray.workloads.estimate.build import estimate as run
    from piper_ray.workloads.estimate.kinds import joined

    out, explain = shown.out, shown.explain
    if out is not None and out.suffix.lower() not in (".toml", ".json"):
        raise UsageError(f"--out {out}: unknown kind of file; expected a path that ends in .json or .toml")
    modelled.refuse_mistakes()
    nodes = modelled.nodes_of_kinds or dict.fromkeys(modelled.gpus, modelled.nodes or 1)
    if len(nodes) > 1 and not modelled.nodes_of_kinds:
        raise UsageError(f"--gpu {modelled.gpus[0]}: expected each {_KIND}")

    def asked(count: int) -> EstimateRequest:
        return of_options(
            EstimateRequest,
            modelled,
            trained,
            running,
            offered,
            fused=not trained.unfused_attention,
            offer=offered.offer(),
            nodes=count,
            recomputations=tuple(offered.recompute or ()),
        )

    requests = {kind: (modelled.gpu_of(kind), asked(count)) for kind, count in nodes.items()}
    model, hardware = modelled.read()
    of_kind = {
        kind: run(model, hardware, gpu, modelled.calibrated_on(gpu, model, hardware, request))
        for kind, (gpu, request) in requests.items()
    }
    results, instance = [*of_kind.values()], joined(of_kind, modelled.between_bytes_per_s).instance
    for text in instance.notes:
        note(text)
    if explain is not None:
        from piper_ray.report.estimate import explanation_lines

        print_lines(console(), (line for result in results for line in explanation_lines(result, explain)))
        if out is None:
            return
    if out is not None and out.suffix.lower() == ".json":
        piper_ray.dump(instance, out)
    else:
        written = file_text(instance, results, command_text(context, hidden=("explain",)))
        if out is None:
            typer.echo(written, nl=False)
            return
        write_atomically(out, written)
    for place, result in enumerate(results):
        print_lines(console(), [*[""] * (place > 0), *summary_lines(result)])
