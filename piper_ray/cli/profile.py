"""``piper-ray profile``: a workload from a PyTorch model, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import piper_ray
from piper_ray.cli.common import command_text, note, parse_rate, parse_size, refuse_unwritable, say
from piper_ray.cli.interrupts import current
from piper_ray.cli.progress import working
from piper_ray.model import limits
from piper_ray.model.errors import PiperRayError, UsageError
from piper_ray.model.extras import require
from piper_ray.model.stop import Stop
from piper_ray.storage.files import write_atomically

if TYPE_CHECKING:
    from piper_ray.workloads.measure.session import Profile, Progress
    from piper_ray.workloads.measure.store import Store


class Device(str, Enum):
    """What --device takes."""

    CPU = "cpu"
    CUDA = "cuda"


def profile(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            show_default=False,
            help="A function that makes the model, as package.module:function or file.py:function. It returns a "
            "torch.nn.Module, or a pair of it and example inputs (a tensor, a tuple, or a dict of keywords). If it "
            "takes `microbatch` or `tensor_parallel` it gets them.",
        ),
    ],
    microbatch: Annotated[
        int,
        typer.Option(
            "--microbatch-size", metavar="SAMPLES", min=1, show_default=False, help="Samples of a microbatch."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="FILE", show_default=False, help="Write the workload to FILE (.toml or .json)."
        ),
    ],
    device: Annotated[Device, typer.Option("--device", help="Where to measure.")] = Device.CPU,
    arg: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the factory; can be given several times."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE[:DTYPE[:LIMIT]]",
            help="A random input of one sample, such as 3x224x224 or 1024:int64:50257 (integers below 50257), in place "
            "of the factory's; one for each argument of forward.",
        ),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            metavar="PATTERN",
            help="Modules that are layers, by path, such as blocks.*; can be given several times. Otherwise the items "
            "of lists of blocks, and what stands beside them.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        str | None,
        typer.Option(
            "--tensor-parallel",
            metavar="T,T,...",
            help="Further tensor-parallel degrees: measured on a shard if the factory takes `tensor_parallel`, else "
            "estimated, and marked so.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="The GPU of the hardware table whose links devices use."),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option("--hardware", metavar="FILE", help="A TOML file of constants over those of the built-in table."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            metavar="K",
            min=1,
            help="Devices to plan for, in place of those here; on a CPU, layers are measured with one's share of the "
            "cores.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="SAMPLES", min=1, help="Samples of a batch; 32 microbatches."),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="SIZE", parser=parse_size, help="Memory of each device, as 80GB."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth",
            metavar="RATE",
            parser=parse_rate,
            help="Bandwidth from a device to the others; the GPU's, or 25GB/s.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="COUNT", min=2, help="Measured passes.")] = 20,
    warm_up: Annotated[int, typer.Option("--warm-up", metavar="COUNT", min=0, help="Passes before those.")] = 5,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the profile of the same command that was stopped.")
    ] = False,
) -> None:
    """Measure a PyTorch model on this machine: its layers, their times, memory and communication."""
    if out.suffix.lower() not in (".toml", ".json"):
        raise UsageError(f"--out {out}: unknown kind of file; expected a path that ends in .json or .toml")
    refuse_unwritable("--out", out)
    require("torch", "profile")
    degrees = _degrees(tensor_parallel)
    from piper_ray.report.measure_summary import file_text, summary_lines
    from piper_ray.workloads.estimate.hardware import load_hardware
    from piper_ray.workloads.measure.arguments import parse_argument
    from piper_ray.workloads.measure.factory import find_factory
    from piper_ray.workloads.measure.inputs import parse_input
    from piper_ray.workloads.measure.passes import Repeats
    from piper_ray.workloads.measure.session import ProfileRequest, store_of, threads_of_a_rank
    from piper_ray.workloads.measure.session import profile as run

    request = ProfileRequest(
        microbatch=microbatch,
        device=device.value,
        layers=layers or (),
        inputs=[parse_input(text) for text in inputs or ()],
        degrees=degrees,
        repeats=Repeats(count=repeats, warm_up=warm_up),
        devices=devices,
        batch=batch,
        memory_bytes=memory,
        bandwidth_bytes_per_s=bandwidth,
        gpu=gpu,
    )
    table = load_hardware(hardware, note)
    with threads_of_a_rank(request):
        factory = find_factory(model, dict(parse_argument(text) for text in arg or ()))
        store = store_of(factory, request, out.with_name(f"{out.name}.partial"))
        if resume:
            store.resume()
        else:
            store.start()
        result = _measured(store, lambda progress: run(factory, request, table, store, progress))
        if out.suffix.lower() == ".json":
            piper_ray.dump(result.instance, out)
        else:
            write_atomically(out, file_text(result, command_text(context, hidden=("resume",))))
        store.remove()
        typer.echo("\n".join(summary_lines(result)))


def _measured(store: Store, run: Callable[[Progress], Profile]) -> Profile:
    """With a live line. What was measured before an interruption stays in the store."""
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
