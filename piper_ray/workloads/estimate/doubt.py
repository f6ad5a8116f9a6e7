"""How far estimates have been off, and how many measured runs back them.

``doubt.toml`` has the figures; ``scripts/validate_estimates --doubt`` makes it from all runs of the repository.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from pydantic import Field

from piper_ray.model.figures import held_text, plural, time_text
from piper_ray.model.instance import Instance, TrainedModel
from piper_ray.model.schedule import Schedule
from piper_ray.workloads.estimate.hardware import Gpu
from piper_ray.workloads.estimate.software import Precision, Software, SoftwareFamily, Spread, Stack, load_software
from piper_ray.workloads.formats.documents import package_table
from piper_ray.workloads.formats.fields import Closed, Figure

FEW_RUNS = 3
"""A constant that rests on fewer runs than this is named to the user."""


def likeness(software: Software, precision: Precision, experts: bool) -> str:
    """The key of the measured runs that resemble such an estimate."""
    if experts:
        return "experts"
    if precision is Precision.FP8:
        return "fp8"
    return {SoftwareFamily.OLDER: "older", SoftwareFamily.SHARDED: "sharded", SoftwareFamily.TODAY: "today"}[
        software.family
    ]


class MeasuredLike(Closed):
    """Runs that are alike.

    least, most: measured over estimated steps, in 9 of 10 runs of a source that was left out.
    """

    name: str = Field(description="a text")
    least: Figure = Field(description="a number >= 0")
    most: Figure = Field(description="a number >= 0")
    runs: int = Field(description="a whole number")
    sources: int = Field(description="a whole number")


class MeasuredPeaks(Closed):
    """Published peaks of memory that are alike.

    least, most: measured over estimated peaks, in 9 of 10. headroom: the share of a GPU's memory that has to stay free
    so that 9 in 10 peaks fit.
    """

    name: str = Field(description="a text")
    least: Figure = Field(description="a number >= 0")
    most: Figure = Field(description="a number >= 0")
    headroom: Figure = Field(description="a number >= 0")
    peaks: int = Field(description="a whole number")

    def range_bytes(self, peak_bytes: float) -> tuple[float, float]:
        """The range of a measured peak in 9 of 10 cases."""
        return peak_bytes * self.least, peak_bytes * self.most

    def range_text(self, peak_bytes: float) -> str:
        """``64.8 GiB to 73 GiB, as 9 in 10 of 91 published peaks``."""
        least, most = map(held_text, self.range_bytes(peak_bytes))
        return f"{least} to {most}, as 9 in 10 of {self.peaks} published peaks"


class DoubtTable(Closed):
    """The whole of ``doubt.toml``.

    gpus: runs by the name of the GPU. software: runs by the generation of software that gives the constants. constants:
    runs by the texts of ``constants_in_use``. over_nodes: runs whose experts lie on several nodes.
    """

    alike: dict[str, MeasuredLike] = Field(description="a table")
    memory: dict[str, MeasuredPeaks] = Field(description="a table")
    gpus: dict[str, int] = Field(description="a table of numbers")
    software: dict[str, int] = Field(description="a table of numbers")
    constants: dict[str, int] = Field(description="a table of numbers")
    over_nodes: int = Field(description="a whole number")


def constants_in_use(stack: Stack, *, experts: bool, scans: bool, tensor: bool, sharded: bool) -> list[str]:
    """The fitted constants that such an estimate depends on, with their values.

    scans: whether layers scan by chunks. tensor: whether it has tensor parallelism. sharded: whether gradients are
    scattered in each pass.
    """
    gpu, software, fp8 = stack.gpu, stack.software, stack.precision is Precision.FP8
    wanted: tuple[tuple[bool, Gpu | Software, tuple[str, ...]], ...] = (
        (True, gpu, ("matrix_fraction", "attention_fraction", "edge", "memory_fraction")),
        (fp8, gpu, ("fp8_gain",)),
        (experts, gpu, ("sorting_s",)),
        (scans, gpu, ("scan_flop_per_s",)),
        (tensor, gpu, ("link_fraction",)),
        (True, software, ("efficiency", "unfused", "host_s")),
        (fp8, software, ("cast_bytes",)),
        (experts, software, ("experts_host_s", "dispatch_fraction", "expert_launches", "expert_overlap")),
        (tensor, software, ("message_s", "forward_overlap", "backward_overlap", "tensor_slowdown", "full_node_host")),
        (sharded, software, ("gather_slowdown",)),
        (bool(software.graphs), software, ("graphed_experts_host",)),
        (stack.is_large, software, ("straggling",)),
    )
    found = [(table, name) for used, table, names in wanted if used for name in names]
    return [f"{type(table).model_fields[name].alias or name} {getattr(table, name):.3g}" for table, name in found]


@cache
def load_doubt() -> DoubtTable:
    """The table that is part of the package."""
    return DoubtTable.model_validate(package_table("piper_ray.workloads.estimate", "doubt.toml"))


def memory_likeness(family: SoftwareFamily) -> str:
    """The key of the published peaks that resemble those of such software."""
    return "sharded" if family is SoftwareFamily.SHARDED else "whole"


def memory_doubt(software: Software) -> MeasuredPeaks:
    """How far off estimated peaks of such software were."""
    return load_doubt().memory[memory_likeness(software.family)]


@dataclass(frozen=True)
class Doubt:
    """How far off an estimate may be.

    few: what hardly any run backs, with the number of runs. memory: the range of its peaks. calibrated: the range of
    runs on the machine itself, to which the estimate was fitted, if it is the narrower one.
    """

    alike: MeasuredLike
    few: Mapping[str, int]
    memory: MeasuredPeaks
    calibrated: Spread | None = None

    def range_s(self, step_s: float) -> tuple[float, float]:
        """The range of a measured step in 9 of 10 cases."""
        of = self.alike if self.calibrated is None else self.calibrated
        return step_s * of.least, step_s * of.most

    def range_text(self, step_s: float) -> str:
        """``102 s to 132 s, as 9 in 10 of 26 measured runs like it``."""
        least, most = (time_text(time_s, 3) for time_s in self.range_s(step_s))
        return f"{least} to {most}, {self.words}"

    @property
    def words(self) -> str:
        """The runs that the range of a step describes."""
        if self.calibrated is None:
            return f"as 9 in 10 of {plural(self.alike.runs, 'measured run')} like it"
        return f"as {plural(self.calibrated.runs, 'run')} on this machine"

    @property
    def lines(self) -> list[str]:
        """The doubt in words, a line each."""
        of = self.alike
        like = f"{plural(of.runs, 'run')} like this one ({of.name}; {plural(of.sources, 'source')})"
        lines = [f"of {like} 9 in 10 took x{of.least:.2f} to x{of.most:.2f} of the estimate"]
        if self.calibrated is not None:
            own = self.calibrated
            lines = [f"steps take x{own.least:.2f} to x{own.most:.2f} of the estimate, {self.words}"]
        return lines + [self.few_text] * bool(self.few)

    @property
    def few_text(self) -> str:
        """What hardly any run backs; empty if there is nothing."""
        backed = ", ".join(what + (f" ({plural(count, 'run')})" if count else "") for what, count in self.few.items())
        return f"{'hardly any' if any(self.few.values()) else 'no'} measured run backs {backed}" if backed else ""


def workload_doubt(instance: Instance, schedule: Schedule) -> Doubt | None:
    """How far off the steps of a workload that ``estimate`` wrote may be. None for other workloads, and for
    asynchronous schedules, which no measured run has."""
    model = instance.model
    if model is None or schedule.asynchronous or not _is_estimate(model):
        return None
    software = load_software()[model.software]
    like = likeness(software, Precision(model.precision), any(layer.experts for layer in instance.layers))
    return _doubt(software, like, {}, Spread(**model.calibrated) if model.calibrated else None)


def _is_estimate(model: TrainedModel) -> bool:
    return bool(model.gpu) and model.software in load_software() and model.precision in set(Precision)


def step_text(step_s: float, doubt: Doubt | None, each: str = "") -> str:
    """``115 s (102 s to 132 s, as 9 in 10 of 26 measured runs like it)``; without a doubt ``115 s``. each: follows the
    time."""
    text = time_text(step_s) + each
    return f"{text} ({doubt.range_text(step_s)})" if doubt else text


def doubt_of(stack: Stack, experts: bool, constants: Iterable[str], spread: Spread | None = None) -> Doubt:
    """How far off such estimates were.

    constants: texts of ``constants_in_use``. spread: the spread of the steps that calibrated it.
    """
    table, gpu_name, software = load_doubt(), stack.gpu.name, stack.software
    counts = {gpu_name: table.gpus.get(gpu_name, 0), software.name: table.software.get(software.base, 0)}
    if experts:
        counts["experts over several nodes"] = table.over_nodes
    counts |= {f"the constant {constant}": table.constants.get(constant, 0) for constant in constants}
    few = {what: count for what, count in counts.items() if count < FEW_RUNS}
    return _doubt(software, likeness(software, stack.precision, experts), few, spread)


def _doubt(software: Software, like: str, few: Mapping[str, int], spread: Spread | None) -> Doubt:
    alike = load_doubt().alike[like]
    if spread is not None and spread.most / spread.least >= alike.most / alike.least:
        spread = None
    return Doubt(alike, few, memory_doubt(software), spread)
