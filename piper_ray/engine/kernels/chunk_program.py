"""Kernels: the event graph of a schedule with chunks, and the time that follows from the chunks' durations.

Which pass waits for which depends only on the shape of the pipeline. So its passes are ordered once, and a plan is
simulated in one run through them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.types import FloatArray, IndexArray

# Kinds of passes, as numbered by ``simulate.actions``: forward; backward, whole; its two parts, gradients of the inputs
# and of the weights.
FORWARD = 0
BACKWARD = 1
INPUTS = 2
WEIGHTS = 3

PASSES = 3
"""Columns of durations and of counts: forward, gradients of inputs, gradients of weights. A whole backward pass takes
the sum of the last two."""

PassArray: TypeAlias = npt.NDArray[np.int32]
"""Of each pass, in half the bytes of other indices: a simulation reads them all."""


class ChunkProgram(NamedTuple):
    """The passes of one pipeline of p ranks and s = p v stages, each after those for which it waits.

    Each stage is a chunk of the plan, front to back. held: the numbers of its chunks' microbatches that a rank has in
    flight at once, as undominated vectors.
    """

    microbatches: int
    kind: PassArray  # int32[passes]
    stage: PassArray  # int32[passes]
    before: PassArray  # int32[passes]: the previous pass on the rank; -1: none
    awaited: PassArray  # int32[passes]: the pass whose output it needs; -1: none
    last: IndexArray  # int64[p]: the rank's last pass
    rank_of: IndexArray  # int64[s]
    turn_of: IndexArray  # int64[s]: the number of a stage among its rank's chunks
    stage_of: IndexArray  # int64[p, v]
    held_start: IndexArray  # int64[p + 1]
    held: IndexArray  # int64[.., v]


@kernel
def build_program(
    microbatches: int, listed: IndexArray, start: IndexArray, stage_of: IndexArray
) -> tuple[bool, ChunkProgram]:
    """Builds the program. Returns False if the ranks would wait for each other forever.

    listed: int64[n, 3], the ranks' lists one after the other, as in ``simulate.actions``: kind, chunk, microbatch.
    start: int64[p + 1], the start of each list. stage_of: int64[p, v].
    """
    p, v = stage_of.shape
    s, m = p * v, microbatches
    rank_of, turn_of = np.empty(s, np.int64), np.empty(s, np.int64)
    for r in range(p):
        for chunk in range(v):
            rank_of[stage_of[r, chunk]], turn_of[stage_of[r, chunk]] = r, chunk
    total = start[p]
    kind, stage = np.empty(total, np.int32), np.empty(total, np.int32)
    before, awaited = np.empty(total, np.int32), np.empty(total, np.int32)
    last = np.full(p, -1, np.int64)
    ran = np.full((2, s, m), -1, np.int64)
    position = start[:-1].copy()
    count, moved = 0, True
    while moved:
        moved = False
        for r in range(p):
            while position[r] < start[r + 1]:
                a = position[r]
                k, at, microbatch = listed[a, 0], stage_of[r, listed[a, 1]], listed[a, 2]
                needed, needs = -1, True
                if k == FORWARD:
                    needs = at > 0
                    if needs:
                        needed = ran[0, at - 1, microbatch]
                elif k == WEIGHTS:
                    needed = ran[1, at, microbatch]
                elif at < s - 1:
                    needed = ran[1, at + 1, microbatch] if ran[0, at, microbatch] >= 0 else -1
                else:
                    needed = ran[0, at, microbatch]
                if needs and needed < 0:
                    break
                kind[count], stage[count], before[count], awaited[count] = k, at, last[r], needed
                if k == FORWARD:
                    ran[0, at, microbatch] = count
                elif k != WEIGHTS:
                    ran[1, at, microbatch] = count
                last[r] = count
                count += 1
                position[r] += 1
                moved = True
    held_start, held = _held(listed, start, v)
    program = ChunkProgram(
        m,
        kind[:count],
        stage[:count],
        before[:count],
        awaited[:count],
        last,
        rank_of,
        turn_of,
        stage_of,
        held_start,
        held,
    )
    return count == total, program


@inner_kernel
def _held(listed: IndexArray, start: IndexArray, v: int) -> tuple[IndexArray, IndexArray]:
    """Returns the undominated vectors of microbatches in flight, rank after rank.

    A microbatch is in flight from the beginning of its forward pass to the end of its backward pass, or of W.
    """
    p = start.size - 1
    held_start = np.zeros(p + 1, np.int64)
    held = np.empty((16, v), np.int64)
    used = 0
    now = np.empty(v, np.int64)
    for r in range(p):
        now[:] = 0
        grew = False
        first = nearest = used
        for a in range(start[r], start[r + 1]):
            if listed[a, 0] == FORWARD:
                now[listed[a, 1]] += 1
                grew = True
            if listed[a, 0] == FORWARD or listed[a, 0] == INPUTS:
                continue
            if grew:
                # Vectors come again in the same order, so the one that beat the last vector, or the next, beats this.
                kept, beaten, n = first, False, nearest
                for _ in range(first, used):
                    if _at_most(now, held[n]):
                        beaten, nearest = True, n
                        break
                    n = n + 1 if n + 1 < used else first
                if not beaten:
                    for n in range(first, used):
                        if not _at_most(held[n], now):
                            copy_into(held[kept], held[n])
                            kept += 1
                    used = kept
                    if used == held.shape[0]:
                        more = np.empty((2 * used, v), np.int64)
                        for n in range(used):
                            copy_into(more[n], held[n])
                        held = more
                    copy_into(held[used], now)
                    nearest = used
                    used += 1
            now[listed[a, 1]] -= 1
            grew = False
        held_start[r + 1] = used
    return held_start, held[:used].copy()


@leaf_kernel
def copy_into(target: IndexArray, source: IndexArray) -> None:
    """Copies an array. An assignment of arrays does the same, but takes a second to compile."""
    for n in range(source.size):
        target[n] = source[n]


@leaf_kernel
def _at_most(one: IndexArray, other: IndexArray) -> bool:
    """Whether one is at most the other in every entry."""
    for n in range(one.size):
        if one[n] > other[n]:
            return False
    return True


@kernel
def simulate_chunks(program: ChunkProgram, seconds: FloatArray, sync_s: FloatArray, end_s: FloatArray) -> float:
    """Returns the seconds of a batch, until every rank has done its passes and synchronised.

    seconds: float64[s, PASSES]. sync_s: float64[p]. end_s: float64[passes + 1], scratch; afterwards pass a's end is at
    a + 1. Its first entry stands for pass -1, which ends at 0.
    """
    duration = np.empty((seconds.shape[0], 4))
    for k in range(seconds.shape[0]):
        duration[k, FORWARD] = seconds[k, 0]
        duration[k, BACKWARD] = seconds[k, 1] + seconds[k, 2]
        duration[k, INPUTS] = seconds[k, 1]
        duration[k, WEIGHTS] = seconds[k, 2]
    end_s[0] = 0.0
    for a in range(program.kind.size):
        start_s = max(end_s[program.before[a] + 1], end_s[program.awaited[a] + 1])
        end_s[a + 1] = start_s + duration[program.stage[a], program.kind[a]]
    batch_s = 0.0
    for r in range(program.last.size):
        batch_s = max(batch_s, end_s[program.last[r] + 1] + sync_s[r])
    return batch_s


@kernel
def longest_paths(
    program: ChunkProgram, seconds: FloatArray, sync_s: FloatArray, counts: FloatArray, rank: IndexArray
) -> float:
    """Returns the seconds of a batch as ``simulate_chunks``, and finds two of its longest paths, or one twice.

    counts: float64[2, s, PASSES], the passes of each stage on them. rank: int64[2], the ranks at their ends.
    """
    end_s = np.empty(program.kind.size + 1)
    batch_s = simulate_chunks(program, seconds, sync_s, end_s)
    for n in range(2):
        rank[n] = _critical_path(program, sync_s, end_s, n == 0, counts[n])
    return batch_s


@inner_kernel
def _critical_path(
    program: ChunkProgram, sync_s: FloatArray, end_s: FloatArray, along_rank: bool, counts: FloatArray
) -> int:
    """Counts the passes of each stage on a longest path, in float64[s, PASSES]. Returns the rank at its end.

    end_s: as ``simulate_chunks`` left it. If two paths are equal, it goes back along the rank or along the awaited
    pass.
    """
    rank = 0
    for r in range(1, program.last.size):
        if end_s[program.last[r] + 1] + sync_s[r] > end_s[program.last[rank] + 1] + sync_s[rank]:
            rank = r
    counts[:] = 0.0
    a = program.last[rank]
    while a >= 0:
        k, stage = program.kind[a], program.stage[a]
        if k == FORWARD:
            counts[stage, 0] += 1.0
        if k in (BACKWARD, INPUTS):
            counts[stage, 1] += 1.0
        if k in (BACKWARD, WEIGHTS):
            counts[stage, 2] += 1.0
        x, y = program.before[a], program.awaited[a]
        if end_s[x + 1] == end_s[y + 1]:
            a = x if along_rank or y < 0 else y
            if a < 0:
                a = max(x, y)
        else:
            a = x if end_s[x + 1] > end_s[y + 1] else y
    return rank
