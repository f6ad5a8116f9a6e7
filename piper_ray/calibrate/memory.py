"""What each rank of a run's layout holds, by how its software holds memory."""

from __future__ import annotations

from dataclasses import replace

from piper_ray.calibrate.layouts import Laid
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.model.mode import Sharding
from piper_ray.simulate.actions import ActionKind, flush_lists
from piper_ray.workloads.estimate.layout import Layout, PricedLayout
from piper_ray.workloads.estimate.ranks import RankLayout, RankMemory, memory_of_rank
from piper_ray.workloads.estimate.runtimes import DEFAULT, Loss, Traits, held_by
from piper_ray.workloads.estimate.software import Precision

_FULLY_SHARDED = "fsdp"
_HALF_PRECISION = "nemo"


def traits_of(run: PublishedRun, laid: Laid) -> Traits:
    """As the run says it, else as its generation of software does."""
    precision, usual = laid.stack.precision, DEFAULT
    traits = held_by(laid.software, half=precision is Precision.FP16)
    if traits is None and laid.layout.sharding is Sharding.WEIGHTS:
        traits = held_by(_FULLY_SHARDED)
    traits = traits or held_by("megatron-2021", half=precision is Precision.FP16) or usual
    halved = held_by(_HALF_PRECISION) or usual
    if run.gradients == "bf16":
        traits = replace(traits, states=halved.states)
    elif run.gradients == "fp32" and traits.states == halved.states:
        traits = replace(traits, states=usual.states)
    loss = Loss.FUSED if run.loss == "fused" else traits.loss
    of_stack = laid.stack.traits
    return replace(traits, loss=loss, fp8=of_stack.fp8, context_all_to_all=of_stack.context_all_to_all)


def shares_untold(laid: Laid) -> bool:
    """Whether the optimizer's state is taken for shared out without a word of it, as in all of NVIDIA's recipes."""
    return laid.software in ("nemo", "megatron-core") and laid.layout.sharding is Sharding.NONE


def memory_of(plan: PricedLayout, run: PublishedRun, laid: Laid) -> list[RankMemory]:
    """What each rank of a pipeline holds at its worst moment."""
    ranks = rank_layouts(plan, laid.layout, Sharding.OPTIMIZER if shares_untold(laid) else laid.layout.sharding)
    lists = flush_lists(plan.schedule, len(ranks), laid.layout.microbatches)
    traits = traits_of(run, laid)
    return [
        memory_of_rank(rank, [(ActionKind(kind).name, int(chunk)) for kind, chunk, _ in actions], traits)
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
