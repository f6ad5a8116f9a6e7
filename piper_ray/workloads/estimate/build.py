"""From a model and a cluster to an instance that can be planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_ray.model import limits
from piper_ray.model.batch import Batch
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.schedule import TRAINED_TODAY
from piper_ray.model.settings import Recomputation
from piper_ray.workloads.estimate.adapters import with_adapters
from piper_ray.workloads.estimate.calibration import UNCALIBRATED, Calibration
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.costs import Costs, Setting, costs_of, edge_bytes, tmpc_of
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Gpu, Hardware
from piper_ray.workloads.estimate.memory import working_bytes
from piper_ray.workloads.estimate.modes import Mode, degrees_of, modes_of
from piper_ray.workloads.estimate.operators import Architecture, LayerKind
from piper_ray.workloads.estimate.runtimes import DEFAULT
from piper_ray.workloads.estimate.software import DEFAULT_SOFTWARE, Stack, precision_named, software_named, stack_of
from piper_ray.workloads.estimate.work import step_flop


@dataclass(frozen=True)
class EstimateRequest:
    """What is to be estimated besides the model. None: what the model's own training or the GPU's node has.

    nodes, gpus_per_node: the cluster. tokens, samples: of a microbatch; batch: samples of a batch, over all replicas.
    fused: attention as one kernel. software, precision: a generation (``software.toml``); bf16, fp16 or fp8.
    zero_shards: optimizer states over so many replicas as a further choice; 1: none. offload: activations in host
    memory as a further choice. lora: rank of adapters that are trained in the model's place; 0: the model itself is.
    reserve_bytes: of each GPU, for CUDA's context, communicators and what is stuck in the allocator; None: as
    ``Runtime.reserve_bytes`` says.
    """

    nodes: int
    gpus_per_node: int | None = None
    tokens: int | None = None
    samples: int | None = None
    batch: int | None = None
    fused: bool = True
    software: str = DEFAULT_SOFTWARE
    precision: str = "bf16"
    zero_shards: int = 1
    offload: bool = False
    lora: int = 0
    reserve_bytes: float | None = None
    calibration: Calibration = UNCALIBRATED

    def stack(self, gpu: Gpu) -> Stack:
        """What runs the model on that GPU. Raises UsageError."""
        precision, software = precision_named(self.precision), software_named(self.software)
        return self.calibration.applied(stack_of(gpu, software, precision, self.gpus_per_node or gpu.gpus_per_node))


@dataclass(frozen=True)
class Estimate:
    """An instance with what it was made from. modes: of each kind, by key.

    model_flop, hardware_flop: of a step (see ``work``), the latter if all layers are recomputed in full.
    """

    instance: Instance
    architecture: Architecture
    setting: Setting
    modes: dict[str, tuple[Mode, ...]]
    devices: int
    model_flop: float
    hardware_flop: float
    calibration: Calibration = UNCALIBRATED

    @property
    def peak_flop_per_s(self) -> float:
        """Of all devices in bf16: what utilisation is measured against."""
        return self.devices * self.setting.gpu.matrix_flop_per_s

    def costs(self, kind: LayerKind, mode: Mode) -> Costs:
        return costs_of(kind.on(mode.degree), mode, self.setting)


def estimate(model: ModelConfig, hardware: Hardware, gpu_key: str, request: EstimateRequest) -> Estimate:
    """The workload of training ``model`` on the cluster of ``request``. Raises UsageError."""
    return estimate_on(request.stack(hardware.gpu(gpu_key)), model, hardware, request)


def estimate_on(stack: Stack, model: ModelConfig, hardware: Hardware, request: EstimateRequest) -> Estimate:
    """The same with GPUs and software that are no entries of tables; ``request`` says nothing of these."""
    gpu, per_node = stack.gpu, stack.gpus_per_node
    devices = request.nodes * per_node
    if devices > limits.DEVICES:
        raise UsageError(f"{devices:,} GPUs; expected at most {limits.DEVICES:,}")
    samples, batch = request.samples or model.samples, request.batch or model.batch
    if batch % samples:
        raise UsageError(f"--global-batch {batch} is no multiple of the microbatch's {samples} samples; expected one")
    microbatch = Microbatch(samples, request.tokens or model.tokens, request.fused)
    architecture = _architecture(model, microbatch, request)
    degrees = degrees_of(architecture.kinds, per_node)
    modes = {
        kind.key: tuple(
            mode for t in degrees[kind.key] for mode in modes_of(kind, t, request.zero_shards, request.offload)
        )
        for kind in architecture.kinds
    }
    links = links_of(gpu, per_node)
    setting = Setting(
        stack=stack,
        training=hardware.training,
        microbatches=batch // samples,
        bytes_per_s=links[-1].bandwidth_bytes_per_s,
        workspace_bytes=_workspace_bytes(architecture.kinds, modes),
        reserve_bytes=(
            DEFAULT.reserve_bytes(gpu.device_bytes) if request.reserve_bytes is None else request.reserve_bytes
        ),
        largest_degree=max(t for of_kind in degrees.values() for t in of_kind),
    )
    if setting.reserve_bytes >= gpu.device_bytes:
        raise UsageError(f"--reserve {setting.reserve_bytes:,.0f}B: a GPU has {gpu.device_bytes:,.0f}; expected less")
    if setting.memory_bytes <= 0.0:
        raise UsageError(
            f"one layer's backward pass takes {setting.workspace_bytes:,.0f} bytes, more than a GPU has beside its "
            f"reserve of {setting.reserve_bytes:,.0f}; expected a smaller --microbatch-size or fewer --tokens"
        )
    instance = _instance(architecture, modes, setting, devices, links, microbatch)
    causal = architecture if request.fused else _architecture(model, replace(microbatch, fused=True), request)
    return Estimate(
        instance,
        architecture,
        setting,
        modes,
        devices,
        model_flop=step_flop(causal, batch // samples),
        hardware_flop=step_flop(causal, batch // samples, Recomputation.FULL),
        calibration=request.calibration,
    )


def _architecture(model: ModelConfig, microbatch: Microbatch, request: EstimateRequest) -> Architecture:
    architecture = model.architecture(microbatch)
    return with_adapters(architecture, request.lora) if request.lora else architecture


def links_of(gpu: Gpu, gpus_per_node: int) -> tuple[Link, ...]:
    """The node's, if it has several GPUs, and the network's, whatever the number of nodes.

    The planner's formulas count what goes out and what comes in, so B counts both directions too.
    """
    network = Link(2.0 * gpu.network_bytes_per_s * gpu.network_fraction)
    if gpus_per_node == 1:
        return (network,)
    return (Link(2.0 * gpu.link_bytes_per_s * gpu.link_fraction, gpus_per_node), network)


def _workspace_bytes(kinds: Sequence[LayerKind], modes: dict[str, tuple[Mode, ...]]) -> float:
    """What any layer's backward pass needs at its largest degree, in the mode that needs most."""
    needed = [0.0]
    for kind in kinds:
        largest = max(mode.degree for mode in modes[kind.key])
        needed += [working_bytes(kind.on(largest), mode) for mode in modes[kind.key] if mode.degree == largest]
    return max(needed)


def _instance(
    architecture: Architecture,
    modes: dict[str, tuple[Mode, ...]],
    setting: Setting,
    devices: int,
    links: tuple[Link, ...],
    microbatch: Microbatch,
) -> Instance:
    nodes = architecture.nodes
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for source in node.inputs:
            readers[source].append(index)
    output = [node.kind.value(node.kind.output) for node in nodes]
    costs = {
        (kind.key, mode): costs_of(kind.on(mode.degree), mode, setting)
        for kind in architecture.kinds
        for mode in modes[kind.key]
    }
    layers = []
    for index, node in enumerate(nodes):
        arriving = {source: output[source] for source in node.inputs}
        leaving = dict.fromkeys(readers[index], output[index])
        tmpcs: dict[int, tuple[Tmpc, ...]] = {}
        for mode in modes[node.kind.key]:
            tmpc = tmpc_of(costs[node.kind.key, mode], mode, setting, arriving, leaving)
            tmpcs[mode.degree] = (*tmpcs.get(mode.degree, ()), tmpc)
        layers.append(Layer(index, node.kind.name, tmpcs, node.path))
    edges = tuple(
        Edge(source, index, float(round(edge_bytes(output[source], setting))))
        for index, node in enumerate(nodes)
        for source in node.inputs
    )
    return Instance(
        layers=tuple(layers),
        edges=edges,
        cluster=Cluster(devices, float(int(setting.memory_bytes)), links),
        batch=Batch(setting.microbatches, microbatch.samples, microbatch.tokens),
        name=architecture.name,
        schedule=TRAINED_TODAY,
    )
