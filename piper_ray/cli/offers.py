"""Options of ``estimate`` and ``plan``: further ways to run layers that the workload is to have TMPCs of."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from piper_ray.cli.common import NamedNumber, option_value
from piper_ray.cli.search_options import parse_degrees
from piper_ray.model.errors import UsageError
from piper_ray.model.recomputation import parse_recomputation
from piper_ray.model.settings import ALL_REPLICAS


def _parse_replicas(text: str) -> int:
    """``8``, or ``all``. Raises UsageError."""
    if text.strip() == "all":
        return NamedNumber.of(ALL_REPLICAS, "all")
    return _parse_number(text)


def _parse_number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{text!r} is no number of replicas; expected one such as 8")
    return number


ShardedState = Annotated[
    int,
    typer.Option(
        "--zero",
        metavar="SHARDS",
        parser=option_value(_parse_replicas),
        help="Offer sharding the optimizer's state (ZeRO-1) over so many replicas, in stages of as many or more; over "
        "however many a stage has: all; 1: not.",
    ),
]
ShardedGradients = Annotated[
    int,
    typer.Option(
        "--zero-2",
        metavar="SHARDS",
        parser=option_value(_parse_number),
        help="Offer sharding gradients too (ZeRO-2), which are scattered in each backward pass.",
    ),
]
ShardedWeights = Annotated[
    int,
    typer.Option(
        "--fsdp",
        metavar="SHARDS",
        parser=option_value(_parse_number),
        help="Offer sharding weights too (ZeRO-3, FSDP), which are gathered for each pass; in stages of more replicas, "
        "over groups of so many (HSDP).",
    ),
]
ContextParallel = Annotated[
    str | None,
    typer.Option(
        "--context-parallel",
        metavar="DEGREES",
        help="Offer context parallelism, as 1,2,4: so many groups of t GPUs share a sequence. A plan's t counts the "
        "GPUs of all of them.",
    ),
]
ContextExchanged = Annotated[
    str,
    typer.Option(
        "--context-exchange",
        metavar="NAME",
        help="How these attend to all tokens: ring, all-gather (of keys and values) or all-to-all (of heads).",
    ),
]
ExpertParallel = Annotated[
    str | None,
    typer.Option(
        "--expert-parallel",
        metavar="DEGREES",
        help="Offer spreading experts over so many GPUs of a stage, as 8,16, apart from t.",
    ),
]
ExpertTensorParallel = Annotated[
    int,
    typer.Option("--expert-tensor-parallel", metavar="COUNT", min=1, help="GPUs that share an expert of these."),
]
ExpertImbalance = Annotated[
    float | None,
    typer.Option(
        "--expert-imbalance",
        metavar="FACTOR",
        min=1.0,
        help="Tokens of the busiest experts' GPU over those of the average one; 1.25 if not given.",
    ),
]
Recompute = Annotated[
    list[Any] | None,
    typer.Option(
        "--recompute",
        metavar="PARTS",
        parser=option_value(parse_recomputation),
        help="Offer recomputing these parts of each layer, as core_attn,mlp, besides what suits the software; may be "
        "given again.",
    ),
]
KeepGathered = Annotated[
    bool,
    typer.Option(
        "--keep-gathered",
        help="Offer keeping what sequence parallelism would gather again in the backward pass.",
    ),
]


def degrees_of(option: str, text: str | None) -> tuple[int, ...]:
    """``1,2,4``; none where nothing is asked for. Raises UsageError."""
    found = () if text is None else parse_degrees(option, text)
    if found and found[0] < 1:
        raise UsageError(f"{option} {text}: expected numbers from 1, such as 1,2,4")
    return found


def contexts_of(text: str | None) -> tuple[int, ...]:
    """Degrees of context parallelism that are asked for, and none at all. Raises UsageError."""
    return tuple(sorted({1, *degrees_of("--context-parallel", text)}))


def experts_of(text: str | None) -> tuple[int, ...]:
    """Ranks that experts are to be spread over. Raises UsageError."""
    return degrees_of("--expert-parallel", text)
