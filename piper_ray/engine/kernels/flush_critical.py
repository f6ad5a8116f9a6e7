"""Kernels: the critical paths of ``kernels.flush_paths``, as how often each pass of each stage is on them. Stages are
by the number of stages behind them."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import inlined_kernel, kernel
from piper_ray.engine.kernels.types import FloatArray, IndexArray

FORWARD, BACKWARD, SYNC = 0, 1, 2


@kernel
def paths_of_gpipe(microbatches: int, forward_s: FloatArray, backward_s: FloatArray) -> FloatArray:
    """Returns paths through all forward passes and through the backward passes up to each stage: float64[paths, 3,
    stages], with the passes forward and backward and the synchronisation."""
    stages = forward_s.size
    often = np.zeros((stages, 3, stages))
    slowest_f = slowest_b = 0
    for q in range(1, stages):
        slowest_f = q if forward_s[q] > forward_s[slowest_f] else slowest_f
    for end in range(stages):
        slowest_b = end if backward_s[end] > backward_s[slowest_b] else slowest_b
        for q in range(stages):
            often[end, FORWARD, q] = 1.0
            often[end, BACKWARD, q] = 1.0 if q <= end else 0.0
        often[end, FORWARD, slowest_f] += microbatches - 1
        often[end, BACKWARD, slowest_b] += microbatches - 1
        often[end, SYNC, end] = 1.0
    return often


@kernel
def paths_of_1f1b(microbatches: int, forward_s: FloatArray, backward_s: FloatArray, ends: IndexArray) -> FloatArray:
    """Returns, for each end, paths to the end of that stage: for each stage behind it and itself one that has m - w + 1
    microbatches there. Arrays as above."""
    stages, m, used = forward_s.size, microbatches, 0
    often = np.zeros((int((ends + 1).sum()), 3, stages))
    for end in ends:
        for q in range(end + 1):
            path, w = often[used], min(m, q + 1)
            down_to, down_at, down_s = _farthest(m, q, end, forward_s, backward_s, forward_s)
            up_to, up_at, up_s = _farthest(m, q, end, forward_s, backward_s, backward_s)
            downs, ups = 1.0, 1.0
            if w == m:
                warm_at, last_at = _slowest(forward_s, q, end), _slowest(backward_s, q, end)
                if (w - 1) * forward_s[warm_at] + up_s >= down_s + (w - 1) * backward_s[last_at]:
                    downs = 0.0
                    path[FORWARD, warm_at] += w - 1
                else:
                    ups = 0.0
                    path[BACKWARD, last_at] += w - 1
            path[FORWARD, down_at] += downs * (min(m, down_to + 1) - 1)
            path[BACKWARD, up_at] += ups * (min(m, up_to + 1) - 1)
            for k in range(stages):
                if k < q:
                    both = (downs if k >= down_to else 0.0) + (ups if k >= up_to else 0.0)
                else:
                    both = m - w + 1.0 if k == q else 1.0
                path[FORWARD, k] += both
                path[BACKWARD, k] += both if k <= end else 0.0
            path[SYNC, end] = 1.0
            used += 1
    return often


@inlined_kernel
def _farthest(
    m: int, q: int, end: int, forward_s: FloatArray, backward_s: FloatArray, pass_s: FloatArray
) -> tuple[int, int, float]:
    """Returns how far the longest way behind stage q reaches, the slowest stage from there to the end, and the length
    of the way: S of the stage or, by its backward passes, E."""
    at = slowest = _slowest(pass_s, q, end)
    reach, longest_s, way_s = q, (min(m, q + 1) - 1) * pass_s[slowest], 0.0
    for k in range(q - 1, -1, -1):
        way_s += forward_s[k] + backward_s[k]
        if pass_s[k] >= pass_s[slowest]:
            slowest = k
        whole_s = way_s + (min(m, k + 1) - 1) * pass_s[slowest]
        if whole_s > longest_s:
            reach, at, longest_s = k, slowest, whole_s
    return reach, at, longest_s


@inlined_kernel
def _slowest(pass_s: FloatArray, first: int, end: int) -> int:
    found = first
    for k in range(first + 1, end + 1):
        if pass_s[k] > pass_s[found]:
            found = k
    return found
