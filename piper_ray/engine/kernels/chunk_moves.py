"""Kernels: improve a plan with chunks by local moves, each valued by simulation; and enumerate all plans of a small
shape depth-first, which proves the best.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.compiled.jit import inner_kernel, kernel, leaf_kernel
from piper_ray.engine.kernels.chunk_bound import FIGURE
from piper_ray.engine.kernels.chunk_program import ChunkProgram, copy_into, simulate_chunks
from piper_ray.engine.kernels.chunk_stages import (
    ChunkModel,
    OrderedLayers,
    chunk_figures,
    fit_rank,
    peak_bytes,
    rank_bytes,
    sync_of_ranks,
)
from piper_ray.engine.kernels.types import FloatArray, IndexArray

DRAWS = 8
"""Number of random numbers per move."""

_OF_A_BORDER = 0.45
_OF_A_PIECE = 0.75
_TO_A_NEIGHBOUR = 0.6
_IN_EXCHANGE = 0.5
_OF_TWO_LAYERS = 0.7
"""Shares of kinds of moves; the second one is of borders and pieces together."""

_MARKED = -1
"""Chunk number of layers that are being moved."""


@kernel
def batch_seconds(model: ChunkModel, chunk_of: IndexArray, choice: IndexArray, end_s: FloatArray) -> float:
    """Returns the simulated seconds of a batch. end_s: scratch, see ``simulate_chunks``."""
    figures = chunk_figures(model.layers, model.program.rank_of, chunk_of, choice)
    sync_s = sync_of_ranks(model.program, figures, model.sync_s_per_byte)
    return simulate_chunks(model.program, figures[:, FIGURE.forward_s : FIGURE.weight_s + 1], sync_s, end_s)


@kernel
def fit_all(model: ChunkModel, chunk_of: IndexArray, choice: IndexArray) -> bool:
    """Calls ``fit_rank`` for every rank."""
    for rank in range(model.program.last.size):
        if not fit_rank(model, rank, chunk_of, choice):
            return False
    return True


@kernel
def anneal(
    model: ChunkModel,
    chunk_of: IndexArray,
    choice: IndexArray,
    draws: FloatArray,
    heat: float,
    control: FloatArray,
) -> float:
    """Returns the seconds of the best plan found, which is left in ``chunk_of`` and ``choice``. They must hold a plan
    that fits at first.

    Simulated annealing from ``heat``, relative to the plan's time, down to zero. A move shifts a layer over each border
    between two chunks, or moves a piece of the graph from one chunk to another, perhaps in exchange for one from there,
    or changes a layer's TMPC. It ends early if control[1] is not zero. draws: float64[moves, DRAWS], random numbers in
    [0, 1).
    """
    layers, program, moves = model.layers, model.program, draws.shape[0]
    s, n = program.rank_of.size, choice.size
    end_s = np.empty(program.kind.size + 1)
    now_s = batch_seconds(model, chunk_of, choice, end_s)
    best_s, best_chunk_of, best_choice = now_s, chunk_of.copy(), choice.copy()
    new_chunk_of, new_choice = chunk_of.copy(), choice.copy()
    for move in range(moves):
        if control[1] != 0.0:
            break
        copy_into(new_chunk_of, chunk_of)
        copy_into(new_choice, choice)
        draw = draws[move]
        if s > 1 and draw[0] < _OF_A_PIECE:
            if draw[0] < _OF_A_BORDER:
                a, b = int(draw[1] * s), int(draw[2] * s)
                if draw[3] < _TO_A_NEIGHBOUR:
                    b = a + 1 if draw[4] < 0.5 else a - 1
                if b < 0 or b >= s or a == b:
                    continue
                _shift(layers, chunk_of, a, b, int(draw[5] * n), new_chunk_of)
            else:
                a, b = _move_piece(layers, int(draw[1] * n), draw[2] < 0.5, draw[3], s, new_chunk_of)
                if a != b and draw[5] < _IN_EXCHANGE:
                    _return_piece(layers, a, b, int(draw[6] * n), s, chunk_of, new_chunk_of)
            if not _fit_changed(model, chunk_of, new_chunk_of, new_choice):
                continue
        else:
            x = int(draw[1] * n)
            options = layers.option_start[x + 1] - layers.option_start[x]
            if options < 2:
                continue
            rank = program.rank_of[chunk_of[x]]
            new_choice[x] = layers.option_start[x] + int(draw[2] * options)
            # Another layer of the rank makes room, or uses the room that became free.
            y = _on_rank(program, chunk_of, rank, int(draw[3] * n))
            if y != x and draw[5] < _OF_TWO_LAYERS:
                of_other = layers.option_start[y + 1] - layers.option_start[y]
                new_choice[y] = layers.option_start[y] + int(draw[6] * of_other)
            activation, fixed = rank_bytes(model, rank, new_chunk_of, new_choice)
            if peak_bytes(program, rank, activation, fixed) > model.memory_bytes:
                continue
        found_s = batch_seconds(model, new_chunk_of, new_choice, end_s)
        warmth = heat * (1.0 - move / moves) * best_s
        if found_s <= now_s or draw[7] < np.exp((now_s - found_s) / max(warmth, 1e-300)):
            now_s = found_s
            copy_into(chunk_of, new_chunk_of)
            copy_into(choice, new_choice)
            if now_s < best_s:
                best_s = now_s
                copy_into(best_chunk_of, chunk_of)
                copy_into(best_choice, choice)
    copy_into(chunk_of, best_chunk_of)
    copy_into(choice, best_choice)
    return best_s


@leaf_kernel
def _has_neighbour_in(k: int, chunk_of: IndexArray, start: IndexArray, neighbour: IndexArray, x: int) -> bool:
    """Whether one of the neighbours is in chunk k."""
    for e in range(start[x], start[x + 1]):
        if chunk_of[neighbour[e]] == k:
            return True
    return False


@leaf_kernel
def _shift(layers: OrderedLayers, chunk_of: IndexArray, a: int, b: int, first: int, new_chunk_of: IndexArray) -> None:
    """Moves one layer over each border from chunk a to chunk b. first: where to begin to look for layers that may
    move."""
    n = chunk_of.size
    step = 1 if a < b else -1
    start = layers.successor_start if a < b else layers.predecessor_start
    neighbour = layers.successor if a < b else layers.predecessor
    for k in range(a, b, step):
        for i in range(n):
            x = (first + i) % n
            if chunk_of[x] != k:
                continue
            if not _has_neighbour_in(k, chunk_of, start, neighbour, x):
                new_chunk_of[x] = k + step
                break


@leaf_kernel
def _move_piece(
    layers: OrderedLayers, x: int, to_later: bool, far: float, chunks: int, chunk_of: IndexArray
) -> tuple[int, int]:
    """Moves a piece that begins at x as far as it may, or less. Returns its old and its new chunk; equal if it cannot
    move."""
    a = chunk_of[x]
    limit = _mark_piece(layers, x, to_later, chunks, chunk_of)
    b = a
    if limit > a:
        b = a + 1 + int(far * (limit - a))
    if limit < a:
        b = a - 1 - int(far * (a - limit))
    _put_marked(chunk_of, b)
    return a, b


@leaf_kernel
def _return_piece(
    layers: OrderedLayers, a: int, b: int, first: int, chunks: int, old_chunk_of: IndexArray, chunk_of: IndexArray
) -> None:
    """Moves a piece from chunk b to chunk a, if one may. first: where to begin to look for one of old layers."""
    n = chunk_of.size
    for i in range(n):
        x = (first + i) % n
        if old_chunk_of[x] == b:
            limit = _mark_piece(layers, x, a > b, chunks, chunk_of)
            free = limit >= a if a > b else limit <= a
            _put_marked(chunk_of, a if free else b)
            return


@leaf_kernel
def _mark_piece(layers: OrderedLayers, x: int, to_later: bool, chunks: int, chunk_of: IndexArray) -> int:
    """Puts a layer, and those of its chunk reached from it, into chunk _MARKED. Returns the chunk to which they may
    go."""
    n, a = chunk_of.size, chunk_of[x]
    before_start = layers.predecessor_start if to_later else layers.successor_start
    before = layers.predecessor if to_later else layers.successor
    behind_start = layers.successor_start if to_later else layers.predecessor_start
    behind = layers.successor if to_later else layers.predecessor
    chunk_of[x] = _MARKED
    limit = chunks - 1 if to_later else 0
    for i in range(n):
        y = i if to_later else n - 1 - i  # those that it is reached through come before it
        if chunk_of[y] == a and _has_neighbour_in(_MARKED, chunk_of, before_start, before, y):
            chunk_of[y] = _MARKED
    for y in range(n):
        if chunk_of[y] != _MARKED:
            continue
        for e in range(behind_start[y], behind_start[y + 1]):
            k = chunk_of[behind[e]]
            if k != _MARKED:
                limit = min(limit, k) if to_later else max(limit, k)
    return int(limit)


@leaf_kernel
def _put_marked(chunk_of: IndexArray, k: int) -> None:
    for x in range(chunk_of.size):
        if chunk_of[x] == _MARKED:
            chunk_of[x] = k


@leaf_kernel
def _on_rank(program: ChunkProgram, chunk_of: IndexArray, rank: int, first: int) -> int:
    """Returns a layer of the rank, the first from ``first`` on."""
    n = chunk_of.size
    x = first
    while program.rank_of[chunk_of[x]] != rank:
        x = (x + 1) % n
    return int(x)


@inner_kernel
def _fit_changed(model: ChunkModel, old_chunk_of: IndexArray, chunk_of: IndexArray, choice: IndexArray) -> bool:
    """Calls ``fit_rank`` for the ranks of chunks that have changed. Returns False also if none has, or one is empty."""
    rank_of = model.program.rank_of
    count = np.zeros(rank_of.size, np.int64)
    touched = np.zeros(model.program.last.size, np.bool_)
    changed = False
    for x in range(chunk_of.size):
        count[chunk_of[x]] += 1
        if chunk_of[x] != old_chunk_of[x]:
            touched[rank_of[chunk_of[x]]] = True
            touched[rank_of[old_chunk_of[x]]] = True
            changed = True
    if not changed or count.min() == 0:
        return False
    for rank in range(touched.size):
        if touched[rank] and not fit_rank(model, rank, chunk_of, choice):
            return False
    return True


_PASSES_A_STEP = 8
"""Passes that are simulated in the time in which one layer is placed."""


_SURELY = 1.0 - 1e-13
"""A factor on sums of a few layers' figures, because they are rounded."""


class Windows(NamedTuple):
    """The chunks first_chunk .. last_chunk in which each layer may be, and the variants of each option."""

    first_chunk: IndexArray  # int64[n]
    last_chunk: IndexArray  # int64[n]
    variants: IndexArray  # int64[options]: a bit for each


class WalkBounds(NamedTuple):
    """Bounds on all plans that are sought, as sums over layers. waits_s: float64[2, p], the least time in which a rank
    does nothing or transfers: before its synchronisation, and without that in all. fixed_s, priced_s: a batch takes at
    least ``fixed_s`` and float64[options, s], for each layer what its option costs in its chunk. mean_bytes:
    float64[options, s], what an option holds in a chunk on average over some moments of the rank."""

    waits_s: FloatArray
    fixed_s: float
    priced_s: FloatArray
    mean_bytes: FloatArray


class PlanWalk(NamedTuple):
    """The end of a walk over all plans. value: the least seconds or bytes; inf if there is no such plan. steps: those
    taken. share: the part of the plans that was looked at; 1 if all were."""

    value: float
    steps: int
    share: float


@inner_kernel
def _least_ahead(option_start: IndexArray, windows: Windows, costs: FloatArray) -> FloatArray:
    """float64[n + 1]: the least that the layers from each one on cost. costs: float64[options, s]."""
    n = option_start.size - 1
    found = np.zeros(n + 1)
    for x in range(n - 1, -1, -1):
        least = np.inf
        for k in range(windows.first_chunk[x], windows.last_chunk[x] + 1):
            for o in range(option_start[x], option_start[x + 1]):
                least = min(least, costs[o, k])
        found[x] = found[x + 1] + least
    return found


@kernel
def best_of_all(
    model: ChunkModel,
    windows: Windows,
    bounds: WalkBounds,
    target_s: float,
    by_bytes: bool,
    most_steps: int,
    control: FloatArray,
    chunk_of: IndexArray,
    choice: IndexArray,
) -> PlanWalk:
    """Walks through all plans that fit and take less than ``target_s``. It ends early after ``most_steps`` steps, or if
    control[1] is not zero. The best plan is written to ``chunk_of`` and ``choice``. by_bytes: minimises the bytes of
    the rank that holds most instead.

    It places layer by layer, each after those that it reads: every chunk of its window and every option. A branch ends
    if a rank holds too much or is busy and waits for more than ``target_s``, if too few layers are left for chunks that
    are empty, if a chunk's layers have no variant in common, or if the layers placed and the least of the others are
    above what a plan may take, or what all ranks may hold on average.
    """
    layers, program, sync_s_per_byte, memory_bytes, _ = model
    first_chunk, last_chunk, variants = windows
    n, s, p, m = choice.size, program.rank_of.size, program.last.size, program.microbatches
    figures, v = layers.figures, program.stage_of.shape[1]
    end_s = np.empty(program.kind.size + 1)
    now_chunk_of, now_choice = np.zeros(n, np.int64), np.zeros(n, np.int64)
    activation, fixed, work_s = np.zeros((p, v)), np.zeros(p), bounds.waits_s.copy()
    ahead_s = _least_ahead(layers.option_start, windows, bounds.priced_s)
    ahead_bytes = _least_ahead(layers.option_start, windows, bounds.mean_bytes)
    total_s, total_bytes = np.zeros(n + 1), np.zeros(n + 1)  # of the layers before each
    total_s[0] = bounds.fixed_s
    common = np.full(s, -1, np.int64)
    old_common = np.zeros(n, np.int64)
    old_activation, old_fixed, old_work_s = np.zeros(n), np.zeros(n), np.zeros((n, 2))
    count, empty = np.zeros(s, np.int64), s
    tried = np.zeros(n, np.int64)  # number of the layer's chunks and options tried
    first = np.zeros(n, np.int64)  # the least chunk, given those of the layers that it reads
    best, steps = np.inf, 0
    x, back = 0, False
    first[0] = first_chunk[0]
    while x >= 0:
        steps += 1
        if steps > most_steps or control[1] != 0.0:
            share, part = 0.0, 1.0
            for y in range(x):
                part /= (last_chunk[y] - first[y] + 1) * (layers.option_start[y + 1] - layers.option_start[y])
                share += part * (tried[y] - 1)
            return PlanWalk(best, steps, share)
        options = layers.option_start[x + 1] - layers.option_start[x]
        if back:  # takes the layer out again
            k = now_chunk_of[x]
            r = program.rank_of[k]
            activation[r, program.turn_of[k]], fixed[r] = old_activation[x], old_fixed[x]
            work_s[0, r], work_s[1, r] = old_work_s[x, 0], old_work_s[x, 1]
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
        old_activation[x], old_fixed[x] = activation[r, turn], fixed[r]
        old_work_s[x, 0], old_work_s[x, 1] = work_s[0, r], work_s[1, r]
        old_common[x] = common[k]
        now_chunk_of[x], now_choice[x] = k, o
        common[k] &= variants[o]
        activation[r, turn] += figures[o, FIGURE.activation]
        fixed[r] += figures[o, FIGURE.fixed]
        passes_s = m * (figures[o, FIGURE.forward_s] + figures[o, FIGURE.input_s] + figures[o, FIGURE.weight_s])
        work_s[0, r] += passes_s + figures[o, FIGURE.weights] * sync_s_per_byte
        work_s[1, r] += passes_s
        empty -= count[k] == 0
        count[k] += 1
        back = True
        total_s[x + 1] = total_s[x] + bounds.priced_s[o, k]
        total_bytes[x + 1] = total_bytes[x] + bounds.mean_bytes[o, k]
        if common[k] == 0 or empty > n - 1 - x or max(work_s[0, r], work_s[1, r]) * _SURELY >= target_s:
            continue
        if (total_s[x + 1] + ahead_s[x + 1]) * _SURELY >= target_s:
            continue
        if (total_bytes[x + 1] + ahead_bytes[x + 1]) * _SURELY > p * memory_bytes:
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
    return PlanWalk(best, steps, 1.0)
