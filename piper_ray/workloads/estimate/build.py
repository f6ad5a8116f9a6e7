"""From a model and a cluster to an instance that can be planned.

Also the optimizer's state in host memory, where parameters are updated: how this changes an estimate.

If a replica of a stage has U parameters, each of d replicas updates U / d of them once a batch, on the host, while its
GPU waits: k U / d seconds, including the way of gradients down and of weights up. That is k U / N for each of N / d
microbatches, at any d, so a TMPC can carry this price. From the first to the last microbatch of a pipeline it counts p
- 1 times too often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from piper_ray.model import limits
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import size_text
from piper_ray.model.instance import Batch, Edge, Instance, Layer, MovedRows, Tmpc, TrainedModel, with_rows
from piper_ray.model.mode import ALL_REPLICAS, Recomputation, Sharding
from piper_ray.model.schedule import TRAINED_TODAY
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.costs import LayerCosts, Setting, costs_of, edge_bytes, rounded_s, sync_bytes, tmpc_of
from piper_ray.workloads.estimate.doubt import Doubt, constants_in_use, doubt_of
from piper_ray.workloads.estimate.exchanges import dispatcher_word
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Gpu, Hardware, Training
from piper_ray.workloads.estimate.memory import gathered_bytes, working_bytes
from piper_ray.workloads.estimate.modes import PLAIN, LayerMode, Offer, degrees_of, modes_of
from piper_ray.workloads.estimate.offered import (
    heads_handed_out,
    offered_recomputations,
    require_offered,
    undominated,
    without_needless,
)
from piper_ray.workloads.estimate.operators import TOKEN_EMBEDDING, Architecture, LayerKind, with_adapters
from piper_ray.workloads.estimate.roofline import step_flop
from piper_ray.workloads.estimate.runtimes import DEFAULT, Traits
from piper_ray.workloads.estimate.software import (
    DEFAULT_SOFTWARE,
    UNCALIBRATED,
    Calibration,
    ContextExchange,
    Overlap,
    Stack,
    context_exchange_named,
    dispatcher_named,
    graphs_named,
    overlaps_named,
    precision_named,
    software_named,
    stack_of,
)


@dataclass(frozen=True)
class EstimateRequest:
    """What to estimate, besides the model. None: the value of the model's own training or of the GPU's node.

    nodes, gpus_per_node: the cluster. domain: the number of GPUs that share the fast link, if it joins several nodes.
    uplink_bytes_per_s: what these GPUs together send to others, and receive from them; None: each GPU has a network
    link of its own. tokens: tokens of a sample. samples: samples of a microbatch. batch: samples of a batch, over all
    replicas. fused: attention is one kernel. software: a generation (``software.toml``). precision: bf16, fp16 or fp8.
    offer: further ways to run layers. recomputations: those offered besides the ones that suit the software.
    context_exchange: how context parallelism attends to all tokens (``software.ContextExchange``). overlaps: exchanges
    that hide behind passes, besides those that the software hides by default. graphs: what CUDA graphs capture
    (``software.CudaGraph``). dispatcher: how tokens reach experts (``software.TokenDispatcher``); None: the software's
    default. expert_imbalance: tokens of the device with the busiest experts, over the average. lora: the rank of
    adapters that are trained in place of the model; 0: the model itself is trained. optimizer_on_host: whether the
    optimizer's state lies in host memory and is updated there; None: it does not, and ``plan`` may choose.
    reserve_bytes: bytes of each GPU for CUDA's context, communicators and the allocator's fragments; None: those of
    ``Runtime.reserve_bytes``. host_memory_bytes: how much of a node's own memory the optimizer's state may take; None:
    all that such nodes have. calibration: how measurements correct the constants.
    """

    nodes: int
    gpus_per_node: int | None = None
    domain: int | None = None
    uplink_bytes_per_s: float | None = None
    tokens: int | None = None
    samples: int | None = None
    batch: int | None = None
    fused: bool = True
    software: str = DEFAULT_SOFTWARE
    precision: str = "bf16"
    offer: Offer = PLAIN
    recomputations: tuple[Recomputation, ...] = ()
    context_exchange: str = ContextExchange.RING.value
    overlaps: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    dispatcher: str | None = None
    expert_imbalance: float | None = None
    lora: int = 0
    optimizer_on_host: bool | None = None
    reserve_bytes: float | None = None
    host_memory_bytes: float | None = None
    calibration: Calibration = UNCALIBRATED

    def host_bytes_of(self, gpu: Gpu) -> float:
        """The bytes of a node's own memory that the optimizer's state may take."""
        usual = gpu.host_memory_bytes * self.node_of(gpu)
        return usual if self.host_memory_bytes is None else self.host_memory_bytes

    def node_of(self, gpu: Gpu) -> int:
        """The number of GPUs of a node."""
        return self.gpus_per_node or gpu.gpus_per_node

    def on(self, gpu: Gpu) -> EstimateRequest:
        """The request with the GPUs of a node filled in. Raises UsageError for a cluster that is too large."""
        self.devices_of(gpu)
        return replace(self, gpus_per_node=self.node_of(gpu))

    def domain_of(self, gpu: Gpu) -> int:
        """The number of GPUs that share the fast link. Raises UsageError if it is no multiple of a node's."""
        node = self.node_of(gpu)
        if self.domain is not None and self.domain % node:
            raise UsageError(f"--domain {self.domain}: expected whole nodes of {node} GPUs, such as {node * 2}")
        return self.domain or gpu.domain_of(self.gpus_per_node)

    def devices_of(self, gpu: Gpu) -> int:
        """The number of GPUs of the cluster. Raises UsageError if it is too large."""
        found = self.nodes * self.node_of(gpu)
        if found > limits.DEVICES:
            raise UsageError(f"{self.nodes:,} nodes: {found:,} GPUs; expected at most {limits.DEVICES:,}")
        return found

    def stack(self, gpu: Gpu) -> Stack:
        """The GPU and the software on it. Raises UsageError."""
        precision, software = precision_named(self.precision), software_named(self.software)
        changed: dict[str, object] = {
            "context": context_exchange_named(self.context_exchange),
            "graphs": graphs_named(self.graphs),
        }
        if self.dispatcher is not None:
            changed["dispatcher"] = dispatcher_named(self.dispatcher)
        software = software.overlapping(overlaps_named(self.overlaps)).model_copy(update=changed)
        stack = replace(stack_of(gpu, software, precision, self.domain_of(gpu)), devices=self.devices_of(gpu))
        if self.expert_imbalance is not None:
            if self.expert_imbalance > limits.DEVICES:
                most = f"at most {limits.DEVICES:,}, as no GPU has more than the tokens of all"
                raise UsageError(f"--expert-imbalance {self.expert_imbalance:g}: expected {most}")
            stack = replace(stack, imbalance=self.expert_imbalance)
        return self.calibration.applied(stack)


@dataclass(frozen=True)
class Estimate:
    """An instance, and what it was made from.

    modes: the modes of each kind of layer, by key. model_flop: the model's FLOP of a step (see ``roofline``).
    hardware_flop: the FLOP of a step if all layers are recomputed in full. kinds: with several kinds of GPUs, the
    estimate for each; all fields but the instance and the devices are then those of the first kind.
    """

    instance: Instance
    architecture: Architecture
    setting: Setting
    modes: dict[str, tuple[LayerMode, ...]]
    devices: int
    model_flop: float
    hardware_flop: float
    calibration: Calibration = UNCALIBRATED
    kinds: tuple[Estimate, ...] = ()

    @cached_property
    def on_host(self) -> Estimate:
        """The same estimate with the optimizer's state in host memory."""
        return replace(self, instance=with_state_on_host(self.instance, self.setting))

    def on_devices(self, devices: int) -> Estimate:
        """The same layers on another number of devices, on which they cost the same."""
        stack = replace(self.setting.stack, devices=devices)
        setting = replace(self.setting, stack=stack)
        return replace(self, instance=self.instance.replace(devices=devices), setting=setting, devices=devices)

    @property
    def peak_flop_per_s(self) -> float:
        """The peak rate of all devices in bf16, the base of utilisation."""
        return sum(one.devices * one.setting.gpu.matrix_flop_per_s for one in self.kinds or (self,))

    @property
    def least_memory_bytes(self) -> float:
        """The least memory that any plan needs, on all devices together: the layers with one microbatch in flight. If a
        TMPC needs replicas, each of them holds its part."""
        least = {
            id(layer): min(
                degree
                * (tmpc.least_data_parallel_degree * (tmpc.activation_bytes + tmpc.fixed_bytes) + tmpc.shared_bytes)
                for degree, of in layer.tmpcs.items()
                for tmpc in of
            )
            for layer in self.instance.priced_layers
        }
        return sum(least[id(layer.priced)] for layer in self.instance.layers)

    @property
    def least_devices(self) -> int:
        """The fewest devices that have this memory."""
        return math.ceil(self.least_memory_bytes / self.instance.memory_bytes)

    @property
    def doubt(self) -> Doubt:
        """How far estimates like this one were off; on several kinds the one that is least sure."""
        if self.kinds:
            return max((one.doubt for one in self.kinds), key=lambda doubt: doubt.range_s(1.0)[1])
        stack = self.setting.stack
        experts = any(kind.experts for kind in self.architecture.kinds)
        modes = [mode for of_kind in self.modes.values() for mode in of_kind]
        used = constants_in_use(
            stack,
            experts=experts,
            scans=any(kind.scans for kind in self.architecture.kinds),
            tensor=any(mode.degree > 1 for mode in modes),
            sharded=any(mode.sharding >= Sharding.GRADIENTS for mode in modes),
        )
        return doubt_of(stack, experts, () if self.calibration.factors else used, self.calibration.spread)

    def costs(self, kind: LayerKind, mode: LayerMode) -> LayerCosts:
        return costs_of(kind.on(mode.degree), mode, self.setting)


def estimate(model: ModelConfig, hardware: Hardware, gpu_key: str, request: EstimateRequest) -> Estimate:
    """The workload of training ``model`` on the cluster of ``request``. Raises UsageError."""
    if request.optimizer_on_host and request.offer.zero != ALL_REPLICAS:
        raise UsageError("--optimizer-on-host: each replica updates its share; expected --zero all")
    found = estimate_on(request.stack(hardware.gpu(gpu_key)), model, hardware, request)
    note = hardware.choice_note(gpu_key)
    assert found.instance.model is not None
    trained = replace(found.instance.model, gpu=hardware.key(gpu_key))
    notes = (() if note is None else (note,)) + found.instance.notes
    return replace(found, instance=replace(found.instance, notes=notes, model=trained))


def estimate_on(stack: Stack, model: ModelConfig, hardware: Hardware, request: EstimateRequest) -> Estimate:
    """The same for GPUs and software that are in no table; ``request`` then says nothing about either."""
    gpu, domain, devices = stack.gpu, stack.domain, request.devices_of(stack.gpu)
    links = links_of(gpu, domain, request.uplink_bytes_per_s)
    share = 0.5 * links[0].share_bytes_per_s() / gpu.network_fraction  # in exchanges all GPUs send at once
    gpu = gpu.model_copy(update={"network_bytes_per_s": min(gpu.network_bytes_per_s, share)})
    stack = replace(stack, gpu=gpu)
    samples, batch = request.samples or model.samples, request.batch or model.batch
    if batch % samples:
        raise UsageError(f"--global-batch {batch} is no multiple of the microbatch's {samples} samples; expected one")
    microbatch = Microbatch(samples, request.tokens or model.tokens, request.fused)
    architecture = _architecture(model, microbatch, request)
    degrees = degrees_of(architecture.kinds, domain)
    require_offered(architecture, request.offer)
    offer = replace(
        request.offer.on(devices), recomputations=offered_recomputations(architecture, stack, request.recomputations)
    )
    modes = {
        kind.key: tuple(
            mode
            for t in degrees[kind.key]
            for mode in modes_of(kind, t, offer)
            if heads_handed_out(kind, mode) or not _hands_out_heads(stack)
        )
        for kind in architecture.kinds
    }
    modes, left_out = _gathering_little(architecture.kinds, modes, hardware.training, stack)
    setting = Setting(
        stack=stack,
        training=hardware.training,
        microbatches=batch // samples,
        bytes_per_s=links[-1].bandwidth_bytes_per_s,
        workspace_bytes=_workspace_bytes(architecture.kinds, modes, hardware.training, stack.traits),
        reserve_bytes=(
            DEFAULT.reserve_bytes(gpu.device_bytes) if request.reserve_bytes is None else request.reserve_bytes
        ),
        largest_degree=max(mode.devices for of_kind in modes.values() for mode in of_kind),
    )
    if setting.reserve_bytes >= gpu.device_bytes:
        there = size_text(gpu.device_bytes)
        raise UsageError(f"--reserve {size_text(setting.reserve_bytes)}: a GPU has {there}; expected less")
    if setting.memory_bytes <= 0.0:
        raise UsageError(
            f"one layer's backward pass takes {setting.workspace_bytes:,.0f} bytes, more than a GPU has beyond its "
            f"reserve of {setting.reserve_bytes:,.0f}; expected a smaller --microbatch-size or fewer --tokens"
        )
    priced = {
        kind.key: {mode: costs_of(kind.on(mode.degree), mode, setting) for mode in modes[kind.key]}
        for kind in architecture.kinds
    }
    costs = {key: undominated(of_kind) for key, of_kind in without_needless(priced, offer.spreads).items()}
    modes = {key: tuple(of_kind) for key, of_kind in costs.items()}
    trained = replace(trained_model(model, request, setting.training), dispatcher=dispatcher_word(stack))
    node_devices = request.node_of(gpu) if request.node_of(gpu) < domain else None
    instance = replace(
        _instance(architecture, modes, costs, setting, devices, links, node_devices, microbatch),
        notes=left_out,
        model=trained,
    )
    causal = architecture if request.fused else _architecture(model, replace(microbatch, fused=True), request)
    found = Estimate(
        instance,
        architecture,
        setting,
        modes,
        devices,
        model_flop=step_flop(causal, batch // samples),
        hardware_flop=step_flop(causal, batch // samples, Recomputation.FULL),
        calibration=request.calibration,
    )
    return found.on_host if request.optimizer_on_host else found


def trained_model(model: ModelConfig, request: EstimateRequest, training: Training) -> TrainedModel:
    """The model and its training, as launch files state them. Raises UsageError for unknown names."""
    return TrainedModel(
        config=model.document,
        precision=precision_named(request.precision).value,
        software=request.software,
        lora_rank=request.lora,
        fused_attention=request.fused,
        context_exchange=context_exchange_named(request.context_exchange).value,
        expert_overlap=Overlap.EXPERTS.value in request.overlaps,
        optimizer_on_host=bool(request.optimizer_on_host),
        calibrated=None if request.calibration.spread is None else asdict(request.calibration.spread),
        **training.model_dump(),
    )


def _architecture(model: ModelConfig, microbatch: Microbatch, request: EstimateRequest) -> Architecture:
    architecture = model.architecture(microbatch)
    return with_adapters(architecture, request.lora) if request.lora else architecture


def links_of(gpu: Gpu, domain: int, uplink_bytes_per_s: float | None = None) -> tuple[Link, ...]:
    """The links: that of a domain, if it has several GPUs, and the network's, for any number of nodes. Raises
    UsageError for an uplink of one GPU.

    The planner's formulas count what goes out and what comes in, so B counts both directions too.
    """
    network = Link(2.0 * gpu.network_bytes_per_s * gpu.network_fraction)
    if uplink_bytes_per_s is not None and (domain == 1 or uplink_bytes_per_s <= 0.0):
        raise UsageError("--uplink: expected a rate above 0, such as 100GB/s, of several GPUs that share a fast link")
    if domain == 1:
        return (network,)
    return (Link(2.0 * gpu.link_bytes_per_s * gpu.link_fraction, domain, uplink_bytes_per_s), network)


def _backward_bytes(kind: LayerKind, mode: LayerMode, training: Training, traits: Traits) -> tuple[float, float]:
    """The bytes that a layer's backward pass needs, and the part of them that gathered weights and their gradients
    take."""
    gathered = gathered_bytes(kind.on(mode.degree), mode, training)
    return gathered + working_bytes(kind.on(mode.degree), mode, traits), gathered


def _workspace_bytes(
    kinds: Sequence[LayerKind], modes: dict[str, tuple[LayerMode, ...]], training: Training, traits: Traits
) -> float:
    """The most that any layer's backward pass needs at its largest t, in the mode that needs most; for sharded weights,
    at any t.

    Context parallelism divides this further, but only in plans that use it. Devices that share an expert need more;
    their layers are charged for it, so that other plans do not pay.
    """
    most = 0.0
    for kind in kinds:
        largest = max(mode.degree for mode in modes[kind.key])
        for mode in modes[kind.key]:
            plain = mode.degree == largest and mode.context == 1
            if mode.expert_tensor == 1 and (plain or mode.sharding is Sharding.WEIGHTS):
                needed, gathered = _backward_bytes(kind, mode, training, traits)
                most = max(most, needed if plain or gathered else 0.0)
    return most


_GATHERED = 0.25
"""The largest share of a device's memory that is set aside for gathered weights and the backward pass of a layer."""


def _gathering_little(
    kinds: Sequence[LayerKind], modes: dict[str, tuple[LayerMode, ...]], training: Training, stack: Stack
) -> tuple[dict[str, tuple[LayerMode, ...]], tuple[str, ...]]:
    """The modes, without sharded weights at degrees where a layer's gathered weights would fill too much of a device;
    and a note about it. What is set aside is set aside for all plans."""

    gpu, traits = stack.gpu, stack.traits
    large: dict[int, float] = {}
    for kind in kinds:
        for mode in filter(lambda mode: mode.sharding is Sharding.WEIGHTS, modes[kind.key]):
            needed, gathered = _backward_bytes(kind, mode, training, traits)
            if gathered and needed > _GATHERED * gpu.device_bytes:
                large[mode.degree] = max(large.get(mode.degree, 0.0), needed)
    if not large:
        return modes, ()
    kept = {
        key: tuple(mode for mode in of_kind if mode.sharding < Sharding.WEIGHTS or mode.degree not in large)
        for key, of_kind in modes.items()
    }
    degrees = ", ".join(map(str, sorted(large)))
    said = (
        f"weights are not sharded at t = {degrees}: to gather a layer's and to go back through it takes up to "
        f"{size_text(max(large.values()))} of a device"
    )
    return kept, (said,)


def _hands_out_heads(stack: Stack) -> bool:
    return stack.software.context is ContextExchange.ALL_TO_ALL


def _instance(
    architecture: Architecture,
    modes: dict[str, tuple[LayerMode, ...]],
    costs: dict[str, dict[LayerMode, LayerCosts]],
    setting: Setting,
    devices: int,
    links: tuple[Link, ...],
    node_devices: int | None,
    microbatch: Microbatch,
) -> Instance:
    tied, tensors = architecture.tied_nodes, architecture.tensors
    plain = {
        key: [(mode.devices, tmpc_of(of_kind[mode], mode)) for mode in modes[key]] for key, of_kind in costs.items()
    }
    first: dict[tuple[object, ...], Layer] = {}  # of layers that are alike but for their neighbours' numbers
    layers = []
    for index, node in enumerate(architecture.nodes):
        kind = node.kind
        alike = kind.key, *(tuple((end - index, size) for end, size in side.items()) for side in tensors[index])
        if alike in first:
            rows: Mapping[int, tuple[Tmpc, ...]] = MovedRows(first[alike], index - first[alike].id)
        else:
            rows = _rows(plain[kind.key], modes[kind.key], tensors[index], setting)
        common = TOKEN_EMBEDDING if index in tied else ""
        layer = Layer(index, kind.name, rows, node.path, common, kind.experts, kind.key_heads, node.predictor)
        first.setdefault(alike, layer)
        layers.append(layer)
    edges = tuple(
        Edge(source, index, float(round(edge_bytes(size_bytes, setting))))
        for index, (arriving, _) in enumerate(tensors)
        for source, size_bytes in arriving.items()
    )
    return Instance(
        layers=tuple(layers),
        edges=edges,
        cluster=Cluster(devices, float(int(setting.memory_bytes)), links, node_devices),
        batch=Batch(setting.microbatches, microbatch.samples, microbatch.tokens),
        name=architecture.name,
        schedule=TRAINED_TODAY,
    )


def _rows(
    plain: Sequence[tuple[int, Tmpc]],
    modes: Sequence[LayerMode],
    tensors: Sequence[Mapping[int, float]],
    setting: Setting,
) -> dict[int, tuple[Tmpc, ...]]:
    """A layer's TMPCs by degree. plain: without neighbours, in the order of the modes. tensors: bytes for each layer
    before it, and for each behind it."""
    tables: dict[tuple[tuple[float, ...], ...], list[dict[int, float]]] = {}  # of modes that hand on as much
    found: dict[int, list[Tmpc]] = {}
    for (t, tmpc), mode in zip(plain, modes, strict=True):
        sizes = tuple(tuple(sync_bytes(x, mode.degree, mode, setting) for x in side.values()) for side in tensors)
        if sizes not in tables:
            tables[sizes] = [dict(zip(ends, side, strict=True)) for ends, side in zip(tensors, sizes, strict=True)]
        found.setdefault(t, []).append(tmpc.between(*tables[sizes]))
    return {t: tuple(found[t]) for t in sorted(found)}


HOST_BYTES = 16.0
"""Bytes of host memory for each parameter: fp32 weights, two moments, and gradients on their way."""


def with_state_on_host(instance: Instance, setting: Setting) -> Instance:
    """The instance with only those TMPCs whose replicas share the optimizer's state or have none. GPUs hold no such
    state."""
    byte_s = 1.0 / (setting.gpu.host_updates_per_s * setting.training.optimizer_bytes * setting.microbatches)

    def rows_of(layer: Layer) -> dict[int, tuple[Tmpc, ...]]:
        moved = {t: tuple(_on_host(tmpc, byte_s) for tmpc in row if _may_be(tmpc)) for t, row in layer.tmpcs.items()}
        return {t: row for t, row in moved.items() if row}

    model = None if instance.model is None else replace(instance.model, optimizer_on_host=True)
    return replace(instance, layers=with_rows(instance.layers, rows_of), model=model).checked_as(instance)


def _may_be(tmpc: Tmpc) -> bool:
    return tmpc.mode.optimizer_shards == ALL_REPLICAS or not tmpc.weights_bytes


def _on_host(tmpc: Tmpc, byte_s: float) -> Tmpc:
    if not tmpc.shared_bytes:
        return tmpc
    whole_s = rounded_s(tmpc.time_per_sample_s + byte_s * tmpc.shared_bytes)
    backward_s = None if tmpc.forward_s is None else whole_s - tmpc.forward_s
    return tmpc.changed(time_per_sample_s=whole_s, backward_s=backward_s, shared_bytes=0.0)
