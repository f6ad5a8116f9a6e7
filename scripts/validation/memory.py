"""What each rank of a published run's layout holds, by how its software holds memory."""

from __future__ import annotations

from dataclasses import replace

from piper_ray.calibrate.layouts import Laid
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.model.mode import Sharding
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.workloads.estimate.layout import PricedLayout
from piper_ray.workloads.estimate.ranks import RankMemory, memory_of_rank
from piper_ray.workloads.estimate.runtimes import (
    DEEPSPEED,
    DEEPSPEED_FP16,
    DEFAULT,
    FSDP,
    HAI_LLM,
    HALF_GRADIENTS,
    MEGATRON_2021,
    MEGATRON_2021_FP16,
    MEGATRON_CORE,
    MEGATRON_CORE_FP16,
    NEMO,
    Loss,
    Traits,
)
from piper_ray.workloads.estimate.software import ContextExchange, Precision

_RUNTIMES = {
    "megatron-2021": (MEGATRON_2021, MEGATRON_2021_FP16),
    "megatron-2022": (MEGATRON_2021, MEGATRON_2021_FP16),
    "deepspeed-2021": (DEEPSPEED, DEEPSPEED_FP16),
    "megatron-core": (MEGATRON_CORE, MEGATRON_CORE_FP16),
    "megascale": (MEGATRON_CORE, MEGATRON_CORE_FP16),
    "nemo": (NEMO, NEMO),
    "fsdp": (FSDP, FSDP),
}
"""How each generation of software holds memory: in bf16, and in fp16."""


def words_of(run: PublishedRun) -> str:
    """All that a run says in words, in small letters."""
    return f"{run.id} {run.software} {run.source} {run.citation} {run.notes}".lower()


def runtime_of(run: PublishedRun, laid: Laid) -> Traits:
    """As the run's words have it, else as its generation of software does."""
    precision, sharding = laid.stack.precision, laid.layout.sharding
    of_bf16, of_fp16 = _RUNTIMES[laid.software]
    runtime = of_fp16 if precision is Precision.FP16 else of_bf16
    words, by_heads = words_of(run), laid.stack.software.context is ContextExchange.ALL_TO_ALL
    if "deepseek-v3" in words and "h800" in (run.gpu or "").lower():
        runtime = HAI_LLM
    elif "maxtext" in words and sharding is Sharding.WEIGHTS:
        runtime = FSDP
    elif laid.software == "fsdp" and sharding is not Sharding.WEIGHTS:
        runtime = DEFAULT
    if "fp32 gradients not kept" in words:
        runtime = replace(runtime, states=HALF_GRADIENTS)
    elif "gradients in fp32" in words and runtime.states == HALF_GRADIENTS:
        runtime = replace(runtime, states=DEFAULT.states)
    loss = Loss.FUSED if "fused cross entropy" in words else runtime.loss
    return replace(runtime, loss=loss, fp8=precision is Precision.FP8, context_all_to_all=by_heads)


def shares_untold(laid: Laid) -> bool:
    """Whether the optimizer's state is taken for shared out without a word of it, as in all of NeMo's recipes."""
    return laid.software == "nemo" and laid.layout.sharding is Sharding.NONE


def memory_of(plan: PricedLayout, run: PublishedRun, laid: Laid) -> list[RankMemory]:
    """What each rank of a pipeline holds at its worst moment."""
    lists = flush_lists(plan.schedule, len(plan.ranks), laid.layout.microbatches)
    sharding = Sharding.OPTIMIZER if shares_untold(laid) else laid.layout.sharding
    runtime = runtime_of(run, laid)
    return [
        memory_of_rank(
            replace(rank, sharding=sharding),
            [(ActionKind(kind).name, int(chunk)) for kind, chunk, _ in actions],
            runtime,
        )
        for rank, actions in zip(plan.ranks, lists, strict=True)
    ]
