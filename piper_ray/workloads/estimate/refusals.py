"""Refuses what cannot be trained, from the config, before anything is solved: models that a runtime does not know, and
clusters without the memory for any layout.

The memory that is counted is less than that of any plan: states, spread as far as the runtime can, and, with full
recomputation, one sample's checkpoints for each microbatch that 1F1B has in flight. Passes and both ends of the model
count nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from piper_ray.model import limits
from piper_ray.model.cluster import Cluster
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural, size_text
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Recomputation, Sharding
from piper_ray.model.schedule import TRAINED_TODAY
from piper_ray.runtimes.runtime import Runtime
from piper_ray.workloads.estimate.build import HOST_BYTES, EstimateRequest, trained_model
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Gpu, Hardware, Training
from piper_ray.workloads.estimate.layout import Layout, priced
from piper_ray.workloads.estimate.memory import kept_bytes, numbers_on_device
from piper_ray.workloads.estimate.modes import LayerMode, degrees_of
from piper_ray.workloads.estimate.operators import Architecture, LayerKind, with_adapters
from piper_ray.workloads.estimate.runtimes import DEFAULT


def reasons_against(
    model: ModelConfig, hardware: Hardware, gpu: str, request: EstimateRequest, runtime: Runtime
) -> tuple[str, ...]:
    """The reasons why no plan for this runtime can be found, a sentence each; none if no reason is known.

    request: its nodes, tokens, samples, batch, lora and offers count; samples None: any number. Raises UsageError for
    unknown names.
    """
    found: list[str] = []
    instance = plain_instance(model, hardware, request)
    try:
        runtime.constraints(instance, runtime.schedules[0], request.domain_of(hardware.gpu(gpu)))
    except UsageError as error:
        found.append(f"{runtime.title} cannot train {model.name}: {error}")
    if request.optimizer_on_host and (excess := host_excess(model, hardware.gpu(gpu), request)) is not None:
        found.append(excess)
    return (*found, *_without_room(model, hardware, gpu, request, runtime))


def host_excess(model: ModelConfig, gpu: Gpu, request: EstimateRequest) -> str | None:
    """Why all nodes together lack the memory for the optimizer's state; None if they have it."""
    architecture = model.architecture(Microbatch(1, request.tokens or model.tokens, request.fused))
    needed, there = HOST_BYTES * architecture.parameters, request.nodes * request.host_bytes_of(gpu)
    if needed <= there:
        return None
    return (
        f"the optimizer's state takes {size_text(needed)} of host memory, where all nodes together have "
        f"{size_text(there)}; --host-memory sets what a node has"
    )


def why_not_on_host(runtime: Runtime, request: EstimateRequest, training: Training) -> str | None:
    """Why no plan for the runtime can keep the optimizer's state in host memory; None if one can."""
    if not runtime.state_on_host:
        return f"{runtime.title}'s launch files keep the optimizer's state on GPUs"
    if request.lora or request.precision == "fp16" or training.optimizer_bytes != _FP32_ADAM_BYTES:
        return f"{runtime.title} has it so in fp32, for models that are trained whole in bf16 or fp8"
    return None if request.offer.zero == ALL_REPLICAS else "each replica updates its share; expected --zero all"


def may_be_on_host(runtime: Runtime, request: EstimateRequest, training: Training) -> bool:
    """Whether plans may keep the optimizer's state in host memory."""
    return request.optimizer_on_host is not False and why_not_on_host(runtime, request, training) is None


_FP32_ADAM_BYTES = 12.0


def plain_instance(model: ModelConfig, hardware: Hardware, request: EstimateRequest) -> Instance:
    """The model's layers in the runtimes' terms, on the largest number of devices, each with one TMPC at t = 1."""
    gpu = hardware.gpu(_ANY_GPU)
    layout = Layout(1, 1, 1, samples=1, batch=1, schedule=TRAINED_TODAY, tokens=request.tokens or model.tokens)
    found = priced(model, replace(request, precision="bf16").stack(gpu), hardware.training, layout).instance
    cluster = Cluster(limits.DEVICES, found.memory_bytes, found.cluster.links)
    return replace(found, cluster=cluster, model=trained_model(model, request, hardware.training))


_ANY_GPU = "H100-SXM"


@dataclass(frozen=True)
class _Held:
    """The bytes of all layers of one kind on each of t devices: those of each replica, those that replicas share, those
    of experts in all, and those that a microbatch keeps. layers: the number of layers."""

    layers: int
    own: float
    shared: float
    routed: float
    kept: float

    def of_layer(self, t: int, devices: float, context: bool) -> tuple[float, float]:
        """The bytes of one layer on each device of a stage of ``devices`` devices: the least state, and what a
        microbatch keeps."""
        shares = devices / t
        state = self.own + self.shared / shares + self.routed / devices
        return state / self.layers, self.kept / self.layers / (shares if context else 1.0)


@dataclass(frozen=True)
class _Room:
    """The question whether the layers fit on this many devices with this memory.

    all_shared: whether replicas can share weights and gradients, too. microbatches: those of a batch, over all
    replicas.
    """

    architecture: Architecture
    training: Training
    degrees: tuple[int, ...]
    devices: int
    memory_bytes: float
    all_shared: bool
    context: bool
    offload: bool
    microbatches: int

    def fits(self) -> bool:
        """Whether some t and p leave each stage room for its blocks, and all stages together room for all layers."""
        return any(self._fits_at(t) for t in self.degrees if t <= self.devices)

    def _fits_at(self, t: int) -> bool:
        """Whether they fit for some p, counting one microbatch in flight for layers of all kinds, and as many as 1F1B
        has for blocks of one kind."""
        kinds = self._held(t)
        main = max(kinds, key=lambda held: held.own + held.shared + held.routed)
        for p in range(1, min(len(self.architecture.nodes), self.devices // t) + 1):
            of_stage = self.devices / p
            in_all = sum(held.layers * sum(held.of_layer(t, of_stage, self.context)) for held in kinds)
            state, kept = main.of_layer(t, of_stage, self.context)
            most = max(1.0, self.microbatches * t / of_stage)
            room = sum(self.memory_bytes // (state + min(p - stage, most) * kept) for stage in range(p))
            if in_all <= p * self.memory_bytes and room >= main.layers:
                return True
        return False

    def _held(self, t: int) -> list[_Held]:
        nodes = self.architecture.nodes
        counts = Counter(node.kind.key for node in nodes)
        return [self._of_kind(kind.on(t), t, counts[kind.key]) for kind in self.architecture.kinds]

    def _of_kind(self, kind: LayerKind, t: int, layers: int) -> _Held:
        recomputation = Recomputation.FULL if kind.recomputable else Recomputation.NONE
        mode = LayerMode(degree=t, sequence_parallel=t > 1, recomputation=recomputation, experts=1)
        own = shared = routed = 0.0
        for numbers in numbers_on_device(kind, mode):
            weights = numbers.held * self.training.weight_bytes + numbers.trained * self.training.gradient_bytes
            optimizer = numbers.trained * self.training.optimizer_bytes
            if numbers.routed:  # over as many devices as there are
                routed += weights + optimizer
            elif self.all_shared:
                shared += weights + optimizer
            else:
                own, shared = own + weights, shared + optimizer
        kept = 0.0 if self.offload or not kind.recomputable else kept_bytes(kind, mode)
        return _Held(layers, layers * own, layers * shared, layers * routed, layers * kept)


def _without_room(
    model: ModelConfig, hardware: Hardware, gpu_key: str, request: EstimateRequest, runtime: Runtime
) -> Iterator[str]:
    gpu = hardware.gpu(gpu_key)
    room = _room(model, hardware.training, gpu, request, runtime)
    if room.fits():
        return

    def fits(nodes: int) -> bool:
        """Whether so many nodes may do, whose own memory may hold the optimizer's state."""
        more = replace(request, nodes=nodes)
        if request.optimizer_on_host and host_excess(model, gpu, more) is not None:
            return False
        return _room(model, hardware.training, gpu, more, runtime).fits()

    nodes, enough = request.nodes, request.nodes
    while enough < _MOST_NODES and not fits(enough):
        nodes, enough = enough, 2 * enough
    while enough - nodes > 1:
        middle = (nodes + enough) // 2
        nodes, enough = (nodes, middle) if fits(middle) else (middle, enough)
    training = room.training
    each = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes
    states = room.architecture.trained_parameters * each
    there = f"{plural(room.devices, 'GPU')} of {size_text(room.memory_bytes)}"
    states_named = "weights, gradients and optimizer state" if training.optimizer_bytes else "weights and gradients"
    text = f"{model.name} has no layout that fits on {there}: {states_named} alone take "
    text += f"{size_text(states)}, where all GPUs together have {size_text(room.devices * room.memory_bytes)}"
    yield text + (f"; it takes {enough:,} nodes or more" if enough < _MOST_NODES else "")
    excess = host_excess(model, gpu, request) if may_be_on_host(runtime, request, hardware.training) else None
    if excess is not None and _without_optimizer(room).fits():
        yield f"with the optimizer's state in host memory it may fit, but {excess}"


_MOST_NODES = 2**14


def _room(model: ModelConfig, training: Training, gpu: Gpu, request: EstimateRequest, runtime: Runtime) -> _Room:
    samples = request.samples or 1
    architecture = model.architecture(Microbatch(samples, request.tokens or model.tokens, request.fused))
    if request.lora:
        architecture = with_adapters(architecture, request.lora)
    degrees = {t for of_kind in degrees_of(architecture.kinds, request.domain_of(gpu)).values() for t in of_kind}
    reserve = DEFAULT.reserve_bytes(gpu.device_bytes) if request.reserve_bytes is None else request.reserve_bytes
    room = _Room(
        architecture=architecture,
        training=training,
        degrees=tuple(sorted(degrees)) if runtime.tensor_parallelism else (1,),
        devices=request.devices_of(gpu),
        memory_bytes=gpu.device_bytes - reserve,
        all_shared=runtime.setting.most_sharding is Sharding.WEIGHTS,
        context=runtime.setting.context,
        offload=request.offer.offload,
        microbatches=max(1, (request.batch or model.batch) // samples),
    )
    on_host = bool(request.optimizer_on_host) or host_excess(model, gpu, request) is None
    return _without_optimizer(room) if on_host and may_be_on_host(runtime, request, training) else room


def _without_optimizer(room: _Room) -> _Room:
    """The room with the optimizer's state in host memory."""
    return replace(room, training=room.training.model_copy(update={"optimizer_bytes": 0.0}))
