"""A schedule's lists of passes in the form that torch.distributed.pipelining reads: a line of CSV for each rank."""

from __future__ import annotations

from piper_ray.export.job import Job
from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import ScheduleName
from piper_ray.simulate.actions import ActionKind, flush_lists

TORCH_NAMES = {
    ScheduleName.GPIPE: "GPipe",
    ScheduleName.ONE_F_ONE_B: "1F1B",
    ScheduleName.INTERLEAVED: "Interleaved1F1B",
    ScheduleName.LOOPED_BFS: "LoopedBFS",
    ScheduleName.ZB_H1: "InterleavedZeroBubble",
    ScheduleName.ZB_V: "ZBVZeroBubble",
    ScheduleName.DUALPIPE_V: "DualPipeV",
}
"""As ``get_schedule_class`` knows them."""

ONE_STAGE = frozenset({ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B})
"""Schedules that torch runs without a list: one stage on each rank."""

_MOST_PASSES = 5_000_000


def actions_csv(job: Job) -> str:
    """``0F0,0F1,1F0,...``: stage, kind of pass, microbatch. Raises UsageError for lists of too many passes."""
    passes = 3 * job.microbatches * len(job.plan.stages)
    if passes > _MOST_PASSES:
        raise UsageError(
            f"a list of {passes:,} passes is more than torch is given here; expected at most {_MOST_PASSES:,}: "
            "fewer microbatches, or a larger data-parallel degree"
        )
    lines = []
    for rank, actions in enumerate(flush_lists(job.schedule, job.pipeline_ranks, job.microbatches)):
        stages = job.schedule.stages_of_rank(rank, job.pipeline_ranks)
        lines.append(
            ",".join(
                f"{stages[chunk]}{ActionKind(kind).name}{microbatch}" for kind, chunk, microbatch in actions.tolist()
            )
        )
    return "\n".join(lines) + "\n"
