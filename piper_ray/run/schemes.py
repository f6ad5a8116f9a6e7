"""Found schemes of a traced model's layers, as a job for ranks on this machine, with their outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper_ray.model.errors import UsageError
from piper_ray.workloads.schemes.check import faults_of

NEAR = 1e-5
"""Losses and gradients of ranks equal those of one process up to this relative difference."""


@dataclass(frozen=True)
class SchemeJob:
    """Schemes, in full, of layers of one model on ``degree`` ranks. model, arguments, inputs: of its factory.
    microbatch: samples. steps: training steps of each scheme."""

    model: str
    arguments: Mapping[str, object]
    inputs: tuple[str, ...]
    microbatch: int
    degree: int
    steps: int
    schemes: tuple[Mapping[str, Any], ...]
    threads: int = 1
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        return self.degree

    @property
    def efforts(self) -> int:
        """The total number, for progress."""
        return len(self.schemes)

    def name_of(self, rank: int) -> str:
        return f"rank {rank}"


@dataclass(frozen=True)
class SchemeOutcome:
    """loss_difference, gradient_difference: the largest relative differences from one process in any step. Differences
    of gradients are relative to the largest gradient of the weight."""

    id: str
    name: str
    layer: str
    losses: tuple[float, ...]
    loss_difference: float
    gradient_difference: float

    @property
    def is_equal(self) -> bool:
        return self.loss_difference <= NEAR and self.gradient_difference <= NEAR


@dataclass(frozen=True)
class SchemeRun:
    """The outcomes of all schemes of a job."""

    job: SchemeJob
    outcomes: tuple[SchemeOutcome, ...]


def scheme_jobs(
    path: Path,
    chosen: str,
    model: str,
    arguments: Mapping[str, object],
    inputs: Sequence[str],
    samples: int,
    steps: int,
) -> Iterator[SchemeJob]:
    """A job for each degree in a file that ``schemes -o`` wrote. chosen: the beginning of an id, or "all". Raises
    UsageError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != "piper-ray/schemes":
            raise ValueError(document["format"])
        found = [one for layer in document["layers"] for one in layer["schemes"]]
        degrees = sorted({int(one["tensor_parallel_degree"]) for one in found})
        named = [one for one in found if chosen == "all" or str(one["id"]).startswith(chosen)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: not schemes as piper-ray schemes MODEL -o FILE.json writes them ({type(error).__name__})"
        ) from None
    if not named:
        raise UsageError(f"--schemes {chosen}: {path} has no such scheme; expected all, or the beginning of an id")
    for one in named:
        if faults := faults_of(one):
            raise UsageError("\n  ".join([f"{path}: {one['id']} does not hold by the rule table:", *faults]))
    for degree in degrees:
        if own := tuple(one for one in named if one["tensor_parallel_degree"] == degree):
            yield SchemeJob(model, arguments, tuple(inputs), samples, degree, steps, own)
