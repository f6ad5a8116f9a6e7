"""``piper-ray export`` and ``piper-ray import-plan``: plans to what runtimes read, and back."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray.cli.common import (
    Bandwidth,
    Devices,
    Input,
    KeptInFlight,
    Memory,
    Microbatches,
    load_instance,
    note,
    option_value,
    refuse_unwritable,
)
from piper_ray.cli.plan_files import judged
from piper_ray.cli.progress import working
from piper_ray.cli.search_options import Chunks, PlannedSchedule, valued_schedule
from piper_ray.export.target import RANKS, Target
from piper_ray.model.errors import InvalidPlan, UsageError
from piper_ray.model.recomputation import Recomputation, parse_recomputation
from piper_ray.model.schedule import PAPERS_SCHEDULE
from piper_ray.runtimes.runtime import gpus_per_node_of
from piper_ray.workloads.formats.load import plan_claims

GpusPerNode = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node", metavar="COUNT", min=1, help="GPUs of a node, in place of the input's; 8 if it knows none."
    ),
]


def export(
    source: Input,
    plan_file: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            show_default=False,
            help="The plan: upstream's JSON, or what solve wrote with --out or --json.",
        ),
    ],
    target: Annotated[Target, typer.Option("--to", show_default=False, help="Who is to read it.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", show_default=False, help="The folder to write the files to."),
    ],
    gpus_per_node: GpusPerNode = None,
    despite_memory: Annotated[
        bool,
        typer.Option(
            "--despite-memory", help="Write a plan that needs more memory than there is, too; its README says so."
        ),
    ] = False,
    devices: Devices = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    in_flight: KeptInFlight = None,
    schedule: PlannedSchedule = None,
    chunks: Chunks = None,
) -> None:
    """Write PLAN for INPUT as launch arguments or configuration of a runtime, with the command that starts it.

    What the form cannot hold is refused or noted by name, and so is a plan that needs more memory than there is. A
    plan holds for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to solve.
    """
    from piper_ray.export.targets import export_plan

    instance = load_instance(source, devices, microbatches, memory, bandwidth, in_flight)
    plan = piper_ray.load_plan(plan_file, instance)
    known = plan_claims(plan_file).schedule or instance.schedule
    planned_for = valued_schedule(schedule, chunks, known)
    if planned_for == PAPERS_SCHEDULE:
        raise UsageError(f"{plan_file}: a plan for 2bw, which no runtime has; give the --schedule that it is run under")
    with judged(plan_file, instance), working("simulating"):
        found = export_plan(instance, plan, planned_for, target, gpus_per_node_of(instance, gpus_per_node))
    if found.excess and not despite_memory:
        # A job that waits for its cluster and then fails is dear: nobody is to start one unawares.
        raise InvalidPlan(found.excess, f"{plan_file}: nothing is written (--despite-memory writes it all the same)")
    for path in found.write(out):
        typer.echo(str(path))
    typer.echo(found.command)
    for text in found.notes:
        note(text)


def import_plan(
    source: Input,
    layout: Annotated[
        str,
        typer.Argument(
            metavar="LAYOUT",
            show_default=False,
            help="Megatron's layout string, Megatron's launch arguments (one text that starts with --), torchtitan's "
            "list of lists of module names or configuration (JSON, TOML), FlagScale's or Megatron-Bridge's (YAML), a "
            "file with one of these, or a folder that export wrote.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", show_default=False, help="The plan to write, in JSON.")
    ],
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel", metavar="P", min=1, help="Ranks of a pipeline; as many as stages if left out."
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tensor-parallel", metavar="T", min=1, help="Tensor-parallel degree; 1 if left out.")
    ] = None,
    context_parallel: Annotated[
        int | None,
        typer.Option("--context-parallel", metavar="C", min=1, help="Groups that share a sequence; 1 if left out."),
    ] = None,
    data_parallel: Annotated[
        int | None,
        typer.Option(
            "--data-parallel", metavar="D", min=1, help="Data-parallel degree; what the devices leave if left out."
        ),
    ] = None,
    recompute: Annotated[
        Recomputation | None,
        typer.Option(
            "--recompute",
            metavar="WHAT",
            parser=option_value(parse_recomputation),
            help="What layers recompute in the backward pass: none, full, or parts of them, such as core_attn,mlp.",
        ),
    ] = None,
    recompute_layers: Annotated[
        int | None,
        typer.Option(
            "--recompute-num-layers",
            metavar="K",
            min=1,
            help="With full recomputation: the first K layers of each stage.",
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel", help="Sequence parallelism beside tensor parallelism.")
    ] = None,
    optimizer_shards: Annotated[
        int | None,
        typer.Option("--optimizer-shards", metavar="COUNT", min=1, help="Replicas that share the optimizer's state."),
    ] = None,
    devices: Devices = None,
    microbatches: Microbatches = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    in_flight: KeptInFlight = None,
    schedule: PlannedSchedule = None,
) -> None:
    """Read a layout that somebody runs as a plan for INPUT, to verify, simulate and compare it.

    What LAYOUT says itself, as launch arguments do, options need not say again. What a plan of INPUT cannot hold is
    noted.
    """
    from piper_ray.export.import_plan import import_plan as read_layout
    from piper_ray.export.run_as import RunAs

    refuse_unwritable("--out", out)
    instance = load_instance(source, devices, microbatches, memory, bandwidth, in_flight)
    text, world = _layout_text(layout)
    run_as = RunAs(
        world=world,
        pipeline_ranks=pipeline_parallel,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        data_parallel=data_parallel,
        schedule=schedule,
        recomputation=recompute,
        recomputed_layers=recompute_layers,
        sequence_parallel=sequence_parallel,
        optimizer_shards=optimizer_shards,
    )
    found = read_layout(instance, text, run_as)
    for words in found.notes:
        note(words)
    piper_ray.dump_plan(found.plan, out, instance, found.schedule)
    ranks = found.plan.by_rank(found.schedule)
    typer.echo(f"{out}: {found.schedule.text}, {len(found.plan.stages)} stages, {ranks.devices} devices")


_PATH_LIKE = re.compile(r"[\w./\\~-]*[./\\_][\w./\\~-]*")
"""What looks like a path; of layouts none does."""

_LAYOUT_FILES = (
    "megatron.args", "torchtitan.json", "system.yaml", "plan.yaml", "stages.json", "piper_plan.py", "planned_module.py",
)  # fmt: skip
"""Of an exported folder: the one that says the plan."""

_TITAN_FILES = ["torchtitan.json", "piper_plan.py"]
"""Both are of one export, and the first one says the plan."""


def _layout_text(layout: str) -> tuple[str, int | None]:
    """The text itself, or what a file of that name or an exported folder holds; and the ranks that the folder is for.

    Raises UsageError.
    """
    path, ranks = Path(layout), None
    if not layout.strip() or not _can_be_path(layout):
        return layout, None
    if path.is_dir():
        found = [name for name in _LAYOUT_FILES if (path / name).is_file()]
        if not found:
            raise UsageError(f"{layout}: a folder without {', '.join(_LAYOUT_FILES[:-1])} or {_LAYOUT_FILES[-1]}")
        if len(found) > 1 and found != _TITAN_FILES:
            names = f"{', '.join(found[:-1])} and {found[-1]}"
            raise UsageError(f"{layout}: a folder with {names}, of several exports; expected one of these files")
        if (path / RANKS).is_file():
            ranks = len(_text_of(path / RANKS).splitlines()) - 1
        path /= found[0]
    if not path.is_file():
        if _PATH_LIKE.fullmatch(layout):
            raise UsageError(f"{layout}: there is no such file or folder, and a layout has no such characters")
        return layout, None
    return _text_of(path), ranks


def _can_be_path(layout: str) -> bool:
    """Whether the system takes it for one: no longer, and without characters, than it allows."""
    try:
        Path(layout).stat()
    except FileNotFoundError:
        return True
    except OSError as error:
        return error.errno not in (errno.ENAMETOOLONG, errno.EINVAL)
    except ValueError:
        return False
    return True


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is no text") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
