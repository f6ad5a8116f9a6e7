"""Generations of training software (``software.toml``): the defaults of each, and the rates that it reaches on a GPU.

A ``Calibration`` holds the corrections that measurements give: factors on a few rates, applied to a stack in one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from typing import Annotated

from pydantic import Field

from piper_ray.model.arguments import choice, did_you_mean
from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.estimate.runtimes import Loss, Traits
from piper_ray.workloads.formats.documents import package_table, with_bases
from piper_ray.workloads.formats.fields import Closed, Figure, Positive

_Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0, description="a share from 0 to 1")]
_Efficiency = Annotated[float, Field(strict=True, gt=0.0, le=2.0, description="a number > 0 and at most 2")]


DEFAULT_SOFTWARE = "megatron-core"
"""The generation that is assumed if nobody names one."""


DEFAULT_IMBALANCE = 1.25
"""Tokens of the device with the busiest experts over the average, for routers with a balancing loss."""

BALANCED = 1.0
"""The same if a benchmark balances tokens by force."""


_STRAGGLING_FROM = 256
"""Up to this many GPUs the efficiency includes the wait for the slowest; each doubling beyond adds the software's
straggling."""


class Precision(str, Enum):
    """The precision of matrix products. FP8: the products of linear layers are in fp8; attention, the vocabulary
    projection and all else are in bf16."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


class ContextExchange(str, Enum):
    """How groups that share a sequence's tokens attend to all of them. RING: keys and values go around a ring during
    attention (Liu et al. 2023). ALL_GATHER: they are gathered before it (Grattafiori et al. 2024, section 3.3.2).
    ALL_TO_ALL: heads are handed out in place of tokens (Jacobs et al. 2023)."""

    RING = "ring"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"


class TokenDispatcher(str, Enum):
    """How tokens reach experts on other devices. ALL_TO_ALL: a copy for each expert of a token. ONCE_PER_NODE: over the
    network once for each node, whose links hand it on (DeepEP, HybridEP). ALL_GATHER: every device gets all tokens.
    """

    ALL_TO_ALL = "all-to-all"
    ONCE_PER_NODE = "once-per-node"
    ALL_GATHER = "all-gather"


class SoftwareFamily(str, Enum):
    """Software whose estimates have similar errors. SHARDED: weights are sharded, as by FSDP."""

    OLDER = "before 2023"
    SHARDED = "sharded"
    TODAY = "since 2023"


class Overlap(str, Enum):
    """Exchanges that software hides behind passes on request."""

    TENSOR = "tensor"
    EXPERTS = "experts"
    CONTEXT = "context"


class CudaGraph(str, Enum):
    """What CUDA graphs capture, in Megatron's words; the host launches a graph as one. ATTENTION: all that is not
    routed; ALL: a whole step."""

    ATTENTION = "attn"
    ROUTING = "moe_router"
    ALL = "full_iteration"


class Software(Closed):
    """A generation of software; software.toml explains each figure."""

    name: str = Field(description="a text")
    base: str = Field(description="another generation, whose constants it has, or itself")
    family: SoftwareFamily = Field(strict=False, description="before 2023, sharded or since 2023")
    efficiency: _Efficiency
    products: _Share = 1.0
    attention: _Share | None = None
    unfused: Positive = Field(default=1.0, description="a number > 0")
    gather_slowdown: _Share = 0.25
    host_s: Figure = Field(alias="host", description="seconds >= 0")
    full_node_host: Positive = Field(default=1.0, description="a number > 0")
    fused_matrices: int = Field(default=1, strict=True, ge=1, description="a whole number >= 1")
    message_s: Figure = Field(alias="message", description="seconds >= 0")
    loss_traffic: Positive = Field(default=1.0, description="a number > 0")
    cast_bytes: Figure = Field(default=4.0, description="bytes >= 0")
    straggling: Figure = Field(default=0.0, description="a number >= 0")
    tensor_slowdown: Positive = Field(default=1.0, description="a number > 0")
    forward_overlap: _Share
    backward_overlap: _Share
    selective: list[str] = Field(default=[], description="a list of parts of a layer")
    context: ContextExchange = Field(default=ContextExchange.RING, description="ring, all-gather or all-to-all")
    transfer_overlap: bool = Field(strict=True, description="true or false")
    expert_overlap: _Share = 0.0
    context_overlap: bool = Field(default=False, strict=True, description="true or false")
    graphs: tuple[CudaGraph, ...] = Field(default=(), strict=False, description="a list of what graphs capture")
    asked_tensor_overlap: _Share = 0.0
    asked_expert_overlap: _Share = 0.0
    dispatch_fraction: _Share = 0.8
    experts_host_s: Figure = Field(default=0.0, alias="experts_host", description="seconds >= 0")
    graphed_experts_host: _Share = 1.0
    expert_launches: Positive = Field(default=1.0, description="a number > 0")
    asked_expert_launches: Positive = Field(default=1.0, description="a number > 0")
    dispatcher: TokenDispatcher | None = Field(
        default=None, strict=False, description="a way to send tokens to experts"
    )
    gradient_overlap: bool = Field(strict=True, description="true or false")
    gradient_bytes: Figure | None = Field(default=None, description="bytes >= 0")
    loss: Loss = Field(default=Loss.IN_PLACE, strict=False, description="in place, fused or separate")
    half_gradient_bytes: Figure = Field(description="bytes >= 0")
    optimizer_traffic_bytes: Figure = Field(description="bytes >= 0")
    step_s: Figure = Field(alias="step", description="seconds >= 0")

    def overlapping(self, overlaps: Iterable[Overlap]) -> Software:
        """The software with these exchanges overlapped."""
        found = set(overlaps)
        changed: dict[str, object] = {"context_overlap": self.context_overlap or Overlap.CONTEXT in found}
        if Overlap.TENSOR in found:
            changed["forward_overlap"] = max(self.forward_overlap, self.asked_tensor_overlap)
            changed["backward_overlap"] = max(self.backward_overlap, self.asked_tensor_overlap)
        if Overlap.EXPERTS in found:
            changed["expert_overlap"] = max(self.expert_overlap, self.asked_expert_overlap)
            changed["expert_launches"] = max(self.expert_launches, self.asked_expert_launches)
        return self.model_copy(update=changed)

    def reduced_bytes(self, precision: Precision, training: Training) -> float:
        """The bytes of one gradient on its way to the other replicas."""
        if precision is Precision.FP16:
            return self.half_gradient_bytes
        return training.gradient_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True)
class Stack:
    """What runs a layer: GPUs, and the software on them.

    domain: the number of GPUs that share the fast link. imbalance: tokens of the device with the busiest experts over
    the average, if experts are spread. devices: GPUs of the whole cluster.
    """

    gpu: Gpu
    software: Software
    precision: Precision = Precision.BF16
    domain: int = 8
    imbalance: float = DEFAULT_IMBALANCE
    devices: int = 1

    @property
    def is_large(self) -> bool:
        """Whether there are so many GPUs that waiting for the slowest counts."""
        return self.devices > _STRAGGLING_FROM

    @property
    def efficiency(self) -> float:
        """The software's efficiency, less the wait for the slowest of many GPUs."""
        doublings = max(0.0, math.log2(self.devices / _STRAGGLING_FROM))
        return self.software.efficiency / (1.0 + self.software.straggling * doublings)

    @cached_property
    def traits(self) -> Traits:
        """How the runtime holds memory."""
        by_heads = self.software.context is ContextExchange.ALL_TO_ALL
        return Traits(loss=self.software.loss, fp8=self.precision is Precision.FP8, context_all_to_all=by_heads)

    def launch_s(self, degree: int) -> float:
        """Host seconds to launch one operator's kernels on ``degree`` GPUs of tensor parallelism. Each waits for the
        slowest host, and the processes of a group that fills a node have no idle cores to spread to."""
        full = 1 < self.domain <= degree
        return self.software.host_s * (self.software.full_node_host if full else 1.0)


def stack_of(gpu: Gpu, software: Software, precision: Precision, domain: int) -> Stack:
    """The stack for a GPU and a software. Raises UsageError for a precision that the GPU has no units for."""
    if precision is Precision.FP8 and gpu.matrix_fp8_flop_per_s == 0.0:
        raise UsageError(f"{gpu.name} has no products of 8 bits; expected precision bf16 or fp16")
    attention = 1.0 if software.attention is None else gpu.ampere_attention * software.attention
    reached = {
        "matrix_fraction": gpu.matrix_fraction * software.products,
        "attention_fraction": gpu.attention_fraction * attention,
    }
    return Stack(gpu.model_copy(update=reached), software, precision, domain)


@cache
def load_software() -> Mapping[str, Software]:
    """The generations by their keys."""
    table = with_bases(package_table("piper_ray.workloads.estimate", "software.toml"))
    return {key: Software.model_validate({"base": key, **entry}) for key, entry in table.items()}


def software_named(key: str) -> Software:
    """The generation of that name. Raises UsageError."""
    known = load_software()
    if key not in known:
        raise UsageError(f"software {key}: unknown; expected one of {', '.join(known)}{did_you_mean(key, known)}")
    return known[key]


def precision_named(name: str) -> Precision:
    """The precision of that name. Raises UsageError."""
    return choice("precision", name, Precision)


def dispatcher_named(name: str) -> TokenDispatcher:
    """The dispatcher of this name. Raises UsageError; for the name of a kernel library it says what to write here."""
    if str(name).lower() in ("deepep", "hybridep"):
        raise UsageError(f"dispatcher {name} is {TokenDispatcher.ONCE_PER_NODE.value} here: give that")
    return choice("dispatcher", name, TokenDispatcher)


def graphs_named(names: Iterable[str]) -> tuple[CudaGraph, ...]:
    """The captured parts of these names. Raises UsageError."""
    return tuple(choice("cuda graph", name, CudaGraph) for name in names)


def overlaps_named(names: Iterable[str]) -> tuple[Overlap, ...]:
    """The exchanges of these names. Raises UsageError."""
    return tuple(choice("overlap", name, Overlap) for name in names)


def context_exchange_named(name: str) -> ContextExchange:
    """The way to exchange context of that name. Raises UsageError."""
    return choice("context exchange", name, ContextExchange)


class Constant(str, Enum):
    """A rate that measurements may correct; the value is its name for people. The first is fitted before all others."""

    WORK = "work on the GPU"
    MEMORY = "memory-bound work"
    LINKS = "links within a node"
    NETWORK = "the network"
    HOST = "the host's launches and messages"


@dataclass(frozen=True)
class Spread:
    """The range of measured over estimated steps, from least to most, in 9 of 10 further layouts on the measured
    machine."""

    least: float
    most: float
    runs: int


@dataclass(frozen=True)
class Calibration:
    """Corrections of constants.

    factors: how many times as fast as the tables say; 1 if nothing is known. notes: how they were found, in words.
    spread: how far off further steps may be; None if there are too few measured steps. Memory-bound work is also work
    on the GPU, so both factors count.
    """

    factors: Mapping[Constant, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    spread: Spread | None = None

    def factor(self, constant: Constant) -> float:
        """The factor of a constant; above 1: faster than the table says."""
        return self.factors.get(constant, 1.0)

    def applied(self, stack: Stack) -> Stack:
        """The stack with corrected constants. Shares of a data sheet's rate stay at most 1."""
        if not self.factors:
            return stack
        gpu, software = stack.gpu, stack.software
        shares = {
            "memory_fraction": gpu.memory_fraction * self.factor(Constant.MEMORY),
            "link_fraction": gpu.link_fraction * self.factor(Constant.LINKS),
            "network_fraction": gpu.network_fraction * self.factor(Constant.NETWORK),
        }
        host = self.factor(Constant.HOST)
        changed = {
            "efficiency": software.efficiency * self.factor(Constant.WORK),
            "host_s": software.host_s / host,
            "message_s": software.message_s / host,
        }
        return replace(
            stack,
            gpu=gpu.model_copy(update={name: min(1.0, share) for name, share in shares.items()}),
            software=software.model_copy(update=changed),
        )


UNCALIBRATED = Calibration()
