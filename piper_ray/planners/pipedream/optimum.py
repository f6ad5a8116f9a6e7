"""PipeDream's optimum: a table for each level but the top one, and for the top a search over thresholds.

The value is a bottleneck, so "how few machines if no stage takes longer than this?" finds it in some twenty passes over
the pairs of states, where a table would have a row for every number of machines.

Where PipeDream may cut: states, their sums, and the pairs between which a stage can lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import build_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, bit_rows, build_graph, members, offsets
from piper_ray.evaluate import MEMORY_TOLERANCE
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.planners.pipedream import kernel
from piper_ray.planners.pipedream.planner import States
from piper_ray.planners.runs import topological_order

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]

STATE_LIMIT = 100_000
PAIR_LIMIT = 40_000_000
"""Pairs take 12 bytes each, and some 5 ns in each of some twenty passes."""


@dataclass(frozen=True)
class TailTables:
    """A state is named by its tail, the layers that are left: number 0 leaves none, the last one all.

    layer_ids: for each vertex its place in the file and its layer's id. bits: uint64[m, words], the tails, each after
    its subsets. pairs: the number of nested tails, for any batch and memory. time_s: float64[m], the sum over the tail
    of p. entering_bytes: float64[m], the activations that enter it, each once.
    """

    layer_ids: tuple[tuple[int, int], ...]
    bits: Bits
    pairs: kernel.PairArrays
    time_s: Floats
    entering_bytes: Floats

    @property
    def size(self) -> int:
        return len(self.bits)

    def layers_between(self, front: int, rest: int) -> tuple[int, ...]:
        """Ids of the layers in tail ``front`` and not in tail ``rest``, in file order."""
        stage = members(self.bits[front] & ~self.bits[rest])
        return tuple(layer_id for _, layer_id in sorted(self.layer_ids[v] for v in stage))


def build_states(instance: Instance, tmpcs: Mapping[int, Tmpc], kind: States, *, stashes: bool = False) -> TailTables:
    """stashes: memory is by PipeDream's own rule.

    Raises LimitError when there are more than ``STATE_LIMIT`` states or ``PAIR_LIMIT`` nested pairs."""
    graph = build_graph(instance, without_contraction())
    bits = _tails(instance, graph, kind)
    counts = kernel.count_subsets(bits, PAIR_LIMIT)
    if counts.sum() > PAIR_LIMIT:
        raise _too_many(kind)
    pair_start = offsets(counts.tolist())
    rest = np.empty(pair_start[-1], np.int32)
    kernel.list_subsets(bits, pair_start, rest)

    place = {layer.id: i for i, layer in enumerate(instance.layers)}
    inside = _membership(bits, graph.size)
    chosen = [tmpcs[layer_id] for layer_id in graph.layer_ids]
    if stashes:
        chosen = [replace(x, activation_bytes=x.activation_bytes + x.weights_bytes, fixed_bytes=0.0) for x in chosen]
    return TailTables(
        layer_ids=tuple((place[layer_id], layer_id) for layer_id in graph.layer_ids),
        bits=bits,
        pairs=kernel.PairArrays(
            pair_start,
            rest,
            weights_bytes=_sums(inside, [tmpc.weights_bytes for tmpc in chosen]),
            activation_bytes=_sums(inside, [tmpc.activation_bytes for tmpc in chosen]),
            fixed_bytes=_sums(inside, [tmpc.fixed_bytes for tmpc in chosen]),
            shared_bytes=_sums(inside, [tmpc.shared_bytes for tmpc in chosen]),
            whole_batch=0,
            memory_bytes=math.inf,
            spared=int(stashes),
        ),
        time_s=_sums(inside, [tmpc.time_per_sample_s for tmpc in chosen]),
        entering_bytes=_entering_bytes(instance, graph, inside),
    )


def _tails(instance: Instance, graph: LayerGraph, kind: States) -> Bits:
    """uint64[m, words], vertices of ``graph`` as bits, tails after their subsets."""
    if kind is States.DOWNSETS:
        try:
            return build_lattice(graph, STATE_LIMIT).arrays.bits
        except LimitError:
            raise _too_many(kind) from None
    everything = (1 << graph.size) - 1
    vertex = {layer_id: v for v, layer_id in enumerate(graph.layer_ids)}
    if kind is States.ORDER:
        tails = [everything]
        for layer_id in topological_order(instance):
            tails.append(tails[-1] ^ 1 << vertex[layer_id])
    else:
        source = next(vertex[layer.id] for layer in instance.layers if not graph.predecessors[vertex[layer.id]])
        heads = _grown(graph, source)
        tails = sorted({everything, 0, *(everything ^ head for head in heads)})
    tails.sort(key=int.bit_count)
    return bit_rows([_bits(tail) for tail in tails], graph.size)


def _grown(graph: LayerGraph, source: int) -> Iterable[int]:
    """The states of PipeDream: the source's; from a state, each layer behind it with all that the layer needs."""
    needed = [0] * graph.size
    for v in reversed(range(graph.size)):
        needed[v] = 1 << v
        for tail in graph.predecessors[v]:
            needed[v] |= needed[tail]
    found = {needed[source]: None}
    pending = [needed[source]]
    while pending:
        state = pending.pop()
        behind = {head for v in _bits(state) for head in graph.successors[v] if not state >> head & 1}
        for v in behind:
            grown = state | needed[v]
            if grown not in found:
                found[grown] = None
                pending.append(grown)
        if len(found) > STATE_LIMIT:
            raise _too_many(States.SINGLE_SOURCE)
    return found


def _bits(mask: int) -> Sequence[int]:
    return [v for v in range(mask.bit_length()) if mask >> v & 1]


def _membership(bits: Bits, size: int) -> npt.NDArray[np.uint8]:
    """uint8[m, n]: 1 where vertex v is in tail i."""
    return np.unpackbits(bits.astype("<u8").view(np.uint8), axis=1, bitorder="little", count=size)


def _sums(inside: npt.NDArray[np.uint8], values: Sequence[float]) -> Floats:
    """Over each tail, float64[m]. einsum, unlike a matrix product, makes no float64 copy of ``inside``."""
    sums: Floats = np.einsum("mn,n->m", inside, np.array(values, np.float64))
    return sums


def _entering_bytes(instance: Instance, graph: LayerGraph, inside: npt.NDArray[np.uint8]) -> Floats:
    """A layer's activation, the most of what its edges carry, enters once if any of its successors is in the tail."""
    activation = [0.0] * graph.size
    for tail, _, index in graph.edges:
        activation[tail] = max(activation[tail], instance.edges[index].communication_bytes)
    entering = np.zeros(len(inside))
    for v, heads in enumerate(graph.successors):
        if heads:  # a tail that has v has them all
            entering += activation[v] * (inside[:, list(heads)].max(axis=1) - inside[:, v])
    for ends, index in graph.tensors:
        held = inside[:, list(ends)].sum(axis=1)
        entering += instance.tensors[index].forward_bytes * ((held > 0) & (held < len(ends)))
    return entering


def _too_many(kind: States) -> LimitError:
    return LimitError(
        f"PipeDream's planner has more than {STATE_LIMIT:,} states of kind {kind.value!r}, or {PAIR_LIMIT:,} pairs of "
        f"them, the most it takes; states={States.ORDER.value!r} cuts along one order of the layers only"
    )


_TOLERANCE = 1e-10
"""Relative: nothing below (1 - this) of the value found exists."""

_FITS = 1.0 + MEMORY_TOLERANCE / 2
"""Half of what ``evaluate`` allows: differences of sums round otherwise than sums over a stage."""

_FIRST_SLACK = 2.0**-10

_SEGMENT_WORK_LIMIT = 2e10
"""Steps of the table of a lower level: about half a minute."""


@dataclass(frozen=True)
class LevelTask:
    """machines: of this level. degrees: the replications allowed, ascending from 1.

    sync_s_per_byte: 4 / B, or the paper's 2 / B; front_sync_s_per_byte: of a stage that nothing precedes.
    transfer_s_per_byte: 2 / (B r), 0 where activations do not count. is_papers: the recurrence is that of the paper.
    """

    machines: int
    degrees: Sequence[int]
    sync_s_per_byte: float
    front_sync_s_per_byte: float
    transfer_s_per_byte: float
    is_papers: bool


@dataclass(frozen=True)
class StageCut:
    """A stage: the layers of tail ``front`` that are not in tail ``rest``, ``degree`` times."""

    front: int
    rest: int
    degree: int


def best_partition(
    states: TailTables, tasks: Sequence[LevelTask], microbatches: int | None, memory_bytes: float
) -> tuple[float, list[StageCut]] | None:
    """The recurrence's value in s, and its stages front to back; None if nothing fits.

    tasks: lowest level first. microbatches: N, that a stage's replication over all levels must divide; None: any.
    memory_bytes: M; counts with one level only. Raises LimitError if the tables of lower levels are too much work.
    """
    limit_bytes = memory_bytes * _FITS if len(tasks) == 1 else math.inf
    pairs = states.pairs._replace(whole_batch=microbatches or 0, memory_bytes=limit_bytes)
    front = np.repeat(np.arange(states.size), np.diff(pairs.pair_start))
    time_s = states.time_s[front] - states.time_s[pairs.rest]
    group = np.ones(0, np.int64)
    levels: list[kernel.LevelArrays] = []
    for number, task in enumerate(tasks):
        level = kernel.LevelArrays(
            time_s=time_s,
            group=group,
            transfer_s=states.entering_bytes * task.transfer_s_per_byte,
            sync_s_per_byte=task.sync_s_per_byte,
            front_sync_s_per_byte=task.front_sync_s_per_byte,
            machines=task.machines,
            degrees=np.array(task.degrees, np.int64),
            is_papers=task.is_papers,
        )
        levels.append(level)
        if number < len(tasks) - 1:
            _check_work(states, task)
            time_s, group = np.empty(pairs.rest.size), np.empty(pairs.rest.size, np.int64)
            kernel.fill_segments(pairs, level, time_s, group)
    found = _search(pairs, levels[-1])
    if found is None:
        return None
    value, cuts = found
    for level in reversed(levels[:-1]):
        cuts = [part for cut in cuts for part in _expand(pairs, level, cut)]
    return value, cuts


def _check_work(states: TailTables, task: LevelTask) -> None:
    inside = np.diff(states.pairs.pair_start).astype(np.float64)
    around = np.bincount(states.pairs.rest, minlength=states.size)
    if float(inside @ (around + 1)) * task.machines * len(task.degrees) > _SEGMENT_WORK_LIMIT:
        raise LimitError(
            f"PipeDream's planner with levels of machines has too many states, {states.size:,}; "
            "take fewer machines in the lower levels, or states='order', along one order of the layers"
        )


def _search(pairs: kernel.PairArrays, level: kernel.LevelArrays) -> tuple[float, list[StageCut]] | None:
    """The least bottleneck, with what is proved below it closing in on the best partition seen.

    Passes are cheap where few machines may be wasted, so from below in doubling steps. Then by bisection, every second
    threshold lying just below the best partition: often the proof.
    """
    machines = np.empty(len(pairs.pair_start) - 1, np.int64)
    found = _partition_within(pairs, level, math.inf, machines)
    whole_to_end = pairs.pair_start[len(machines) - 1]
    step_s = float(level.time_s[whole_to_end]) / level.machines
    lower, slack = 0.0, _FIRST_SLACK
    from_below, challenge = step_s > 0.0, False
    while found is not None and lower < (below_best := found[0] * (1.0 - _TOLERANCE)) < found[0]:
        if from_below:
            threshold = min(step_s * (1.0 + slack), below_best)
            slack *= 2.0
        else:
            challenge = not challenge
            threshold = below_best if challenge else min((lower + found[0]) / 2.0, below_best)
        better = _partition_within(pairs, level, threshold, machines)
        if better is None:
            lower = threshold
        else:
            found, from_below = better, False
    return found


def _partition_within(
    pairs: kernel.PairArrays, level: kernel.LevelArrays, threshold_s: float, machines: Integers
) -> tuple[float, list[StageCut]] | None:
    """The partition on the fewest machines with every stage at most ``threshold_s``, and its slowest stage's time."""
    if kernel.least_machines(pairs, level, threshold_s, machines) > level.machines:
        return None
    cuts: list[StageCut] = []
    slowest_s = 0.0
    whole = tail = len(machines) - 1
    while tail > 0:
        pair, degree = kernel.best_first_stage(pairs, level, tail, threshold_s, machines)
        rest = int(pairs.rest[pair])
        cuts.append(StageCut(tail, rest, degree))
        slowest_s = max(slowest_s, kernel.stage_seconds(pairs, level, tail, pair, degree, tail == whole))
        tail = rest
    return slowest_s, cuts


def _expand(pairs: kernel.PairArrays, level: kernel.LevelArrays, cut: StageCut) -> list[StageCut]:
    """A stage of the level above as the stages of this level, replicated as often."""
    segments = kernel.make_segments(len(pairs.pair_start) - 1, level.machines)
    kernel.fill_segments_from(pairs, level, cut.front, segments)
    parts: list[StageCut] = []
    tail, machines = cut.rest, level.machines
    while tail != cut.front:
        front = int(segments.came_from[tail, machines])
        parts.append(StageCut(front, tail, int(segments.degree[tail, machines]) * cut.degree))
        tail, machines = front, int(segments.left[tail, machines])
    return parts[::-1]
