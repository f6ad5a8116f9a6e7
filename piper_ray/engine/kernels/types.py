"""Records of arrays for the kernels, grouped by what they depend on.

Sizes: m downsets, n vertices, e edges, h tensors, words = ceil(n / 64), r variants. A variant is a tensor-parallel
degree with the options that a stage of that degree may use, and the data-parallel degrees that it may have with them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

BitArray: TypeAlias = npt.NDArray[np.uint64]
IndexArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


_Record = TypeVar("_Record", bound=tuple[object, ...])


def frozen(record: _Record) -> _Record:
    """Makes the arrays of a record read-only, and returns the record. Kernels are compiled only for read-only tables,
    so that tables from shared memory, which are read-only, use the same code.
    """
    for value in record:
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return record


class LatticeArrays(NamedTuple):
    """The downsets. They depend only on the graph."""

    bits: BitArray  # uint64[m, words]
    level_start: IndexArray  # int64[levels + 1]; level l holds ids level_start[l] .. level_start[l + 1] - 1
    crossing_start: IndexArray  # int64[m + 1]
    crossing: IndexArray  # int64[..], edges (u, v) with u outside and v inside, by downset
    edge_tail: IndexArray  # int64[e]
    edge_head: IndexArray  # int64[e]
    vertex_level: IndexArray  # int64[n]: size of the least downset with the vertex
    tensor_bits: BitArray  # uint64[h, words]: the ends of each tensor, at least two
    cut_start: IndexArray  # int64[m + 1], or int64[1] if there are no tensors
    cut: IndexArray  # int64[..], tensors with ends inside and outside, by downset


class CostArrays(NamedTuple):
    """Sums over downsets, in s and bytes. The costs of a stage I \\ J are differences of these, plus ``both_s``.

    Times are for one device: with degree d a stage takes (work + (d - 1) * resync) / d.
    """

    need_s: FloatArray  # float64[m, r]: least work + all edges that enter I and tensors that I cuts
    cap_s: (
        FloatArray  # float64[m, r]: least work - all edges that come into J, as charged where they leave, and tensors
    )
    resync_s: FloatArray  # float64[m, r]: 4 w / (N B), least w
    least_a: FloatArray  # float64[m, r], bytes: sum of each layer's least a; least_b: of its least b
    least_b: FloatArray
    fast_a: FloatArray  # float64[m, r], bytes: a and b if each layer runs its fastest option
    fast_b: FloatArray
    many_s: FloatArray  # float64[m, r]: extra cost of choices over the fastest, memory priced: see kernels/prices.py
    one_s: FloatArray
    least_shared: FloatArray  # float64[m, r], or [0, r] if no option has any: bytes that replicas share out
    fast_shared: FloatArray
    missing: IndexArray  # int64[m, r]: layers of I that have no option in the variant
    both_s: FloatArray  # float64[r, e + h]: what an edge, then a tensor, was charged above if it touches no stage


class OptionArrays(NamedTuple):
    """The options (TMPCs) of each vertex in each variant, without dominated ones, and classes of equal choices."""

    degree: IndexArray  # int64[r]: t
    uniform: IndexArray  # int64[r]: 1 if weights and charges do not depend on the option chosen
    option_start: IndexArray  # int64[r, n + 1], into the option_* arrays
    option_p_s: FloatArray
    option_resync_s: FloatArray  # 4 w / (N B)
    option_a: FloatArray
    option_b: FloatArray
    option_shared: FloatArray
    charge_start: IndexArray  # int64[options]: first of its charges: for each in-edge, then for each out-edge
    charge_s: FloatArray  # 2 (c + extra) / B
    in_start: IndexArray  # int64[n + 1], into in_edge
    in_edge: IndexArray
    out_start: IndexArray  # int64[n + 1], into out_edge
    out_edge: IndexArray
    class_start: IndexArray  # int64[r + 1], into the class_* arrays
    class_of: IndexArray  # int64[r, n]: a vertex's class; -1 if it has at most one option
    choice_start: IndexArray  # int64[classes + 1], into the choice_* arrays: options other than the fastest
    choice_p_s: FloatArray  # extra cost of the option over the fastest, s
    choice_a: FloatArray  # by how much its a and b exceed the fastest option's, bytes
    choice_b: FloatArray
    choice_shared: FloatArray
    choices_share: IndexArray  # int64[r]: 1 if any of these differ in the bytes that replicas share out
    price_s: FloatArray  # float64[r], s per byte for each microbatch in flight: see kernels/prices.py


class ClusterArrays(NamedTuple):
    """Devices and memory."""

    devices: int
    data_parallel_limit: int
    memory_bytes: float  # with the tolerance of ``limits``
    divisors: IndexArray  # int64[..]: of N, up to the data-parallel limit, ascending
    divisor_at_least: IndexArray  # int64[x]: index of the first divisor >= x; len(divisors) if there is none
    first_divisor: IndexArray  # int64[r]: stages of the variant may have divisors first_divisor .. end_divisor - 1
    end_divisor: IndexArray  # int64[r]


class Tables(NamedTuple):
    """The tables that are the same in all evaluations of a problem."""

    lattice: LatticeArrays
    costs: CostArrays
    options: OptionArrays
    cluster: ClusterArrays


class Threshold(NamedTuple):
    """The target of an evaluation: plans with every stage within ``threshold_s`` and as few devices as possible; if
    stages have a weight too, then also as few stages. Each stage adds t * d * device_weight + stage_weight to a plan's
    tally.
    """

    threshold_s: float
    device_weight: int
    stage_weight: int
    device_limit: IndexArray  # int64[m]: a plan for I with more devices than this cannot be completed
    data_parallel_limit: IndexArray  # int64[m]: the same for the sum of its data-parallel degrees


class FrontArrays(NamedTuple):
    """States of finished downsets. No state has both a tally and a sum of d at least as large as another of its
    downset."""

    start: IndexArray  # int64[m]
    states: IndexArray  # int64[m]: their number
    tally: IndexArray  # int64[..]: strictly falling within a downset
    data_parallel_sum: IndexArray  # int64[..]: strictly rising within a downset


class LevelStates(NamedTuple):
    """Fronts of consecutive downsets: the number of states of each, then all tallies and all sums of d, in order of
    ids."""

    counts: IndexArray
    tallies: IndexArray
    sums: IndexArray
    tested: IndexArray  # int64[COUNTERS], see kernels/scan.py: the work to find them


class BucketArrays(NamedTuple):
    """Buckets of live downsets of one level, with bounds that hold for each member."""

    used: IndexArray  # int64[1]: buckets in use
    level_first: IndexArray  # int64[levels]: first bucket of a finished level; a number past all buckets for the others
    member_start: IndexArray  # int64[buckets + 1], into the members
    least_tally: IndexArray  # int64[buckets]
    least_devices: IndexArray  # int64[buckets]: least_tally // device_weight
    least_sum: IndexArray  # int64[buckets]
    meet: BitArray  # uint64[buckets, words]: vertices in every member
    join: BitArray  # uint64[buckets, words]: vertices in some member
    cap_s: FloatArray  # float64[r, buckets]: the largest of the members'
    resync_s: FloatArray  # float64[buckets, r]; here and below the largest of the members' too
    least_a: FloatArray
    least_b: FloatArray
    least_shared: FloatArray  # float64[buckets, r], or [0, r]
    missing: IndexArray
    many_s: FloatArray  # float64[buckets, r]: the largest sum of a member's cap_s and many_s; one_s: of cap_s and one_s
    one_s: FloatArray
    front_size: IndexArray  # int64[buckets]: 0 for buckets of one member
    front_tally: IndexArray  # int64[buckets, FRONT_SIZE]: each state of a member is at least as large in both as one
    front_sum: IndexArray  # of these, which are in order of falling tallies and rising sums
    all_dominated_by: BitArray  # uint64[buckets, words]: the common vertices of all members' dominated_by


class MemberArrays(NamedTuple):
    """Live downsets in the order of their buckets, so that they are read consecutively."""

    downset: IndexArray  # int64[m]
    place: IndexArray  # int64[m]: the place of each live downset here
    bits: BitArray  # uint64[m, words]
    cap_s: FloatArray  # float64[m, r]
    dominated_by: BitArray  # uint64[m, words]: vertices v for which J + v is as good as J, for every I that has v


class GroupArrays(NamedTuple):
    """Groups of consecutive buckets of one level, with bounds that hold for each bucket. The fields are as in
    buckets."""

    used: IndexArray  # int64[1]
    level_first: IndexArray  # int64[levels]
    bucket_start: IndexArray  # int64[groups + 1]
    least_tally: IndexArray
    least_devices: IndexArray
    least_sum: IndexArray
    cap_s: FloatArray  # float64[r, groups]
    all_dominated_by: BitArray  # uint64[groups, words]


class StateArrays(NamedTuple):
    """The data of an evaluation: what it reads (tables, target), and what grows as it proceeds."""

    tables: Tables
    target: Threshold
    fronts: FrontArrays
    members: MemberArrays
    buckets: BucketArrays
    groups: GroupArrays


class Earlier(NamedTuple):
    """What is known of some downsets: their fronts over the buckets before ``buckets``, and the work to find them."""

    buckets: int
    states: LevelStates


class StageKey(NamedTuple):
    """Stage I \\ J in a variant, by their numbers."""

    outer: int
    inner: int
    variant: int


class StageWork(NamedTuple):
    """The least time of a stage on one device over all choices. With degree d it takes (work + (d - 1) resync) / d."""

    work_s: float
    resync_s: float


class Items(NamedTuple):
    """Options of one stage's vertices. Those of item k are start[k] .. start[k + 1] - 1."""

    start: IndexArray  # int64[items + 1]
    cost: FloatArray  # float64[options], s on one device
    memory: FloatArray  # float64[options], bytes
