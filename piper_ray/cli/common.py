"""Options and arguments that several commands share."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

import piper_ray
from piper_ray.cli.outliving import left, stdin_text
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import Contract
from piper_ray.workloads.formats import InFlight, load_text, parse_bytes, parse_bytes_per_s, parse_count

if TYPE_CHECKING:
    from piper_ray.workloads.estimate.config import ModelConfig

Number = TypeVar("Number", int, float)

STDIN = Path("-")
"""The INPUT or MODEL that is read from there."""


def option_value(parse: Callable[[str], Number]) -> Callable[[object], Number]:
    """``parse`` as an option's parser: its UsageError becomes a complaint that names the option."""

    def parsed(value: object) -> Number:
        try:
            return parse(str(value))  # defaults come as numbers
        except UsageError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


class _Given(float):
    """A number with the text that it was given as."""

    text: str


class NamedNumber(int):
    """A whole number that options call by a name."""

    name: str

    @classmethod
    def of(cls, number: int, name: str) -> NamedNumber:
        found = cls(number)
        found.name = name
        return found


def _given(parse: Callable[[str], float]) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        number = _Given(parse(text))
        number.text = text.strip()
        return number

    return parsed


parse_size = option_value(_given(partial(parse_bytes, unit_required=True)))
parse_rate = option_value(_given(partial(parse_bytes_per_s, unit_required=True)))
parse_number = option_value(parse_count)


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"\s*(?P<number>\d+(\.\d*)?)\s*(?P<unit>ns|us|ms|s)\s*")


def parse_time(text: str) -> float:
    """``5us``, ``1.5ms``, ``2s``. Raises UsageError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no time; expected one such as 5us, 1.5ms or 2s")
    return float(match["number"]) * _UNITS_S[match["unit"]]


_COUNT_IN_TEXT = re.compile(r"\d+(\.\d+)?(Ki?|ki?|Mi?)")


def counts_text(text: str) -> str:
    """A list or range of numbers without the units in it: ``8..2k`` as ``8..2000``. Raises UsageError."""
    return _COUNT_IN_TEXT.sub(lambda match: str(parse_count(match[0])), text)


def say(text: str) -> None:
    """On stderr, above a live line if there is one: ``typer.echo`` goes past the stream that looks after the line."""
    print(f"piper-ray: {text}", file=sys.stderr)  # noqa: T201 - the reason above


def note(text: str) -> None:
    """What is no fault and still worth telling."""
    say(f"note: {text}")


def command_text(context: typer.Context, hidden: Collection[str] = ()) -> str:
    """The command as it was given, options in the order of the help and without those at their defaults."""
    words = ["piper-ray", context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in ("help", *hidden) or value is None or parameter.default in (value, _word(value)):
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if parameter.param_type_name != "argument":
                words.append(parameter.opts[-1])
            if one is not True:
                words.append(_word(one))
    return shlex.join(words)


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, _Given):
        return value.text
    if isinstance(value, NamedNumber):
        return value.name
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def refuse_unwritable(option: str, path: Path) -> None:
    """Raises UsageError for a place where no file can be: said before the work, not after hours of it."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; expected the path of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")


class Unwritten:
    """Files that could not be written: told of once the answer is out."""

    def __init__(self) -> None:
        self._faults: list[UsageError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What cannot be written meanwhile is left, and what comes after goes on."""
        try:
            yield
        except UsageError as fault:
            self._faults.append(fault)

    def report(self) -> None:
        """Raises UsageError if there are any, with all of them."""
        if self._faults:
            raise UsageError("\n".join(map(str, self._faults))) from self._faults[0]


Input = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT",
        show_default=False,
        help="The workload: Piper's JSON, a compact TOML workload, a PipeDream profile (graph.txt), or a throughput "
        "input of dnn-partitioning (JSON); - reads stdin.",
    ),
]
PlanFile = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN",
        show_default=False,
        help="The plan: upstream's JSON, or what solve wrote with --out or --json.",
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices", metavar="K", parser=parse_number, help="Number of devices, as 512 or 1k, in place of the input's."
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--microbatches", metavar="N", parser=parse_number, help="Microbatches in a batch, in place of the input's."
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        parser=parse_size,
        help="Memory of each device, as 80GB or 8GiB, in place of the input's.",
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--bandwidth",
        metavar="RATE",
        parser=parse_rate,
        help="Bandwidth from a device to the others, as 25GB/s, in place of the input's.",
    ),
]
KeptInFlight = Annotated[
    InFlight | None,
    typer.Option(
        "--in-flight",
        metavar="RULE",
        help="What a device keeps of the microbatches in flight (PipeDream profiles only): two-versions of the "
        "weights, which is the default, or stashing, a version for each.",
    ),
]
Contraction = Annotated[
    Contract,
    typer.Option(
        "--contract",
        metavar="RULE",
        help="Which layers are merged first: safe, those that cost nothing, which loses no plan; or operators, whole "
        "blocks, for graphs too wide to plan layer by layer. What that may cost is bounded and reported.",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout and nothing else there."),
]


def load_model(model: str) -> ModelConfig:
    """The model of a command's MODEL; - reads its config from stdin. What its reader notes goes to stderr."""
    from piper_ray.workloads.estimate.config import read_config, read_model

    read = read_config(sys.stdin.read(), "stdin") if model == str(STDIN) else read_model(model)
    for text in read.notes:
        note(text)
    return read


def load_instance(
    source: Path,
    devices: int | None,
    microbatches: int | None,
    memory_bytes: float | None,
    bandwidth_bytes_per_s: float | None,
    in_flight: InFlight | None,
) -> Instance:
    """The instance of the shared options. What its reader notes goes to stderr."""
    read = partial(load_text, stdin_text(), name="stdin") if source == STDIN else partial(piper_ray.load, source)
    instance = read(
        devices=devices,
        microbatches=microbatches,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        in_flight=in_flight,
    )
    for text in instance.notes if left() is None else ():  # else they have been told
        note(f"{source}: {text}")
    return instance
