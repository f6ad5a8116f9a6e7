"""The JSON documents of plans, solutions and searches, field by field; the schemas beside this module come of it.

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
    """The devices of the stage: d t."""
    time_s: float
    """The stage's time for a microbatch: compute_s + communication_s + resync_s."""
    compute_s: float
    """The time of the forward and backward passes of its layers."""
    communication_s: float
    """The time of the tensors that cross its borders, in both directions."""
    resync_s: float
    """A microbatch's share of the time that synchronising the weights of its replicas takes."""
    memory_bytes: float
    """The memory that each of its devices needs."""
    in_flight_microbatches: int
    """y: the microbatches whose activations a device holds at once."""
    binds: list[Literal["time", "memory"]]
    """What limits the stage. time: hardly any stage is slower; memory: it takes nearly all memory there is."""


class StageLink(_Documented):
    bandwidth_bytes_per_s: float
    """What each device has to the next stage."""
    group_devices: int | None
    """The devices of the group, with a link of its own, that both stages lie in; null: the plan counts on none."""


class StageDocument(_Documented):
    nodes: list[int]
    """The ids of its layers, in the order of the instance."""
    dataParallelDegree: int
    """d: the number of replicas, which share the microbatches of a batch."""
    tensorParallelDegree: int
    """t: the number of devices of each replica."""
    kind: str | None = None
    """The kind of its devices, where there are several; null: all devices are alike."""
    TMPCids: dict[str, str]
    """For each layer, by its id as a text, the id of its TMPC at t."""
    names: list[str] | None = None
    """The names of its layers, in the order of ``nodes``."""
    paths: list[str] | None = None
    """The names of its layers' modules in the user's model, such as model.layers.17; empty: not known."""
    recompute: list[bool] | None = None
    """Whether each layer recomputes activations in the backward pass, in the order of ``nodes``; null: none does."""
    ranks: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """The first and the last rank of its devices, counted from 0 at the first stage; t neighbours are a replica."""
    to_next: StageLink | None = None
    """The link to the next stage; null: the last stage, or links do not differ, or ranks hold several stages."""
    schemes: dict[str, dict[str, object]] | None = None
    """TMPCs found from operators, in full, by the words of their ids: where each value lies and what moves."""
    figures: StageFigures | None = None
    """What the stage costs, as evaluate computes it."""


class InstanceFacts(_Documented):
    name: str
    """The name of the workload."""
    digest: str
    """The SHA-256 of every figure that plans depend on."""
    layers: int
    """The number of layers."""
    edges: int
    """The number of edges."""
    devices: int
    """K: the number of devices."""
    microbatches: int
    """N: the number of microbatches in a batch."""
    samples_per_microbatch: int | None = None
    """The samples of training data in a microbatch; null: not known."""
    tokens_per_sample: int | None = None
    """The tokens of a sample; null: not known, or samples have none."""
    measured_threads: int | None = None
    """The CPU threads of each process when the times were measured; null: they were not measured on a CPU."""
    memory_bytes: float
    """M: the memory of each device."""
    bandwidth_bytes_per_s: float
    """B: the bandwidth from a device to the outside."""


class Header(_Documented):
    kind: str = Field(alias="schema")
    """The name of this kind of document."""
    schema_version: Annotated[int, Field(ge=1)]
    """The version of the schema: it is raised when a field changes its meaning or goes, not for new fields."""
    tool_version: str
    """The version of piper_ray."""
    instance: InstanceFacts
    """The workload that was planned."""


class StagesDocument(_Documented):
    stages: list[StageDocument]
    """The stages, front to back: what flows along an edge stays in its stage or goes to a later one."""
    keeps_order: bool | None = None
    """The stages are runs of the layers' order, and tensors are relayed through each of them."""
    in_flight: list[int] | None = None
    """The microbatches that a replica of each stage keeps; null: ceil(s / d), as under 2bw."""


class PlanDocument(StagesDocument, Header):
    """A plan, as solve --out and dump_plan write it."""

    model_config = ConfigDict(title="piper-ray/plan")

    kind: Literal["piper-ray/plan"] = Field(alias="schema")
    """The name of this kind of document."""
    time_per_sample_s: float | None = None
    """The plan's time for a microbatch, as evaluate computes it."""
    schedule: ScheduleName | None = None
    """The schedule that the plan is for."""
    chunks: int | None = None
    """The number of stages on each rank."""
    group: int | None = None
    """The microbatches that pass through a chunk before the next begins; null: as few as the schedule allows."""
    ahead: int = 0
    """The forward passes of each rank's warm-up beyond those that are usual for interleaved."""
    step: StepTerms | None = None
    """The terms of a step, where they are not the usual ones."""
    status: Literal["optimal", "feasible"] | None = None
    """What the solve proved."""
    lower_bound_s: float | None = None
    """No plan is faster than this."""
    gap: float | None = None
    """How far the plan may be from the best: (time_per_sample_s - lower_bound_s) / time_per_sample_s."""
    planner: str | None = None
    """The planner that made the plan, if it is not the exact solver."""
    tried: int | None = None
    """The number of candidates that this planner looked at."""
    note: str | None = None
    """What this planner says of its plan."""


class RestrictionsDocument(_Documented):
    tensor_parallelism: bool
    """Whether plans may use tensor parallelism."""
    data_parallelism: bool
    """Whether plans may use data parallelism."""
    recompute: Recompute
    """Which layers may recompute."""
    constraints: list[dict[str, object]] | None = None
    """Further constraints: the kind of each, and its fields."""


class _PaceDocument(_Documented):
    time_per_sample_s: float
    step_s: float | None = None
    """The time of a whole batch, of N microbatches."""
    microbatches_per_s: float | None = None
    """Microbatches in a second; null: the plan takes no time at all."""
    samples_per_s: float | None = None
    """Samples in a second; null: it is not known how many a microbatch holds."""
    tokens_per_s: float | None = None
    """Tokens in a second; null: it is not known how many a sample has."""


class EvaluationDocument(_PaceDocument):
    time_per_sample_s: float
    """The time for a microbatch: that of the slowest stage."""
    devices: int
    """The number of devices that the plan uses."""
    data_parallel_sum: int
    """The sum of d over all stages."""
    stages: int
    """The number of stages."""
    bottleneck: int
    """The first stage that is as slow as the whole plan, counted from 0."""


class SimulatedDocument(_PaceDocument):
    time_per_sample_s: float
    """The time for a microbatch: the step's time over N."""
    bubble_share: float
    """The share of the ranks' time that they are idle."""
    peak_memory_bytes: list[float]
    """The peak memory of each rank of one pipeline, on each of its devices."""


class WithoutRulesDocument(_Documented):
    time_per_sample_s: float | None
    """The time of the best plan found, for a microbatch; null: none was found."""
    lower_bound_s: float | None
    """No plan is faster than this; null: there is no plan."""


class RuntimeDocument(_Documented):
    """The runtime that a solve was for."""

    name: Literal["megatron", "torchtitan", "torch", "deepspeed", "flagscale"]
    """The name of the runtime."""
    gpus_per_node: int
    """The GPUs of each node that the solve assumed."""
    rank_order: str
    """The parallel groups, from neighbouring ranks to distant ones."""
    without_rules: WithoutRulesDocument
    """What the same solve finds without the runtime's rules."""


class StepPartsDocument(_Documented):
    """Where the time of a step goes, in s: the parts add up to it."""

    compute_s: float
    """The time of the passes, on average over all devices."""
    communication_s: float
    """The time of transfers and of sums of gradients, on average over all devices."""
    uneven_s: float
    """The time that the busiest rank is busy beyond the average."""
    drain_s: float
    """The time when the busiest rank has nothing to do."""


class AlternativeDocument(_Documented):
    """One of several plans."""

    name: str
    """The plan's place in the list, or the name of its file."""
    step_s: float
    """The simulated time of a step."""
    schedule: ScheduleName
    """The schedule that the plan is for."""
    chunks: int
    """The number of stages on each rank."""
    group: int | None = None
    """The microbatches that pass through a chunk before the next begins."""
    ahead: int = 0
    """The forward passes of each rank's warm-up beyond those that are usual for interleaved."""
    devices: int
    """The number of devices that the plan uses."""
    fits: bool
    """Whether the plan keeps within the devices' memory."""
    peak_memory_bytes: float
    """The peak memory of the fullest rank."""
    bubble_share: float
    """The share of the ranks' time that they are idle."""
    parts: StepPartsDocument
    """Where the step's time goes."""
    layout: str | None
    """The layout in Megatron's letters; null: the letters cannot say it."""
    plan: StagesDocument | None = None
    """The plan's stages."""


class OwnPipelinesDocument(_Documented):
    """What the devices of one kind do by themselves."""

    kind: str
    """Of the devices."""
    microbatches: int
    """Of a batch that they have."""
    batch_s: float
    """What these take."""
    stages: int
    """The stages of their pipelines."""
    data_parallel_degree: int
    """The replicas of a stage."""
    tensor_parallel_degree: int
    """The devices that share a layer."""


class ApartDocument(_Documented):
    """Pipelines of one kind of devices each, with the microbatches shared out among them."""

    batch_s: float
    """What a batch takes."""
    gradients_s: float
    """What summing the gradients of the kinds takes of it."""
    kinds: list[OwnPipelinesDocument]
    """Those that do anything."""


class SolutionDocument(Header):
    """Everything about a solve, as solve --json prints it."""

    model_config = ConfigDict(title="piper-ray/solution")

    kind: Literal["piper-ray/solution"] = Field(alias="schema")
    """The name of this kind of document."""
    restrictions: RestrictionsDocument
    """The restrictions that plans had to keep."""
    options: SolveOptions
    """How the solve could run, and when it could stop."""
    schedule: ScheduleName = ScheduleName.TWO_BW
    """The schedule that the plan and the lower bound are for."""
    chunks: int = 1
    """The number of stages on each rank."""
    group: int | None = None
    """The microbatches that pass through a chunk before the next begins; null: as few as the schedule allows."""
    ahead: int = 0
    """The forward passes of each rank's warm-up beyond those that are usual for interleaved."""
    step: StepTerms | None = None
    """The terms of a step, where they are not the usual ones."""
    status: Status
    """What the solve proved."""
    stopped_by: StoppedBy | None
    """What ended the search before a proof; null: it ended by itself."""
    time_per_sample_s: float | None
    """The plan's time for a microbatch; null: there is no plan."""
    lower_bound_s: float | None
    """No plan is faster than this; null: there is no plan."""
    gap: float | None
    """How far the plan may be from the best: (time_per_sample_s - lower_bound_s) / time_per_sample_s."""
    plan: StagesDocument | None
    """The best plan found."""
    evaluation: EvaluationDocument | None
    """What that plan costs."""
    simulated: SimulatedDocument | None = None
    """What a simulation of that plan, event by event, finds."""
    infeasibility: Infeasibility | None
    """Why there is no plan."""
    blocks: BlockStats | None
    """What merging layers into blocks gave up; null: no layers were merged."""
    stats: SolveStats
    """What each step of the solve cost."""
    runtime: RuntimeDocument | None = None
    """The runtime that the solve was for; null: for none."""
    alternatives: list[AlternativeDocument] | None = None
    """The best plans of different degrees and chunks; null: they were not asked for."""
    apart: ApartDocument | None = None
    """The best pipelines of one kind of devices each; null: they were not asked for, or none fit."""


class CellDocument(_Documented):
    """Plans alike in all that a launch says but d, t, p and stages: a part of what plan searches."""

    microbatch: int
    """The samples of a microbatch."""
    schedule: ScheduleName
    """The schedule of its plans."""
    mode: str
    """How all layers run: the ids of their TMPCs, the commonest first."""
    optimizer_on_host: bool
    """Whether the optimizer's state is in host memory."""
    lower_bound_s: float | None
    """None of its plans takes less a step; null: none fits."""
    closing: Literal["bound", "searched", "no plan", "left open"]
    """How it was closed. bound: the bound alone says that no plan of it is of interest; searched: a search has gone
    through it, which left its bound where it is; no plan: none fits; left open: no search has gone through it."""
    step_s: float | None
    """The step of its best plan; null: none is known, or none was sought."""


class NeverBetterDocument(_Documented):
    """Combinations that plan need not look at, one under each schedule: another one never loses to them."""

    microbatch: int
    """The samples of a microbatch."""
    optimizer_on_host: bool
    """Whether the optimizer's state is in host memory."""
    mode: str
    """How all layers run: the ids of their TMPCs, the commonest first."""
    than: str
    """The mode of the same microbatch size that takes no more time and memory in any layer, and so in any plan."""


class OtherSchemesDocument(_Documented):
    """What schemes that were not offered could save of the best plan's stages."""

    rule_table: str
    """The digest of the table of rules that schemes are of."""
    between_layers: list[str]
    """How tensors may lie between layers."""
    save_at_most: float
    """The share of a stage's time that no schemes of the table save."""


class SearchDocument(_Documented):
    """What plan searched, and what that proves: the file search.json."""

    model_config = ConfigDict(title="piper-ray/search")

    kind: Literal["piper-ray/search"] = Field(alias="schema")
    """The name of this kind of document."""
    schema_version: Annotated[int, Field(ge=1)]
    """The version of the schema: it is raised when a field changes its meaning or goes, not for new fields."""
    tool_version: str
    """The version of piper_ray."""
    model: str
    """The name of the model."""
    gpu: str
    """The name of the GPU."""
    gpus: int
    """The number of GPUs of the cluster."""
    runtime: str
    """The runtime that plans are for."""
    precision: str
    """The precision of matrix products."""
    batch: int
    """The samples of a batch, over all replicas."""
    left_free_bytes: float
    """The memory of each GPU that all plans leave free."""
    combinations: int
    """The number of combinations of microbatch size, schedule and mode, with those that another one never loses to."""
    step_s: float | None
    """The step of the best plan of all; null: the search ended before it had a plan."""
    lower_bound_s: float
    """No plan takes less a step: the least of step_s and of the bounds of all cells."""
    gap: float | None
    """How far the best plan may be from the best: 1 - lower_bound_s / step_s; null: there is no plan yet."""
    schemes: OtherSchemesDocument | None
    """Of plan --schemes; null: it was not asked for, or nothing is known."""
    cells: list[CellDocument]
    """All combinations but those that another one never loses to."""
    schedules: list[ScheduleName]
    """The schedules that were tried."""
    never_better: list[NeverBetterDocument]
    """The other combinations: combinations is the length of cells and, for each schedule, that of never_better."""
    refused: list[str]
    """What was not tried, and why."""


class LayoutDocument(_Documented):
    """A plan in the words that runtimes have."""

    microbatch: int
    """The samples of a microbatch."""
    tensor: int
    """The degree of tensor parallelism."""
    context: int
    """The degree of context parallelism."""
    pipeline: int
    """The ranks of a pipeline."""
    data: int
    """The replicas."""
    expert: int | None
    """The ranks that experts are spread over; null: no experts are spread apart from tensor parallelism."""
    expert_tensor: int
    """The GPUs that share an expert."""
    sequence_parallel: bool
    """Whether layers divide the sequence where they do not divide their products."""
    sharing: str
    """What replicas share out: no sharding, ZeRO-1, ZeRO-2 or FSDP."""
    recomputation: str
    """What layers compute again in their backward passes."""
    offload: bool
    """Whether activations wait in host memory."""
    optimizer_on_host: bool
    """Whether the optimizer's state is in host memory, and updated there."""
    schedule: ScheduleName
    """The schedule."""
    chunks: int
    """The number of stages on each rank."""


class PricedLayoutDocument(_Documented):
    """A layout and what a step of it takes."""

    layout: LayoutDocument
    """The layout in the words that runtimes have."""
    step_s: float
    """The simulated time of a step."""
    batch: int
    """The samples of a batch, over all replicas."""
    gpus: int
    """The GPUs that it uses."""
    tokens_per_s: float | None
    """The tokens trained per second; null: samples have none."""
    mfu: float
    """The share of the peak rate of all GPUs of the cluster that the model's products take."""
    memory_bytes: float
    """The peak memory of the fullest GPU."""
    simpler_in: list[str]
    """What it does without, or has less of, than the best plan."""


class ChangeDocument(_Documented):
    """What a change of cluster, batch or precision would bring."""

    what: str
    """The change, in words."""
    plan: PricedLayoutDocument | None
    """The best plan with it; null: none fits."""


class AgainstDocument(_Documented):
    """A layout of the user's own beside the plan."""

    name: str
    """The name of its file."""
    plan: PricedLayoutDocument
    """The layout under the same model."""
    fits: bool
    """Whether it keeps within the devices' memory."""
    differs_in: str
    """What it has that the plan has not."""
    why_not: str
    """Why it is not the plan."""
    notes: list[str]
    """What of the layout was left aside."""


class FewerNodesDocument(_Documented):
    """The plan for so many nodes, and what moving to it from the plan before takes."""

    nodes: int
    """The number of nodes."""
    gpus: int
    """The number of GPUs of these."""
    step_s: float | None
    """The step of its plan; null: none fits."""
    reason: str | None = None
    """Why there is no plan."""
    layout: str | None = None
    """The layout, in words."""
    weights_bytes: float | None = None
    """The bytes of weights that GPUs have to get."""
    state_bytes: float | None = None
    """The bytes of optimizer's state that GPUs have to get."""
    all_bytes: float | None = None
    """The bytes of weights and optimizer's state that all GPUs hold under the plan."""


class PlannedAnswer(_Documented):
    """The answer of plan, as plan --json prints it."""

    model_config = ConfigDict(title="piper-ray/planned")

    kind: Literal["piper-ray/planned"] = Field(alias="schema")
    """The name of this kind of document."""
    schema_version: Annotated[int, Field(ge=1)]
    """The version of the schema: it is raised when a field changes its meaning or goes, not for new fields."""
    tool_version: str
    """The version of piper_ray."""
    best: PricedLayoutDocument
    """The plan."""
    stages: StagesDocument
    """The stages of the plan."""
    ranks_memory_bytes: list[float]
    """The peak memory of each rank of a pipeline."""
    memory_limit_bytes: float
    """The memory of each GPU that is found, of which plans may use all but what they are to leave free."""
    likely_s: Annotated[list[float], Field(min_length=2, max_length=2)]
    """Where a measured step lies in 9 of 10 cases."""
    likely_memory_bytes: Annotated[list[float], Field(min_length=2, max_length=2)]
    """Where the measured peak of the fullest GPU lies in 9 of 10 cases."""
    training_days: float | None
    """The days of the whole training; null if not asked for."""
    training_cost: float | None
    """The cost of the whole training; null if not asked for."""
    alternatives: list[PricedLayoutDocument]
    """The best plans of other cells, the fastest first."""
    precisions: dict[str, PricedLayoutDocument | None]
    """The best plans in the other precisions that were asked for; null: none fits."""
    changes: list[ChangeDocument]
    """What other clusters, batches and precisions would bring."""
    search: SearchDocument
    """What was searched, and what that proves."""
    files: list[str]
    """The files that were written."""
    against: AgainstDocument | None
    """The layout that the plan was held against; null: none was given."""
    fewer_nodes: list[FewerNodesDocument]
    """The plan and those for fewer nodes; empty if not asked for."""


SCHEMAS: dict[str, type[BaseModel]] = {
    "plan.schema.json": PlanDocument,
    "solution.schema.json": SolutionDocument,
    "search.schema.json": SearchDocument,
    "planned.schema.json": PlannedAnswer,
}
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
