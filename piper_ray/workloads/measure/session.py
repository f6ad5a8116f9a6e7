"""Profiles a model from start to end: the model, its layers, their figures, the instance."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.cores import machine_load, share_of_cores
from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.model.instance import Batch, Instance
from piper_ray.workloads.estimate.build import links_of
from piper_ray.workloads.estimate.hardware import Gpu, Hardware, find_gpu
from piper_ray.workloads.estimate.runtimes import DEFAULT
from piper_ray.workloads.measure.build import LayerFigures, Measured, ProfileTarget, Store, instance_of
from piper_ray.workloads.measure.factory import Declared, Factory, TrainableModel, place_of, words_of
from piper_ray.workloads.measure.graph import TracedLayer, layers_of, signature_of
from piper_ray.workloads.measure.heap import keeping_freed_memory
from piper_ray.workloads.measure.meta import on_device, room_bytes
from piper_ray.workloads.measure.passes import Clock, Repeats, clock_of, kept_of, leaves_of, parameters_of, passes_of
from piper_ray.workloads.measure.tracer import out_of_memory

_MICROBATCHES = 32
_BYTES_PER_S = 25e9
_CHAIN = 4
"""The most equal layers that are measured together."""
_SUSTAINED_S = 0.5
"""The time under load before a GPU's times count: its clocks rise from idle, and fall to what its power allows."""

Progress = Callable[[int, int, str], None]
"""Called with the number of finished layers, the number of all layers, and the path of the next layer."""


@dataclass(frozen=True)
class ProfileRequest:
    """How to profile a model, and for which cluster. None stands for this machine's value (``target_of``).

    microbatch, batch: in samples. layers: patterns of module paths. degrees: tensor-parallel degrees above 1.
    """

    microbatch: int
    device: str
    layers: Sequence[str] = ()
    inputs: Sequence[Declared] = ()
    degrees: Sequence[int] = ()
    repeats: Repeats = Repeats(count=20, warm_up=5)
    devices: int | None = None
    batch: int | None = None
    memory_bytes: float | None = None
    bandwidth_bytes_per_s: float | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class Profile:
    """An instance with the data that it was made from. shards: the layers of a shard by degree; None if they are
    estimated.
    parameters: the numbers in the model's parameters, each parameter once. unused: how many of them are in no layer.
    is_bare: the whole model was traced without values, and each kind of layer got values of its own. load: the
    machine's load before the profile began.
    """

    instance: Instance
    layers: Sequence[Measured]
    shards: Mapping[int, Sequence[Measured] | None]
    target: ProfileTarget
    workspace_bytes: float
    device: torch.device
    parameters: int
    unused: int
    is_bare: bool
    load: float | None


def device_of(name: str) -> torch.device:
    """The device with this name. Raises UsageError if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise UsageError(
            f"--device cuda: torch {torch.__version__} (built {build}) finds no GPU; expected --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """``NVIDIA H200``; ``x86_64 CPU, 2 threads``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"


@contextmanager
def as_a_rank(request: ProfileRequest) -> Iterator[None]:
    """A context in which torch computes on a CPU as in a rank of ``run``: it keeps freed memory, and has as many
    threads as a rank gets when the planned devices share the cores. OMP_NUM_THREADS overrides this, and so do settings
    in the model's own module."""
    if request.device != "cpu":
        yield
        return
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(before, share_of_cores(request.devices or 1)))
    try:
        with keeping_freed_memory():
            yield
    finally:
        torch.set_num_threads(before)


def store_of(factory: Factory, request: ProfileRequest, path: Path) -> Store:
    """The file of partial figures for this model with these settings on this machine."""
    source = None if factory.path is None else hashlib.sha256(factory.path.read_bytes()).hexdigest()
    return Store(
        path,
        {
            "model": factory.spec,
            "source of the model": source,
            "arguments": {key: repr(value) for key, value in factory.arguments.items()},
            "microbatch": request.microbatch,
            "inputs": [repr(one) for one in request.inputs],
            "repeats": [request.repeats.warm_up, request.repeats.count, _CHAIN],
            "device": device_name(device_of(request.device)),
            "torch": torch.__version__,
        },
    )


def profile(factory: Factory, request: ProfileRequest, hardware: Hardware, store: Store, progress: Progress) -> Profile:
    """Profiles the factory's model. Raises UsageError, InputError and LimitError."""
    load = machine_load()
    device = device_of(request.device)
    target = target_of(request, hardware, device)
    degrees = (1, *request.degrees) if factory.takes_tensor_parallel else (1,)
    room = room_bytes(device)
    models = {t: factory.build_within(request.microbatch, device, request.inputs, room, t) for t in degrees}
    traced = {t: layers_of(factory.spec, model, request.layers) for t, model in models.items()}
    for t, layers in traced.items():
        _check_shard(factory.spec, t, layers, traced[1])
    total, done = sum(map(len, traced.values())), 0

    def advance(layer: TracedLayer) -> None:
        nonlocal done
        progress(done, total, layer.path)
        done += 1

    measured = {
        t: measured_layers(factory.spec, layers, request.repeats, device, store, advance)
        for t, layers in traced.items()
    }
    progress(total, total, "")
    shards = {t: measured.get(t) for t in request.degrees}
    instance, workspace_bytes = instance_of(factory.name, measured[1], shards, target)
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return Profile(
        instance=replace(instance, measured_threads=threads),
        layers=measured[1],
        shards=shards,
        target=target,
        workspace_bytes=workspace_bytes,
        device=device,
        parameters=sum(parameter.numel() for parameter in models[1].module.parameters()),
        unused=_unused(models[1], traced[1]),
        is_bare=any(one.is_meta for one in models[1].module.parameters()),
        load=load,
    )


def measured_layers(
    spec: str,
    layers: Sequence[TracedLayer],
    repeats: Repeats,
    device: torch.device,
    store: Store,
    advance: Callable[[TracedLayer], None],
) -> list[Measured]:
    """Figures of every layer, in order. A layer that was traced without values gets values on the device while it is
    measured. ``advance`` is called before each layer. Raises InputError and LimitError."""
    clock = clock_of(device)
    if device.type == "cuda":
        repeats = replace(repeats, warm_up_s=_SUSTAINED_S)
    found: list[Measured] = []
    for number, layer in enumerate(layers):
        advance(layer)
        gradients = [
            tensor.is_floating_point()
            and source.layer is not None
            and found[source.layer].figures.output_gradients[source.output]
            for source, tensor in zip(layer.sources, layer.inputs, strict=True)
        ]
        signature = signature_of(layer, gradients)
        figures = store.get(signature)
        if figures is None:
            followers = _followers(layers, number, signature, gradients)
            figures = _figures_of(spec, layer, device, gradients, repeats, clock, followers)
            store.add(signature, figures)
        found.append(Measured(layer, signature, figures))
    return found


def _followers(
    layers: Sequence[TracedLayer], number: int, signature: str, gradients: Sequence[bool]
) -> Sequence[TracedLayer]:
    """The next layers that equal this one, including the gradients of inputs, and that each read the output of the
    layer before."""
    behind = layers[number + 1 : number + _CHAIN]
    for count, layer in enumerate(behind):
        is_like = len(layer.inputs) == len(gradients) and signature_of(layer, gradients) == signature
        handed = [wanted for one, wanted in zip(layer.sources, gradients, strict=False) if one.layer == number + count]
        if not (is_like and handed and all(handed)):
            return behind[:count]
    return behind


def _figures_of(
    spec: str,
    layer: TracedLayer,
    device: torch.device,
    gradients: Sequence[bool],
    repeats: Repeats,
    clock: Clock,
    followers: Sequence[TracedLayer],
) -> LayerFigures:
    try:
        layer = on_device(layer, device)
        leaves, given = leaves_of(layer.inputs, gradients)
        versions = [tensor._version for tensor in given]
        kept, output_gradients = kept_of(layer, given)
        # An input that a layer has written into cannot be its checkpoint.
        intact = versions == [tensor._version for tensor in given]
        with torch.no_grad():
            output_bytes = tuple(output.numel() * output.element_size() for output in layer.module(*leaves))
        del leaves, given
        if not intact or output_gradients != [True]:
            followers = ()
        weights_bytes = sum(one.numbers * one.number_bytes for one in parameters_of(layer.module))
        each_bytes = 2 * weights_bytes + kept.saved + sum(output_bytes)  # with gradients
        most = int(room_bytes(device) // max(1, each_bytes))
        plain, recomputed = passes_of(
            layer,
            gradients,
            repeats,
            clock,
            recompute=intact and kept.inputs < kept.saved,
            followers=[on_device(one, device) for one in followers[: max(0, most - 1)]],
        )
        return LayerFigures(
            plain=plain,
            recomputed=recomputed,
            kept=kept,
            parameters=tuple(parameters_of(layer.module)),
            output_gradients=tuple(output_gradients),
            output_bytes=output_bytes,
            input_gradient_bytes=sum(
                tensor.numel() * tensor.element_size()
                for tensor, wanted in zip(layer.inputs, gradients, strict=True)
                if wanted
            ),
        )
    except torch.OutOfMemoryError as error:
        raise out_of_memory(spec, f"layer {layer.path}") from error
    except Exception as error:
        where = place_of(error)
        raise InputError(spec, [Fault(layer.path, words_of(error) + (f" ({where})" if where else ""))]) from error


def target_of(request: ProfileRequest, hardware: Hardware, device: torch.device) -> ProfileTarget:
    """The cluster and the batch, as requested or as this machine has them. Raises UsageError."""
    gpu = hardware.gpu(request.gpu) if request.gpu is not None else _recognised(hardware, device)
    if request.degrees and gpu is None:
        raise UsageError(
            "--tensor-parallel: the rate between devices is taken from the table of hardware; expected --gpu NAME, "
            f"one of {', '.join(hardware.gpus)} (--hardware FILE adds others)"
        )
    devices = request.devices or (torch.cuda.device_count() if device.type == "cuda" else 1)
    batch = request.batch or request.microbatch * _MICROBATCHES
    if batch % request.microbatch:
        raise UsageError(
            f"--global-batch {batch} is no multiple of --microbatch-size {request.microbatch}; expected one"
        )
    memory_bytes = request.memory_bytes if request.memory_bytes is not None else _memory_bytes(device)
    if request.bandwidth_bytes_per_s is not None or gpu is None:
        links: tuple[Link, ...] = (Link(request.bandwidth_bytes_per_s or _BYTES_PER_S),)
    else:
        links = links_of(gpu, gpu.domain_of(None))
    return ProfileTarget(
        cluster=Cluster(devices, memory_bytes, links),
        batch=Batch(batch // request.microbatch, request.microbatch),
        gpu=gpu,
        training=hardware.training,
    )


def _memory_bytes(device: torch.device) -> float:
    """The part of a device's memory that a plan may use; for a GPU without context, communicators and fragments."""
    if device.type == "cuda":
        whole = float(torch.cuda.get_device_properties(device).total_memory)
        return whole - DEFAULT.reserve_bytes(whole)  # as in ``estimate``
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _recognised(hardware: Hardware, device: torch.device) -> Gpu | None:
    """The GPU of the table that fits the driver's name; None if there is none."""
    if device.type != "cuda":
        return None
    key = find_gpu(torch.cuda.get_device_name(device), hardware.gpus)
    return None if key is None else hardware.gpus[key]


def _check_shard(spec: str, degree: int, layers: Sequence[TracedLayer], whole: Sequence[TracedLayer]) -> None:
    """Raises InputError unless a shard's layers match those of the whole model one by one."""
    if [(layer.path, layer.sources) for layer in layers] != [(layer.path, layer.sources) for layer in whole]:
        what = f"{len(layers)} layers that are not those of the whole model, which has {len(whole)}"
        fault = Fault(f"tensor_parallel={degree}", f"{what}; expected the same modules in the same order")
        raise InputError(spec, [fault])


def _unused(model: TrainableModel, layers: Sequence[TracedLayer]) -> int:
    used = {id(parameter) for layer in layers for parameter in layer.module.parameters()}
    return sum(parameter.numel() for parameter in model.module.parameters() if id(parameter) not in used)
