"""The kinds of values in inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from piper_ray.model import limits
from piper_ray.model.errors import UsageError
from piper_ray.model.units import parse_bytes, parse_bytes_per_s
from piper_ray.workloads.formats.faults import MANY, ONE, Words

FIGURE_WORDS = "a finite number >= 0"
SIZE_WORDS = "a size >= 0 in bytes, such as 8192 or 30MiB"
ID_WORDS = "a whole number"
COUNT_WORDS = f"a whole number from 1 to {limits.MICROBATCHES}"
DEGREE_WORDS = f"a whole number from 1 to {limits.DEVICES}"


def _whole(value: object) -> object:
    """2048.0 counts as 2048, since some programs write every number with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)


def _parsed(parse: Callable[[str], float]) -> Callable[[object], object]:
    def convert(value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parse(value)
        except UsageError as error:
            problem, _, hint = str(error).partition("; expected")[0].partition("; ")
            raise ValueError(f"{problem} ({hint})" if hint else problem) from None

    return convert


def _unsigned_zero(value: float) -> float:
    return value + 0.0  # -0.0 becomes 0.0, so that equal instances have equal digests


_NUMBER = Field(strict=True, ge=0, le=limits.FIGURE, allow_inf_nan=False)
_POSITIVE = Field(strict=True, ge=limits.LEAST_RATE, le=limits.FIGURE, allow_inf_nan=False)
_DEGREE = Field(strict=True, ge=1, le=limits.DEVICES)

Figure = Annotated[float, _NUMBER, AfterValidator(_unsigned_zero), Words(FIGURE_WORDS)]
Size = Annotated[
    float, _NUMBER, AfterValidator(_unsigned_zero), BeforeValidator(_parsed(parse_bytes)), Words(SIZE_WORDS)
]
LayerId = Annotated[int, Field(strict=True, ge=-limits.ID, le=limits.ID), WHOLE, Words(ID_WORDS)]
Degree = Annotated[int, _DEGREE, WHOLE, Words(DEGREE_WORDS)]
Place = Annotated[int, Field(strict=True, ge=0, le=limits.ID), WHOLE, Words("a whole number >= 0")]
Count = Annotated[int, Field(strict=True, ge=1, le=limits.MICROBATCHES), WHOLE, Words(COUNT_WORDS)]
Positive = Annotated[float, _POSITIVE]
PositiveSize = Annotated[float, _POSITIVE, BeforeValidator(_parsed(parse_bytes))]
PositiveRate = Annotated[float, _POSITIVE, BeforeValidator(_parsed(parse_bytes_per_s))]
SizeWithUnit = Annotated[float, _POSITIVE, BeforeValidator(_parsed(partial(parse_bytes, unit_required=True)))]
RateWithUnit = Annotated[float, _POSITIVE, BeforeValidator(_parsed(partial(parse_bytes_per_s, unit_required=True)))]


class Open(BaseModel):
    """A table whose unknown keys are ignored, as in upstream's own reader."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)


class Closed(BaseModel):
    """A table of our own format: an unknown key is a fault, since it is probably misspelt."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True, extra="forbid")


_Value = TypeVar("_Value")
_WHICH = Discriminator(lambda value: MANY if isinstance(value, (list, tuple)) else ONE)

OneOrMany = Annotated[Annotated[_Value, Tag(ONE)] | Annotated[list[_Value], Tag(MANY)], _WHICH]
"""A value, or a list of them."""

OneOrSome = Annotated[Annotated[_Value, Tag(ONE)] | Annotated[list[_Value], Field(min_length=1), Tag(MANY)], _WHICH]
"""A value, or a list of at least one."""
