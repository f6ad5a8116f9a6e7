"""What each rank of a published run's layout holds, by how its software holds memory."""

from __future__ import annotations

from dataclasses import replace

from piper_ray.calibrate.layouts import Laid
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.model.mode import Sharding
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.workloads.estimate.layout import Layout, PricedLayout
from piper_ray.workloads.estimate.runtimes import Loss
from piper_ray.workloads.estimate.software import ContextExchange, Precision
from scripts.validation.ranks import RankLayout, RankMemory, memory_of_rank
from scripts.validation.runtimes import (
    DEEPSPEED,
    DEEPSPEED_FP16,
    FSDP,
    HAI_LLM,
    HALF_GRADIENTS,
    MEGATRON_2021,
    MEGATRON_2021_FP16,
    MEGATRON_CORE,
    MEGATRON_CORE_FP16,
    NEMO,
    Runtime,
)

_RUNTIMES = {
    "megatron-2021": (MEGATRON_2021, MEGATRON_2021_FP16),
    "megatron-2022": (MEGATRON_2021, MEGATRON_2021_FP16),
    "deepspeed-2021": (DEEPSPEED, DEEPSPEED_FP16),
    "megatron-core": (MEGATRON_CORE, MEGATRON_CORE_FP16),
    "megascale": (MEGATRON_CORE, MEGATRON_CORE_FP16),
    "nemo": (NEMO, NEMO),
    "gigatron-2023": (MEGATRON_CORE, MEGATRON_CORE_FP16),
    "hai-llm": (HAI_LLM, HAI_LLM),
    "maxtext": (FSDP, FSDP),
    "meta-2024": (MEGATRON_2021, MEGATRON_2021_FP16),
}
"""How each generation of software holds memory, in bf16, and in fp16; what is not named is a kind of FSDP."""


def runtime_of(run: PublishedRun, laid: Laid) -> Runtime:
    """As the run says it, else as its generation of software does."""
    precision, sharding = laid.stack.precision, laid.layout.sharding
    of_bf16, of_fp16 = _RUNTIMES.get(laid.software, (FSDP, FSDP))
    runtime = of_fp16 if precision is Precision.FP16 else of_bf16
    if runtime is FSDP and sharding is not Sharding.WEIGHTS:
        runtime = MEGATRON_2021
    if run.gradients == "bf16":
        runtime = replace(runtime, states=HALF_GRADIENTS)
    elif run.gradients == "fp32" and runtime.states == HALF_GRADIENTS:
        runtime = replace(runtime, states=MEGATRON_2021.states)
    loss = Loss.FUSED if run.loss == "fused" else runtime.loss
    by_heads = laid.stack.software.context is ContextExchange.ALL_TO_ALL
    return replace(runtime, loss=loss, fp8=precision is Precision.FP8, context_all_to_all=by_heads)


def shares_untold(laid: Laid) -> bool:
    """Whether the optimizer's state is taken for shared out without a word of it, as in all of NVIDIA's recipes."""
    return laid.software in ("nemo", "megatron-core") and laid.layout.sharding is Sharding.NONE


def memory_of(plan: PricedLayout, run: PublishedRun, laid: Laid) -> list[RankMemory]:
    """What each rank of a pipeline holds at its worst moment."""
    ranks = rank_layouts(plan, laid.layout, Sharding.OPTIMIZER if shares_untold(laid) else laid.layout.sharding)
    lists = flush_lists(plan.schedule, len(ranks), laid.layout.microbatches)
    runtime = runtime_of(run, laid)
    return [
        memory_of_rank(rank, [(ActionKind(kind).name, int(chunk)) for kind, chunk, _ in actions], runtime)
        for rank, actions in zip(ranks, lists, strict=True)
    ]


def rank_layouts(plan: PricedLayout, layout: Layout, sharding: Sharding) -> list[RankLayout]:
    """What each rank of a pipeline holds of the model."""
    of_stage = [[plan.layers[layer] for layer in stage.layers] for stage in plan.plan.stages]
    experts = max(mode.expert_ranks * mode.expert_tensor for _, mode in plan.layers)
    degrees = (layout.tensor, layout.context, layout.data, layout.pipeline, layout.expert or 1)
    return [
        RankLayout(
            chunks=[of_stage[stage] for stage in layout.schedule.stages_of_rank(rank, layout.pipeline)],
            replicas=layout.data * layout.context,
            expert_replicas=max(1, layout.tensor * layout.context * layout.data // experts),
            sharding=sharding,
            ranks=layout.pipeline,
            rank=rank,
            groups=1 + sum(degree > 1 for degree in degrees),  # and all ranks together
        )
        for rank in range(layout.pipeline)
    ]
