"""The memory of training runtimes outside the formulas of layers: parameters' states, losses, copies, buffers, context,
fragments and memory that the allocator cannot free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from typing import Any

from piper_ray.model.mode import Sharding
from piper_ray.workloads.formats.documents import package_table, with_bases

MIB = 2.0**20
GIB = 2.0**30

_PLANNED_GROUPS = 3
"""The groups that each device is a member of: tensor, data and pipeline parallelism."""
_PASSING = 0.6
"""The share of a device's memory that holds no state of parameters."""


class Loss(Enum):
    """How the loss of logits in half precision is computed. IN_PLACE: in fp32, whose softmax turns into the gradient,
    which is handed on in half precision (Megatron). FUSED: the gradient takes the logits' place (TransformerEngine's
    cross entropy). SEPARATE: the softmax, its gradient and that of the loss are tensors in fp32 of their own
    (PyTorch's cross_entropy).
    """

    IN_PLACE = "in place"
    FUSED = "fused"
    SEPARATE = "separate"


@dataclass(frozen=True)
class StateBytes:
    """Bytes that training keeps for each parameter between steps, in half precision with fp32 sums.

    accumulated: a second, wider copy of the gradients, summed over microbatches. step: the copy of gradients that the
    optimizer makes for its step, sharded like its state.
    """

    weights: float = 2.0
    gradients: float = 4.0
    accumulated: float = 0.0
    optimizer: float = 12.0
    step: float = 0.0

    def held(self, sharding: Sharding, shards: float) -> dict[str, float]:
        """The bytes per parameter on each device, by item, of state that ``shards`` replicas share."""

        def share(of: Sharding) -> float:
            return shards if sharding >= of else 1.0

        items = {
            "weights": self.weights / share(Sharding.WEIGHTS),
            "gradients": self.gradients / share(Sharding.GRADIENTS),
            "accumulated gradients": self.accumulated / share(Sharding.GRADIENTS),
            "optimizer state": self.optimizer / share(Sharding.OPTIMIZER),
        }
        return {name: size for name, size in items.items() if size}

    def step_bytes(self, sharding: Sharding, shards: float) -> float:
        """The further bytes per parameter that the optimizer's step takes."""
        return self.step / (shards if sharding >= Sharding.OPTIMIZER else 1.0)


@dataclass(frozen=True)
class Traits:
    """What differs between runtimes. The defaults are Megatron's.

    loss: how the runtime computes the loss. fp8: products of layers keep their inputs in a byte a number.
    context_all_to_all: context parallelism sends heads about, not keys and values around a ring. states: of parameters.
    reused_gradients: autograd keeps a tensor of the shape of each weight whose gradient is summed in place.
    workspace_bytes: the workspace of matrix products; grouped_workspace_bytes: of experts' besides. buffers_bytes: to
    reduce and gather in. context_bytes: the bytes of the GPU for CUDA's context and kernels. communicator_bytes: the
    bytes for each group of ranks that exchange something. stuck: what the allocator cannot give back when memory runs
    out, as a share of all that is no state. fragments: what it holds beyond what is in use, as such a share;
    grouped_fragments: the same with experts, whose tokens are sent about. logs_reserved: its logs have what the
    allocator reserves, in GiB.
    """

    def __hash__(self) -> int:
        return hash((self.fp8, self.context_all_to_all))  # of all fields it takes a third of an estimate

    loss: Loss = Loss.IN_PLACE
    fp8: bool = False
    context_all_to_all: bool = False
    states: StateBytes = StateBytes()
    reused_gradients: bool = False
    workspace_bytes: float = 64.0 * MIB
    grouped_workspace_bytes: float = 128.0 * MIB
    buffers_bytes: float = 0.0
    fragments: float = 0.18
    grouped_fragments: float = 0.4
    context_bytes: float = 0.75 * GIB
    communicator_bytes: float = 0.4 * GIB
    stuck: float = 0.05
    logs_reserved: bool = False

    def reserve_bytes(self, device_bytes: float) -> float:
        """The memory that a planner leaves free if it knows no more: context, workspace of products, communicators of
        three groups, and what gets stuck if the usual share of the memory comes and goes."""
        communicators = _PLANNED_GROUPS * self.communicator_bytes
        return self.context_bytes + communicators + self.workspace_bytes + self.stuck * _PASSING * device_bytes


DEFAULT = Traits()


def held_by(software: str, *, half: bool = False) -> Traits | None:
    """How a generation of software holds memory in bf16, or in fp16 (half); None if ``runtimes.toml`` lacks it."""
    row = _rows().get(software)
    if row is None:
        return None
    named = {**row, **row.get("half", {})} if half else row
    states = StateBytes(**{one.name: float(named[one.name]) for one in fields(StateBytes) if one.name in named})
    return replace(
        DEFAULT,
        states=states,
        loss=Loss(named.get("loss", DEFAULT.loss.value)),
        reused_gradients=bool(named.get("reused_gradients", False)),
        logs_reserved=bool(named.get("logs_reserved", False)),
        buffers_bytes=float(named.get("buffers", 0.0)),
        communicator_bytes=float(named.get("communicator", DEFAULT.communicator_bytes)),
        stuck=float(named.get("stuck", DEFAULT.stuck)),
    )


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    return with_bases(package_table("piper_ray.workloads.estimate", "runtimes.toml"))
