"""Kernels: all plans of a small shape, gone through in depth, so that what is found is the best and proved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.chunk_bound import ACTIVATION, FIXED, FORWARD_S, INPUT_S, WEIGHT_S, WEIGHTS
from piper_ray.engine.kernels.chunk_moves import batch_seconds
from piper_ray.engine.kernels.chunk_program import copy_into
from piper_ray.engine.kernels.chunk_stages import ChunkModel, peak_bytes
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_PASSES_A_STEP = 8
"""Simulated while one layer is placed."""


class Windows(NamedTuple):
    """Where each layer may be, chunks first_chunk .. last_chunk, and in which variants each option may."""

    first_chunk: IndexArray  # int64[n]
    last_chunk: IndexArray  # int64[n]
    variants: IndexArray  # int64[options]: a bit for each


@kernel
def best_of_all(
    model: ChunkModel,
    windows: Windows,
    target_s: float,
    by_bytes: bool,
    most_steps: int,
    control: FloatArray,
    chunk_of: IndexArray,
    choice: IndexArray,
) -> tuple[float, bool]:
    """Of the plans that fit and take less than ``target_s`` the least seconds, inf if there is none, and whether all
    were looked at: it ends early after so many steps, or when control[1] is not zero. The plan is written to
    ``chunk_of`` and ``choice``. by_bytes: the least bytes instead that a rank holds which holds the most.

    Layer by layer, after those that it reads: every chunk of its window and every option. A branch ends where a rank
    holds too much, or has more to do than ``target_s``, or too few layers are left for chunks that are empty, or a
    chunk's layers have no variant in common.
    """
    layers, program, sync_s_per_byte, memory_bytes, _ = model
    first_chunk, last_chunk, variants = windows
    n, s, p, m = choice.size, program.rank_of.size, program.last.size, program.microbatches
    figures, v = layers.figures, program.stage_of.shape[1]
    end_s = np.empty(program.kind.size + 1)
    now_chunk_of, now_choice = np.zeros(n, np.int64), np.zeros(n, np.int64)
    activation, fixed, work_s = np.zeros((p, v)), np.zeros(p), np.zeros(p)
    common = np.full(s, -1, np.int64)
    old_common = np.zeros(n, np.int64)
    old_activation, old_fixed, old_work_s = np.zeros(n), np.zeros(n), np.zeros(n)
    count, empty = np.zeros(s, np.int64), s
    tried = np.zeros(n, np.int64)  # of the layer's chunks and options
    first = np.zeros(n, np.int64)  # the least chunk, after what it reads
    best, steps = np.inf, 0
    x, back = 0, False
    first[0] = first_chunk[0]
    while x >= 0:
        steps += 1
        if steps > most_steps or control[1] != 0.0:
            return best, False
        options = layers.option_start[x + 1] - layers.option_start[x]
        if back:  # takes the layer out again
            k = now_chunk_of[x]
            r = program.rank_of[k]
            activation[r, program.turn_of[k]], fixed[r], work_s[r] = old_activation[x], old_fixed[x], old_work_s[x]
            common[k] = old_common[x]
            count[k] -= 1
            empty += count[k] == 0
        k = first[x] + tried[x] // options
        if k > last_chunk[x]:
            x, back = x - 1, True
            continue
        o = layers.option_start[x] + tried[x] % options
        tried[x] += 1
        r, turn = program.rank_of[k], program.turn_of[k]
        old_activation[x], old_fixed[x], old_work_s[x] = activation[r, turn], fixed[r], work_s[r]
        old_common[x] = common[k]
        now_chunk_of[x], now_choice[x] = k, o
        common[k] &= variants[o]
        activation[r, turn] += figures[o, ACTIVATION]
        fixed[r] += figures[o, FIXED]
        work_s[r] += m * (figures[o, FORWARD_S] + figures[o, INPUT_S] + figures[o, WEIGHT_S])
        work_s[r] += figures[o, WEIGHTS] * sync_s_per_byte
        empty -= count[k] == 0
        count[k] += 1
        back = True
        if common[k] == 0 or empty > n - 1 - x or work_s[r] >= target_s:
            continue
        if peak_bytes(program, r, activation[r], fixed[r]) > memory_bytes:
            continue
        if x < n - 1:
            x, back = x + 1, False
            tried[x], first[x] = 0, first_chunk[x]
            for e in range(layers.predecessor_start[x], layers.predecessor_start[x + 1]):
                first[x] = max(first[x], now_chunk_of[layers.predecessor[e]])
            continue
        if by_bytes:
            best = 0.0
            for r in range(p):
                best = max(best, peak_bytes(program, r, activation[r], fixed[r]))
            memory_bytes = np.nextafter(best, -1.0)
            copy_into(chunk_of, now_chunk_of)
            copy_into(choice, now_choice)
            continue
        steps += program.kind.size // _PASSES_A_STEP
        found_s = batch_seconds(model, now_chunk_of, now_choice, end_s)
        if found_s < target_s:
            best = target_s = found_s
            copy_into(chunk_of, now_chunk_of)
            copy_into(choice, now_choice)
    return best, True
