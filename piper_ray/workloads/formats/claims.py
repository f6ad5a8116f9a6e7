"""What a plan's document says beside the plan: its schedule, who made it, and what was proved of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural, size_option
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import AllReduce, Schedule, StepTerms
from piper_ray.workloads.formats.faults import Faults, quoted
from piper_ray.workloads.formats.fields import FIGURE_WORDS, Figure, Open
from piper_ray.workloads.formats.surroundings import read_schedule


@dataclass(frozen=True)
class PlanClaims:
    """None, or empty, where the document says nothing, as Piper's own says nothing of all this.

    digest, step: of the instance, and the terms of a step, that the rest is of. lower_bound_s: no plan is faster.
    status: "optimal" or "feasible".
    planner, note: who made the plan, if not the exact solver, in its own words.
    """

    schedule: Schedule | None = None
    digest: str | None = None
    lower_bound_s: float | None = None
    status: str | None = None
    planner: str | None = None
    note: str | None = None
    step: StepTerms = StepTerms()

    def step_under(self, schedule: Schedule) -> StepTerms:
        """The terms of its step where that schedule flushes each batch too; the usual ones where there is no flush."""
        return StepTerms() if schedule.asynchronous else self.step


@dataclass(frozen=True)
class MadeFor:
    """The instance that a plan is of, where another one was given, in words.

    other_workload: its layers are others, or have other figures; else only K, N, M or B are.
    """

    text: str
    other_workload: bool

    def __str__(self) -> str:
        return self.text


class _Facts(Open):
    name: str
    digest: str
    layers: int
    devices: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float


class _Instance(Open):
    digest: str | None = Field(default=None, description="a text")


class _Step(Open):
    all_reduce: AllReduce = Field(strict=False, description=f"one of {', '.join(x.value for x in AllReduce)}")
    all_reduce_overlap: Annotated[float, Field(ge=0.0, le=1.0)] = Field(description="a number from 0 to 1")
    optimizer_s: Figure = Field(description=FIGURE_WORDS)


class _Claims(Open):
    step: _Step | None = Field(default=None, description="an object")
    instance: _Instance | None = Field(default=None, description="an object")
    lower_bound_s: Figure | None = Field(default=None, description=FIGURE_WORDS)
    status: str | None = Field(default=None, description="a text")
    planner: str | None = Field(default=None, description="a text")
    note: str | None = Field(default=None, description="a text")


def made_for_another(document: Mapping[str, object], instance: Instance) -> MadeFor | None:
    """None for a plan of this very instance, and for one that does not say what it is of."""
    if not str(document.get("schema", "")).startswith("piper-ray/"):
        return None
    facts = Faults().model(_Facts, document.get("instance"), "instance")
    if facts is None or facts.digest == instance.digest:
        return None
    try:
        there = instance.replace(
            devices=facts.devices,
            microbatches=facts.microbatches,
            memory_bytes=facts.memory_bytes,
            bandwidth_bytes_per_s=facts.bandwidth_bytes_per_s,
        )
    except UsageError:
        there = instance
    if there.digest == facts.digest:
        options = (
            ("devices", facts.devices, instance.devices, str(facts.devices)),
            ("microbatches", facts.microbatches, instance.microbatches, str(facts.microbatches)),
            ("memory", facts.memory_bytes, instance.memory_bytes, size_option(facts.memory_bytes)),
            (
                "bandwidth",
                facts.bandwidth_bytes_per_s,
                instance.bandwidth_bytes_per_s,
                f"{size_option(facts.bandwidth_bytes_per_s)}/s",
            ),
        )
        cluster = " ".join(f"--{name} {text}" for name, there_is, here_is, text in options if there_is != here_is)
        return MadeFor(f"the plan was made for another cluster or batch: {cluster}", other_workload=False)
    return MadeFor(
        f"a plan of another workload: of {quoted(facts.name)}, {plural(facts.layers, 'layer')}, digest "
        f"{facts.digest[:12]}...; this is {quoted(instance.name)}, {plural(len(instance.layers), 'layer')}, digest "
        f"{instance.digest[:12]}...",
        other_workload=True,
    )


def read_claims(document: Mapping[str, object], faults: Faults) -> PlanClaims | None:
    """None, with the faults noted, for a document whose claims are not of the kind they should be.

    Of a document that is not ours the schedule alone is read: the other names may mean anything there.
    """
    schedule_name, chunks, group = map(document.get, ("schedule", "chunks", "group"))
    schedule = read_schedule(schedule_name, chunks, group, "schedule", faults)
    ours = str(document.get("schema", "")).startswith("piper-ray/")
    read = faults.model(_Claims, document, "") if ours else _Claims()
    if faults or read is None:
        return None
    digest = None if read.instance is None else read.instance.digest
    step = StepTerms() if read.step is None else StepTerms(**read.step.model_dump())
    return PlanClaims(schedule, digest, read.lower_bound_s, read.status, read.planner, read.note, step)
