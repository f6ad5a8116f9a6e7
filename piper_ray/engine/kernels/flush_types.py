"""Records of arrays for the kernels of the search under a flush.

Sizes: m downsets, n vertices, e edges that cost something, h tensors, words = ceil(n / 64), r variants, o options, c
prices of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray

GPIPE = 0
ONE_F_ONE_B = 1
TWO_BW = 2


class SumColumns(NamedTuple):
    """Columns of ``FlushTables.sums``. fast: with the option of least time for each layer."""

    least_s: int = 0  # forward and backward
    least_forward_s: int = 1
    least_backward_s: int = 2
    least_weights: int = 3
    least_activation: int = 4
    least_fixed: int = 5
    least_shared: int = 6
    fast_forward_s: int = 7
    fast_activation: int = 8
    fast_fixed: int = 9
    fast_shared: int = 10
    missing: int = 11  # layers without an option in the variant
    mixed: int = 12  # layers whose fastest option does not also have the least weights and charges


SUM = SumColumns()


class OriginColumns(NamedTuple):
    """Columns of ``TailArrays.origin``."""

    stages: int = 0  # number of stages of the tail
    downset: int = 1  # of the tail
    below: int = 2  # the state behind the first stage
    variant: int = 3  # of the first stage
    choice: int = 4
    mix: int = 5  # of the tail: see ``FlushTask``


ORIGIN = OriginColumns()

FIGURES = 7  # of a state
PRICED = 7  # the column behind them: what the stages cost by the prices of ``PathBounds``

SLACK = 1e-12
"""Relative: numbers that differ by no more are equal up to rounding."""

# How much is known of a stage's TMPC choice.
FASTEST = 1
LEAST_TIME = 2
ON_FRONT = 3  # the choice with the stage's seconds
NO_CHOICE = 4  # a bound that maybe no choice reaches


class FlushTables(NamedTuple):
    """A lattice and its options, shared by all tasks of a solve."""

    bits: BitArray  # uint64[m, words]
    crossing_start: IndexArray  # int64[m + 1]
    crossing: IndexArray  # int64[..], edges (u, v) with u outside and v inside, by downset
    edge_tail: IndexArray  # int64[e]
    edge_head: IndexArray  # int64[e]
    tensor_bits: BitArray  # uint64[h, words]: the ends of each tensor
    cut_start: IndexArray  # int64[m + 1], or int64[1] if there are no tensors
    cut: IndexArray  # int64[..], tensors with ends inside and outside, by downset
    tensor_forward_s: FloatArray  # float64[h]
    tensor_backward_s: FloatArray  # float64[h]
    sums: FloatArray  # float64[r, m, columns]: see SumColumns
    edge_in_s: FloatArray  # float64[r, e]: least charge of an edge in the stage of its head, in each direction
    edge_out_s: FloatArray  # float64[r, e]: the same for the stage of its tail
    option_start: IndexArray  # int64[r, n + 1], into the option_* arrays; the fastest option comes first
    option_forward_s: FloatArray  # float64[o]
    option_backward_s: FloatArray
    option_weights: FloatArray  # bytes
    option_activation: FloatArray
    option_fixed: FloatArray
    option_shared: FloatArray
    charge_start: IndexArray  # int64[o]: first of its charges: for each in-edge, then for each out-edge
    charge_s: FloatArray  # (c + extra) / B
    in_start: IndexArray  # int64[n + 1], into in_edge
    in_edge: IndexArray
    out_start: IndexArray  # int64[n + 1], into out_edge
    out_edge: IndexArray
    in_flight: IndexArray  # int64[k], ascending from 1: microbatches for which memory is priced
    memory_s: FloatArray  # float64[r, k * c]: prices, in s a byte
    priced_s: FloatArray  # float64[r, m, k * c]: least sum over the layers of t and the price of a y + b


class FlushTask(NamedTuple):
    """One (d, t), or with devices of several kinds one d and a t for each: all pipelines of stages with these degrees.

    The *mix* of a tail determines which stage may be put in front: the number of stages of each kind, the kind of the
    first one, and the kind promised for the stage in front. With one kind it is the number of stages. A stage's *move*
    is its own kind with those behind it and in front; with one kind, the rates of its borders. Sizes: r variants, z
    moves, g kinds, c *cells*: the numbers of stages of each kind. Mix 0 has no stages; the others are ordered by the
    kinds of the first stage and of the one in front, the *ends* of a tail, then by cell, in ascending order of stages
    (``flush_mixes``).
    """

    schedule: int
    data_parallel_degree: int
    microbatches: int  # N / d
    most_stages: int
    stages: int  # the only number of stages allowed; 0: any
    most_memory_bytes: float  # the largest memory of a device of any kind, with the tolerance
    memory_bytes: FloatArray  # float64[r]: of the devices of a variant's stages
    sync_s_per_byte: FloatArray  # float64[r]
    tensor_parallel_degrees: IndexArray  # int64[r]
    variants: IndexArray  # int64[..]: those that stages may have
    # int64[..]: variants with the same options and at most the charges of those of ``variants``, for bounds on
    # several stages. With several kinds they are the same ones.
    bounding: IndexArray
    ends: int  # the number of ends: 1 with one kind
    ends_behind: IndexArray  # int64[r]: the ends of a tail in front of which the stage may be put
    ends_ahead: IndexArray  # int64[r]: the ends of the tail that it then is
    move: IndexArray  # int64[r]
    next_cell: IndexArray  # int64[c, z]: of a tail with such a stage in front; -1: not allowed
    previous_cell: IndexArray  # int64[c, g]: with one stage less of a kind; -1: there is none
    is_whole: BitArray  # uint8[c]: 1 if a tail of all layers may have this many stages
    share_of_s: FloatArray  # float64[r]: see ``AheadArrays.ahead_share``; float64[0] with one kind
    share_left: FloatArray  # float64[c, 2]: of the stages that a tail leaves, see ``flush_mixes.ShareRoom``
    work_s: float  # the least time of stages of all layers together for a microbatch
    # float64[most_stages + 1]: see ``flush.paths.room``; of as many stages at the back; float64[0]: no bound.
    room: FloatArray


class PathBounds(NamedTuple):
    """Bounds by ``flush.path_prices``; of size 0 if there are none. By the number of stages behind, q: the price of a
    second of a stage's passes and of its synchronisation, and room_s, the price of a device's memory. first_sync: the
    additional price of synchronisation in the first stage of a plan, since positions in front are empty.
    """

    forward: FloatArray  # float64[most_stages]
    backward: FloatArray
    sync: FloatArray
    first_sync: FloatArray
    room_s: FloatArray
    of_stage_s: FloatArray  # float64[m, most_stages]: least cost of all layers of a downset with q stages behind
    ahead_s: FloatArray  # float64[m, most_stages + 1]: of all in front of a tail of that many stages, less its room


class FreeStages(NamedTuple):
    """Stages that cost nothing. start: int64[m + 1], the first one of an outer downset; int64[1] if there are none.
    inner: int64[..], ascending for each outer downset, which may be the last of its own."""

    start: IndexArray
    inner: IndexArray


NO_FREE_STAGES = FreeStages(np.zeros(1, np.int64), np.zeros(0, np.int64))


class TailArrays(NamedTuple):
    """States of all downsets of a task, in the order in which they were made; state 0 is the empty downset's. Sizes: l
    tables, one after the other.

    A state stands for a pipeline tail of ``stages`` stages. The first one is ``downset`` without the downset of state
    ``below``: see ``OriginColumns``. Its figures are those of ``flush_paths``, with the promise of its table about the
    stages in front: see ``flush_states``.
    """

    start: IndexArray  # int64[l * ends * m]: first state of a downset; states of the same ends are together, by mix
    kept: IndexArray  # int64[l * ends * m]: their number
    figures: FloatArray  # float64[states, FIGURES + 1]
    stage: FloatArray  # float64[states, 3]: forward, backward and synchronisation seconds of the first stage
    origin: IndexArray  # int64[states, columns]: see OriginColumns
