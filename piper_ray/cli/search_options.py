"""Options of the commands that search: what plans may use, and when the search ends."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from piper_ray.cli.common import option_value, parse_size, parse_time
from piper_ray.model.constraints import (
    AllDevices,
    Constraint,
    KeepOrder,
    Recompute,
    SameDegrees,
    StageCount,
    SustainedRate,
    TensorParallelDegrees,
)
from piper_ray.model.constraints import RecomputeRule as RecomputationRule
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.model.step import AllReduce, StepTerms
from piper_ray.workloads.formats import parse_seconds


class PerStage(str, Enum):
    """The rules of ``Recompute`` that are about stages."""

    ALL_OR_NONE = Recompute.ALL_OR_NONE.value
    FIRST_K = Recompute.FIRST_K.value
    ONE_FOR_ALL = Recompute.ONE_FOR_ALL.value


def parse_gap(text: str) -> float:
    """``0.01`` or ``1%`` as 0.01. Raises UsageError."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100.0 if number.endswith("%") else float(number)
    except ValueError:
        raise UsageError(f"{text!r} is not a gap; expected a share such as 0.01 or 1%") from None


def parse_degrees(option: str, text: str) -> tuple[int, ...]:
    """``1,2,4,8``, the value of ``option``. Raises UsageError."""
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise UsageError(f"{option}: {text!r} are not degrees; expected numbers such as 1,2,4,8") from None


def constraints_of(
    *,
    tensor_parallel: str | None,
    same_degrees: bool,
    stages: int | None,
    all_devices: bool,
    per_stage_recompute: PerStage | None = None,
    keep_order: bool = False,
    sustained: bool = False,
) -> tuple[Constraint, ...]:
    """What the options below ask of a plan. Raises UsageError for figures that make no sense."""
    found: list[Constraint] = []
    if tensor_parallel is not None:
        found.append(TensorParallelDegrees(parse_degrees("--tensor-parallel", tensor_parallel)))
    if same_degrees:
        found.append(SameDegrees())
    if stages is not None:
        found.append(StageCount(stages))
    if all_devices:
        found.append(AllDevices())
    if per_stage_recompute is not None:
        found.append(RecomputationRule(Recompute(per_stage_recompute.value)))
    if keep_order:
        found.append(KeepOrder())
    if sustained:
        found.append(SustainedRate())
    return tuple(found)


def step_terms(
    all_reduce: AllReduce | None, overlap: float | None, optimizer_s: float | None, known: StepTerms | None = None
) -> StepTerms:
    """Of the options below, where they are given, else of ``known``. Raises UsageError."""
    own = known or StepTerms()
    return StepTerms(
        own.all_reduce if all_reduce is None else all_reduce,
        own.all_reduce_overlap if overlap is None else overlap,
        own.optimizer_s if optimizer_s is None else optimizer_s,
    )


def asked_schedule(name: ScheduleName | None, chunks: int | None, known: Schedule | None) -> Schedule | ScheduleName:
    """That of the options below, else the one known from a file, else Piper's. A name alone leaves the chunks open.

    Raises UsageError for chunks of a schedule that has none.
    """
    if chunks is not None:
        return Schedule(name or (known or PAPERS_SCHEDULE).name, chunks)
    return name or known or PAPERS_SCHEDULE


def valued_schedule(name: ScheduleName | None, chunks: int | None, known: Schedule | None) -> Schedule:
    """That under which a finished plan is valued: a name alone keeps the chunks that are known."""
    asked = asked_schedule(name, chunks, known)
    return known if known is not None and asked == known.name else Schedule.of(asked)


PlannedSchedule = Annotated[
    ScheduleName | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
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
        help="Stages of the plan on each rank, for interleaved, looped-bfs and zb-h1. If not given with --schedule, 1 "
        "to 8 are tried for the former two.",
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
PerStageRecompute = Annotated[
    PerStage | None,
    typer.Option(
        "--per-stage-recompute",
        metavar="RULE",
        help="What runtimes can be told of recomputation, as --recompute has it too: all-or-none of each stage; "
        "first-k, each stage the first k of its layers, with a k of its own; or one-for-all, one setting for all.",
    ),
]
KeepTheOrder = Annotated[
    bool,
    typer.Option(
        "--keep-order",
        help="Stages are runs of the input's order of layers, and tensors are relayed through each stage they jump "
        "over, and charged there.",
    ),
]
Sustained = Annotated[
    bool,
    typer.Option(
        "--sustained",
        help="2bw plans only whose rate is sustained when replicas take turns, with the memory for the microbatches in "
        "flight that this takes.",
    ),
]
SumOfGradients = Annotated[
    AllReduce | None,
    typer.Option(
        "--all-reduce",
        metavar="RULE",
        help="How gradients are summed: parameter-server as in Piper, the default, or ring, half that.",
    ),
]
SumOverlap = Annotated[
    float | None,
    typer.Option(
        "--all-reduce-overlap",
        metavar="SHARE",
        help="Share of the all-reduce that hides beside backward passes, 0 to 1; under a flush.",
    ),
]
OptimizerTime = Annotated[
    float | None,
    typer.Option(
        "--optimizer",
        metavar="TIME",
        parser=option_value(parse_time),
        help="Step of the optimizer, once a batch, as 20ms.",
    ),
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
        help="Activation recomputation: auto (as is best for each layer), always, never, all-or-none (each stage as a "
        "whole), first-k (each stage its first k layers), or one-for-all (all stages alike).",
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
    typer.Option(
        "--time-limit",
        metavar="TIME",
        parser=option_value(parse_seconds),
        help="Stop after so many seconds, or after 10m or 1.5h, with the best plans and bounds by then.",
    ),
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
