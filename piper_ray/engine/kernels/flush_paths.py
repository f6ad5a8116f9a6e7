"""Kernels: the longest paths through a pipeline's step under a flush, stage by stage from the back.

Stage j of p takes f_j forward and b_j backward for each of m microbatches, t_j = f_j + b_j, and R_j at the end; it has
q = p - 1 - j stages behind. A tail of the pipeline is described by five figures, all in seconds:

1f1b  down    F_0 enters the tail, ends with B_0: the longest way through, w - 1 forward passes more at one stage included
      up      the same of the last microbatch, with w - 1 backward passes more
      whole   the whole batch, until the tail's first stage has done its last backward pass
      last    from the last microbatch's entry to the end of the synchronisation of some stage
      synced  the whole batch, to the end of the synchronisation of some stage
gpipe total   sum of t
      slowest_f, slowest_b  the largest f, and b
      synced  sum of f, and the way through the backward passes to the end of the synchronisation of some stage

Under 1F1B stage j starts with w = min(m, q + 1) forward passes. Its critical path goes down to some stage k behind it (or
stays), with w_k - 1 further forward passes at the slowest stage up to k; then m - w + 1 microbatches at j;
then down and up again, with w_k - 1 further backward passes. So with S = max over k >= j of sum t_(j+1..k) +
(w_k - 1) max f_(..k), and E so from b, the step takes

    max over j of  sum t_(..j-1) + own_j,   own_j = (m - w + 1) t_j + S + E                       if m > w
                                            own_j = t_j + max((w - 1) max f_(..j) + E, S + (w - 1) max b_(..j))  else

exactly (found and checked by simulation). ``down`` and ``up`` are S and E with t of the first stage added, for a tail taken
for itself: what stages in front of it bring into max f_(..k) is left out. So they bound from below, and exactly where no
stage in front has a longer forward or backward pass than the tail's stages take in all. ``step_s`` has it exactly.

Under GPipe the step takes sum f + (m - 1) max f + max over j of (sum b_(j..) + (m - 1) max b_(j..) + R_j), exactly.

Every figure of a tail with a stage in front is non-decreasing in the tail's figures: of tails with the same layers and
as many stages one that is nowhere larger is as good.
"""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, leaf_kernel
from piper_ray.engine.kernels.flush_types import GPIPE
from piper_ray.engine.kernels.types import FloatArray

Figures = tuple[float, float, float, float, float]


@inlined_kernel
def empty_tail(schedule: int) -> Figures:
    """The figures of no stages."""
    if schedule == GPIPE:
        return 0.0, 0.0, 0.0, -np.inf, 0.0
    return 0.0, 0.0, 0.0, -np.inf, -np.inf


@inlined_kernel
def with_stage(
    schedule: int,
    microbatches: int,
    behind: int,
    whole_s: float,
    forward_s: float,
    backward_s: float,
    sync_s: float,
    slowest_forward_s: float,
    slowest_backward_s: float,
    tail: Figures,
) -> Figures:
    """The figures of a tail of ``behind`` stages with a stage put in front.

    whole_s: t. slowest_*: the largest f and b of this stage and of those in front of it, as far as they are known.
    """
    m = microbatches
    if schedule == GPIPE:
        total, slowest_f, slowest_b, synced, _ = tail
        total += whole_s
        slowest_b = max(slowest_b, backward_s)
        synced = max(synced + forward_s, total + (m - 1) * slowest_b + sync_s)
        return total, max(slowest_f, forward_s), slowest_b, synced, 0.0
    down, up, whole, last, synced = tail
    w = min(m, behind + 1)
    first = max(down, (w - 1) * slowest_forward_s)
    final = max(up, (w - 1) * slowest_backward_s)
    if m > w:
        own = (m - w + 1) * whole_s + first + final
        ends_behind = (m - w + 1) * whole_s - backward_s + first + last
    else:
        own = whole_s + max((w - 1) * slowest_forward_s + final, first + (w - 1) * slowest_backward_s)
        ends_behind = forward_s + (w - 1) * slowest_forward_s + last
    whole = max(whole_s + whole, own)
    down = whole_s + first
    up = whole_s + final
    synced = max(forward_s + synced, whole + sync_s, ends_behind)
    last = max(forward_s + last, up + sync_s)
    return down, up, whole, last, synced


@inlined_kernel
def batch_s(schedule: int, microbatches: int, figures: Figures) -> float:
    """Seconds of the whole batch for a pipeline of these figures."""
    if schedule == GPIPE:
        return figures[3] + (microbatches - 1) * figures[1]
    return max(figures[2], figures[4])


@inlined_kernel
def least_batch_s(
    schedule: int,
    microbatches: int,
    stages: int,
    most_stages: int,
    ahead_s: float,
    ahead_forward_s: float,
    figures: Figures,
) -> float:
    """No batch takes less whose pipeline ends with a tail of these figures and ``stages``.

    ahead_s: least t of all that is in front, in at most most_stages - stages stages. ahead_forward_s: so for f.

    One of the stages in front takes t >= ahead_s / (most_stages - stages). With w - 1 stages behind it, r seconds between
    it and the tail, its path takes ahead_s + (m - w) t + r + down + up, and r >= ahead_s - t (most_stages - w + 1)
    if it is the slowest. Where m > most_stages that is least at the least t.
    """
    if ahead_s <= 0.0:
        return batch_s(schedule, microbatches, figures)
    m, left = microbatches, most_stages - stages
    if left <= 0:
        return np.inf
    even_s = ahead_s / left
    if schedule == GPIPE:
        total, slowest_f, slowest_b, synced, _ = figures
        least = total + ahead_s + (m - 1) * max(slowest_f + slowest_b, even_s)
        return max(least, synced + ahead_forward_s + (m - 1) * slowest_f)
    down, up, whole, _, synced = figures
    least = max(whole + ahead_s, synced + ahead_forward_s, m * even_s)
    if m > most_stages:
        least = max(least, ahead_s + (m - stages - 1) * even_s + down + up)
    return least


@leaf_kernel
def step_s(
    schedule: int, microbatches: int, forward_s: FloatArray, backward_s: FloatArray, sync_s: FloatArray
) -> float:
    """Seconds of the whole batch, exactly, by the formulas above. Stages front to back."""
    p, m = forward_s.size, microbatches
    if schedule == GPIPE:
        slowest_f, slowest_b, total_f, total_b, synced = 0.0, 0.0, 0.0, 0.0, 0.0
        for j in range(p - 1, -1, -1):
            total_f += forward_s[j]
            total_b += backward_s[j]
            slowest_f = max(slowest_f, forward_s[j])
            slowest_b = max(slowest_b, backward_s[j])
            synced = max(synced, total_b + (m - 1) * slowest_b + sync_s[j])
        return total_f + (m - 1) * slowest_f + synced
    # Stage j + 1 has done its last pass before stage j: its end counts where it synchronises longer than all before it.
    best, longest_s = 0.0, -1.0
    for end in range(p):
        if sync_s[end] > longest_s:
            longest_s = sync_s[end]
            best = max(best, _end_s(m, forward_s, backward_s, end) + longest_s)
    return best


@leaf_kernel
def _end_s(m: int, forward_s: FloatArray, backward_s: FloatArray, end: int) -> float:
    """When stage ``end`` has done its last backward pass under 1F1B.

    Further backward passes are those of stages from ``end`` on; a path whose m - w + 1 microbatches are at a stage before
    ``end`` does not come back to that one.
    """
    p = forward_s.size
    # From the back: S, E and the longest whole path of the stages from j on; ``last`` from the last microbatch's entry
    # into stage j to the end.
    first, final, last, whole = 0.0, 0.0, 0.0, 0.0
    for j in range(p - 1, -1, -1):
        f, b = forward_s[j], backward_s[j]
        w = min(m, p - j)
        slowest_f, slowest_b = 0.0, 0.0
        for k in range(j + 1):
            slowest_f = max(slowest_f, forward_s[k])
        for k in range(end, j + 1):
            slowest_b = max(slowest_b, backward_s[k])
        first = max(first, (w - 1) * slowest_f)
        if j >= end:
            final = max(final, (w - 1) * slowest_b)
            if m > w:
                own = (m - w + 1) * (f + b) + first + final
            else:
                own = f + b + max((w - 1) * slowest_f + final, first + (w - 1) * slowest_b)
            whole = max(f + b + whole, own)
            final += f + b
            last = final
        else:
            own = (m - w + 1) * (f + b) - b + first + last if m > w else f + (w - 1) * slowest_f + last
            whole = max(f + whole, own)
            last += f
        first += f + b
    return whole
