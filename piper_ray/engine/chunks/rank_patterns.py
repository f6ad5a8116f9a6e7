"""A bound where ranks have few layers: each rank chooses one pattern.

A pattern says how many layers of each kind run with which option in each chunk of a rank. Only patterns count that fit
the rank's memory. Of two patterns with the same numbers of layers, only one counts if it takes no longer in any chunk.
A linear program mixes the patterns of each rank (``pattern_program``) so that all layers are present. Within a pattern
layers and choices are whole, while the program of shares of layers splits them. The search branches on which chunks
have small layers alone, then on how many layers a rank has. Once that is whole or gains little, it branches on a turn:
either none of its chunks takes longer than some time, or rank r is the first one whose chunk does. That raises bounds,
because a turn takes as long as its slowest chunk.

Where options make patterns too many, patterns may state numbers of layers alone. What the rank's memory costs then is
known only in all (``memory_seconds``), and the program spreads it over the rank's chunks. Such patterns are many, so a
program begins with some of them and gets those that may make its batch shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.chunks.memory_seconds import memory_seconds, passes_that_differ
from piper_ray.engine.chunks.rank_cover import is_small, least_in_chunks, least_together, waits_s
from piper_ray.engine.kernels.chunk_bound import FIGURE, LayerKinds, Paths, ShapeLimits
from piper_ray.engine.kernels.chunk_cover import (
    ChunkContents,
    PatternTimes,
    RankRoom,
    add_times,
    fitting_patterns,
    times_on_paths,
    undominated_rows,
)
from piper_ray.engine.kernels.chunk_program import PASSES, ChunkProgram, longest_paths, simulate_chunks
from piper_ray.engine.kernels.types import BoolArray, FloatArray, IndexArray

Seconds = tuple[FloatArray, FloatArray]
"""Of passes, float64[s, PASSES], and of synchronisation, float64[p]."""

_MOST_CONTENTS = 2_000
"""The most contents of a chunk."""

_MOST_PATTERNS = 20_000
"""The most patterns of a rank, before the dominated ones are dropped."""

_MOST_KEPT = 5_000
"""The most patterns that count, over all ranks."""

_MOST_COUNTS = 60_000
"""The most patterns of numbers of layers, of a rank and over all ranks."""

_FEW_COLUMNS, _MORE_COLUMNS = 500, 50
"""Of more patterns, a program has only some at first; then this many more of each rank at a time."""

_OFTEN, _AS_LONG = 5.0, 1_000
"""A round of a few allowed patterns takes a fifth of the time of a round of shares (``share_program``). A round of this
many takes as long as that, and a round of twice as many twice as long."""

_ROUNDS_OF_A_PART = 60
_ROUNDS_BEFORE_CHUNKS = 8
"""Rounds of added paths before the search branches, and the same as long as it is open which chunks have small layers
alone."""

_FEW_ROUNDS, _LITTLE, _MIXED = 5, 0.01, 0.1
"""Where this many rounds gain less than this part of the distance to the target, and the layers of a rank are this far
from their mean, the search branches."""

_STALLED, _SPLITS = 0.01, 5
"""Where this many splits by layers, one within the other, gain less than this part of the distance to the target each,
a turn is split next."""

STEP = 0.2
"""The mean of the fractional plans so far moves towards each new one by this share of the distance."""

_ROUNDING = 1e-10
"""Relative: the largest error of sums of prices and seconds."""

_NEAR = 1e-6
"""Relative: a path that exceeds the batch by no more than this is not added; parts this near to 0 or 1 are whole."""

_MANY = 10**9
"""More layers than there are."""

_A_LITTLE_SLOWER = 1.0 + 1e-9


class PatternPrices(NamedTuple):
    """path: float64[paths], at least 0, with sum 1. layer: float64[kinds], seconds."""

    path: FloatArray
    layer: FloatArray


class Rows(NamedTuple):
    """Paths in terms of patterns. added_s: float64[paths, patterns], what each pattern adds. fixed_s: float64[paths],
    what transfers add. often: float64[paths, s, PASSES], the passes on them."""

    added_s: FloatArray
    fixed_s: FloatArray
    often: FloatArray

    def of(self, which: IndexArray | slice) -> Rows:
        """Returns some of the rows."""
        return Rows(*(part[which] for part in self))

    def with_more(self, other: Rows) -> Rows:
        """Returns these rows followed by others."""
        return Rows(*(np.concatenate(parts) for parts in zip(self, other, strict=True)))


@dataclass(frozen=True)
class LayerRuns:
    """Layers in a row of a chain. start, end: int64[runs], of positions. layers: int64[distinct, kinds], the numbers of
    layers of each kind that some run has; which: int64[runs], those of each run."""

    start: IndexArray
    end: IndexArray
    layers: IndexArray
    which: IndexArray

    @classmethod
    def of(cls, members: Sequence[IndexArray]) -> LayerRuns:
        """members: the positions of the layers of each kind."""
        size = sum(map(len, members))
        before = np.zeros((size + 1, len(members)), np.int64)
        for kind, positions in enumerate(members):
            before[positions + 1, kind] = 1
        before = np.cumsum(before, axis=0)
        start, end = np.triu_indices(size + 1, 1)
        layers, which = np.unique(before[end] - before[start], axis=0, return_inverse=True)
        return cls(start, end, layers, which.reshape(-1))

    def of_chunk(self, chunk: int, chunks: int) -> IndexArray:
        """int64[.., kinds]: the distinct numbers of layers of a chunk, where each other chunk has a layer."""
        size = self.end.max()
        begins = self.start >= chunk if chunk else self.start == 0
        ends = self.end <= size - (chunks - 1 - chunk) if chunk < chunks - 1 else self.end == size
        found: IndexArray = self.layers[np.unique(self.which[begins & ends])]
        return found


class LayerPositions(NamedTuple):
    """Where layers are. members: the positions of those of each kind. further_s: as in ``DegreeTables.further_s``.
    runs: those of a chain of layers; None if the model is none."""

    members: list[IndexArray]
    further_s: FloatArray
    runs: LayerRuns | None


@dataclass(frozen=True)
class RankPatterns:
    """The patterns of all ranks, one rank after the other. kinds: with ``members``, the positions of their layers.

    first: int64[p], the first pattern of each rank. rank: int64[patterns]. layers: int64[patterns, v, options], how
    many layers run each option of a kind in each chunk of the rank. passes_s: float64[patterns, v, PASSES], without the
    transfers of ``crossing_s``, which is as in ``ShapeLimits``. hub: its chunk, -1 if there is none. sync_s, to_hub_s:
    float64[patterns], the synchronisation, and what layers make the hub's chunk take in either direction. target_s:
    plans that take at least this long may be left out.

    only_counts: whether patterns state numbers of layers alone. Then each layer has one option here, at least as fast
    in each kind of pass as any of its own, and small layers are only where they fill a chunk by themselves. spread_s:
    float64[patterns], what a microbatch takes besides, because the rank's memory is limited: in any of its chunks, in
    passes of the kinds ``spread_in``. least_layers: int64[kinds], how many layers of each kind all ranks have at least.
    """

    program: ChunkProgram
    kinds: LayerKinds
    members: list[IndexArray]
    crossing_s: FloatArray
    hub: int
    first: IndexArray
    rank: IndexArray
    layers: IndexArray
    passes_s: FloatArray
    sync_s: FloatArray
    to_hub_s: FloatArray
    target_s: float
    spread_s: FloatArray
    spread_in: IndexArray
    least_layers: IndexArray
    only_counts: bool

    @classmethod
    def of(
        cls,
        program: ChunkProgram,
        limits: ShapeLimits,
        kinds: LayerKinds,
        positions: LayerPositions,
        hub: int,
        target_s: float,
        most_steps: int,
        options: LayerKinds | None = None,
    ) -> RankPatterns | None:
        """Returns the patterns of plans that take less than ``target_s``; None if there are too many, or if that takes
        ``most_steps``, each of which tries one content behind others. hub: the hub's chunk, by which the windows of
        kinds are narrowed; -1 if there is no hub. options: the kinds with their options, if patterns state numbers of
        layers alone and ``kinds`` have a single option each. Then small layers are left out of chunks with others."""
        members, further_s, runs = positions
        least = np.minimum.reduceat(kinds.figures, kinds.option_start[:-1])
        layer = np.column_stack([_layer_seconds(kinds), least[:, [FIGURE.activation, FIGURE.fixed]]])
        m, p = program.microbatches, len(program.stage_of)
        chunk_most = int(kinds.layers.sum()) - program.rank_of.size + 1  # a layer is left for each other chunk
        chunk_s = least_in_chunks(kinds, layer[:, 0], program.rank_of.size) * (1.0 - _ROUNDING)
        room_s = target_s * (1.0 + _ROUNDING) - waits_s(kinds, limits, program)
        room_s -= 2.0 * m * np.bincount(program.rank_of, limits.crossing_s, p)
        needed, most, steps = _needed_layers(program, kinds, room_s[1] / m), _MOST_KEPT, 0
        each_most = _MOST_PATTERNS
        least_layers, spread_in = kinds.layers, np.zeros(0, np.int64)
        if options is not None:
            needed, least_layers = (np.where(is_small(kinds), 0, x) for x in (needed, kinds.layers))
            spread_in, further_s = passes_that_differ(options), _least_of_small(kinds, further_s)
            most = each_most = _MOST_COUNTS
        found: list[tuple[IndexArray, FloatArray, FloatArray]] = []
        for rank, stages in enumerate(program.stage_of.tolist()):
            apart = hub >= 0 and rank != program.rank_of[hub]
            of_rank = kinds._replace(figures=_at_rank(kinds.figures, apart))
            microbatch_s, own = room_s[1, rank] / m, np.array(stages)
            left_s = [microbatch_s - _least_in(kinds, chunk_s, own[own != stage]) for stage in stages]
            listed = list[IndexArray]()
            for stage, left in zip(stages, left_s, strict=True):
                in_runs = None if runs is None else runs.of_chunk(stage, program.rank_of.size) * (least_layers > 0)
                large = of_rank if options is None else of_rank._replace(layers=least_layers)
                contents = _contents(large, stage, further_s[:, stage], left, in_runs, chunk_most)
                if contents is not None and options is not None:
                    contents = np.concatenate([contents, _small_alone(kinds, stage)])
                if contents is None:
                    return None
                listed.append(contents)
            layers, figures = _together(listed, of_rank, further_s[:, stages], limits.sync_s_per_byte)
            held = program.held[program.held_start[rank] : program.held_start[rank + 1]].astype(np.float64)
            few = range(_small_layers(kinds, own) + 1)
            ahead_s = [[_least_in(kinds, chunk_s, own[n:], most) for most in few] for n in range(own.size + 1)]
            room = RankRoom(
                m,
                microbatch_s,
                room_s[0, rank],
                limits.memory_bytes,
                held,
                np.array(ahead_s),
                is_small(kinds),
                kinds.layers,
                needed[rank],
                layer,
            )
            taken, chosen = fitting_patterns(figures, room, most_steps - steps, each_most)
            steps += taken
            if steps == most_steps or len(chosen) > each_most:
                return None
            seconds = figures.seconds[chosen]  # [patterns, v, PASSES + 1]
            sync_s, chunks = seconds[..., PASSES].sum(axis=1), layers[chosen]
            to_hub_s = dot(chunks.sum(axis=1), of_rank.figures[:, FIGURE.to_hub_s])
            of_kinds = figures.layers[chosen].sum(axis=1)
            passes_s = seconds[..., :PASSES].reshape(len(chosen), own.size * PASSES)
            others = np.column_stack([sync_s, np.zeros(len(chosen)), to_hub_s])
            if options is not None:
                at_rank = options._replace(figures=_at_rank(options.figures, apart))
                others[:, 1], fits = memory_seconds(chunks, at_rank, held, limits.memory_bytes)
                own_s = passes_s.sum(axis=1) + others[:, 1]
                fits &= (own_s < microbatch_s) & (m * own_s + sync_s < room_s[0, rank])
                chunks, seconds, others = chunks[fits], seconds[fits], others[fits]
                found.append((chunks, seconds[..., :PASSES], others))
                most -= len(chunks)
                if most < 0:
                    return None
                continue
            best = _undominated(np.column_stack([passes_s, sync_s]), of_kinds, most)
            if best is None:
                return None
            most -= best.size
            found.append((chunks[best], seconds[best, :, :PASSES], others[best]))
        counts = [len(chunks) for chunks, *_ in found]
        sync_s, spread_s, to_hub_s = np.concatenate([one for *_, one in found]).T
        return cls(
            program,
            kinds,
            members,
            limits.crossing_s,
            hub,
            np.cumsum([0, *counts[:-1]]),
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([one for one, *_ in found]),
            np.concatenate([one for _, one, _ in found]),
            sync_s,
            to_hub_s,
            target_s,
            spread_s,
            spread_in,
            least_layers,
            options is not None,
        )

    def only(self, which: BoolArray) -> RankPatterns:
        """Returns some of the patterns, at least one of each rank."""
        of_each = ("rank", "layers", "passes_s", "sync_s", "to_hub_s", "spread_s")
        fewer = {name: getattr(self, name)[which] for name in of_each}
        first = np.searchsorted(fewer["rank"], np.arange(self.first.size))
        return replace(self, first=first, **fewer)

    @cached_property
    def of_kinds(self) -> IndexArray:
        """int64[patterns, kinds], how many layers of each kind a pattern has."""
        found: IndexArray = np.add.reduceat(self.layers.sum(axis=1), self.kinds.option_start[:-1], axis=1)
        return found

    @cached_property
    def hollow(self) -> BoolArray:
        """bool[patterns, v], whether a chunk has small layers alone."""
        large = np.repeat(~is_small(self.kinds), np.diff(self.kinds.option_start))
        found: BoolArray = (self.layers[..., large] == 0).all(axis=2)
        return found

    def plan(self, chosen: IndexArray) -> tuple[IndexArray, IndexArray] | None:
        """int64[n] each: the chunk of each layer, and its option among the layer's own. chosen: int64[p], the pattern
        of each rank. Returns None if these have more or fewer layers than there are."""
        if (self.of_kinds[chosen].sum(axis=0) != self.kinds.layers).any():
            return None
        return placed(self.layers[chosen][self.program.rank_of, self.program.turn_of], self.kinds, self.members)

    @cached_property
    def _times(self) -> PatternTimes:
        return PatternTimes(self.program.stage_of, self.hub, self.rank, self.passes_s, self.sync_s, self.to_hub_s)

    def rows(self, paths: Paths) -> Rows:
        """Returns the rows of these paths."""
        added_s = times_on_paths(self._times, paths.counts, paths.rank)
        return Rows(added_s, dot(paths.counts[:, :, :2].sum(axis=2), self.crossing_s), paths.counts)

    def seconds(self, shares: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The seconds of passes, float64[s, PASSES], and of synchronisation, float64[p], if patterns have these
        shares."""
        passes_s, sync_s = np.zeros((self.crossing_s.size, PASSES)), np.zeros(self.first.size)
        passes_s[:, :2] = self.crossing_s[:, None]
        add_times(self._times, shares, passes_s, sync_s)
        return passes_s, sync_s

    def by_rank(self, figures: FloatArray | BoolArray) -> FloatArray:
        """float64[p]: their sums. figures: those of each pattern."""
        return np.add.reduceat(figures.astype(np.float64), self.first)

    def mean_and_spread(self, shares: FloatArray, figures: FloatArray | IndexArray) -> tuple[FloatArray, FloatArray]:
        """float64[p, columns] each: of each rank the mean of these figures, and the mean distance from it. shares: of
        each rank 1 together. figures: [patterns, columns]."""
        mean = np.add.reduceat(shares[:, None] * figures, self.first)
        return mean, np.add.reduceat(shares[:, None] * np.abs(figures - mean[self.rank]), self.first)

    def narrowed(self, allowed: BoolArray) -> BoolArray:
        """Leaves out patterns with more layers of some kind than the other ranks leave, or fewer. All are left out if
        the ranks cannot have the layers of each kind together."""
        while True:
            least, most = (
                of.reduceat(np.where(allowed[:, None], self.of_kinds, none), self.first)
                for of, none in ((np.minimum, _MANY), (np.maximum, -_MANY))
            )
            above, below = (
                self.least_layers - (most.sum(axis=0) - most),
                self.kinds.layers - (least.sum(axis=0) - least),
            )
            fits = (above[self.rank] <= self.of_kinds) & (self.of_kinds <= below[self.rank])
            left: BoolArray = allowed & fits.all(axis=1)
            if (left == allowed).all():
                return left
            allowed = left

    def bounds_s(self, prices: PatternPrices, rows: Rows, allowed: BoolArray) -> FloatArray:
        """float64[patterns]: no plan of the allowed patterns that has this one takes less; inf for patterns that are
        not allowed.

        A batch takes at least as long as each path, so at least as long as their mean, which is a sum over ranks. All
        layers are present. So the price of each layer may be added once for the whole plan, and subtracted from each
        pattern that has the layer. Then each rank but that of the pattern takes its cheapest pattern. What a rank's
        memory costs is in those of its passes that are the fewest on the paths.
        """
        cost_s = dot(prices.path, rows.added_s) - dot(self.of_kinds, prices.layer)
        if self.spread_in.size:
            often = np.einsum("i,isk->sk", prices.path, rows.often[:, :, self.spread_in])
            cost_s += self.spread_s * often[self.program.stage_of].min(axis=(1, 2))[self.rank]
        least_s = np.minimum.reduceat(np.where(allowed, cost_s, np.inf), self.first)
        layers_s = float(dot(np.where(prices.layer > 0.0, self.least_layers, self.kinds.layers), prices.layer))
        size_s = float(dot(self.kinds.layers, np.abs(prices.layer)))
        if not np.isfinite(least_s).all():
            return np.full(self.rank.size, np.inf)  # a rank has none
        total_s = float(least_s.sum() + dot(prices.path, rows.fixed_s))
        found_s = total_s + layers_s + (cost_s - least_s[self.rank])
        found_s -= _ROUNDING * (np.abs(cost_s) + abs(total_s) + 2.0 * size_s)
        return np.where(allowed, found_s, np.inf)


@dataclass(frozen=True)
class _PatternPart:
    """Plans of the allowed patterns. rows: the paths that its prices refer to, or its parent's. shares: the last
    fractional plan's, float64[patterns]. rounds: the number so far. is_best: whether further rounds raise its bound by
    little or nothing. is_single: whether each rank has only one pattern. begun_s: its bound at first; stalled: how
    many of the last splits by layers gained little. patterns: the listed ones, or some of them if options are open."""

    patterns: RankPatterns
    lower_s: float
    allowed: BoolArray
    rows: Rows
    shares: FloatArray
    rounds: int = 0
    is_best: bool = False
    is_single: bool = False
    begun_s: float = 0.0
    stalled: int = 0

    def compact(self) -> _PatternPart:
        """Returns the same part without patterns that are not allowed, if they are many and no plan is read off."""
        which, patterns = self.allowed, self.patterns
        if not patterns.only_counts or 2 * np.count_nonzero(which) > which.size or not patterns.by_rank(which).all():
            return self
        rows = Rows(self.rows.added_s[:, which], self.rows.fixed_s, self.rows.often)
        return replace(self, patterns=patterns.only(which), allowed=which[which], rows=rows, shares=self.shares[which])


@dataclass
class PatternSearch:
    """``lower_s``: no batch of these patterns takes less; it rises. enough_s: bounds need not be higher. chosen: the
    patterns of the quickest plan so far, int64[p]. It takes ``value_s`` if its transfers are the least. is_over:
    whether no further round raises the bound. worked: as in ``ShareProgram``."""

    patterns: RankPatterns
    parts: list[_PatternPart]
    lower_s: float = 0.0
    enough_s: float = np.inf
    value_s: float = np.inf
    chosen: IndexArray | None = None
    is_over: bool = False
    worked: int = 0

    @classmethod
    def of(cls, patterns: RankPatterns, paths: Paths) -> PatternSearch:
        """paths: some that may be long."""
        count = patterns.rank.size
        if np.unique(patterns.rank).size < patterns.first.size:
            return cls(patterns, [])  # a rank has none
        part = _PatternPart(patterns, 0.0, np.ones(count, np.bool_), patterns.rows(paths), np.zeros(count))
        return cls(patterns, [part])

    def copy(self) -> PatternSearch:
        """Returns a copy with a list of parts of its own."""
        return replace(self, parts=[*self.parts])

    def apart(self) -> list[PatternSearch]:
        """Returns a search for each part."""
        bounds_s = [max(self.lower_s, min(part.lower_s, self.enough_s)) for part in self.parts]
        return [
            replace(self, parts=[part], lower_s=lower_s, chosen=None, worked=0)
            for part, lower_s in zip(self.parts, bounds_s, strict=True)
        ]

    def improve(self, rounds: int, target_s: float, *, until_divided: bool = False) -> float:
        """Works on the part of the least bound: solves its program repeatedly with longer paths, then divides its
        plans. It takes at most about as long as this many rounds of shares, and returns as how many. until_divided:
        whether to stop as soon as there are several parts."""
        target_s = min(target_s, self.patterns.target_s)
        used = 0.0
        while used < rounds and not (until_divided and len(self.parts) > 1):
            index = min(range(len(self.parts)), key=lambda n: self.parts[n].lower_s, default=-1)
            self.enough_s = enough_s = min(target_s, self.value_s)
            if index < 0 or self.parts[index].is_single or self.parts[index].lower_s >= enough_s * (1.0 - PROOF):
                self.is_over = True
                break
            part = self.parts[index]
            most = _ROUNDS_BEFORE_CHUNKS if self._open_chunks(part).size else _ROUNDS_OF_A_PART
            if part.is_best or part.rounds >= most:
                self.parts[index : index + 1] = self._told_apart(part)
            else:
                most = _ROUNDS_BEFORE_CHUNKS if part.rounds < _ROUNDS_BEFORE_CHUNKS else most
                count = int(np.count_nonzero(part.allowed))
                if part.patterns.only_counts:
                    count = min(count, _AS_LONG)  # the program has a few of them
                often = min(_OFTEN, _AS_LONG / count)
                solved = self._solved(part, min(often * (rounds - used), most - part.rounds), enough_s)
                self.parts[index] = solved.compact()
                used += (self.parts[index].rounds - part.rounds) / often
        self.enough_s = min(target_s, self.value_s)
        least_s = min((part.lower_s for part in self.parts), default=np.inf)
        self.lower_s = max(self.lower_s, min(least_s, self.enough_s))
        return used

    def _solved(self, part: _PatternPart, rounds: float, enough_s: float) -> _PatternPart:
        """Solves the program of a part for at most this many more rounds, and for at least one."""
        from piper_ray.engine.chunks.pattern_program import PatternProgram  # HiGHS is loaded where it is needed

        patterns, rows, shares, is_best, used = part.patterns, part.rows, part.shares, False, 0
        lower_s, allowed, some = part.lower_s, part.allowed, part.allowed
        if patterns.only_counts and np.count_nonzero(allowed) > _FEW_COLUMNS:
            some = _sample(part)
        program = PatternProgram(patterns, some, rows)
        core_s: Seconds | None = None
        batches_s: list[float] = []
        while used < rounds and not is_best:
            used += 1
            solution = program.solve()
            if solution is None:
                is_best = True
                break
            shares, batch_s = solution.shares, solution.batch_s
            if lacks_some := some is not part.allowed:
                assert program.prices is not None
                with_s = patterns.bounds_s(program.prices, rows, allowed)
                lower_s = max(lower_s, float(np.minimum.reduceat(with_s, patterns.first).max()))
                allowed = allowed & (with_s < enough_s * (1.0 - PROOF))
                if lower_s >= enough_s:
                    break
                more = _cheapest(patterns, np.where(some, np.inf, with_s), min(batch_s, enough_s))
                if lacks_some := more.size > 0:
                    program.add_patterns(more, rows)
                    some = some.copy()
                    some[more] = True
                batch_s = lower_s
            if solution.batch_s >= enough_s:
                if lacks_some:
                    continue
                break
            self._keep(shares)
            passes_s, sync_s = patterns.seconds(shares)
            now_s = passes_s + solution.spread_s, sync_s
            core_s = now_s if core_s is None else between(core_s, now_s, STEP)
            longest_s, longer = _longest(patterns, now_s)
            is_best = longest_s <= solution.batch_s * (1.0 + _NEAR) and not lacks_some
            batches_s.append(batch_s)
            if len(batches_s) > _FEW_ROUNDS:
                gained_s = batch_s - batches_s[-1 - _FEW_ROUNDS]
                mixes = bool(patterns.mean_and_spread(shares, patterns.of_kinds)[1].max() > _MIXED)
                is_best |= mixes and gained_s < _LITTLE * (enough_s - batch_s)
            if not is_best:
                for step in (0.0, 0.5):
                    longer = longer.with_more(_longest(patterns, between(core_s, now_s, step))[1])
                program.add(longer)
                rows = rows.with_more(longer)
        self.worked += program.worked
        if (prices := program.prices) is not None:
            priced, new = slice(prices.path.size), slice(prices.path.size, None)
            with_s = patterns.bounds_s(prices, rows.of(priced), allowed)
            lower_s = max(lower_s, float(np.minimum.reduceat(with_s, patterns.first).max()))
            allowed = allowed & (with_s < enough_s * (1.0 - PROOF))
            rows = rows.of(np.flatnonzero(prices.path > 0.0)).with_more(rows.of(new))
        rounds = part.rounds + used
        return replace(part, lower_s=lower_s, allowed=allowed, rows=rows, shares=shares, rounds=rounds, is_best=is_best)

    def _open_chunks(self, part: _PatternPart) -> IndexArray:
        """int64[.., 2], rank and turn of the chunks that have small layers alone in a part of the fractional plan."""
        patterns = part.patterns
        share = np.add.reduceat((part.shares * part.allowed)[:, None] * patterns.hollow, patterns.first)
        return np.argwhere(np.minimum(share, 1.0 - share) > _NEAR)

    def _told_apart(self, part: _PatternPart) -> list[_PatternPart]:
        """Parts that together hold all plans of this one.

        First they differ in the first chunk, of those that have small layers alone in a part of the fractional plan,
        that has small layers alone. Then they differ in how many layers of a kind a rank has: at most the mean of the
        fractional plan, or more. Then they differ in a turn, also before all numbers of layers are whole where these
        gain little. Its pace is the longest mean time of a rank's chunk: either no chunk of the turn takes longer, or
        rank r is the first one whose chunk does. In the end they differ in a rank's pattern.
        """
        patterns, chunks, stalled = part.patterns, self._open_chunks(part), 0
        hollow, rank, without = patterns.hollow, patterns.rank, list[BoolArray]()
        if chunks.size:
            these = [hollow[:, turn] & (rank == r) for r, turn in chunks]
            elsewhere = [~hollow[:, turn] & (rank == r) for r, turn in chunks]
            without = [np.any([no, *these[:n]], axis=0) for n, no in enumerate(elsewhere)]
            without.append(np.any(these, axis=0))
        else:
            gained_s, distance_s = part.lower_s - part.begun_s, self.enough_s - part.begun_s
            stalled = part.stalled + 1 if gained_s < _STALLED * distance_s else 0
            shares = self._allowed_shares(part)
            if stalled >= _SPLITS and (without := self._by_pace(patterns, shares)):
                stalled = 0
            without = without or self._by_layers(patterns, shares) or self._by_pace(patterns, shares)
        if not without:
            several = patterns.by_rank(part.allowed)[rank] > 1.0
            if not several.any():
                batch_s = _simulated_s(patterns, part.allowed.astype(np.float64))
                return [replace(part, lower_s=max(part.lower_s, batch_s * (1.0 - _ROUNDING)), is_single=True)]
            apart = np.where(several & part.allowed, np.abs(part.shares - 0.5), np.inf)
            is_one = np.arange(rank.size) == int(apart.argmin())
            without = [is_one, (rank == rank[is_one]) & ~is_one]
        every = (patterns.narrowed(part.allowed & ~left_out) for left_out in without)
        told = replace(part, rounds=0, is_best=False, begun_s=part.lower_s, stalled=stalled)
        return [replace(told, allowed=allowed).compact() for allowed in every if allowed.any()]

    def _allowed_shares(self, part: _PatternPart) -> FloatArray:
        """float64[patterns]: the fractional plan of the allowed patterns alone, of each rank 1 together."""
        by_rank, rank = part.patterns.by_rank, part.patterns.rank
        shares: FloatArray = np.maximum(part.shares, 0.0) * part.allowed
        if by_rank(shares).min() < 0.5:  # they are of a program without a solution
            shares = part.allowed.astype(np.float64)
        return shares / by_rank(shares)[rank]

    def _by_layers(self, patterns: RankPatterns, shares: FloatArray) -> list[BoolArray]:
        """Which patterns each case leaves out, by the layers of a rank; none if each rank has whole layers."""
        rank = patterns.rank
        layers, spread = patterns.mean_and_spread(shares, patterns.of_kinds)
        if spread.max() <= _NEAR:
            return []
        one, kind = divmod(int(spread.argmax()), layers.shape[1])
        more = patterns.of_kinds[:, kind] > layers[one, kind]
        return [(rank == one) & more, (rank == one) & ~more]

    def _by_pace(self, patterns: RankPatterns, shares: FloatArray) -> list[BoolArray]:
        """The same by the pace of a turn; none if no pattern with a share takes longer in a turn than its pace."""
        rank = patterns.rank
        takes_s = patterns.passes_s.sum(axis=2)
        pace_s = patterns.mean_and_spread(shares, takes_s)[0].max(axis=0)
        longer_s = dot(shares, np.maximum(0.0, takes_s - pace_s))
        if longer_s.max() <= _NEAR * pace_s.max():
            return []
        turn = int(longer_s.argmax())
        late = takes_s[:, turn] > pace_s[turn] * _A_LITTLE_SLOWER
        first = [np.where(rank == one, ~late, late & (rank < one)) for one in range(patterns.first.size)]
        return [late, *first]

    def _keep(self, shares: FloatArray) -> None:
        """Tries the plan in which each rank has the pattern of its largest share."""
        patterns = self.patterns
        if patterns.only_counts:
            return  # options are open
        largest = np.flatnonzero(shares == np.maximum.reduceat(shares, patterns.first)[patterns.rank])
        chosen = largest[np.searchsorted(patterns.rank[largest], np.arange(patterns.first.size))]
        if (patterns.of_kinds[chosen].sum(axis=0) != patterns.kinds.layers).any():
            return
        value_s = _simulated_s(patterns, np.bincount(chosen, minlength=shares.size).astype(np.float64))
        if value_s < self.value_s:
            self.value_s, self.chosen = value_s, chosen


def _longest(patterns: RankPatterns, seconds: Seconds) -> tuple[float, Rows]:
    """The time of a batch, and its longest paths: two where there are several."""
    counts, rank = np.empty((2, *seconds[0].shape)), np.empty(2, np.int64)
    batch_s = float(longest_paths(patterns.program, *seconds, counts, rank))
    differ = rank[0] != rank[1] or bool((counts[0] != counts[1]).any())
    return batch_s, patterns.rows(Paths(counts[: 1 + differ], rank[: 1 + differ]))


def _simulated_s(patterns: RankPatterns, shares: FloatArray) -> float:
    """The time of a batch if patterns have these shares."""
    program = patterns.program
    return float(simulate_chunks(program, *patterns.seconds(shares), np.empty(program.kind.size + 1)))


def _sample(part: _PatternPart) -> BoolArray:
    """bool[patterns]: some of the allowed ones: those of the last fractional plan, and of each rank and each number of
    layers the fastest."""
    patterns = part.patterns
    seconds = patterns.passes_s.sum(axis=(1, 2)) + patterns.spread_s
    which = np.flatnonzero(part.allowed)
    key = np.column_stack([patterns.rank[which], patterns.of_kinds[which]])
    order = np.lexsort((seconds[which], *key.T[::-1]))
    first = np.append(True, (key[order][1:] != key[order][:-1]).any(axis=1))
    found: BoolArray = part.allowed & (part.shares > 0.0)
    found[which[order[first]]] = True
    return found


def _cheapest(patterns: RankPatterns, bounds_s: FloatArray, below_s: float) -> IndexArray:
    """int64[..]: the patterns that may make a program's batch shorter, a few of each rank. bounds_s: of each one, inf
    if it is in the program."""
    found = []
    for first, end in zip(patterns.first, [*patterns.first[1:], bounds_s.size], strict=True):
        order = first + np.argsort(bounds_s[first:end], kind="stable")[:_MORE_COLUMNS]
        found.append(order[bounds_s[order] < below_s * (1.0 - _NEAR)])
    return np.concatenate(found)


def placed(in_chunks: IndexArray, kinds: LayerKinds, members: Sequence[IndexArray]) -> tuple[IndexArray, IndexArray]:
    """int64[n] each: the chunk of each layer, and its option among the layer's own. in_chunks: int64[s, options], how
    many layers run each option of a kind in each chunk. members: the positions of each kind's layers; kinds without any
    stand for transfers."""
    chunk_of, choice = np.empty((2, sum(map(len, members))), np.int64)
    for positions, start, end in zip(members, *_ranges(kinds), strict=False):
        stage, option = np.nonzero(in_chunks[:, start:end])
        often = in_chunks[stage, start + option]
        chunk_of[positions], choice[positions] = np.repeat(stage, often), np.repeat(option, often)
    return chunk_of, choice


def between(one: Seconds, other: Seconds, step: float) -> Seconds:
    """At this part of the way from one to the other."""
    return (1.0 - step) * one[0] + step * other[0], (1.0 - step) * one[1] + step * other[1]


def _small_layers(kinds: LayerKinds, chunks: IndexArray) -> int:
    """The most small layers that these chunks have together."""
    may = np.any((kinds.first_chunk[:, None] <= chunks) & (chunks <= kinds.last_chunk[:, None]), axis=1)
    return int(kinds.layers[is_small(kinds) & may].sum())


def _least_in(kinds: LayerKinds, chunk_s: FloatArray, chunks: IndexArray, most: float = np.inf) -> float:
    """The least time of a microbatch in these chunks together. chunk_s: float64[2, s], as in ``least_in_chunks``. most:
    the most small layers."""
    return least_together(chunk_s[:, chunks], int(min(_small_layers(kinds, chunks), most)))


def _needed_layers(program: ChunkProgram, kinds: LayerKinds, room_s: FloatArray) -> FloatArray:
    """float64[p, kinds]: the least number of layers of each kind that a rank has, because the others have no time for
    them. room_s: float64[p], the most that a microbatch may take on each rank.
    """
    layer_s, stages = _layer_seconds(kinds), program.stage_of[..., None]
    may_have = np.any((kinds.first_chunk <= stages) & (stages <= kinds.last_chunk), axis=1)
    alone = kinds.first_chunk == kinds.last_chunk
    left_s = room_s - dot(may_have, alone * kinds.layers * layer_s)
    most = np.floor(np.maximum(left_s, 0.0)[:, None] / layer_s * (1.0 + _ROUNDING))
    most = may_have * np.where(alone, kinds.layers, np.minimum(most, kinds.layers))
    found: FloatArray = kinds.layers - (most.sum(axis=0) - most)
    return found


def _layer_seconds(kinds: LayerKinds) -> FloatArray:
    """float64[kinds]: the least time of a microbatch in a layer of each kind."""
    seconds = kinds.figures[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1)
    found: FloatArray = np.maximum(np.minimum.reduceat(seconds, kinds.option_start[:-1]), 1e-300)
    return found


def _contents(
    kinds: LayerKinds,
    stage: int,
    further_s: FloatArray,
    room_s: float,
    in_runs: IndexArray | None,
    most: int,
) -> IndexArray | None:
    """int64[contents, options]: the possible contents of a chunk, as numbers of layers with each option, if a
    microbatch takes at most ``room_s``. None if there are too many. further_s: float64[2, options], of this chunk.
    in_runs: int64[runs, kinds], the numbers of layers that a chunk of a chain can have. most: layers of a chunk.

    Of contents with the same numbers of layers of each kind, only those are kept that no other one beats in time and
    memory.
    """
    inside = (kinds.first_chunk <= stage) & (stage <= kinds.last_chunk)
    alone = inside & (kinds.first_chunk == kinds.last_chunk)
    room_s *= 1.0 + _ROUNDING
    found = np.zeros((1, kinds.figures.shape[0]), np.int64)
    for kind, (first, end) in enumerate(zip(*_ranges(kinds), strict=True)):
        if not inside[kind]:
            continue
        ones = np.eye(end - first, found.shape[1], first, dtype=np.int64)
        each = [found]
        for _ in range(int(kinds.layers[kind] if alone[kind] else min(kinds.layers[kind], most))):
            more = (each[-1][:, None] + ones).reshape(-1, found.shape[1])
            more = more[(_seconds(more, kinds.figures) <= room_s) & (more.sum(axis=1) <= most)]
            if more.shape[1] > kinds.layers.size:  # else no two have the same numbers of layers
                of_kinds = np.add.reduceat(more, kinds.option_start[:-1], axis=1)
                every = [dot(more, kinds.figures), _least_further(more, further_s)[:, None]]
                best = _undominated(np.hstack(every), of_kinds, _MOST_CONTENTS)
                if best is None:
                    return None
                more = more[best]
            each.append(more)
            if not more.size:
                break
        found = each[-1] if alone[kind] else np.concatenate(each)
        if in_runs is not None:
            found = found[_are_among(np.add.reduceat(found, kinds.option_start[:-1], axis=1), in_runs, kind + 1)]
        if len(found) > _MOST_CONTENTS:
            return None
    fitting: IndexArray = found[found.any(axis=1)]
    return fitting


def _least_of_small(kinds: LayerKinds, further_s: FloatArray) -> FloatArray:
    """The same where each chunk may have any small layers besides. Kinds that pay nothing by themselves still do not.
    further_s: float64[2, s, kinds], inf for such kinds."""
    chunk = np.arange(further_s.shape[1])[:, None]
    may = is_small(kinds) & (kinds.first_chunk <= chunk) & (chunk <= kinds.last_chunk)
    least = np.where(may, further_s, np.inf).min(axis=2, initial=np.inf)
    found: FloatArray = np.where(np.isfinite(further_s), np.minimum(further_s, least[..., None]), np.inf)
    return found


def _small_alone(kinds: LayerKinds, stage: int) -> IndexArray:
    """int64[.., kinds]: a chunk's contents of a single small layer. kinds: with one option each."""
    may = is_small(kinds) & (kinds.first_chunk <= stage) & (stage <= kinds.last_chunk) & (kinds.counted > 0)
    found: IndexArray = np.eye(may.size, dtype=np.int64)[may]
    return found


def _are_among(of_kinds: IndexArray, in_runs: IndexArray, first: int) -> BoolArray:
    """bool[contents]: whether some run has the same numbers of layers of the ``first`` kinds. of_kinds: int64[contents,
    kinds]."""
    both = np.concatenate([in_runs, of_kinds])[:, :first]
    _, row = np.unique(both, axis=0, return_inverse=True)
    found: BoolArray = np.isin(row.reshape(-1)[len(in_runs) :], row.reshape(-1)[: len(in_runs)])
    return found


def _at_rank(figures: FloatArray, apart: bool) -> FloatArray:
    """The figures on a rank; apart: whether the hub is on another one. Then layers pay for the hub's edges."""
    found = figures.copy()
    found[:, [FIGURE.forward_s, FIGURE.input_s]] += apart * figures[:, [FIGURE.from_hub_s]]
    found[:, FIGURE.to_hub_s] *= apart
    return found


def _together(
    listed: Sequence[IndexArray], kinds: LayerKinds, further_s: FloatArray, sync_s_per_byte: float
) -> tuple[IndexArray, ChunkContents]:
    """The contents of a rank's chunks: int64[contents, options], as in ``_contents``, and their figures. further_s:
    float64[2, v, options]."""
    layers, alike, seconds = list[IndexArray](), list[IndexArray](), list[FloatArray]()
    for turn, contents in enumerate(listed):
        takes = dot(contents, kinds.figures[:, [FIGURE.forward_s, FIGURE.input_s, FIGURE.weight_s, FIGURE.weights]])
        takes[:, :2] += _least_further(contents, further_s[:, turn])[:, None]
        takes[:, 3] *= sync_s_per_byte
        of_kinds = np.add.reduceat(contents, kinds.option_start[:-1], axis=1)
        _, of = np.unique(of_kinds, axis=0, return_inverse=True)
        order = np.lexsort((takes[:, PASSES], takes[:, :PASSES].sum(axis=1), of.reshape(-1)))
        layers.append(contents[order])
        seconds.append(takes[order])
        alike.append(np.searchsorted(of.reshape(-1)[order], of.reshape(-1)[order]))
    start = np.cumsum([0, *map(len, listed)])
    found = np.concatenate(layers)
    bytes_ = dot(found, kinds.figures[:, [FIGURE.activation, FIGURE.fixed]])
    return found, ChunkContents(
        start,
        np.concatenate([first + one for first, one in zip(start, alike, strict=False)]),
        np.add.reduceat(found, kinds.option_start[:-1], axis=1),
        np.concatenate(seconds),
        bytes_[:, 0].copy(),
        bytes_[:, 1].copy(),
    )


def _least_further(contents: IndexArray, further_s: FloatArray) -> FloatArray:
    """float64[contents]: the least that chunks send and receive beyond the least in either direction. contents:
    int64[contents, options]. further_s: float64[2, options]."""
    at_borders = np.where(contents > 0, further_s[:, None], np.inf).min(axis=-1)
    found: FloatArray = np.where(np.isfinite(at_borders), at_borders, 0.0).sum(axis=0)
    return found


def _seconds(contents: IndexArray, figures: FloatArray) -> FloatArray:
    """float64[contents], seconds of a microbatch."""
    found: FloatArray = dot(contents, figures[:, FIGURE.forward_s : FIGURE.weight_s + 1].sum(axis=1))
    return found


def _ranges(kinds: LayerKinds) -> tuple[list[int], list[int]]:
    """The first option of each kind, and the end of its options."""
    return kinds.option_start[:-1].tolist(), kinds.option_start[1:].tolist()


def _undominated(figures: FloatArray, of_kinds: IndexArray, most: int) -> IndexArray | None:
    """The undominated rows: those for which no other row with the same numbers of layers of each kind, int64[rows,
    kinds], is at most as large in every column. Of equal rows, the first one. None if there are more."""
    group = np.unique(of_kinds, axis=0, return_inverse=True)[1].reshape(-1)
    if group.max(initial=-1) >= most:
        return None  # each group has one
    kept = undominated_rows(figures, group, np.lexsort((figures.sum(axis=1), group)), most + 1)
    return None if kept.size > most else np.sort(kept)
