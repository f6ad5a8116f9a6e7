"""``piper-ray profile`` and ``run``: a PyTorch model measured on this machine, and trained by a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

import piper_ray
from piper_ray import PiperRayError, Schedule, ScheduleName, Stop, UsageError
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import REQUIRED, argument, flag, of_options, option
from piper_ray.cli.shared import JsonOption
from piper_ray.cli.telling import Unwritten, note, refuse_unwritable, say, show_document, working
from piper_ray.cli.values import command_text, parse_rate, parse_size
from piper_ray.model import limits
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import require
from piper_ray.model.figures import plural
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray import Job, Run
    from piper_ray.workloads.measure.build import Store
    from piper_ray.workloads.measure.session import Profile, Progress


@dataclass(frozen=True)
class FactoryOptions:
    """The function that makes the model."""

    model: str = argument(
        "MODULE:FACTORY",
        "A function that makes the model, such as package.module:function or file.py:function. It returns a "
        "torch.nn.Module, or a pair of it and example inputs (a tensor, a tuple, or a dict of keywords). If it takes "
        "`microbatch` or `tensor_parallel` it gets them.",
    )
    device: Literal["cpu", "cuda"] = option(None, "Where to measure.", default="cpu")
    arg: list[str] | None = option("KEY=VALUE", "An argument of the factory; can be given several times.")
    inputs: list[str] | None = option(
        "SHAPE[:DTYPE[:LIMIT]]",
        "A random input of one sample, such as 3x224x224 or 1024:int64:50257 (integers below 50257), in place of the "
        "factory's; one for each argument of forward.",
        "--input",
    )

    @property
    def arguments(self) -> dict[str, object]:
        """The factory's arguments. Raises UsageError."""
        from piper_ray.workloads.measure.arguments import parse_argument

        return dict(parse_argument(text) for text in self.arg or ())


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured, and what the workload is for."""

    microbatch: int = option("SAMPLES", "Samples of a microbatch.", "--microbatch-size", default=REQUIRED, min=1)
    out: Path = option("FILE", "Write the workload to FILE (.toml or .json).", "-o", "--out", default=REQUIRED)
    layers: list[str] | None = option(
        "PATTERN",
        "Modules that are layers, by path, such as blocks.*; can be given several times. Otherwise the items of lists "
        "of blocks, and the modules outside them.",
    )
    tensor_parallel: str | None = option(
        "T,T,...",
        "Further tensor-parallel degrees: measured on a shard if the factory takes `tensor_parallel`, else estimated, "
        "and marked so.",
    )
    gpu: str | None = option("NAME", "The GPU of the hardware table whose links devices use.")
    hardware: Path | None = option("FILE", "A TOML file whose constants replace those of the built-in table.")
    devices: int | None = option(
        "K",
        "Devices to plan for, in place of those here; on a CPU, layers are measured with one's share of the cores.",
        min=1,
    )
    batch: int | None = option("SAMPLES", "Samples of a batch; 32 microbatches if not given.", "--global-batch", min=1)
    memory_bytes: float | None = option("SIZE", "Memory of each device, such as 80GB.", parse=parse_size)
    bandwidth_bytes_per_s: float | None = option(
        "RATE", "Bandwidth from a device to the others; the GPU's, or 25GB/s.", parse=parse_rate
    )
    repeats: int = option("COUNT", "Measured passes.", default=20, min=2)
    warm_up: int = option("COUNT", "Passes before the measured ones.", default=5, min=0)
    resume: bool = flag("Go on with the profile of the same command that was stopped.")


def profile(context: typer.Context, factory: FactoryOptions, asked: MeasureOptions) -> None:
    """Measure a PyTorch model on this machine: its layers, their times, memory and communication."""
    out = asked.out
    if out.suffix.lower() not in (".toml", ".json"):
        raise UsageError(f"--out {out}: unknown kind of file; expected a path that ends in .json or .toml")
    refuse_unwritable("--out", out)
    require("torch", "profile")
    degrees = _degrees(asked.tensor_parallel)
    from piper_ray.report.measure_summary import file_text, summary_lines
    from piper_ray.report.terminal import console, print_lines
    from piper_ray.workloads.estimate.hardware import load_hardware
    from piper_ray.workloads.measure.factory import find_factory, parse_input
    from piper_ray.workloads.measure.passes import Repeats
    from piper_ray.workloads.measure.session import ProfileRequest, as_a_rank, store_of
    from piper_ray.workloads.measure.session import profile as run

    request = of_options(
        ProfileRequest,
        factory,
        asked,
        layers=asked.layers or (),
        inputs=[parse_input(text) for text in factory.inputs or ()],
        degrees=degrees,
        repeats=Repeats(count=asked.repeats, warm_up=asked.warm_up),
    )
    table = load_hardware(asked.hardware, note)
    if asked.gpu is not None and request.device == "cpu":
        note(
            f"times and memory are those of this machine's CPU, and only links are those of {asked.gpu}: measure with "
            "--device cuda on such a GPU to plan for it"
        )
    with as_a_rank(request):
        found = find_factory(factory.model, factory.arguments)
        store = store_of(found, request, out.with_name(f"{out.name}.partial"))
        if asked.resume:
            store.resume()
        else:
            store.start()
        result = _measured(store, lambda progress: run(found, request, table, store, progress))
        if out.suffix.lower() == ".json":
            piper_ray.dump(result.instance, out)
        else:
            write_atomically(out, file_text(result, command_text(context, hidden=("resume",))))
        store.remove()
        print_lines(console(), summary_lines(result))


def _measured(store: Store, run: Callable[[Progress], Profile]) -> Profile:
    """The profile, with a live line. What was measured before an interruption stays in the store."""
    try:
        with working("measuring") as show:

            def measure(stop: Stop[Profile]) -> Profile:
                def progress(done: int, total: int, layer: str) -> None:
                    stop.check()
                    show(done, total, layer)

                return run(progress)

            return current().run(measure)
    except (KeyboardInterrupt, PiperRayError):
        if len(store):
            words = "keeps what was measured; the same command with --resume goes on"
            say(f"{store.path} {words}")
        else:
            store.remove()
        raise


def _degrees(text: str | None) -> tuple[int, ...]:
    """``2,4``: ascending; 1 is measured anyway. Raises UsageError."""
    pieces = [] if text is None else text.split(",")
    if not all(piece.strip().isdecimal() and 1 <= int(piece) <= limits.DEVICES for piece in pieces):
        raise UsageError(f"--tensor-parallel {text}: expected whole numbers, such as 2,4,8")
    return tuple(sorted({int(piece) for piece in pieces} - {1}))


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankFactoryOptions(FactoryOptions):
    """The function that makes the model on each rank."""

    model: str = argument(
        "MODULE:FACTORY",
        "The function that makes the model, as profile takes it. It may return a loss as a third: a function of the "
        "output and the inputs; else outputs are summed. An iterator in place of the example inputs gives each "
        "microbatch.",
    )
    device: Literal["cpu", "cuda"] = option(
        None, "Where ranks compute: cores over gloo, or a GPU each over NCCL.", default="cpu"
    )


@dataclass(frozen=True)
class RunOptions:
    """What is run of a plan, and what is kept of it."""

    plan_file: Path = argument(
        "PLAN",
        "The plan: what solve wrote with --out or --json for a workload of profile's; with --schemes what "
        "schemes wrote with -o FILE.json.",
    )
    schemes: str | None = option(
        "ID",
        "Train a layer by each found scheme on t processes, and once in one: losses and gradients have to be equal. "
        "ID: the beginning of an id, or all.",
    )
    workload: Path | None = option(
        "INPUT", "The workload that was planned: each rank is then compared with the plan's simulation."
    )
    steps: int = option("COUNT", "Measured steps.", default=20, min=1)
    warm_up: int = option("COUNT", "Steps before the measured ones.", default=3, min=0)
    replicas: Literal["ddp", "fully-shard"] = option(
        None, "How replicas of a stage share their work: torch's DDP, or its fully_shard.", default="ddp"
    )
    schedule: ScheduleName | None = option("NAME", "The schedule, in place of the plan's own.")
    vertical_sync: bool = flag(
        "Under pipedream, all stages use the version of the weights that a microbatch came in with."
    )
    chunks: int | None = option("V", "Stages of the plan on each rank, with --schedule.")
    microbatches: int | None = option("N", "Microbatches of a batch, in place of the plan's.", min=1)
    microbatch: int | None = option(
        "SAMPLES", "Samples of a microbatch, in place of the plan's.", "--microbatch-size", min=1
    )
    trace: Path | None = option(
        "FILE",
        "Write the passes of a step, as JSON that ui.perfetto.dev opens; with --workload also the simulated ones.",
    )


def run(factory: RankFactoryOptions, asked: RunOptions, told_as: JsonOption) -> None:
    """Train a PyTorch model by PLAN with torch, and compare its step with what PLAN promises.

    Starts a process for each rank on this machine; under torchrun each of its processes is one.
    """
    from piper_ray.report.run import print_run, run_document
    from piper_ray.report.terminal import console
    from piper_ray.run.job import JobOptions, Replicas
    from piper_ray.run.launch import launch
    from piper_ray.run.run import prepared
    from piper_ray.run.trace import write_run_trace

    if asked.chunks is not None and asked.schedule is None:
        raise UsageError("--chunks goes with --schedule; a plan says its own")
    if asked.schemes is not None:
        _run_schemes(factory, asked, told_as)
        return
    options = of_options(
        JobOptions,
        factory,
        asked,
        arguments=factory.arguments,
        inputs=tuple(factory.inputs or ()),
        sharing=Replicas(asked.replicas),
    )
    schedule = None if asked.schedule is None else Schedule(asked.schedule, asked.chunks)
    job, promise = prepared(asked.plan_file, asked.workload, schedule, options)
    if all(name in os.environ for name in _OF_TORCHRUN):
        found = current().run(lambda _: (_rank_of_torchrun(job),))[0]
        if found is None:
            return
    else:
        if job.device == "cpu" and job.ranks > usable_cores():
            note(
                f"{job.ranks} processes on {plural(usable_cores(), 'core')}: they take turns, and a step takes longer "
                "than each on a core of its own"
            )
        with working("training") as show:
            found = current().run(lambda stop: launch(job, show, stop))
    measured = promise.given_to(found)
    unwritten = Unwritten()
    if asked.trace is not None:
        with unwritten.noted():
            write_run_trace(measured, asked.trace)
    if told_as.json:
        show_document(run_document(measured))
    else:
        print_run(console(), measured)
    unwritten.report()


def _run_schemes(factory: RankFactoryOptions, asked: RunOptions, told_as: JsonOption) -> None:
    """Raises UsageError where a scheme trains otherwise than one process."""
    from piper_ray.report.schemes import outcomes_document, print_outcomes
    from piper_ray.report.terminal import console
    from piper_ray.run.launch import launch
    from piper_ray.run.schemes import scheme_jobs

    require("torch", "run")
    if factory.device != "cpu" or any((asked.workload, asked.schedule, asked.microbatches, asked.trace)):
        raise UsageError(
            "--schemes trains single layers on cores: --device cuda, --workload, --schedule, --microbatches and "
            "--trace do not go with it"
        )
    inputs, samples = tuple(factory.inputs or ()), asked.microbatch or 1
    assert asked.schemes is not None
    jobs = scheme_jobs(asked.plan_file, asked.schemes, factory.model, factory.arguments, inputs, samples, asked.steps)
    outcomes = []
    for job in jobs:
        with working(f"training by schemes on {job.degree} processes") as show:
            outcomes += current().run(partial(launch, job, show)).outcomes
    if told_as.json:
        show_document(outcomes_document(outcomes))
    else:
        print_outcomes(console(), outcomes)
    if wrong := [one.id for one in outcomes if not one.is_equal]:
        raise UsageError(f"schemes that do not train as one process does: {', '.join(wrong)}")


def _rank_of_torchrun(job: Job) -> Run | None:
    """Runs this process as a rank and gives the run on the first one. Raises what went wrong here."""
    from piper_ray.run.rank import told, work

    try:
        found: Run | None = work(job, lambda _done: None)
    except Exception as error:
        raise told(job, int(os.environ["RANK"]), error).error from error
    return found
