"""Kernels: the most layers of one kind that all ranks together have room for, besides all layers of the others; what a
rank may hold, and what that takes; rows that no other one beats."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.arrays import twice_rows
from piper_ray.compiled.jit import kernel, leaf_kernel
from piper_ray.engine.kernels.chunk_program import PASSES
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_A_LITTLE_LESS = 1.0 - 1e-9
"""A factor on the memory for contents that replace others, so that rounding does not drop both."""


class ChunkContents(NamedTuple):
    """What the chunks of a rank may hold, turn after turn. Contents of the same numbers of layers of each kind follow
    one another, by rising time of their passes, then by rising time of their synchronisation."""

    start: IndexArray  # int64[v + 1], the first content of each turn
    first_alike: IndexArray  # int64[contents], the first content of the turn with the same numbers of layers
    layers: IndexArray  # int64[contents, kinds]
    seconds: FloatArray  # float64[contents, PASSES + 1]: a microbatch's passes; the synchronisation
    activation: FloatArray  # float64[contents], bytes for each microbatch in flight
    fixed: FloatArray  # float64[contents], bytes


class RankRoom(NamedTuple):
    """What a rank has room for, and what it needs."""

    microbatches: int
    microbatch_s: float  # the passes of a microbatch take less
    batch_s: float  # those of all microbatches and the synchronisation take less
    memory_bytes: float
    held: FloatArray  # float64[moments, v], microbatches of each chunk in flight
    ahead_s: FloatArray  # float64[v + 1, ..]: from each turn on, the least, by the number of small layers left for it
    small: npt.NDArray[np.bool_]  # bool[kinds]: whether layers are small
    most: IndexArray  # int64[kinds], the most layers
    needed: FloatArray  # float64[kinds], the least number of layers
    layer: FloatArray  # float64[kinds, 3]: the least seconds for a microbatch, activation bytes and fixed bytes


class ByteSavings(NamedTuple):
    """What layers in a rank's chunks hold at a moment, and how they save bytes by other options, the cheapest first."""

    bytes_: FloatArray  # float64[v, kinds], of a layer with its fastest option
    seconds: FloatArray  # float64[v, kinds], of a microbatch, beyond the least of each pass
    turn: IndexArray  # int64[savings], the turn of the chunk
    kind: IndexArray  # int64[savings]
    saved: FloatArray  # float64[savings], bytes of a layer
    price: FloatArray  # float64[savings], seconds of a microbatch for each of them, ascending


class PatternTimes(NamedTuple):
    """What the patterns of ranks take."""

    stage_of: IndexArray  # int64[p, v], the chunks of each rank
    hub: int  # the hub's chunk; -1: there is none
    rank: IndexArray  # int64[patterns]
    passes_s: FloatArray  # float64[patterns, v, PASSES]
    sync_s: FloatArray  # float64[patterns], the synchronisation
    to_hub_s: FloatArray  # float64[patterns], what they make the hub's chunk take in either direction


@kernel
def times_on_paths(times: PatternTimes, counts: FloatArray, rank: IndexArray) -> FloatArray:
    """Returns what each pattern adds to each path, float64[paths, patterns].

    counts: float64[paths, s, PASSES], the passes of each stage on the paths. rank: int64[paths], the ranks at their
    ends, whose synchronisation they have.
    """
    found = np.empty((rank.size, times.rank.size))
    for i in range(rank.size):
        for n in range(times.rank.size):
            r = times.rank[n]
            seconds = times.sync_s[n] if rank[i] == r else 0.0
            for turn in range(times.stage_of.shape[1]):
                stage = times.stage_of[r, turn]
                for k in range(PASSES):
                    seconds += counts[i, stage, k] * times.passes_s[n, turn, k]
            if times.hub >= 0:
                seconds += (counts[i, times.hub, 0] + counts[i, times.hub, 1]) * times.to_hub_s[n]
            found[i, n] = seconds
    return found


@kernel
def add_times(times: PatternTimes, shares: FloatArray, passes_s: FloatArray, sync_s: FloatArray) -> None:
    """Adds to the seconds of the chunks' passes, float64[s, PASSES], and of the ranks' synchronisation, float64[p],
    what these shares of patterns take, float64[patterns]."""
    for n in range(times.rank.size):
        if shares[n] != 0.0:
            r = times.rank[n]
            sync_s[r] += shares[n] * times.sync_s[n]
            for turn in range(times.stage_of.shape[1]):
                for k in range(PASSES):
                    passes_s[times.stage_of[r, turn], k] += shares[n] * times.passes_s[n, turn, k]
            if times.hub >= 0:
                passes_s[times.hub, 0] += shares[n] * times.to_hub_s[n]
                passes_s[times.hub, 1] += shares[n] * times.to_hub_s[n]


@kernel
def most_of_main(most: IndexArray, chosen: IndexArray) -> int:
    """Returns the most layers of the main kind that all ranks together have room for if they also hold all layers of
    the other kinds; -1 if they cannot hold these.

    A choice is a number of layers of each other kind. chosen: int64[choices, other kinds], the choices in the order of
    ``numpy.ndindex``, so that choice a minus choice b has the number a - b. most: int64[p, choices], the layers of the
    main kind for which a rank with that choice still has room; negative if the choice alone exceeds the rank's room.
    """
    p, choices = most.shape
    best = np.full(choices, -1, np.int64)
    best[0] = 0
    for r in range(p):
        for a in range(choices - 1, -1, -1):
            found = -1
            for b in range(a + 1):
                if most[r, b] < 0 or best[a - b] < 0:
                    continue
                for c in range(chosen.shape[1]):
                    if chosen[b, c] > chosen[a, c]:
                        break
                else:
                    found = max(found, best[a - b] + most[r, b])
            best[a] = found
    return int(best[choices - 1])


@kernel
def undominated_rows(rows: FloatArray, group: IndexArray, order: IndexArray, most: int) -> IndexArray:
    """Returns int64[..]: the rows, in this order, that no row of their group before them is at most as large as in
    every column; after ``most`` of them it ends.

    group: int64[rows]. order: int64[rows], one group after the other, and so that no row is larger everywhere than one
    of its group behind it. A row is compared with those kept only.
    """
    kept, count, first = np.empty(most, np.int64), 0, 0
    for row in order:
        if count > 0 and group[kept[count - 1]] != group[row]:
            first = count
        beaten = False
        for n in range(first, count):
            column = 0
            while column < rows.shape[1] and rows[kept[n], column] <= rows[row, column]:
                column += 1
            if column == rows.shape[1]:
                beaten = True
                break
        if not beaten:
            kept[count] = row
            count += 1
            if count == most:
                break
    return kept[:count].copy()


@kernel
def fitting_patterns(contents: ChunkContents, room: RankRoom, most_steps: int, most: int) -> tuple[int, IndexArray]:
    """Returns the number of steps, and int64[patterns, v]: the content of each chunk, for all ways to fill the rank
    that fit and that no change of one chunk's content beats. If there are more than ``most`` patterns, or more steps
    than ``most_steps``, it ends with that many.

    A change beats a pattern if the chunk has the same numbers of layers and is as fast in all passes and in
    synchronisation, and if the pattern still fits. Of two contents that take the same, the first one beats the other.
    So each change leads to contents that are listed earlier, and after some changes to a pattern that none beats. The
    layers that the rank still needs are in the chunks behind: they take at least their least time and memory.
    """
    moments, v = room.held.shape
    kinds = room.needed.size
    found, count, steps = np.empty((64, v), np.int64), 0, 0
    chosen = np.zeros(v, np.int64)
    own_s, sync_s, fixed = np.zeros(v + 1), np.zeros(v + 1), np.zeros(v + 1)
    activation, layers = np.zeros((v + 1, moments)), np.zeros((v + 1, kinds), np.int64)
    fewest = np.full((v + 1, moments), float(room.microbatches))
    for turn in range(v - 1, -1, -1):
        for n in range(moments):
            fewest[turn, n] = min(fewest[turn + 1, n], room.held[n, turn])
    turn = 0
    chosen[0] = contents.start[0]
    while turn >= 0:
        c = chosen[turn]
        if c == contents.start[turn + 1]:
            turn -= 1
            if turn >= 0:
                chosen[turn] += 1
            continue
        if steps == most_steps or count > most:
            break
        steps += 1
        behind = turn + 1
        lacks_s, lacks_activation, lacks_fixed = 0.0, 0.0, 0.0
        in_time, few = True, room.ahead_s.shape[1] - 1
        for k in range(kinds):
            layers[behind, k] = layers[turn, k] + contents.layers[c, k]
            in_time &= layers[behind, k] <= room.most[k]
            if room.small[k]:
                few = max(0, few - layers[behind, k])
            lacks = room.needed[k] - layers[behind, k]
            if lacks > 0.0:
                lacks_s += lacks * room.layer[k, 0]
                lacks_activation += lacks * room.layer[k, 1]
                lacks_fixed += lacks * room.layer[k, 2]
                if behind == v:
                    lacks_s = np.inf
        own_s[behind] = own_s[turn] + (contents.seconds[c, 0] + contents.seconds[c, 1] + contents.seconds[c, 2])
        sync_s[behind] = sync_s[turn] + contents.seconds[c, PASSES]
        fixed[behind] = fixed[turn] + contents.fixed[c]
        busy_s = own_s[behind] + max(room.ahead_s[behind, few], lacks_s)
        if not (in_time and busy_s < room.microbatch_s):  # nor are slower contents with as many layers
            while c + 1 < contents.start[behind] and contents.first_alike[c + 1] == contents.first_alike[c]:
                c += 1
            chosen[turn] = c + 1
            continue
        fits = room.microbatches * busy_s + sync_s[behind] < room.batch_s
        for n in range(moments):
            if not fits:
                break
            activation[behind, n] = activation[turn, n] + contents.activation[c] * room.held[n, turn]
            lacking = fixed[behind] + lacks_fixed + lacks_activation * fewest[behind, n]
            fits = activation[behind, n] + lacking <= room.memory_bytes
        if fits and behind < v:
            turn = behind
            chosen[turn] = contents.start[turn]
            continue
        if fits and not _is_beaten(contents, room, chosen, activation[v], float(fixed[v])):
            if count == found.shape[0]:
                found = twice_rows(found)
            for n in range(v):
                found[count, n] = chosen[n]
            count += 1
        chosen[turn] += 1
    return steps, found[:count].copy()


@leaf_kernel
def _is_beaten(
    contents: ChunkContents, room: RankRoom, chosen: IndexArray, activation: FloatArray, fixed_bytes: float
) -> bool:
    for turn in range(chosen.size):
        c = chosen[turn]
        for other in range(contents.first_alike[c], c):
            beats = True
            for column in range(PASSES + 1):
                if contents.seconds[other, column] > contents.seconds[c, column]:
                    beats = False
                    break
            more, more_fixed = contents.activation[other] - contents.activation[c], contents.fixed[other]
            more_fixed += fixed_bytes - contents.fixed[c]
            for n in range(activation.size):
                if not beats:
                    break
                beats = activation[n] + more * room.held[n, turn] + more_fixed <= room.memory_bytes * _A_LITTLE_LESS
            if beats:
                return True
    return False


@kernel
def add_memory_seconds(
    counts: IndexArray,
    savings: ByteSavings,
    memory_bytes: float,
    most_s: FloatArray,
    fits: npt.NDArray[np.bool_],
) -> None:
    """Raises ``most_s``, float64[patterns], to what options take at least, beyond the least of each pass, if layers
    hold no more than the memory at this moment; clears ``fits``, bool[patterns], where they hold more with any options.

    counts: int64[patterns, v, kinds], the numbers of layers in each chunk. Layers may have parts of options.
    """
    for n in range(counts.shape[0]):
        lacks, seconds = -memory_bytes, 0.0
        for turn in range(counts.shape[1]):
            for kind in range(counts.shape[2]):
                lacks += counts[n, turn, kind] * savings.bytes_[turn, kind]
                seconds += counts[n, turn, kind] * savings.seconds[turn, kind]
        for one in range(savings.turn.size):
            if lacks <= 0.0:
                break
            saved = min(lacks, counts[n, savings.turn[one], savings.kind[one]] * savings.saved[one])
            lacks -= saved
            seconds += saved * savings.price[one]
        fits[n] &= lacks <= 0.0
        most_s[n] = max(most_s[n], seconds)
