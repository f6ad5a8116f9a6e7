"""The JSON document of a solution, field by field, and the parts that others share with it. The schemas next to this
module are made from it and from ``scripts/documentation/schemas.py``, which has the documents that are only written.

A plan document is Piper's own plan JSON (``stages`` with ``nodes``, ``dataParallelDegree``, ``tensorParallelDegree``
and ``TMPCids``) with additional fields. Fields with a default may be absent: a plan of Piper's has none of them. Times
are in s per microbatch, the paper's sample, unless stated otherwise; sizes are in bytes; null: unknown or unlimited.
Python's plain data classes are used unchanged, and their own attributes describe their fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from piper_ray.model.constraints import Recompute
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import ScheduleName, StepTerms
from piper_ray.model.solution import BlockStats, Infeasibility, SolveStats, Status
from piper_ray.model.stop import StoppedBy


class Documented(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, defer_build=True, use_attribute_docstrings=True)


class StageFigures(Documented):
    devices: int
    """The devices of the stage: d t."""
    time_s: float
    """The stage's time for a microbatch: compute_s + communication_s + resync_s."""
    compute_s: float
    """The time of its layers' forward and backward passes."""
    communication_s: float
    """The time of tensors that cross its borders, in both directions."""
    resync_s: float
    """The time to synchronise the weights of its replicas, divided by the batch's microbatches."""
    memory_bytes: float
    """The memory that each of its devices needs."""
    in_flight_microbatches: int
    """y: the microbatches whose activations a device holds at once."""
    binds: list[Literal["time", "memory"]]
    """What limits the stage. time: hardly any stage is slower; memory: it needs nearly all memory of its devices."""


class StageLink(Documented):
    bandwidth_bytes_per_s: float
    """What each device has to the next stage."""
    group_devices: int | None
    """The devices of the group, with a link of its own, that both stages lie in; null: the plan counts on none."""


class StageDocument(Documented):
    nodes: list[int]
    """The ids of its layers, in the order of the instance."""
    dataParallelDegree: int
    """d: the number of replicas, which share the microbatches of a batch."""
    tensorParallelDegree: int
    """t: the number of devices of each replica."""
    kind: str | None = None
    """The kind of its devices, if there are several kinds; null: all devices are equal."""
    TMPCids: dict[str, str]
    """The id of each layer's TMPC at t, by the layer's id as a text."""
    names: list[str] | None = None
    """The names of its layers, in the order of ``nodes``."""
    paths: list[str] | None = None
    """The names of its layers' modules in the user's model, such as model.layers.17; empty if unknown."""
    recompute: list[bool] | None = None
    """Whether each layer recomputes activations in the backward pass, in the order of ``nodes``; null: none does."""
    ranks: Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    """The first and the last rank of its devices, counted from 0 at the first stage; t neighbours are a replica."""
    to_next: StageLink | None = None
    """The link to the next stage; null: the last stage, or links do not differ, or ranks hold several stages."""
    schemes: dict[str, dict[str, object]] | None = None
    """TMPCs found from operators, in full, by the words of their ids: where each value is placed and what moves."""
    figures: StageFigures | None = None
    """The stage's time and memory, as evaluate computes them."""


class InstanceFacts(Documented):
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
    """The samples of training data in a microbatch; null if unknown."""
    tokens_per_sample: int | None = None
    """The tokens of a sample; null if unknown, or if samples have none."""
    measured_threads: int | None = None
    """The CPU threads of each process when the times were measured; null if they were not measured on a CPU."""
    memory_bytes: float
    """M: the memory of each device."""
    bandwidth_bytes_per_s: float
    """B: the bandwidth from a device to the outside."""


class Versioned(Documented):
    kind: str = Field(alias="schema")
    """The name of this kind of document."""
    schema_version: Annotated[int, Field(ge=1)]
    """The version of the schema. It rises when a field changes its meaning or is removed, not for new fields."""
    tool_version: str
    """The version of piper_ray."""


class Header(Versioned):
    instance: InstanceFacts
    """The planned workload."""


class StagesDocument(Documented):
    stages: list[StageDocument]
    """The stages, front to back: a tensor of an edge stays in its stage or goes to a later one."""
    keeps_order: bool | None = None
    """Whether the stages are runs of the layers' order, with tensors relayed through each of them."""
    in_flight: list[int] | None = None
    """The microbatches that a replica of each stage keeps in flight; null: ceil(s / d), as under 2bw."""
    places: list[int] | None = None
    """Under 2bw, the number of devices behind each stage, idle ones included; null: borders are not charged by it."""
    microbatches: dict[str, int] | None = None
    """If there are pipelines of one kind of devices each: the microbatches of each kind, whose stages come one after
    the other; null: one pipeline."""


class RestrictionsDocument(Documented):
    tensor_parallelism: bool
    """Whether plans may use tensor parallelism."""
    data_parallelism: bool
    """Whether plans may use data parallelism."""
    recompute: Recompute
    """Which layers may recompute."""
    constraints: list[dict[str, object]] | None = None
    """Further constraints: the kind of each, and its fields."""


class _PaceDocument(Documented):
    time_per_sample_s: float
    step_s: float | None = None
    """The time of a whole batch, of N microbatches."""
    microbatches_per_s: float | None = None
    """Microbatches per second; null: the plan takes no time at all."""
    samples_per_s: float | None = None
    """Samples per second; null: the number of samples in a microbatch is unknown."""
    tokens_per_s: float | None = None
    """Tokens per second; null: the number of tokens in a sample is unknown."""


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
    """The time for a microbatch: the step's time divided by N."""
    bubble_share: float
    """The idle share of the ranks' time."""
    peak_memory_bytes: list[float]
    """The peak memory of each rank of one pipeline, on each of its devices."""


class WithoutRulesDocument(Documented):
    time_per_sample_s: float | None
    """The time of the best plan found, for a microbatch; null: none was found."""
    lower_bound_s: float | None
    """No plan is faster than this; null: there is no plan."""


class RuntimeDocument(Documented):
    """The runtime of a solve."""

    name: Literal["megatron", "torchtitan", "torch", "deepspeed", "flagscale"]
    """The name of the runtime."""
    gpus_per_node: int
    """The assumed number of GPUs of each node."""
    rank_order: str
    """The parallel groups, from neighbouring ranks to distant ones."""
    without_rules: WithoutRulesDocument
    """The result of the same solve without the runtime's rules."""


class StepPartsDocument(Documented):
    """The parts of a step's time, in s; they add up to it."""

    compute_s: float
    """The time of the passes, on average over all devices."""
    communication_s: float
    """The time of transfers and of sums of gradients, on average over all devices."""
    uneven_s: float
    """The time that the busiest rank is busy in addition to the average."""
    drain_s: float
    """The time when the busiest rank is idle."""


class AlternativeDocument(Documented):
    """One of several plans."""

    name: str
    """The plan's place in the list, or the name of its file."""
    step_s: float
    """The simulated time of a step."""
    schedule: ScheduleName
    """The schedule of the plan."""
    chunks: int
    """The number of stages on each rank."""
    group: int | None = None
    """The microbatches that pass through a chunk before the next begins."""
    ahead: int = 0
    """The forward passes of each rank's warm-up in addition to those that are usual for interleaved."""
    devices: int
    """The number of devices that the plan uses."""
    fits: bool
    """Whether the plan fits the devices' memory."""
    peak_memory_bytes: float
    """The peak memory of the rank that needs most."""
    bubble_share: float
    """The idle share of the ranks' time."""
    parts: StepPartsDocument
    """The parts of the step's time."""
    layout: str | None
    """The layout in Megatron's letters; null: the letters cannot express it."""
    plan: StagesDocument | None = None
    """The plan's stages."""


class OwnPipelinesDocument(Documented):
    """The work of the devices of one kind in pipelines of their own."""

    kind: str
    """The kind of the devices."""
    microbatches: int
    """The microbatches of a batch that these devices process."""
    batch_s: float
    """The time of these microbatches, in s."""
    stages: int
    """The number of stages of their pipelines."""
    data_parallel_degree: int
    """The number of replicas of a stage on these devices."""
    tensor_parallel_degree: int
    """The number of devices that share a layer."""


class ApartDocument(Documented):
    """Pipelines that each use one kind of devices, with the microbatches divided among them."""

    batch_s: float | None
    """The time of a batch, in s; null if the search ended at its bound, because none is faster than the plan."""
    lower_bound_s: float | None = None
    """No division of the microbatches takes less than this, in s; null: in files of older versions."""
    gradients_s: float | None = None
    """In files of older versions, the part of it that sums the gradients of the kinds, in s."""
    kinds: list[OwnPipelinesDocument]
    """The kinds that have microbatches."""


class SolutionDocument(Header):
    """Everything about a solve, as solve --json prints it."""

    model_config = ConfigDict(title="piper-ray/solution")

    kind: Literal["piper-ray/solution"] = Field(alias="schema")
    """The name of this kind of document."""
    restrictions: RestrictionsDocument
    """The restrictions on plans."""
    options: SolveOptions
    """How the solve runs, and when it may stop."""
    schedule: ScheduleName = ScheduleName.TWO_BW
    """The schedule of the plan and the lower bound."""
    chunks: int = 1
    """The number of stages on each rank."""
    group: int | None = None
    """The microbatches that pass through a chunk before the next begins; null: as few as the schedule allows."""
    ahead: int = 0
    """The forward passes of each rank's warm-up in addition to those that are usual for interleaved."""
    step: StepTerms | None = None
    """The terms of a step, if they are not the usual ones."""
    status: Status
    """What the solve proved."""
    stopped_by: StoppedBy | None
    """What ended the search before a proof; null if it ended by itself."""
    time_per_sample_s: float | None
    """The plan's time for a microbatch; null if there is no plan."""
    lower_bound_s: float | None
    """No plan is faster than this; null: there is no plan."""
    gap: float | None
    """The gap between the plan and the bound: (time_per_sample_s - lower_bound_s) / time_per_sample_s."""
    plan: StagesDocument | None
    """The best plan found."""
    evaluation: EvaluationDocument | None
    """The time and memory of that plan."""
    simulated: SimulatedDocument | None = None
    """The result of simulating that plan event by event."""
    infeasibility: Infeasibility | None
    """Why there is no plan."""
    blocks: BlockStats | None
    """What was given up when layers were merged into blocks; null: no layers were merged."""
    stats: SolveStats
    """The cost of each step of the solve."""
    runtime: RuntimeDocument | None = None
    """The runtime of the solve; null if there was none."""
    alternatives: list[AlternativeDocument] | None = None
    """The best plans of different degrees and chunks; null if not requested."""
    apart: ApartDocument | None = None
    """The best pipelines that each use one kind of devices; null if not requested, or if none fits."""
