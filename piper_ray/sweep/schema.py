"""A sweep as TOML: workloads, and the points to plan them at, as grids (every combination) and as a list.

    name = "A100"

    [workloads]                          # label = path, relative to this file
    bert32 = "../bert32-a100.toml"
    gnmt = { path = "gnmt/graph.txt", in_flight = "stashing" }

    [options]                            # of every solve; each may be left out
    gap = 0.01                           # stop within this share of the best; 0, a proof, if left out
    time_limit_s = 600

    [[grid]]                             # or [grid] if there is one; a value or a list for each
    workloads = ["bert32", "gnmt"]       # all if left out
    devices = ["8..64:8", "128..2048*2"] # from, to, and a step or a factor
    microbatches = [512, 1920]
    memory = ["8GiB", "80GB"]
    bandwidth = "25GB/s"
    tensor_parallelism = [true, false]   # allowed or not
    data_parallelism = true
    recompute = ["auto", "never"]        # auto, always, never, all-or-none
    schedules = ["2bw", "1f1b"]          # that plans are for; with chunks on each rank as "interleaved:4"
    planners = ["piper", "gpipe"]        # piper is the exact solver; the others are piper_ray.planners.PLANNERS

    [[points]]                           # the same keys, one value each
    workload = "bert32"
    devices = 96
    planner = "megatron"

Of devices, microbatches, memory, bandwidth and the schedule, what is left out is the workload's own. Memory and
bandwidth are texts with a unit, or numbers of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from piper_ray.model import limits
from piper_ray.model.constraints import Recompute
from piper_ray.model.errors import UsageError
from piper_ray.model.options import EXACT
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.planners import ALL_NAMES
from piper_ray.workloads.formats.faults import MANY, ONE, shown
from piper_ray.workloads.formats.fields import Closed, Count, Degree, RateWithUnit, SizeWithUnit
from piper_ray.workloads.formats.forms import InFlight

POINTS = 1_000_000
"""At most, in one sweep."""

_RANGE = re.compile(r"\s*(\d{1,12})\s*\.\.\s*(\d{1,12})\s*(?:([:*])\s*(\d{1,12})\s*)?")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{,99}")

_COUNTS_WORDS = "whole numbers from 1 to {}, or ranges such as 8..64:8 (step) and 8..2048*2 (factor)"
_DEVICES_WORDS = _COUNTS_WORDS.format(limits.DEVICES)
_MICROBATCHES_WORDS = _COUNTS_WORDS.format(limits.MICROBATCHES)
_SIZE_WORDS = "a size > 0 such as 8GiB or 80GB"
_RATE_WORDS = "a rate > 0 such as 25GB/s"
_RECOMPUTE_WORDS = "one of " + ", ".join(rule.value for rule in Recompute)
_SCHEDULE_WORDS = f"one of {', '.join(name.value for name in ScheduleName)}, chunks of a rank behind a colon"
_PLANNER_WORDS = "one of " + ", ".join(ALL_NAMES)


def counts(text: str) -> tuple[int, ...]:
    """``8..64:8`` and ``8..2048*2`` written out; without a step, every number. Raises ValueError."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"no range ({shown(text)})")
    first, last = int(match[1]), int(match[2])
    multiply, step = match[3] == "*", int(match[4] or 1)
    if first < 1 or last < first or step < 1 or (multiply and step < 2):
        raise ValueError(f"an empty or endless range ({shown(text)})")
    if multiply:
        found = [first]
        while found[-1] * step <= last:
            found.append(found[-1] * step)
        return tuple(found)
    if (last - first) // step >= POINTS:
        raise ValueError(f"a range of more than {POINTS:,} numbers ({shown(text)})")
    return tuple(range(first, last + 1, step))


def _counts_up_to(most: int) -> Callable[[object], tuple[int, ...]]:
    def convert(value: object) -> tuple[int, ...]:
        found: tuple[object, ...] = counts(value) if isinstance(value, str) else (value,)
        numbers = tuple(number for number in found if isinstance(number, int) and not isinstance(number, bool))
        if len(numbers) < len(found) or not all(1 <= number <= most for number in numbers):
            raise ValueError(f"out of range ({shown(value)})")
        return numbers

    return convert


def _known(names: tuple[str, ...]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"unknown ({shown(value)})")
        return value

    return check


def schedule_named(text: str) -> Schedule:
    """``1f1b``, or ``interleaved:4`` for one with 4 chunks on each rank. Raises ValueError."""
    name, separator, chunks = text.partition(":")
    try:
        if separator and not chunks.isdecimal():
            raise ValueError(f"no number of chunks ({shown(text)})")
        named = Schedule.of(name)
        return Schedule(named.name, int(chunks)) if separator else named
    except UsageError as error:
        raise ValueError(f"{error} ({shown(text)})") from None


def check_label(label: str) -> bool:
    """Labels are folders of the dataset."""
    return _LABEL.fullmatch(label) is not None


def _named_schedule(text: str) -> str:
    schedule_named(text)
    return text


def _branch(value: object) -> str:
    return MANY if isinstance(value, (list, tuple)) else ONE


_ONE_OR_MANY = Discriminator(_branch)
_Devices = Annotated[tuple[int, ...], BeforeValidator(_counts_up_to(limits.DEVICES))]
_Batches = Annotated[tuple[int, ...], BeforeValidator(_counts_up_to(limits.MICROBATCHES))]
_Recompute = Annotated[str, AfterValidator(_known(tuple(rule.value for rule in Recompute)))]
_Schedule = Annotated[str, AfterValidator(_named_schedule)]
_Planner = Annotated[str, AfterValidator(_known(ALL_NAMES))]
_Some = Field(min_length=1)

_DevicesAxis = Annotated[Annotated[_Devices, Tag(ONE)] | Annotated[list[_Devices], _Some, Tag(MANY)], _ONE_OR_MANY]
_BatchesAxis = Annotated[Annotated[_Batches, Tag(ONE)] | Annotated[list[_Batches], _Some, Tag(MANY)], _ONE_OR_MANY]
_SizeAxis = Annotated[Annotated[SizeWithUnit, Tag(ONE)] | Annotated[list[SizeWithUnit], _Some, Tag(MANY)], _ONE_OR_MANY]
_RateAxis = Annotated[Annotated[RateWithUnit, Tag(ONE)] | Annotated[list[RateWithUnit], _Some, Tag(MANY)], _ONE_OR_MANY]
_FlagAxis = Annotated[Annotated[bool, Tag(ONE)] | Annotated[list[bool], _Some, Tag(MANY)], _ONE_OR_MANY]
_RuleAxis = Annotated[Annotated[_Recompute, Tag(ONE)] | Annotated[list[_Recompute], _Some, Tag(MANY)], _ONE_OR_MANY]
_ScheduleAxis = Annotated[Annotated[_Schedule, Tag(ONE)] | Annotated[list[_Schedule], _Some, Tag(MANY)], _ONE_OR_MANY]
_PlannerAxis = Annotated[Annotated[_Planner, Tag(ONE)] | Annotated[list[_Planner], _Some, Tag(MANY)], _ONE_OR_MANY]
_TextAxis = Annotated[Annotated[str, Tag(ONE)] | Annotated[list[str], _Some, Tag(MANY)], _ONE_OR_MANY]


class Grid(Closed):
    """Every combination of its values."""

    workloads: _TextAxis | None = Field(default=None, description="labels of [workloads]")
    devices: _DevicesAxis | None = Field(default=None, description=_DEVICES_WORDS)
    microbatches: _BatchesAxis | None = Field(default=None, description=_MICROBATCHES_WORDS)
    memory: _SizeAxis | None = Field(default=None, description=f"{_SIZE_WORDS}, or a list of them")
    bandwidth: _RateAxis | None = Field(default=None, description=f"{_RATE_WORDS}, or a list of them")
    tensor_parallelism: _FlagAxis = Field(default=True, description="true, false, or [true, false]")
    data_parallelism: _FlagAxis = Field(default=True, description="true, false, or [true, false]")
    recompute: _RuleAxis = Field(default=Recompute.AUTO.value, description=f"{_RECOMPUTE_WORDS}, or a list of them")
    schedules: _ScheduleAxis | None = Field(default=None, description=f"{_SCHEDULE_WORDS}, or a list of them")
    planners: _PlannerAxis = Field(default=EXACT, description=f"{_PLANNER_WORDS}, or a list of them")


class ListedPoint(Closed):
    """One point."""

    workload: str = Field(description="a label of [workloads]")
    devices: Degree | None = Field(default=None, description=f"a whole number from 1 to {limits.DEVICES}")
    microbatches: Count | None = Field(default=None, description=f"a whole number from 1 to {limits.MICROBATCHES}")
    memory: SizeWithUnit | None = Field(default=None, description=_SIZE_WORDS)
    bandwidth: RateWithUnit | None = Field(default=None, description=_RATE_WORDS)
    tensor_parallelism: bool = Field(default=True, description="true or false")
    data_parallelism: bool = Field(default=True, description="true or false")
    recompute: _Recompute = Field(default=Recompute.AUTO.value, description=_RECOMPUTE_WORDS)
    schedule: _Schedule | None = Field(default=None, description=_SCHEDULE_WORDS)
    planner: _Planner = Field(default=EXACT, description=_PLANNER_WORDS)


class NamedWorkload(Closed):
    """Where a workload lies."""

    path: str = Field(description="the path of an input, relative to the sweep's file")
    in_flight: Annotated[str, AfterValidator(_known(tuple(rule.value for rule in InFlight)))] | None = Field(
        default=None, description="one of " + ", ".join(rule.value for rule in InFlight)
    )


class SweepOptions(Closed):
    """Limits of every solve by the exact solver."""

    gap: float = Field(default=0.0, ge=0.0, lt=1.0, description="a share from 0 to below 1, such as 0.01")
    time_limit_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False, description="a number of seconds > 0")
