"""Which rank is which: of plans with one d and one t for all stages, in the order that all runtimes here share.

Shards of a layer are neighbours, then come the groups that share a sequence (context parallelism), then the replicas
of a stage, then the next rank of the pipeline: Megatron's
tp-cp-ep-dp-pp, DeepSpeed's (pipe, data, model), and the meshes (pp, dp, tp) of torchtitan and torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule


@dataclass(frozen=True)
class RankPlace:
    """All from 0. stages: of the plan, its chunk nearest the input first. replica: of d. context: of the groups
    that share a sequence. shard: of a group's t."""

    rank: int
    node: int
    local_rank: int
    pipeline_rank: int
    stages: tuple[int, ...]
    replica: int
    context: int
    shard: int


def rank_places(plan: Plan, schedule: Schedule, gpus_per_node: int, context: int = 1) -> Iterator[RankPlace]:
    """Of every rank that the plan uses, in their order. context: groups that share the plan's t devices."""
    d, t = plan.stages[0].data_parallel_degree, plan.stages[0].tensor_parallel_degree
    pipeline_ranks = len(plan.stages) // schedule.v
    for rank in range(pipeline_ranks * d * t):
        pipeline_rank, within = divmod(rank, d * t)
        replica, of_replica = divmod(within, t)
        group, shard = divmod(of_replica, t // context)
        stages = schedule.stages_of_rank(pipeline_rank, pipeline_ranks)
        node, local_rank = divmod(rank, gpus_per_node)
        yield RankPlace(rank, node, local_rank, pipeline_rank, stages, replica, group, shard)


def rank_lines(plan: Plan, schedule: Schedule, gpus_per_node: int, context: int = 1) -> list[str]:
    """A line for each rank of the pipeline: its stages from 1, its ranks and nodes from 0."""
    d, t = plan.stages[0].data_parallel_degree, plan.stages[0].tensor_parallel_degree
    pipeline_ranks, lines = len(plan.stages) // schedule.v, []
    between = f"{t // context} group + " if context > 1 else ""
    for place in range(pipeline_ranks):
        stages = ", ".join(str(stage + 1) for stage in schedule.stages_of_rank(place, pipeline_ranks))
        first, last = place * d * t, (place + 1) * d * t - 1
        nodes = _range(first // gpus_per_node, last // gpus_per_node)
        lines.append(
            f"pipeline rank {place}: stage{'s' if schedule.v > 1 else ''} {stages}; ranks {_range(first, last)} "
            f"on node{'' if nodes.isdecimal() else 's'} {nodes}; rank = {first} + {t} replica + {between}shard"
        )
    return lines


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
