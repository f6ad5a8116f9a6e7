"""What runs beside what: sends beside passes in a part of the step, and two passes as one."""

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
    """bool[actions]: the passes of interleaved lists in a warm-up or a flush. Megatron's next pass waits there until
    what they send has gone, without --overlap-p2p-communication-warmup-flush."""
    waited = np.zeros(len(program.kind), np.bool_)
    ranks = len(program.first) - 1
    for rank, (first, end) in enumerate(zip(program.first[:-1], program.first[1:], strict=True)):
        ahead = warm_up_passes(schedule, ranks, rank, microbatches)
        waited[first : first + ahead] = waited[end - ahead : end] = True
    return waited


def joined_passes(program: Program) -> npt.NDArray[np.bool_]:
    """bool[actions]: the forward passes that DualPipeV runs as one with the backward pass of another chunk behind it.

    The last rank's first such pair goes one after the other, which shortens the bubble.
    """
    backward, forward = program.kind == ActionKind.B, program.kind == ActionKind.F
    joined: npt.NDArray[np.bool_] = forward & np.append(backward[1:], False)  # a list ends with no forward pass
    first = int(program.first[-2])
    joined[first + int(joined[first:].argmax())] = False
    return joined


def with_joined_passes(program: Program, compute_s: Floats, overlap: float) -> Program:
    """DualPipeV's program in which so much of the shorter of two joined passes runs beside the other.

    compute_s: float64[stages, 4], what of each pass is work. Each of two such passes gets its part of what they take
    together.
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
    """The stages of an interleaved plan, on the first of each rank what Megatron holds there of inputs and gradients
    that come in ahead of their passes: one of each, and as many more as a group has microbatches beyond the ranks where
    chunks hand over from the last rank to the first. Raises UsageError as ``group_size`` does."""
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
