"""Kernels: the longest paths through a pipeline's step under a flush, stage by stage from the back.

Stage j of p takes f_j forward and b_j backward for each of m microbatches, t_j = f_j + b_j, and R_j at the end; it has
q = p - 1 - j stages behind.

Under 1F1B stage j starts with w = min(m, q + 1) forward passes. A critical path goes down from it to some stage k
behind it (or stays), with w_k - 1 further forward passes at the slowest stage up to k; then comes back for m - w + 1
microbatches at j; then goes down and up again, with w_k - 1 further backward passes. So with

    S_j = max over k >= j of  sum t_(j+1..k) + (w_k - 1) max f_(0..k),   E_j the same with b

the batch takes (without R)

    max over j of  sum t_(0..j-1) + own_j
    own_j = (m - w + 1) t_j + S_j + E_j                                                    if m > w
    own_j = t_j + max((w - 1) max f_(0..j) + E_j,  S_j + (w - 1) max b_(0..j))             if m = w

exactly: this was found, and checked, by simulation. For the end of stage e's last backward pass, b_(e..) replaces
b_(0..); stages j < e contribute only f_j, since their last backward pass is not on the path (``_end_s``). Under GPipe
the batch takes, also exactly, sum f + (m - 1) max f + max over e of  sum b_(e..) + (m - 1) max b_(e..) + R_e.

A tail of the pipeline is described by seven figures, in seconds:

    1f1b  down          t + S of its first stage: from the first microbatch's entry until it comes out again
          up            t + E: the same for the last microbatch
          whole         for the whole batch, until the first stage has done its last backward pass
          up_own        as ``up`` and ``whole``, but the further backward passes are those of the tail's own stages only
          whole_own
          last          from the last microbatch's entry to the end of some stage's synchronisation
          synced        for the whole batch, to the end of some stage's synchronisation
    2bw   slowest       max of m t + R: without a flush nothing else counts
    gpipe total         sum of t
          slowest_f     the largest f, and b
          slowest_b
          synced        sum of f, and the way through the backward passes to the end of some stage's synchronisation

What stages in front of the tail contribute to max f_(0..k) and max b_(0..k) must be given when the tail is built. A
known part of it gives a lower bound. All figures are non-decreasing in those of the tail behind: of tails with the same
layers and number of stages, one that is nowhere larger is as good.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.flush_types import GPIPE, TWO_BW
from piper_ray.engine.kernels.types import FloatArray

Figures = tuple[float, float, float, float, float, float, float]


class StageSeconds(NamedTuple):
    """The seconds of a stage: t, f, b and R; and the largest known f and b of it and of stages in front of it, which
    only 1F1B needs.
    """

    whole_s: float
    forward_s: float
    backward_s: float
    sync_s: float
    slowest_forward_s: float
    slowest_backward_s: float


@inlined_kernel
def empty_tail(schedule: int) -> Figures:
    """Returns the figures of no stages."""
    if schedule == GPIPE:
        return 0.0, 0.0, 0.0, -np.inf, 0.0, -np.inf, 0.0
    if schedule == TWO_BW:
        return 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    return 0.0, 0.0, 0.0, 0.0, 0.0, -np.inf, -np.inf


@inlined_kernel
def with_stage(schedule: int, microbatches: int, behind: int, stage: StageSeconds, tail: Figures) -> Figures:
    """Returns the figures of a tail of ``behind`` stages with a stage put in front."""
    m = microbatches
    whole_s, forward_s, backward_s, sync_s, slowest_forward_s, slowest_backward_s = stage
    if schedule == GPIPE:
        total, slowest_f, slowest_b, synced, slowest, ended, _ = tail
        total += whole_s
        slowest_b, slowest = max(slowest_b, backward_s), max(slowest, whole_s)
        synced = max(synced + forward_s, total + (m - 1) * slowest_b + sync_s)
        ended = max(ended + forward_s, total + (m - 1) * slowest + sync_s)
        return total, max(slowest_f, forward_s), slowest_b, synced, slowest, ended, 0.0
    if schedule == TWO_BW:
        return max(tail[0], m * whole_s + sync_s), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    down, up, whole, up_own, whole_own, last, synced = tail
    w = min(m, behind + 1)
    first = max(down, (w - 1) * slowest_forward_s)
    final = max(up, (w - 1) * slowest_backward_s)
    final_own = max(up_own, (w - 1) * backward_s)
    if m > w:
        start_s = (m - w + 1) * whole_s + first
        own, own_own = start_s + final, start_s + final_own
        ends_behind = (m - w) * whole_s + forward_s + first + last
    else:
        warm_s = (w - 1) * slowest_forward_s
        own = whole_s + max(warm_s + final, first + (w - 1) * slowest_backward_s)
        own_own = whole_s + max(warm_s + final_own, first + (w - 1) * backward_s)
        ends_behind = forward_s + warm_s + last
    whole = max(whole_s + whole, own)
    whole_own = max(whole_s + whole_own, own_own)
    synced = max(forward_s + synced, whole_own + sync_s, ends_behind)
    last = max(forward_s + last, whole_s + final_own + sync_s)
    return whole_s + first, whole_s + final, whole, whole_s + final_own, whole_own, last, synced


@leaf_kernel
def times_in_batch(schedule: int, microbatches: int, figure: int) -> int:
    """Returns how often a batch counts a figure at most."""
    is_slowest = schedule == GPIPE and figure in (1, 2, 4)
    return max(1, microbatches - 1) if is_slowest else 1


@inlined_kernel
def batch_s(schedule: int, microbatches: int, figures: Figures) -> float:
    """Returns the seconds of the batch of a pipeline with these figures."""
    if schedule == GPIPE:
        return max(figures[3] + (microbatches - 1) * figures[1], figures[5])
    if schedule == TWO_BW:
        return figures[0]
    return max(figures[2], figures[6])


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
    """Returns a lower bound on a batch whose pipeline ends with a tail of these figures and ``stages``.

    ahead_s: least t of all layers in front, which are in at most most_stages - stages stages. ahead_forward_s: the same
    for f.

    One of the stages in front takes t >= ahead_s / (most_stages - stages).

    gpipe: with e the first stage, sum t + (m - 1) (max f + max b), and max f + max b >= t of any stage. The path to the
    end of a stage of the tail is ``synced``, with sum f in front and (m - 1) max f.
    2bw: m t of that stage, or the slowest of the tail.
    1f1b: m t of that stage; the tail's ``whole`` with sum t in front; its ``synced`` with sum f. With w - 1 stages
    behind that stage, r seconds between it and the tail, its path takes ahead_s + (m - w) t + r + down + up, and r >=
    ahead_s - t (most_stages - w + 1) if it is the slowest. If m > most_stages, that is least at the least t.
    """
    if ahead_s <= 0.0:
        return batch_s(schedule, microbatches, figures)
    m, left = microbatches, most_stages - stages
    if left <= 0:
        return np.inf
    even_s = ahead_s / left
    if schedule == GPIPE:
        total, slowest_f, slowest_b, synced, slowest, ended, _ = figures
        least = total + ahead_s + (m - 1) * max(slowest_f + slowest_b, slowest, even_s)
        return max(least, max(synced + (m - 1) * slowest_f, ended) + ahead_forward_s)
    if schedule == TWO_BW:
        return max(figures[0], m * even_s)
    down, up, whole, _, _, _, synced = figures
    least = max(whole + ahead_s, synced + ahead_forward_s, m * even_s)
    if m > most_stages:
        least = max(least, ahead_s + (m - stages - 1) * even_s + down + up)
    return least


@leaf_kernel
def step_s(
    schedule: int, microbatches: int, forward_s: FloatArray, backward_s: FloatArray, sync_s: FloatArray
) -> float:
    """Returns the seconds of the batch, exactly, by the formulas above. Stages are front to back."""
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
    if schedule == TWO_BW:
        slowest = 0.0
        for j in range(p):
            slowest = max(slowest, m * (forward_s[j] + backward_s[j]) + sync_s[j])
        return slowest
    # Stage j + 1 does its last pass before stage j: its end counts only if it synchronises longer than all before it.
    best, longest_s = 0.0, -1.0
    for end in range(p):
        if sync_s[end] > longest_s:
            longest_s = sync_s[end]
            best = max(best, _end_s(m, forward_s, backward_s, end) + longest_s)
    return best


@leaf_kernel
def _end_s(m: int, forward_s: FloatArray, backward_s: FloatArray, end: int) -> float:
    """Returns when stage ``end`` has done its last backward pass under 1F1B.

    Further backward passes are those of stages from ``end`` on; a path whose m - w + 1 microbatches are at a stage
    before ``end`` does not return to that one.
    """
    p = forward_s.size
    # From the back: S, E and the longest whole path of the stages from j on; ``last``: from the last microbatch's entry
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


@kernel
def simulate_step(
    schedule: int, microbatches: int, forward_s: FloatArray, backward_s: FloatArray, sync_s: FloatArray
) -> float:
    """Returns the seconds until all stages, front to back, have done ``microbatches`` and synchronised.

    Each stage does its passes in the schedule's order, each as soon as its input is there: a forward pass waits for
    that of the stage before, a backward pass for that of the stage behind, or at the last stage for its own forward
    pass.
    """
    p, m = forward_s.size, microbatches
    forward_end, backward_end = np.full((p, m), -1.0), np.full((p, m), -1.0)
    forwards, backwards = np.zeros(p, np.int64), np.zeros(p, np.int64)
    clock_s = np.zeros(p)
    left = 2 * m * p
    while left > 0:
        for j in range(p):
            warm_up = m if schedule == GPIPE else min(m, p - j)
            while backwards[j] < m:
                forward_next = forwards[j] < m and forwards[j] - backwards[j] < warm_up
                if forward_next:
                    k = forwards[j]
                    ready_s = 0.0 if j == 0 else forward_end[j - 1, k]
                else:
                    k = backwards[j]
                    ready_s = forward_end[j, k] if j == p - 1 else backward_end[j + 1, k]
                if ready_s < 0.0:
                    break
                if forward_next:
                    clock_s[j] = max(clock_s[j], ready_s) + forward_s[j]
                    forward_end[j, k] = clock_s[j]
                    forwards[j] += 1
                else:
                    clock_s[j] = max(clock_s[j], ready_s) + backward_s[j]
                    backward_end[j, k] = clock_s[j]
                    backwards[j] += 1
                left -= 1
    last_s = 0.0
    for j in range(p):
        last_s = max(last_s, clock_s[j] + sync_s[j])
    return float(last_s)
