"""``piper-ray export`` and ``import-plan``: plans to what runtimes read, and back. ``convert``: inputs too."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import piper_ray
from piper_ray import Form, InvalidPlan, UsageError
from piper_ray.cli.for_runtime import NodeOption
from piper_ray.cli.options import REQUIRED, Without, argument, flag, option
from piper_ray.cli.shared import LaunchOptions, PlannedOptions, ScheduleOptions, WorkloadOptions
from piper_ray.cli.telling import judged, note, refuse_unwritable, working
from piper_ray.export.files import Target
from piper_ray.model.figures import plural
from piper_ray.model.mode import Recomputation, parse_recomputation
from piper_ray.report.folding import folded, screen_columns
from piper_ray.runtimes.meshes import gpus_per_node_of


@dataclass(frozen=True)
class ExportOptions:
    """Who is to read the plan, and where it goes."""

    target: Target = option(None, "The software that reads the files.", "--to", default=REQUIRED)
    out: Path = option("DIR", "The folder to write the files to.", "--out", "-o", default=REQUIRED)
    despite_memory: bool = flag("Write a plan that needs more memory than there is, too; its README says so.")


def export(planned: PlannedOptions, wanted: ExportOptions, nodes: NodeOption, scheduled: ScheduleOptions) -> None:
    """Write PLAN for INPUT as launch arguments or configuration of a runtime, with the command that starts it.

    A setting that the files cannot express is refused or noted by name. A plan that needs more memory than a device
    has is refused. A plan is for one cluster: give the same --devices, --microbatches, --memory and --bandwidth as to
    solve.
    """
    from piper_ray.export.targets import export_plan

    plan_file = planned.plan_file
    instance, plan, claims = planned.load_at_sites()
    planned_for = scheduled.valued(claims.schedule or instance.schedule)
    if planned_for.asynchronous:
        name = planned_for.name.value
        raise UsageError(
            f"{plan_file}: a plan for {name}, which no runtime has; give the --schedule that it is run under"
        )
    with judged(plan_file, instance), working("simulating"):
        found = export_plan(instance, plan, planned_for, wanted.target, gpus_per_node_of(instance, nodes.gpus_per_node))
    if found.excess and not wanted.despite_memory:
        # A job that waits for its cluster and then fails is expensive, so nobody may start one unawares.
        raise InvalidPlan(found.excess, f"{plan_file}: nothing is written (--despite-memory writes it anyway)")
    for path in found.write(wanted.out):
        typer.echo(str(path))
    columns = screen_columns(sys.stdout)
    typer.echo(" \\\n".join(folded(found.command, columns and columns - 2)))
    for text in found.notes:
        note(text)


@dataclass(frozen=True)
class LayoutOptions:
    """What somebody runs. What is None it may say itself; most have the names of ``RunAs``."""

    layout: str = argument(
        "LAYOUT",
        "A launch script of Megatron-LM, Megatron-DeepSpeed or torchtitan, or its command as one text; a configuration "
        "of torchtitan, FlagScale, Primus or Megatron-Bridge (TOML, YAML, JSON, Python); Megatron's layout string or "
        "launch arguments (one text that starts with --); torchtitan's list of lists of module names; or a folder that "
        "export wrote. Nothing of it is run.",
    )
    out: Path = option("FILE", "The plan to write, in JSON.", "--out", "-o", default=REQUIRED)
    pipeline_ranks: int | None = option(
        "P", "Ranks of a pipeline; as many as stages if left out.", "--pipeline-parallel", min=1
    )
    tensor_parallel: int | None = option("T", "Tensor-parallel degree; 1 if left out.", min=1)
    context_parallel: int | None = option("C", "Groups that share a sequence; 1 if left out.", min=1)
    data_parallel: int | None = option("D", "Data-parallel degree; what the devices leave if left out.", min=1)
    recomputation: Recomputation | None = option(
        "WHAT",
        "What layers recompute in the backward pass: none, full, or parts of them, such as core_attn,mlp.",
        "--recompute",
        parse=parse_recomputation,
    )
    recomputed_layers: int | None = option(
        "K", "With full recomputation: the first K layers of each stage.", "--recompute-num-layers", min=1
    )
    sequence_parallel: bool | None = flag(
        "Sequence parallelism together with tensor parallelism.", "--sequence-parallel", default=None
    )
    optimizer_shards: int | None = option("COUNT", "Replicas that share the optimizer's state.", min=1)


def import_plan(
    workload: WorkloadOptions,
    read: LayoutOptions,
    launched: LaunchOptions,
    scheduled: Annotated[ScheduleOptions, Without("chunks")],
) -> None:
    """Turn a layout that you run into a plan for INPUT, to verify, simulate and compare it.

    Options are only needed for what LAYOUT does not say itself. A note names what a plan of INPUT cannot hold.
    """
    from piper_ray.export.launched import import_launched
    from piper_ray.export.run_as import RunAs

    refuse_unwritable("--out", read.out)
    instance = workload.load()
    run_as = RunAs.of(vars(read) | {"schedule": scheduled.schedule})
    found = import_launched(instance, read.layout, run_as, launched.asked())
    for words in found.notes:
        note(words)
    piper_ray.dump_plan(found.plan, read.out, instance, found.schedule)
    ranks = found.plan.by_rank(found.schedule)
    typer.echo(
        f"{read.out}: {found.schedule.text}, {plural(len(found.plan.stages), 'stage')}, "
        f"{plural(ranks.devices, 'device')}"
    )


@dataclass(frozen=True)
class ConvertOptions:
    """What is written of an input."""

    target: Path = argument(
        "OUTPUT",
        "The file to write: .json for Piper's JSON, .toml for a compact workload, .txt for a PipeDream profile.",
    )
    form: Form | None = option(
        "FORM",
        "The form to write, in place of the one that OUTPUT ends in: piper, toml, pipedream or dnn-partitioning. What "
        "the form cannot hold is refused by name.",
        "--to",
    )


def convert(workload: WorkloadOptions, wanted: ConvertOptions) -> None:
    """Write INPUT in another form, with the figures given here in place of its own."""
    piper_ray.dump(workload.load(), wanted.target, wanted.form)
