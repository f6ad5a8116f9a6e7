"""The JSON documents of plans and solutions, field by field; plan.schema.json and solution.schema.json come of this.

A plan document is Piper's own plan JSON (``stages`` with ``nodes``, ``dataParallelDegree``, ``tensorParallelDegree``
and ``TMPCids``) and more beside it. Fields with a default need not be there: a plan of Piper's has none of them. Times
are in s and of a microbatch, the paper's sample, unless said otherwise; sizes are in bytes; null: not known or without
end. What Python has as plain data is described there, field by field, and stands here as it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from piper_ray.model.constraints import Recompute
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import ScheduleName, StepTerms
from piper_ray.model.solution import BlockStats, Infeasibility, SolveStats, Status
from piper_ray.model.stop import StoppedBy


class _Documented(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, defer_build=True, use_attribute_docstrings=True)


class StageFigures(_Documented):
    devices: int
    """d t."""
    time_s: float
    """compute_s + communication_s + resync_s."""
    compute_s: float
    """Forward and backward passes of its layers."""
    communication_s: float
    """Tensors that cross its borders, both ways."""
    resync_s: float
    """A microbatch's share of synchronising the weights of its replicas."""
    memory_bytes: float
    """On each of its devices."""
    in_flight_microbatches: int
    """y: microbatches whose activations a device holds at once."""
    binds: list[Literal["time", "memory"]]
    """time: hardly a stage is slower. memory: it takes nearly all there is."""


class StageDocument(_Documented):
    nodes: list[int]
    """Ids of its layers, in the order of the instance."""
    dataParallelDegree: int
    """d: replicas, which share the microbatches of a batch."""
    tensorParallelDegree: int
    """t: devices of each replica."""
    TMPCids: dict[str, str]
    """For each layer, by its id as a text, the id of its TMPC at t."""
    names: list[str] | None = None
    """Names of its layers, as ``nodes`` lists them."""
    paths: list[str] | None = None
    """Their modules' names in the user's model, such as model.layers.17; empty: not known."""
    recompute: list[bool] | None = None
    """Whether each recomputes activations in the backward pass, as ``nodes`` lists them; null: none."""
    ranks: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """First and last rank of its devices, from 0 at the first stage on; t neighbours are a replica."""
    figures: StageFigures | None = None
    """What the stage costs, by evaluate."""


class InstanceFacts(_Documented):
    name: str
    """Of the workload."""
    digest: str
    """SHA-256 over every figure that plans depend on."""
    layers: int
    """Their number."""
    edges: int
    """Their number."""
    devices: int
    """K."""
    microbatches: int
    """N, in a batch."""
    samples_per_microbatch: int | None = None
    """Of the training data."""
    tokens_per_sample: int | None = None
    """Of the training data."""
    measured_threads: int | None = None
    """Of the CPU that times were measured on."""
    memory_bytes: float
    """M, of each device."""
    bandwidth_bytes_per_s: float
    """B, from a device to the outside."""


class Header(_Documented):
    kind: str = Field(alias="schema")
    """Which document it is."""
    schema_version: Annotated[int, Field(ge=1)]
    """Raised when a field changes its meaning or goes; new fields do not raise it."""
    tool_version: str
    """Of piper_ray."""
    instance: InstanceFacts
    """What was planned."""


class StagesDocument(_Documented):
    stages: list[StageDocument]
    """Front to back: what flows along an edge goes on or stays."""
    keeps_order: bool | None = None
    """Stages are runs of the layers' order, and tensors are relayed through each of them."""
    in_flight: list[int] | None = None
    """Microbatches that a replica of each stage keeps; null: ceil(s / d), under 2bw."""


class PlanDocument(StagesDocument, Header):
    """A plan, as solve --out and dump_plan write it."""

    model_config = ConfigDict(title="piper-ray/plan")

    kind: Literal["piper-ray/plan"] = Field(alias="schema")
    """Which document it is."""
    time_per_sample_s: float | None = None
    """Of a microbatch, by evaluate."""
    schedule: ScheduleName | None = None
    """That which the plan is for."""
    chunks: int | None = None
    """Stages on each rank."""
    group: int | None = None
    """Microbatches that pass through a chunk before the next; null: the least that may."""
    step: StepTerms | None = None
    """Terms of a step, where they are not the usual ones."""
    status: Literal["optimal", "feasible"] | None = None
    """What the solve proved."""
    lower_bound_s: float | None = None
    """No plan is faster."""
    gap: float | None = None
    """(time_per_sample_s - lower_bound_s) / time_per_sample_s."""
    planner: str | None = None
    """Who made it, if not the exact solver."""
    tried: int | None = None
    """Candidates that this planner looked at."""
    note: str | None = None
    """This planner's own words."""


class RestrictionsDocument(_Documented):
    tensor_parallelism: bool
    """Whether there may be any."""
    data_parallelism: bool
    """Whether there may be any."""
    recompute: Recompute
    """Which layers may recompute."""
    constraints: list[dict[str, object]] | None = None
    """Others: the kind of each, and its fields."""


class _PaceDocument(_Documented):
    time_per_sample_s: float
    step_s: float | None = None
    """Of a whole batch: N microbatches."""
    microbatches_per_s: float | None = None
    """null: no time at all."""
    samples_per_s: float | None = None
    """null: nobody says how many a microbatch holds."""
    tokens_per_s: float | None = None
    """null: nobody says how many a sample has."""


class EvaluationDocument(_PaceDocument):
    time_per_sample_s: float
    """Of a microbatch: that of the slowest stage."""
    devices: int
    """That the plan uses."""
    data_parallel_sum: int
    """Sum of d over all stages."""
    stages: int
    """Their number."""
    bottleneck: int
    """The first stage that is as slow as the whole, from 0."""


class SimulatedDocument(_PaceDocument):
    time_per_sample_s: float
    """Of a microbatch: the step over N."""
    bubble_share: float
    """Of the ranks' time: idle."""
    peak_memory_bytes: list[float]
    """Of each rank of one pipeline, on each of its devices."""


class WithoutRulesDocument(_Documented):
    time_per_sample_s: float | None
    """Of the best plan found; null: none was."""
    lower_bound_s: float | None
    """No plan is faster; null: there is none."""


class RuntimeDocument(_Documented):
    """The runtime that a solve was for."""

    name: Literal["megatron", "torchtitan", "torch", "deepspeed", "flagscale"]
    """Which one."""
    gpus_per_node: int
    """Of the cluster, as it was taken."""
    rank_order: str
    """Parallel groups, from neighbouring ranks to distant ones."""
    without_rules: WithoutRulesDocument
    """The same solve without the runtime's rules."""


class StepPartsDocument(_Documented):
    """Where the time of a step goes, in s: the parts add up to it."""

    compute_s: float
    """Passes, on average over all devices."""
    communication_s: float
    """Transfers and sums of gradients, on average over all devices."""
    uneven_s: float
    """What the busiest rank is busy beyond the average."""
    drain_s: float
    """When the busiest rank has nothing to do."""


class AlternativeDocument(_Documented):
    """One of several plans."""

    name: str
    """Its place, or its file."""
    step_s: float
    """Simulated."""
    schedule: ScheduleName
    """That which it is for."""
    chunks: int
    """Stages on each rank."""
    group: int | None = None
    """Microbatches that pass through a chunk before the next."""
    devices: int
    """That it uses."""
    fits: bool
    """Whether it keeps within the devices' memory."""
    peak_memory_bytes: float
    """Of the fullest rank."""
    bubble_share: float
    """Of the ranks' time that is spent idle."""
    parts: StepPartsDocument
    """Where the step's time goes."""
    layout: str | None
    """In Megatron's letters; null: they cannot say it."""
    plan: StagesDocument | None = None
    """Its stages."""


class SolutionDocument(Header):
    """Everything about a solve, as solve --json prints it."""

    model_config = ConfigDict(title="piper-ray/solution")

    kind: Literal["piper-ray/solution"] = Field(alias="schema")
    """Which document it is."""
    restrictions: RestrictionsDocument
    """What plans had to keep."""
    options: SolveOptions
    """How the solve could run, and when it could stop."""
    schedule: ScheduleName = ScheduleName.TWO_BW
    """That which value and bound are of."""
    chunks: int = 1
    """Stages on each rank."""
    group: int | None = None
    """Microbatches that pass through a chunk before the next; null: the least that may."""
    step: StepTerms | None = None
    """Terms of a step, where they are not the usual ones."""
    status: Status
    """What is proved."""
    stopped_by: StoppedBy | None
    """What ended the search before a proof."""
    time_per_sample_s: float | None
    """Of the plan, for a microbatch."""
    lower_bound_s: float | None
    """No plan is faster; null: there is none."""
    gap: float | None
    """(time_per_sample_s - lower_bound_s) / time_per_sample_s."""
    plan: StagesDocument | None
    """The best one found."""
    evaluation: EvaluationDocument | None
    """What that plan costs."""
    simulated: SimulatedDocument | None = None
    """That plan, run event by event."""
    infeasibility: Infeasibility | None
    """Why there is no plan."""
    blocks: BlockStats | None
    """What merging layers into blocks gave up; null: none were."""
    stats: SolveStats
    """What each step of the solve cost."""
    runtime: RuntimeDocument | None = None
    """Which runtime it was for; null: for none."""
    alternatives: list[AlternativeDocument] | None = None
    """The best plans of different degrees and chunks; null: not asked for."""


SCHEMAS: dict[str, type[BaseModel]] = {"plan.schema.json": PlanDocument, "solution.schema.json": SolutionDocument}
"""The files in this folder, and what each is made of."""


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
        part["description"] = part.get("description", "").partition("\n\n")[0]  # the rest is for programs in Python
        if name == BlockStats.__name__:
            part["properties"]["time_per_sample"] = _OLD_NAME
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
