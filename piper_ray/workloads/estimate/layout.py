"""Prices one given layout of a model on a cluster: an instance with one TMPC a layer, and the plan that it runs as.

The formulas are those of ``costs``. Here it is also known how many replicas a stage has and where they lie, so each
group pays for its own links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Batch, Edge, Instance, Layer
from piper_ray.model.mode import Recomputation, Sharding
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, StepTerms
from piper_ray.workloads.estimate.architectures.multimodal import TOWER_PATH
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.costs import LayerCosts, Setting, costs_of, edge_bytes, sync_bytes, tmpc_of
from piper_ray.workloads.estimate.exchanges import reduced, transfer_bytes_per_s
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.memory import working_bytes
from piper_ray.workloads.estimate.modes import LayerMode, recomputation_of
from piper_ray.workloads.estimate.operators import TOKEN_EMBEDDING, Architecture, LayerKind
from piper_ray.workloads.estimate.roofline import traffic_s
from piper_ray.workloads.estimate.software import Stack


@dataclass(frozen=True)
class Layout:
    """How a model is laid out.

    tensor, context, pipeline, data, expert, expert_tensor: degrees. chunks: chunks on each rank. samples: samples of a
    microbatch. tokens: tokens of a sample. batch: samples of a batch, over all replicas. stages: transformer layers of
    each rank, or of each chunk in the order of the model; None: as even as possible. optimizer_on_host: the optimizer's
    state lies in host memory and is updated there. overlapped: whether gradients and transfers between stages overlap
    with passes; None: the software's default.
    """

    tensor: int
    pipeline: int
    data: int
    samples: int
    batch: int
    schedule: Schedule
    tokens: int | None = None
    context: int = 1
    expert: int | None = None
    expert_tensor: int = 1
    sequence_parallel: bool = False
    recomputation: Recomputation = Recomputation.NONE
    fused: bool = True
    sharding: Sharding = Sharding.NONE
    shards: int | None = None
    optimizer_on_host: bool = False
    stages: tuple[int, ...] | None = None
    overlapped: bool | None = None

    @property
    def microbatches(self) -> int:
        """The number of microbatches of each replica."""
        return self.batch // (self.samples * self.data)

    @property
    def devices(self) -> int:
        """The number of devices: t c d p."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def mode(self) -> LayerMode:
        """The mode of each layer that can be recomputed. Other layers have the same mode without recomputation."""
        shards = self.shards or self.data * self.context
        return LayerMode(
            degree=self.tensor,
            sequence_parallel=self.sequence_parallel and self.tensor > 1,
            recomputation=self.recomputation,
            optimizer_shards=1 if self.sharding is Sharding.NONE else shards,
            sharding=self._sharding_of_passes,
            context=self.context,
            experts=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @property
    def _sharding_of_passes(self) -> Sharding:
        """The sharding during passes: pipelines keep gathered weights, and all gradients until the last microbatch."""
        return self.sharding if self.pipeline == 1 else min(self.sharding, Sharding.OPTIMIZER)


@dataclass(frozen=True)
class PricedLayout:
    """What ``simulate`` needs to run a layout.

    overlap_transfers: whether transfers between stages overlap with passes. layers: the kind and the mode of each layer
    of the instance.
    """

    instance: Instance
    plan: Plan
    schedule: Schedule
    terms: StepTerms
    overlap_transfers: bool
    layers: tuple[tuple[LayerKind, LayerMode], ...]


def priced(model: ModelConfig, stack: Stack, training: Training, layout: Layout) -> PricedLayout:
    """The layout with its costs. Raises UsageError if the model or the batch cannot have it."""
    architecture = _on(model.architecture(Microbatch(layout.samples, layout.tokens, layout.fused)), layout.tensor)
    if layout.batch % (layout.samples * layout.data):
        raise UsageError(
            f"{plural(layout.data, 'replica')} with microbatches of {layout.samples} do not divide a batch of "
            f"{layout.batch}"
        )
    chosen = {kind.key: _mode_of(kind, layout) for kind in architecture.kinds}
    rate = transfer_bytes_per_s(layout.devices, stack.gpu, stack.domain)
    setting = Setting(
        stack=stack,
        training=training,
        microbatches=layout.batch // layout.samples,
        bytes_per_s=2.0 * rate,
        workspace_bytes=max(working_bytes(kind, chosen[kind.key], stack.traits) for kind in architecture.kinds),
        largest_degree=layout.tensor * layout.context,
    )
    costs = {kind.key: costs_of(kind, chosen[kind.key], setting) for kind in architecture.kinds}
    chunks = _chunks(architecture, layout)
    sync_s = {kind.key: _synchronisation_s(kind, chosen[kind.key], layout, setting) for kind in architecture.kinds}
    instance = _instance(architecture, chosen, costs, setting, layout, sync_s)
    degree = layout.tensor * layout.context
    plan = Plan(
        tuple(
            Stage(layers, layout.data, degree, {layer: instance.layers[layer].tmpcs[degree][0].id for layer in layers})
            for layers in chunks
        )
    )
    ranks = [
        [architecture.nodes[layer].kind.key for stage in layout.schedule.stages_of_rank(rank, layout.pipeline)
         for layer in chunks[stage]]
        for rank in range(layout.pipeline)
    ]  # fmt: skip
    overlapped = stack.software.gradient_overlap if layout.overlapped is None else layout.overlapped
    overlap = max(_hidden_share(ranks, costs, sync_s, layout), 0.0) if overlapped else 0.0
    optimizer_s = max(_optimizer_s(rank, costs, setting, layout) for rank in ranks) + stack.software.step_s
    if layout.data == 1:
        optimizer_s += (1.0 - overlap) * max(sum(sync_s[key] for key in rank) for rank in ranks)
    if layout.pipeline > 1:
        optimizer_s += _tied_s(architecture, chosen, setting)
    return PricedLayout(
        instance,
        plan,
        layout.schedule,
        StepTerms(all_reduce_overlap=overlap, optimizer_s=optimizer_s),
        overlap_transfers=layout.schedule.v > 1 and stack.software.transfer_overlap and layout.overlapped is not False,
        layers=tuple((node.kind, chosen[node.kind.key]) for node in architecture.nodes),
    )


def _on(architecture: Architecture, degree: int) -> Architecture:
    """The architecture as this many devices have it, in each kind of layer."""
    kinds = {kind.key: kind.on(degree) for kind in architecture.kinds}
    return replace(architecture, nodes=tuple(replace(node, kind=kinds[node.kind.key]) for node in architecture.nodes))


def _mode_of(kind: LayerKind, layout: Layout) -> LayerMode:
    """The mode of a kind in the layout: experts only if it has any, and the recomputation that its parts allow. Raises
    UsageError if its heads cannot be divided."""
    mode = layout.mode
    if not any(operator.routed for operator in kind.operators):
        mode = replace(mode, experts=None, expert_tensor=1)
    mode = replace(mode, recomputation=recomputation_of(kind, mode.recomputation))
    if any(heads % mode.degree for heads in kind.heads[:1]):
        raise UsageError(f"{kind.name}: {kind.heads[0]} heads cannot be divided over {mode.degree} devices")
    return mode


def _instance(
    architecture: Architecture,
    chosen: dict[str, LayerMode],
    costs: dict[str, LayerCosts],
    setting: Setting,
    layout: Layout,
    sync_s: dict[str, float],
) -> Instance:
    """The instance, whose only link is the one between stages. w is converted to the bytes that take as long on that
    link as the synchronisation takes on the replicas' own."""
    tensors, tied = architecture.tensors, architecture.tied_nodes
    d = layout.data
    weights_bytes = {
        key: size_s * setting.bytes_per_s / 4.0 * d / (d - 1) if d > 1 else 0.0 for key, size_s in sync_s.items()
    }
    alone = {
        key: tmpc_of(replace(costs[key], unsaid_s=0.0), mode).changed(
            weights_bytes=weights_bytes[key], least_data_parallel_degree=1
        )
        for key, mode in chosen.items()
    }
    layers = []
    for index, node in enumerate(architecture.nodes):
        kind, mode = node.kind, chosen[node.kind.key]
        sent = (
            {end: sync_bytes(size, mode.degree, mode, setting) for end, size in side.items()} for side in tensors[index]
        )
        rows = {layout.tensor * layout.context: (alone[kind.key].between(*sent),)}
        common = TOKEN_EMBEDDING if index in tied else ""
        layers.append(Layer(index, kind.name, rows, node.path, common, kind.experts, kind.key_heads, node.predictor))
    edges = tuple(
        Edge(source, index, edge_bytes(size_bytes, setting))
        for index, (arriving, _) in enumerate(tensors)
        for source, size_bytes in arriving.items()
    )
    return Instance(
        layers=tuple(layers),
        edges=edges,
        cluster=Cluster(layout.devices, setting.gpu.memory_bytes, (Link(setting.bytes_per_s),)),
        batch=Batch(setting.microbatches, layout.samples, layout.tokens),
        name=architecture.name,
        schedule=layout.schedule,
    )


def _chunks(architecture: Architecture, layout: Layout) -> list[tuple[int, ...]]:
    """The layers of each stage of the plan. Any other layer joins the transformer layer in front of it; the first
    layers, a vision tower among them, join the first one."""
    blocks = [
        index
        for index, node in enumerate(architecture.nodes)
        if node.kind.recomputable and not node.path.startswith(TOWER_PATH)
    ]
    count = layout.pipeline * layout.schedule.v
    sizes = _sizes(len(blocks), count, layout, predicts=any(node.predictor for node in architecture.nodes))
    found, last = [], 0
    for number, size in enumerate(sizes):
        done = sum(sizes[: number + 1])
        end = len(architecture.nodes) if number == count - 1 else (blocks[done] if done < len(blocks) else last)
        if number == 0 and size == 0:
            end = blocks[0]
        if number == count - 2 and done == len(blocks):
            end = blocks[-1] + 1
        found.append(tuple(range(last, end)))
        last = end
    return found


def _sizes(blocks: int, count: int, layout: Layout, predicts: bool) -> list[int]:
    """Transformer layers of each stage of the plan."""
    v = layout.schedule.v
    if layout.stages is not None:
        return _given_sizes(layout.stages, blocks, count, layout)
    if blocks % count == 0:
        return [blocks // count] * count
    if (blocks + 2) % count == 0:
        # Embedding and projection stand for a layer each; a predictor has a projection of its own (Megatron-Bridge).
        sizes = [(blocks + 2) // count] * count
        sizes[-1 if predicts else 0] -= 1
        sizes[-1] -= 1
        return sizes
    if blocks < count:
        raise UsageError(
            f"{plural(blocks, 'layer')} do not make {plural(count, 'stage')}" + (f", {v} a rank" if v > 1 else "")
        )
    least, more = divmod(blocks, count)
    first = (count - more + 1) // 2
    return [least + (first <= number < first + more) for number in range(count)]


def _given_sizes(given: Sequence[int], blocks: int, count: int, layout: Layout) -> list[int]:
    if sum(given) != blocks:
        raise UsageError(f"stages of {sum(given)} layers in all; the model has {blocks}")
    sizes = list(given) if len(given) == count else _of_ranks(given, count, layout)
    if not all(sizes[1:-1]):
        raise UsageError(
            f"stage {sizes.index(0, 1) + 1} has no layer; expected at least one in all stages but the first, which has "
            "the embedding, and the last, which has the projection"
        )
    return sizes


def _of_ranks(given: Sequence[int], count: int, layout: Layout) -> list[int]:
    if len(given) != layout.pipeline:
        raise UsageError(f"{plural(len(given), 'stage')} given for {layout.pipeline} ranks")
    v = layout.schedule.v
    sizes = [0] * count
    for rank, layers in enumerate(given):
        least, more = divmod(layers, v)
        mine = layout.schedule.stages_of_rank(rank, layout.pipeline)
        # Fewer layers where the embedding or the projection is: in a first rank's first, or a last rank's last chunk.
        fuller = list(mine[v - more :]) if rank == 0 else list(mine[:more])
        for stage in mine:
            sizes[stage] = least + (stage in fuller)
    return sizes


def _synchronisation_s(kind: LayerKind, mode: LayerMode, layout: Layout, setting: Setting) -> float:
    """The seconds once a batch on each device to reduce gradients over the replicas, and to gather a sharded
    optimizer's weights."""
    return sum(one.ring_s(layout.data, setting.stack) for one in reduced(kind, mode, setting.stack, setting.training))


def _hidden_share(
    ranks: Sequence[Sequence[str]], costs: dict[str, LayerCosts], sync_s: dict[str, float], layout: Layout
) -> float:
    """The share of synchronisation that hides behind passes, on the rank that can hide least.

    It hides behind the passes of one microbatch; if several chunks take turns with groups of microbatches, behind those
    of as many microbatches as there are ranks.
    """
    share = 1.0
    together = min(layout.pipeline, layout.microbatches) if layout.schedule.v > 1 else 1
    for rank in ranks:
        own_s = sum(sync_s[key] for key in rank)
        if own_s == 0.0:
            continue
        backward_s = sum(costs[key].time_s - costs[key].forward_pass_s for key in rank)
        forward_s = sum(costs[key].forward_pass_s for key in rank) if layout.sharding is not Sharding.NONE else 0.0
        last = 1.0 / max(2, len(rank))
        share = min(share, 1.0 - last, together * (backward_s + forward_s) / own_s)
    return share


def _optimizer_s(rank: Sequence[str], costs: dict[str, LayerCosts], setting: Setting, layout: Layout) -> float:
    """The seconds in which each device updates the parameters whose optimizer state it has, or waits for its host to do
    so."""
    updated = sum(costs[key].updated for key in rank)
    if layout.optimizer_on_host:
        return updated / setting.gpu.host_updates_per_s
    return traffic_s(updated * setting.stack.software.optimizer_traffic_bytes, setting.gpu)


def _tied_s(architecture: Architecture, chosen: dict[str, LayerMode], setting: Setting) -> float:
    """The seconds in which the first and the last stage sum the gradients of tied weights, after everything else
    (Megatron)."""
    stack = setting.stack
    tied = [(node.kind, node.kind.value(node.kind.tied)) for node in architecture.nodes]
    gradient_bytes = stack.software.reduced_bytes(stack.precision, setting.training)
    size_bytes = max(value / chosen[kind.key].degree for kind, value in tied) * gradient_bytes
    return size_bytes / (setting.bytes_per_s / 2.0)
