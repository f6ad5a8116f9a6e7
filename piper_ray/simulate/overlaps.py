"""Overlaps: sends that overlap with passes during a part of the step, and two passes that run as one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, group_size, warm_up_passes
from piper_ray.simulate.kernels.events import Floats, Program
from piper_ray.simulate.stages import Stages

__all__ = ["joined_passes", "sends_waited_for", "with_buffers", "with_joined_passes"]


def sends_waited_for(program: Program, schedule: Schedule, microbatches: int) -> npt.NDArray[np.bool_]:
    """bool[actions]: the passes of interleaved lists in a warm-up or a flush. Without
    --overlap-p2p-communication-warmup-flush, Megatron's next pass waits there until their sends have finished."""
    waited = np.zeros(len(program.kind), np.bool_)
    ranks = len(program.first) - 1
    for rank, (first, end) in enumerate(zip(program.first[:-1], program.first[1:], strict=True)):
        ahead = warm_up_passes(schedule, ranks, rank, microbatches)
        waited[first : first + ahead] = waited[end - ahead : end] = True
    return waited


def joined_passes(program: Program) -> npt.NDArray[np.bool_]:
    """bool[actions]: the forward passes that DualPipeV runs as one with the following backward pass of another chunk.

    The last rank runs its first such pair one after the other, which shortens the bubble.
    """
    backward, forward = program.kind == ActionKind.B, program.kind == ActionKind.F
    joined: npt.NDArray[np.bool_] = forward & np.append(backward[1:], False)  # no list ends with a forward pass
    first = int(program.first[-2])
    joined[first + int(joined[first:].argmax())] = False
    return joined


def with_joined_passes(program: Program, compute_s: Floats, overlap: float) -> Program:
    """DualPipeV's program in which the share ``overlap`` of the shorter of two joined passes overlaps with the other
    pass.

    compute_s: float64[stages, 4], the part of each pass that is computation. The saved time is divided between the two
    passes in proportion to their computation.
    """
    joined = joined_passes(program)
    pair = np.flatnonzero(joined)
    work_s = compute_s[program.stage, program.kind]
    together_s = work_s[pair] + work_s[pair + 1]
    saved_s = overlap * np.minimum(work_s[pair], work_s[pair + 1])
    saved = np.divide(saved_s, together_s, out=np.zeros(len(pair)), where=together_s > 0)
    duration_s = program.duration_s.copy()
    duration_s[pair] -= saved * work_s[pair]
    duration_s[pair + 1] -= saved * work_s[pair + 1]
    return program._replace(duration_s=duration_s, joined=joined)


def with_buffers(stages: Stages, schedule: Schedule, microbatches: int) -> Stages:
    """The stages of an interleaved plan, with Megatron's buffers for inputs and gradients that arrive before their
    passes, charged to the first stage of each rank. A rank has one buffer of each; where chunks hand over from the last
    rank to the first, it has one more for each microbatch of a group beyond the number of ranks. Raises UsageError as
    ``group_size`` does."""
    figures = list(stages.figures)
    ranks = len(figures) // schedule.v
    forward, backward = [0.0] * ranks, [0.0] * ranks
    for message in stages.messages:
        source, target = message.source % ranks, message.target % ranks
        if source != target:
            forward[target] = max(forward[target], message.received_bytes)
            backward[source] = max(backward[source], message.sent_bytes)
    group = group_size(ranks, microbatches // figures[0].data_parallel_degree, schedule.group)
    more = max(0, group - ranks)
    for rank in range(ranks):
        held = forward[rank] * (1 + more * (rank == 0)) + backward[rank] * (1 + more * (rank == ranks - 1))
        of = figures[rank]
        figures[rank] = replace(of, fixed_bytes=of.fixed_bytes + held, beside_bytes=of.beside_bytes + held)
    return replace(stages, figures=tuple(figures))
