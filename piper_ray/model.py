"""The problem: layers, their configurations, edges, and the cluster they are to run on (Piper, section 3).

Plain frozen data. ``formats`` builds it from files and checks it; nothing here reads, solves or prints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

_EMPTY: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class Tmpc:
    """A tensor model parallelism configuration: one way to run one layer on t devices.

    time_per_sample_s: p, forward and backward, on the t devices together.
    weights_bytes: w, on each device.
    activation_bytes: a, on each device and for each microbatch in flight; memory is a*y + b.
    fixed_bytes: b, on each device.
    forward_sync_bytes: fw, for each predecessor's layer id, on top of the edge's cost.
    backward_sync_bytes: bw, for each successor's layer id, on top of the edge's cost.
    recompute: the configuration recomputes activations in the backward pass.
    shared_bytes: what the d replicas of a stage share out among them: each holds a d-th. With it memory is
    a*y + b + shared/d.
    least_data_parallel_degree: the configuration is there only in stages of at least so many replicas.
    """

    id: str
    time_per_sample_s: float
    weights_bytes: float
    activation_bytes: float
    fixed_bytes: float
    forward_sync_bytes: Mapping[int, float] = field(default_factory=lambda: _EMPTY)
    backward_sync_bytes: Mapping[int, float] = field(default_factory=lambda: _EMPTY)
    recompute: bool = False
    shared_bytes: float = 0.0
    least_data_parallel_degree: int = 1


@dataclass(frozen=True)
class Layer:
    """A node of the DNN's graph. ``tmpcs[t]`` lists the configurations for tensor-parallel degree t."""

    id: int
    name: str
    tmpcs: Mapping[int, tuple[Tmpc, ...]]


@dataclass(frozen=True)
class Edge:
    """A tensor that layer ``source`` hands to layer ``target``: c bytes per sample when it crosses stages."""

    source: int
    target: int
    communication_bytes: float


@dataclass(frozen=True)
class Tensor:
    """A tensor with several ends that each stage sends or receives once, however many of its layers make or use it.

    Its makers and users are ``layers``, in any order. A stage with some of them and not all has to move it:
    ``forward_bytes`` per sample in the forward pass, ``backward_bytes`` in the backward pass. It sets no order of the
    stages: edges do. An edge's own bytes, in contrast, are charged for each edge, as Piper does.
    """

    layers: tuple[int, ...]
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True)
class Instance:
    """Everything a plan depends on. Layers and edges keep the order of the file.

    tensors: what is charged once for each stage, beside what is charged for each edge.
    notes: what its reader assumed or changed, a sentence each; no matter of what a plan costs.
    devices: K. microbatches: N, in a batch. memory_bytes: M, of each device.
    bandwidth_bytes_per_s: B, from a device to the outside.
    """

    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    devices: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    name: str = ""
    tensors: tuple[Tensor, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def replace(
        self,
        *,
        devices: int | None = None,
        microbatches: int | None = None,
        memory_bytes: float | None = None,
        bandwidth_bytes_per_s: float | None = None,
    ) -> Instance:
        """The same workload on another cluster; what is None stays as it is."""
        return dataclasses.replace(
            self,
            devices=self.devices if devices is None else devices,
            microbatches=self.microbatches if microbatches is None else microbatches,
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            bandwidth_bytes_per_s=(
                self.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s
            ),
        )

    @cached_property
    def layer_by_id(self) -> Mapping[int, Layer]:
        return {layer.id: layer for layer in self.layers}

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that any layer has, ascending."""
        return tuple(sorted({t for layer in self.layers for t, tmpcs in layer.tmpcs.items() if tmpcs}))

    @cached_property
    def least_data_parallel_degrees(self) -> tuple[int, ...]:
        """1, and the least data-parallel degrees that configurations ask for, ascending."""
        asked = {x.least_data_parallel_degree for layer in self.layers for xs in layer.tmpcs.values() for x in xs}
        return tuple(sorted({1, *asked}))

    @cached_property
    def data_parallel_limit(self) -> int:
        """min(N, K): no plan's data-parallel degrees sum to more."""
        return min(self.microbatches, self.devices)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every figure, in file order: two instances with one digest have the same plans."""
        document: list[object] = [
            [
                [
                    layer.id,
                    layer.name,
                    [[t, [_tmpc_figures(tmpc) for tmpc in layer.tmpcs[t]]] for t in sorted(layer.tmpcs)],
                ]
                for layer in self.layers
            ],
            [[edge.source, edge.target, edge.communication_bytes] for edge in self.edges],
            [self.devices, self.microbatches, self.memory_bytes, self.bandwidth_bytes_per_s],
        ]
        if self.tensors:
            document.append([[tensor.layers, tensor.forward_bytes, tensor.backward_bytes] for tensor in self.tensors])
        return hashlib.sha256(json.dumps(document, separators=(",", ":")).encode()).hexdigest()


def _tmpc_figures(tmpc: Tmpc) -> list[object]:
    return [
        tmpc.id,
        tmpc.time_per_sample_s,
        tmpc.weights_bytes,
        tmpc.activation_bytes,
        tmpc.fixed_bytes,
        sorted(tmpc.forward_sync_bytes.items()),
        sorted(tmpc.backward_sync_bytes.items()),
        tmpc.recompute,
        # What few instances have adds nothing where it is not there: digests on record stay what they are.
        *([tmpc.shared_bytes, tmpc.least_data_parallel_degree] if _shards(tmpc) else []),
    ]


def _shards(tmpc: Tmpc) -> bool:
    return tmpc.shared_bytes != 0.0 or tmpc.least_data_parallel_degree != 1


def divisors(number: int) -> list[int]:
    """All positive divisors of ``number``, ascending: the data-parallel degrees that N microbatches allow."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
