"""What every family of models offers: a description that is read from a config, and the layers that it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field

from piper_ray.workloads.estimate.operators import Architecture
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.fields import Open

Config = TypeVar("Config", bound=Open)

_MOST = 2**24
_MOST_LAYERS = 2000
Count = Annotated[int, Field(strict=True, ge=1, le=_MOST, description=f"a whole number from 1 to {_MOST}")]
Layers = Annotated[int, Field(strict=True, ge=1, le=_MOST_LAYERS, description=f"a whole number to {_MOST_LAYERS}")]
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0, description="a share from 0 to 1")]
Flag = Annotated[bool, Field(strict=True, description="true or false")]


@dataclass(frozen=True)
class Microbatch:
    """What one pass works on: ``samples`` of ``tokens`` each. Families without a choice of length take no tokens.

    fused: attention as one kernel that keeps no scores.
    """

    samples: int
    tokens: int | None = None
    fused: bool = True


@dataclass(frozen=True)
class Family:
    """A family of models by its Hugging Face ``model_type``.

    check: notes what is wrong with a config beyond its fields' ranges. most_tokens: of a sample; None where the
    length is no choice. build: the layers of a config for a microbatch, named as given. tokens, samples, batch: of a
    sample, a microbatch and a batch where neither user nor model says; tokens at most what the model has.
    """

    config: type[Open]
    build: Callable[[Any, Microbatch, str], Architecture]
    check: Callable[[Any, Faults], None]
    most_tokens: Callable[[Any], int | None]
    tokens: int = 8192
    samples: int = 1
    batch: int = 1024


def no_length(_config: object) -> None:
    """For families whose samples have one length."""


def no_check(_config: object, _faults: Faults) -> None:
    """For families whose fields say it all."""
