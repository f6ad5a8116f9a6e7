"""PipeDream's recurrence over pairs of states, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.jit import inner_kernel, kernel

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# A quotient of rounded sums must not lose a replication that just does.
_SLIGHTLY_LESS = 1.0 - 1e-12


class PairArrays(NamedTuple):
    """Pairs of tails, rest inside front, by front.

    pair_start: int64[m + 1]; rest: int32[pairs], the tails inside tail i are at pair_start[i] .. pair_start[i + 1].
    weights_bytes, activation_bytes, fixed_bytes, shared_bytes: float64[m], sums over the tail of w, a, b and what
    replicas share out. whole_batch: N, which the replication of every stage must divide; 0 if any will do.
    memory_bytes: M, with the tolerance included; inf if it does not count. spared: microbatches in flight that do not
    count.
    """

    pair_start: Integers
    rest: npt.NDArray[np.int32]
    weights_bytes: Floats
    activation_bytes: Floats
    fixed_bytes: Floats
    shared_bytes: Floats
    whole_batch: int
    memory_bytes: float
    spared: int


class LevelArrays(NamedTuple):
    """time_s: float64[pairs], T. group: int64[pairs], the least common multiple of the replications within T; empty
    at the lowest level, where it is 1. transfer_s: float64[m], what enters a tail, over one link.
    front_sync_s_per_byte: in place of sync_s_per_byte for a stage that nothing precedes.
    degrees: int64[...], ascending from 1. is_papers: the recurrence is that of the paper's text.
    """

    time_s: Floats
    group: Integers
    transfer_s: Floats
    sync_s_per_byte: float
    front_sync_s_per_byte: float
    machines: int
    degrees: Integers
    is_papers: bool


@kernel
def count_subsets(bits: npt.NDArray[np.uint64], limit: int) -> Integers:
    """int64[m]: how many earlier sets lie within each. Stops once there are more than ``limit``."""
    counts = np.zeros(len(bits), np.int64)
    total = 0
    for front in range(len(bits)):
        for rest in range(front):
            if _is_subset(bits, rest, front):
                counts[front] += 1
        total += counts[front]
        if total > limit:
            break
    return counts


@kernel
def list_subsets(bits: npt.NDArray[np.uint64], pair_start: Integers, out: npt.NDArray[np.int32]) -> None:
    """Fills ``out`` with the earlier sets that lie within each, by set: from ``pair_start`` on, in ascending order."""
    for front in range(len(bits)):
        place = pair_start[front]
        for rest in range(front):
            if _is_subset(bits, rest, front):
                out[place] = rest
                place += 1


@inner_kernel
def _is_subset(bits: npt.NDArray[np.uint64], small: int, big: int) -> bool:
    for word in range(bits.shape[1]):  # noqa: SIM110 - all() is no numba
        if bits[small, word] & ~bits[big, word] != 0:
            return False
    return True


@kernel
def stage_seconds(pairs: PairArrays, level: LevelArrays, front: int, pair: int, degree: int, is_first: bool) -> float:
    """(T + 4 (m - 1) P / (B m)) / m, and what its transfers take if anything precedes the stage; or as the paper has
    them, max(T, 2 (m - 1) P / (B m)) / m, with transfers that replicas do not share out."""
    rest = pairs.rest[pair]
    weights = pairs.weights_bytes[front] - pairs.weights_bytes[rest]
    sync = level.front_sync_s_per_byte if is_first else level.sync_s_per_byte
    sync_s = sync * weights * (degree - 1) / degree
    transfers_s = 0.0 if is_first else max(level.transfer_s[front], level.transfer_s[rest])
    if level.is_papers:
        return float(max(max(level.time_s[pair], sync_s) / degree, transfers_s))
    time = (level.time_s[pair] + sync_s) / degree
    return float(max(time, transfers_s / degree))


@inner_kernel
def _divides_batch(pairs: PairArrays, level: LevelArrays, pair: int, degree: int) -> bool:
    return len(level.group) == 0 or pairs.whole_batch % (level.group[pair] * degree) == 0


@inner_kernel
def _fits(pairs: PairArrays, front: int, rest: int, degree: int, behind: int) -> bool:
    """a y + b + shared / d <= M with y = ceil(s / d), less what is spared; ``behind``: the machines of later stages."""
    in_flight = (behind + 2 * degree - 1) // degree - pairs.spared
    activation = pairs.activation_bytes[front] - pairs.activation_bytes[rest]
    fixed = pairs.fixed_bytes[front] - pairs.fixed_bytes[rest]
    shared = pairs.shared_bytes[front] - pairs.shared_bytes[rest]
    return bool(activation * in_flight + fixed + shared / degree <= pairs.memory_bytes)


@inner_kernel
def _least_degree(
    pairs: PairArrays, level: LevelArrays, front: int, pair: int, threshold: float, behind: int, most: int
) -> int:
    """The least replication, up to ``most``, with which the stage fits and takes at most ``threshold`` s, with
    ``behind`` machines for what follows; ``most`` + 1 if there is none.

    With weights to synchronise, two replicas may take longer than one.
    """
    least = level.time_s[pair] / threshold * _SLIGHTLY_LESS
    if least > most:
        return most + 1
    is_first = front == len(pairs.pair_start) - 2
    for degree in level.degrees[np.searchsorted(level.degrees, least) :]:
        if degree > most:
            break
        if (
            stage_seconds(pairs, level, front, pair, degree, is_first) <= threshold
            and _fits(pairs, front, pairs.rest[pair], degree, behind)
            and _divides_batch(pairs, level, pair, degree)
        ):
            return int(degree)
    return most + 1


@kernel
def least_machines(pairs: PairArrays, level: LevelArrays, threshold: float, machines: Integers) -> int:
    """Fills int64[m], the least machines for each tail with every stage at most ``threshold`` s; above the machines
    of the level where those will not do. Returns the last.

    The fewest machines behind a stage are the best in memory too: y grows with them.
    """
    machines[0] = 0
    last = len(machines) - 1
    whole = pairs.pair_start[last]  # all others lie inside the last tail, in order
    for front in range(1, last + 1):
        machines[front] = level.machines + 1
        best = level.machines + 1
        if front < last and len(level.group) == 0:
            # Times add up, so the layers in front of this tail need machines as well.
            ahead = np.ceil(level.time_s[whole + front] / threshold * _SLIGHTLY_LESS)
            if ahead >= level.machines:
                continue
            best -= int(ahead)
        dead = best
        for pair in range(pairs.pair_start[front], pairs.pair_start[front + 1]):
            behind = machines[pairs.rest[pair]]
            most = best - behind - 1
            if most > 0:
                best = behind + _least_degree(pairs, level, front, pair, threshold, behind, most)
        if best < dead:
            machines[front] = best
    return int(machines[last])


@kernel
def best_first_stage(
    pairs: PairArrays, level: LevelArrays, front: int, threshold: float, machines: Integers
) -> tuple[int, int]:
    """The pair and the replication of a first stage with which ``machines[front]`` machines do."""
    for pair in range(pairs.pair_start[front], pairs.pair_start[front + 1]):
        behind = machines[pairs.rest[pair]]
        degree = machines[front] - behind
        if degree > 0 and _least_degree(pairs, level, front, pair, threshold, behind, degree) == degree:
            return pair, degree
    raise AssertionError("a tail that fits has no first stage")


class Segments(NamedTuple):
    """A table [m, machines + 1] of one front. value: the time in s. group: the least common multiple of the
    replications.

    came_from, degree, left: the last stage's front, its replication, and the machines for what precedes it.
    """

    value: Floats
    group: Integers
    came_from: Integers
    degree: Integers
    left: Integers


@kernel
def make_segments(states: int, machines: int) -> Segments:
    """Room for such a table."""
    shape = (states, machines + 1)
    return Segments(
        value=np.empty(shape),
        group=np.empty(shape, np.int64),
        came_from=np.empty(shape, np.int64),
        degree=np.empty(shape, np.int64),
        left=np.empty(shape, np.int64),
    )


@kernel
def fill_segments_from(pairs: PairArrays, level: LevelArrays, front: int, segments: Segments) -> None:
    """A[front][j][c] for all j and all c up to the level's machines. Rows of tails not inside ``front`` hold inf."""
    value, group, came_from, degree, left = segments
    value[: front + 1] = np.inf
    for tail in range(front, -1, -1):
        if tail < front:
            for c in range(2, level.machines + 1):
                # An idle machine, if that is better.
                if value[tail, c - 1] < value[tail, c]:
                    value[tail, c] = value[tail, c - 1]
                    group[tail, c] = group[tail, c - 1]
                    came_from[tail, c] = came_from[tail, c - 1]
                    degree[tail, c] = degree[tail, c - 1]
                    left[tail, c] = left[tail, c - 1]
            if value[tail, level.machines] == np.inf:
                continue
        for pair in range(pairs.pair_start[tail], pairs.pair_start[tail + 1]):
            rest = pairs.rest[pair]
            within = level.group[pair] if len(level.group) else 1
            for d in level.degrees:
                if not _divides_batch(pairs, level, pair, d):
                    continue
                stage = stage_seconds(pairs, level, tail, pair, d, tail == front)
                if tail == front:
                    if stage < value[rest, d]:
                        value[rest, d] = stage
                        group[rest, d] = _common_multiple(pairs.whole_batch, within, within * d)
                        came_from[rest, d] = front
                        degree[rest, d] = d
                        left[rest, d] = 0
                    continue
                for c in range(d + 1, level.machines + 1):
                    slowest = max(stage, value[tail, c - d])
                    if slowest < value[rest, c]:
                        value[rest, c] = slowest
                        group[rest, c] = _common_multiple(pairs.whole_batch, group[tail, c - d], within * d)
                        came_from[rest, c] = tail
                        degree[rest, c] = d
                        left[rest, c] = c - d


@inner_kernel
def _common_multiple(whole_batch: int, one: int, other: int) -> int:
    """The least; a divisor of N, so no overflow. 1 where nobody asks."""
    if whole_batch == 0:
        return 1
    a, b = one, other
    while b:
        a, b = b, a % b
    return one // a * other


@kernel
def fill_segments(pairs: PairArrays, level: LevelArrays, time_s: Floats, group: Integers) -> None:
    """T and the replications' common multiple, for the level above: each pair's best on all machines of this level."""
    states = len(pairs.pair_start) - 1
    segments = make_segments(states, level.machines)
    for front in range(1, states):
        fill_segments_from(pairs, level, front, segments)
        for pair in range(pairs.pair_start[front], pairs.pair_start[front + 1]):
            time_s[pair] = segments.value[pairs.rest[pair], level.machines]
            group[pair] = segments.group[pairs.rest[pair], level.machines]
