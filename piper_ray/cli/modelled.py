"""Options of ``estimate`` and ``plan``: the model, the cluster, and further ways to run layers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ray.cli.options import REQUIRED, NamedNumber, argument, option, parse_degrees
from piper_ray.cli.shared import STDIN
from piper_ray.cli.telling import note
from piper_ray.model.errors import UsageError
from piper_ray.model.mode import ALL_REPLICAS

if TYPE_CHECKING:
    from piper_ray.workloads.estimate.build import EstimateRequest
    from piper_ray.workloads.estimate.config import ModelConfig
    from piper_ray.workloads.estimate.hardware import Hardware


def parse_replicas(text: str) -> int:
    """``8``, or ``all``. Raises UsageError."""
    if text.strip() == "all":
        return NamedNumber.of(ALL_REPLICAS, "all")
    return parse_some_replicas(text)


def parse_some_replicas(text: str) -> int:
    """``8``. Raises UsageError."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{text!r} is no number of replicas; expected one such as 8")
    return number


@dataclass(frozen=True)
class ModelOptions:
    """MODEL, and where it is trained."""

    model: str = argument(
        "MODEL",
        "A Hugging Face config.json, or the name of a known model, such as llama3-70b; - reads a config from stdin.",
    )
    gpu: str = option("NAME", "The GPU, such as H100-SXM or A100-80.", default=REQUIRED)
    nodes: int = option("COUNT", "Nodes of the cluster.", default=REQUIRED, min=1)
    gpus_per_node: int | None = option("COUNT", "GPUs of a node, in place of the table's.", min=1)
    tokens: int | None = option("COUNT", "Tokens of a sample.", min=1)
    hardware: Path | None = option("FILE", "A TOML file of constants over those of the built-in table.")
    calibrate: Path | None = option(
        "FILE",
        "Measured steps of runs in their layouts, or a profiled workload of this model: fit the few constants that "
        "these tell apart, and say what changed.",
    )

    def read(self) -> tuple[ModelConfig, Hardware]:
        """The model, whose config is read from stdin for -, and the table. What their readers note goes to stderr."""
        from piper_ray.workloads.estimate.config import read_config, read_model
        from piper_ray.workloads.estimate.hardware import load_hardware

        found = read_config(sys.stdin.read(), "stdin") if self.model == str(STDIN) else read_model(self.model)
        for text in found.notes:
            note(text)
        return found, load_hardware(self.hardware, note)

    def calibrated(self, model: ModelConfig, hardware: Hardware, request: EstimateRequest) -> EstimateRequest:
        """The request as it is, or with what the file of measurements says; what changed is told."""
        if self.calibrate is None:
            return request
        from piper_ray.calibrate.measurements import Estimated, calibrated

        found = calibrated(str(self.calibrate), Estimated(model, hardware, self.gpu, request))
        for text in found.calibration.told:
            note(text)
        return found


@dataclass(frozen=True)
class OfferOptions:
    """Further ways to run layers that the workload is to have TMPCs of."""

    zero: int = option(
        "SHARDS",
        "Offer sharding the optimizer's state (ZeRO-1) over so many replicas, in stages of as many or more; over "
        "however many a stage has: all; 1: not.",
        default=1,
        parse=parse_replicas,
    )
    context_parallel: str | None = option(
        "DEGREES",
        "Offer context parallelism, as 1,2,4: so many groups of t GPUs share a sequence. A plan's t counts the GPUs of "
        "all of them.",
    )
    expert_parallel: str | None = option(
        "DEGREES", "Offer spreading experts over so many GPUs of a stage, as 8,16, apart from t."
    )

    @property
    def contexts(self) -> tuple[int, ...]:
        """Degrees of context parallelism that are asked for, and none at all. Raises UsageError."""
        return tuple(sorted({1, *_degrees("--context-parallel", self.context_parallel)}))

    @property
    def experts(self) -> tuple[int, ...]:
        """Ranks that experts are to be spread over. Raises UsageError."""
        return _degrees("--expert-parallel", self.expert_parallel)


def _degrees(option: str, text: str | None) -> tuple[int, ...]:
    """``1,2,4``; none where nothing is asked for. Raises UsageError."""
    found = () if text is None else parse_degrees(option, text)
    if found and found[0] < 1:
        raise UsageError(f"{option} {text}: expected numbers from 1, such as 1,2,4")
    return found
