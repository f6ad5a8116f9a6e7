"""Options that several commands take, and what is made of them: the input, and what its plans are to keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import piper_ray
from piper_ray import AllReduce, Contract, Instance, Plan, Recompute, Restrictions, SolveOptions, StepTerms
from piper_ray.cli.options import argument, flag, of_options, option
from piper_ray.cli.outliving import left, stdin_text
from piper_ray.cli.telling import note
from piper_ray.cli.values import parse_degrees, parse_gap, parse_rate, parse_size, parse_time
from piper_ray.model import constraints
from piper_ray.model.errors import UsageError
from piper_ray.model.forms import InFlight
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, ScheduleName
from piper_ray.model.units import parse_count, parse_seconds

if TYPE_CHECKING:
    from piper_ray.launches.launch import Asked
    from piper_ray.workloads.formats.plans import PlanClaims

STDIN = Path("-")
"""The INPUT or MODEL that is read from there."""


@dataclass(frozen=True)
class WorkloadOptions:
    """INPUT, and figures in place of its own."""

    panel: ClassVar[str] = "Workload"

    source: Path = argument(
        "INPUT",
        "The workload: TOML, Piper's or dnn-partitioning's JSON, or a PipeDream profile (graph.txt); - reads stdin.",
    )
    devices: int | None = option("K", "Devices, such as 512 or 1k; the input's if left out.", parse=parse_count)
    microbatches: int | None = option("N", "Microbatches in a batch, in place of the input's.", parse=parse_count)
    memory_bytes: float | None = option(
        "SIZE", "Memory of each device, such as 80GB or 8GiB, in place of the input's.", parse=parse_size
    )
    bandwidth_bytes_per_s: float | None = option(
        "RATE", "Bandwidth from a device to the others, such as 25GB/s, in place of the input's.", parse=parse_rate
    )
    in_flight: InFlight | None = option(
        "RULE",
        "What a device keeps of the microbatches in flight (PipeDream profiles only): two-versions of the weights, "
        "which is the default, or stashing, a version for each.",
    )

    def load(self, devices: int | None = None) -> Instance:
        """devices: in place of all others. What the input's reader notes goes to stderr."""
        from piper_ray.workloads.formats.load import load_text

        source = self.source
        read = partial(load_text, stdin_text(), name="stdin") if source == STDIN else partial(piper_ray.load, source)
        figures = {name: value for name, value in vars(self).items() if name not in ("source", "plan_file")}
        instance = read(**figures | ({} if devices is None else {"devices": devices}))
        for text in instance.notes if left() is None else ():  # else they have been printed
            note(f"{source}: {text}")
        return instance


@dataclass(frozen=True)
class PlannedOptions(WorkloadOptions):
    """The options INPUT and PLAN."""

    plan_file: Path = argument("PLAN", "The plan: Piper's JSON, or what solve wrote with --out or --json.")

    def load_all(self) -> tuple[Instance, Plan, PlanClaims]:
        """The instance, the plan, and what the plan's document says of itself."""
        from piper_ray.workloads.formats.load import plan_claims

        instance = self.load()
        return instance, piper_ray.load_plan(self.plan_file, instance), plan_claims(self.plan_file)

    def load_at_sites(self) -> tuple[Instance, Plan, PlanClaims]:
        """The same; equal pipelines of equal kinds each are one plan at equal sites."""
        from piper_ray.model.apart import as_sites

        instance, plan, claims = self.load_all()
        placed, plan = as_sites(instance, plan)
        is_of_it = claims.digest == instance.digest
        return placed, plan, replace(claims, digest=placed.digest) if is_of_it else claims


@dataclass(frozen=True)
class JsonOption:
    """The answer as a document."""

    panel: ClassVar[str] = "Answer"

    json: bool = flag("Print one JSON document on stdout and nothing else there.")


@dataclass(frozen=True)
class ScheduleOptions:
    """The schedule that a plan is to run under."""

    panel: ClassVar[str] = "Schedule"

    schedule: ScheduleName | None = option(
        "NAME",
        "The schedule that the plan runs under, in place of the input's. Proved: 2bw (Piper's own) and pipedream, "
        "which never drain, 1f1b and gpipe. With a bound and a gap: interleaved, looped-bfs, zb-h1, zb-v, dualpipe-v.",
    )
    chunks: int | None = option(
        "V",
        "Stages of the plan on each rank, for interleaved, looped-bfs and zb-h1. If not given with --schedule, 1 to 8 "
        "are tried for the first two.",
    )

    def asked(self, known: Schedule | None) -> Schedule | ScheduleName:
        """The one given, else the one known from a file, else Piper's. A name alone leaves the chunks open.

        Raises UsageError for chunks of a schedule that has none.
        """
        if self.chunks is not None:
            return Schedule(self.schedule or (known or PAPERS_SCHEDULE).name, self.chunks)
        return self.schedule or known or PAPERS_SCHEDULE

    def valued(self, known: Schedule | None) -> Schedule:
        """The schedule under which a finished plan is valued: a name alone keeps the chunks that are known."""
        asked = self.asked(known)
        return known if known is not None and asked == known.name else Schedule.of(asked)


@dataclass(frozen=True)
class RestrictionOptions:
    """What plans must keep."""

    panel: ClassVar[str] = "Restrictions"

    no_tensor_parallel: bool = flag("Allow no tensor parallelism: t = 1 in every stage.")
    no_data_parallel: bool = flag("Allow no data parallelism: d = 1 in every stage.")
    recompute: Recompute = option(
        "RULE",
        "Activation recomputation: auto (as is best for each layer), always, never, all-or-none (each stage as a "
        "whole), first-k (each stage its first k layers), or one-for-all (all stages alike).",
        default=Recompute.AUTO,
    )
    same_degrees: bool = flag("One d and one t for all stages, as under a flush in any case.")
    stages: int | None = option("P", "Only plans with P stages; with P ranks where a rank holds several.")
    use_all_devices: bool = flag("Only plans that use all devices: d t p = K.")
    tensor_parallel: str | None = option("T,T,...", "Only these tensor-parallel degrees, such as 1,2,4,8.")
    per_stage_recompute: Literal["all-or-none", "first-k", "one-for-all"] | None = option(
        "RULE",
        "Only recomputation that runtimes can express: all-or-none of each stage; first-k, the first k layers of each "
        "stage, with a k of its own; or one-for-all, one setting for all.",
    )
    keep_order: bool = flag(
        "Only stages of consecutive layers, in the input's order. A tensor that skips stages is sent through each of "
        "them, and charged there."
    )
    sustained: bool = flag(
        "Only 2bw plans that keep their rate when replicas take turns, with the memory of the microbatches in flight "
        "that this needs."
    )

    def restrictions(self) -> Restrictions:
        """Raises UsageError for figures that make no sense."""
        found: list[constraints.Constraint] = []
        if self.tensor_parallel is not None:
            degrees = parse_degrees("--tensor-parallel", self.tensor_parallel)
            found.append(constraints.TensorParallelDegrees(degrees))
        if self.same_degrees:
            found.append(constraints.SameDegrees())
        if self.stages is not None:
            found.append(constraints.StageCount(self.stages))
        if self.use_all_devices:
            found.append(constraints.AllDevices())
        if self.per_stage_recompute is not None:
            found.append(constraints.RecomputeRule(Recompute(self.per_stage_recompute)))
        if self.keep_order:
            found.append(constraints.KeepOrder())
        if self.sustained:
            found.append(constraints.SustainedRate())
        return Restrictions(
            tensor_parallelism=not self.no_tensor_parallel,
            data_parallelism=not self.no_data_parallel,
            recompute=self.recompute,
            constraints=tuple(found),
        )


@dataclass(frozen=True)
class StepOptions:
    """What a step takes besides its passes."""

    panel: ClassVar[str] = "Step"

    all_reduce: AllReduce | None = option(
        "RULE",
        "How gradients are summed: parameter-server, as in Piper (the default), or ring, which moves half as much.",
    )
    all_reduce_overlap: float | None = option(
        "SHARE",
        "Share of the time for summing gradients that overlaps with backward passes, from 0 to 1. For schedules that "
        "flush each batch.",
    )
    optimizer_s: float | None = option("TIME", "Time of the optimizer, once a batch, such as 20ms.", parse=parse_time)

    def terms(self, known: StepTerms | None = None) -> StepTerms:
        """The ones given, else those known. Raises UsageError."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(known or StepTerms(), **given)


def _setting(text: str) -> str:
    name, sign, _ = text.partition("=")
    if not sign or not (name.isidentifier() or name.isdigit()):
        raise UsageError(f"{text!r}: expected NAME=VALUE")
    return text


@dataclass(frozen=True)
class LaunchOptions:
    """Which launch of a file is meant, where it has several or leaves something open."""

    panel: ClassVar[str] = "Launch file"

    recipe: str | None = option("NAME", "The function to read in a Python file, such as a recipe.")
    launch: int | None = option("N", "Which launch of a script with several, from 1.", min=1)
    settings: list[str] | None = option(
        "NAME=VALUE",
        "A variable of the environment that a launch file reads; can be repeated.",
        "--set",
        parse=_setting,
    )

    def asked(self) -> Asked:
        """The choice of a launch, for the readers of launches."""
        from piper_ray.launches.launch import Asked

        variables = dict(text.split("=", 1) for text in self.settings or ())
        return Asked(self.recipe, self.launch, variables)


@dataclass(frozen=True)
class SearchOptions:
    """When a search ends, and what it may take."""

    panel: ClassVar[str] = "Search"

    gap: float = option(
        "G",
        "Stop when a plan is proved to be within this share of the best, such as 0.01 or 1%.",
        default=0.0,
        parse=parse_gap,
    )
    time_limit_s: float | None = option(
        "TIME",
        "Stop after this time, such as 90, 10m or 1.5h, with the best plans and bounds so far.",
        parse=parse_seconds,
    )
    threads: int | None = option("T", "Worker threads; one for each core if not given.")
    memory_limit_bytes: float | None = option(
        "SIZE", "Refuse a search that itself needs more memory than this, such as 16GB.", parse=parse_size
    )

    def options(self, contract: Contract = Contract.SAFE, checkpoint: str | None = None) -> SolveOptions:
        """Raises UsageError for figures that make no sense."""
        return of_options(SolveOptions, self, resume=checkpoint, contract=contract)


@dataclass(frozen=True)
class ContractOption:
    """Which layers are merged first."""

    panel: ClassVar[str] = "Search"

    contract: Contract = option(
        "RULE",
        "Which layers are merged first: safe merges those that cost nothing, which loses no plan; operators merges "
        "whole blocks, for graphs too wide to plan layer by layer, and reports a bound on what that costs.",
        default=Contract.SAFE,
    )
