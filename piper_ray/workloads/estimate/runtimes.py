"""How training runtimes hold memory, beside the formulas of layers: states, losses, buffers, fragments, context.

``StateBytes`` is what training keeps for each parameter between steps, by runtime and precision, and which of it
replicas share out. Sources: Megatron-Core's developer guide, "Distributed Optimizer" (18 bytes a parameter with fp32
gradients, of which 12/d can be sharded; 20 with half-precision ones, of which 4 are the fp32 copy of gradients that a
step makes); Rajbhandari et al. 2020, section 3.1 (ZeRO: 2 + 2 + 12); DeepSpeed's BF16_Optimizer, which accumulates in
fp32 beside the gradients of the backward pass; PyTorch's fully_shard with fp32 parameters and Adam (16)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model.mode import Sharding


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter. accumulated: a second, wider copy of the gradients, summed over microbatches. step: of the
    copy of gradients that the optimizer makes for its step, sharded as its state is."""

    weights: float = 2.0
    gradients: float = 4.0
    accumulated: float = 0.0
    optimizer: float = 12.0
    step: float = 0.0

    def held(self, sharding: Sharding, shards: float) -> dict[str, float]:
        """Bytes a parameter on each device, by item, of state shared by so many replicas."""

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
        """What a step takes beside that, a parameter."""
        return self.step / (shards if sharding >= Sharding.OPTIMIZER else 1.0)


MEGATRON = StateBytes()
"""Half-precision weights, gradients summed in fp32; fp32 weights, momentum and variance."""

HALF_GRADIENTS = StateBytes(gradients=2.0, step=4.0)
"""Gradients in half precision: Megatron's fp16 and NeMo's recipes for speed (grad_reduce_in_fp32 = False), ZeRO."""

DEEPSPEED_BF16 = StateBytes(gradients=2.0, accumulated=4.0)
"""Megatron-DeepSpeed in bf16: gradients of the backward pass in bf16, and their sum in fp32."""

FULLY_SHARDED = StateBytes(weights=4.0, gradients=4.0, optimizer=8.0)
"""PyTorch's FSDP with mixed precision: what is sharded is fp32; bf16 weights are made when they are gathered."""


MIB = 2.0**20
GIB = 2.0**30


_PLANNED_GROUPS = 3
_PASSING = 0.6
"""Of a device: groups of tensor, data and pipeline parallelism, and the share that is no state of parameters."""


class Loss(Enum):
    """Of logits in half precision. IN_PLACE: in fp32, whose softmax turns into their gradient, which is handed on in
    half precision (Megatron). FUSED: their gradient takes their place (TransformerEngine's cross entropy). SEPARATE:
    softmax and its gradient are two tensors in fp32 (PyTorch's cross_entropy).
    """

    IN_PLACE = "in place"
    FUSED = "fused"
    SEPARATE = "separate"


@dataclass(frozen=True)
class Traits:
    """What differs between runtimes. The defaults are Megatron's.

    loss: how it is computed here. fp8: products of layers keep their inputs in a byte a number.
    reused_gradients: a product whose gradient of weights is summed in place still hands autograd a tensor of that
    shape, one for each shape, for good (TransformerEngine since 2.3). context_all_to_all: context parallelism sends
    heads about, not keys and values around a ring.

    workspace_bytes: of matrix products; grouped_workspace_bytes: of experts' besides. buffers_bytes: to reduce and
    gather in. context_bytes: of the GPU, for CUDA's context and kernels; communicator_bytes: of each group of ranks
    that exchange something. fragments: what the allocator holds beyond what is in use, as a share of all that is no
    state; grouped_fragments: the same with experts, whose tokens are sent about; stuck: what it cannot give back of
    that when memory runs out.
    """

    states: StateBytes = MEGATRON
    loss: Loss = Loss.IN_PLACE
    fp8: bool = False
    reused_gradients: bool = False
    context_all_to_all: bool = False
    workspace_bytes: float = 64.0 * MIB
    grouped_workspace_bytes: float = 128.0 * MIB
    buffers_bytes: float = 0.0
    context_bytes: float = 0.75 * GIB
    communicator_bytes: float = 0.4 * GIB
    fragments: float = 0.18
    grouped_fragments: float = 0.4
    stuck: float = 0.05

    def reserve_bytes(self, device_bytes: float) -> float:
        """What a planner leaves free of a device of which it knows no more: for context, products' workspace,
        communicators of three groups, and what is stuck if of the device's memory so much comes and goes."""
        communicators = _PLANNED_GROUPS * self.communicator_bytes
        return self.context_bytes + communicators + self.workspace_bytes + self.stuck * _PASSING * device_bytes


DEFAULT = Traits()

MEGATRON_CORE = Traits(reused_gradients=True)

MEGATRON_CORE_FP16 = Traits(HALF_GRADIENTS, reused_gradients=True)

NEMO = Traits(HALF_GRADIENTS)
"""NeMo's and Megatron-Bridge's recipes for speed: gradients are summed and reduced in bf16."""

MEGATRON_2021 = Traits()

MEGATRON_2021_FP16 = Traits(HALF_GRADIENTS)

_BUCKET_NUMBERS = 5e8
_DEEPSPEED_BUFFERS_BYTES = _BUCKET_NUMBERS * (4.0 + 2.0)
"""DeepSpeed's pipelines reduce gradients, and its ZeRO gathers weights, in buckets of 5e8 numbers by default
(MEMORY_OPT_ALLREDUCE_SIZE, allgather_bucket_size): fp32 gradients, bf16 weights."""

_DEEPSPEED_COMMUNICATOR_BYTES = 1.0 * GIB
"""Each pair of neighbouring stages is a group of its own, and NCCL before 2.12 sets up all channels of each."""

DEEPSPEED = Traits(
    DEEPSPEED_BF16, buffers_bytes=_DEEPSPEED_BUFFERS_BYTES, communicator_bytes=_DEEPSPEED_COMMUNICATOR_BYTES
)

DEEPSPEED_FP16 = Traits(
    HALF_GRADIENTS, buffers_bytes=_DEEPSPEED_BUFFERS_BYTES, communicator_bytes=_DEEPSPEED_COMMUNICATOR_BYTES
)

FSDP = Traits(FULLY_SHARDED, loss=Loss.SEPARATE)

HAI_LLM = Traits(StateBytes(optimizer=8.0))
"""DeepSeek-V3's own (DeepSeek-AI 2024, sections 3.2.3 and 3.3.2): moments in bf16; norms, activation functions and what
latent attention makes of its latent vectors are made again."""
