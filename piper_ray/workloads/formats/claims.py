"""What a plan's document says beside the plan: its schedule, who made it, and what was proved of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from piper_ray.model.schedule import Schedule
from piper_ray.model.step import AllReduce, StepTerms
from piper_ray.workloads.formats.faults import Faults
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
