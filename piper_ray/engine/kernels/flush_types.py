"""Arrays of the search under a flush, as the kernels see them.

Sizes: m downsets, n vertices, e edges that cost something, h tensors, words = ceil(n / 64), r variants, o options, c
prices of memory.
"""

from __future__ import annotations

from typing import NamedTuple

from piper_ray.engine.kernels.types import BitArray, FloatArray, IndexArray

GPIPE = 0
ONE_F_ONE_B = 1
TWO_BW = 2


class SumColumns(NamedTuple):
    """Columns of ``FlushTables.sums``. fast: as each layer runs its option of least time."""

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
    mixed: int = 12  # layers whose fastest option is not the one of least weights and charges too


SUM = SumColumns()


class OriginColumns(NamedTuple):
    """Columns of ``TailArrays.origin``."""

    stages: int = 0  # how many the tail has
    downset: int = 1  # of the tail
    below: int = 2  # the state behind the first stage
    variant: int = 3  # of the first stage
    choice: int = 4
    mix: int = 5  # of the tail: see ``FlushTask``


ORIGIN = OriginColumns()

FIGURES = 7  # of a state
PRICED = 7  # the column behind them: what the stages cost by the prices of ``PathBounds``

SLACK = 1e-12
"""Relative: what differs by no more than this is equal but for rounding."""

# What is known of a stage's TMPC choice.
FASTEST = 1
LEAST_TIME = 2
ON_FRONT = 3  # the one that takes the stage's seconds
NO_CHOICE = 4  # a bound that no choice is known to reach


class FlushTables(NamedTuple):
    """A lattice and its options: what all tasks of a solve share."""

    bits: BitArray  # uint64[m, words]
    crossing_start: IndexArray  # int64[m + 1]
    crossing: IndexArray  # int64[..], edges (u, v) with u outside and v inside, by downset
    edge_tail: IndexArray  # int64[e]
    edge_head: IndexArray  # int64[e]
    tensor_bits: BitArray  # uint64[h, words]: the ends of each tensor
    cut_start: IndexArray  # int64[m + 1], or int64[1] where there are no tensors
    cut: IndexArray  # int64[..], tensors with ends inside and outside, by downset
    tensor_forward_s: FloatArray  # float64[h]
    tensor_backward_s: FloatArray  # float64[h]
    sums: FloatArray  # float64[r, m, columns]: see SumColumns
    edge_in_s: FloatArray  # float64[r, e]: least charge of an edge in the stage of its head, in each direction
    edge_out_s: FloatArray  # float64[r, e]: and of its tail
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

    A *mix* says what of a tail decides which stage may be put in front: how many stages of each kind it has, the kind
    of the first one, and which kind the stage in front is promised to have. With one kind it is the number of stages. A
    *move* is a stage's own kind with those behind it and in front; with one kind, the rates of the borders there.
    Sizes: r variants, c mixes, z moves. Mix 0 is that of no stages; the others come by the kinds of the first stage and
    of the one in front, the *ends* of a tail, then by ascending stages.
    """

    schedule: int
    data_parallel_degree: int
    microbatches: int  # N / d
    most_stages: int
    stages: int  # the only number of stages asked for; 0: any
    most_memory_bytes: float  # of the devices of any kind, with the tolerance included
    memory_bytes: FloatArray  # float64[r]: of the devices of a variant's stages
    sync_s_per_byte: FloatArray  # float64[r]
    tensor_parallel_degrees: IndexArray  # int64[r]
    variants: IndexArray  # int64[..]: those that stages may have
    # int64[..]: others with the same options, none of which is charged more than those of ``variants``: for bounds on
    # several stages. With several kinds the same ones.
    bounding: IndexArray
    ends: int  # how many ends there are: 1 with one kind
    ends_behind: IndexArray  # int64[r]: those of a tail that the stage may be put in front of
    move: IndexArray  # int64[r]
    next_mix: IndexArray  # int64[c, z]: of a tail with such a stage in front; -1: it may not be there
    previous_mix: IndexArray  # int64[c, z]: of the tail behind such a stage, the other way round
    is_whole: BitArray  # uint8[c]: 1 where a tail of all layers may end
    share_of_s: FloatArray  # float64[r]: see ``AheadArrays.ahead_share``; float64[0] with one kind
    share_left: FloatArray  # float64[c]: of the stages that a tail leaves, for each second that they take
    work_s: float  # no stages of all layers take less together for a microbatch
    # float64[most_stages + 1]: see ``flush.paths.room``; of as many stages at the back; float64[0]: no bound.
    room: FloatArray


class PathBounds(NamedTuple):
    """A bound of ``flush.path_prices``; all of no size where there is none. By the number of stages behind, q, what a
    second of a stage's passes and of its synchronisation counts in a batch, and room_s, the price of a device's memory.
    first_sync: how much more the synchronisation counts in the first stage of all, for positions in front are empty.
    """

    forward: FloatArray  # float64[most_stages]
    backward: FloatArray
    sync: FloatArray
    first_sync: FloatArray
    room_s: FloatArray
    of_stage_s: FloatArray  # float64[m, most_stages]: least cost of all layers of a downset in stages with q behind
    ahead_s: FloatArray  # float64[m, most_stages + 1]: of all in front of a tail of so many stages, less its room


class TailArrays(NamedTuple):
    """States of all downsets of a task, in the order in which they were made; 0 is that of the empty downset. Sizes: l
    tables, one after the other.

    A state stands for a pipeline tail: ``stages`` of them, of which the first one is ``downset`` without the downset of
    state ``below``: see ``OriginColumns``. Its figures are those of ``flush_paths``, with what its table promises of
    the stages in front: see ``flush_states``.
    """

    start: IndexArray  # int64[l * ends * m]: first state of a downset; states of the same ends lie together, by mix
    kept: IndexArray  # int64[l * ends * m]: how many there are
    figures: FloatArray  # float64[states, FIGURES + 1]
    stage: FloatArray  # float64[states, 3]: forward, backward and synchronisation seconds of the first stage
    origin: IndexArray  # int64[states, columns]: see OriginColumns
