"""Options of the commands that search: what plans may use, and when the search ends."""

from __future__ import annotations

from typing import Annotated

import typer

from piper_ray.cli.common import option_value, parse_size
from piper_ray.model.constraints import Recompute
from piper_ray.model.errors import UsageError


def parse_gap(text: str) -> float:
    """``0.01`` or ``1%`` as 0.01. Raises UsageError."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100.0 if number.endswith("%") else float(number)
    except ValueError:
        raise UsageError(f"{text!r} is not a gap; expected a share such as 0.01 or 1%") from None


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
