"""From measured layers to an instance that can be planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from piper_ray.model.cluster import Cluster
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tmpc
from piper_ray.model.schedule import TRAINED_TODAY
from piper_ray.workloads.estimate.costs import Setting, edge_bytes, sync_bytes, times_of
from piper_ray.workloads.estimate.hardware import Gpu, Training
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.software import DEFAULT_SOFTWARE, Stack, software_named
from piper_ray.workloads.measure.degrees import Way, estimated_ways, measured_ways, shard_ways
from piper_ray.workloads.measure.measure import Measured


@dataclass(frozen=True)
class ProfileTarget:
    """What the layers are to run on, before any memory is set aside.

    gpu: whose links t devices use; None where only t = 1 is wanted.
    """

    cluster: Cluster
    batch: Batch
    gpu: Gpu | None
    training: Training


def instance_of(
    name: str,
    layers: Sequence[Measured],
    shards: Mapping[int, Sequence[Measured] | None],
    target: ProfileTarget,
) -> tuple[Instance, float]:
    """The workload, and the bytes set aside of each device's memory for recomputing one layer.

    shards: for each degree above 1 the layers of a shard, or None where they are to be estimated. Raises UsageError
    if memory is not enough for that.
    """
    ways = [_ways_of(index, layer, shards, target) for index, layer in enumerate(layers)]
    workspace_bytes = max(way.transient_bytes for of_layer in ways for way in of_layer)
    memory_bytes = target.cluster.memory_bytes
    if workspace_bytes >= memory_bytes:
        raise UsageError(
            f"recomputing one layer takes {workspace_bytes:,.0f} bytes, more than --memory; expected a smaller "
            "--microbatch-size or more memory"
        )
    largest = max([1, *shards])
    sent, tied = _sent_bytes(layers), _tied(layers)
    instance = Instance(
        layers=tuple(
            Layer(
                index,
                measured.layer.name,
                _tmpcs(index, ways[index], sent, target, largest),
                measured.layer.path,
                tied.get(index, ""),
            )
            for index, measured in enumerate(layers)
        ),
        edges=tuple(Edge(u, v, float(math.ceil(_edge_bytes(size, target, largest)))) for (u, v), size in sent.items()),
        cluster=replace(target.cluster, memory_bytes=float(int(memory_bytes - workspace_bytes))),
        batch=target.batch,
        name=name,
        schedule=TRAINED_TODAY,
    )
    return instance, workspace_bytes


def _ways_of(
    index: int, layer: Measured, shards: Mapping[int, Sequence[Measured] | None], target: ProfileTarget
) -> list[Way]:
    ways = list(measured_ways(layer.figures, target.training))
    for degree, of_degree in shards.items():
        assert target.gpu is not None
        if of_degree is None:
            ways += estimated_ways(layer.figures, degree, target.training, target.gpu)
        else:
            ways += shard_ways(of_degree[index].figures, layer.figures, degree, target.training, target.gpu)
    return ways


def _tied(layers: Sequence[Measured]) -> dict[int, str]:
    """Of the layers that have a parameter in common with others its name, as the first of them calls it."""
    owners: dict[int, tuple[str, list[int]]] = {}
    for index, measured in enumerate(layers):
        for name, parameter in measured.layer.module.named_parameters():
            owners.setdefault(id(parameter), (name, []))[1].append(index)
    tied: dict[int, str] = {}
    for name, members in owners.values():
        if len(members) > 1:
            common = next((tied[index] for index in members if index in tied), name)
            tied |= dict.fromkeys(members, common)
    return tied


def _sent_bytes(layers: Sequence[Measured]) -> dict[tuple[int, int], float]:
    """Bytes of each edge, by (source, target), targets ascending.

    A tensor without gradient goes one way only, where c is charged for both.
    """
    sent: dict[tuple[int, int], float] = {}
    for target, measured in enumerate(layers):
        for source in measured.layer.sources:
            if source.layer is not None:
                figures = layers[source.layer].figures
                both = 1.0 if figures.output_gradients[source.output] else 0.5
                edge = (source.layer, target)
                sent[edge] = sent.get(edge, 0.0) + both * figures.output_bytes[source.output]
    return sent


def _tmpcs(
    index: int, ways: Sequence[Way], sent: Mapping[tuple[int, int], float], target: ProfileTarget, largest: int
) -> dict[int, tuple[Tmpc, ...]]:
    tmpcs: dict[int, tuple[Tmpc, ...]] = {}
    for way in ways:
        extra = {edge: float(math.ceil(_sync_bytes(size, way, target, largest))) for edge, size in sent.items()}
        tmpc = Tmpc(
            id=way.id,
            **times_of(way.time_s, way.forward_s),
            weights_bytes=float(math.ceil(way.gradient_bytes)),
            activation_bytes=float(math.ceil(way.activation_bytes)),
            fixed_bytes=float(math.ceil(way.state_bytes)),
            forward_sync_bytes={u: size for (u, v), size in extra.items() if v == index},
            backward_sync_bytes={v: size for (u, v), size in extra.items() if u == index},
            recompute=way.recompute,
        )
        tmpcs[way.degree] = (*tmpcs.get(way.degree, ()), tmpc)
    return tmpcs


def _setting(target: ProfileTarget, largest: int) -> Setting:
    assert target.gpu is not None
    microbatches, bytes_per_s = target.batch.microbatches, target.cluster.bandwidth_bytes_per_s
    stack = Stack(target.gpu, software_named(DEFAULT_SOFTWARE))
    return Setting(stack, target.training, microbatches, bytes_per_s, 0.0, largest)


def _edge_bytes(size: float, target: ProfileTarget, largest: int) -> float:
    return edge_bytes(size, _setting(target, largest)) if largest > 1 else size


def _sync_bytes(size: float, way: Way, target: ProfileTarget, largest: int) -> float:
    return sync_bytes(size, LayerMode(degree=way.degree), _setting(target, largest)) if largest > 1 else 0.0
