"""The JSON documents of plans and solutions, field by field; plan.schema.json and solution.schema.json come of this.

A plan document is Piper's own plan JSON (``stages`` with ``nodes``, ``dataParallelDegree``, ``tensorParallelDegree``
and ``TMPCids``) and more beside it. Fields with a default need not be there: a plan of Piper's has none of them. Times
are in s and of a microbatch, the paper's sample, unless said otherwise; sizes are in bytes; null: not known or without
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from piper_ray.model.schedule import ScheduleName
from piper_ray.model.stop import StoppedBy

if TYPE_CHECKING:
    _ScheduleName = str
    _StoppedBy = str
else:
    _ScheduleName, _StoppedBy = (Literal[tuple(x.value for x in kind)] for kind in (ScheduleName, StoppedBy))
"""The texts of these enums, as documents have them."""


class _Documented(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class StageFigures(_Documented):
    devices: int = Field(description="d t.")
    time_s: float = Field(description="compute_s + communication_s + resync_s.")
    compute_s: float = Field(description="Forward and backward passes of its layers.")
    communication_s: float = Field(description="Tensors that cross its borders, both ways.")
    resync_s: float = Field(description="A microbatch's share of synchronising the weights of its replicas.")
    memory_bytes: float = Field(description="On each of its devices.")
    in_flight_microbatches: int = Field(description="y: microbatches whose activations a device holds at once.")
    binds: list[Literal["time", "memory"]] = Field(
        description="time: hardly a stage is slower. memory: it takes nearly all there is."
    )


class StageDocument(_Documented):
    nodes: list[int] = Field(description="Ids of its layers, in the order of the instance.")
    dataParallelDegree: int = Field(description="d: replicas, which share the microbatches of a batch.")
    tensorParallelDegree: int = Field(description="t: devices of each replica.")
    TMPCids: dict[str, str] = Field(description="For each layer, by its id as a text, the id of its TMPC at t.")
    names: list[str] | None = Field(default=None, description="Names of its layers, as ``nodes`` lists them.")
    paths: list[str] | None = Field(
        default=None, description="Their modules' names in the user's model, such as model.layers.17; empty: not known."
    )
    recompute: list[bool] | None = Field(
        default=None,
        description="Whether each recomputes activations in the backward pass, as ``nodes`` lists them; null: none.",
    )
    ranks: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="First and last rank of its devices, from 0 at the first stage on; t neighbours are a replica.",
    )
    figures: StageFigures | None = Field(default=None, description="What the stage costs, by evaluate.")


class InstanceFacts(_Documented):
    name: str = Field(description="Of the workload.")
    digest: str = Field(description="SHA-256 over every figure that plans depend on.")
    layers: int = Field(description="Their number.")
    edges: int = Field(description="Their number.")
    devices: int = Field(description="K.")
    microbatches: int = Field(description="N, in a batch.")
    samples_per_microbatch: int | None = Field(default=None, description="Of the training data.")
    tokens_per_sample: int | None = Field(default=None, description="Of the training data.")
    measured_threads: int | None = Field(default=None, description="Of the CPU that times were measured on.")
    memory_bytes: float = Field(description="M, of each device.")
    bandwidth_bytes_per_s: float = Field(description="B, from a device to the outside.")


class Header(_Documented):
    kind: str = Field(alias="schema", description="Which document it is.")
    schema_version: Annotated[int, Field(ge=1)] = Field(
        description="Raised when a field changes its meaning or goes; new fields do not raise it."
    )
    tool_version: str = Field(description="Of piper_ray.")
    instance: InstanceFacts = Field(description="What was planned.")


class StagesDocument(_Documented):
    stages: list[StageDocument] = Field(description="Front to back: what flows along an edge goes on or stays.")
    keeps_order: bool | None = Field(
        default=None, description="Stages are runs of the layers' order, and tensors are relayed through each of them."
    )
    in_flight: list[int] | None = Field(
        default=None, description="Microbatches that a replica of each stage keeps; null: ceil(s / d), under 2bw."
    )


class StepDocument(_Documented):
    all_reduce: Literal["parameter-server", "ring"] = Field(description="How gradients are summed.")
    all_reduce_overlap: float = Field(description="Share of that which hides beside backward passes.")
    optimizer_s: float = Field(description="Of each rank, once a batch.")


class PlanDocument(StagesDocument, Header):
    """A plan, as solve --out and dump_plan write it."""

    model_config = ConfigDict(title="piper-ray/plan")

    kind: Literal["piper-ray/plan"] = Field(alias="schema", description="Which document it is.")
    time_per_sample_s: float | None = Field(default=None, description="Of a microbatch, by evaluate.")
    schedule: _ScheduleName | None = Field(default=None, description="That which the plan is for.")
    chunks: int | None = Field(default=None, description="Stages on each rank.")
    group: int | None = Field(
        default=None, description="Microbatches that pass through a chunk before the next; null: the least that may."
    )
    step: StepDocument | None = Field(default=None, description="Terms of a step, where they are not the usual ones.")
    status: Literal["optimal", "feasible"] | None = Field(default=None, description="What the solve proved.")
    lower_bound_s: float | None = Field(default=None, description="No plan is faster.")
    gap: float | None = Field(default=None, description="(time_per_sample_s - lower_bound_s) / time_per_sample_s.")
    planner: str | None = Field(default=None, description="Who made it, if not the exact solver.")
    tried: int | None = Field(default=None, description="Candidates that this planner looked at.")
    note: str | None = Field(default=None, description="This planner's own words.")


class RestrictionsDocument(_Documented):
    tensor_parallelism: bool = Field(description="Whether there may be any.")
    data_parallelism: bool = Field(description="Whether there may be any.")
    recompute: Literal["auto", "always", "never", "all-or-none", "first-k", "one-for-all"] = Field(
        description="Which layers may recompute."
    )
    constraints: list[dict[str, object]] | None = Field(
        default=None, description="Others: the kind of each, and its fields."
    )


class OptionsDocument(_Documented):
    gap: float = Field(description="The search may stop at this gap.")
    time_limit_s: float | None = Field(description="The search stops after so long.")
    threads: int | None = Field(description="null: one per core.")
    memory_limit_bytes: float | None = Field(description="null: what the machine has free.")
    resume: str | None = Field(description="Where the state of the search is kept.")
    contract: Literal["safe", "operators"] = Field(description="Which layers are merged before the solve.")
    within_s: float | None = Field(default=None, description="The search stops once no plan takes so little.")


class _PaceDocument(_Documented):
    time_per_sample_s: float
    step_s: float | None = Field(default=None, description="Of a whole batch: N microbatches.")
    microbatches_per_s: float | None = Field(default=None, description="null: no time at all.")
    samples_per_s: float | None = Field(default=None, description="null: nobody says how many a microbatch holds.")
    tokens_per_s: float | None = Field(default=None, description="null: nobody says how many a sample has.")


class EvaluationDocument(_PaceDocument):
    time_per_sample_s: float = Field(description="Of a microbatch: that of the slowest stage.")
    devices: int = Field(description="That the plan uses.")
    data_parallel_sum: int = Field(description="Sum of d over all stages.")
    stages: int = Field(description="Their number.")
    bottleneck: int = Field(description="The first stage that is as slow as the whole, from 0.")


class SimulatedDocument(_PaceDocument):
    time_per_sample_s: float = Field(description="Of a microbatch: the step over N.")
    bubble_share: float = Field(description="Of the ranks' time: idle.")
    peak_memory_bytes: list[float] = Field(description="Of each rank of one pipeline, on each of its devices.")


class InfeasibilityDocument(_Documented):
    reason: str = Field(description="A sentence.")
    least_memory_bytes: float | None = Field(description="With which there is a plan; null: no memory helps.")


class BlocksDocument(_Documented):
    layers: int = Field(description="Their number.")
    blocks: int = Field(description="Their number.")
    downsets_before: int | None = Field(description="Of the layers; null: too many to count.")
    downsets: int = Field(description="Of the blocks.")
    largest_share: float = Field(description="Of the largest block in the work of all layers, or in their memory.")
    choices_dropped: int = Field(description="Combinations of TMPCs within blocks that were left out.")
    time_per_sample_s: float | None = Field(default=None, description="Of the best plan of whole blocks.")
    time_per_sample: float | None = Field(
        default=None, deprecated=True, description="The old name of time_per_sample_s; goes with the next version."
    )
    proved: bool = Field(description="That no plan of whole blocks is faster.")


class EvaluationStatsDocument(_Documented):
    threshold_s: float = Field(description="Is there a plan with every stage at most this?")
    feasible: bool = Field(description="The answer.")
    seconds: float = Field(description="Of wall time.")
    live_downsets: int = Field(description="That kept a state.")
    cells: int = Field(description="States kept, over all downsets.")
    buckets_tested: int = Field(
        validation_alias=AliasChoices("buckets_tested", "blocks_tested"),
        description="Bounds computed on whole buckets of downsets.",
    )
    candidates_tested: int = Field(description="Bounds computed on single downsets.")
    stages_costed: int = Field(description="Pairs that survived both.")


class NodeDocument(_Documented):
    host: str = Field(description="The machine's name.")
    chunks: int = Field(
        validation_alias=AliasChoices("chunks", "blocks"), description="Of a level's downsets, answered."
    )
    fetched_bytes: int = Field(description="Of tables.")
    held_bytes: int = Field(description="Most at a time.")


class ClusterDocument(_Documented):
    workers: int = Field(description="Their number.")
    batches: int = Field(description="Handed out.")
    chunks: int = Field(
        validation_alias=AliasChoices("chunks", "blocks"), description="Of a level's downsets, handed out."
    )
    put_bytes: int = Field(description="By the driver, once for each table.")
    worked_s: float = Field(description="Of all workers together.")
    waited_s: float = Field(description="Of the driver, for batches.")
    nodes: list[NodeDocument] = Field(description="One for each machine.")
    unused: str | None = Field(None, description="Why nothing was sent to it; null if something was.")


class DegreesDocument(_Documented):
    pairs: int = Field(description="(d, t) that fit the cluster.")
    searched: int = Field(description="Those that no bound ruled out.")
    looked_through: int = Field(description="Those whose plans were looked at one by one.")
    states: int = Field(description="Pipeline tails kept, over all pairs.")


class StatsDocument(_Documented):
    layers: int = Field(description="Of the instance.")
    contracted_layers: int = Field(description="Left when those that cost nothing have joined a neighbour.")
    downsets: int = Field(description="Of these.")
    levels: int = Field(description="Of the lattice of downsets.")
    pairs: int | None = Field(description="Nested downsets; null: not counted.")
    threads: int = Field(description="That worked.")
    lattice_s: float = Field(description="Of wall time.")
    stage_costs_s: float = Field(description="Of wall time.")
    search_s: float = Field(description="Of wall time.")
    evaluations: list[EvaluationStatsDocument] = Field(description="In their order.")
    cluster: ClusterDocument | None = Field(default=None, description="What a cluster did; null: there was none.")
    degrees: DegreesDocument | None = Field(default=None, description="One d and t for all stages; null: not asked.")


class WithoutRulesDocument(_Documented):
    time_per_sample_s: float | None = Field(description="Of the best plan found; null: none was.")
    lower_bound_s: float | None = Field(description="No plan is faster; null: there is none.")


class RuntimeDocument(_Documented):
    """The runtime that a solve was for."""

    name: Literal["megatron", "torchtitan", "torch", "deepspeed", "flagscale"] = Field(description="Which one.")
    gpus_per_node: int = Field(description="Of the cluster, as it was taken.")
    rank_order: str = Field(description="Parallel groups, from neighbouring ranks to distant ones.")
    without_rules: WithoutRulesDocument = Field(description="The same solve without the runtime's rules.")


class StepPartsDocument(_Documented):
    """Where the time of a step goes, in s: the parts add up to it."""

    compute_s: float = Field(description="Passes, on average over all devices.")
    communication_s: float = Field(description="Transfers and sums of gradients, on average over all devices.")
    uneven_s: float = Field(description="What the busiest rank is busy beyond the average.")
    drain_s: float = Field(description="When the busiest rank has nothing to do.")


class AlternativeDocument(_Documented):
    """One of several plans."""

    name: str = Field(description="Its place, or its file.")
    step_s: float = Field(description="Simulated.")
    schedule: _ScheduleName = Field(description="That which it is for.")
    chunks: int = Field(description="Stages on each rank.")
    group: int | None = Field(default=None, description="Microbatches that pass through a chunk before the next.")
    devices: int = Field(description="That it uses.")
    fits: bool = Field(description="Whether it keeps within the devices' memory.")
    peak_memory_bytes: float = Field(description="Of the fullest rank.")
    bubble_share: float = Field(description="Of the ranks' time that is spent idle.")
    parts: StepPartsDocument = Field(description="Where the step's time goes.")
    layout: str | None = Field(description="In Megatron's letters; null: they cannot say it.")
    plan: StagesDocument | None = Field(default=None, description="Its stages.")


class SolutionDocument(Header):
    """Everything about a solve, as solve --json prints it."""

    model_config = ConfigDict(title="piper-ray/solution")

    kind: Literal["piper-ray/solution"] = Field(alias="schema", description="Which document it is.")
    restrictions: RestrictionsDocument = Field(description="What plans had to keep.")
    options: OptionsDocument = Field(description="How the solve could run, and when it could stop.")
    schedule: _ScheduleName = Field(default="2bw", description="That which value and bound are of.")
    chunks: int = Field(default=1, description="Stages on each rank.")
    group: int | None = Field(
        default=None, description="Microbatches that pass through a chunk before the next; null: the least that may."
    )
    step: StepDocument | None = Field(default=None, description="Terms of a step, where they are not the usual ones.")
    status: Literal["optimal", "feasible", "infeasible", "unknown"] = Field(description="What is proved.")
    stopped_by: _StoppedBy | None = Field(description="What ended the search before a proof.")
    time_per_sample_s: float | None = Field(description="Of the plan, for a microbatch.")
    lower_bound_s: float | None = Field(description="No plan is faster; null: there is none.")
    gap: float | None = Field(description="(time_per_sample_s - lower_bound_s) / time_per_sample_s.")
    plan: StagesDocument | None = Field(description="The best one found.")
    evaluation: EvaluationDocument | None = Field(description="What that plan costs.")
    simulated: SimulatedDocument | None = Field(default=None, description="That plan, run event by event.")
    infeasibility: InfeasibilityDocument | None = Field(description="Why there is no plan.")
    blocks: BlocksDocument | None = Field(description="What merging layers into blocks gave up; null: none were.")
    stats: StatsDocument = Field(description="What each step of the solve cost.")
    runtime: RuntimeDocument | None = Field(default=None, description="Which runtime it was for; null: for none.")
    alternatives: list[AlternativeDocument] | None = Field(
        default=None, description="The best plans of different degrees and chunks; null: not asked for."
    )


SCHEMAS: dict[str, type[BaseModel]] = {"plan.schema.json": PlanDocument, "solution.schema.json": SolutionDocument}
"""The files in this folder, and what each is made of."""


def schema_of(model: type[BaseModel]) -> dict[str, object]:
    """The JSON Schema (draft 2020-12) of documents as they are written."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
