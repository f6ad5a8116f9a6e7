"""Kernels: lower bounds on the tails of pipelines under a flush, from the order of passes; and a pipeline's batch.

Stage j takes f_j forward and b_j backward seconds for each of m microbatches, t_j = f_j + b_j, and R_j at the end. It
has q stages behind it. Each figure below is the length of a path through the passes: from pass to pass of one rank's
list, or from a pass to the same microbatch's next one. A batch takes no less than any path. These paths are used:

*gpipe*. Forward passes of the first microbatch up to stage i, there those of all microbatches, and of the last one to
the end: sum f + (m - 1) f_i. Then the same way back, to the end of stage e: sum b_(e..) + (m - 1) max b_(e..) + R_e. No
path is longer, as each path has this form.

*1f1b*. Stage j begins with w_j = min(m, q + 1) forward passes. A path may go down from it to a stage k, and come up
again: sum t_(j+1..k). Before k it may take all w_k - 1 further forward passes of k's beginning at any one stage i up to
k: the first w_k microbatches enter k one after the other, each after its forward pass at i. It may take the last w_k -
1 backward passes at i in the same way on the way out. Between these stage j runs its list: m - w_j + 1 times t_j if m >
w_j; otherwise its warm-up and its end share the one microbatch, and one of the two has to go down to the turning point.
A path that ends with R_e leaves the passes at e: backward passes in front of e are not on it.

The figures of a tail are seven such lengths: down, up, whole, up and whole with further backward passes in the tail
alone, the last microbatch's way to the end of a synchronisation, and the whole batch's way there. A stage in front only
adds to them or takes the larger of two: so a tail that is nowhere larger than another remains so. What stages in front
add to the choice of i is given if it is known; if it is not, the lengths are maxima over fewer paths.
"""

from __future__ import annotations

import numpy as np

from piper_ray.certificate.kernels.downsets import Floats
from piper_ray.compiled.jit import inlined_kernel, inner_kernel

Lengths = tuple[float, float, float, float, float, float, float]

FIGURES = 7


@inlined_kernel
def no_stages(gpipe: bool) -> Lengths:
    """Returns the figures of the empty tail."""
    if gpipe:
        return 0.0, 0.0, 0.0, -np.inf, 0.0, 0.0, 0.0
    return 0.0, 0.0, 0.0, 0.0, 0.0, -np.inf, -np.inf


@inlined_kernel
def put_in_front(
    gpipe: bool, m: int, behind: int, stage: tuple[float, float, float], known: tuple[float, float], tail: Lengths
) -> Lengths:
    """Returns the figures of a tail with a further stage in front. stage: f, b and R. known: the largest f and b of it
    and of stages in front of it."""
    f, b, sync = stage
    t = f + b
    if gpipe:
        total, slowest_f, slowest_b, synced, _, _, _ = tail
        longest_b = max(slowest_b, b)
        ended = max(synced + f, total + t + (m - 1) * longest_b + sync)
        return total + t, max(slowest_f, f), longest_b, ended, 0.0, 0.0, 0.0
    down, up, whole, up_own, whole_own, last, synced = tail
    known_f, known_b = known
    more = min(m, behind + 1) - 1
    into = max(down, more * known_f)
    out = max(up, more * known_b)
    out_own = max(up_own, more * b)
    if m > more + 1:
        between = (m - more) * t + into
        own, own_own = between + out, between + out_own
        ended = (m - more - 1) * t + f + into + last
    else:
        own = t + max(more * known_f + out, into + more * known_b)
        own_own = t + max(more * known_f + out_own, into + more * b)
        ended = f + more * known_f + last
    whole_new = max(t + whole, own)
    whole_own_new = max(t + whole_own, own_own)
    synced_new = max(f + synced, whole_own_new + sync, ended)
    last_new = max(f + last, t + out_own + sync)
    return t + into, t + out, whole_new, t + out_own, whole_own_new, last_new, synced_new


@inlined_kernel
def batch_of(gpipe: bool, m: int, figures: Lengths) -> float:
    """Returns the batch of a pipeline that is this tail."""
    if gpipe:
        return figures[3] + (m - 1) * figures[1]
    return max(figures[2], figures[6])


@inlined_kernel
def batch_with_ahead(gpipe: bool, m: int, ahead_s: float, ahead_f: float, figures: Lengths) -> float:
    """Returns a lower bound on a batch with this tail behind stages that together take these seconds, forward and
    backward."""
    if gpipe:
        total, slowest_f, slowest_b, synced, _, _, _ = figures
        return max(total + ahead_s + (m - 1) * (slowest_f + slowest_b), synced + ahead_f + (m - 1) * slowest_f)
    return max(figures[2] + ahead_s, figures[6] + ahead_f)


@inner_kernel
def run_batch(gpipe: bool, m: int, seconds: Floats) -> float:
    """Runs a batch pass by pass. seconds: float64[p, 3], front to back: f, b and R of each stage."""
    p = seconds.shape[0]
    forward_end, backward_end = np.full((p, m), -1.0), np.full((p, m), -1.0)
    forwards, backwards = np.zeros(p, np.int64), np.zeros(p, np.int64)
    clock_s = np.zeros(p)
    left = 2 * m * p
    while left > 0:
        for j in range(p):
            while backwards[j] < m:
                warm_up = m if gpipe else min(m, p - j)
                is_forward = forwards[j] < m and forwards[j] - backwards[j] < warm_up
                if is_forward:
                    k = forwards[j]
                    ready_s = 0.0 if j == 0 else forward_end[j - 1, k]
                else:
                    k = backwards[j]
                    ready_s = forward_end[j, k] if j == p - 1 else backward_end[j + 1, k]
                if ready_s < 0.0:
                    break
                if is_forward:
                    clock_s[j] = max(clock_s[j], ready_s) + seconds[j, 0]
                    forward_end[j, k] = clock_s[j]
                    forwards[j] += 1
                else:
                    clock_s[j] = max(clock_s[j], ready_s) + seconds[j, 1]
                    backward_end[j, k] = clock_s[j]
                    backwards[j] += 1
                left -= 1
    return float((clock_s + seconds[:, 2]).max())
