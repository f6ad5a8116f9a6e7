"""Kernel: a step of one pipeline, simulated pass by pass."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.flush_types import GPIPE
from piper_ray.engine.kernels.types import FloatArray


@kernel
def simulate_step(
    schedule: int, microbatches: int, forward_s: FloatArray, backward_s: FloatArray, sync_s: FloatArray
) -> float:
    """Seconds until all stages, front to back, have done ``microbatches`` and synchronised.

    Each stage does its passes in the schedule's order, each as soon as what it needs is there: a forward pass needs
    that of the stage before, a backward pass that of the stage behind, at the last stage its own forward pass.
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
