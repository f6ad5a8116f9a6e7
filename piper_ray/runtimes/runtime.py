"""A runtime's rules, as constraints of a solve."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model.constraints import (
    Constraint,
    FilledPipeline,
    KeepOrder,
    PipelinedChunks,
    Recompute,
    RecomputeRule,
    SameDegrees,
    StageCount,
    TensorParallelDegrees,
    WholePieces,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.one_mode import OneMode
from piper_ray.model.plan_rules import layers_in_order
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName
from piper_ray.runtimes.pieces import pieces_of, require_chain

USUAL_GPUS_PER_NODE = 8
"""Where the workload knows one link alone, and so no nodes."""


class RuntimeName(str, Enum):
    """Those that a plan can be made for."""

    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"


@dataclass(frozen=True)
class Runtime:
    """title: for people. schedules: those that it has, its usual one first.

    setting: what layers may run as. first_k: recomputation of the first k layers of a stage, each stage its own k.
    tensor_parallelism: whether it divides layers itself. blocks: whether it knows models as an embedding, blocks and a
    head alone. fills_interleaved: its interleaved schedule needs as many microbatches as ranks. ties_ends: whether it
    keeps an embedding and a head that have a weight in common alike where they are on different ranks of a pipeline.
    rank_order: of parallel groups, from neighbouring ranks to distant ones. letters: whether people write its stages in
    Megatron's. context_exchange: how groups that share a sequence attend to all of it. software: the generation of
    training software that it is (``workloads/estimate/software.toml``). sums_each_pass: on one pipeline rank gradients
    are reduced in the backward pass of every microbatch, and what is shared out is all of a weight's state; with
    several ranks once a batch. shares_state: whether its launch shares out the optimizer's state.
    chain: it hands each layer what the one before it makes, and nothing else.
    """

    name: RuntimeName
    title: str
    schedules: tuple[ScheduleName, ...]
    setting: OneMode
    first_k: bool = False
    tensor_parallelism: bool = True
    blocks: bool = True
    fills_interleaved: bool = False
    ties_ends: bool = True
    rank_order: str = "tp-cp-ep-dp-pp"
    letters: bool = False
    chain: bool = False
    context_exchange: str = "ring"
    software: str = "megatron-core"
    sums_each_pass: bool = False
    shares_state: bool = True

    def schedule(self, asked: Schedule | ScheduleName | None, known: Schedule | None) -> Schedule | ScheduleName:
        """That which is asked for; else the workload's own, if the runtime has it; else the runtime's usual one.

        Raises UsageError for one that it has not got.
        """
        if asked is None:
            return known if known is not None and known.name in self.schedules else self.schedules[0]
        name = asked.name if isinstance(asked, Schedule) else asked
        self.require_schedule(name)
        return asked

    def require_schedule(self, name: ScheduleName) -> None:
        """Raises UsageError for a schedule that the runtime has not got."""
        if name not in self.schedules:
            able = ", ".join(schedule.value for schedule in self.schedules)
            raise UsageError(f"{self.title} has no schedule {name.value}; it has {able}")

    def constraints(self, instance: Instance, schedule: ScheduleName, gpus_per_node: int) -> tuple[Constraint, ...]:
        """What a plan must keep to be run by it. Raises UsageError for a model that it does not know."""
        if self.chain:
            require_chain(instance, self.title)
        within = divisors(gpus_per_node) if self.tensor_parallelism else [1]
        within = [t for t in within if self.setting.divides_key_heads(instance, t)]
        degrees = sorted({t * context for t in within for context in self._contexts(instance)})
        asked: list[Constraint] = [SameDegrees(), KeepOrder(), self.setting]
        asked.append(TensorParallelDegrees(tuple(t for t in degrees if t <= instance.devices)))
        if self.blocks:
            divided = tuple(piece for piece in pieces_of(instance).members if len(piece) > 1)
            if divided:
                asked.append(WholePieces(divided))
        if self.on_one_rank(instance) is not None:
            asked.append(StageCount(1))
        if self.first_k:
            asked.append(RecomputeRule(Recompute.FIRST_K))
        if schedule in CHUNKED:
            asked.append(PipelinedChunks())
        if self.fills_interleaved and schedule is ScheduleName.INTERLEAVED:
            asked.append(FilledPipeline())
        return tuple(asked)

    def on_one_rank(self, instance: Instance) -> str | None:
        """Why a plan of the model has one pipeline rank alone, in words; None where it may have several.

        Raises UsageError for a model that the runtime does not know.
        """
        if self.ties_ends or not instance.tied_layers:
            return None
        if self.blocks:
            pieces = pieces_of(instance)
            place, ends, words = pieces.of_layer, {0, pieces.head}, "embedding and head"
        else:
            place = {layer: index for index, layer in enumerate(layers_in_order(instance))}
            ends, words = {0, len(place) - 1}, "first and last layers"
        if any(ends <= {place[layer] for layer in layers} for layers in instance.tied_layers.values()):
            return f"{self.title} runs no model over several pipeline ranks whose {words} have a weight in common"
        return None

    def _contexts(self, instance: Instance) -> set[int]:
        """Degrees of context parallelism; the planner's t counts the devices of all groups."""
        if not self.setting.context:
            return {1}
        rows = (row for layer in instance.layers for row in layer.tmpcs.values())
        return {1, *(tmpc.mode.context for row in rows for tmpc in row)}

    def restricted(
        self, restrictions: Restrictions, instance: Instance, schedule: ScheduleName, gpus_per_node: int
    ) -> Restrictions:
        """The user's restrictions and the runtime's. Raises UsageError where they contradict each other."""
        found = restrictions
        if (alone := self.on_one_rank(instance)) is not None:
            if schedule in CHUNKED:
                raise UsageError(f"{alone}, and {schedule.value} is for several; expected another schedule")
            if restrictions.stage_count not in (None, 1):
                raise UsageError(f"{alone}, and {restrictions.stage_count} are asked for; expected 1, or weights apart")
        for constraint in self.constraints(instance, schedule, gpus_per_node):
            if isinstance(constraint, TensorParallelDegrees):
                degrees = tuple(t for t in constraint.degrees if restrictions.admits_tensor_parallel_degree(t))
                if not degrees:
                    allowed = ", ".join(map(str, constraint.degrees))
                    raise UsageError(f"{self.title} runs tensor-parallel degrees {allowed} here, and none is asked for")
                found = found.without(TensorParallelDegrees).adding(TensorParallelDegrees(degrees))
            elif not isinstance(constraint, RecomputeRule) or restrictions.recompute is Recompute.AUTO:
                found = found.adding(constraint)  # every other rule of recomputation is one of first k layers, too
        return found


def gpus_per_node_of(instance: Instance, given: int | None = None) -> int:
    """As given, else as the workload's links say, else the usual number; never more than there are."""
    inner = instance.cluster.links[0].devices if len(instance.cluster.links) > 1 else None
    found = given or inner or USUAL_GPUS_PER_NODE
    if found < 1:
        raise UsageError(f"a node has at least one GPU, not {found}")
    return min(found, instance.devices)
