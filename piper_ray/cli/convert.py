"""``piper-ray convert``: one form of input into another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray.cli.common import Bandwidth, Devices, Input, KeptInFlight, Memory, Microbatches, load_instance
from piper_ray.workloads.formats import Form


def convert(
    source: Input,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            show_default=False,
            help="The file to write: .json for Piper's JSON, .toml for a compact workload, .txt for a PipeDream "
            "profile.",
        ),
    ],
    form: Annotated[
        Form | None,
        typer.Option(
            "--to",
            metavar="FORM",
            help="What to write, whatever OUTPUT ends in: piper, toml, pipedream or dnn-partitioning. What the form "
            "cannot hold is refused by name.",
        ),
    ] = None,
    devices: Devices = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    in_flight: KeptInFlight = None,
) -> None:
    """Write INPUT in another form, with the figures given here in place of its own."""
    instance = load_instance(source, devices, microbatches, memory, bandwidth, in_flight)
    piper_ray.dump(instance, target, form)
