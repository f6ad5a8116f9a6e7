"""How training runtimes hold memory on each rank: states of parameters, buffers, fragments.

``StateBytes`` is what training keeps for each parameter between steps, by runtime and precision, and which of it
replicas share out. Sources: Megatron-Core's developer guide, "Distributed Optimizer" (18 bytes a parameter with fp32
gradients, of which 12/d can be sharded; 20 with half-precision ones, of which 4 are the fp32 copy of gradients that a
step makes); Rajbhandari et al. 2020, section 3.1 (ZeRO: 2 + 2 + 12); DeepSpeed's BF16_Optimizer, which accumulates in
fp32 beside the gradients of the backward pass; PyTorch's fully_shard with fp32 parameters and Adam (16)."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.mode import Sharding
from piper_ray.workloads.estimate.runtimes import GIB, MIB, Loss, Traits


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


@dataclass(frozen=True)
class Runtime(Traits):
    """What differs between runtimes on each rank. The defaults are Megatron's.

    reused_gradients: a product whose gradient of weights is summed in place still hands autograd a tensor of that
    shape, one for each shape, for good (TransformerEngine since 2.3). grouped_workspace_bytes: of experts' products
    besides those of others. buffers_bytes: to reduce and gather in. fragments: what the allocator holds beyond what is
    in use, as a share of all that is no state; grouped_fragments: the same with experts, whose tokens are sent about.
    """

    states: StateBytes = MEGATRON
    reused_gradients: bool = False
    grouped_workspace_bytes: float = 128.0 * MIB
    buffers_bytes: float = 0.0
    fragments: float = 0.18
    grouped_fragments: float = 0.4


MEGATRON_2021 = Runtime()

MEGATRON_2021_FP16 = Runtime(states=HALF_GRADIENTS)

MEGATRON_CORE = Runtime(reused_gradients=True)

MEGATRON_CORE_FP16 = Runtime(states=HALF_GRADIENTS, reused_gradients=True)

NEMO = Runtime(states=HALF_GRADIENTS)
"""NeMo's and Megatron-Bridge's recipes for speed: gradients are summed and reduced in bf16."""

_BUCKET_NUMBERS = 5e8
_DEEPSPEED_BUFFERS_BYTES = _BUCKET_NUMBERS * (4.0 + 2.0)
"""DeepSpeed's pipelines reduce gradients, and its ZeRO gathers weights, in buckets of 5e8 numbers by default
(MEMORY_OPT_ALLREDUCE_SIZE, allgather_bucket_size): fp32 gradients, bf16 weights."""

_DEEPSPEED_COMMUNICATOR_BYTES = 1.0 * GIB
"""Each pair of neighbouring stages is a group of its own, and NCCL before 2.12 sets up all channels of each."""

DEEPSPEED = Runtime(
    states=DEEPSPEED_BF16, buffers_bytes=_DEEPSPEED_BUFFERS_BYTES, communicator_bytes=_DEEPSPEED_COMMUNICATOR_BYTES
)

DEEPSPEED_FP16 = Runtime(
    states=HALF_GRADIENTS, buffers_bytes=_DEEPSPEED_BUFFERS_BYTES, communicator_bytes=_DEEPSPEED_COMMUNICATOR_BYTES
)

FSDP = Runtime(states=FULLY_SHARDED, loss=Loss.SEPARATE)

HAI_LLM = Runtime(states=StateBytes(optimizer=8.0))
"""DeepSeek-V3's own (DeepSeek-AI 2024, sections 3.2.3 and 3.3.2): moments in bf16; norms, activation functions and what
latent attention makes of its latent vectors are made again."""
