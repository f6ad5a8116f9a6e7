"""The JSON documents that are only written, field by field, and the schemas of all that have one.

``plan_schema`` has what is read too, and says what units and null mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from piper_ray.model.schedule import ScheduleName, StepTerms
from piper_ray.model.solution import BlockStats
from piper_ray.workloads.formats import plan_schema
from piper_ray.workloads.formats.plan_schema import (
    ApartDocument,
    Documented,
    Header,
    SolutionDocument,
    StagesDocument,
    Versioned,
)

FOLDER = Path(plan_schema.__file__).parent
"""Where the schemas are."""


class PlanDocument(StagesDocument, Header):
    """A plan, as solve --out and dump_plan write it."""

    model_config = ConfigDict(title="piper-ray/plan")

    kind: Literal["piper-ray/plan"] = Field(alias="schema")
    """The name of this kind of document."""
    time_per_sample_s: float | None = None
    """The plan's time for a microbatch, as evaluate computes it."""
    schedule: ScheduleName | None = None
    """The schedule of the plan."""
    chunks: int | None = None
    """The number of stages on each rank."""
    group: int | None = None
    """The microbatches that pass through a chunk before the next begins; null: as few as the schedule allows."""
    ahead: int = 0
    """The forward passes of each rank's warm-up in addition to those that are usual for interleaved."""
    step: StepTerms | None = None
    """The terms of a step, if they are not the usual ones."""
    status: Literal["optimal", "feasible"] | None = None
    """What the solve proved."""
    lower_bound_s: float | None = None
    """No plan is faster than this."""
    gap: float | None = None
    """The gap between the plan and the bound: (time_per_sample_s - lower_bound_s) / time_per_sample_s."""
    planner: str | None = None
    """The planner that made the plan, if it is not the exact solver."""
    tried: int | None = None
    """The number of candidates that this planner examined."""
    note: str | None = None
    """This planner's remark on its plan."""


class CellDocument(Documented):
    """A part of plan's search: plans whose launches differ only in d, t, p and stages."""

    microbatch: int
    """The samples of a microbatch."""
    schedule: ScheduleName
    """The schedule of its plans."""
    mode: str
    """The mode of all layers: the ids of their TMPCs, the commonest first."""
    optimizer_on_host: bool
    """Whether the optimizer's state is in host memory."""
    lower_bound_s: float | None
    """No plan of the cell has a shorter step; null: none fits."""
    closing: Literal["bound", "searched", "no plan", "left open"]
    """How the cell was closed. bound: its bound alone shows that none of its plans matters; searched: a search went
    through it and did not change its bound; no plan: none fits; left open: it was not searched to the end."""
    step_s: float | None
    """The step time of its best plan; null if none is known."""


class NeverBetterDocument(Documented):
    """Combinations that plan need not search, one under each schedule, because another one is never worse."""

    microbatch: int
    """The samples of a microbatch."""
    optimizer_on_host: bool
    """Whether the optimizer's state is in host memory."""
    mode: str
    """The mode of all layers: the ids of their TMPCs, the commonest first."""
    than: str
    """A mode of the same microbatch size that takes no more time and memory in any layer, and so in any plan."""


class OtherSchemesDocument(Documented):
    """What schemes that were not offered could save in the best plan's stages."""

    rule_table: str
    """The digest of the table of rules for schemes."""
    between_layers: list[str]
    """The placements of tensors between layers."""
    save_at_most: float
    """No schemes of the table save more than this share of the slowest stage's time."""


class SearchDocument(Versioned):
    """What plan searched and proved: the file search.json."""

    model_config = ConfigDict(title="piper-ray/search")

    kind: Literal["piper-ray/search"] = Field(alias="schema")
    """The name of this kind of document."""
    model: str
    """The name of the model."""
    gpu: str
    """The name of the GPU."""
    gpus: int
    """The number of GPUs of the cluster."""
    runtime: str
    """The runtime of the plans."""
    precision: str
    """The precision of matrix products."""
    batch: int
    """The samples of a batch, over all replicas."""
    left_free_bytes: float
    """The memory of each GPU that all plans leave free."""
    combinations: int
    """The number of combinations of microbatch size, schedule and mode, including those for which another one is never
    worse."""
    step_s: float | None
    """The step time of the best plan; null: the search ended before it had a plan."""
    lower_bound_s: float
    """No plan has a shorter step: the least of step_s and of the bounds of all cells."""
    gap: float | None
    """The gap of the best plan: 1 - lower_bound_s / step_s; null if there is no plan yet."""
    schemes: OtherSchemesDocument | None
    """The result of plan --schemes; null if it was not requested, or if nothing is known."""
    cells: list[CellDocument]
    """All combinations except those for which another one is never worse."""
    schedules: list[ScheduleName]
    """The schedules that were tried."""
    never_better: list[NeverBetterDocument]
    """The other combinations. combinations is the length of cells plus that of never_better for each schedule."""
    refused: list[str]
    """What was not tried, with the reason."""


class LayoutDocument(Documented):
    """A layout in the terms of runtimes."""

    microbatch: int
    """The samples of a microbatch."""
    tensor: int
    """The degree of tensor parallelism."""
    context: int
    """The degree of context parallelism."""
    pipeline: int
    """The number of ranks of a pipeline."""
    data: int
    """The number of replicas."""
    expert: int | None
    """The number of ranks that experts are spread over; null: experts are not spread independently of tensor
    parallelism."""
    expert_tensor: int
    """The number of GPUs that share an expert."""
    sequence_parallel: bool
    """Whether layers divide the sequence where they do not divide their products."""
    sharing: str
    """What replicas divide among them: no sharding, ZeRO-1, ZeRO-2 or FSDP."""
    recomputation: str
    """What layers recompute in their backward passes."""
    offload: bool
    """Whether activations wait in host memory."""
    optimizer_on_host: bool
    """Whether the optimizer's state is kept and updated in host memory."""
    schedule: ScheduleName
    """The schedule."""
    chunks: int
    """The number of stages on each rank."""
    each_site: bool = False
    """Whether there are pipelines at each of several sites."""


class PricedLayoutDocument(Documented):
    """A layout with the time and memory of a step."""

    layout: LayoutDocument
    """The layout in the terms of runtimes."""
    step_s: float
    """The simulated time of a step."""
    batch: int
    """The samples of a batch, over all replicas."""
    gpus: int
    """The number of GPUs that it uses."""
    tokens_per_s: float | None
    """The tokens trained per second; null if samples have none."""
    mfu: float
    """The model's products as a share of the peak rate of all GPUs of the cluster."""
    memory_bytes: float
    """The peak memory of the GPU that needs most."""
    simpler_in: list[str]
    """The features of the best plan that it does without, or has less of."""


class ChangeDocument(Documented):
    """The effect of a change of cluster, batch or precision."""

    what: str
    """The change, in words."""
    plan: PricedLayoutDocument | None
    """The best plan after the change; null if none fits."""


class AgainstDocument(Documented):
    """A layout of the user's own, compared with the plan."""

    name: str
    """The name of its file."""
    plan: PricedLayoutDocument
    """The layout with its estimated figures."""
    fits: bool
    """Whether it fits the devices' memory."""
    differs_in: str
    """What it has and the plan does not."""
    why_not: str
    """Why it was not chosen as the plan."""
    notes: list[str]
    """The parts of the layout that were ignored."""


class FewerNodesDocument(Documented):
    """The plan for a smaller number of nodes, and the cost of moving to it from the last plan before it that has as
    many nodes of each kind or more."""

    nodes: int
    """The number of nodes."""
    nodes_of: dict[str, int] | None = None
    """The number of nodes of each kind of devices, or at each site; null if there is one."""
    gpus: int
    """The number of GPUs of these nodes."""
    step_s: float | None
    """The step time of its plan; null if none fits."""
    reason: str | None = None
    """Why there is no plan."""
    layout: str | None = None
    """The layout, in words."""
    weights_bytes: float | None = None
    """The bytes of weights that must be sent to GPUs."""
    state_bytes: float | None = None
    """The bytes of optimizer state that must be sent to GPUs."""
    all_bytes: float | None = None
    """The bytes of weights and optimizer state that all GPUs hold under the plan."""


class PlannedAnswer(Versioned):
    """The answer of plan, as plan --json prints it."""

    model_config = ConfigDict(title="piper-ray/planned")

    kind: Literal["piper-ray/planned"] = Field(alias="schema")
    """The name of this kind of document."""
    best: PricedLayoutDocument
    """The plan."""
    stages: StagesDocument
    """The stages of the plan."""
    ranks_memory_bytes: list[float]
    """The peak memory of each rank of a pipeline."""
    memory_limit_bytes: float
    """The usable memory of each GPU; plans may use all of it but the part that they leave free."""
    likely_s: Annotated[list[float], Field(min_length=2, max_length=2)]
    """The range of a measured step in 9 of 10 cases."""
    likely_memory_bytes: Annotated[list[float], Field(min_length=2, max_length=2)]
    """The range of the measured peak memory of the fullest GPU in 9 of 10 cases."""
    training_days: float | None
    """The duration of the whole training in days; null if not requested."""
    training_cost: float | None
    """The cost of the whole training; null if not requested."""
    alternatives: list[PricedLayoutDocument]
    """The best plans of other cells, the fastest first."""
    precisions: dict[str, PricedLayoutDocument | None]
    """The best plan in each other requested precision; null if none fits."""
    changes: list[ChangeDocument]
    """The effects of other clusters, batches and precisions."""
    search: SearchDocument
    """What was searched and proved."""
    files: list[str]
    """The files that were written."""
    against: AgainstDocument | None
    """The layout that the plan was compared with; null if none was given."""
    fewer_nodes: list[FewerNodesDocument]
    """The plan and those for fewer nodes; empty if not requested."""
    apart: ApartDocument | None = None
    """Pipelines that each use one kind of devices, with layers as in the plan; null if devices are of one kind, or if
    none fits."""


SCHEMAS: dict[str, type[BaseModel]] = {
    "plan.schema.json": PlanDocument,
    "solution.schema.json": SolutionDocument,
    "search.schema.json": SearchDocument,
    "planned.schema.json": PlannedAnswer,
}
"""The schema files, and their models."""


_OLD_NAME = {
    "anyOf": [{"type": "number"}, {"type": "null"}],
    "default": None,
    "deprecated": True,
    "description": "The old name of time_per_sample_s; goes with the next version.",
}


def schema_of(model: type[BaseModel]) -> dict[str, object]:
    """The JSON Schema (draft 2020-12) of documents as they are written."""
    schema = model.model_json_schema()
    for name, part in schema["$defs"].items():
        part["description"] = part.get("description", "").partition("\n\n")[0]  # the rest is for Python programs
        if name == BlockStats.__name__:
            part["properties"]["time_per_sample"] = _OLD_NAME
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write_schemas() -> None:
    """Writes all schemas anew."""
    for name, model in SCHEMAS.items():
        text = json.dumps(schema_of(model), indent=2, ensure_ascii=False) + "\n"
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_schemas()
