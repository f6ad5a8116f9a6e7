"""Kernels: a plan with chunks made better by local moves, each valued by simulation."""

from __future__ import annotations

import numpy as np

from piper_ray.compiled.jit import kernel
from piper_ray.engine.kernels.chunk_bound import ACTIVATION, FIXED, FORWARD_S, WEIGHT_S
from piper_ray.engine.kernels.chunk_program import ChunkProgram, copy_into, simulate_chunks
from piper_ray.engine.kernels.chunk_stages import OrderedLayers, chunk_figures, fit_rank, peak_bytes, sync_of_ranks
from piper_ray.engine.kernels.types import FloatArray, IndexArray

DRAWS = 8
"""Random numbers that a move takes."""

_OF_A_BORDER = 0.7
_TO_A_NEIGHBOUR = 0.6
_OF_TWO_LAYERS = 0.7
"""Shares of moves."""


@kernel
def batch_seconds(
    layers: OrderedLayers,
    program: ChunkProgram,
    sync_s_per_byte: float,
    cuts: IndexArray,
    choice: IndexArray,
    chunk_of: IndexArray,
    end_s: FloatArray,
) -> float:
    """Simulated. chunk_of, end_s: scratch, see ``chunk_figures`` and ``simulate_chunks``."""
    figures = chunk_figures(layers, program.rank_of, cuts, choice, chunk_of)
    sync_s = sync_of_ranks(program, figures, sync_s_per_byte)
    return simulate_chunks(program, figures[:, FORWARD_S : WEIGHT_S + 1], sync_s, end_s)


@kernel
def fit_all(
    layers: OrderedLayers,
    program: ChunkProgram,
    cuts: IndexArray,
    held: FloatArray,
    memory_bytes: float,
    choice: IndexArray,
) -> bool:
    """``fit_rank`` for every rank."""
    for rank in range(program.last.size):
        if not fit_rank(layers, program, rank, cuts, held, memory_bytes, choice):
            return False
    return True


@kernel
def anneal(
    layers: OrderedLayers,
    program: ChunkProgram,
    sync_s_per_byte: float,
    held: FloatArray,
    memory_bytes: float,
    cuts: IndexArray,
    choice: IndexArray,
    draws: FloatArray,
    heat: float,
    control: FloatArray,
) -> float:
    """Seconds of the best plan found, which is left in ``cuts`` and ``choice``; they hold one that fits before.

    Simulated annealing from ``heat``, relative to the plan's time, down to nothing. A move takes a layer from a chunk
    to another, near or far, which shifts the chunks between, or changes a layer's TMPC. It ends early when control[1]
    is not zero. draws: float64[moves, DRAWS], random, from 0 to below 1.
    """
    moves = draws.shape[0]
    s, n, p = cuts.size - 1, choice.size, program.last.size
    chunk_of = np.empty(n, np.int64)
    end_s = np.empty(program.kind.size + 1)
    now_s = batch_seconds(layers, program, sync_s_per_byte, cuts, choice, chunk_of, end_s)
    best_s, best_cuts, best_choice = now_s, cuts.copy(), choice.copy()
    new_cuts, new_choice = cuts.copy(), choice.copy()
    touched = np.empty(p, np.bool_)
    for move in range(moves):
        if control[1] != 0.0:
            break
        copy_into(new_cuts, cuts)
        copy_into(new_choice, choice)
        draw = draws[move]
        if s > 1 and draw[0] < _OF_A_BORDER:
            a, b = int(draw[1] * s), int(draw[2] * s)
            if draw[3] < _TO_A_NEIGHBOUR:
                b = a + 1 if draw[4] < 0.5 else a - 1
            if b < 0 or b >= s or a == b or cuts[a + 1] - cuts[a] < 2:
                continue
            for rank in range(p):
                touched[rank] = False
            for k in range(min(a, b), max(a, b) + 1):
                touched[program.rank_of[k]] = True
            for k in range(min(a, b) + 1, max(a, b) + 1):
                new_cuts[k] += -1 if a < b else 1
            fits = True
            for rank in range(p):
                if touched[rank] and not fit_rank(layers, program, rank, new_cuts, held, memory_bytes, new_choice):
                    fits = False
                    break
            if not fits:
                continue
        else:
            x = int(draw[1] * n)
            options = layers.option_start[x + 1] - layers.option_start[x]
            if options < 2:
                continue
            k = 0
            while cuts[k + 1] <= x:
                k += 1
            rank = program.rank_of[k]
            new_choice[x] = layers.option_start[x] + int(draw[2] * options)
            # Another layer of the rank makes room, or takes what became free.
            other_chunk = program.stage_of[rank, int(draw[3] * program.stage_of.shape[1])]
            y = cuts[other_chunk] + int(draw[4] * (cuts[other_chunk + 1] - cuts[other_chunk]))
            if y != x and draw[5] < _OF_TWO_LAYERS:
                of_other = layers.option_start[y + 1] - layers.option_start[y]
                new_choice[y] = layers.option_start[y] + int(draw[6] * of_other)
            if not _rank_fits(layers, program, rank, new_cuts, memory_bytes, new_choice):
                continue
        found_s = batch_seconds(layers, program, sync_s_per_byte, new_cuts, new_choice, chunk_of, end_s)
        warmth = heat * (1.0 - move / moves) * best_s
        if found_s <= now_s or draw[7] < np.exp((now_s - found_s) / max(warmth, 1e-300)):
            now_s = found_s
            copy_into(cuts, new_cuts)
            copy_into(choice, new_choice)
            if now_s < best_s:
                best_s = now_s
                copy_into(best_cuts, cuts)
                copy_into(best_choice, choice)
    copy_into(cuts, best_cuts)
    copy_into(choice, best_choice)
    return best_s


@kernel
def _rank_fits(
    layers: OrderedLayers, program: ChunkProgram, rank: int, cuts: IndexArray, memory_bytes: float, choice: IndexArray
) -> bool:
    v = program.stage_of.shape[1]
    activation, fixed = np.zeros(v), 0.0
    for chunk in range(v):
        k = program.stage_of[rank, chunk]
        for x in range(cuts[k], cuts[k + 1]):
            activation[chunk] += layers.figures[choice[x], ACTIVATION]
            fixed += layers.figures[choice[x], FIXED]
    return bool(peak_bytes(program, rank, activation, fixed) <= memory_bytes)
