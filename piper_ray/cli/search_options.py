"""Options of the commands that search: what plans may use, and when the search ends."""

from __future__ import annotations

from typing import Annotated

import typer

from piper_ray.cli.common import option_value, parse_size
from piper_ray.model.constraints import (
    AllDevices,
    Constraint,
    Recompute,
    SameDegrees,
    StageCount,
    TensorParallelDegrees,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName


def parse_gap(text: str) -> float:
    """``0.01`` or ``1%`` as 0.01. Raises UsageError."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100.0 if number.endswith("%") else float(number)
    except ValueError:
        raise UsageError(f"{text!r} is not a gap; expected a share such as 0.01 or 1%") from None


def parse_degrees(text: str) -> tuple[int, ...]:
    """``1,2,4,8``. Raises UsageError."""
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise UsageError(f"{text!r} are not degrees; expected numbers such as 1,2,4,8") from None


def constraints_of(
    *, tensor_parallel: str | None, same_degrees: bool, stages: int | None, all_devices: bool
) -> tuple[Constraint, ...]:
    """What the options below ask of a plan. Raises UsageError for figures that make no sense."""
    found: list[Constraint] = []
    if tensor_parallel is not None:
        found.append(TensorParallelDegrees(parse_degrees(tensor_parallel)))
    if same_degrees:
        found.append(SameDegrees())
    if stages is not None:
        found.append(StageCount(stages))
    if all_devices:
        found.append(AllDevices())
    return tuple(found)


def asked_schedule(name: ScheduleName | None, chunks: int | None, known: Schedule | None) -> Schedule | ScheduleName:
    """That of the options below, else the one known from a file, else Piper's. A name alone leaves the chunks open.

    Raises UsageError for chunks of a schedule that has none.
    """
    if chunks is not None:
        return Schedule(name or (known or PAPERS_SCHEDULE).name, chunks)
    return name or known or PAPERS_SCHEDULE


PlannedSchedule = Annotated[
    ScheduleName | None,
    typer.Option(
        "--schedule",
        help="The schedule that the plan is to run under, in place of the input's. 2bw is Piper's own, asynchronous "
        "and never drained. All others flush each batch, as runtimes do, with one d and one t for all stages: 1f1b and "
        "gpipe are proved; interleaved, looped-bfs, zb-h1, zb-v and dualpipe-v end with a gap.",
    ),
]
Chunks = Annotated[
    int | None,
    typer.Option(
        "--chunks",
        metavar="V",
        help="Stages of the plan on each rank, for interleaved, looped-bfs and zb-h1. If not given with --schedule, "
        "solve tries 1 to 8 for the former two.",
    ),
]
SameForAll = Annotated[
    bool, typer.Option("--same-degrees", help="One d and one t for all stages, as under a flush in any case.")
]
Stages = Annotated[
    int | None,
    typer.Option(
        "--stages", metavar="P", help="Plans of so many stages only; of so many ranks where these hold several."
    ),
]
UseAllDevices = Annotated[
    bool, typer.Option("--use-all-devices", help="Plans that leave no device over only: d t p = K.")
]
TensorParallel = Annotated[
    str | None,
    typer.Option("--tensor-parallel", metavar="T,T,...", help="Tensor-parallel degrees that may be, as 1,2,4,8."),
]
NoTensorParallel = Annotated[
    bool, typer.Option("--no-tensor-parallel", help="Allow no tensor parallelism: t = 1 in every stage.")
]
NoDataParallel = Annotated[
    bool, typer.Option("--no-data-parallel", help="Allow no data parallelism: d = 1 in every stage.")
]
RecomputeRule = Annotated[
    Recompute,
    typer.Option(
        "--recompute",
        metavar="RULE",
        help="Activation recomputation: auto (as is best for each layer), always, never, or all-or-none (each stage "
        "as a whole).",
    ),
]
Gap = Annotated[
    float,
    typer.Option(
        "--gap",
        metavar="G",
        parser=option_value(parse_gap),
        help="Stop when a plan is proved to be within this share of the best, as 0.01 or 1%.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="S", help="Stop after S seconds with the best plans and bounds by then."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="T", help="Worker threads; one for each core if not given."),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        parser=parse_size,
        help="Refuse what would itself need more memory than this, as 16GB.",
    ),
]
