"""``--calibrate``: an estimate's constants from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piper_ray.cli.common import note

if TYPE_CHECKING:
    from piper_ray.workloads.estimate.build import EstimateRequest
    from piper_ray.workloads.estimate.config import ModelConfig
    from piper_ray.workloads.estimate.hardware import Hardware

Calibrate = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="FILE",
        help="Measured steps of runs in their layouts, or a profiled workload of this model: fit the few constants "
        "that these tell apart, and say what changed.",
    ),
]


def calibrated_request(
    path: Path | None, model: ModelConfig, hardware: Hardware, gpu: str, request: EstimateRequest
) -> EstimateRequest:
    """The request as it is, or with what the file says; what changed is told."""
    if path is None:
        return request
    from piper_ray.calibrate.calibrated import calibrated
    from piper_ray.calibrate.measurements import Estimated

    found = calibrated(str(path), Estimated(model, hardware, gpu, request))
    for text in found.calibration.told:
        note(text)
    return found
