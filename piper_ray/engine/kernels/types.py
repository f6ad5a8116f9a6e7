"""Arrays as the kernels see them, grouped by what they depend on.

Sizes: m downsets, n vertices, e edges, h tensors, words = ceil(n / 64), r variants. A variant is a tensor-parallel
degree with the options that a stage of that degree may use, and the data-parallel degrees that it may have then.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

BitArray: TypeAlias = npt.NDArray[np.uint64]
IndexArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]


_Record = TypeVar("_Record", bound=tuple[object, ...])


def frozen(record: _Record) -> _Record:
    """The same record, its arrays made read-only: what never changes. Kernels are compiled for such tables only, so
    that those from shared memory, which are read-only, find the same code.
    """
    for value in record:
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return record


class LatticeArrays(NamedTuple):
    """The downsets. Depends on the graph alone."""

    bits: BitArray  # uint64[m, words]
    level_start: IndexArray  # int64[levels + 1]; level l holds ids level_start[l] .. level_start[l + 1] - 1
    crossing_start: IndexArray  # int64[m + 1]
    crossing: IndexArray  # int64[..], edges (u, v) with u outside and v inside, by downset
    edge_tail: IndexArray  # int64[e]
    edge_head: IndexArray  # int64[e]
    vertex_level: IndexArray  # int64[n]: size of the least downset with the vertex
    tensor_bits: BitArray  # uint64[h, words]: the ends of each tensor, two at least
    cut_start: IndexArray  # int64[m + 1], or int64[1] where there are no tensors
    cut: IndexArray  # int64[..], tensors with ends inside and outside, by downset


class CostArrays(NamedTuple):
    """Sums over downsets, in s and bytes. A stage I \\ J costs differences of these, plus ``both``.

    Times are for one device: with degree d a stage takes (work + (d - 1) * resync) / d.
    """

    need_s: FloatArray  # float64[m, r]: least work + all edges that come into I and tensors that I cuts
    cap_s: (
        FloatArray  # float64[m, r]: least work - all edges that come into J, as charged where they leave, and tensors
    )
    resync_s: FloatArray  # float64[m, r]: 4 w / (N B), least w
    least_a: FloatArray  # float64[m, r], bytes: sum of each layer's least a; and so b. A lower bound together
    least_b: FloatArray
    fast_a: FloatArray  # float64[m, r], bytes: a and b when each layer runs its fastest option
    fast_b: FloatArray
    many_s: FloatArray  # float64[m, r]: what choices take more than the fastest, memory priced: see kernels/prices.py
    one_s: FloatArray
    least_shared: FloatArray  # float64[m, r], or [0, r] where no option has any: bytes that replicas share out
    fast_shared: FloatArray
    missing: IndexArray  # int64[m, r]: layers of I that have no option in the variant
    both_s: FloatArray  # float64[r, e + h]: what an edge, then a tensor, that touches no stage was charged above


class OptionArrays(NamedTuple):
    """The options (TMPCs) of each vertex in each variant, dominated ones dropped, and classes of equal choices."""

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
    class_of: IndexArray  # int64[r, n]: a vertex's class; -1 if it has one option at most
    choice_start: IndexArray  # int64[classes + 1], into the choice_* arrays: options beside the fastest
    choice_p_s: FloatArray  # what the option costs more than the fastest, s
    choice_a: FloatArray  # by how much its a and b exceed the fastest option's, bytes
    choice_b: FloatArray
    choice_shared: FloatArray
    choices_share: IndexArray  # int64[r]: 1 if any of these differ in what replicas share out
    price_s: FloatArray  # float64[r], s per byte for each microbatch in flight: see kernels/prices.py


class ClusterArrays(NamedTuple):
    """Devices and memory."""

    devices: int
    data_parallel_limit: int
    memory_bytes: float  # with the tolerance of ``limits`` included
    divisors: IndexArray  # int64[..]: of N, up to the data-parallel limit, ascending
    divisor_at_least: IndexArray  # int64[x]: index of the first divisor >= x; len(divisors) if there is none
    first_divisor: IndexArray  # int64[r]: stages of the variant have the divisors first_divisor .. end_divisor - 1
    end_divisor: IndexArray  # int64[r]


class Tables(NamedTuple):
    """All that stays the same from one evaluation of a problem to the next."""

    lattice: LatticeArrays
    costs: CostArrays
    options: OptionArrays
    cluster: ClusterArrays


class Threshold(NamedTuple):
    """One evaluation: every stage at most ``threshold_s``, and as few devices as will do; or, with stages weighted too,
    then as few stages. The tally of a plan is what it has of both: t * d * device_weight + stage_weight for each stage.
    """

    threshold_s: float
    device_weight: int
    stage_weight: int
    device_limit: IndexArray  # int64[m]: a plan for I with more devices than this cannot be completed
    data_parallel_limit: IndexArray  # int64[m]: so for the sum of its data-parallel degrees


class FrontArrays(NamedTuple):
    """States of finished downsets: no other state of the same downset has both tally and data-parallel sum as small."""

    start: IndexArray  # int64[m]
    states: IndexArray  # int64[m]: how many
    tally: IndexArray  # int64[..]: strictly falling within a downset
    data_parallel_sum: IndexArray  # int64[..]: strictly rising within a downset


class LevelStates(NamedTuple):
    """Fronts of consecutive downsets: states of each, then all tallies and all data-parallel sums, in id order."""

    counts: IndexArray
    tallies: IndexArray
    sums: IndexArray
    tested: IndexArray  # int64[COUNTERS], see kernels/level.py: what they took


class BucketArrays(NamedTuple):
    """Buckets of live downsets of one level, and bounds that hold for each member."""

    used: IndexArray  # int64[1]: buckets in use
    level_first: IndexArray  # int64[levels]: first bucket of a finished level; past all buckets for the others
    member_start: IndexArray  # int64[buckets + 1], into the members
    least_tally: IndexArray  # int64[buckets]
    least_devices: IndexArray  # int64[buckets]: least_tally // device_weight
    least_sum: IndexArray  # int64[buckets]
    meet: BitArray  # uint64[buckets, words]: in every member
    join: BitArray  # uint64[buckets, words]: in some member
    cap_s: FloatArray  # float64[r, buckets]: the largest of the members'
    resync_s: FloatArray  # float64[buckets, r], and so the rest
    least_a: FloatArray
    least_b: FloatArray
    least_shared: FloatArray  # float64[buckets, r], or [0, r]
    missing: IndexArray
    many_s: FloatArray  # float64[buckets, r]: the largest of cap_s and many_s of a member together, and so one_s
    one_s: FloatArray
    front_size: IndexArray  # int64[buckets]: 0 for those of one member
    front_tally: IndexArray  # int64[buckets, FRONT_SIZE]: each state of a member is as large in both as one of these,
    front_sum: IndexArray  # which come with falling tallies and rising sums
    all_dominated_by: BitArray  # uint64[buckets, words]: what every member is dominated by


class MemberArrays(NamedTuple):
    """Live downsets in the order of their buckets: to be read one after another."""

    downset: IndexArray  # int64[m]
    place: IndexArray  # int64[m]: of a live downset among these
    bits: BitArray  # uint64[m, words]
    cap_s: FloatArray  # float64[m, r]
    dominated_by: BitArray  # uint64[m, words]: vertices v with which J + v does as well, for every I that has v


class GroupArrays(NamedTuple):
    """Groups of consecutive buckets of one level, and bounds that hold for each bucket. Grouped like buckets above."""

    used: IndexArray  # int64[1]
    level_first: IndexArray  # int64[levels]
    bucket_start: IndexArray  # int64[groups + 1]
    least_tally: IndexArray
    least_devices: IndexArray
    least_sum: IndexArray
    cap_s: FloatArray  # float64[r, groups]
    all_dominated_by: BitArray  # uint64[groups, words]


class StateArrays(NamedTuple):
    """What an evaluation reads (tables, target), and what grows as it goes on."""

    tables: Tables
    target: Threshold
    fronts: FrontArrays
    members: MemberArrays
    buckets: BucketArrays
    groups: GroupArrays


class Earlier(NamedTuple):
    """What is known of some downsets: their fronts over the buckets before ``buckets``, and what those took."""

    buckets: int
    states: LevelStates


class StageKey(NamedTuple):
    """Stage I \\ J in a variant, by their numbers."""

    outer: int
    inner: int
    variant: int


class StageWork(NamedTuple):
    """What a stage takes on one device, least over all choices: at degree d (work + (d - 1) resync) / d."""

    work_s: float
    resync_s: float


class Items(NamedTuple):
    """Options of one stage's vertices. Those of item k lie in start[k] .. start[k + 1] - 1."""

    start: IndexArray  # int64[items + 1]
    cost: FloatArray  # float64[options], s on one device
    memory: FloatArray  # float64[options], bytes
