"""``piper-ray run``: a plan trained for real, measured against its promise."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from piper_ray.cli.common import Json, Unwritten
from piper_ray.cli.interrupts import current
from piper_ray.cli.profile import Device
from piper_ray.cli.progress import working
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName

if TYPE_CHECKING:
    from piper_ray.run.job import Job
    from piper_ray.run.result import Run


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Sharing(str, Enum):
    """What --replicas takes."""

    DDP = "ddp"
    FULLY_SHARD = "fully-shard"


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            show_default=False,
            help="The function that makes the model, as profile takes it. It may return a loss as a third: a function "
            "of the output and the inputs; else outputs are summed. An iterator in place of the example inputs gives "
            "each microbatch.",
        ),
    ],
    plan_file: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            show_default=False,
            help="The plan: what solve wrote with --out or --json for a workload of profile's.",
        ),
    ],
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            metavar="INPUT",
            help="The workload that was planned: each rank is then held against the plan's simulation.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="COUNT", min=1, help="Measured steps.")] = 20,
    warm_up: Annotated[int, typer.Option("--warm-up", metavar="COUNT", min=0, help="Steps before those.")] = 3,
    device: Annotated[
        Device, typer.Option("--device", help="Where ranks compute: cores over gloo, or a GPU each over NCCL.")
    ] = Device.CPU,
    replicas: Annotated[
        Sharing,
        typer.Option("--replicas", help="How replicas of a stage share their work: torch's DDP, or its fully_shard."),
    ] = Sharing.DDP,
    schedule: Annotated[
        ScheduleName | None,
        typer.Option("--schedule", help="In place of the plan's own; one that flushes each batch."),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option("--chunks", metavar="V", help="Stages of the plan on each rank, with --schedule."),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", metavar="N", min=1, help="Microbatches of a batch, not the plan's.")
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option("--microbatch-size", metavar="SAMPLES", min=1, help="Samples of a microbatch, not the plan's."),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the factory; can be given several times."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE[:DTYPE[:LIMIT]]",
            help="A random input of one sample, as profile takes it, in place of the factory's.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write the passes of a step, as JSON that ui.perfetto.dev opens; with --workload the simulated ones "
            "beside them.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a PyTorch model by PLAN with torch's pipelines, and measure what the plan has promised.

    Starts a process for each rank on this machine; under torchrun each of its processes is one.
    """
    from piper_ray.report.document import to_text
    from piper_ray.report.layout import console
    from piper_ray.report.run import print_run, run_document
    from piper_ray.run.launch import launch
    from piper_ray.run.prepare import prepared
    from piper_ray.run.trace import write_run_trace

    if chunks is not None and schedule is None:
        raise UsageError("--chunks goes with --schedule; a plan says its own")
    job, promise = prepared(
        model,
        plan_file,
        workload,
        schedule=None if schedule is None else Schedule(schedule, chunks),
        steps=steps,
        warm_up=warm_up,
        device=device.value,
        sharing=replicas.value,
        microbatches=microbatches,
        microbatch=microbatch,
        arguments_of_model=_arguments(arg or ()),
        inputs=inputs or (),
    )
    if all(name in os.environ for name in _OF_TORCHRUN):
        found = current().run(lambda _: (_rank_of_torchrun(job),))[0]
        if found is None:
            return
    else:
        with working("training") as show:
            found = current().run(lambda stop: launch(job, show, stop))
    measured = promise.given_to(found)
    unwritten = Unwritten()
    if trace is not None:
        with unwritten.noted():
            write_run_trace(measured, trace)
    if json:
        typer.echo(to_text(run_document(measured)), nl=False)
    else:
        print_run(console(), measured)
    unwritten.report()


def _arguments(texts: Iterable[str]) -> dict[str, object]:
    from piper_ray.workloads.measure.arguments import parse_argument

    return dict(parse_argument(text) for text in texts)


def _rank_of_torchrun(job: Job) -> Run | None:
    """This process as a rank: the run on the first one. Raises what went wrong here."""
    from piper_ray.run.rank import told, work

    try:
        return work(job, lambda _done: None)
    except Exception as error:
        raise told(job, int(os.environ["RANK"]), error).error() from error
