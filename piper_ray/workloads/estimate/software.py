"""Generations of training software (``software.toml``): what each does by default, and what it makes of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Annotated

from pydantic import Field

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.hardware import Gpu
from piper_ray.workloads.formats.documents import parse_toml
from piper_ray.workloads.formats.fields import Closed, Figure, Positive

_Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0, description="a share from 0 to 1")]
_Efficiency = Annotated[float, Field(strict=True, gt=0.0, le=2.0, description="a number > 0 and at most 2")]


class Precision(str, Enum):
    """Of matrix products. FP8: those of linear layers; attention, the vocabulary projection and all else in bf16."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"


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
    selective_products: _Share = 0.0
    context_ring: bool = Field(default=True, strict=True, description="true or false")
    transfer_overlap: bool = Field(strict=True, description="true or false")
    expert_overlap: _Share = 0.0
    gradient_overlap: bool = Field(strict=True, description="true or false")
    gradient_bytes: Figure = Field(description="bytes >= 0")
    half_gradient_bytes: Figure = Field(description="bytes >= 0")
    optimizer_traffic_bytes: Figure = Field(description="bytes >= 0")
    step_s: Figure = Field(alias="step", description="seconds >= 0")

    def reduced_bytes(self, precision: Precision) -> float:
        """Of one gradient on its way to the other replicas."""
        return self.half_gradient_bytes if precision is Precision.FP16 else self.gradient_bytes


@dataclass(frozen=True)
class Stack:
    """What runs a layer: GPUs, so many in a node, and the software on them.

    imbalance: tokens of the busiest experts' device over those of all on average, where experts are spread.
    """

    gpu: Gpu
    software: Software
    precision: Precision = Precision.BF16
    gpus_per_node: int = 8
    imbalance: float = 1.25


@cache
def load_software() -> Mapping[str, Software]:
    """The generations by their keys."""
    text = files(__package__).joinpath("software.toml").read_text(encoding="utf-8")
    return {key: Software.model_validate(entry) for key, entry in parse_toml("software.toml", text).items()}


def software_named(key: str) -> Software:
    """That generation. Raises UsageError."""
    known = load_software()
    if key not in known:
        raise UsageError(f"software {key}: unknown; expected one of {', '.join(known)}")
    return known[key]
