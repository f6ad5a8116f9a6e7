"""The kinds of value that inputs are made of; K, N, M and B, which every input gives or leaves to the caller; and what
files may say besides of a cluster and a batch: links of smaller groups, samples and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from piper_ray.model import arguments, limits
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Batch
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.units import doubtful, parse_bytes, parse_bytes_per_s
from piper_ray.workloads.formats.faults import Faults, Words, shown

FIGURE_WORDS = "a finite number >= 0"
SIZE_WORDS = "a size >= 0 in bytes, such as 8192 or 30MiB"
ID_WORDS = "a whole number"
COUNT_WORDS = f"a whole number from 1 to {limits.MICROBATCHES}"
DEGREE_WORDS = f"a whole number from 1 to {limits.DEVICES}"


def _whole(value: object) -> object:
    """2048.0 is as good as 2048: some programs write every number with a point."""
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
Count = Annotated[int, Field(strict=True, ge=1, le=limits.MICROBATCHES), WHOLE, Words(COUNT_WORDS)]
Positive = Annotated[float, _POSITIVE]
PositiveSize = Annotated[float, _POSITIVE, BeforeValidator(_parsed(parse_bytes))]
PositiveRate = Annotated[float, _POSITIVE, BeforeValidator(_parsed(parse_bytes_per_s))]
SizeWithUnit = Annotated[float, _POSITIVE, BeforeValidator(_parsed(partial(parse_bytes, unit_required=True)))]
RateWithUnit = Annotated[float, _POSITIVE, BeforeValidator(_parsed(partial(parse_bytes_per_s, unit_required=True)))]


class Open(BaseModel):
    """Keys that no field names are passed over, as upstream's own reader does."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)


class Closed(BaseModel):
    """A table of our own format: a key that no field names is a fault, most likely a misspelt one."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True, extra="forbid")


@dataclass(frozen=True)
class Quantities:
    """K, N, M and B: of a file, or (None where it is not said) what the caller puts in their place."""

    devices: int | None = None
    microbatches: int | None = None
    memory_bytes: float | None = None
    bandwidth_bytes_per_s: float | None = None


CLUSTER_RULES: Mapping[str, tuple[TypeAdapter[Any], TypeAdapter[Any], str, str]] = {
    # quantity: (a plain number, a number or text with a unit, what is expected, the option that gives it)
    "devices": (TypeAdapter(Degree), TypeAdapter(Degree), DEGREE_WORDS, "--devices"),
    "microbatches": (TypeAdapter(Count), TypeAdapter(Count), COUNT_WORDS, "--microbatches"),
    "memory_bytes": (TypeAdapter(Positive), TypeAdapter(PositiveSize), "a finite size > 0 in bytes", "--memory"),
    "bandwidth_bytes_per_s": (
        TypeAdapter(Positive),
        TypeAdapter(PositiveRate),
        "a finite rate > 0 in bytes per second",
        "--bandwidth",
    ),
}

_PER_SECOND = {"memory_bytes": "", "bandwidth_bytes_per_s": "/s"}


def read_cluster(
    given: Mapping[str, tuple[str, object]],
    missing_paths: Mapping[str, str],
    overrides: Quantities,
    faults: Faults,
    *,
    units: bool,
) -> Quantities:
    """K, N, M and B from ``given`` ({quantity: (path, value)}), an override in place of each that has one.

    What is overridden is not looked at. A size that most likely lacks its unit is noted. ``units``: text such as
    "80GB" is a size. A quantity that is neither given nor overridden is a fault at its entry of ``missing_paths``.
    """
    values: dict[str, Any] = {}
    for quantity, (plain, with_units, expected, option) in CLUSTER_RULES.items():
        override = getattr(overrides, quantity)
        if override is not None:
            values[quantity] = override
        elif quantity in given:
            path, value = given[quantity]
            read = values[quantity] = faults.value(with_units if units else plain, value, path, expected)
            if read is not None and quantity in _PER_SECOND:
                doubt = doubtful(read, _PER_SECOND[quantity], with_units=units)
                if doubt is not None:
                    faults.note(path, doubt)
        else:
            faults.at(missing_paths[quantity], f"missing; expected {expected} (or give {option})")
    return Quantities(**values)


_COUNT: TypeAdapter[int] = TypeAdapter(Count)
_LINKS_WORDS = "a list of objects with devices and bandwidth, the smallest groups first"


class InnerLink(Closed):
    """A link that joins groups of ``devices`` devices; B is the one that joins all."""

    devices: Degree
    bandwidth: PositiveRate = Field(description="a finite rate > 0 in bytes per second, such as 900GB/s")


def read_surroundings(
    quantities: Quantities,
    overrides: Quantities,
    inner_links: tuple[str, object],
    counts: tuple[int | None, ...],
    faults: Faults,
) -> dict[str, Any]:
    """``cluster`` and ``batch`` for an Instance, once there are no faults.

    inner_links: where a file has them, and what (None: nothing). counts: samples of a microbatch, tokens of a sample.
    A bandwidth in place of the file's own takes the place of all links.
    """
    links = () if overrides.bandwidth_bytes_per_s is not None else _read_links(*inner_links, faults)
    figures: Any = quantities  # all are there, or there are faults
    return {
        "cluster": Cluster(figures.devices, figures.memory_bytes, (*links, Link(figures.bandwidth_bytes_per_s))),
        "batch": Batch(figures.microbatches, *counts),
    }


def read_count(document: Mapping[str, object], key: str, faults: Faults) -> int | None:
    """None where the document does not say."""
    return None if document.get(key) is None else faults.value(_COUNT, document[key], key, COUNT_WORDS)


def read_schedule(name: object, chunks: object, group: object, path: str, faults: Faults) -> Schedule | None:
    """That which plans are to run under. path: where its name stands."""
    if name is None and chunks is None and group is None:
        return None
    try:
        arguments.of_kind("schedule", name, str, f"one of {', '.join(x.value for x in ScheduleName)}")
        return Schedule(name, chunks, group)  # type: ignore[arg-type]  # it looks at all three
    except UsageError as error:
        faults.at(path, str(error))
        return None


def _read_links(path: str, value: object, faults: Faults) -> Sequence[Link]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        faults.at(path, f"not a list ({shown(value)}); expected {_LINKS_WORDS}")
        return ()
    links: list[Link] = []
    for index, item in enumerate(value):
        link = faults.model(InnerLink, item, f"{path}[{index}]")
        if link is None:
            continue
        before = links[-1].devices if links and links[-1].devices is not None else 1
        if link.devices % before:
            faults.at(f"{path}[{index}].devices", f"{link.devices}; expected a multiple of {before}, the group before")
        links.append(Link(link.bandwidth, link.devices))
    return links
