"""How training runtimes hold memory, beside the formulas of layers: losses, copies, context and what is stuck."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MIB = 2.0**20
GIB = 2.0**30

_PLANNED_GROUPS = 3
"""The groups that a device is in: of tensor, data and pipeline parallelism."""
_PASSING = 0.6
"""The share of a device's memory that holds no state of parameters."""


class Loss(Enum):
    """How the loss of logits in half precision is computed. IN_PLACE: in fp32, whose softmax turns into the gradient,
    which is handed on in half precision (Megatron). FUSED: the gradient takes the logits' place (TransformerEngine's
    cross entropy). SEPARATE: softmax and its gradient are two tensors in fp32 (PyTorch's cross_entropy).
    """

    IN_PLACE = "in place"
    FUSED = "fused"
    SEPARATE = "separate"


@dataclass(frozen=True)
class Traits:
    """What differs between runtimes. The defaults are Megatron's.

    loss: how the runtime computes the loss. fp8: products of layers keep their inputs in a byte a number.
    context_all_to_all: context parallelism sends heads about, not keys and values around a ring. workspace_bytes: the
    workspace of matrix products. context_bytes: the bytes of the GPU for CUDA's context and kernels.
    communicator_bytes: the bytes for each group of ranks that exchange something. stuck: what the allocator cannot give
    back when memory runs out, as a share of all that is no state.
    """

    loss: Loss = Loss.IN_PLACE
    fp8: bool = False
    context_all_to_all: bool = False
    workspace_bytes: float = 64.0 * MIB
    context_bytes: float = 0.75 * GIB
    communicator_bytes: float = 0.4 * GIB
    stuck: float = 0.05

    def reserve_bytes(self, device_bytes: float) -> float:
        """What a planner leaves free of a device of which it knows no more: for context, products' workspace,
        communicators of three groups, and what is stuck if of the device's memory so much comes and goes."""
        communicators = _PLANNED_GROUPS * self.communicator_bytes
        return self.context_bytes + communicators + self.workspace_bytes + self.stuck * _PASSING * device_bytes


DEFAULT = Traits()
