"""Which model a workload trains, and how: what launch files say and the layers' figures do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainedModel:
    """The model that a workload's figures are of, and how it is trained.

    config: the keys of its Hugging Face config that count here, ``model_type`` among them; plain values. precision: of
    matrix products: bf16, fp16 or fp8. software: the generation of training software that the times are
    of. gpu: the device they are of, by its key in the table of hardware. lora_rank: of adapters that are trained in
    the model's place; 0: the model itself is trained. fused_attention: attention is one kernel. context_exchange: how
    groups that share a sequence attend to all of it. weight_bytes, gradient_bytes, optimizer_bytes: kept for each
    parameter.

    >>> TrainedModel({"model_type": "llama"}).precision
    'bf16'
    """

    config: Mapping[str, object] = field(default_factory=dict)
    precision: str = "bf16"
    software: str = "megatron-core"
    gpu: str = ""
    lora_rank: int = 0
    fused_attention: bool = True
    context_exchange: str = "ring"
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0

    @property
    def scales_by_blocks(self) -> bool:
        """Whether products of 8 bits on its device have scales for blocks of 32 numbers (MXFP8): Blackwell's have."""
        return self.gpu.startswith(("B", "GB"))
