"""``piper-ray run``: a plan trained for real, measured against its promise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from piper_ray.cli.interrupts import current
from piper_ray.cli.options import argument, option
from piper_ray.cli.profile import Device, FactoryOptions
from piper_ray.cli.shared import JsonOption
from piper_ray.cli.telling import Unwritten, working
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName

if TYPE_CHECKING:
    from piper_ray.run.job import Job, Run


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Sharing(str, Enum):
    """What --replicas takes."""

    DDP = "ddp"
    FULLY_SHARD = "fully-shard"


@dataclass(frozen=True)
class RankFactoryOptions(FactoryOptions):
    """The function that makes the model on each rank."""

    model: str = argument(
        "MODULE:FACTORY",
        "The function that makes the model, as profile takes it. It may return a loss as a third: a function of the "
        "output and the inputs; else outputs are summed. An iterator in place of the example inputs gives each "
        "microbatch.",
    )
    device: Device = option(None, "Where ranks compute: cores over gloo, or a GPU each over NCCL.", default=Device.CPU)


@dataclass(frozen=True)
class RunOptions:
    """What is run of a plan, and what is kept of it."""

    plan_file: Path = argument("PLAN", "The plan: what solve wrote with --out or --json for a workload of profile's.")
    workload: Path | None = option(
        "INPUT", "The workload that was planned: each rank is then held against the plan's simulation."
    )
    steps: int = option("COUNT", "Measured steps.", default=20, min=1)
    warm_up: int = option("COUNT", "Steps before those.", default=3, min=0)
    replicas: Sharing = option(
        None, "How replicas of a stage share their work: torch's DDP, or its fully_shard.", default=Sharing.DDP
    )
    schedule: ScheduleName | None = option("NAME", "In place of the plan's own; one that flushes each batch.")
    chunks: int | None = option("V", "Stages of the plan on each rank, with --schedule.")
    microbatches: int | None = option("N", "Microbatches of a batch, not the plan's.", min=1)
    microbatch: int | None = option("SAMPLES", "Samples of a microbatch, not the plan's.", "--microbatch-size", min=1)
    trace: Path | None = option(
        "FILE",
        "Write the passes of a step, as JSON that ui.perfetto.dev opens; with --workload the simulated ones beside "
        "them.",
    )


def run(factory: RankFactoryOptions, asked: RunOptions, told_as: JsonOption) -> None:
    """Train a PyTorch model by PLAN with torch's pipelines, and measure what the plan has promised.

    Starts a process for each rank on this machine; under torchrun each of its processes is one.
    """
    from piper_ray.report.document import to_text
    from piper_ray.report.layout import console
    from piper_ray.report.run import print_run, run_document
    from piper_ray.run.job import JobOptions, Replicas
    from piper_ray.run.launch import launch
    from piper_ray.run.run import prepared
    from piper_ray.run.trace import write_run_trace

    if asked.chunks is not None and asked.schedule is None:
        raise UsageError("--chunks goes with --schedule; a plan says its own")
    options = JobOptions(
        model=factory.model,
        arguments=factory.arguments,
        inputs=tuple(factory.inputs or ()),
        microbatches=asked.microbatches,
        microbatch=asked.microbatch,
        device=factory.device.value,
        sharing=Replicas(asked.replicas.value),
        steps=asked.steps,
        warm_up=asked.warm_up,
    )
    schedule = None if asked.schedule is None else Schedule(asked.schedule, asked.chunks)
    job, promise = prepared(asked.plan_file, asked.workload, schedule, options)
    if all(name in os.environ for name in _OF_TORCHRUN):
        found = current().run(lambda _: (_rank_of_torchrun(job),))[0]
        if found is None:
            return
    else:
        with working("training") as show:
            found = current().run(lambda stop: launch(job, show, stop))
    measured = promise.given_to(found)
    unwritten = Unwritten()
    if asked.trace is not None:
        with unwritten.noted():
            write_run_trace(measured, asked.trace)
    if told_as.json:
        typer.echo(to_text(run_document(measured)), nl=False)
    else:
        print_run(console(), measured)
    unwritten.report()


def _rank_of_torchrun(job: Job) -> Run | None:
    """This process as a rank: the run on the first one. Raises what went wrong here."""
    from piper_ray.run.rank import told, work

    try:
        return work(job, lambda _done: None)
    except Exception as error:
        raise told(job, int(os.environ["RANK"]), error).error() from error
