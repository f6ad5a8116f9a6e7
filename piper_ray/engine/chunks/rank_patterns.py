"""A bound for plans whose chunks have given layers: each rank chooses one pattern.

A pattern gives each layer of a rank an option. Only those count that fit the rank's memory, and of two patterns that
one which takes no longer anywhere. A linear program mixes the patterns of each rank (``pattern_program``), so it knows
that a rank's memory holds whole choices, which shares of options do not know. Plans are told apart by turns: either all
chunks of a turn are as fast as they can be, or rank r is the first one whose chunk is not. Such cases say much, because
a turn goes at the pace of its slowest chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels.chunk_bound import FIGURE, Paths
from piper_ray.engine.kernels.chunk_program import PASSES, ChunkProgram, critical_path, simulate_chunks
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_Bools = npt.NDArray[np.bool_]
_Seconds = tuple[FloatArray, FloatArray]

_MOST_PATTERNS = 1_024
"""Of a rank, before those that do not count are left out."""

_MOST_PARTS = 2_000
"""Open parts of a search."""

_ROUNDS_OF_A_PART = 60
"""Before its plans are told apart."""

_ROUNDING = 1e-10
"""Relative: what sums of prices and seconds may be off."""

_NEAR = 1e-6
"""A path that is longer than the batch by no more, relative, is not added; parts this near to 0 or 1 are whole."""

_A_LITTLE_SLOWER = 1.0 + 1e-9


class Rows(NamedTuple):
    """Paths in terms of patterns. added_s: float64[paths, patterns], what each pattern adds. fixed_s: float64[paths],
    what transfers add."""

    added_s: FloatArray
    fixed_s: FloatArray

    def of(self, which: IndexArray | slice) -> Rows:
        """Some of them."""
        return Rows(self.added_s[which], self.fixed_s[which])

    def with_more(self, other: Rows) -> Rows:
        """These and then others."""
        return Rows(np.concatenate([self.added_s, other.added_s]), np.concatenate([self.fixed_s, other.fixed_s]))


@dataclass(frozen=True)
class RankPatterns:
    """Of all ranks, one rank after the other.

    first: int64[p], the first of each rank. rank: int64[patterns]. passes_s: float64[patterns, v, PASSES], of the
    chunks of the rank by turn, without transfers. sync_s: float64[patterns]. options: of each pattern, the options of
    the rank's layers, which ``layers`` lists for each rank. crossing_s: float64[s], the least that each chunk sends and
    receives, in either direction. chunk_of: int64[n], of each layer.
    """

    program: ChunkProgram
    crossing_s: FloatArray
    first: IndexArray
    rank: IndexArray
    passes_s: FloatArray
    sync_s: FloatArray
    options: tuple[IndexArray, ...]
    layers: tuple[IndexArray, ...]
    chunk_of: IndexArray

    @classmethod
    def of(cls, task: Task, program: ChunkProgram, chunk_of: IndexArray) -> RankPatterns | None:
        """chunk_of: int64[n], of each layer the chunk. None if a rank has too many patterns, or none that fits."""
        figures, start = task.tables.figures(task.data_parallel_degree), task.tables.option_start
        listed: list[tuple[FloatArray, FloatArray, IndexArray]] = []
        layers: list[IndexArray] = []
        for rank, (first, end) in enumerate(pairwise(program.held_start.tolist())):
            own = np.flatnonzero(program.rank_of[chunk_of] == rank)
            turns = program.turn_of[chunk_of[own]]
            options = _combinations(figures, start, own, turns)
            if options is None:
                return None
            rows = figures[options]  # [patterns, layers, COLUMNS]
            by_turn = (turns == np.arange(program.stage_of.shape[1])[:, None]).astype(np.float64)
            in_chunks = np.einsum("tl,nlc->ntc", by_turn, rows)
            held = in_chunks[..., FIGURE.activation] @ program.held[first:end].T.astype(np.float64)
            fits = held.max(axis=1) + rows[..., FIGURE.fixed].sum(axis=1) <= task.memory_bytes
            seconds = in_chunks[fits][..., FIGURE.forward_s : FIGURE.weight_s + 1]
            sync_s = rows[fits][..., FIGURE.weights].sum(axis=1) * task.sync_s_per_byte
            kept = _undominated(np.column_stack([seconds.reshape(sync_s.size, -1), sync_s]))
            if not kept.size:
                return None
            listed.append((seconds[kept], sync_s[kept], options[fits][kept]))
            layers.append(own)
        counts = [one.size for _, one, _ in listed]
        return cls(
            program,
            _crossing_s(task, program, chunk_of),
            np.cumsum([0, *counts[:-1]]),
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([one for one, *_ in listed]),
            np.concatenate([one for _, one, _ in listed]),
            tuple(row for *_, one in listed for row in one),
            tuple(layers),
            chunk_of,
        )

    def choice(self, chosen: IndexArray) -> IndexArray:
        """int64[n], of each layer the option. chosen: int64[p], the pattern of each rank."""
        found = np.empty(self.chunk_of.size, np.int64)
        for layers, pattern in zip(self.layers, chosen.tolist(), strict=True):
            found[layers] = self.options[pattern]
        return found

    def rows(self, paths: Paths) -> Rows:
        """Of these paths."""
        counts = paths.counts[:, self.program.stage_of[self.rank]]  # [paths, patterns, v, PASSES]
        added: FloatArray = np.einsum("inkc,nkc->in", counts, self.passes_s)
        added += np.where(paths.rank[:, None] == self.rank, self.sync_s, 0.0)
        return Rows(added, paths.counts[:, :, :2].sum(axis=2) @ self.crossing_s)

    def seconds(self, shares: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of passes, float64[s, PASSES], and of synchronisation, float64[p], if patterns have these shares."""
        passes_s = np.zeros((self.crossing_s.size, PASSES))
        np.add.at(passes_s, self.program.stage_of[self.rank], shares[:, None, None] * self.passes_s)
        passes_s[:, :2] += self.crossing_s[:, None]
        return passes_s, np.bincount(self.rank, shares * self.sync_s, self.first.size).astype(np.float64)

    def bound_s(self, weights: FloatArray, rows: Rows, allowed: _Bools) -> float:
        """No plan of the allowed patterns takes less. weights: float64[paths], at least 0; their sum is 1.

        A batch takes as long as each path, so as long as their mean, which is a sum over ranks.
        """
        cost_s = np.where(allowed, weights @ rows.added_s, np.inf)
        total_s = float(np.minimum.reduceat(cost_s, self.first).sum() + weights @ rows.fixed_s)
        return total_s * (1.0 - _ROUNDING)

    def slow(self, allowed: _Bools) -> _Bools:
        """bool[patterns, v]: where a chunk takes longer than with another allowed pattern of the rank."""
        takes_s = self.passes_s.sum(axis=2)
        least_s = np.minimum.reduceat(np.where(allowed[:, None], takes_s, np.inf), self.first)
        found: _Bools = takes_s > least_s[self.rank] * _A_LITTLE_SLOWER
        return found


@dataclass(frozen=True)
class _Part:
    """Plans of the allowed patterns. rows: the paths that its prices are of, or its parent's. shares: the last
    fractional plan's, float64[patterns]. rounds: so far. is_best: whether no other round raises its bound."""

    lower_s: float
    allowed: _Bools
    rows: Rows
    shares: FloatArray
    rounds: int = 0
    is_best: bool = False


@dataclass
class PatternSearch:
    """``lower_s``: no batch of these patterns takes less; it rises. chosen: the patterns of the quickest plan so far,
    int64[p], which takes ``value_s`` if its transfers are the least. worked: as in ``ShareProgram``."""

    patterns: RankPatterns
    parts: list[_Part]
    lower_s: float = 0.0
    value_s: float = np.inf
    chosen: IndexArray | None = None
    worked: int = 0

    @classmethod
    def of(cls, patterns: RankPatterns, paths: Paths) -> PatternSearch:
        """paths: some that may be long."""
        count = patterns.rank.size
        return cls(patterns, [_Part(0.0, np.ones(count, np.bool_), patterns.rows(paths), np.zeros(count))])

    def copy(self) -> PatternSearch:
        """With a list of parts of its own."""
        return replace(self, parts=[*self.parts])

    def improve(self, rounds: int, target_s: float) -> None:
        """Looks at the part of the least bound: solves its program again and again with longer paths, then tells its
        plans apart. All that takes at most ``rounds`` solutions."""
        while self.parts and rounds > 0 and len(self.parts) <= _MOST_PARTS:
            index = min(range(len(self.parts)), key=lambda n: self.parts[n].lower_s)
            part, enough_s = self.parts[index], min(target_s, self.value_s)
            if part.lower_s >= enough_s * (1.0 - PROOF):
                break
            if part.is_best or part.rounds >= _ROUNDS_OF_A_PART:
                self.parts[index : index + 1] = self._told_apart(part)
            else:
                self.parts[index] = self._solved(part, min(rounds, _ROUNDS_OF_A_PART - part.rounds), enough_s)
                rounds -= self.parts[index].rounds - part.rounds
        least_s = min((part.lower_s for part in self.parts), default=np.inf)
        self.lower_s = max(self.lower_s, min(least_s, target_s, self.value_s))

    def _solved(self, part: _Part, rounds: int, enough_s: float) -> _Part:
        """After at most so many rounds more; at least one."""
        from piper_ray.engine.chunks.pattern_program import PatternProgram  # HiGHS is loaded where it is needed

        patterns, rows, shares, is_best, used = self.patterns, part.rows, part.shares, False, 0
        program = PatternProgram(patterns, part.allowed, rows)
        core_s: _Seconds | None = None
        while used < rounds and not is_best:
            used += 1
            solution = program.solve()
            if solution is None:
                is_best = True
                break
            shares = solution.shares
            if solution.batch_s >= enough_s:
                break
            self._keep(shares)
            now_s = patterns.seconds(shares)
            core_s = now_s if core_s is None else (0.5 * (core_s[0] + now_s[0]), 0.5 * (core_s[1] + now_s[1]))
            longest_s, longer = self._longest(now_s)
            is_best = longest_s <= solution.batch_s * (1.0 + _NEAR)
            if not is_best:
                longer = longer.with_more(self._longest(core_s)[1])
                program.add(longer)
                rows = rows.with_more(longer)
        self.worked += program.worked
        lower_s = part.lower_s
        if program.weights is not None:
            priced, new = slice(program.weights.size), slice(program.weights.size, None)
            lower_s = max(lower_s, patterns.bound_s(program.weights, rows.of(priced), part.allowed))
            rows = rows.of(np.flatnonzero(program.weights > 0.0)).with_more(rows.of(new))
        return _Part(lower_s, part.allowed, rows, shares, part.rounds + used, is_best)

    def _told_apart(self, part: _Part) -> list[_Part]:
        """Parts that hold all plans of this one together but those of one pattern for each rank: by the turn whose
        ranks are the least decided, else by a rank's pattern."""
        patterns, shares = self.patterns, part.shares
        slow = patterns.slow(part.allowed)
        slow_share = np.add.reduceat(shares[:, None] * slow, patterns.first)  # [p, v]
        undecided = np.minimum(slow_share, 1.0 - slow_share).sum(axis=0)
        turn = int(undecided.argmax())
        if undecided[turn] > _NEAR:
            late = slow[:, turn]
            ranks = range(patterns.first.size)
            first = [np.where(patterns.rank == rank, ~late, late & (patterns.rank < rank)) for rank in ranks]
            without = [late, *first]
        else:
            several = np.add.reduceat(part.allowed.astype(np.int64), patterns.first)[patterns.rank] > 1
            if not several.any():
                return []
            apart = np.where(several & part.allowed, np.abs(shares - 0.5), np.inf)
            one = int(apart.argmin())
            is_one = np.arange(shares.size) == one
            without = [is_one, (patterns.rank == patterns.rank[one]) & ~is_one]
        found = (replace(part, allowed=part.allowed & ~left_out, rounds=0, is_best=False) for left_out in without)
        return [x for x in found if np.logical_or.reduceat(x.allowed, patterns.first).all()]

    def _keep(self, shares: FloatArray) -> None:
        """Tries the plan in which each rank has the pattern of its largest share."""
        patterns = self.patterns
        by_rank = np.split(shares, patterns.first[1:])
        chosen = patterns.first + np.array([part.argmax() for part in by_rank])
        value_s, _ = self._longest(patterns.seconds((np.bincount(chosen, minlength=shares.size)).astype(np.float64)))
        if value_s < self.value_s:
            self.value_s, self.chosen = value_s, chosen

    def _longest(self, seconds: _Seconds) -> tuple[float, Rows]:
        """What a batch takes, and its longest paths: two where there are several."""
        program, (passes_s, sync_s) = self.patterns.program, seconds
        end_s = np.empty(program.kind.size + 1)
        batch_s = simulate_chunks(program, passes_s, sync_s, end_s)
        counts, rank = np.zeros((2, *passes_s.shape)), np.empty(2, np.int64)
        for n in range(2):
            rank[n] = critical_path(program, sync_s, end_s, n == 0, counts[n])
        differ = rank[0] != rank[1] or bool((counts[0] != counts[1]).any())
        return float(batch_s), self.patterns.rows(Paths(counts[: 1 + differ], rank[: 1 + differ]))


def _combinations(figures: FloatArray, start: IndexArray, layers: IndexArray, turns: IndexArray) -> IndexArray | None:
    """int64[patterns, layers]: all choices of options, where layers of a chunk that are alike come in one order only.
    None if they are too many."""
    found = np.zeros((1, 0), np.int64)
    groups: dict[tuple[int, bytes], list[int]] = {}
    for n, (x, turn) in enumerate(zip(layers.tolist(), turns.tolist(), strict=True)):
        groups.setdefault((turn, figures[start[x] : start[x + 1]].tobytes()), []).append(n)
    for members in groups.values():
        options = int(start[layers[members[0]] + 1] - start[layers[members[0]]])
        ways = np.array([*combinations_with_replacement(range(options), len(members))], np.int64)
        if len(found) * len(ways) > _MOST_PATTERNS:
            return None
        ways += start[layers[members]]
        found = np.column_stack([np.repeat(found, len(ways), axis=0), np.tile(ways, (len(found), 1))])
    placed = np.empty_like(found)
    placed[:, [n for members in groups.values() for n in members]] = found
    return placed


def _undominated(figures: FloatArray) -> IndexArray:
    """Rows that no other one is at most as large as everywhere; of equal rows the first."""
    kept: list[int] = []
    for n in np.argsort(figures.sum(axis=1), kind="stable").tolist():
        if not (figures[kept] <= figures[n]).all(axis=1).any():
            kept.append(n)
    return np.array(sorted(kept), np.int64)


def _crossing_s(task: Task, program: ChunkProgram, chunk_of: IndexArray) -> FloatArray:
    """As in ``RankPatterns``."""
    found = np.zeros(program.rank_of.size)
    for tail, head, sent_s, received_s in task.tables.edge_seconds():
        a, b = chunk_of[tail], chunk_of[head]
        if program.rank_of[a] != program.rank_of[b]:
            found[a] += sent_s
            found[b] += received_s
    return found
