"""What training keeps for each parameter between steps, by runtime and precision, and which of it replicas share out.

Sources: Megatron-Core's developer guide, "Distributed Optimizer" (18 bytes a parameter with fp32 gradients, of which
12/d can be sharded; 20 with half-precision ones, of which 4 are the fp32 copy of gradients that a step makes);
Rajbhandari et al. 2020, section 3.1 (ZeRO: 2 + 2 + 12); DeepSpeed's BF16_Optimizer, which accumulates in fp32 beside
the gradients of the backward pass; PyTorch's fully_shard with fp32 parameters and Adam (16).
"""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.mode import Sharding


@dataclass(frozen=True)
class States:
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


MEGATRON = States()
"""Half-precision weights, gradients summed in fp32; fp32 weights, momentum and variance."""

HALF_GRADIENTS = States(gradients=2.0, step=4.0)
"""Gradients in half precision: Megatron's fp16 and NeMo's recipes for speed (grad_reduce_in_fp32 = False), ZeRO."""

DEEPSPEED_BF16 = States(gradients=2.0, accumulated=4.0)
"""Megatron-DeepSpeed in bf16: gradients of the backward pass in bf16, and their sum in fp32."""

FULLY_SHARDED = States(weights=4.0, gradients=4.0, optimizer=8.0)
"""PyTorch's FSDP with mixed precision: what is sharded is fp32; bf16 weights are made when they are gathered."""
