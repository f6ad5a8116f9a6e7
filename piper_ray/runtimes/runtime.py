"""The rules of runtimes as constraints of a solve; the runtimes that plans are made for; and the position of each rank.

Facts about each runtime come from its source code, of the version named.

Ranks belong to plans with one d and one t for all stages, in the order that all runtimes here share. Shards of a layer
are neighbours; next come the groups that share a sequence (context parallelism), then the replicas of a stage, then the
next rank of the pipeline. This is Megatron's tp-cp-ep-dp-pp, DeepSpeed's (pipe, data, model), and the meshes (pp, dp,
tp) of torchtitan and torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from piper_ray.model.constraints import (
    Constraint,
    FilledPipeline,
    KeepOrder,
    PipelinedChunks,
    Recompute,
    RecomputeRule,
    Restrictions,
    SameDegrees,
    SameDegreesByKind,
    StageCount,
    TensorParallelDegrees,
    WholeExpertGroups,
    WholeNodesAtSites,
    WholePieces,
)
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable
from piper_ray.model.instance import Instance, divisors
from piper_ray.model.mode import EVERY_SECOND_PRODUCT, MEGATRON_MODULES, Recomputation, Sharding
from piper_ray.model.one_mode import OneMode
from piper_ray.model.plan_rules import layers_in_order
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName
from piper_ray.runtimes.meshes import Mesh, gpus_per_node_of
from piper_ray.runtimes.pieces import pieces_of, require_chain


class RuntimeName(str, Enum):
    """The runtimes that a plan can be made for."""

    MEGATRON = "megatron"
    MEGATRON_BRIDGE = "megatron-bridge"
    TORCHTITAN = "torchtitan"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"
    FLAGSCALE = "flagscale"


@dataclass(frozen=True)
class Runtime:
    """title: its name in messages. schedules: the schedules that it has, the usual one first.

    setting: the modes that layers may run in. first_k: it recomputes the first k layers of a stage, with a k for each
    stage.
    kinds: its launch files support devices of several kinds; meshes: stages on each kind may have a t of their own.
    tensor_parallelism: it divides layers itself. blocks: it only knows models of an embedding, blocks and a head.
    fills_interleaved: its interleaved schedule needs at least as many microbatches as ranks.
    ties_ends: it keeps shared weights of embedding and head equal on different ranks of a pipeline.
    rank_order: the parallel groups, from neighbouring ranks to distant ones. letters: stages can be written in
    Megatron's letters. context_exchanges: how groups that share a sequence may exchange keys and values, the usual way
    first.
    software: the generation of training software that it is (``workloads/estimate/software.toml``). sums_each_pass:
    with one pipeline rank, gradients are reduced in the backward pass of every microbatch, and replicas divide all of a
    weight's state; with several ranks, once a batch. shares_state: its launch divides the optimizer's state among
    replicas.
    state_on_host: its launch can keep the optimizer's state in host memory, and update parameters there.
    chain: it passes each layer only the output of the one before it. one_stream: all sends and receives of a rank share
    one stream, and its own lists post receives early. passes_ahead: if exchanges of experts overlap with passes, its
    interleaved schedule has one more forward pass before the first backward pass.
    no_more_sharing: why replicas cannot divide gradients or weights, if ``setting`` does not allow it.
    """

    name: RuntimeName
    title: str
    schedules: tuple[ScheduleName, ...]
    setting: OneMode
    first_k: bool = False
    kinds: bool = False
    meshes: bool = False
    tensor_parallelism: bool = True
    blocks: bool = True
    fills_interleaved: bool = False
    ties_ends: bool = True
    rank_order: str = "tp-cp-ep-dp-pp"
    letters: bool = False
    chain: bool = False
    one_stream: bool = False
    passes_ahead: bool = False
    context_exchanges: tuple[str, ...] = ("ring",)
    software: str = "megatron-core"
    sums_each_pass: bool = False
    shares_state: bool = True
    state_on_host: bool = False
    no_more_sharing: str = "runs no plan whose replicas share gradients or weights"

    def schedule(self, asked: Schedule | ScheduleName | None, known: Schedule | None) -> Schedule | ScheduleName:
        """The requested schedule; else the workload's own, if the runtime has it; else the runtime's usual one.

        Raises UsageError for a schedule that the runtime does not have.
        """
        if asked is None:
            return known if known is not None and known.name in self.schedules else self.schedules[0]
        name = asked.name if isinstance(asked, Schedule) else asked
        self.require_schedule(name)
        return asked

    def require_schedule(self, name: ScheduleName) -> None:
        """Raises UsageError for a schedule that the runtime does not have."""
        if name not in self.schedules:
            able = ", ".join(schedule.value for schedule in self.schedules)
            raise UsageError(f"{self.title} has no schedule {name.value}; it has {able}")

    def constraints(self, instance: Instance, schedule: ScheduleName, gpus_per_node: int) -> tuple[Constraint, ...]:
        """The constraints under which the runtime can run a plan. Raises UsageError for a model that it does not know,
        and for devices of several kinds if its launch files do not support them."""
        self.require_kinds(instance.cluster.kind_names)
        if self.chain:
            require_chain(instance, self.title)
        within = divisors(gpus_per_node) if self.tensor_parallelism else [1]
        within = [t for t in within if self.setting.divides_key_heads(instance, t)]
        degrees = sorted({t * context for t in within for context in self._contexts(instance)})
        divided = tuple(piece for piece in pieces_of(instance).members if len(piece) > 1) if self.blocks else ()
        # With kinds, stages with k recomputed layers of their own are too many; pieces of several layers have no first.
        first_k = self.first_k and not instance.cluster.kinds and not divided
        by_layer = self.setting.by_layer and not instance.cluster.kinds and (first_k or not self.first_k)
        setting = replace(self.setting, by_layer=by_layer)
        asked: list[Constraint] = [self.same_degrees(instance), KeepOrder(), setting]
        asked.append(TensorParallelDegrees(tuple(t for t in degrees if t <= instance.devices)))
        if self.setting.experts and any(layer.experts for layer in instance.layers):
            asked.append(WholeExpertGroups())
        if sites := instance.cluster.sites:
            asked.append(WholeNodesAtSites(len(sites), gpus_per_node_of(instance)))
        if divided:
            asked.append(WholePieces(divided))
        if self.on_one_rank(instance) is not None:
            asked.append(StageCount(1))
        if first_k:
            asked.append(RecomputeRule(Recompute.FIRST_K))
        if schedule in CHUNKED:
            asked.append(PipelinedChunks())
        if self.fills_interleaved and schedule is ScheduleName.INTERLEAVED:
            asked.append(FilledPipeline())
        return tuple(asked)

    def require_kinds(self, names: Sequence[str]) -> None:
        """Raises UsageError for devices of several kinds, given by name, if its launch files do not support them."""
        if len(names) > 1 and not self.kinds:
            able = " and ".join(f"--runtime {one.name.value}" for one in RUNTIMES.values() if one.kinds)
            listed = ", ".join(map(printable, names))
            raise UsageError(f"{self.title} runs no plan on devices of several kinds ({listed}); {able} do")

    def same_degrees(self, instance: Instance) -> SameDegrees:
        """One d and one t for all stages. The t may differ between kinds of devices if the runtime has meshes, unless
        stages share a weight, because its gradients are summed shard by shard."""
        own = self.meshes and instance.cluster.kinds and not instance.tied_layers
        return SameDegreesByKind() if own else SameDegrees()

    def on_one_rank(self, instance: Instance) -> str | None:
        """Why a plan of the model can only have one pipeline rank, in words; None if it may have several.

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
        """Degrees of context parallelism. The planner's t counts the devices of all groups that share a sequence."""
        if not self.setting.context:
            return {1}
        return {1, *instance.contexts}

    def restricted(
        self, restrictions: Restrictions, instance: Instance, schedule: ScheduleName, gpus_per_node: int
    ) -> Restrictions:
        """The user's restrictions with those of the runtime. Raises UsageError if they contradict each other."""
        found = restrictions
        if (alone := self.on_one_rank(instance)) is not None:
            if schedule in CHUNKED:
                raise UsageError(f"{alone}, and {schedule.value} is for several; expected another schedule")
            if restrictions.stage_count not in (None, 1):
                raise UsageError(
                    f"{alone}, and {restrictions.stage_count} are asked for; expected --stages 1, or untied weights"
                )
        for constraint in self.constraints(instance, schedule, gpus_per_node):
            if isinstance(constraint, TensorParallelDegrees):
                degrees = tuple(t for t in constraint.degrees if restrictions.admits_tensor_parallel_degree(t))
                if not degrees:
                    allowed = ", ".join(map(str, constraint.degrees))
                    raise UsageError(f"{self.title} runs tensor-parallel degrees {allowed} here, and none is asked for")
                found = found.without(TensorParallelDegrees).adding(TensorParallelDegrees(degrees))
            elif not isinstance(constraint, RecomputeRule) or restrictions.recompute is Recompute.AUTO:
                found = found.adding(constraint)  # every other rule also recomputes some first k layers
        return found


_WHOLE_LAYERS = Recomputation.FULL.parts

_OF_TRANSFORMER_ENGINE = ("ring", "all-gather", "all-to-all")

_TORCH_SCHEDULES = (
    ScheduleName.ONE_F_ONE_B,
    ScheduleName.GPIPE,
    ScheduleName.INTERLEAVED,
    ScheduleName.LOOPED_BFS,
    ScheduleName.ZB_H1,
    ScheduleName.ZB_V,
    ScheduleName.DUALPIPE_V,
)

# megatron-core 0.16: schedules.get_forward_backward_func has 1F1B and, with virtual stages, interleaved 1F1B, whose
# groups of microbatches hold at least p and at most m. finalize_model_grads sums gradients of a tied embedding over
# the first and last rank; MoELayer refuses to train on t > 1 without sequence parallelism. Its
# HybridDeviceOptimizer keeps fp32 weights and moments in host memory and works with a distributed optimizer.
# get_pp_rank_microbatches counts one more warm-up pass with overlap_moe_expert_parallel_comm.
_MEGATRON = Runtime(
    RuntimeName.MEGATRON,
    "Megatron",
    (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED),
    OneMode(
        (*_WHOLE_LAYERS, *MEGATRON_MODULES),
        context=True,
        experts=True,
        expert_tensor=True,
        experts_in_sequence=True,
    ),
    kinds=True,
    fills_interleaved=True,
    letters=True,
    context_exchanges=_OF_TRANSFORMER_ENGINE,
    state_on_host=True,
    passes_ahead=True,
)

RUNTIMES: dict[RuntimeName, Runtime] = {
    RuntimeName.MEGATRON: _MEGATRON,
    # It launches megatron-core. That it places kinds of devices is not known.
    RuntimeName.MEGATRON_BRIDGE: replace(
        _MEGATRON, name=RuntimeName.MEGATRON_BRIDGE, title="Megatron-Bridge", kinds=False
    ),
    # torchtitan 0.3: one ActivationCheckpointing policy wraps all blocks of a model. Autograd keeps the tensors that
    # its sequence parallelism gathers; weights are gathered for each pass if fsdp_reshard_after_forward requires it.
    # The config of a Decoder refuses enable_weight_tying together with pipeline_parallel_degree > 1, and t that does
    # not divide n_kv_heads. Its training loop lets FSDP reduce gradients in each microbatch's backward pass; torch's
    # pipelines let it do so in the last one's. Keys and values are gathered before attention over a sequence that
    # groups share.
    RuntimeName.TORCHTITAN: Runtime(
        RuntimeName.TORCHTITAN,
        "torchtitan",
        _TORCH_SCHEDULES,
        OneMode(
            (*_WHOLE_LAYERS, EVERY_SECOND_PRODUCT),
            context=True,
            experts=True,
            gathered=True,
            always_gathered=True,
            most_sharding=Sharding.WEIGHTS,
            own_key_heads=True,
        ),
        ties_ends=False,
        rank_order="tp-cp-dp_shard-dp_replicate-pp",
        context_exchanges=("all-gather",),
        software="fsdp",
        sums_each_pass=True,
        one_stream=True,
    ),
    # torch.distributed.pipelining 2.13: any modules, any list of actions; a checkpoint around each layer that needs it.
    # Stages that share a weight would train two copies of it. _add_send_recv posts a receive behind the pass that
    # precedes its sender's turn, and NCCL has one stream for a rank's transfers.
    RuntimeName.TORCH: Runtime(
        RuntimeName.TORCH,
        "torch.distributed.pipelining",
        _TORCH_SCHEDULES,
        OneMode(_WHOLE_LAYERS, by_layer=True, sequence_parallel=False),
        tensor_parallelism=False,
        blocks=False,
        ties_ends=False,
        rank_order="dp-pp",
        software="fsdp",
        shares_state=False,
        one_stream=True,
    ),
    # DeepSpeed 0.19: TrainSchedule is 1F1B; activation_checkpoint_interval is the same for all layers; ZeRO-1 is
    # available.
    # PipelineModule.forward passes each layer the result of the one before it.
    RuntimeName.DEEPSPEED: Runtime(
        RuntimeName.DEEPSPEED,
        "DeepSpeed",
        (ScheduleName.ONE_F_ONE_B,),
        OneMode(_WHOLE_LAYERS, sequence_parallel=False),
        blocks=False,
        rank_order="model-data-pipe",
        chain=True,
        software="deepspeed-2021",
        no_more_sharing="runs ZeRO-2 and ZeRO-3 under no pipeline; its launches are of a PipelineEngine",
    ),
    # FlagScale 1.0: hetero_pipeline_layer_split without virtual stages; recompute_*_per_stage_micro_batch. Its Megatron
    # is 0.15, which refuses t that does not divide num_query_groups, where 0.16 copies heads for more devices.
    RuntimeName.FLAGSCALE: Runtime(
        RuntimeName.FLAGSCALE,
        "FlagScale",
        (ScheduleName.ONE_F_ONE_B,),
        OneMode(
            _WHOLE_LAYERS,
            by_layer=True,
            context=True,
            experts=True,
            expert_tensor=True,
            experts_in_sequence=True,
            own_key_heads=True,
        ),
        first_k=True,
        kinds=True,
        meshes=True,
        letters=True,
        context_exchanges=_OF_TRANSFORMER_ENGINE,
        state_on_host=True,
    ),
}


class RankPlace(NamedTuple):
    """All numbers count from 0. stages: the plan's stages on this rank, the chunk nearest the input first. replica:
    which of the d replicas the rank belongs to. context: which of the groups that share a sequence. shard: which of a
    group's t devices."""

    rank: int
    node: int
    local_rank: int
    pipeline_rank: int
    stages: tuple[int, ...]
    replica: int
    context: int
    shard: int


def rank_places(meshes: Sequence[Mesh], schedule: Schedule, context: int = 1) -> Iterator[RankPlace]:
    """The place of every rank that the plan uses, in the order of ranks. context: groups that share the plan's t
    devices."""
    pipeline_ranks = sum(mesh.ranks for mesh in meshes)
    for mesh in meshes:
        for rank in range(mesh.first_rank, mesh.first_rank + mesh.devices):
            pipeline_rank, within = divmod(rank - mesh.first_rank, mesh.d * mesh.t)
            replica, of_replica = divmod(within, mesh.t)
            group, shard = divmod(of_replica, mesh.t // context)
            stages = schedule.stages_of_rank(mesh.first + pipeline_rank, pipeline_ranks)
            node, local_rank = mesh.place(rank)
            yield RankPlace(rank, node, local_rank, mesh.first + pipeline_rank, stages, replica, group, shard)


def rank_lines(meshes: Sequence[Mesh], schedule: Schedule, context: int = 1) -> list[str]:
    """A line for each rank of the pipeline: its stages from 1, its ranks and nodes from 0, and which rank has which
    replica, context and shard (:class:`RankPlace`)."""
    pipeline_ranks, lines = sum(mesh.ranks for mesh in meshes), []
    for mesh in meshes:
        size, kind = mesh.d * mesh.t, f" of {printable(mesh.kind)}" if mesh.kind else ""
        group = mesh.t // context
        sizes = (("replica", mesh.d, mesh.t), ("context", context, group), ("shard", group, 1))
        within = "".join(f" + {f'{each} x ' if each > 1 else ''}{name}" for name, count, each in sizes if count > 1)
        for place in range(mesh.first, mesh.first + mesh.ranks):
            stages = ", ".join(str(stage + 1) for stage in schedule.stages_of_rank(place, pipeline_ranks))
            first = mesh.first_rank + (place - mesh.first) * size
            nodes = _range(mesh.place(first)[0], mesh.place(first + size - 1)[0])
            lines.append(
                f"pipeline rank {place}: stage{'s' if schedule.v > 1 else ''} {stages}; rank{'s' if size > 1 else ''} "
                f"{_range(first, first + size - 1)} on node{'' if nodes.isdecimal() else 's'} {nodes}{kind}"
                f"{f'; rank = {first}{within}' if within else ''}"
            )
    return lines


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
