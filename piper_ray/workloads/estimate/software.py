"""Generations of training software (``software.toml``): what each does by default, and what it makes of a GPU.

A ``Calibration`` is what measurements change of the constants: factors on a few rates, applied to a stack in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Annotated

from pydantic import Field

from piper_ray.model.arguments import choice, did_you_mean
from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.formats.documents import parse_toml
from piper_ray.workloads.formats.fields import Closed, Figure, Positive

_Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0, description="a share from 0 to 1")]
_Efficiency = Annotated[float, Field(strict=True, gt=0.0, le=2.0, description="a number > 0 and at most 2")]


DEFAULT_SOFTWARE = "megatron-core"
"""The generation that is assumed where nobody says which."""


DEFAULT_IMBALANCE = 1.25
"""Tokens of the busiest experts' device over the average, as routers with a balancing loss leave it."""


class Precision(str, Enum):
    """The precision of matrix products. FP8: the products of linear layers are in fp8; attention, the vocabulary
    projection and all else are in bf16."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


class ContextExchange(str, Enum):
    """How groups that share a sequence's tokens attend to all of them. RING: keys and values go around a ring beside
    attention (Liu et al. 2023). ALL_GATHER: they are gathered before it (Grattafiori et al. 2024, section 3.3.2).
    ALL_TO_ALL: heads are handed out in place of tokens (Jacobs et al. 2023)."""

    RING = "ring"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"


class Software(Closed):
    """A generation of software; see software.toml for what each figure means."""

    name: str = Field(description="a text")
    efficiency: _Efficiency
    host_s: Figure = Field(alias="host", description="seconds >= 0")
    message_s: Figure = Field(alias="message", description="seconds >= 0")
    loss_traffic: Positive = Field(default=1.0, description="a number > 0")
    cast_bytes: Figure = Field(default=4.0, description="bytes >= 0")
    forward_overlap: _Share
    backward_overlap: _Share
    selective: list[str] = Field(default=[], description="a list of parts of a layer")
    context: ContextExchange = Field(default=ContextExchange.RING, description="ring, all-gather or all-to-all")
    transfer_overlap: bool = Field(strict=True, description="true or false")
    expert_overlap: _Share = 0.0
    gradient_overlap: bool = Field(strict=True, description="true or false")
    gradient_bytes: Figure | None = Field(default=None, description="bytes >= 0")
    half_gradient_bytes: Figure = Field(description="bytes >= 0")
    optimizer_traffic_bytes: Figure = Field(description="bytes >= 0")
    step_s: Figure = Field(alias="step", description="seconds >= 0")

    def reduced_bytes(self, precision: Precision, training: Training) -> float:
        """The bytes of one gradient on its way to the other replicas."""
        if precision is Precision.FP16:
            return self.half_gradient_bytes
        return training.gradient_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True)
class Stack:
    """What runs a layer: GPUs, so many in a node, and the software on them.

    imbalance: tokens of the busiest experts' device over those of all on average, where experts are spread.
    """

    gpu: Gpu
    software: Software
    precision: Precision = Precision.BF16
    gpus_per_node: int = 8
    imbalance: float = DEFAULT_IMBALANCE


def stack_of(gpu: Gpu, software: Software, precision: Precision, gpus_per_node: int) -> Stack:
    """Raises UsageError for a precision that the GPU has no units for."""
    if precision is Precision.FP8 and gpu.matrix_fp8_flop_per_s == 0.0:
        raise UsageError(f"{gpu.name} has no products of 8 bits; expected precision bf16 or fp16")
    return Stack(gpu, software, precision, gpus_per_node)


@cache
def load_software() -> Mapping[str, Software]:
    """The generations by their keys."""
    text = files(__package__).joinpath("software.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, object]] = parse_toml("software.toml", text)  # type: ignore[assignment]
    merged = {key: {**table.get(str(entry.get("base")), {}), **entry} for key, entry in table.items()}
    return {
        key: Software.model_validate({name: value for name, value in entry.items() if name != "base"})
        for key, entry in merged.items()
    }


def software_named(key: str) -> Software:
    """The generation of that name. Raises UsageError."""
    known = load_software()
    if key not in known:
        raise UsageError(f"software {key}: unknown; expected one of {', '.join(known)}{did_you_mean(key, known)}")
    return known[key]


def precision_named(name: str) -> Precision:
    """The precision of that name. Raises UsageError."""
    return choice("precision", name, Precision)


def context_exchange_named(name: str) -> ContextExchange:
    """The way to exchange context of that name. Raises UsageError."""
    return choice("context exchange", name, ContextExchange)


class Constant(str, Enum):
    """A rate that measurements may correct; its value is what it is called. The first is fitted before all others."""

    WORK = "work on the GPU"
    MEMORY = "memory-bound work"
    LINKS = "links within a node"
    NETWORK = "the network"
    HOST = "the host's launches and messages"


@dataclass(frozen=True)
class Calibration:
    """factors: how many times as fast as the tables say; 1 where nothing is said. told: how it came about, in words.

    Memory-bound work is work on the GPU, too: both factors count.
    """

    factors: Mapping[Constant, float] = field(default_factory=dict)
    told: tuple[str, ...] = ()

    def factor(self, constant: Constant) -> float:
        """The factor of a constant; above 1 it is faster."""
        return self.factors.get(constant, 1.0)

    def applied(self, stack: Stack) -> Stack:
        """The stack with its constants corrected. Shares of a data sheet's rate stay shares: at most 1."""
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
